"""A chat template is the model file's: it calls nothing, and takes neither for ever nor
all memory. Another program runs it, which a run and a server outlive.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import moeoff
from helpers.models import with_template
from helpers.processes import run_python
from helpers.servers import Service
from helpers.waiting import wait_until
from moeoff.llamacpp import templates

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CIRCLE = "{% set a = namespace() %}{% set a.x = a %}{{ a|tojson }}"
SLOW = "{% for i in range(999) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {
    CIRCLE: "ends the program",
    "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}": "ends the program",
    "{{ 1 is divisibleby 0 }}": "ends the program",
    "{{" + "(" * 100_000 + "1" + ")" * 100_000 + "}}": "ends the program",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "ends the program",
    "{{ 'x' * 99999999999 }}": "too much memory",
    "{{ range(999999999999)|length }}": "too much memory",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": (
        "too much memory"
    ),
    "{% for m in messages %}{{ 'xxxxxxxxxx' * 10000 }}{% endfor %}": (
        "it makes 300000 characters of a few words"
    ),
    SLOW: "it takes longer than 1 s",
}
REFUSALS = {
    "{% if": "Unexpected EOF",
    "{{ raise_exception('no system role') }}": "^no system role$",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "not a function",
    "{{ lipsum.__globals__['os'].popen('id').read() }}": "not a function",
}


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_bounds(template):
    with pytest.raises(templates.TemplateBoundError, match=HOSTILE[template]):
        templates.check_bounds(template, seconds=1 if template == SLOW else 60)


@pytest.mark.parametrize("template", REFUSALS)
def test_refusals_are_no_bounds(template):
    templates.check_bounds(template)
    with pytest.raises(templates.TemplateError, match=REFUSALS[template]):
        templates.render(template, {"messages": []})


def test_text():
    template = (
        "{% generation %}{% for m in messages %}<{{ m.role * 2 }}>{{ m['content'] | trim }}{%"
        " endfor %}{% endgeneration %}{{ 3 * 4 }}{{ tools is none }}"
    )
    templates.check(template)
    assert (
        templates.render(
            template,
            {"messages": [{"role": "user", "content": " H\u00ef "}], "tools": None, "now": print},
        )
        == "<useruser>H\u00ef12True"
    )


def test_a_model_goes_on(demo, tmp_path):
    path = with_template(demo, tmp_path / "model.gguf", "{{ 'x' * 99999999999 }}")
    with moeoff.Llama(path, expert_memory="1M", n_ctx=128) as llm:  # a text can still be continued
        assert llm.create_completion("Once", max_tokens=2)["choices"]
        with pytest.raises(moeoff.ModelError, match="too much memory"):
            llm.create_chat_completion([{"role": "user", "content": "Hi"}])
    with pytest.raises(
        moeoff.ModelError, match="its chat template cannot be run: it takes too much memory"
    ):
        moeoff.Server(path, port=0)


# of a server


def ask(served: Service, content: str = "Hi") -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return served.post("/v1/chat/completions", body)


def programs(pid: int) -> list[int]:
    return [
        int(line)
        for line in subprocess.run(
            ["pgrep", "-P", str(pid), "-f", "moeoff-templates"], capture_output=True, text=True
        ).stdout.split()
    ]


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


BOUND = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
LATER = {
    "crash": CIRCLE,
    "memory": "{{ 'x' * 99999999999 }}",
    "length": "{{ 'hello world ' * 3000000 }}",
    "slow": SLOW,
}
FAILS_LATER = (
    "".join(
        f"{{% if messages[-1].content == '{name}' %}}{what}{{% endif %}}"
        for name, what in LATER.items()
    )
    + PLAIN
)


@pytest.mark.parametrize(
    "first", ["", pytest.param(BOUND, marks=pytest.mark.slow)], ids=["free", "bound"]
)
def test_a_conversation_fails_and_the_next_one_does_not(demo, tmp_path, first):
    budget = 300 << 20
    with Service(
        with_template(demo, tmp_path / "model.gguf", FAILS_LATER), first, memory=budget, n_ctx=512
    ) as served:
        before = ask(served).json()["choices"]
        for what in ("crash", "memory", "length"):
            for _ in range(3):
                answer = ask(served, what)
                assert answer.status_code in (400, 500) and answer.json()["error"]["message"]
            assert ask(served).json()["choices"] == before
        assert served.peak <= budget


def begin_slow(served: Service, pool: ThreadPoolExecutor, n: int) -> list[Future]:
    late = [pool.submit(ask, served, "slow") for _ in range(n)]
    wait_until(
        lambda: any(processor_ticks(program) > 20 for program in programs(served.process.pid))
    )
    return late


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_slow_ones_hold_nobody_up_and_a_stop_ends_them(demo, tmp_path, n):
    """They take turns among themselves, and who is quick never waits for the end of
    one, which here does not come while its program is stopped.
    """
    with (
        Service(
            with_template(demo, tmp_path / "model.gguf", FAILS_LATER),
            expert_memory=4 << 20,
            n_ctx=512,
        ) as served,
        ThreadPoolExecutor() as pool,
    ):
        ask(served)
        late = begin_slow(served, pool, n)
        slow = [p for p in programs(served.process.pid) if processor_ticks(p) > 20]
        for program in slow:
            os.kill(program, signal.SIGSTOP)
        assert all(ask(served).status_code == 200 for _ in range(n))
        assert not any(one.done() for one in late) and len(programs(served.process.pid)) <= 2
        for program in slow:
            os.kill(program, signal.SIGCONT)
        if n > 1:
            answers = [one.result() for one in late]
            assert all(
                one.status_code == 400 and "it takes longer than 10 s" in one.text
                for one in answers
            )
            late = begin_slow(served, pool, n)
        served.process.send_signal(signal.SIGTERM)
        for one in late:
            try:
                assert "shutting down" in one.result().text
            except httpx.TransportError:  # it came when nobody listened any more
                pass
        assert served.process.wait(300) == 0


def test_the_program_ends_itself_where_nobody_else_does(tmp_path):
    """Whoever asked has been killed while a template loops, and has left SIGALRM
    ignored and blocked.
    """
    ours, theirs = socket.socketpair()
    source = "{% for i in range(999) %}" * 4 + "{% endfor %}" * 4
    ignored = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        program = subprocess.Popen([templates.program()], stdin=theirs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGALRM, ignored)
    theirs.close()
    render, seconds, conversation = 1, 1, b'{"messages": []}'  # struct template_question
    ours.sendall(
        struct.pack("<IIQQQQ", render, 0, 32 << 20, seconds, len(source), len(conversation))
        + source.encode()
        + conversation
    )
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


def test_the_program_is_started_again_and_nothing_of_it_stays_after_a_stop(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=512) as served:
        before = ask(served).json()["choices"]
        (first,) = programs(served.process.pid)
        os.kill(first, signal.SIGKILL)
        assert ask(served).json()["choices"] == before
        (second,) = programs(served.process.pid)
        # the small bound is not enough: the text is as ever, and then far too long for
        # the context
        long = " ".join(["word"] * 200_000)
        answer = served.post("/apply-template", {"messages": [{"role": "user", "content": long}]})
        assert answer.status_code == 200 and long in answer.json()["prompt"]
    wait_until(lambda: not runs(second) and not any(map(runs, programs(served.process.pid))))
    assert run_python(STOPPED, demo).split() == ["1", "0"]


def test_a_build_without_the_program(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "program", lambda: tmp_path / "nothing")
    with pytest.raises(
        moeoff.ModelError,
        match="nothing: the program for chat templates does not start: No such file",
    ):
        moeoff.Server(demo, port=0)
