"""Speculative decoding: a draft is as long as pays, and changes no text, whether the text itself, a second model or the model's own layers make it; the
server's are in tests/server/test_extra_models.py."""

from __future__ import annotations

import itertools
import json
import os
import pickle

import numpy as np
import pytest
from llama_cpp import LogitsProcessorList

import moeoff
from helpers.files import PROSE
from helpers.models import rewritten, write_nextn_model
from helpers.processes import run_python
from moeoff import BudgetError, Cancelled, MoeoffError
from moeoff.engine.drafts import DraftLength, TextDrafts
from moeoff.engine.engine import Engine
from moeoff.gguf.file import ModelFile, unpack
from moeoff.options import LONGEST_DRAFT, Config
from moeoff.routing.batch import Span

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
    by_length = [n_sequences * sum(chance**i for i in range(k + 1)) / seconds(k + 1) for k in range(LONGEST_DRAFT + 1)]
    assert rate > 0.94 * max(by_length) and rate > 0.98 * by_length[0]


def test_drafts_from_the_first_token_on_are_compared_with_none():
    """Accepted or not: the first batches, with nothing in memory, say little."""
    n_batches = itertools.count()
    rate, _ = measured(DraftLength(), 2000, lambda _: 0.97, lambda n: (0.3 if next(n_batches) < 2 else 0.1) * (1 + 1.3 * (n - 1)))
    assert rate > 0.95 / 0.1


def test_a_text_that_begins_to_repeat_itself_gets_drafts():
    length = DraftLength()
    _, lengths = measured(length, 3000, lambda batch: 0.05 if batch < 2000 else 0.95, lambda n: 0.1 * (1 + 0.3 * (n - 1)))
    assert np.mean(lengths[:2000]) < 0.1 and np.mean(lengths[2400:]) > 4 and length.gain > 0.5


def test_a_prompt_between_is_no_time_of_an_answer():
    length = DraftLength()
    for i in range(1000):
        length.begin({0: Span(i, i + 1, 1, i % 2 == 0)}, float(i))
    assert length.gain is None


@pytest.mark.parametrize("seconds, least, most", [(0.004, 1.5, LONGEST_DRAFT), (0.2, 0, 0.2)])
def test_the_time_of_a_draft_model(seconds, least, most):
    """Is that of the batch with the draft, and not of the one before; what it has missed it reads in no batch's time."""
    rng, length, now, first, missed, lengths, took = np.random.default_rng(0), DraftLength(), 0.0, 0, 0, [], []
    for _ in range(2000):
        n = length.best
        missed = 0 if n else missed + 1
        if n:
            now += 0.05 * missed
            length.begin_draft(now, 0.05 * missed)
            now += n * seconds
        length.begin({0: Span(first, first + 1 + n, 1 + n, True)}, now)
        now += 0.1 * (1 + 0.15 * n)
        first += 1 + int(np.cumprod(rng.random(n) < 0.7).sum())
        lengths.append(n)
        took.append(length._seconds.get(1, 0.1))
    assert least <= np.mean(lengths[500:]) <= most and max(took) < 0.101


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
def dense(demo, tmp_path_factory) -> str:
    """A model with the same vocabulary that knows little: the demo model's attention and shared experts alone."""
    with ModelFile(demo) as model:
        shared = {name: name.replace("_shexp", "") for name in model.tensors if "_shexp" in name and "_inp" not in name}
        arrays = dict.fromkeys(name for name in model.tensors if "exp" in name or "_inp" in name) | {new: model.rows(old) for old, new in shared.items()}
        values = {key: None if "expert" in key else value for key, value in model.metadata.items() if key.startswith("qwen2moe.")}
        keys = dict.fromkeys(values) | {key.replace("qwen2moe", "qwen2"): value for key, value in values.items()} | {"general.architecture": "qwen2"}
    return rewritten(demo, tmp_path_factory.mktemp("dense") / "dense.gguf", keys, arrays=arrays)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory) -> str:
    """A model with recurrent layers, and one to make drafts."""
    path = str(tmp_path_factory.mktemp("recurrent") / "recurrent.gguf")
    write_nextn_model(path, "qwen3.6-35b-a3b")
    return path


