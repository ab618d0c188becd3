"""`moeoff.server.Server`: llama-server in this package's process, with real clients; each server in a process of its own, as its globals want it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from helpers.served import SCRIPT, Served


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
    with Served(grown, memory="260M", n_ctx=4096, parallel=4) as it:
        threads = [threading.Thread(target=lambda n=n: it.ask("word " * (100 + 50 * n), max_tokens=16)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with open(f"/proc/{it.process.pid}/status") as file:
            peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
        assert peak <= 260 << 20
