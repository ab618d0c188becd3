"""`Server`, llama-server in this package's process, with real clients, and
`ServerProcess`, the same in a process of its own, which never outlives the one who
started it. Each server here is in a process of its own, as its globals want it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import httpx
import numpy as np
import pytest

from helpers.models import rewritten
from helpers.processes import own_process, run_python
from helpers.refusals import parse_options, refusals, refused
from helpers.servers import LONGER, Service, complete, free_port, needed, words
from helpers.waiting import wait_until, wait_until_still
from moeoff import Llama, MoeoffError, Server
from moeoff.budget.loss_contract import SECTION, Candidate, LossContract
from moeoff.experts.profile import Profile, profile_path
from moeoff.gguf.model_index import ModelIndex
from moeoff.routing.trace import Trace
from moeoff.server.process import ServerProcess


def test_documents_are_ranked(demo):
    """By a model that was not made for it: the route works, whatever it finds."""
    with Service(demo, expert_memory=4 << 20, n_ctx=512, args=["--rerank"]) as server:
        answer = server.post(
            "/rerank", {"query": "a dog", "documents": ["a dog barks", "seven apples"]}
        ).json()
    ranks = answer["results"]
    assert {one["index"] for one in ranks} == {0, 1}
    assert ranks[0]["relevance_score"] > ranks[1]["relevance_score"]


def test_answers_say_what_was_left_out(demo, tmp_path):
    """Within a bound, for each of two that are decoded together; `/metrics` counts it."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    rules = [Candidate("original", 0.15, share, 0.0, 0.0, 0.0, 0.5) for share in (0.25, 0.5, 0.75)]
    Profile.write(
        profile_path(model),
        ModelIndex.read(model),
        {SECTION: LossContract(0, 1, 32, 100, 64, tuple(rules)).to_section()},
    )
    with (
        Service(str(model), expert_memory=5 << 20, n_ctx=1024, parallel=2, max_loss=0.01) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        answers = list(
            pool.map(
                lambda text: server.complete(text, 64),
                ["The heron stood", "Count to a hundred, slowly:"],
            )
        )
        counted = server.metrics()['moeoff_expert_uses_total{precision="none"}']
    blocks = [answer.moeoff for answer in answers]
    assert all(block["skipped"] > 10 for block in blocks)
    assert counted == pytest.approx(sum(block["skipped"] for block in blocks), abs=2)


@pytest.mark.cores
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_compute_threads_are_bound_while_an_answer_is_computed(demo, tmp_path):
    """Each to a core of its own; in between the thread that serves is free again
    (docs/internals/design.md).
    """
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)[:2]
    os.sched_setaffinity(0, cores)  # what the server inherits
    try:
        own_claims = (
            "from moeoff.llamacpp import threads\nthreads.machine_wide_file = lambda name:"
            f" {str(tmp_path / 'cores.lock')!r}\n"
        )
        # whatever others on this machine compute
        server = Service(demo, own_claims, n_ctx=1024, n_threads=2)
    finally:
        os.sched_setaffinity(0, mine)

    def bound() -> list[int]:
        numbers = []
        for task in os.listdir(f"/proc/{server.process.pid}/task"):
            with contextlib.suppress(OSError):
                allowed = os.sched_getaffinity(int(task))
                numbers += allowed if len(allowed) == 1 else []
        return sorted(numbers)

    with server, ThreadPoolExecutor(1) as pool:
        server.complete("The heron stood", 8)
        wait_until(lambda: len(bound()) == 1)  # OpenMP's thread keeps its core
        seen = threading.Event()

        def write() -> None:
            while not seen.is_set():
                server.complete("Count to a hundred, slowly:", 512)

        writing = pool.submit(write)
        try:
            wait_until(lambda: bound() == cores or writing.done())
            assert not writing.done()
        finally:
            seen.set()
        writing.result()
        wait_until(lambda: len(bound()) == 1)


def test_a_trace_tells_where_a_conversation_begins_alone(demo, tmp_path):
    """Answers that are written at once are decoded together; a slot's next conversation
    begins where it leaves what it had computed.
    """
    with Service(
        demo,
        expert_memory=4 << 20,
        n_ctx=2048,
        parallel=2,
        strategy="score",
        trace=str(tmp_path / "t"),
    ) as server:
        # of one request: both begin before either has ended
        server.complete(["The heron stood", "Count to a hundred, slowly:"], 96)
        for text in ("The heron stood in the water", "The heron stood on one leg"):
            server.complete(text, 4)
        server.stop()
    trace = Trace.read(tmp_path / "t")
    together = [n for n, e in enumerate(trace.events) if e.decode and len(e.ids) == 2]
    assert len(together) > trace.model.n_gates * 24
    starts = np.flatnonzero(trace.starts)
    assert len(starts) == 3 and starts[0] < together[0] and together[-1] < starts[1]