@pytest.fixture(scope="module")
def drafted(demo, dense, nextn, recurrent) -> dict[str, tuple[str, dict]]:
    own = {"spec_type": "draft-mtp"}
    return {"text": (demo, {"spec_type": "ngram-simple"}), "itself": (demo, {"draft": demo}), "dense": (demo, {"draft": dense, "spec_type": "draft-simple"}),
            "own layers": (nextn, own), "recurrent": (recurrent, own)}  # fmt: skip


@pytest.fixture(scope="module", params=["text", "itself", "dense", "own layers", "recurrent"])
def both(drafted, request):
    model, drafts = drafted[request.param]
    with moeoff.Llama(model, **OPTIONS) as plain, moeoff.Llama(model, **drafts, **OPTIONS) as drafting:
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


def test_until_the_context_is_full(both):
    """The texts are not compared: a batch rounds differently, and sooner or later that decides between two tokens."""
    for llm in both:
        bias = {str(token): -100.0 for token in range(llm.n_vocab()) if llm.is_end_token(token)}
        assert llm.create_completion(PROMPT, temperature=0, max_tokens=None, logit_bias=bias)["choices"][0]["finish_reason"] == "length"
    assert both[0].n_tokens == both[1].n_tokens == OPTIONS["n_ctx"] - 1


@pytest.mark.parametrize("both", ["text", "itself"], indirect=True)
def test_drafts_are_verified_several_at_a_time(both, monkeypatch):
    llm, sizes = both[1], []
    decode, length = llm._decode, llm.engine.drafts
    monkeypatch.setattr(llm, "_decode", lambda function, batch: (sizes.append(batch.n_tokens), decode(function, batch))[1])
    for name, value in {"_choose": lambda *_: None, "_best": 3, "_trial": None}.items():  # on a busy machine they may not seem to pay
        monkeypatch.setattr(length, name, value)
    llm.create_completion(PROMPT, temperature=0, max_tokens=100)
    assert max(sizes[1:]) > 2 and len(sizes) < 90


@pytest.mark.parametrize("both", ["text", "itself"], indirect=True)
def test_what_their_logits_take_is_planned(both):
    plain, drafting = (llm.engine.plan for llm in both)
    assert drafting.outputs == (LONGEST_DRAFT + 1) * plain.outputs


def test_no_draft_is_longer_than_was_asked_for(demo, monkeypatch):
    monkeypatch.setattr(DraftLength, "_choose", lambda self, *_: setattr(self, "_best", 5))  # what pays depends on the clock
    with moeoff.Llama(demo, draft=demo, draft_max=2, **OPTIONS) as llm:
        drafts, lengths = llm._drafts, []
        llm._draft_with(lambda tokens: (draft := drafts(tokens), lengths.append(len(draft)))[0])
        llm.create_completion(PROMPT, temperature=0, max_tokens=100)
        assert max(lengths) == 2
        assert llm.engine.plan.outputs == 3 * Engine(Config.make(demo, **OPTIONS)).planned.outputs


def test_a_draft_model_reads_what_is_new(demo):
    """It goes on behind what a text has in common with the last one; a copy of the model has one of its own."""
    with moeoff.Llama(demo, draft=demo, **OPTIONS) as llm, pickle.loads(pickle.dumps(llm)) as copy:
        for model in (llm, copy):
            draft, n_read = model._drafts._guesser, []
            decode = draft._decode
            draft._decode = lambda function, batch, decode=decode, n_read=n_read: (n_read.append(batch.n_tokens), decode(function, batch))[1]
            for more in ("", " three four", " three five"):
                n_read.append(0)
                model.create_completion(PROMPT + more, temperature=0, max_tokens=12)
            first, second, third = (n_read[i + 1] for i, n in enumerate(n_read) if not n)
            assert first > 20 > 5 > max(second, third) > 0
            del draft._decode
    assert llm.engine.config.draft == demo and not llm._drafts._guesser._stack._exit_callbacks


