"""Conversations of a served model: which slot each one gets, what a cancelled request
leaves, and that no request changes another one's text.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from helpers.servers import LONGER, Service, complete, needed, words
from helpers.slot_stress import EXACT, Request, draw_requests, find_wrong, read_stream
from helpers.waiting import wait_until
from shape_model import SHAPES, shape_model

TURNS = (61, 155, 20, 300, 33, 500, 20, 64, 20, 20)  # new tokens


@pytest.mark.parametrize("parallel, cache_ram, thinks", [(4, None, True), (1, "24M", False)])
def test_a_conversation_computes_what_is_new(demo, parallel, cache_ram, thinks):
    """However much that is, beside strangers whose questions begin with its system
    prompt, in its slot and out of it; an answer's last token comes again as another
    one, and what was thought not at all.
    """
    options = {"n_ctx": 4096, "parallel": parallel, "cache_ram": cache_ram, "args": LONGER}
    # room for all experts, and for the conversation: of a fixed budget a process that
    # is 3 MiB larger would leave it none
    with Service(demo, memory=(needed(demo, **options) + 60) << 20, **options) as server:
        system = words(0, 40)
        talk = [*system]
        for turn, n in enumerate(TURNS):
            complete(server.url, [*system, *words(100 + turn, 12)])
            n_kept, n_before = 0 if thinks else 30, len(talk)
            talk += words(turn, n)
            answer = complete(server.url, talk, n_predict=32, return_tokens=True)
            assert turn == 0 or answer["timings"]["prompt_n"] <= len(talk) - n_before + 20
            talk += answer["tokens"][:n_kept]


def test_a_conversation_that_nothing_keeps_stays_where_others_are_empty(demo):
    """Without a prompt cache: another prompt, of which more than half is the
    conversation's beginning, takes an empty slot, if there is one.
    """
    with Service(
        demo, memory="150M", n_ctx=2048, parallel=2, cache_ram=0, kv_disk=0, args=LONGER
    ) as server:
        first, other = words(1, 600), words(2, 30)
        complete(server.url, first)
        assert complete(server.url, first[:50] + other)["tokens_cached"] < 100
        assert complete(server.url, first + other)["timings"]["cache_n"] > 590
        complete(server.url, first[:50] + other[::-1])  # none is empty: that of the shorter prompt
        assert complete(server.url, first + other[:5])["timings"]["cache_n"] > 590


def test_conversations_that_share_a_full_context_make_room_for_each_other(demo):
    """The idle one's cells are taken, and what was in them is kept, and gets its room
    when it comes back: the other one's, which is kept in turn.
    """
    with Service(
        demo, memory="150M", n_ctx=1024, parallel=2, cache_ram="24M", args=LONGER
    ) as server:
        first, second = words(1, 600), words(2, 800)
        complete(server.url, first, id_slot=0)
        assert complete(server.url, second, id_slot=1)["timings"]["prompt_n"] == 800
        for prompt in (first, second, first):
            timings = complete(server.url, [*prompt, *words(3, 8)])["timings"]
            assert timings["cache_n"] >= len(prompt) and timings["prompt_n"] <= 9


@pytest.mark.slow
def test_an_answer_does_not_wait_for_a_long_prompt(grown):
    """All of the prompt would fit into one batch, which takes seconds."""
    options = {
        "n_ctx": 9216,
        "n_batch": 4096,
        "n_ubatch": 4096,
        "parallel": 2,
        "n_threads": 1,
        "n_threads_batch": 1,
    }
    with Service(grown, expert_memory=64 << 20, cache_ram=0, args=LONGER, **options) as server:
        complete(server.url, words(1, 300))
        with ThreadPoolExecutor(1) as pool:
            came, prompt = [], None
            for tokens in read_stream(server.url, Request(2, 1000, None, {})):
                came += [time.perf_counter()] * len(tokens)
                prompt = prompt or pool.submit(complete, server.url, words(3, 4000))
                if prompt.done():
                    break
            took = prompt.result()["timings"]["prompt_ms"] / 1000
    assert max(b - a for a, b in itertools.pairwise(came)) < took / 2


@pytest.mark.parametrize(
    "n_slots, n, n_predict",
    [
        (1, 40, 32),
        (3, 60, 32),
        *(pytest.param(n, 500, 100, marks=pytest.mark.slow) for n in (1, 3)),
    ],
)
def test_an_answer_does_not_depend_on_other_requests(
    demo, tmp_path, monkeypatch, n_slots, n, n_predict
):
    """Pinned and unpinned slots, prompts that go to memory and to disk and come back,
    and clients that close their stream.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape, judge = (EXACT, None) if n_slots == 1 else ({"parallel": n_slots, "n_batch": 128}, demo)
    with Service(
        demo, expert_memory=4 << 20, n_ctx=256 * n_slots, cache_ram=1, kv_disk="1G", **shape
    ) as server:
        assert find_wrong(server, draw_requests(n, n_slots, n_predict), 2 + n_slots, judge) == []
        assert server.metrics()["moeoff_prompts_disk_read_total"] > 0


