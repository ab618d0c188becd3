"""Requests that would end the server, exceed its memory budget, or come from another site's page.

`scripts/faults/faults.py http` sends more of them, at length.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket

import httpx
import pytest

from helpers.servers import Service, needed
from helpers.waiting import wait_until
from hostile_http import POSTED, deep_body
from moeoff.server.process import ServerProcess

MIB = 1 << 20


@pytest.fixture(scope="module")
def served(demo):
    with Service(
        demo,
        expert_memory=4 << 20,
        n_ctx=512,
        embedding=True,
        allowed_hosts=["model.home"],
        cors=["https://app.example"],
    ) as server:
        yield server
        assert server.process.poll() is None


def post(server: Service, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        server.url + path,
        content=content,
        headers={"Content-Type": "text/plain"} | headers,
        timeout=300,
    )


@pytest.mark.parametrize("path", POSTED)
def test_refuses_deep_json_on_every_route(served, path):
    """512 levels are read, and refused for what they say; 513 and 150,000 are not read."""
    for key, depth in (("messages", 150_000), ("input", 150_000), ("prompt", 512)):
        answer = post(served, path, deep_body(key, depth))
        assert 400 <= answer.status_code < 600 or path == "/tools", answer.text
        too_deep = "nested too deeply" in answer.text
        assert answer.status_code == 400 if too_deep else depth == 513 or path in ("/tools",) or answer.status_code in (400, 403, 404, 500, 501)


def test_depth_limit(served):
    """Brackets inside strings do not count."""
    for path in (
        "/completion",
        "/api/chat",
        "/api/embed",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
    ):
        refused, read = (post(served, path, deep_body("input", depth)) for depth in (512, 511))
        assert refused.status_code == 400 and "expected at most 512 levels" in refused.text and "512 levels" not in read.text
    assert post(served, "/tokenize", {"content": "[" * 2000 + '\\"' + "{" * 2000}).status_code == 200


SCHEMAS = {
    "a chain of references": {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)} | {"a20000": {}}, "$ref": "#/$defs/a0"},
    "a reference to itself": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "a property with a long name": {"type": "object", "properties": {"p" * 200_000: {}}, "additionalProperties": {"type": "string"}},
    "a long run of signs": {"type": "object", "properties": {"$" * 200_000: {"type": "string"}}, "additionalProperties": False},
    "nested groups": {"pattern": "^" + "(" * 50_000 + "a" + ")" * 50_000 + "$"},
    "many optional properties": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1500)}, "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_schemas_end_no_server(served, name):
    schema = SCHEMAS[name]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for path, body in (
        ("/completion", {"prompt": "x", "n_predict": 2, "json_schema": schema}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 2,
                "tools": [tool],
                "tool_choice": "required",
            },
        ),
    ):
        assert post(served, path, body).status_code in (200, 400, 500)
    assert served.process.poll() is None


def test_types_of_shared_references_are_computed_once(served):
    """Each level refers twice to the next: 60 levels took years."""
    levels = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)} | {"a60": {"type": "string"}}
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": levels}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    }
    assert post(served, "/v1/chat/completions", body).status_code in (200, 400)


# --- bodies ---


def unfinished(server: Service, n: int, nbytes: int, chunked: bool, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Connections that send all of a body but its end, or as much as the server takes."""
    host, port = server.url.removeprefix("http://").split(":")
    head = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {nbytes}"
    piece = b"x" * min(nbytes // 2, MIB)
    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
    connections = []
    for _ in range(n):
        connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        with contextlib.suppress(OSError):
            connection.sendall(f"POST /completion HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode())
            for _ in range(nbytes // len(piece) - 1):
                connection.sendall(framed)
        connections.append(connection)
    return connections


def status(connection: socket.socket) -> int:
    """The status of an answer that has come; 0: none has."""
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        return int(connection.recv(4096).split()[1])
    return 0


@pytest.mark.parametrize("n, nbytes, chunked", [(6, 90 * MIB, False), (6, 90 * MIB, True), (250, 512 << 10, False)])
def test_unfinished_bodies_stay_in_the_budget(demo, n, nbytes, chunked):
    """What was borrowed for them is given back when they are dropped."""
    options = {"n_ctx": 512, "parallel": 1}
    memory = (needed(demo, **options) + 20) << 20
    with Service(demo, memory=memory, **options) as server, contextlib.ExitStack() as stack:
        before = server.metrics()["moeoff_expert_cache_bytes"]
        connections = unfinished(server, n, nbytes, chunked, stack)
        wait_until(lambda: any(status(connection) == 413 for connection in connections))
        assert server.peak <= memory + 4 * MIB
        assert server.complete("Tom has", 2).usage.completion_tokens == 2  # others are answered
        stack.close()
        wait_until(lambda: server.metrics()["moeoff_expert_cache_bytes"] == before)


def test_a_client_reads_why_its_body_is_refused(demo):
    """Also one that reads nothing before it has sent all."""
    options = {"n_ctx": 512, "parallel": 1}
    with Service(demo, memory=(needed(demo, **options) + 20) << 20, **options) as server:
        for body in (b"x" * (90 * MIB), iter([b"x" * MIB] * 90)):
            answer = httpx.post(f"{server.url}/completion", content=body, timeout=300)
            assert answer.status_code == 413 and "--memory" in answer.json()["error"]["message"]
        files = {"file": ("a.wav", b"x" * (90 * MIB))}
        assert httpx.post(f"{server.url}/v1/audio/transcriptions", files=files, timeout=300).status_code == 413
        assert (
            httpx.post(
                f"{server.url}/v1/audio/transcriptions",
                files={"file": ("a.wav", b"RIFF")},
                timeout=300,
            ).status_code
            == 501
        )


# --- sites ---


def ask(url: str, **headers: str) -> tuple[int, str]:
    answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=300)
    return answer.status_code, answer.text


@pytest.mark.parametrize(
    "name, allowed",
    [
        *((name, True) for name in ("localhost", "LOCALHOST:80", "127.0.0.1", "127.1.2.3:8080", "[::1]", "[::1]:8080", "model.home", "Model.Home:8080")),
        *((name, False) for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", "10.0.0.1", "a\"b", "")),
    ],
)  # fmt: skip
def test_only_local_sites_are_answered(served, name, allowed):
    code, text = ask(served.url, Host=name)
    assert code == (200 if allowed else 403)
    if not allowed:
        message = json.loads(text)["error"]["message"]
        assert message.startswith(f"Host {name}") and "--allowed-hosts" in message and "--api-key" in message


def test_pages_of_other_sites_are_not_answered(served):
    allowed = (
        "http://localhost:3000",
        "http://127.0.0.1",
        "https://model.home",
        "https://app.example",
    )
    for origin in (
        *allowed,
        "https://evil.example",
        "null",
        "https://localhost.evil.example",
        "file://",
    ):
        code, text = ask(served.url, Origin=origin)
        assert code == (200 if origin in allowed else 403), origin
        assert origin in allowed or ("--cors" in text and "--api-key" in text)
    assert post(served, "/completion", {"prompt": "x"}, Origin="https://evil.example").status_code == 403


def test_clients_without_a_host_are_answered(served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200


@pytest.mark.parametrize("options", [{"api_key": "none"}, {"host": "0.0.0.0"}, {"allowed_hosts": ["*"]}])
def test_what_opens_a_server_to_every_name(demo, options):
    with Service(demo, expert_memory=4 << 20, n_ctx=256, **options) as server:
        headers = {
            "Host": "evil.example",
            "Origin": "https://evil.example",
            "Authorization": "Bearer none",
        }
        assert ask(server.url.replace("0.0.0.0", "127.0.0.1"), **headers)[0] == 200


def test_a_unix_socket_asks_for_no_host(demo):
    process = ServerProcess(demo, expert_memory=4 << 20, n_ctx=256, kv_disk=0)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=process.socket), timeout=300) as client:
            assert client.get("http://evil.example/v1/models").status_code == 200
    finally:
        process.stop()
