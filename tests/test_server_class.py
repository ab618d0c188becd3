"""`moeoff.server.Server`: llama-server in this package's process, with real clients; each server in a process of its own, as its globals want it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from helpers.served import SCRIPT, Served
from helpers.waiting import wait_until
from moeoff.budget.loss_contract import SECTION, Candidate, LossContract
from moeoff.budget.statistics import Estimate
from moeoff.companion.profile import Profile, profile_path
from moeoff.gguf.layout import Layout
from moeoff.simulate import Trace


@pytest.fixture(scope="module")
def served(demo):
    with Served(demo, expert_memory=4 << 20, n_ctx=1024) as it:
        yield it


def test_texts_are_those_of_one_model_alone(served, demo):
    import moeoff

    with moeoff.Llama(demo, n_ctx=1024, expert_memory=4 << 20, flash_attn=True) as llm:
        expected = llm.create_completion("The heron stood", max_tokens=24, temperature=0)["choices"][0]["text"]
    found = served.client.completions.create(model="x", prompt="The heron stood", max_tokens=24, temperature=0).choices[0].text
    assert found == expected


def test_answers_say_what_was_rerouted(demo, tmp_path):
    """Within a bound, for each of two that are decoded together; `/metrics` counts it."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    one = Estimate(0.0, 0.0, 0.0)
    rules = [Candidate("keep", 1.0, 1.0, 0.0, True, one, one, one, 0.5, 0.0, 0.0, reroute=0.2, resident=share) for share in (0.25, 0.5, 0.75)]
    Profile.write(profile_path(model), Layout.read(model), {SECTION: LossContract(0, 1, 32, 100, 64, tuple(rules)).to_section()})
    with Served(str(model), expert_memory=5 << 20, n_ctx=1024, parallel=2, max_loss=0.01) as it, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda text: it.complete(text, 64), ["The heron stood", "Count to a hundred, slowly:"]))
        metrics = httpx.get(f"{it.url}/metrics").text
    said = [answer.moeoff for answer in answers]
    assert all(block["rerouted"] > 10 and 0 < block["rerouted_margin"] <= 0.2 for block in said)
    counted = next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith("moeoff_expert_rerouted_total "))
    assert counted == pytest.approx(sum(block["rerouted"] for block in said), abs=2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_compute_threads_are_bound_while_an_answer_is_computed(demo, tmp_path):
    """Each to a core of its own; in between the thread that serves is free again (docs/guides/threads.md)."""
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)[:2]
    os.sched_setaffinity(0, cores)  # what the server inherits
    try:
        own_claims = f"from moeoff import threads\nthreads.machine_wide_file = lambda name: {str(tmp_path / 'cores.lock')!r}\n"
        it = Served(demo, own_claims, n_ctx=1024, n_threads=2)  # whatever others on this machine compute
    finally:
        os.sched_setaffinity(0, mine)

    def bound() -> list[int]:
        found = []
        for task in os.listdir(f"/proc/{it.process.pid}/task"):
            with contextlib.suppress(OSError):
                allowed = os.sched_getaffinity(int(task))
                found += allowed if len(allowed) == 1 else []
        return sorted(found)

    with it, ThreadPoolExecutor(1) as pool:
        it.complete("The heron stood", 8)
        wait_until(lambda: len(bound()) == 1)  # OpenMP's thread keeps its core
        answer = pool.submit(it.complete, "Count to a hundred, slowly:", 512)
        wait_until(lambda: bound() == cores)
        answer.result()
        wait_until(lambda: len(bound()) == 1)


