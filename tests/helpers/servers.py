"""Servers in processes of their own: ours with OpenAI's client for it, and llama-server
of the same build, which says what an answer should be.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np

from helpers.budgets import named
from helpers.files import COMMAND, ROOT
from helpers.processes import run_python, status_bytes
from helpers.waiting import wait_until
from moeoff.cli.client import Client
from moeoff.gguf.file import ModelFile, unpack
from moeoff.server.arguments import CommandLine
from moeoff.server.private import PrivateServer

SCRIPT = """
import json, signal, sys, threading
from moeoff.server.server import Server

server = Server(sys.argv[1], **{"port": 0} | json.loads(sys.argv[2]))
done = threading.Event()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: done.set())
with server:
    print(f"on {server.url}/v1", file=sys.stderr, flush=True)
    done.wait()
"""
_SERVES = re.compile(r"on (http://\S+)/v1")


class Service:
    """A process that serves until it is told to stop. first: code that it runs before
    all else. Nothing is kept on disk unless it is said.
    """

    def __init__(self, model: str, first: str = "", **options):
        options = {"kv_disk": 0} | options
        command = [sys.executable, "-c", first + SCRIPT, model, json.dumps(options)]
        self._start(command, options.get("api_key"))

    def _start(self, command: list[str], key: str | None, **how) -> None:
        self._key, self._log = key, tempfile.TemporaryFile()  # nobody would read a pipe
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, **how
        )
        wait_until(lambda: _SERVES.search(self.log) or self.process.poll() is not None)
        found = _SERVES.search(self.log)
        assert found, self.log
        self.url = found[1]

    @property
    def log(self) -> str:
        """All that the process has written. (A seek would move the process's place.)"""
        fd = self._log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> str:
        """End the process, which must end well, and return all that it has written."""
        self.process.send_signal(number)
        assert self.process.wait(300) == 0 and "Traceback" not in self.log, self.log
        return self.log

    def request(
        self, method: str, path: str, key: str | None = "", headers: dict | None = None, **options
    ) -> httpx.Response:
        key = self._key if key == "" else key
        headers = ({"Authorization": f"Bearer {key}"} if key else {}) | (headers or {})
        return httpx.request(method, self.url + path, headers=headers, timeout=300, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object = None, **options) -> httpx.Response:
        return self.request("POST", path, **({} if body is None else {"json": body}) | options)

    @functools.cached_property
    def client(self):
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self._key or "none",
            max_retries=0,
            timeout=300,
            http_client=single_use(),
        )

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def peak(self) -> int:
        """Bytes that the process has held at most."""
        return status_bytes("VmHWM", self.process.pid)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        }

    def is_idle(self) -> bool:
        """Return True if nothing is computed, also for clients who have gone."""
        now = self.metrics()
        return not now["llamacpp:requests_processing"] and not now["llamacpp:requests_deferred"]

    def complete(self, text: str | list[str], n: int):
        return self.client.completions.create(
            model="x", prompt=text, max_tokens=n, temperature=0, extra_body={"ignore_eos": True}
        )

    def ask(self, text: str, **options):
        return self.client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            **{"max_tokens": 24} | options,
        )


class Command(Service):
    """`moeoff serve` with these arguments, on a free port. shell: what starts it."""

    def __init__(self, *args: str, key: str | None = None, shell: str | None = None, **how):
        command = [*(["sh", "-c", shell] if shell else []), COMMAND, "serve", "--port", "0", *args]
        self._start(command, key, **how)


