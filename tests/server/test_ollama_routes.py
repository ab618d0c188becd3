"""Ollama's API on our server, over plain HTTP and with Ollama's own client."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from helpers.clients import TOOL
from helpers.servers import Service, calling_service

QUESTION = "What is 2 + 3?"
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 24}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def served(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=1024, alias="demo") as server:
        yield server


def post(served: Service, path: str, **body) -> httpx.Response:
    return served.post(f"{path}", {"model": "demo"} | body)


def whole(served: Service, path: str, **body) -> dict:
    """The answer where nothing is streamed."""
    reply = post(served, path, stream=False, **body)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith(
        "application/json"
    ), reply.text
    return reply.json()


def lines(served: Service, path: str, **body) -> list[dict]:
    """Those of a stream, which is what one gets unasked."""
    reply = post(served, path, **body)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson", (
        reply.text
    )
    parts = [json.loads(line) for line in reply.text.splitlines()]
    assert [line["done"] for line in parts] == [False] * (len(parts) - 1) + [True]
    return parts


def error(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    text = reply.json()["error"]
    assert isinstance(text, str) and text
    return text


def check_last(last: dict) -> None:
    assert last["done"] is True and last["done_reason"] in ("stop", "length")
    assert last["prompt_eval_count"] > 0 and last["eval_count"] > 0 and last["load_duration"] == 0
    assert last["total_duration"] >= last["eval_duration"] > 0 and last["prompt_eval_duration"] > 0
    assert last["moeoff"]["hits"] + last["moeoff"]["misses"] > 0


# --- chat and generate ---


def test_chat_is_the_same_in_every_form(served):
    # from here on the prompt is kept, and each answer computed from the same place
    served.ask(QUESTION)
    expected = served.ask(QUESTION)
    answer = whole(served, "/api/chat", messages=MESSAGES, options=GREEDY)
    check_last(answer)
    assert answer["message"] == {
        "role": "assistant",
        "content": expected.choices[0].message.content,
    }
    assert answer["prompt_eval_count"] == expected.usage.prompt_tokens
    assert answer["eval_count"] == expected.usage.completion_tokens

    streamed = lines(served, "/api/chat", messages=MESSAGES, options=GREEDY)
    check_last(streamed[-1])
    assert len(streamed) > 5 and all(line["message"]["role"] == "assistant" for line in streamed)
    assert all(line["message"]["content"] for line in streamed[:-1])
    assert streamed[-1]["message"]["content"] == ""
    assert "".join(line["message"]["content"] for line in streamed) == answer["message"]["content"]
    assert not {"done_reason", "eval_count", "moeoff"} & set(streamed[0])
    for line in streamed:
        assert line["model"] == "demo"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", line["created_at"])


def test_generate_is_a_chat_of_one_message(served):
    chat = whole(served, "/api/chat", messages=MESSAGES, options=GREEDY)
    answer = whole(served, "/api/generate", prompt=QUESTION, options=GREEDY)
    check_last(answer)
    assert "message" not in answer and answer["prompt_eval_count"] == chat["prompt_eval_count"]
    streamed = lines(served, "/api/generate", prompt=QUESTION, options=GREEDY)
    check_last(streamed[-1])
    assert (
        "".join(line["response"] for line in streamed)
        == whole(served, "/api/generate", prompt=QUESTION, options=GREEDY)["response"]
    )
    with_system = whole(
        served, "/api/generate", prompt=QUESTION, system="Numbers only.", options=GREEDY
    )
    assert with_system["prompt_eval_count"] > answer["prompt_eval_count"]


def test_raw_is_a_plain_completion(served):
    def complete():
        return served.client.completions.create(
            model="x", prompt="The heron stood", max_tokens=24, temperature=0
        )

    complete()
    expected = complete()
    answer = whole(served, "/api/generate", prompt="The heron stood", raw=True, options=GREEDY)
    check_last(answer)
    assert answer["response"] == expected.choices[0].text
    assert answer["prompt_eval_count"] == expected.usage.prompt_tokens
    streamed = lines(served, "/api/generate", prompt="The heron stood", raw=True, options=GREEDY)
    check_last(streamed[-1])
    assert "".join(line["response"] for line in streamed) == answer["response"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/api/chat", {}),
        ("/api/chat", {"messages": []}),
        ("/api/generate", {}),
        ("/api/generate", {"prompt": ""}),
    ],
)
def test_nothing_asked_loads_the_model(served, path, body):
    answer = post(served, path, keep_alive="5m", **body).json()
    assert answer["done"] is True and answer["done_reason"] == "load" and answer["model"] == "demo"
    assert answer.get("message", {"role": "assistant", "content": ""}) == {
        "role": "assistant",
        "content": "",
    }
    assert answer.get("response", "") == ""


def test_any_name_means_the_model(served):
    assert post(served, "/api/chat", model="another:7b").json()["model"] == "another:7b"
    assert served.post("/api/chat", {}).json()["model"] == "demo"


# --- options ---


def heron(served: Service, **options) -> dict:
    return whole(
        served, "/api/generate", prompt="The heron stood", raw=True, options=GREEDY | options
    )


def test_num_predict(served):
    answer = heron(served, num_predict=5)
    assert answer["eval_count"] == 5 and answer["done_reason"] == "length"
    assert heron(served, num_predict=-2, stop=["e"])["done_reason"] == "stop"  # no limit


def test_stop(served):
    heron(served)
    text = heron(served)["response"]
    word = text.split()[2]
    for stop in (word, [word, "never said"]):
        answer = heron(served, stop=stop)
        assert answer["response"] == text.partition(word)[0] and answer["done_reason"] == "stop"


def test_seed(served):
    heron(served)
    one, again, other = (
        heron(served, temperature=1.5, seed=seed, num_predict=32)["response"] for seed in (7, 7, 8)
    )
    assert one == again != other


def test_options_of_every_kind(served):
    """Options that the server lacks are left out, those of another range translated,
    and wrong ones are an error.
    """
    known = {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.7, "repeat_penalty": 1.2, "repeat_last_n": -1, "presence_penalty": 1.5,
             "frequency_penalty": 1.0, "mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6}  # fmt: skip
    check_last(
        heron(
            served,
            **known,
            temperature=0.8,
            num_ctx=64,
            num_gpu=1,
            num_thread=8,
            numa=False,
            num_keep=5,
            penalize_newline=True,
        )
    )
    assert "temperature" in error(
        post(served, "/api/generate", prompt="x", options={"temperature": "hot"}), 400
    )


@pytest.mark.parametrize("path, ask", [("/api/chat", {"messages": MESSAGES}), ("/api/generate", {"prompt": QUESTION}),
                                       ("/api/generate", {"prompt": QUESTION, "raw": True})])  # fmt: skip
def test_format(served, path, ask):
    def text(answer: dict) -> str:
        return answer["message"]["content"] if "message" in answer else answer["response"]

    assert isinstance(
        json.loads(
            text(whole(served, path, **ask, format=SCHEMA, options=GREEDY | {"num_predict": 48}))
        )["n"],
        int,
    )
    # a finished answer loses the fence
    assert re.match(
        r"\s*(```json\s*)?(\{|$)", text(whole(served, path, **ask, format="json", options=GREEDY))
    )
    assert text(whole(served, path, **ask, format="", options=GREEDY)) == text(
        whole(served, path, **ask, format=None, options=GREEDY)
    )
    assert "format" in error(post(served, path, **ask, format="yaml"), 400)


@pytest.mark.parametrize("think", [True, False, "low"])
def test_think_where_the_model_does_not(served, think):
    answer = whole(served, "/api/chat", messages=MESSAGES, think=think, options=GREEDY)
    assert answer["message"]["content"] and "thinking" not in answer["message"]


# --- tools ---


@pytest.fixture(scope="module")
def with_tools(demo, tmp_path_factory):
    with calling_service(demo, tmp_path_factory.mktemp("template"), alias="demo") as server:
        yield server


def test_a_tool_is_called(with_tools):
    ask = {"messages": MESSAGES, "tools": [TOOL], "options": GREEDY | {"num_predict": 96}}
    (call,) = whole(with_tools, "/api/chat", **ask)["message"]["tool_calls"]
    assert call["id"]
    assert call["function"] == {
        "index": 0,
        "name": "measure",
        "arguments": {"unit": "metres"},
    }
    streamed = lines(with_tools, "/api/chat", **ask)
    assert streamed[-1]["done_reason"] == "stop"
    (call,) = (call for line in streamed for call in line["message"].get("tool_calls", []))
    assert call["function"] == {"index": 0, "name": "measure", "arguments": {"unit": "metres"}}


def test_calls_and_results_are_read_back(with_tools):
    """The same conversation takes the same prompt here and through OpenAI's route."""
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "measure", "arguments": {"unit": "metres"}}}],
    }
    messages = [*MESSAGES, called, {"role": "tool", "tool_name": "measure", "content": "5 by 4"}]
    answer = whole(with_tools, "/api/chat", messages=messages, tools=[TOOL], options=GREEDY)
    function = {
        "name": "measure",
        "arguments": json.dumps({"unit": "metres"}, separators=(",", ":")),
    }
    as_openai = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]},
                 {"role": "tool", "tool_call_id": "call00000", "content": "5 by 4"}]  # fmt: skip
    expected = with_tools.client.chat.completions.create(
        model="x", messages=as_openai, tools=[TOOL], max_tokens=4
    )
    assert answer["prompt_eval_count"] == expected.usage.prompt_tokens
    assert "tools" in post(with_tools, "/api/show").json()["capabilities"]