def read_some(
    url: str, prompt: list[int], n: float = math.inf, share: float = math.inf, **more
) -> list[int]:
    """Return the first n tokens of a streamed completion, or none if the share of its
    prompt is processed before. The stream is closed.
    """
    body = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "return_progress": True,
        "stream": True,
        **more,
    }
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                progress = chunk.get("prompt_progress")
                tokens += [] if progress else chunk["tokens"]
                if len(tokens) >= n or (progress and progress["processed"] >= share * len(prompt)):
                    break
    return tokens


def test_copies_of_an_answer_do_not_cost_other_conversations(demo):
    """The idle slots that a request with n > 1 takes are saved to the prompt cache."""
    with Service(
        demo, memory="150M", n_ctx=4096, parallel=3, cache_ram="24M", args=LONGER
    ) as server:
        talks = [words(seed, 300) for seed in range(3)]
        for slot, talk in enumerate(talks):
            complete(server.url, talk, id_slot=slot)
        complete(server.url, words(9, 100), n_cmpl=3)
        for talk in talks:
            assert complete(server.url, [*talk, *words(8, 8)])["timings"]["cache_n"] >= 300


@pytest.fixture(
    scope="module",
    params=["attention", pytest.param("window", marks=pytest.mark.slow), "recurrent"],
    name="server",
)
def slow_prompts(request, grown, tmp_path_factory):
    """A server whose prompts take seconds, by the kind of its state."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    options = {
        "n_ctx": 4096,
        "parallel": 1,
        "n_batch": 128,
        "n_ubatch": 128,
        "cache_ram": 0,
        "expert_memory": 16 << 20,
    }
    if request.param == "attention":
        path, options = grown, {**options, "args": LONGER}
    else:
        shape, shrink = {"window": ("gemma-4-26b-a4b", 8), "recurrent": ("qwen3.6-35b-a3b", 4)}[
            request.param
        ]
        shape_model(SHAPES[shape].cut(layers=6, shrink=shrink), path)
        options |= {"swa_full": False, "ctx_checkpoints": 2, "attention": "f32"}
    with Service(path, **options) as server:
        yield server


def test_clients_that_give_up_a_prompt_get_it_in_the_end(server):
    """Each goes on where the one before was cancelled, and the answer is that of a
    prompt computed at once.
    """
    prompt = words(1, 1600)
    complete(server.url, words(2, 100))
    for _ in range(3):
        read_some(server.url, prompt, share=0.6)
        wait_until(server.is_idle)
    again = complete(server.url, prompt, n_probs=8)
    assert again["timings"]["prompt_n"] <= 0.45 * len(prompt), again["timings"]
    whole = complete(server.url, prompt, n_probs=8, cache_prompt=False)
    assert whole["timings"]["prompt_n"] == len(prompt)
    logprobs = [
        {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}
        for answer in (again, whole)
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_an_answer_that_is_stopped_keeps_its_conversation(server):
    """The next turn computes what is new. A state that cannot be cut is that of the
    checkpoint about four tokens before the prompt's end.
    """
    prompt = words(3, 700)
    got = read_some(server.url, prompt, n=5, n_predict=2000)
    wait_until(server.is_idle)
    turn = complete(server.url, [*prompt, *got, *words(4, 20)])
    assert turn["timings"]["cache_n"] >= len(prompt) - 5, turn["timings"]