def test_budget_moves_while_answers_are_written(grown):
    code = textwrap.dedent("""
        import itertools, sys, threading
        import httpx
        import moeoff
        least = int(sys.argv[2])
        with moeoff.Server(sys.argv[1], port=0, memory=f"{least + 90}M", n_ctx=512) as server:
            body = {"prompt": "One two", "n_predict": 60, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
            texts = []
            ask = lambda: texts.append(httpx.post(f"{server.url}/completion", json=body, timeout=300).json()["content"])
            thread = threading.Thread(target=ask)  # nothing was computed before
            thread.start()
            for more in itertools.cycle((60, 20, 90)):
                server.set_memory(f"{least + more}M")
                if more == 90 and not thread.is_alive():
                    break
            ask()
            try:
                server.set_memory("20M")
            except moeoff.BudgetError as error:
                print("refused")
            ask()
            print(len(set(texts)), len(texts), server.stats().budget_bytes >> 20)
    """)
    least = needed(grown, n_ctx=512)
    assert run_python(code, grown, least).split() == ["refused", "1", "3", str(least + 90)]


def test_a_model_that_is_written_to(demo, tmp_path):
    """An error for those who ask, also when it has its old length and time, and not for
    the next ones once it is replaced.
    """
    model = shutil.copy(demo, tmp_path / "model.gguf")
    before = os.stat(model)
    with Service(str(model), expert_memory=4 << 20, n_ctx=512) as server:
        expected = server.complete("The heron", 4).choices[0].text
        with open(model, "ab") as file:
            file.write(b"x")
        for _ in range(2):
            answer = server.post("/v1/completions", {"prompt": "The heron", "max_tokens": 4})
            assert answer.status_code == 500 and "model.gguf" in answer.json()["error"]["message"]
            os.truncate(model, before.st_size)
            os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(shutil.copy(demo, tmp_path / "new.gguf"), model)
        assert server.complete("The heron", 4).choices[0].text == expected


@own_process
def test_one_at_a_time_and_each_once(demo, tmp_path):
    """A refused server blocks no later one, and none leaves a descriptor or a thread
    behind: started, refused, or never started. After it a model's refusal has
    llama.cpp's reason again, which the server's log takes for itself.
    """

    def make() -> Server:
        return Server(demo, port=0, expert_memory="4M", n_ctx=512, kv_disk=0)

    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    start = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread"))
    with start, pytest.raises(MoeoffError, match="no more threads$"):
        make().start()
    with make() as first, first as same:
        assert same is first
        with pytest.raises(MoeoffError, match="^a server runs in this process already"):
            make().start()
    before = left()
    with pytest.raises(MoeoffError, match="^this server was started before"):
        first.start()
    with make() as again:
        assert again.url.startswith("http")
    wait_until(lambda: left() == before, 60)
    bad = rewritten(demo, tmp_path / "refused.gguf", {"qwen2moe.block_count": 11})
    with pytest.raises(MoeoffError, match="llama.cpp cannot load it: wrong number of tensors"):
        Llama(bad, expert_memory="4M", n_ctx=512)


def test_a_request_that_comes_too_early_waits_outside(demo):
    """Until everything is allocated a server says 503, also to a request that is so
    long that it borrows memory.
    """
    slow = textwrap.dedent("""
        import time
        from moeoff.server import server
        ready = server.Server._ready
        def slow(self, *args):
            time.sleep(1)
            return ready(self, *args)
        server.Server._ready = slow
    """)
    port, answers = free_port(), []
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(Service, demo, slow, port=port, expert_memory=4 << 20, n_ctx=512)
        while not answers or answers[-1].status_code == 503:
            if starting.done():
                starting.result()  # which may raise
            with contextlib.suppress(httpx.TransportError):
                answers.append(
                    httpx.post(
                        f"http://127.0.0.1:{port}/tokenize",
                        json={"content": "," * 200_000},
                        timeout=300,
                    )
                )
        with starting.result():
            assert {answer.status_code for answer in answers[:-1]} == {503}
            assert answers[-1].status_code == 200