# --- models ---


def test_models(served, demo):
    (model,) = served.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "demo"
    assert model["size"] > 1 << 20
    assert re.fullmatch("[0-9a-f]{64}", model["digest"])
    assert re.fullmatch(r"20\d\d-.*Z", model["modified_at"])
    details = model["details"]
    assert (
        details["format"],
        details["family"],
        details["families"],
        details["quantization_level"],
    ) == ("gguf", "qwen2moe", ["qwen2moe"], "Q8_0")
    assert re.fullmatch(r"\d+\.\dM", details["parameter_size"])
    (running,) = served.get("/api/ps").json()["models"]
    assert running["digest"] == model["digest"]
    assert running["context_length"] == 256
    assert running["size_vram"] == 0


def test_show(served):
    for body in ({"model": "demo"}, {"name": "demo", "verbose": True}):
        shown = served.post("/api/show", body).json()
        info = shown["model_info"]
        assert info["general.architecture"] == "qwen2moe"
        assert info["qwen2moe.context_length"] == 256
        assert info["qwen2moe.expert_count"] == 32
        assert info["general.name"] == "moeoff demo MoE"
        assert info["tokenizer.ggml.add_bos_token"] is False
        assert info["general.parameter_count"] > 1e6
        assert info["general.file_type"] == 7
        assert "Assistant:" in shown["template"]
        assert shown["capabilities"] == ["completion"]
        assert shown["license"] == "mit"
        assert shown["parameters"].split() == ["num_ctx", "256"]
        assert shown["details"]["family"] == "qwen2moe"


