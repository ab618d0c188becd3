"""`moeoff serve --models`: the models of a machine by their names, one of them open at
a time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ollama
import openai
import psutil
import pytest

from helpers.browser import Browser, Chat, find_browser
from helpers.files import COMMAND, DEMO
from helpers.servers import Command, refused
from helpers.waiting import wait_until

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
FIRST, SECOND = "org/first:Q8_0", "second"  # in Hugging Face's cache, and in a folder
OPTIONS = "--expert-memory 4M -c 512 -np 2 -t 1 --kv-disk 0 --temp 0 -n 16".split()


def put_models(home: Path) -> dict[str, str]:
    """Models in a home folder; returns its environment."""
    for path in (
        ".cache/huggingface/hub/models--org--first/snapshots/1/first-Q8_0.gguf",
        "models/second.gguf",
    ):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DEMO, home / path)
    (home / "models/broken.gguf").write_bytes(b"GGUF")
    named = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS")
    env = {name: value for name, value in os.environ.items() if name not in named}
    return env | {"HOME": str(home), "MOEOFF_MODELS": str(home / "models")}


class Served(Command):
    """A router with both models."""

    def __init__(self, home: Path, *words: str, key: str | None = None):
        super().__init__("--models", *OPTIONS, *words, key=key, env=put_models(home))

    def open(self) -> list[str]:
        """Names of the models that are open."""
        entries = self.get("/v1/models").json()["data"]
        return [entry["id"] for entry in entries if entry["status"]["value"] == "loaded"]

    def servers(self) -> list[psutil.Process]:
        """The processes that serve a model."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "moeoff.server.process" in child.cmdline()]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("home")) as server:
        yield server
        server.stop()


def test_lists(served):
    """Under the names that `moeoff models` prints; what is no model of ours is left
    out.
    """
    client = served.client
    assert [model.id for model in client.models.list()] == [FIRST, SECOND]
    assert client.models.retrieve(SECOND).id == SECOND and client.models.retrieve(FIRST).id == FIRST
    tags = ollama.Client(served.url).list().models
    assert [model.model for model in tags] == [FIRST, SECOND]
    assert all(model.size > 1 << 20 and model.modified_at.year >= 2020 for model in tags)
    assert served.open() in ([FIRST], [SECOND])