@pytest.mark.parametrize("given, code, words", refusals("Server"))
def test_what_cannot_be_is_refused_before_the_port_is_open(demo, given, code, words):
    with refused(code, words):
        Server(demo, port=0, **parse_options(given))


def test_a_server_that_is_open_to_everyone_warns(demo, tmp_path):
    open_to_all = {"host": "0.0.0.0", "expert_memory": "4M", "n_ctx": 512}
    (tmp_path / "keys").write_text("one\ntwo\n")
    assert any(
        "warning: everyone who reaches 0.0.0.0" in remark
        for remark in Server(demo, **open_to_all).remarks
    )
    for key in ({"api_key": "x"}, {"api_key_file": str(tmp_path / "keys")}):
        assert not any("warning" in remark for remark in Server(demo, **key, **open_to_all).remarks)


@own_process
def test_a_signal_that_another_thread_gets_ends_the_wait(demo):
    def end(*_) -> None:
        raise SystemExit(0)

    def raise_here() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    with Server(demo, port=0, expert_memory="4M", n_ctx=512) as server, pytest.raises(SystemExit):
        threading.Timer(0.2, raise_here).start()
        server.wait()


def test_a_stop_while_it_ends_by_itself(demo):
    """The serving thread may have closed the buffer whose computation `stop` cancels."""
    engine = Server(demo, port=0, expert_memory="4M", n_ctx=512).engine
    engine.close()
    engine.buffer.set_cancelled(True)


