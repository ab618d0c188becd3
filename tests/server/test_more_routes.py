"""Routes beside answers: one model, the other half of Ollama's API, pictures of a model
that reads none.
"""

from __future__ import annotations

import httpx
import pytest

from helpers.servers import Service


@pytest.fixture(scope="module")
def served(demo):
    with Service(
        demo, expert_memory=4 << 20, n_ctx=512, alias="demo", embedding=True, pooling="mean"
    ) as server:
        yield server


def test_one_model(served):
    assert served.client.models.retrieve("demo").id == "demo"
    answer = served.get("/v1/models/other")
    # its words are llama-server's for every path
    assert answer.status_code == 404 and answer.json()["error"]["code"] == 404


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete"])
def test_what_one_model_cannot(served, path):
    answer = httpx.request(
        "DELETE" if path == "delete" else "POST",
        f"{served.url}/api/{path}",
        json={"model": "x"},
        timeout=300,
    )
    assert answer.status_code == 501 and "one model" in answer.json()["error"]


def test_ollamas_embeddings(served):
    def post(path: str, **body) -> dict:
        return served.post(f"/api/{path}", {"model": "demo"} | body).raise_for_status().json()

    several = post("embed", input=["one", "two words"])
    first, second = several["embeddings"]
    assert len(first) == len(second) == 128
    assert first != second
    assert several["prompt_eval_count"] >= 3
    (alone,) = post("embed", input="one")["embeddings"]
    assert alone == pytest.approx(first, abs=1e-3)
    assert post("embeddings", prompt="one")["embedding"] == pytest.approx(alone, abs=1e-3)
    assert post("embed", input=[])["embeddings"] == []
    assert "embedding" in post("show")["capabilities"]


def test_no_format_of_embeddings_is_the_usual_one(served):
    body = {"model": "demo", "input": "a dog", "encoding_format": None}
    assert len(served.post("/v1/embeddings", body).json()["data"][0]["embedding"]) == 128


def test_a_picture_for_a_model_that_reads_none_is_the_requests_fault(served):
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    answer = served.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert answer.status_code == 400
    assert "image input is not supported" in answer.json()["error"]["message"]


def test_a_template_that_cannot_be_read_is_refused_with_its_reason(demo):
    with pytest.raises(
        AssertionError, match="--chat-template: the template cannot be read: Unexpected token"
    ):
        Service(demo, expert_memory=4 << 20, n_ctx=512, args=["--chat-template", "{% if %}x"])