def test_a_trace_tells_the_slots_apart(demo, tmp_path):
    """Answers that are written at once are decoded together; a slot's next conversation begins where it leaves what it had computed."""
    with Served(demo, expert_memory=4 << 20, n_ctx=2048, parallel=2, strategy="score", trace=str(tmp_path / "t")) as it:
        texts = ["The heron stood", "Count to a hundred, slowly:"]
        threads = [threading.Thread(target=lambda text=text: it.complete(text, 96)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for text in ("The heron stood in the water", "The heron stood on one leg"):
            it.complete(text, 4)
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(20) == 0
    trace = Trace.read(tmp_path / "t")
    together = [e for e in trace.events if e.decode and len(e.ids) == 2]
    assert len(together) > trace.model.n_gates * 24 and all(sorted(e.sequences.tolist()) == [0, 1] for e in together)
    of_slot = [
        sum(int(np.sum(e.sequences == slot)) if e.sequences is not None else len(e.ids) * (slot == 0) for e in trace.events if e.gate == 0) for slot in (0, 1)
    ]
    assert min(of_slot) > 96 and sum(of_slot) == trace.n_tokens
    begun = [trace.begins.get(n, [0, 1]) for n in np.flatnonzero(trace.starts)]
    assert len(begun) in (3, 4) and begun[-2] == begun[-1]  # the last two share a beginning with what their slot holds; the first two may begin at once


def test_budget_moves_while_answers_are_written(demo):
    code = textwrap.dedent("""
        import sys, threading
        import httpx
        import moeoff
        with moeoff.Server(sys.argv[1], port=0, memory="300M", n_ctx=512) as server:
            body = {"prompt": "One two", "n_predict": 150, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
            texts = []
            ask = lambda: texts.append(httpx.post(f"{server.url}/completion", json=body, timeout=60).json()["content"])
            ask()
            thread = threading.Thread(target=ask)
            thread.start()
            for size in ("200M", "150M", "300M") * 5:
                server.set_memory(size)
            thread.join()
            try:
                server.set_memory("20M")
            except moeoff.BudgetError as error:
                print("refused")
            ask()
            print(len(set(texts)), len(texts), server.stats().budget_bytes >> 20)
    """)
    done = subprocess.run([sys.executable, "-c", code, demo], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["refused", "1", "3", "300"], done.stderr


def test_a_model_that_is_written_to(demo, tmp_path):
    """An error for those who ask, and not for the next ones once it is as it was."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    before = os.stat(model)
    with Served(str(model), expert_memory=4 << 20, n_ctx=512) as it:
        expected = it.complete("The heron", 4).choices[0].text
        with open(model, "ab") as file:
            file.write(b"x")
        with pytest.raises(openai.InternalServerError, match="model.gguf"):
            it.complete("The heron", 4)
        os.truncate(model, before.st_size)
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert it.complete("The heron", 4).choices[0].text == expected


def test_two_in_one_process_are_refused(demo):
    code = textwrap.dedent("""
        import sys
        from moeoff.server.server import Server
        with Server(sys.argv[1], port=0, expert_memory="4M", n_ctx=512):
            try:
                Server(sys.argv[1], port=0, expert_memory="4M", n_ctx=512).start()
            except Exception as error:
                print(type(error).__name__, error)
        with Server(sys.argv[1], port=0, expert_memory="4M", n_ctx=512) as again:
            print(again.url)
    """)
    done = subprocess.run([sys.executable, "-c", code, demo], capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert first.startswith("MoeoffError a server runs in this process already") and second.startswith("http"), done.stderr


@pytest.mark.parametrize("options, said", [({"memory": "1M"}, "too small"), ({"args": ["--sleep-idle-seconds", "3"]}, "cannot be passed"),
                                           ({"parallel": 0}, "at least 1"), ({"spec_type": "nonsense"}, "unknown speculative type"),
                                           ({"args": ["--nonsense"]}, "--nonsense: llama-server has no such option"),
                                           ({"args": ["--top_k", "many"]}, "--top_k many: llama-server does not take this"),
                                           ({"args": ["--top-k"]}, "--top-k needs a value")])  # fmt: skip
def test_what_cannot_be_is_refused_before_the_port_is_open(demo, options, said):
    command = [sys.executable, "-c", SCRIPT, demo, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1] and done.stdout == ""


def test_a_signal_that_another_thread_gets_ends_the_wait(demo):
    code = textwrap.dedent("""
        import signal, sys, threading
        from moeoff.server.server import Server

        def end(*_):
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, end)
        with Server(sys.argv[1], port=0, expert_memory="4M", n_ctx=512) as server:
            threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
            server.wait()
    """)
    subprocess.run([sys.executable, "-c", code, demo], check=True, timeout=30)


def test_budget_is_kept_under_clients(grown):
    with Served(grown, memory="260M", n_ctx=4096, parallel=4, args=["--override-kv", "qwen2moe.context_length=int:4096"]) as it:
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda n: it.ask("word " * (100 + 20 * n), max_tokens=16), range(16)))
        assert all(answer.usage.completion_tokens for answer in answers)
        with open(f"/proc/{it.process.pid}/status") as file:
            peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
        assert peak <= 260 << 20
