"""A chat template is the model file's: it calls nothing, and takes neither for ever nor all memory. Of a run it is rendered here, in a sandbox; of a server
by another program, so that the server outlives it."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jinja2
import llama_cpp
import pytest

import moeoff
from helpers.models import with_template
from helpers.servers import Served
from helpers.waiting import wait_until
from moeoff import chat_sandbox
from moeoff.chat_sandbox import ChatSandbox
from moeoff.server import library

HERE = {
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ i * j }}{% endfor %}{% endfor %}": "it takes longer than",
    "{{ 10 ** (10 ** 10) }}": "too large",
    "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}": "too large",
    "{{ 'x'.center(10 ** 10) }}": "too much memory",
    "{{ 'x' | center(10000000000) }}": "too much memory",
    "{{ 'x' * 10 ** 11 }}": "too much memory",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": "too much memory|takes longer",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}": "RecursionError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ lipsum.__globals__['os'].popen('id').read() }}": "unsafe",
}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
LATER = "{% if messages[-1].content == 'now' %}WHAT{% endif %}" + PLAIN  # not of those that are tried at the start
CIRCLE = "{% set a = namespace() %}{% set a.x = a %}{{ a|tojson }}"
IN_THE_SERVER = {
    CIRCLE: "ends the program",
    "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}": "ends the program",
    "{{ 1 is divisibleby 0 }}": "ends the program",
    "{{" + "(" * 100_000 + "1" + ")" * 100_000 + "}}": "ends the program",
    "{{ 'x' * 99999999999 }}": "too much memory",
    "{{ range(999999999999)|length }}": "too much memory",
    "{% for m in messages %}{{ 'xxxxxxxxxx' * 10000 }}{% endfor %}": "it makes 300000 characters of a few words",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}": "it takes longer than 10 s",
}


# of a run


@pytest.mark.parametrize("template", HERE)
def test_hostile(template, monkeypatch):
    if "takes longer" in HERE[template]:
        monkeypatch.setattr(chat_sandbox, "SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(jinja2.TemplateError, match=HERE[template]):
        ChatSandbox().from_string(template).render(messages=[])
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_ordinary():
    made = ChatSandbox().from_string("{% for m in messages %}<{{ m.role * 2 }}>{{ m['content'] | trim }}{% endfor %}{{ 3 * 4 }}")
    assert made.render(messages=[{"role": "user", "content": " Hi "}]) == "<useruser>Hi12"


def test_what_is_only_reserved_meanwhile_does_not_count():
    """As the allocator does at any time, for the first allocation of a thread that was started before."""

    def reserve() -> int:
        with mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ) as reserved:
            return len(reserved)

    assert ChatSandbox().from_string("{{ reserve() }}").render(reserve=reserve) == str(1 << 30)


def test_what_is_opened_meanwhile_is_not_bounded(demo):
    """The bound is the process's: neither threads nor buffers of a model that another thread opens may fail over it, and both get their turn."""
    unbounded = resource.getrlimit(resource.RLIMIT_DATA)
    template = ChatSandbox().from_string("{% for i in range(2000) %}{{ i }}{% endfor %}")
    seen, rendered, stop = set(), [], threading.Event()

    def render():
        while not stop.is_set():
            rendered.append(template.render())

    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(render)
        try:
            wait_until(lambda: rendered)
            for _ in range(3):
                with moeoff.Llama(
                    demo, expert_memory="1M", n_ctx=128, io_threads=64, progress=lambda _done: seen.add(resource.getrlimit(resource.RLIMIT_DATA))
                ) as llm:
                    assert llm.create_completion("Once", max_tokens=2)["choices"]
            before = len(rendered)
            wait_until(lambda: len(rendered) > before)
        finally:
            stop.set()
        rendering.result()
    assert seen == {unbounded}


def test_models_that_are_opened_at_once_do_not_wait_for_each_others_templates(demo):
    with ThreadPoolExecutor(4) as pool:
        for llm in pool.map(lambda _: moeoff.Llama(demo, expert_memory="1M", n_ctx=128), range(4)):
            llm.close()


def test_an_interrupt_leaves_nothing_behind():
    """Wherever it comes: another thread can run a template and take memory afterwards, and the process has its own limits."""
    before, reached = resource.getrlimit(resource.RLIMIT_DATA), True

    def answer() -> str:
        with chat_sandbox.growing():
            return ChatSandbox().from_string("{{ 6 * 7 }}").render()

    def interrupt(_frame: object, event: str, _argument: object) -> None:
        nonlocal left
        left -= event in ("call", "c_return")  # where Python looks for signals; it also does where a loop begins again
        if left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    answer()  # what is made once has been made
    n = 0
    with ThreadPoolExecutor(1) as other:
        while reached:
            n = left = n + 2
            sys.setprofile(interrupt)
            try:
                answer()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            reached = left <= 0
            assert other.submit(answer).result(300) == answer() == "42"
            assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert n > 200


@pytest.mark.parametrize("template, words", [(next(iter(HERE)), "it takes longer than"), ("{{ 'x'.center(10 ** 10) }}", "too much memory")])
def test_a_model_does_not_hang_over_it(demo, tmp_path, monkeypatch, template, words):
    monkeypatch.setattr(chat_sandbox, "SECONDS", 0.5)
    path = with_template(demo, tmp_path / "model.gguf", template)
    with moeoff.Llama(path, expert_memory="1M", n_ctx=128) as llm:  # a text can still be continued
        assert llm.create_completion("Once", max_tokens=2)["choices"]
        with pytest.raises(jinja2.TemplateError, match=words):
            llm.create_chat_completion([{"role": "user", "content": "Hi"}])


