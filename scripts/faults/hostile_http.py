"""Hostile clients of `moeoff serve`: whatever they send, the others are answered
rightly, nothing is read from disk, memory stays in its budget.

A server with an API key, in a process of its own, under a budget. Each case says what
must be so; after each the server must be there, answer a greedy request with the tokens
it gave before, and hold its budget.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import httpx

from common import DEMO, Child, findings, import_all, main, options_of, status_bytes

KEY = "a-long-secret-key-" + "k" * 30
MEMORY = 400 << 20
SECONDS = 60  # for what comes by itself, on a machine that is busy
CASES: dict[str, Callable] = {}
# Routes that take a body, all of them.
POSTED = """
/completion /completions /v1/completions /chat/completions /v1/chat/completions
/v1/chat/completions/control /v1/responses /responses /v1/audio/transcriptions
/audio/transcriptions /v1/messages /infill /embedding /embeddings /v1/embeddings /rerank
/reranking /v1/rerank /v1/reranking /tokenize /detokenize /apply-template
/chat/completions/input_tokens /v1/chat/completions/input_tokens /responses/input_tokens
/v1/responses/input_tokens /v1/messages/count_tokens /lora-adapters /props /slots/0
/v1/streams/lookup /cors-proxy /tools /api/chat /api/generate /api/show /api/embed
/api/embeddings /api/pull /api/push /api/create /api/copy /api/delete
""".split()
# Bodies that lack their end: how many, bytes of each, and whether they come in chunks.
UNFINISHED = [(6, 90 << 20, False), (6, 90 << 20, True), (250, 512 << 10, False)]


@dataclass
class Target:
    """The server."""

    url: str
    pid: int
    rng: random.Random
    secret: Path  # a file that nothing may show

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS
        )

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.client as client:
            return client.post(
                path, content=content, headers={"Content-Type": "application/json", **headers}
            )

    def answer(self) -> list[int]:
        body = {
            "prompt": "Tom has 3 apples and buys 4 more.",
            "n_predict": 8,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        reply = self.post("/completion", body)
        assert reply.status_code == 200, reply.text
        return reply.json()["tokens"]

    def raw(self, data: bytes, seconds: float = SECONDS) -> bytes:
        """Send bytes, and return the reply until the connection is closed."""
        out = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self.address, timeout=seconds) as connection,
        ):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while len(out) < 1 << 20 and (piece := connection.recv(65536)):
                out += piece
        return out


def deep_body(key: str, depth: int) -> bytes:
    """Return a body with a value of so many nested lists."""
    return b'{"%b": %b%b}' % (key.encode(), b"[" * depth, b"]" * depth)


def send_unfinished(address: tuple[str, int], n: int, nbytes: int, chunked: bool, key: str = ""):
    """Send all of a body but its end on n connections, or as much as the server takes."""
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {nbytes}"
    head = f"Host: localhost\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n"
    piece = b"x" * min(nbytes // 2, 1 << 20)
    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
    connections = []
    for _ in range(n):
        connections.append(socket.create_connection(address, timeout=SECONDS))
        with contextlib.suppress(OSError):
            connections[-1].sendall(b"POST /completion HTTP/1.1\r\n" + head.encode())
            for _ in range(nbytes // len(piece) - 1):
                connections[-1].sendall(framed)
    return connections


def status_now(connection: socket.socket) -> int:
    """Return the status of an answer that has come, or 0."""
    connection.setblocking(False)
    with contextlib.suppress(OSError, IndexError):
        return int(connection.recv(4096).split()[1])
    return 0


def counted(codes: list) -> str:
    """Return how often each code came."""
    return ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes)))


def case(function: Callable[[Target], str]) -> Callable[[Target], str]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


@case
def slow_loris(target: Target) -> str:
    """300 connections that send a header byte by byte: others are answered meanwhile"""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(300):
            connection = stack.enter_context(
                socket.create_connection(target.address, timeout=SECONDS)
            )
            connection.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nX-A: ")
            connections.append(connection)
        slowest = 0.0
        for _ in range(4):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"a")
            started = time.monotonic()
            target.answer()
            slowest = max(slowest, time.monotonic() - started)
    assert slowest < 30, slowest
    return f"the slowest answer took {slowest:.1f} s"


@case
def slow_bodies(target: Target) -> str:
    """100 bodies that are promised and do not come: others are answered meanwhile"""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(
                socket.create_connection(target.address, timeout=SECONDS)
            )
            connection.sendall(
                "POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer"
                f" {KEY}\r\nContent-Length: 1000000\r\n\r\n{{".encode()
            )
        target.answer()
    return ""


@case
def huge_bodies(target: Target) -> str:
    """lengths that cannot be, 4 million brackets and a prompt of 200,000 words are
    refused
    """
    replies = []
    for length in ("99999999999", "-1", "18446744073709551616", "1e9", "0x10"):
        reply = target.raw(
            "POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer"
            f" {KEY}\r\nContent-Length: {length}\r\n\r\n{{}}".encode()
        )
        assert b" 200 " not in reply[:20], (length, reply[:200])
        replies.append(reply[9:12].decode() or "closed")
    reply = target.post("/completion", b"[" * (4 << 20))
    assert reply.status_code in (400, 413, 500), reply.status_code
    reply = target.post("/completion", {"prompt": "word " * 200_000})
    assert reply.status_code == 400, reply.status_code
    return ", ".join(replies)


@case
def header_floods(target: Target) -> str:
    """10,000 headers, one of 10 MB, a path of 1 MB: refused, or the connection is
    closed
    """
    replies = []
    for data in (
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nX-Long: " + b"y" * (10 << 20) + b"\r\n\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X" * 100_000,
        b"\x00" * 100_000,
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nTransfer-Encoding: chunked\r\nAuthorization: Bearer "
        + KEY.encode()
        + b"\r\n\r\nFFFFFFFFFFFFFFFF\r\n{}",
        b"POST /completion HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length:"
        b" 5\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n-1\r\n{}",
    ):
        reply = target.raw(data)
        assert b" 200 " not in reply[:20], (data[:60], reply[:200])
        replies.append(reply[9:12].decode("ascii", "replace") or "closed")
    return ", ".join(replies)


@case
def bad_text(target: Target) -> str:
    """bytes that are not UTF-8, lone surrogates, NUL, deep JSON, numbers beyond every
    type: an error or an answer, and the server stays
    """
    bodies = [
        b'{"prompt": "\xff\xfe\xfa", "n_predict": 2}', b'{"prompt": "\\ud800", "n_predict": 2}', b'{"prompt": "a\\u0000b", "n_predict": 2}',
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"prompt": "x", "n_predict": 1e400}', b'{"prompt": [1e30]}', b'{"prompt": [-1, 99999999]}',
        b'{"prompt": [[[1]]], "n_predict": 2}', b'{"messages": "x"}', b'{"messages": [{"role": 7}]}', b'{"prompt": "x", "n_predict": -99999999999999999999}',
        b'{"prompt": "x", "n_predict": 2, "n_discard": -100, "n_keep": -100}', b'{"prompt": "x", "n_predict": 2, "id_slot": 99999}',
        b'{"prompt": "x", "n_predict": 2, "n_probs": 2147483647}', b'{"prompt": "x", "n_predict": 2, "temperature": -1e30, "top_k": -7, "min_p": 9}',
        b'{"prompt": "x", "n_predict": 2, "logit_bias": [[99999999, 1e30], [-5, 1]]}', b'{"prompt": "x", "n_predict": 2, "samplers": ["\\ud800"]}',
        b'{"prompt": "x", "n_predict": 2, "grammar": "root ::= root root"}', b'{"prompt": "x", "n_predict": 2, "grammar": "' + b"(" * 20_000 + b'"}',
        b'{"prompt": "x", "n_predict": 2, "json_schema": {"$ref": "#"}}', b'{"prompt": "x", "n_predict": 2, "json_schema": {"pattern": "(((((a*)*)*)*)*)*b"}}',
        b'{"prompt": "x", "n_predict": 2, "lora": [{"id": 99, "scale": 1}]}', b'{"prompt": "x", "n_predict": 2, "stop": ["", ""]}', b"", b"null", b"[]", b"7",
    ]  # fmt: skip
    codes = []
    for body in bodies:
        for path in (
            "/completion",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/infill",
            "/tokenize",
            "/apply-template",
        ):
            codes.append(target.post(path, body).status_code)
    assert all(200 <= code < 600 for code in codes)
    return f"{len(codes)} requests: {counted(codes)}"


@case
def deep_bodies(target: Target) -> str:
    """150,000 nested lists and objects, whole and cut, on every route: refused"""
    bodies = [deep_body(key, 150_000) for key in ("messages", "input", "prompt", "json_schema")]
    bodies.append(b'{"tools": ' * 150_000)
    codes = []
    for path in POSTED:
        codes += (found := [target.post(path, body).status_code for body in bodies])
        assert path == "/tools" or set(found) <= {400, 403, 501}, (path, found)
    return f"{len(codes)} requests: {counted(codes)}"


@case
def unfinished_bodies(target: Target) -> str:
    """540 MB of bodies that lack their end, in one, chunks or 250: others are answered
    meanwhile
    """
    codes = []
    for unfinished in UNFINISHED:
        connections = send_unfinished(target.address, *unfinished, key=KEY)
        target.answer()
        codes += [status_now(connection) for connection in connections]
        for connection in connections:
            connection.close()
    assert set(codes) <= {0, 413}, codes
    return f"{counted(codes)} (0: reads on)"


@case
def templates_in_requests(target: Target) -> str:
    """a chat template of the request's own is not run, or ends"""
    bomb = (
        "{% for i in range(100000) %}{% for j in range(100000) %}{% for k in range(100000) %}x{%"
        " endfor %}{% endfor %}{% endfor %}"
    )
    codes = []
    for key in ("chat_template", "template", "chat_template_kwargs"):
        value: object = {"enable_thinking": bomb} if key.endswith("kwargs") else bomb
        codes.append(
            target.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, key: value},
            ).status_code
        )
        codes.append(
            target.post(
                "/apply-template", {"messages": [{"role": "user", "content": "Hi"}], key: value}
            ).status_code
        )
    return ", ".join(map(str, codes))


