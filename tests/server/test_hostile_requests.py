"""Requests that would end the server, exceed its memory budget, or come from another
site's page.

`scripts/faults/faults.py http` sends more of them, at length.
"""

from __future__ import annotations

import http.client
import json
import socket

import httpx
import pytest

from helpers.servers import Service, needed
from helpers.waiting import wait_until
from hostile_http import POSTED, UNFINISHED, deep_body, send_unfinished, status_now
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
    return server.post(path, content=content, headers={"Content-Type": "text/plain"} | headers)


@pytest.mark.parametrize("path", POSTED)
def test_refuses_deep_json_on_every_route(served, path):
    """Routes that are off read no body."""
    for key in ("messages", "input", "prompt", "tools"):
        answer = post(served, path, deep_body(key, 150_000))
        if answer.status_code == 400:
            assert "expected at most 512 levels" in answer.text
        else:
            assert answer.status_code in (403, 501) or path == "/tools"


PARSED = ("/completion", "/api/chat", "/api/embed", "/v1/responses", "/v1/messages", "/tokenize")


@pytest.mark.parametrize("path", PARSED)
def test_depth_limit(served, path):
    refused, read = (post(served, path, deep_body("input", depth)) for depth in (512, 511))
    assert refused.status_code == 400 and "expected at most 512 levels" in refused.text
    assert "512 levels" not in read.text


def test_brackets_inside_strings_do_not_count(served):
    text = "[" * 2000 + '\\"' + "{" * 2000
    assert post(served, "/tokenize", {"content": text}).status_code == 200


def chain(n: int) -> dict:
    """A schema that refers to a definition, which refers to the next one, n times."""
    definitions = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)}
    return {"$defs": definitions | {f"a{n}": {}}, "$ref": "#/$defs/a0"}


def object_of(properties: dict, additional: object = False) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": additional}


ITSELF = {"$ref": "#/$defs/a"}
SCHEMAS = {
    "a chain of references": chain(20_000),
    "a reference to itself": {"allOf": [ITSELF], "$defs": {"a": ITSELF}},
    "a property with a long name": object_of({"p" * 200_000: {}}, {"type": "string"}),
    "a long run of signs": object_of({"$" * 200_000: {"type": "string"}}),
    "nested groups": {"pattern": "^" + "(" * 50_000 + "a" + ")" * 50_000 + "$"},
    "many optional properties": object_of({f"p{i}": {"type": "null"} for i in range(1500)}),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_schemas_end_no_server(served, name):
    schema = SCHEMAS[name]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools": [tool]}
    for path, body in (
        ("/completion", {"prompt": "x", "n_predict": 2, "json_schema": schema}),
        ("/v1/chat/completions", asked | {"tool_choice": "required"}),
    ):
        assert post(served, path, body).status_code in (200, 400, 500)
    assert served.process.poll() is None


def test_types_of_shared_references_are_computed_once(served):
    """Each level refers twice to the next: 60 levels took years."""
    levels = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
    levels["a60"] = {"type": "string"}
    parameters = object_of({"x": {"$ref": "#/$defs/a0"}}) | {"$defs": levels}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools": [tool]}
    assert post(served, "/v1/chat/completions", body).status_code in (200, 400)


# --- bodies ---


SMALL = {"n_ctx": 512, "parallel": 1}


@pytest.mark.parametrize("unfinished", UNFINISHED)
def test_unfinished_bodies_stay_in_the_budget(demo, unfinished):
    """Memory borrowed for unfinished bodies is given back when they are dropped."""
    memory = (needed(demo, **SMALL) + 60) << 20  # less than the smallest of them have together
    with Service(demo, memory=memory, **SMALL) as server:
        before = server.metrics()["moeoff_expert_cache_bytes"]
        host, port = server.url.removeprefix("http://").split(":")
        connections = send_unfinished((host, int(port)), *unfinished)
        wait_until(lambda: any(status_now(connection) == 413 for connection in connections))
        assert server.peak <= memory
        assert server.complete("Tom has", 2).usage.completion_tokens == 2  # others are answered
        for connection in connections:
            connection.close()
        wait_until(lambda: server.metrics()["moeoff_expert_cache_bytes"] == before)


def test_a_client_reads_why_its_body_is_refused(demo):
    """Also one that reads nothing before it has sent all."""
    memory = (needed(demo, **SMALL) + 20) << 20
    with Service(demo, memory=memory, **SMALL) as server:
        for body in (b"x" * (90 * MIB), iter([b"x" * MIB] * 90)):
            answer = server.post("/completion", content=body)
            assert answer.status_code == 413 and "--memory" in answer.json()["error"]["message"]
        for data, code in ((b"x" * (90 * MIB), 413), (b"RIFF", 501)):
            answer = server.post("/v1/audio/transcriptions", files={"file": ("a.wav", data)})
            assert answer.status_code == code


# --- sites ---


def ask(url: str, **headers: str) -> tuple[int, str]:
    answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=300)
    return answer.status_code, answer.text


LOCAL = ("localhost", "LOCALHOST:80", "127.0.0.1", "127.1.2.3:8080", "[::1]", "[::1]:8080")
NAMED = ("model.home", "Model.Home:8080")
FOREIGN = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example",
           "[::1].evil.example", "[::2]", "10.0.0.1", 'a"b', "")  # fmt: skip


@pytest.mark.parametrize("name", [*LOCAL, *NAMED, *FOREIGN])
def test_only_local_sites_are_answered(served, name):
    code, text = ask(served.url, Host=name)
    assert code == (403 if name in FOREIGN else 200)
    if name in FOREIGN:
        message = json.loads(text)["error"]["message"]
        assert message.startswith(f"Host {name}")
        assert "--allowed-hosts" in message and "--api-key" in message


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
    answer = post(served, "/completion", {"prompt": "x"}, Origin="https://evil.example")
    assert answer.status_code == 403


def test_clients_without_a_host_are_answered(served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200


OPEN = [{"api_key": "none"}, {"host": "0.0.0.0"}, {"allowed_hosts": ["*"]}]


@pytest.mark.parametrize("options", OPEN)
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
