"""The table of helpers/clients.py: every client, everything that it can do."""

from __future__ import annotations

import json

import pytest

from helpers.clients import CLIENTS, SCHEMA, WHAT
from helpers.servers import Service, calling_service
from helpers.waiting import wait_until

QUESTION = "What is 2 + 3?"
MODEL = "demo"
N = 4000  # tokens of an answer that nobody waits for


@pytest.fixture(scope="module")
def chatting(demo):
    with Service(
        demo, expert_memory=4 << 20, n_ctx=2048, alias=MODEL, args=["--temp", "0", "-n", "256"]
    ) as server:
        yield server


@pytest.fixture(scope="module")
def calling(demo, tmp_path_factory):
    with calling_service(demo, tmp_path_factory.mktemp("template"), alias=MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def endless(demo):
    args = ["--override-kv", f"qwen2moe.context_length=int:{2 * N}", "--ignore-eos", "-n", str(N)]
    with Service(demo, expert_memory=4 << 20, n_ctx=2 * N, alias=MODEL, args=args) as server:
        yield server


@pytest.fixture(scope="module")
def embedding(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=512, alias=MODEL, embedding=True) as server:
        yield server


@pytest.fixture
def client(request, tmp_path):
    """Make a client of a server."""
    kind = request.param

    return lambda served: kind(served.url, MODEL, tmp_path)


def each(what: str) -> pytest.MarkDecorator:
    """Every client that can do it."""
    assert what in WHAT
    able = {name: kind for name, kind in CLIENTS.items() if what not in kind.cannot}
    return pytest.mark.parametrize(
        "client",
        [
            pytest.param(kind, id=name, marks=pytest.mark.slow if kind.slow else ())
            for name, kind in able.items()
        ],
        indirect=True,
    )


def expected(served: Service) -> str:
    """Return the server's answer to a plain request. It is asked twice: from then on
    the prompt is kept, and each answer computed from the same place.
    """
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    texts = [
        served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        for _ in range(2)
    ]
    return texts[1].strip()


@each("chat")
def test_chat(client, chatting):
    assert expected(chatting) == client(chatting).chat(QUESTION).strip() != ""


@each("stream")
def test_stream(client, chatting):
    text = expected(chatting)
    pieces = [piece for piece in client(chatting).stream(QUESTION) if piece]
    assert "".join(pieces).strip() == text and len(pieces) > 3


@each("tools")
def test_tools(client, calling):
    """The client calls the tool and returns its result: this model calls it once more."""
    replies = client(calling).tools(QUESTION)
    assert len(replies) > 1 and all(calls == [("measure", {"unit": "metres"})] for calls in replies)


@each("schema")
def test_schema(client, chatting):
    answer = json.loads(client(chatting).schema("A number as JSON"))
    assert answer.keys() == set(SCHEMA["required"]) and isinstance(answer["n"], int)


@each("embeddings")
def test_embeddings(client, embedding):
    one, same, other = client(embedding).embeddings(["a dog", "a dog", "seven"])
    assert one == pytest.approx(same, abs=1e-4)
    assert one != pytest.approx(other, abs=1e-2)
    assert len(one) == 128


@each("list")
def test_list(client, chatting):
    assert client(chatting).list() == [MODEL]


@each("cancel")
def test_cancel(client, endless):
    """A cancelled answer is no longer computed."""
    before = endless.metrics()["llamacpp:tokens_predicted_total"]
    client(endless).cancel(QUESTION)
    wait_until(endless.is_idle)
    assert endless.metrics()["llamacpp:tokens_predicted_total"] - before < N


def test_what_a_client_cannot_do_is_named_with_its_reason():
    for kind in CLIENTS.values():
        methods = {what for what in WHAT if hasattr(kind, what)}
        assert methods | kind.cannot.keys() == set(WHAT)
        assert not methods & kind.cannot.keys()
        assert all(kind.cannot.values())