def test_a_model_is_opened_on_request(served):
    """The other one is closed, whichever API asks; the answers are the same, as the
    files are.
    """
    client = served.client

    def ask(model: str) -> str:
        answer = client.chat.completions.create(model=model, messages=MESSAGES)
        return answer.choices[0].message.content

    text = ask(SECOND)
    assert served.open() == [SECOND] and len(served.servers()) == 1
    assert ask(FIRST) == text and served.open() == [FIRST] and len(served.servers()) == 1
    answer = ollama.Client(served.url).chat(SECOND, MESSAGES)
    assert answer.message.content == text and answer.model == SECOND
    assert served.open() == [SECOND] and len(served.servers()) == 1
    assert [model.model for model in ollama.Client(served.url).ps().models] == [SECOND]
    assert ollama.Client(served.url).show(FIRST).details.family == "qwen2moe"
    assert served.open() == [FIRST]
    chunks = client.chat.completions.create(model=SECOND, messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == text
    assert ask("") == text and served.open() == [SECOND], "without a name the open one answers"


def test_an_unknown_name(served):
    before = served.open()
    client = served.client
    with pytest.raises(openai.NotFoundError, match="'third' not found"):
        client.chat.completions.create(model="third", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")
    with pytest.raises(ollama.ResponseError, match="'third' not found") as raised:
        ollama.Client(served.url).chat("third", MESSAGES)
    assert raised.value.status_code == 404
    reply = served.post("/v1/messages", dict(model="third", max_tokens=8, messages=MESSAGES))
    assert reply.status_code == 404 and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "not_found_error"
    assert served.open() == before


def test_answers_end_before_their_model_is_closed(served):
    """Requests for both at once: each is answered, and in turn, so that neither waits
    forever.
    """
    served.post("/v1/chat/completions", dict(model=FIRST, messages=MESSAGES))

    def ask(model: str) -> dict:
        body = {"prompt": "one two three", "n_predict": 64, "ignore_eos": True, "model": model}
        return served.post("/completion", body).json()

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(ask, [FIRST, SECOND, FIRST, SECOND, FIRST, FIRST]))
    assert [reply["tokens_predicted"] for reply in replies] == [64] * 6
    assert len({reply["content"] for reply in replies}) == 1
    assert len(served.servers()) == 1


def test_the_page_offers_the_models(served):
    properties = served.get("/props").json()
    assert properties["role"] == "router" and properties["max_instances"] == 1
    (other,) = {FIRST, SECOND} - set(served.open())
    with httpx.stream("GET", f"{served.url}/models/sse", timeout=300) as events:
        lines = events.iter_lines()
        assert served.post("/models/load", dict(model=other)).json() == {"success": True}
        told = {}
        while told.get(other) != "loaded":
            line = next(lines)
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                told[event["model"]] = event["data"]["status"]
    assert served.open() == [other]
    assert served.get(f"/props?model={other}").json()["model_path"].endswith(".gguf")
    assert "moeoff_budget_cuts_total" in served.get("/metrics").text
    assert served.get("/moeoff").status_code == 200


def test_a_client_that_goes_ends_its_answer(served):
    body = {
        "prompt": "one",
        "n_predict": 400,
        "ignore_eos": True,
        "stream": True,
        "model": served.open()[0],
    }
    with httpx.stream("POST", f"{served.url}/completion", json=body, timeout=300) as answer:
        next(answer.iter_lines())
    wait_until(lambda: "llamacpp:requests_processing 0" in served.get("/metrics").text)


def test_what_is_not_http(served):
    for sent, status in (
        (b"nonsense\r\n\r\n", 400),
        (b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /completion HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, 400),
    ):
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(sent)
            assert connection.recv(100).split(b" ")[1] == str(status).encode(), sent[:40]
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(chunked + b'e\r\n{"content": "a\r\n2\r\n"}\r\n0\r\n\r\n')
        assert b'"tokens"' in connection.makefile("rb").read()


def test_who_may_not_ask_opens_nothing(tmp_path):
    """Keys are the servers' own to check, also before a model is opened."""
    second = tmp_path / "models/second.gguf"
    with Served(tmp_path, "--api-key", "secret", "-m", str(second), key="secret") as server:
        assert server.get("/health", key=None).json() == {"status": "ok"}
        assert server.get("/v1/models", key=None).status_code == 401
        assert server.post("/models/load", {"model": FIRST}, key=None).status_code == 401
        for model in (FIRST, "third"):
            body = {"model": model, "messages": MESSAGES}
            assert server.post("/v1/chat/completions", body, key=None).status_code == 401
        entries = server.get("/v1/models").json()["data"]
        assert [entry["status"]["value"] for entry in entries] == ["loaded", "unloaded"]
        assert entries[0]["id"] == SECOND, "that of -m is first"
        body = {"model": FIRST, "messages": MESSAGES}
        assert server.post("/v1/chat/completions", body).status_code == 200
        second.unlink()
        body = {"prompt": "one", "n_predict": 4}
        lost = server.post("/completion", body | {"model": SECOND})
        assert lost.status_code == 500 and "cannot be opened" in lost.json()["error"]["message"]
        kept = server.post("/completion", body)
        assert kept.status_code == 200, "the one before is open again"
        left = server.get("/v1/models").json()["data"]
        assert [entry["id"] for entry in left] == [FIRST]


def test_a_page_of_another_site_opens_nothing(served):
    (other,) = {FIRST, SECOND} - set(served.open())
    origin = {"Origin": "https://example.org"}
    reply = served.post("/models/load", {"model": other}, headers=origin)
    assert reply.status_code == 403 and served.open() != [other]
    assert "--cors https://example.org" in reply.json()["error"]["message"]
    for host, status in (("example.org", 403), ("127.1.2.3", 200), ("[::1]:8080", 200)):
        assert served.get("/v1/models", headers={"Host": host}).status_code == status, host
    local = served.get("/v1/models", headers={"Origin": "http://localhost:3000"})
    assert local.status_code == 200


def test_a_server_that_has_ended_is_started_again(served):
    (name,) = served.open()
    (child,) = served.servers()
    child.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert (
        served.post("/v1/chat/completions", dict(model=name, messages=MESSAGES)).status_code == 200
    )


def test_what_is_of_one_model_is_refused(demo):
    assert "--alias" in refused(COMMAND, "serve", "--models", "-m", demo, "--alias", "x")
    assert "--models serves" in refused(COMMAND, "serve", "-m", demo, "--models-dir", "x")


@pytest.mark.slow
def test_a_person_chooses_on_the_page(served, tmp_path):
    program = find_browser()
    if program is None or served.get("/").status_code == 404:
        pytest.skip("no Chromium on PATH, or a build without the web page")
    served.post("/models/load", dict(model=FIRST))
    with Browser(program, tmp_path / "profile") as browser:
        chat = Chat(browser, served.url)

        def click(selector: str, text: str) -> None:
            of = f"[...document.querySelectorAll({selector!r})]"
            element = f"{of}.filter((e) => e.textContent.trim().startsWith({text!r})).at(-1)"
            chat.page.wait(f"{element} !== undefined")
            chat.page.evaluate(f"{element}.click()")

        chat.ask(MESSAGES[0]["content"])
        answer = chat.read()
        assert served.open() == [FIRST]
        click("form button", "first")
        click("[role=option], [role=menuitem]", "second")
        wait_until(lambda: served.open() == [SECOND])
        chat.ask("And 4 + 4?")
        assert answer and chat.read()
        refused = "performance.getEntriesByType('resource').filter((e) => e.responseStatus >= 400)"
        assert chat.page.evaluate(f"{refused}.map((e) => e.name)") == []