@case
def path_tricks(target: Target) -> str:
    """no path and no request shows a file, starts a program, or fetches from anywhere"""
    paths = [str(target.secret), "/../../../../../../../.." + str(target.secret), "/..%2f..%2f..%2f..%2f..%2f.." + str(target.secret).replace("/", "%2f"),
             "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/\\..\\..\\etc\\passwd", "/index.html/../../../etc/passwd", "/etc/passwd%00.html",
             "/media/../../etc/passwd", "/slots/0?action=save", "/props", "/models/load", "/tools", "/cors-proxy?url=file:///etc/passwd"]  # fmt: skip
    words = target.secret.read_text().encode(), b"root:x:"
    for path in paths:
        for method in (b"GET", b"POST", b"PUT", b"DELETE", b"PATCH"):
            request = (
                method
                + b" "
                + path.encode()
                + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                + KEY.encode()
                + b"\r\nContent-Length: 2\r\n\r\n{}"
            )
            reply = target.raw(request)
            assert not any(word in reply for word in words), (method, path, reply[:300])
    url = f"file://{target.secret}"
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
    ):
        reply = target.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2},
        )
        assert reply.status_code >= 400 and words[0] not in reply.content, reply.text
    for body in ({"filename": "../../../../tmp/x"}, {"filename": str(target.secret)}):
        for action in ("save", "restore", "erase"):
            reply = target.post(f"/slots/0?action={action}", body)
            assert reply.status_code >= 400, (action, reply.text)
    for path in ("/rerank", "/v1/rerank", "/reranking", "/embedding", "/v1/embeddings"):
        for body in (
            {"query": "x", "documents": []},
            {"query": "", "documents": [""]},
            {"query": ["x"], "documents": [1, None]},
            {"input": []},
            {"content": {}},
        ):
            reply = target.post(path, body)
            assert reply.status_code >= 400, (path, reply.text)
    return f"{len(paths) * 5} requests for paths, {6 + 25 + 2} for files and routes that are off"