def test_version_and_the_page_at_the_root(served):
    assert tuple(map(int, served.get("/api/version").json()["version"].split("."))) >= (0, 12, 0)
    head = httpx.head(f"{served.url}/api/version", timeout=300)
    assert head.status_code == 200 and head.text == ""
    # as Ollama says there
    assert served.get("/").text != "Ollama is running"


def test_a_server_without_embeddings(served):  # test_more_routes.py has one with them
    assert "embedding" in error(post(served, "/api/embed", input="one"), 501)


# --- errors ---


def test_requests_that_are_no_good(served):
    def send(path: str, content: str) -> httpx.Response:
        return served.post(f"{path}", content=content)

    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show"):
        assert "parse" in error(send(path, "{not JSON"), 400)
        assert "object" in error(send(path, "[1]"), 400)
    assert "role" in error(post(served, "/api/chat", messages=[{"content": "hi"}]), 400)
    error(post(served, "/api/chat", messages="hi"), 400)
    assert "template" in error(
        post(served, "/api/generate", prompt="x", template="{{ .Prompt }}"), 400
    )
    assert "images" in error(
        post(served, "/api/generate", prompt="x", raw=True, images=["aGk="]), 400
    )
    # the demo model has no tokens for it
    assert "Infill" in error(post(served, "/api/generate", prompt="def f(", suffix="return"), 501)
    assert "image" in error(
        post(
            served,
            "/api/chat",
            messages=[{"role": "user", "content": "What is this?", "images": ["aGk="]}],
        ),
        400,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_is_too_long(served, stream):
    assert "context" in error(
        post(served, "/api/generate", prompt="heron " * 3000, stream=stream), 400
    )


# --- Ollama's client ---
