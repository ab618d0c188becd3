"""Values of answers: log probabilities, usage, thoughts, tools, schemas, and the API's
objects.
"""

from __future__ import annotations

import json

import pytest

from helpers.clients import THINKS, TOOL
from helpers.servers import Service, calling_service

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
REPEATED = "one two three " * 40
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
SCHEMA = {"const": 7}


@pytest.fixture(scope="module")
def served(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=2048, args=["--temp", "0"]) as server:
        yield server


@pytest.fixture(scope="module")
def thinking(demo, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "thinks.jinja"
    path.write_text(THINKS)
    args = ["--temp", "0", "--chat-template-file", str(path)]
    with Service(demo, expert_memory=4 << 20, n_ctx=1024, args=args) as server:
        yield server


@pytest.fixture(scope="module")
def calling(demo, tmp_path_factory):
    with calling_service(demo, tmp_path_factory.mktemp("calling")) as server:
        yield server


def post(server: Service, path: str, status: int = 200, **body) -> dict:
    if path != RESPONSES and "prompt" not in body and "input" not in body:
        body = {"messages": QUESTION} | body
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    return answer.json()


def refused(server: Service, path: str, **body) -> str:
    return post(server, path, status=400, **body)["error"]["message"]


def streamed(server: Service, path: str, **body) -> list[dict]:
    answer = server.post(path, body | {"stream": True})
    lines = answer.raise_for_status().text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# --- log probabilities ---

# drafts of four tokens, whatever they gain
DRAFTS = """
import moeoff.engine.drafts as drafts
drafts.DraftLength.best = property(lambda self: 4)
"""
# what followed two tokens when they stood there before
GUESSES = "--spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 4".split()


@pytest.mark.parametrize("kind", ["logprob", "prob"])
def test_drafted_tokens_have_their_log_probabilities(demo, kind):
    """As without drafts, whole and streamed."""
    body = {"prompt": REPEATED, "n_predict": 60, "temperature": 0, "cache_prompt": False}
    body |= {"n_probs": 3, "post_sampling_probs": kind == "prob"}
    options = {"expert_memory": 4 << 20, "n_ctx": 512, "parallel": 1}

    def values(probabilities: list[dict]) -> list[float]:
        return [one[kind] for one in probabilities]

    def best(probabilities: list[dict]) -> list[tuple[int, int, int]]:
        tops = [one[f"top_{kind}s"] for one in probabilities]
        return [(one["id"], top[0]["id"], len(top)) for one, top in zip(probabilities, tops)]

    with Service(demo, **options) as server:
        plain = post(server, "/completion", **body)
    with Service(demo, DRAFTS, spec_type="ngram-simple", args=GUESSES, **options) as server:
        drafted = post(server, "/completion", **body)
        parts = streamed(server, "/completion", **body)
    assert drafted["content"] == plain["content"] and drafted["timings"]["draft_n_accepted"] > 0
    expected = plain["completion_probabilities"]
    pieces = [one for part in parts for one in part.get("completion_probabilities", ())]
    for found in (drafted["completion_probabilities"], pieces):
        assert best(found) == best(expected)
        assert values(found) == pytest.approx(values(expected), abs=0.05)


def test_log_probabilities_beside_tools_in_a_stream(calling):
    """Also of tokens whose text is held back: as many as in a whole answer."""
    body = {"messages": QUESTION, "tools": [TOOL], "cache_prompt": False}
    body |= {"logprobs": True, "top_logprobs": 2}
    whole = post(calling, CHAT, **body)["choices"][0]
    assert whole["message"]["tool_calls"]
    parts = [choice for event in streamed(calling, CHAT, **body) for choice in event["choices"]]
    assert parts[-1]["finish_reason"] == "tool_calls"
    expected = whole["logprobs"]["content"]
    found = [one for part in parts for one in (part.get("logprobs") or {}).get("content", ())]
    assert [one["id"] for one in found] == [one["id"] for one in expected]
    values = [one["logprob"] for one in expected]
    assert [one["logprob"] for one in found] == pytest.approx(values, abs=0.05)


# --- usage ---


def test_usage_counts_every_answer_and_each_prompt_once(served):
    def usage(prompt: str | list[str], n: int) -> tuple[int, int]:
        options = {"max_tokens": 5, "ignore_eos": True, "n": n}
        found = post(served, "/v1/completions", prompt=prompt, **options)["usage"]
        assert found["total_tokens"] == found["completion_tokens"] + found["prompt_tokens"]
        return found["completion_tokens"], found["prompt_tokens"]

    _, first = usage("Tom has", 1)
    _, second = usage("Ann and Bob have", 1)
    assert usage("Tom has", 3) == (15, first)
    assert usage(["Tom has", "Ann and Bob have"], 2) == (20, first + second)


ASKED = {CHAT: {"messages": QUESTION}, "/v1/completions": {"prompt": "Tom has"}}


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_of_several_answers_ends_in_one_usage_part(served, path):
    options = {"n": 3, "max_tokens": 5, "ignore_eos": True}
    options["stream_options"] = {"include_usage": True}
    *events, last = streamed(served, path, **options, **ASKED[path])
    assert not any(event.get("usage") for event in events)
    assert last["usage"]["completion_tokens"] == 15 and last["moeoff"]["hits"] > 0
    choices = [choice for event in (*events, last) for choice in event["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1, 2}


# --- Anthropic's Messages ---


def test_thinking_is_switched_off(thinking):
    """The template then writes the empty thought into the prompt."""

    def n_tokens(kind: str) -> int:
        body = {"max_tokens": 2, "thinking": {"type": kind}}
        usage = post(thinking, MESSAGES, **body)["usage"]
        n = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert n == post(thinking, f"{MESSAGES}/count_tokens", **body)["input_tokens"]
        return n

    assert n_tokens("disabled") > n_tokens("enabled")


def tool(path: str, name: str) -> dict:
    """A tool, as the API of a route writes it."""
    function = TOOL["function"] | {"name": name}
    if MESSAGES in path:
        return {"name": name, "description": "", "input_schema": function["parameters"]}
    return {"type": "function"} | ({"function": function} if CHAT in path else function)


def choice(path: str, name: str) -> dict:
    """Return the tool_choice that makes a model call a tool."""
    if MESSAGES in path:
        return {"type": "tool", "name": name}
    return {"type": "function"} | ({"function": {"name": name}} if CHAT in path else {"name": name})


COUNTING = (f"{MESSAGES}/count_tokens", f"{CHAT}/input_tokens", f"{RESPONSES}/input_tokens")


@pytest.mark.parametrize("path", COUNTING)
def test_a_named_tool_is_the_only_one(calling, path):
    """The prompt holds no other. Where a tool is required, all are there."""
    asked = {"input": "What is 2 + 3?"} if RESPONSES in path else {}
    both = [tool(path, "weigh"), tool(path, "measure")]

    def n_tokens(tools: list[dict], **more) -> int:
        return post(calling, path, tools=tools, **asked, **more)["input_tokens"]

    named = n_tokens(both, tool_choice=choice(path, "measure"))
    assert named == n_tokens(both[1:]) < n_tokens(both)
    required = {"type": "any"} if MESSAGES in path else "required"
    assert n_tokens(both, tool_choice=required) == n_tokens(both)
    assert "cook" in refused(calling, path, tools=both, tool_choice=choice(path, "cook"), **asked)


def test_no_tool_is_called(calling):
    body = {"tools": [tool(MESSAGES, "measure")], "max_tokens": 16}
    answer = post(calling, MESSAGES, tool_choice={"type": "none"}, **body)
    assert answer["stop_reason"] != "tool_use"
    assert all(block["type"] != "tool_use" for block in answer["content"])
    assert "expected type auto" in refused(calling, MESSAGES, tool_choice={"type": "some"}, **body)


def test_sampling_options_of_messages_pass_through(served):
    def text(**more) -> str:
        return post(served, MESSAGES, max_tokens=24, **more)["content"][0]["text"]

    hot = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert text(**hot, seed=1) == text(**hot, seed=1) != text(**hot, seed=2)
    assert text(**hot | {"min_p": 1.0}, seed=1) == text(temperature=0)


def test_a_conversation_of_messages_stays_in_its_slot(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=1024, parallel=2, cache_ram=0) as server:
        answers = [post(server, MESSAGES, max_tokens=2, id_slot=slot) for slot in (0, 1, 1)]
    first, other, again = (answer["usage"]["cache_read_input_tokens"] for answer in answers)
    assert first == other == 0 < again


# --- thoughts, schemas ---


def test_a_stop_behind_an_empty_thought_leaves_no_content(thinking):
    grammar = 'root ::= "<think>\\n\\n</think>\\n\\nSTOP"'
    body = {"messages": QUESTION, "max_tokens": 40, "stop": ["STOP"], "grammar": grammar}
    whole = post(thinking, CHAT, **body)["choices"][0]
    assert whole["finish_reason"] == "stop" and whole["message"]["role"] == "assistant"
    assert not whole["message"]["content"]
    for event in streamed(thinking, CHAT, **body):
        for part in event["choices"]:
            assert not part["delta"].get("content") and not part["delta"].get("reasoning_content")
    answer = post(thinking, MESSAGES, max_tokens=40, stop_sequences=["STOP"], grammar=grammar)
    assert answer["content"] == []


FORMS = [{"schema": SCHEMA}, {"json_schema": {"name": "seven", "schema": SCHEMA}}]


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_a_schema_are_honoured(served, form):
    answer = post(served, CHAT, max_tokens=16, response_format={"type": "json_schema"} | form)
    assert json.loads(answer["choices"][0]["message"]["content"]) == 7


def test_a_schema_of_responses(served):
    text = {"format": {"type": "json_schema", "name": "seven", "schema": SCHEMA}}
    answer = post(served, RESPONSES, input="2 + 3?", max_output_tokens=16, text=text)
    assert json.loads(answer["output"][0]["content"][0]["text"]) == 7


def test_a_format_without_a_schema_is_refused(served):
    assert "schema" in refused(served, CHAT, response_format={"type": "json_schema"})


@pytest.mark.parametrize("body", [b"{", b"[1,", b"\xff", b""])
def test_bodies_that_are_no_json_are_the_requests_fault(served, body):
    answer = served.post("/completion", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


# --- Responses ---

FIELDS = set(
    "id object created_at status error incomplete_details instructions max_output_tokens model "
    "output parallel_tool_calls previous_response_id reasoning store temperature text tool_choice "
    "tools top_p truncation usage user metadata".split()
)


def test_responses_have_the_fields_of_the_specification(served):
    asked = {"instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0.5}
    asked |= {"metadata": {"a": "b"}, "user": "me"}
    defaults = {"object": "response", "tools": [], "tool_choice": "auto", "error": None}
    defaults["text"] = {"format": {"type": "text"}}

    def check(response: dict, done: bool) -> None:
        assert response.keys() >= FIELDS and 0 < response["top_p"] <= 1
        assert response | asked | defaults == response
        assert response["status"] == ("completed" if done else "in_progress")
        assert bool(response["output"]) is done is bool(response["usage"])

    check(post(served, RESPONSES, input="What is 2 + 3?", **asked), done=True)
    events = streamed(served, RESPONSES, input="What is 2 + 3?", **asked)
    responses = {event["type"]: event["response"] for event in events if "response" in event}
    for kind in ("created", "in_progress", "completed"):
        check(responses[f"response.{kind}"], done=kind == "completed")
    assert len({response["id"] for response in responses.values()}) == 1
