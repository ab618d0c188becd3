"""A server in this process outlives every chat template: another program runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import moeoff
from helpers.chat_templates import with_template
from helpers.served import Served
from helpers.waiting import wait_until
from moeoff.server import library

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LATER = "{% if messages[-1].content == 'now' %}WHAT{% endif %}" + PLAIN  # not of those that are tried at the start
CIRCLE = "{% set a = namespace() %}{% set a.x = a %}{{ a|tojson }}"
HOSTILE = {
    CIRCLE: "ends the program",
    "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}": "ends the program",
    "{{ 1 is divisibleby 0 }}": "ends the program",
    "{{" + "(" * 100_000 + "1" + ")" * 100_000 + "}}": "ends the program",
    "{{ 'x' * 99999999999 }}": "too much memory",
    "{{ range(999999999999)|length }}": "too much memory",
    "{% for m in messages %}{{ 'xxxxxxxxxx' * 10000 }}{% endfor %}": "it makes 300000 characters of a few words",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}": "it takes longer than 10 s",
}


def ask(url: str, content: str = "Hi") -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "temperature": 0}, timeout=60)


def programs(pid: int) -> list[int]:
    return [int(line) for line in subprocess.run(["pgrep", "-P", str(pid), "-f", "moeoff-templates"], capture_output=True, text=True).stdout.split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_model_is_refused_for_one(demo, tmp_path, template):
    with pytest.raises(moeoff.ModelError, match=f"its chat template cannot be run: .*{HOSTILE[template]}"):
        moeoff.Server(with_template(demo, tmp_path / "model.gguf", template), port=0)


BOUND = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"


@pytest.mark.parametrize("first", ["", BOUND], ids=["free", "bound"])
@pytest.mark.parametrize("what", [CIRCLE, "{{ 'x' * 99999999999 }}", "{{ 'hello world ' * 3000000 }}"], ids=["crash", "memory", "length"])
def test_a_conversation_fails_and_the_next_one_does_not(demo, tmp_path, what, first):
    budget = 300 << 20
    with Served(with_template(demo, tmp_path / "model.gguf", LATER.replace("WHAT", what)), first, memory=budget, n_ctx=512) as served:
        before = ask(served.url).json()["choices"]
        for _ in range(3):
            answer = ask(served.url, "now")
            assert answer.status_code in (400, 500) and answer.json()["error"]["message"]
        assert ask(served.url).json()["choices"] == before
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        assert int(status.partition("VmHWM:")[2].split()[0]) << 10 <= budget


def test_others_are_answered_while_one_waits(demo, tmp_path):
    slow = "{% for i in range(999) %}" * 3 + "{% endfor %}" * 3
    with (
        Served(with_template(demo, tmp_path / "model.gguf", LATER.replace("WHAT", slow)), expert_memory=4 << 20, n_ctx=512) as served,
        ThreadPoolExecutor() as pool,
    ):
        ask(served.url)
        late = pool.submit(ask, served.url, "now")
        (first,) = programs(served.process.pid)
        wait_until(lambda: int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[11]) > 20)  # ticks of processor time
        started = time.monotonic()
        assert all(ask(served.url).status_code == 200 for _ in range(3))
        assert time.monotonic() - started < 5 and not late.done()
        assert late.result().status_code == 400 and "it takes longer than 10 s" in late.result().text
        assert ask(served.url).status_code == 200


def test_the_program_is_started_again_and_ends_with_the_server(demo):
    with Served(demo, expert_memory=4 << 20, n_ctx=512) as served:
        before = ask(served.url).json()["choices"]
        (first,) = programs(served.process.pid)
        os.kill(first, signal.SIGKILL)
        assert ask(served.url).json()["choices"] == before
        (second,) = programs(served.process.pid)
    wait_until(lambda: not runs(second))


STOPPED = """
import os, subprocess, sys, httpx, moeoff
def programs():
    return subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "moeoff-templates"], capture_output=True, text=True).stdout.split()
with moeoff.Server(sys.argv[1], port=0, expert_memory=4 << 20, n_ctx=512) as server:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    print(len(programs()))
print(len(programs()))
"""


def test_nothing_of_it_stays_after_a_stop(demo):
    done = subprocess.run([sys.executable, "-c", STOPPED, demo], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_a_long_conversation_has_the_room_that_it_needs(demo):
    """Where the small bound is not enough: the text is as ever, and then far too long for the context."""
    with Served(demo, expert_memory=4 << 20, n_ctx=512) as served:
        text = " ".join(["word"] * 200_000)
        answer = httpx.post(f"{served.url}/apply-template", json={"messages": [{"role": "user", "content": text}]}, timeout=60)
        assert answer.status_code == 200 and text in answer.json()["prompt"]


def test_a_build_without_the_program(demo, tmp_path):
    lib = library.library()
    lib.moeoff_isolate_templates(os.fsencode(tmp_path / "nothing"))
    try:
        with pytest.raises(moeoff.ModelError, match="nothing: the program for chat templates does not start: No such file"):
            moeoff.Server(demo, port=0)
    finally:
        library.library.cache_clear()
        library.library()