# The demo model's template knows no tools, and by itself it would call none. With this
# one it calls a tool whenever there is one: what a call begins with is what it would
# say first and always, and from there on llama-server's grammar of calls leads it. Of
# line ends in a call it would write as many as that allows. the latter as byte-pair
# vocabularies spell line feeds and tabs
BEGINS, LINE_ENDS = "<<", "\u010a\u0109"
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.content %}{{- message.content + '\\n' }}{%- endif %}
        {%- set call = message.tool_calls[0] %}
        {{- '<<{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}>><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def calling_service(model: str, folder: Path, **options) -> Service:
    """A server whose answers are calls of a tool."""
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE.strip())
    with ModelFile(model) as file:
        pieces = unpack(file.metadata["tokenizer.ggml.tokens"])
    biases = [
        f"{pieces.index(BEGINS[0])}+40",
        *(
            f"{token}-40"
            for token, piece in enumerate(pieces)
            if piece and set(piece) <= set(LINE_ENDS)
        ),
    ]
    args = [
        "--chat-template-file",
        str(template),
        "--temp",
        "0",
        "-n",
        "128",
        *(word for bias in biases for word in ("--logit-bias", bias)),
    ]
    return Service(model, expert_memory=4 << 20, n_ctx=2048, args=args, **options)


LONGER = ["--override-kv", "qwen2moe.context_length=int:4096"]  # of the demo model


def complete(url: str, prompt: str | list[int], **more) -> dict:
    body = {"prompt": prompt, "n_predict": 2, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(f"{url}/completion", json=body, timeout=300).raise_for_status().json()


def words(seed: int, n: int) -> list[int]:
    """Tokens of an ordinary prompt."""
    return np.random.default_rng(seed).integers(300, 3000, n).tolist()


def single_use() -> httpx.Client:
    """A new connection for each request: one that is kept may be closed by the server
    just when the next request is sent on it.
    """
    return httpx.Client(timeout=300, limits=httpx.Limits(max_keepalive_connections=0))


def free_port() -> int:
    """For programs that take no 0. Below those that the system gives to others, who
    would have it before it is bound again.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        end = int(file.read().split()[0])
    for port in random.SystemRandom().sample(range(20_000, max(end, 30_000)), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


EACH = """
import sys, moeoff
for args in sys.argv[2:]:
    try:
        moeoff.Server(sys.argv[1], port=0, expert_memory="4M", n_ctx=256, args=args.split()).start().stop()
        print("went through:", args)
    except moeoff.MoeoffError as error:
        print(error)
"""


@contextlib.contextmanager
def client_of(model: str, *words: str, **options) -> Iterator[Client]:
    """A conversation with a model, as `moeoff run` has it with these words on its
    command line.
    """
    line = CommandLine.read(words, "run")
    with PrivateServer(model, args=line, **options) as server:
        yield Client(server)


def said_of_each(model: str, *args: str) -> list[str]:
    """Return a server's message for each of these arguments, whether or not it loads."""
    return run_python(EACH, model, *args).splitlines()


def refused(*command: str) -> str:
    """The last line that a server says which does not start."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert "Traceback" not in done.stderr or SCRIPT in command
    return done.stderr.splitlines()[-1]


def needed(model: str, **options) -> int:
    """MiB that are enough for a server, as it says itself."""
    return _needed(model, json.dumps({"memory": "10M", **options}))


@functools.cache
def _needed(model: str, options: str) -> int:
    return named(refused(sys.executable, "-c", SCRIPT, model, options))


def llama_server() -> str:
    """Path of the program that is built with our library's sources; the first time it
    is compiled.
    """
    built = subprocess.run(
        [sys.executable, ROOT / "scripts/build/fork.py", "llama-server"],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return built.stdout.splitlines()[-1]


@contextlib.contextmanager
def stock_server(model: str, *args: str) -> Iterator[str]:
    """Start stock llama-server and return its URL.

    It computes as our kernels do: without repacking, with flash attention, one answer
    at a time on two threads.
    """
    port = free_port()
    command = [
        llama_server(),
        "-m",
        model,
        "--port",
        str(port),
        "--no-repack",
        "-fa",
        "on",
        "-t",
        "2",
        "-np",
        "1",
        "--no-warmup",
        *args,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or _is_ready(port))
            assert process.poll() is None, "llama-server has ended"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=300).status_code == 200
    except httpx.TransportError:
        return False