@pytest.mark.parametrize("kind, method", [("itself", "_decode"), ("recurrent", "_compute")])
def test_an_answer_that_is_cancelled_in_a_draft(drafted, kind, method):
    model, drafts = drafted[kind]
    with moeoff.Llama(model, **drafts, **OPTIONS) as llm:
        expected = llm.create_completion(PROMPT, temperature=0, max_tokens=20)["choices"]
        compute = getattr(llm._drafts._guesser, method)
        setattr(llm._drafts._guesser, method, lambda *args: (llm.engine.cancellation.request(), compute(*args))[1])
        with pytest.raises(Cancelled):
            llm.create_completion("a b c", temperature=0, max_tokens=20)
        delattr(llm._drafts._guesser, method)
        assert llm.create_completion(PROMPT, temperature=0, max_tokens=20)["choices"] == expected


def test_a_draft_models_memory_is_planned(demo, dense):
    """Before it is loaded, and as long as it is."""
    plain, drafting = (Engine(Config.make(demo, memory="1G", n_ctx=256, n_batch=64, draft=draft)).planned for draft in (None, dense))
    assert drafting.extras - plain.extras > os.path.getsize(dense) and drafting.floor > plain.floor
    with pytest.raises(BudgetError, match="samplers and other files") as refused:
        Engine(Config.make(demo, memory=drafting.floor - (2 << 20), n_ctx=256, n_batch=64, draft=dense))
    assert refused.value.hint["memory"] > plain.floor
    with moeoff.Llama(demo, memory="1G", n_ctx=256, draft=dense) as llm:
        assert os.path.getsize(dense) < llm.stats().memory["extras"] < drafting.extras


@pytest.mark.parametrize("kind", ["a larger model", "recurrent"])
def test_the_budget_holds(grown, drafted, kind):
    """With a draft model that is larger than the experts' room; its buffers are touched after the prompt's. Or with a second context, and states to go back to."""
    model, drafts = {**drafted, "a larger model": (grown, {"draft": grown})}[kind]
    code = """
import json, sys, moeoff
budget = int(sys.argv[2]) << 20
with moeoff.Llama(sys.argv[1], memory=budget, n_ctx=2048, flash_attn=True, n_threads=1, n_batch=512, **json.loads(sys.argv[4])) as llm:
    n = llm.create_completion(open(sys.argv[3]).read()[:5000], max_tokens=64, temperature=0)["usage"]["total_tokens"]
    print(llm.stats().peak_rss_bytes <= budget, n > 1000)
"""
    budget = Engine(Config.make(model, memory="4G", n_ctx=2048, flash_attn=True, n_batch=512, **drafts)).planned.floor // (1 << 20) + 8
    assert run_python(code, model, str(budget), str(PROSE), json.dumps(drafts)).split() == ["True", "True"]


def test_own_layers_guess(nextn, monkeypatch):
    """Often right; their experts are read like all others, and planned. A state that was loaded they have not seen, and guess on."""
    monkeypatch.setattr(DraftLength, "best", 3)
    events = []
    with moeoff.Llama(nextn, **OPTIONS) as plain, moeoff.Llama(nextn, spec_type="draft-mtp", **OPTIONS) as llm:
        expected = plain.create_completion(PROMPT, temperature=0, max_tokens=40)["choices"]
        llm.set_gate_callback(events.append)
        llm.eval(llm.tokenize(PROMPT[:40].encode()))
        state = llm.save_state()
        llm.clear_context()
        llm.load_state(state)
        assert llm.create_completion(PROMPT, temperature=0, max_tokens=40)["choices"] == expected
        n_batches = sum(event.gate == 0 and event.decode for event in events)
        assert 9 < n_batches < 25 and 0 < llm.stats().drafts_rejected < n_batches
        assert {event.gate for event in events} == set(range(len(llm.engine.model_index.gates)))
        assert llm.engine.planned.arena_full > plain.engine.planned.arena_full and llm.engine.planned.state > plain.engine.planned.state


