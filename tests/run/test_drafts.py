"""Speculative decoding: a draft is as long as pays, and changes no text; the server's are in tests/server/test_extra_models.py."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llama_cpp import LogitsProcessorList

import moeoff
from moeoff import OptionError
from moeoff.engine.drafts import MOST, DraftLength, TextDrafts
from moeoff.routing.batch import Span
from shape_model import SHAPES, shape_model

PROMPT = "one two three four five six. one two three four five six. one two three four five six. one two"
OPTIONS = {"n_ctx": 256, "n_threads": 2, "seed": 3, "expert_memory": "4M"}


# how long, on made-up answers


def measured(length: DraftLength, n: int, accepted, seconds, n_sequences: int = 1) -> tuple[float, list[int]]:
    """Tokens per second of n batches, and the length of each one's draft. accepted: chance of each token by batch; seconds: of a batch, by its tokens."""
    rng, now, n_drafted, lengths = np.random.default_rng(0), 0.0, length.best, []
    first = np.zeros(n_sequences, int)
    for batch in range(n):
        length.begin({i: Span(int(f), int(f) + 1 + n_drafted, 1 + n_drafted, True) for i, f in enumerate(first)}, now)
        lengths.append(n_drafted)
        now += seconds(1 + n_drafted) * rng.uniform(0.95, 1.05)
        for i in range(n_sequences):
            first[i] += 1 + np.cumprod(rng.random(n_drafted) < accepted(batch)).sum()
        n_drafted = length.best  # drafts of the next batch are made before it begins
    return first.sum() / now, lengths


@pytest.mark.parametrize("slope", [0.15, 0.8])
@pytest.mark.parametrize("chance", [0.05, 0.6, 0.98])
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_nearly_as_fast_as_the_best_length(slope, chance, n_sequences):
    def seconds(n):
        return 0.1 * (1 + slope * (n - 1))

    rate, _ = measured(DraftLength(), 2000, lambda _: chance, seconds, n_sequences)
    by_length = [n_sequences * sum(chance**i for i in range(k + 1)) / seconds(k + 1) for k in range(MOST + 1)]
    assert rate > 0.94 * max(by_length) and rate > 0.98 * by_length[0]


def test_a_text_that_begins_to_repeat_itself_gets_drafts():
    length = DraftLength()
    _, lengths = measured(length, 3000, lambda batch: 0.05 if batch < 2000 else 0.95, lambda n: 0.1 * (1 + 0.3 * (n - 1)))
    assert np.mean(lengths[:2000]) < 0.1 and np.mean(lengths[2400:]) > 4 and length.gain > 0.5


def test_a_prompt_between_is_no_time_of_an_answer():
    length = DraftLength()
    for i in range(1000):
        length.begin({0: Span(i, i + 1, 1, i % 2 == 0)}, float(i))
    assert length.gain is None


def test_what_was_rejected():
    """Also where a prompt of somebody else is read beside it. Not what a new question in an answer's place leaves out of that."""
    length = DraftLength()
    assert length.begin({0: Span(10, 14, 4, True), 1: Span(0, 5, 5, False)}, 0.0) == 0
    assert length.begin({0: Span(12, 17, 5, True)}, 1.0) == 2
    assert length.begin({0: Span(13, 14, 1, True)}, 2.0) == 4
    assert length.begin({0: Span(14, 18, 4, True)}, 3.0) == 0
    assert length.begin({0: Span(3, 9, 6, False)}, 4.0) == 0
    length.begin({0: Span(20, 24, 4, True)}, 5.0)
    assert length.end(0, 22) == 2 and length.end(0, 22) == 0


def test_what_followed_before():
    drafts = TextDrafts(DraftLength())
    tokens = np.array([5, 1, 2, 3, 9, 8, 5, 1, 2, 3], np.intc)
    assert drafts(tokens).tolist() == [9] and drafts.n == 1
    assert drafts(tokens[:6]).tolist() == [] and drafts.n == 0


# what is generated


@pytest.fixture(scope="module")
def both(demo):
    with moeoff.Llama(demo, **OPTIONS) as plain, moeoff.Llama(demo, spec_type="ngram-simple", **OPTIONS) as drafting:
        yield plain, drafting


CALLS = {
    "greedy": {"temperature": 0, "max_tokens": 100},
    "sampled": {"temperature": 0.7, "max_tokens": 60, "seed": 5},
    "a stop within a draft": {"temperature": 0, "max_tokens": 60, "stop": ["five six. one"]},
    "a processor that looks at the text": {
        "temperature": 0,
        "max_tokens": 40,
        "logits_processor": LogitsProcessorList([lambda ids, scores: np.where(np.arange(len(scores)) == ids[-5], -np.inf, scores).astype(np.float32)]),
    },
    "greedy again": {"temperature": 0, "max_tokens": 100},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_text_is_the_same(both, call):
    answers, counts = [], []
    for llm in both:
        before = llm.stats()
        answers.append(llm.create_completion(PROMPT, **CALLS[call])["choices"][0])
        counts.append((llm.stats().since(before), llm.n_tokens))
    assert answers[0] == answers[1]
    (plain, n_plain), (drafting, n_drafting) = counts
    assert n_plain == n_drafting and plain.gen_tokens == drafting.gen_tokens - drafting.drafts_rejected
    assert plain.draft_length is None and drafting.draft_length is not None


def test_drafts_are_verified_several_at_a_time(both):
    decode = both[1]._decode
    for _ in range(5):  # on a busy machine a longer batch may not seem to pay
        sizes = []
        both[1]._decode = lambda function, batch, sizes=sizes: (sizes.append(batch.n_tokens), decode(function, batch))[1]
        try:
            both[1].create_completion(PROMPT, temperature=0, max_tokens=100)
        finally:
            del both[1]._decode
        if max(sizes[1:]) > 2 and len(sizes) < 90:
            return
    raise AssertionError(sizes)


def test_what_their_logits_take_is_planned(both):
    plain, drafting = (llm.engine.plan for llm in both)
    assert drafting.outputs == (MOST + 1) * plain.outputs


def test_refused(demo, tmp_path):
    for options, why in (({"spec_type": "draft-mtp"}, "moeoff serve makes such drafts"), ({"context_shift": True}, "context_shift"),
                         ({"trace": str(tmp_path / "t")}, "repeats"), ({"n_batch": MOST}, "batches")):  # fmt: skip
        with pytest.raises(OptionError, match=why):
            moeoff.Llama(demo, **OPTIONS | {"spec_type": "ngram-simple"} | options)
    recurrent = tmp_path / "recurrent.gguf"
    shape_model(SHAPES["qwen3.6-35b-a3b"].cut(layers=4, shrink=8, hidden=64), recurrent)
    with pytest.raises(OptionError, match="recurrent"):
        moeoff.Llama(str(recurrent), spec_type="ngram-simple", **OPTIONS)


def test_from_the_command_line(demo, invoke):
    answers = [
        json.loads(invoke("run", demo, "-p", PROMPT, "--temp", "0", "-n", "60", "--raw", "--json", *more).stdout)
        for more in ([], ["--spec-type", "ngram-simple"])
    ]
    assert answers[0]["text"] == answers[1]["text"] and answers[0]["usage"] == answers[1]["usage"]