# of a server


def ask(url: str, content: str = "Hi") -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "temperature": 0}, timeout=300)


def programs(pid: int) -> list[int]:
    return [int(line) for line in subprocess.run(["pgrep", "-P", str(pid), "-f", "moeoff-templates"], capture_output=True, text=True).stdout.split()]


def processor_ticks(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
    except FileNotFoundError:  # ended
        return 0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("template", IN_THE_SERVER, ids=range(len(IN_THE_SERVER)))
def test_a_model_is_refused_for_one(demo, tmp_path, template):
    with pytest.raises(moeoff.ModelError, match=f"its chat template cannot be run: .*{IN_THE_SERVER[template]}"):
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


SLOW = "{% for i in range(999) %}" * 3 + "{% endfor %}" * 3


def test_others_are_answered_while_one_waits(demo, tmp_path):
    with (
        Served(with_template(demo, tmp_path / "model.gguf", LATER.replace("WHAT", SLOW)), expert_memory=4 << 20, n_ctx=512) as served,
        ThreadPoolExecutor() as pool,
    ):
        ask(served.url)

        def others_come_first() -> bool:
            late = pool.submit(ask, served.url, "now")
            (program,) = programs(served.process.pid)
            wait_until(lambda: late.done() or processor_ticks(program) > 20)
            in_time = ask(served.url).status_code == 200 and not late.done()
            assert late.result().status_code == 400 and "it takes longer than 10 s" in late.result().text
            assert ask(served.url).status_code == 200
            return in_time

        assert any(others_come_first() for _ in range(4))  # a busy machine may take the ten seconds for an ordinary answer, too


def test_three_that_are_slow_hold_nobody_up_and_a_stop_ends_them(demo, tmp_path):
    """They take turns among themselves; who is quick never waits for the end of one. A stop does not wait for them either."""
    with (
        Served(with_template(demo, tmp_path / "model.gguf", LATER.replace("WHAT", SLOW)), expert_memory=4 << 20, n_ctx=512) as served,
        ThreadPoolExecutor() as pool,
    ):
        ask(served.url)

        def others_come_first() -> bool:
            late = [pool.submit(ask, served.url, "now") for _ in range(3)]
            wait_until(lambda: any(processor_ticks(program) > 20 for program in programs(served.process.pid)))
            in_time = all(ask(served.url).status_code == 200 for _ in range(3)) and not any(one.done() for one in late)
            assert len(programs(served.process.pid)) <= 2
            answers = [one.result() for one in late]
            assert all(one.status_code == 400 and "it takes longer than 10 s" in one.text for one in answers)
            return in_time

        assert any(others_come_first() for _ in range(3))
        late = [pool.submit(ask, served.url, "now") for _ in range(3)]
        wait_until(lambda: any(processor_ticks(program) > 20 for program in programs(served.process.pid)))
        served.process.send_signal(signal.SIGTERM)
        for one in late:
            try:
                assert "shutting down" in one.result().text
            except httpx.TransportError:  # it came when nobody listened any more
                pass
        assert served.process.wait(300) == 0


def test_the_program_is_started_again_and_ends_with_the_server(demo):
    with Served(demo, expert_memory=4 << 20, n_ctx=512) as served:
        before = ask(served.url).json()["choices"]
        (first,) = programs(served.process.pid)
        os.kill(first, signal.SIGKILL)
        assert ask(served.url).json()["choices"] == before
        (second,) = programs(served.process.pid)
    wait_until(lambda: not runs(second))


def test_the_program_ends_itself_where_nobody_else_does(tmp_path):
    """Whoever asked has been killed while a template loops, and has left SIGALRM ignored and blocked."""
    ours, theirs = socket.socketpair()
    source = "{% for i in range(999) %}" * 4 + "{% endfor %}" * 4
    ignored = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        program = subprocess.Popen([Path(llama_cpp.__file__).parent / "lib" / "moeoff-templates"], stdin=theirs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, ignored)
    theirs.close()
    render, seconds, conversation = 1, 1, b'{"messages": []}'  # struct template_question
    ours.sendall(struct.pack("<IIQQQQ", render, 0, 32 << 20, seconds, len(source), len(conversation)) + source.encode() + conversation)
    ours.close()
    try:
        assert program.wait(timeout=300) == -signal.SIGALRM
    finally:
        program.kill()


STOPPED = """
import os, subprocess, sys, httpx, moeoff
def programs():
    return subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "moeoff-templates"], capture_output=True, text=True).stdout.split()
with moeoff.Server(sys.argv[1], port=0, expert_memory=4 << 20, n_ctx=512) as server:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    print(len(programs()))
print(len(programs()))
"""


def test_nothing_of_it_stays_after_a_stop(demo):
    done = subprocess.run([sys.executable, "-c", STOPPED, demo], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_a_long_conversation_has_the_room_that_it_needs(demo):
    """Where the small bound is not enough: the text is as ever, and then far too long for the context."""
    with Served(demo, expert_memory=4 << 20, n_ctx=512) as served:
        text = " ".join(["word"] * 200_000)
        answer = httpx.post(f"{served.url}/apply-template", json={"messages": [{"role": "user", "content": text}]}, timeout=300)
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