def test_recurrent_layers_go_back_within_a_batch(recurrent):
    """Of earlier ones llama.cpp keeps no states, and would take others for them."""
    with moeoff.Llama(recurrent, spec_type="ngram-simple", **OPTIONS) as llm:
        text, logits = list(range(300, 321)), []
        for drafted in ([300, 301, 302], []):
            llm.clear_context()
            llm.eval(text[:20])
            llm._drafts.n = len(drafted)
            llm.eval([text[20], *drafted])
            llm._forget_behind(21)
            llm.eval([400])
            logits.append(llm.batch_logits(1)[0].copy())
        assert np.abs(logits[0] - logits[1]).max() < 1e-3 * np.abs(logits[0]).max()
        assert not llm._ctx.kv_cache_seq_rm(-1, 21, -1) and llm._ctx.kv_cache_seq_rm(-1, 22, -1)


def test_refused(demo, dense, nextn, recurrent, tmp_path):
    with ModelFile(demo) as model:
        tokens = unpack(model.metadata["tokenizer.ggml.tokens"])
    changed = {"a": {"qwen2.pooling_type": 3}, "b": {"general.architecture": "eagle3"}, "c": {"tokenizer.ggml.tokens": [*tokens[:-1], "<other>"]}}
    others = {name: rewritten(dense, tmp_path / f"{name}.gguf", values) for name, values in changed.items()}
    cases = [
        ({"spec_type": "draft-eagle3"}, "moeoff serve makes such drafts"), ({"spec_type": "draft-mtp"}, "no next-token layers"), ({"context_shift": True}, "context_shift"),
        ({"trace": str(tmp_path / "t")}, "repeats"), ({"n_batch": LONGEST_DRAFT}, "batches"), ({"spec_type": "draft-simple"}, "not said: give draft="),
        ({"draft": dense}, "not both"), ({"spec_type": None, "draft_max": 4}, "no effect without"), ({"draft_max": 17}, "1 to 16, not 17"),
        *(({"spec_type": None, "draft": draft} | more, why) for draft, more, why in (
            (dense, {"context_shift": True}, "draft: neither with context_shift"), (dense, {"deterministic": True}, "draft: neither"),
            (dense, {"spec_type": "draft-mtp"}, "makes drafts as draft-mtp, for moeoff serve alone"), ("absent.gguf", {}, "absent.gguf: cannot be read"),
            (nextn, {}, "makes drafts as draft-mtp, for moeoff serve alone"), (others["b"], {}, "makes drafts as eagle3, for moeoff serve alone"),
            (others["b"], {"spec_type": "draft-simple"}, "for moeoff serve alone"), (others["a"], {}, "a model for embeddings"),
            (others["c"], {}, "its token 4095 is not the model's"), (recurrent, {"spec_type": "draft-simple"}, "its recurrent layers cannot go back"))),
    ]  # fmt: skip
    for options, why in cases:
        with pytest.raises(MoeoffError, match=why) as refused:
            moeoff.Llama(demo, **OPTIONS | {"spec_type": "ngram-simple"} | options)
        assert "\n" not in str(refused.value)
    for drafts in ({"spec_type": "ngram-simple", "n_batch": 64, "n_ubatch": 2}, {"draft": recurrent, "spec_type": "draft-simple"}):
        with pytest.raises(MoeoffError, match="recurrent"):
            moeoff.Llama(recurrent, **drafts, **OPTIONS)


def test_from_the_command_line(demo, dense, nextn, invoke):
    for model, drafts in ((demo, (["--spec-type", "ngram-simple"], ["-md", demo], ["--model-draft", dense, "--spec-type", "draft-simple"])),
                          (nextn, (["--spec-type", "draft-mtp"], ["--spec-type", "draft-mtp", "--draft-max", "2"]))):  # fmt: skip
        answers = [json.loads(invoke("run", model, "-p", PROMPT, "--temp", "0", "-n", "60", "--raw", "--json", *more).stdout) for more in ([], *drafts)]
        assert all(answer["text"] == answers[0]["text"] and answer["usage"] == answers[0]["usage"] for answer in answers)
        assert [answer["stats"]["draft_length"] is None for answer in answers] == [True] + len(drafts) * [False]
