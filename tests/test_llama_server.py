"""`moeoff.server.Server`: llama-server in this package's process, with real clients; each server in a process of its own, as its globals want it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import numpy as np
import openai
import pytest

from moeoff.simulate import Trace

SCRIPT = """
import json, signal, sys, threading
from moeoff.server.server import Server

server = Server(sys.argv[1], port=0, **json.loads(sys.argv[2]))
done = threading.Event()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: done.set())
with server:
    print(server.url, flush=True)
    done.wait()
print("stopped", flush=True)
"""


class Served:
    """A process that serves until it is told to stop."""

    def __init__(self, model: str, **options):
        command = [sys.executable, "-c", SCRIPT, model, json.dumps(options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http"), self.process.communicate()[1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=options.get("api_key", "none"), max_retries=0, timeout=60)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def complete(self, text: str, n: int):
        return self.client.completions.create(model="x", prompt=text, max_tokens=n, temperature=0, extra_body={"ignore_eos": True})

    def ask(self, text: str, **options):
        return self.client.chat.completions.create(model="x", messages=[{"role": "user", "content": text}], temperature=0, **{"max_tokens": 24} | options)


@pytest.fixture(scope="module")
def served(demo):
    with Served(demo, expert_memory=4 << 20, n_ctx=1024) as it:
        yield it


def test_an_answer_and_what_it_took(served):
    answer = served.ask("What is 2 + 3?")
    assert answer.choices[0].message.content
    took = answer.model_extra["moeoff"]
    assert took["hits"] + took["misses"] > 0 and took["bytes_read"] >= 0 and "timings" in answer.model_extra


def test_texts_are_those_of_one_model_alone(served, demo):
    import moeoff

    with moeoff.Llama(demo, n_ctx=1024, expert_memory=4 << 20, flash_attn=True) as llm:
        expected = llm.create_completion("The heron stood", max_tokens=24, temperature=0)["choices"][0]["text"]
    found = served.client.completions.create(model="x", prompt="The heron stood", max_tokens=24, temperature=0).choices[0].text
    assert found == expected


def test_several_at_once(served):
    questions = ["What is 2 + 3?", "How many legs has a spider?", "Ben has 4 apples and eats one.", "Count to five."]
    alone = [served.ask(q).choices[0].message.content for q in questions]
    together: list[str | None] = [None] * len(questions)

    def ask(i: int) -> None:
        together[i] = "".join(chunk.choices[0].delta.content or "" for chunk in served.ask(questions[i], stream=True) if chunk.choices)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(a == b for a, b in zip(alone, together)) >= len(questions) - 1  # batches round differently


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


def test_json_schema(served):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    answer = served.ask("A number as JSON", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, max_tokens=32)
    assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)


def test_metrics(served):
    text = httpx.get(f"{served.url}/metrics").text
    assert "moeoff_expert_hits_total" in text and "llamacpp:tokens_predicted_total" in text


def test_stop_in_the_middle_of_streams(demo):
    with Served(demo, expert_memory=1 << 20, n_ctx=2048) as it:
        ended = []

        def stream() -> None:
            try:
                for _ in it.ask("Tell a long story.", stream=True, max_tokens=2000):
                    pass
                ended.append("end")
            except (openai.APIError, httpx.HTTPError):
                ended.append("error")

        threads = [threading.Thread(target=stream) for _ in range(6)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while "llamacpp:requests_processing 4" not in httpx.get(f"{it.url}/metrics").text and time.monotonic() < deadline:
            pass
        it.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        for thread in threads:
            thread.join(10)
        assert len(ended) == 6 and time.monotonic() - started < 4
        assert it.process.wait(10) == 0


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
                                           ({"parallel": 0}, "at least 1")])  # fmt: skip
def test_what_cannot_be_is_refused_before_the_port_is_open(demo, options, said):
    command = [sys.executable, "-c", SCRIPT, demo, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1] and done.stdout == ""


def test_budget_is_kept_under_clients(grown):
    with Served(grown, memory="180M", n_ctx=4096, parallel=4) as it:
        threads = [threading.Thread(target=lambda n=n: it.ask("word " * (100 + 50 * n), max_tokens=16)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with open(f"/proc/{it.process.pid}/status") as file:
            peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
        assert peak <= 180 << 20