@case
def without_the_key(target: Target) -> str:
    """16 routes are refused without the key, with parts of it, and with more than it"""
    wrong = [
        "",
        "x",
        KEY[:-1],
        KEY + "x",
        KEY[:-1] + "l",
        "l" + KEY[1:],
        KEY * 2,
        KEY.upper(),
        "\x01" * 48,
    ]
    routes = ["/completion", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize", "/detokenize", "/props", "/metrics", "/slots", "/infill",
              "/v1/embeddings", "/api/chat", "/api/generate", "/lora-adapters", "/apply-template", "/v1/responses"]  # fmt: skip
    for route in routes:
        for key in wrong:
            for header in (
                f"Authorization: Bearer {key}",
                f"X-Api-Key: {key}",
                f"Authorization: {key}",
            ):
                reply = target.raw(
                    f"POST {route} HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
                )
                assert reply[9:12] in (b"401", b"400", b"404") and (
                    reply[9:12] != b"404" or route in ("/slots",)
                ), (route, header, reply[:100])
    return f"{len(routes) * len(wrong) * 3} requests"


@case
def other_origins(target: Target) -> str:
    """pages of other origins get no leave to read answers"""
    for origin in (
        "https://evil.example",
        "http://localhost:9",
        "null",
        "http://127.0.0.1.evil.example",
    ):
        with target.client as client:
            for method, path in (
                ("GET", "/health"),
                ("OPTIONS", "/v1/chat/completions"),
                ("POST", "/completion"),
            ):
                # after a body that it has not read the server closes the connection
                body = {"prompt": "x", "n_predict": 1} if method == "POST" else None
                reply = client.request(
                    method,
                    path,
                    headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
                    json=body,
                )
                assert "access-control-allow-origin" not in reply.headers, (
                    origin,
                    dict(reply.headers),
                )
    return ""