def test_progress_within_a_batch(grown):
    """A batch takes seconds, and the server reports its progress every quarter of a
    second.
    """
    options = {"n_ctx": 4096, "parallel": 1, "n_batch": 2048, "n_ubatch": 2048}
    options |= {"n_threads": 1, "n_threads_batch": 1, "args": LONGER}
    body = {"prompt": words(1, 1900), "n_predict": 1, "stream": True, "return_progress": True}
    processed = []
    with (
        Service(grown, expert_memory=64 << 20, **options) as server,
        httpx.stream("POST", f"{server.url}/completion", json=body, timeout=300) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {") and (
                progress := json.loads(line[6:]).get("prompt_progress")
            ):
                processed.append(progress["processed"])
    assert processed == sorted(processed) and processed[0] == 0 and processed[-1] == 1900
    assert any(0 < n < 1900 for n in processed), processed


@pytest.mark.slow
def test_a_stream_that_nobody_listens_to_ends(demo):
    """Though it could be resumed: of a browser's tab that was closed."""
    with Service(
        demo,
        expert_memory=400 << 10,
        n_ctx=8192,
        parallel=1,
        args=["--override-kv", "qwen2moe.context_length=int:8192"],
    ) as server:
        body = {"prompt": words(1, 20), "n_predict": -1, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST",
            f"{server.url}/completion",
            json=body,
            headers={"X-Conversation-Id": "a"},
            timeout=300,
        ) as answer:
            next(answer.iter_lines())
        wait_until_still(lambda: server.metrics()["moeoff_decoded_tokens_total"], 3)
        assert 0 < server.metrics()["moeoff_decoded_tokens_total"] < 8000


@pytest.mark.parametrize("cache", ["q8_0", pytest.param("f16", marks=pytest.mark.slow)])
def test_a_slots_file_that_the_context_has_no_room_for_is_refused(demo, tmp_path, cache):
    """Also with states of another length for each token; and the server goes on."""
    prompt = words(1, 700)
    options = {
        "expert_memory": 2 << 20,
        "parallel": 1,
        "type_k": cache,
        "type_v": cache,
        "args": ["--slot-save-path", str(tmp_path), *LONGER],
    }

    def answer(url: str) -> str:
        return complete(url, prompt[:400], n_predict=4, id_slot=0)["content"]

    with Service(demo, n_ctx=1024, **options) as server:
        expected = answer(server.url)
        complete(server.url, prompt, n_predict=1, id_slot=0)
        assert server.post("/slots/0?action=save", {"filename": cache}).json()["n_saved"] >= 700
    with Service(demo, n_ctx=512, **options) as server:
        assert answer(server.url) == expected
        refused = server.post("/slots/0?action=restore", {"filename": cache})
        assert refused.status_code == 400
        assert "Unable to restore slot: No available space" in refused.json()["error"]["message"]
        assert answer(server.url) == expected


def test_prompts_take_memory_from_the_experts_when_they_are_kept(grown):
    """And not when they are computed."""
    options = {"n_ctx": 2048, "parallel": 1, "cache_ram": "40M", "args": LONGER}
    with Service(grown, memory=needed(grown, **options) + 60 << 20, **options) as server:

        def after(seed: int) -> float:
            complete(server.url, words(seed, 1500), n_predict=8)
            wait_until_still(lambda: server.metrics()["moeoff_expert_cache_bytes"])
            return server.metrics()["moeoff_expert_cache_bytes"]

        arenas = [after(seed) for seed in range(2)]
        assert arenas[0] - arenas[1] > 1 << 20


def test_without_a_limit_prompts_take_what_experts_can_do_without(grown):
    options = {"n_ctx": 2048, "parallel": 1, "cache_ram": "-1", "kv_disk": 0, "args": LONGER}
    memory = needed(grown, **options) + 90 << 20
    with Service(grown, memory=memory, **options) as server:
        for seed in range(3):
            complete(server.url, words(seed, 1000))
        assert complete(server.url, [*words(0, 1000), 5])["timings"]["cache_n"] > 990
        assert server.peak < memory


@own_process
def test_metrics_leave_no_observer(demo):
    """Where all experts are resident nothing observes events, before and after a look
    at them.
    """
    with Server(demo, port=0, memory="1G", n_ctx=512, kv_disk=0) as server:
        httpx.get(f"{server.url}/metrics", timeout=300).raise_for_status()
        complete(server.url, [1, 2, 3], n_predict=8)
        counts, stats = server.engine.buffer.gate_stats(), server.stats()
        assert server.engine.driver.observers == [] and stats.driver_seconds == 0
        assert counts["demand_misses"].sum() == stats.demand_misses > 0


def test_idle_brings_in_what_prompts_need(demo, monkeypatch, tmp_path):
    """An idle server preloads experts of prompts before the first request, and where
    the arena is full in the place of experts that only the answer used.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Service(
        demo, warm=True, expert_memory=6 << 20, n_ctx=2048, strategy="score", args=LONGER
    ) as server:
        prompt = words(1, 24)
        wait_until(lambda: server.metrics()["moeoff_expert_read_bytes_total"] > 4 << 20)
        complete(server.url, prompt, n_predict=400, cache_prompt=False)
        assert server.metrics()["moeoff_expert_evictions_total"] > 0
        wait_until(lambda: server.metrics()["moeoff_prefetch_issued_total"] > 0)
        wait_until_still(lambda: server.metrics()["moeoff_expert_read_bytes_total"])
        complete(server.url, prompt, cache_prompt=False)
        assert server.metrics()["moeoff_prefetch_useful_total"] > 0


def test_budget_is_kept_under_clients(grown):
    options = {
        "n_ctx": 4096,
        "parallel": 4,
        "args": LONGER,
    }
    budget = needed(grown, **options) + 25 << 20
    with Service(grown, memory=budget, **options) as server:
        with ThreadPoolExecutor(16) as pool:
            answers = list(
                pool.map(lambda n: server.ask("word " * (100 + 20 * n), max_tokens=16), range(16))
            )
        assert all(answer.usage.completion_tokens for answer in answers)
        assert server.peak <= budget


# in a process of its own

PARENT = """
import sys, time
from moeoff.server.process import ServerProcess

server = ServerProcess(sys.argv[1], memory="200M", n_threads=1)
print(server.popen.pid, server.socket, flush=True)
time.sleep(600)
"""


def test_answers_and_stops(demo):
    server = ServerProcess(demo, memory="200M", n_threads=1)
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=server.socket), base_url="http://server", timeout=300
    ) as client:
        reply = client.post("/v1/completions", json={"prompt": "One, two", "max_tokens": 4})
    assert reply.json()["usage"]["completion_tokens"] == 4 and server.popen.poll() is None
    server.stop()
    server.stop()
    assert not os.path.exists(os.path.dirname(server.socket))
    assert server.ending() == "ended with code 0"


def test_what_is_wrong_is_said_here(demo):
    with pytest.raises(MoeoffError, match="odd"):
        ServerProcess(demo, memory="200M", odd=1)


def test_ends_with_a_parent_that_is_killed(demo):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, demo], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid, socket = parent.stdout.readline().split()
        assert os.path.exists(socket)
        for n in range(5000):  # that take a while to be removed
            Path(socket).with_name(str(n)).touch()
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert not os.path.exists(os.path.dirname(socket))


def test_a_server_that_is_killed_is_noticed(demo):
    server = ServerProcess(demo, memory="200M", n_threads=1)
    server.popen.kill()
    assert server.ending() == "been ended by SIGKILL"
    server.stop()
