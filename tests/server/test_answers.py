"""Values of answers: log probabilities, usage, thoughts, tools, schemas and the objects of the OpenAI and Anthropic APIs."""

from __future__ import annotations

import json

import httpx
import pytest

from helpers.clients import TOOL
from helpers.servers import Service, calling_service

REPEATED = "one two three " * 40
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
SCHEMA = {"const": 7}
# A template with thoughts that a request can switch off.
THINKS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def served(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=2048, args=["--temp", "0"]) as server:
        yield server


@pytest.fixture(scope="module")
def thinking(demo, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "thinks.jinja"
    path.write_text(THINKS)
    with Service(
        demo,
        expert_memory=4 << 20,
        n_ctx=1024,
        args=["--temp", "0", "--chat-template-file", str(path)],
    ) as server:
        yield server


@pytest.fixture(scope="module")
def calling(demo, tmp_path_factory):
    with calling_service(demo, tmp_path_factory.mktemp("calling")) as server:
        yield server


def post(server: Service, path: str, **body) -> dict:
    answer = httpx.post(server.url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Service, path: str, **body) -> str:
    answer = httpx.post(server.url + path, json=body, timeout=300)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def streamed(server: Service, path: str, **body) -> list[dict]:
    text = httpx.post(server.url + path, json=body | {"stream": True}, timeout=300).raise_for_status().text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# --- log probabilities ---


DRAFTS = "import moeoff.engine.drafts as drafts\ndrafts.DraftLength.best = property(lambda self: 4)\n"  # whatever they gain


@pytest.mark.parametrize("post_sampling", [False, True])
def test_drafted_tokens_have_their_log_probabilities(demo, post_sampling):
    """As without drafts, whole and streamed."""
    body = {
        "prompt": REPEATED,
        "n_predict": 60,
        "temperature": 0,
        "n_probs": 3,
        "post_sampling_probs": post_sampling,
        "cache_prompt": False,
    }
    kind = "prob" if post_sampling else "logprob"
    answers = []
    guesses = [
        "--spec-ngram-simple-size-n",
        "2",
        "--spec-ngram-simple-size-m",
        "4",
    ]  # what followed two tokens when they stood there before
    for options in ({}, {"spec_type": "ngram-simple", "args": guesses}):
        with Service(demo, DRAFTS, expert_memory=4 << 20, n_ctx=512, parallel=1, **options) as server:
            whole = post(server, "/completion", **body)
            parts = [one for part in streamed(server, "/completion", **body) for one in part.get("completion_probabilities", ())]
            answers.append((whole, parts))
    (plain, _), (drafted, drafted_parts) = answers
    assert drafted["content"] == plain["content"] and drafted["timings"]["draft_n_accepted"] > 0
    expected = plain["completion_probabilities"]
    for found in (drafted["completion_probabilities"], drafted_parts):
        assert [one["id"] for one in found] == [one["id"] for one in expected]
        assert [one[kind] for one in found] == pytest.approx([one[kind] for one in expected], abs=0.05)
        for one, other in zip(found, expected):
            assert one[f"top_{kind}s"][0]["id"] == other[f"top_{kind}s"][0]["id"] and len(one[f"top_{kind}s"]) == len(other[f"top_{kind}s"])


def test_drafted_tokens_of_llama_have_their_log_probabilities(demo, monkeypatch):
    import moeoff
    from moeoff.engine.drafts import DraftLength

    verified = []
    verify = moeoff.Llama._verify_draft
    monkeypatch.setattr(DraftLength, "best", property(lambda self: 4))
    monkeypatch.setattr(
        moeoff.Llama,
        "_verify_draft",
        lambda self, tokens: (verified.append(len(tokens)), verify(self, tokens)),
    )
    answers = []
    for options in ({}, {"spec_type": "ngram-simple"}):
        with moeoff.Llama(demo, expert_memory="4M", n_ctx=512, logits_all=True, **options) as llm:
            answers.append(llm.create_completion(REPEATED, max_tokens=40, temperature=0, logprobs=3)["choices"][0])
    assert verified
    plain, drafted = answers
    assert drafted["text"] == plain["text"]
    assert drafted["logprobs"]["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=0.05)
    assert [set(top) for top in drafted["logprobs"]["top_logprobs"]] == [set(top) for top in plain["logprobs"]["top_logprobs"]]


def test_log_probabilities_beside_tools_in_a_stream(calling):
    """Also of tokens whose text is held back: as many as in a whole answer."""
    body = {
        "messages": QUESTION,
        "tools": [TOOL],
        "logprobs": True,
        "top_logprobs": 2,
        "cache_prompt": False,
    }
    whole = post(calling, "/v1/chat/completions", **body)["choices"][0]
    assert whole["message"]["tool_calls"]
    parts = [choice for event in streamed(calling, "/v1/chat/completions", **body) for choice in event["choices"]]
    found = [one for part in parts for one in (part.get("logprobs") or {}).get("content", ())]
    assert [(one["id"], one["logprob"]) for one in found] == [(one["id"], pytest.approx(one["logprob"], abs=0.05)) for one in whole["logprobs"]["content"]]
    assert parts[-1]["finish_reason"] == "tool_calls"


# --- usage ---


def test_usage_counts_every_answer_and_each_prompt_once(served):
    one = post(served, "/v1/completions", prompt="Tom has", max_tokens=5, ignore_eos=True)["usage"]
    three = post(served, "/v1/completions", prompt="Tom has", max_tokens=5, n=3, ignore_eos=True)["usage"]
    assert three["completion_tokens"] == 15 and three["prompt_tokens"] == one["prompt_tokens"] and three["total_tokens"] == 15 + one["prompt_tokens"]
    other = post(served, "/v1/completions", prompt="Ann and Bob have", max_tokens=5, ignore_eos=True)["usage"]
    both = post(
        served,
        "/v1/completions",
        prompt=["Tom has", "Ann and Bob have"],
        max_tokens=5,
        n=2,
        ignore_eos=True,
    )["usage"]
    assert both["completion_tokens"] == 20 and both["prompt_tokens"] == one["prompt_tokens"] + other["prompt_tokens"]


@pytest.mark.parametrize(
    "path, asked",
    [("/v1/chat/completions", {"messages": QUESTION}), ("/v1/completions", {"prompt": "Tom has"})],
)
def test_a_stream_of_several_answers_ends_in_one_usage_part(served, path, asked):
    events = streamed(
        served,
        path,
        n=3,
        max_tokens=5,
        ignore_eos=True,
        stream_options={"include_usage": True},
        **asked,
    )
    assert [bool(event.get("usage")) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["usage"]["completion_tokens"] == 15
    assert len({choice["index"] for event in events for choice in event["choices"]}) == 3


# --- Anthropic's Messages ---


def test_thinking_is_switched_off(thinking):
    """The template then writes the empty thought into the prompt."""
    tokens = {}
    for kind in ("enabled", "disabled"):
        answer = post(thinking, "/v1/messages", messages=QUESTION, max_tokens=2, thinking={"type": kind})
        tokens[kind] = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert tokens["disabled"] > tokens["enabled"]
    counted = post(
        thinking,
        "/v1/messages/count_tokens",
        messages=QUESTION,
        max_tokens=2,
        thinking={"type": "disabled"},
    )
    assert counted["input_tokens"] == tokens["disabled"]


def anthropic(name: str) -> dict:
    return {"name": name, "description": "Measures", "input_schema": TOOL["function"]["parameters"]}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages/count_tokens",
        "/v1/chat/completions/input_tokens",
        "/v1/responses/input_tokens",
    ],
)
def test_a_named_tool_is_the_only_one(calling, path):
    """The prompt holds no other. Unnamed and required, all are there."""

    def n_tokens(names: str, **more) -> int:
        if "messages" in path:
            tools, asked = (
                [anthropic(name) for name in names.split()],
                {"messages": QUESTION, "max_tokens": 9},
            )
        elif "chat" in path:
            tools, asked = (
                [{"type": "function", "function": TOOL["function"] | {"name": name}} for name in names.split()],
                {"messages": QUESTION},
            )
        else:
            tools, asked = (
                [{"type": "function"} | TOOL["function"] | {"name": name} for name in names.split()],
                {"input": "What is 2 + 3?"},
            )
        return post(calling, path, tools=tools, **asked, **more)["input_tokens"]

    def choice(name: str) -> dict:
        if "messages" in path:
            return {"type": "tool", "name": name}
        return {"type": "function", "function": {"name": name}} if "chat" in path else {"type": "function", "name": name}

    both = n_tokens("weigh measure")
    assert n_tokens("weigh measure", tool_choice=choice("measure")) == n_tokens("measure") < both
    assert n_tokens("weigh measure", tool_choice={"type": "any"} if "messages" in path else "required") == both
    with pytest.raises(AssertionError, match="cook"):
        n_tokens("weigh measure", tool_choice=choice("cook"))


def test_no_tool_is_called(calling):
    answer = post(
        calling,
        "/v1/messages",
        messages=QUESTION,
        tools=[anthropic("measure")],
        tool_choice={"type": "none"},
        max_tokens=16,
    )
    assert answer["stop_reason"] != "tool_use" and all(block["type"] != "tool_use" for block in answer["content"])
    assert "expected type auto" in refused(calling, "/v1/messages", messages=QUESTION, tool_choice={"type": "some"}, max_tokens=16)


def test_sampling_options_of_messages_pass_through(served):
    def text(**more) -> str:
        return post(served, "/v1/messages", messages=QUESTION, max_tokens=24, **more)["content"][0]["text"]

    hot = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert text(**hot, seed=1) == text(**hot, seed=1) != text(**hot, seed=2)
    assert text(**hot | {"min_p": 1.0}, seed=1) == text(temperature=0)


def test_a_conversation_of_messages_stays_in_its_slot(demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=1024, parallel=2, cache_ram=0) as server:
        cached = [post(server, "/v1/messages", messages=QUESTION, max_tokens=2, id_slot=slot)["usage"]["cache_read_input_tokens"] for slot in (0, 1, 1)]
    assert cached[:2] == [0, 0] and cached[2] > 0


# --- thoughts, schemas ---


def test_a_stop_behind_an_empty_thought_leaves_no_content(thinking):
    body = {
        "messages": QUESTION,
        "max_tokens": 40,
        "stop": ["STOP"],
        "grammar": 'root ::= "<think>\\n\\n</think>\\n\\nSTOP"',
    }
    choice = post(thinking, "/v1/chat/completions", **body)["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["role"] == "assistant" and not choice["message"]["content"]
    deltas = [choice["delta"] for event in streamed(thinking, "/v1/chat/completions", **body) for choice in event["choices"]]
    assert not any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)
    anthropic = {
        "messages": QUESTION,
        "max_tokens": 40,
        "stop_sequences": ["STOP"],
        "grammar": body["grammar"],
    }
    assert post(thinking, "/v1/messages", **anthropic)["content"] == []


@pytest.mark.parametrize("form", [{"schema": SCHEMA}, {"json_schema": {"name": "seven", "schema": SCHEMA}}])
def test_both_forms_of_a_schema_are_honoured(served, form):
    answer = post(
        served,
        "/v1/chat/completions",
        messages=QUESTION,
        max_tokens=16,
        response_format={"type": "json_schema"} | form,
    )
    assert json.loads(answer["choices"][0]["message"]["content"]) == 7


def test_a_schema_of_responses(served):
    answer = post(
        served,
        "/v1/responses",
        input="2 + 3?",
        max_output_tokens=16,
        text={"format": {"type": "json_schema", "name": "seven", "schema": SCHEMA}},
    )
    assert json.loads(answer["output"][0]["content"][0]["text"]) == 7


def test_a_format_without_a_schema_is_refused(served):
    assert "schema" in refused(served, "/v1/chat/completions", messages=QUESTION, response_format={"type": "json_schema"})


def test_bodies_that_are_no_json_are_the_requests_fault(served):
    for body in (b"{", b"[1,", b"\xff", b""):
        answer = httpx.post(f"{served.url}/completion", content=body, timeout=300)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


# --- Responses ---

FIELDS = set(
    "id object created_at status error incomplete_details instructions max_output_tokens model output parallel_tool_calls previous_response_id reasoning store "
    "temperature text tool_choice tools top_p truncation usage user metadata".split()
)


def test_responses_have_the_fields_of_the_specification(served):
    asked = {
        "input": "What is 2 + 3?",
        "instructions": "Be brief.",
        "max_output_tokens": 8,
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "user": "me",
    }
    events = {event["type"]: event for event in streamed(served, "/v1/responses", **asked)}
    whole = post(served, "/v1/responses", **asked)
    for kind, response in [
        ("whole", whole),
        *((kind, events[f"response.{kind}"]["response"]) for kind in ("created", "in_progress", "completed")),
    ]:
        assert response.keys() >= FIELDS and response["object"] == "response", kind
        assert {key: response[key] for key in asked if key != "input"} == {key: value for key, value in asked.items() if key != "input"}
        done = kind in ("whole", "completed")
        assert response["status"] == ("completed" if done else "in_progress") and bool(response["output"]) is done and (response["usage"] is None) is not done
        assert response["tools"] == [] and response["tool_choice"] == "auto" and 0 < response["top_p"] <= 1 and response["text"] == {"format": {"type": "text"}}
    assert events["response.created"]["response"]["id"] == events["response.completed"]["response"]["id"]