@case
def foreign_hosts(target: Target) -> str:
    """a server without a key answers pages that point a name of theirs at 127.0.0.1
    with 403
    """
    code = f"""
import moeoff, signal
with moeoff.Server({DEMO!r}, port=0, expert_memory="4M", n_ctx=512, parallel=1) as server:
    print(server.url, flush=True)
    signal.pause()
"""
    names = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "0x7f.1"]
    asked = [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/moeoff"), ("POST", "/completion")]
    asked.append(("OPTIONS", "/completion"))
    command, codes = [sys.executable, "-c", code], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            for name in names:
                for headers in ({"Host": name}, {"Origin": f"http://{name}"}):
                    for method, path in asked:
                        reply = httpx.request(method, url + path, headers=headers, timeout=SECONDS)
                        codes.append(reply.status_code)
            assert httpx.get(f"{url}/v1/models", timeout=SECONDS).status_code == 200
        finally:
            process.kill()
    assert set(codes) == {403}, codes
    return f"{len(codes)} requests"


@case
def many_at_once(target: Target) -> str:
    """200 requests that are cut before they are answered"""
    body = json.dumps({"prompt": "x", "n_predict": 500, "ignore_eos": True})
    for _ in range(200):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(target.address, timeout=SECONDS) as connection,
        ):
            head = (
                "POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer"
                f" {KEY}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(
                (head + body)[: target.rng.randrange(10, len(head) + len(body) + 1)].encode()
            )
    return ""


@case
def noise(target: Target) -> str:
    """300 requests of which bytes are changed at random"""
    body = json.dumps(
        {"prompt": "Tom has 3 apples.", "n_predict": 2, "temperature": 0, "stream": False}
    ).encode()
    good = (
        b"POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type:"
        b" application/json\r\nContent-Length: %d\r\n\r\n%s"
    )
    whole, codes = good % (KEY.encode(), len(body), body), []
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(target.rng.choice((1, 2, 8))):
            data[target.rng.randrange(len(data))] = target.rng.randrange(256)
        codes.append(
            target.raw(bytes(data), seconds=20)[9:12].decode("ascii", "replace") or "closed"
        )
    return counted(codes)


def serve() -> None:
    """Until SIGINT."""
    import moeoff

    with (
        contextlib.suppress(KeyboardInterrupt),
        moeoff.Server(
            DEMO,
            port=0,
            api_key=KEY,
            memory=MEMORY,
            n_ctx=1024,
            parallel=2,
            n_batch=128,
            embedding=False,
        ) as server,
    ):
        print(server.url, flush=True)
        signal.pause()


def trouble(target: Target, name: str, expected: list[int]) -> tuple[str, str]:
    """Run a case, and return its text and the problem."""
    try:
        text = CASES[name](target)
        assert target.answer() == expected, "another answer afterwards"
        assert httpx.get(f"{target.url}/health", timeout=SECONDS).status_code == 200
    except Exception as error:
        return "", f"{name}: {type(error).__name__}: {error}"
    peak = status_bytes("VmHWM", target.pid)
    return text, f"{name}: {peak >> 20} MiB of {MEMORY >> 20}" if peak > MEMORY else ""


@main.command("http", help=__doc__)
@click.option("--rounds", default=1, show_default=True)
@options_of(CASES)
def check_http(rounds: int, only: tuple[str, ...], json_file: str | None) -> None:
    import_all()
    columns = ["what", "what must be so", "what came back", "held"]
    json_file = json_file and os.path.abspath(json_file)  # before the folder changes
    with (
        tempfile.TemporaryDirectory() as folder,
        findings(json_file, "hostile-http", f"hostile clients, {rounds} rounds", columns) as (
            table,
            problems,
        ),
    ):
        secret = Path(folder, "secret.txt")
        secret.write_text(f"secret {random.randrange(1 << 60)}")
        os.environ["XDG_CACHE_HOME"] = folder
        os.chdir(folder)
        server = Child(serve)
        while not server.ended() and "\n" not in server.output:
            time.sleep(0.01)
        if server.ended():
            raise click.ClickException(f"the server did not start: {server.errors[-2000:]}")
        target = Target(server.output.strip(), server.pid, random.Random(1), secret)
        expected = target.answer()
        for name in only or CASES:
            text, problem = "", ""
            for _ in range(rounds):
                text, problem = trouble(target, name, expected)
                if problem:
                    problems.append(problem)
                    break
            table.row(name, CASES[name].__doc__ or "", text, "NO" if problem else "yes")
            if server.ended():
                break
        else:
            print(
                f"peak memory {status_bytes('VmHWM', server.pid) >> 20} MiB of {MEMORY >> 20}",
                file=sys.stderr,
            )
            os.kill(server.pid, signal.SIGINT)
        if (code := server.wait(SECONDS)) != 0:
            problems.append(f"the server ended with {code}: {server.errors[-2000:]}")
