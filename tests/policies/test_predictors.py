"""Predictors: one contract for all, brute-force references, and what they are worth on
the demo model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import baselines  # noqa: F401  registers predictors that the package does not have
from helpers.files import CODE, PROSE
from helpers.gate_events import random_recording
from moeoff import Llama
from moeoff.errors import OptionError
from moeoff.measure.record import record, sequences
from moeoff.policies import (
    PREDICTORS,
    FitOptions,
    Prediction,
    Predictor,
    edgemoe,
    fate,
    get_predictor,
)
from moeoff.policies.base import top_k
from moeoff.policies.edgemoe import PRIOR, PRIOR_ONE, PRIOR_TWO, fit_pairs
from moeoff.policies.fate import shallow_boundary
from moeoff.routing.event import GateEvent
from moeoff.routing.recording import Recording
from moeoff.routing.router import Router
from moeoff.routing.trace import TensorInfo, TraceHeader

TEXTS = [PROSE, CODE]
HIDDEN = 64


@pytest.fixture(scope="module")
def sections(recording) -> dict[str, dict[str, np.ndarray]]:
    out = {}
    for predictor in PREDICTORS.values():
        for section in predictor.sections:
            if section.name not in out:
                out[section.name] = section.fit(recording, FitOptions(hidden=HIDDEN), None)
    return out


def make(name: str, recording: Recording, sections: dict, **options) -> Predictor:
    kind = get_predictor(name)
    arrays = {
        key: array
        for section in kind.sections
        for key, array in (sections.get(section.name) or {}).items()
    }
    return kind(recording.router, arrays or None, **options)


def batch_events(recording: Recording, start: int, stop: int) -> list[GateEvent]:
    """The tokens as one batch."""
    part = slice(start, stop)
    return [
        GateEvent(
            g,
            recording.ids[part, g],
            recording.weights[part, g],
            None,
            recording.inputs[part, g].astype(np.float32),
        )
        for g in range(recording.model.n_gates)
    ]


def drive(
    predictor: Predictor, events: list[GateEvent], tokens: np.ndarray
) -> list[list[tuple[int, np.ndarray]]]:
    """Return the predictor's scores before and after each event."""
    out, at = [], 0
    for event in events:
        if event.gate == 0:
            n = len(event.ids)
            out.append([(p.gate, p.scores.copy()) for p in predictor.begin(tokens[at : at + n])])
            at += n
        out.append([(p.gate, p.scores.copy()) for p in predictor.observe(event)])
    return out


@pytest.mark.slow
def test_a_wide_models_inputs_are_sampled(recording, demo):
    """Fits learn from inputs of all the text, not of its beginning alone, spread as
    wide as the room for them allows.
    """
    limit = recording.inputs.nbytes // 7
    with Llama(demo, gate_input=True, n_ctx=256, n_batch=256, n_ubatch=256) as model:
        texts = sequences(model, TEXTS, 3072)
        some = record(model, texts, recording.router, "demo", limit=limit)
    assert (some.ids == recording.ids).all() and some.input_tokens[-1] > 0.99 * some.n_tokens
    assert (np.diff(some.input_tokens) == some.input_tokens[1]).all() and 7 <= some.input_tokens[
        1
    ] <= 8
    assert (
        some.inputs.nbytes <= limit and (some.inputs == recording.inputs[some.input_tokens]).all()
    )
    tokens = some.starts.cumsum() % 2 == 0
    part, x = some.take(tokens), recording.inputs[tokens]
    assert len(part.input_tokens) and (part.inputs == x[part.input_tokens]).all()
    first, n_gates = int(part.input_tokens[0]), some.model.n_gates
    has_input = [event.gate_input is not None for event in part.events(0, first + 1)]
    assert has_input == [False] * first * n_gates + [True] * n_gates
    fitted, whole = (PREDICTORS["gate"].fit(r, FitOptions(0, 16)) for r in (some, recording))
    assert abs(fitted["recall_norm"] - whole["recall_norm"]).max() < 0.1


@pytest.mark.parametrize("name", list(PREDICTORS))
class TestContract:
    """Inherited by every predictor, by its name."""

    def test_describes_itself(self, name, recording):
        predictor = get_predictor(name)
        assert predictor.name == name and predictor.summary
        with pytest.raises(OptionError, match=f"{name}: unknown option 'nonsense'"):
            predictor(recording.router, None, nonsense=1)

    @pytest.mark.parametrize("batch", [1, 7])
    def test_shapes(self, name, batch, recording, sections):
        n, e = recording.model.n_gates, recording.router.n_experts
        events = recording.events(0, 3) if batch == 1 else batch_events(recording, 0, batch)
        predictions = [
            p
            for step in drive(make(name, recording, sections), events, recording.tokens)
            for p in step
        ]
        assert predictions
        for gate, scores in predictions:
            assert 0 <= gate < n
            assert scores.dtype == np.float32 and scores.shape[1] == e and len(scores) in (1, batch)
            assert np.isfinite(scores).all()
        assert {gate for gate, _ in predictions} >= set(range(3, n))

    def test_predicts_what_is_to_come(self, name, recording, sections):
        """Never the gate of the event, nor, within a token, an earlier one."""
        predictor, n = make(name, recording, sections), recording.model.n_gates
        for event in recording.events(0, 3):
            for p in predictor.observe(event):
                assert isinstance(p, Prediction)
                assert p.gate > event.gate or (event.gate == n - 1 and p.gate == 0)

    def test_without_a_profile(self, name, recording):
        """Says something sensible or nothing."""
        for step in drive(
            get_predictor(name)(recording.router), recording.events(0, 3), recording.tokens
        ):
            assert all(np.isfinite(scores).all() for _, scores in step)

    def test_a_new_text_is_a_fresh_start(self, name, recording, sections):
        events = recording.events(0, 2)
        fresh = drive(make(name, recording, sections), events, recording.tokens)
        used = make(name, recording, sections)
        drive(used, recording.events(5, 9), recording.tokens[5:])
        used.reset_sequence()
        for expected, again in zip(fresh, drive(used, events, recording.tokens), strict=True):
            assert [gate for gate, _ in expected] == [gate for gate, _ in again]
            for (_, a), (_, b) in zip(expected, again):
                np.testing.assert_array_equal(a, b)

    def test_events_without_gate_input(self, name, recording, sections):
        """An architecture that passes logits: a predictor that reads the input predicts
        nothing.
        """
        predictor = make(name, recording, sections)
        predictions = [
            p for event in recording.events(0, 2, inputs=False) for p in predictor.observe(event)
        ]
        assert not (predictions and predictor.wants_gate_input)

    def test_fits_are_deterministic(self, name, sections):
        """The same options give the same arrays: numbers, as a profile can keep them.
        Only the seed of networks changes them.
        """
        steps = []
        recording, kind = random_recording(), get_predictor(name)
        if not kind.sections:
            return
        first, again, other = (
            kind.sections[0].fit(recording, FitOptions(seed, 16), lambda *step: steps.append(step))
            for seed in (3, 3, 4)
        )
        assert list(first) == list(again) == list(other) and not any(
            np.asarray(a).dtype.hasobject for a in first.values()
        )
        assert all(np.array_equal(a, again[key]) for key, a in first.items())
        assert all(np.array_equal(a, other[key]) for key, a in first.items()) == (name != "learned")
        assert steps[-1][0] == steps[-1][1] and set(first) <= set(sections[kind.sections[0].name])

    def test_batches_say_what_tokens_say(self, name, recording, sections):
        """Row t of a batch is the prediction for token t, where it does not depend on
        the token before.
        """
        if name == "previous-token":  # this one does
            return
        n = recording.model.n_gates
        one = drive(make(name, recording, sections), recording.events(0, 4), recording.tokens)
        many = drive(
            make(name, recording, sections), batch_events(recording, 0, 4), recording.tokens
        )
        single = {
            (t, gate, i % (n + 1)): s
            for i, step in enumerate(one)
            for t in [i // (n + 1)]
            for gate, s in step
        }
        compared = 0
        for i, step in enumerate(many):
            for gate, scores in step:
                if i == 1 and not get_predictor(name).wants_gate_input:
                    continue  # after the first gate, what the token before chose may count
                for t, row in enumerate(scores):
                    np.testing.assert_allclose(row, single[t, gate, i][0], rtol=2e-3, atol=1e-5)
                    compared += 1
        assert compared >= 4 * (n - 3)


def test_recording_is_what_decode_says(demo, recording):
    """Ids of a batch are those of token-by-token decode, but for near ties; the last
    layer is there for all tokens.
    """
    assert (recording.ids >= 0).all()
    first = recording.tokens[:40]
    events = []
    with Llama(demo, n_ctx=256) as model:
        model.set_gate_callback(events.append)
        for token in first:
            model.eval([int(token)])
        model.engine.buffer.drain()
    same = [set(e.ids[0]) == set(recording.ids[i // 12, i % 12]) for i, e in enumerate(events)]
    assert len(same) == 480 and np.mean(same) > 0.97


def test_split_is_by_sequence(recording):
    train, held = recording.split()
    assert (train ^ held).all() and 0.05 < held.mean() < 0.2
    number = np.cumsum(recording.starts)
    assert not set(number[train]) & set(number[held])


def test_selections():
    scores = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
    order = np.argsort(-scores, axis=1)
    np.testing.assert_array_equal(np.sort(top_k(scores, 4)), np.sort(order[:, :4]))
    assert top_k(scores, 40).shape == (6, 32)


def test_parts_of_a_recording():
    """A part has its own tokens, and those of its inputs and probabilities that are
    there; all parts together are the whole.
    """
    whole = random_recording(60)
    few = replace(
        whole,
        inputs=whole.inputs[10:50:2],
        input_tokens=np.arange(10, 50, 2),
        probs=whole.probs[:35],
    )
    parts = [few.part(0, 20), few.part(20, 40), few.part(40, 60)]
    assert [p.n_tokens for p in parts] == [20] * 3 and [len(p.probs) for p in parts] == [20, 15, 0]
    assert [p.input_tokens.tolist() for p in parts] == [
        [10, 12, 14, 16, 18],
        list(range(0, 20, 2)),
        [0, 2, 4, 6, 8],
    ]
    for name in ("tokens", "starts", "ids", "weights", "inputs", "probs"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(p, name) for p in parts]), getattr(few, name)
        )
    bare = replace(few, inputs=None, probs=None, input_tokens=None).part(20, 40)
    assert bare.inputs is None and bare.probs is None and len(bare.events()) == 80
    events = [e for p in parts for e in p.events()]
    for got, expected in zip(events, few.events(), strict=True):
        assert (
            got.gate == expected.gate
            and (got.ids == expected.ids).all()
            and (got.weights == expected.weights).all()
        )
        for a, b in ((got.probs, expected.probs), (got.gate_input, expected.gate_input)):
            assert (a is None) == (b is None) and (a is None or (a == b).all())
    np.testing.assert_array_equal(
        [e.ids for e in few.events(5, 9)], [e.ids for e in few.events()[20:36]]
    )


def test_the_next_gate_is_fitted_layer_by_layer():
    """Recall of every gate but the first, by brute force; what has no inputs has no
    fit, and no L.
    """
    recording = random_recording()
    arrays = get_predictor("gate").fit(recording)
    for target in range(1, 4):
        scores = (
            recording.inputs[:, target - 1].astype(np.float32) @ recording.router.weights[target].T
        )
        best = np.argsort(-scores, axis=1)[:, :2]
        right = np.mean([x in ids for row, ids in zip(best, recording.ids[:, target]) for x in row])
        assert arrays["recall_raw"][target] == pytest.approx(right) and 0.3 < right < 1
    assert arrays["recall_raw"][0] == arrays["recall_norm"][0] == 0
    bare = replace(recording, inputs=None, input_tokens=None)
    assert get_predictor("gate").fit(bare) is None
    assert fate.ShallowFavoringARC.fit(bare) is None
    assert fate.ShallowFavoringARC.fit(replace(bare, input_tokens=np.arange(5))) is None


def tiny(seed: int = 0, t: int = 60, n: int = 3, e: int = 6, k: int = 2) -> Recording:
    rng = np.random.default_rng(seed)
    ids = np.array([[rng.permutation(e)[:k] for _ in range(n)] for _ in range(t)], np.int32)
    model = TraceHeader("tiny", k, tuple(TensorInfo(g, g, 0, e, 1) for g in range(n)))
    router = Router([None] * n, [k] * n, n_experts=e)
    starts = np.arange(t) % 20 == 0
    return Recording(
        model,
        router,
        rng.integers(0, 5, t).astype(np.int32),
        starts,
        ids,
        np.ones(ids.shape, np.float32),
        None,
        None,
    )


def test_path_by_brute_force():
    """Every pair of one expert of each of the last two layers, over the token's border,
    never over a text's; as a table or from the counts.
    """
    recording = tiny()
    arrays = get_predictor("activation-path").fit(recording) | fit_pairs(recording)
    ids, starts, (n, e) = recording.ids, recording.starts, (3, 6)
    one, two, n_one, n_two, popular = (Counter() for _ in range(5))
    for t in range(len(ids)):
        for g in range(n):
            (t1, g1), (t2, g2) = divmod(t * n + g - 1, n), divmod(t * n + g - 2, n)
            last = [] if t1 < t and starts[t] else ids[t1, g1].tolist()
            before = [] if t2 < t and starts[t] else ids[t2, g2].tolist()
            popular.update((g, x) for x in ids[t, g])
            n_one.update((g, a) for a in last)
            n_two.update((g, a, b) for a in last for b in before)
            one.update((g, a, x) for a in last for x in ids[t, g])
            two.update((g, a, b, x) for a in last for b in before for x in ids[t, g])

    def after(g, a, x):
        return (one[g, a, x] + PRIOR_ONE * popular[g, x] / len(ids)) / (n_one[g, a] + PRIOR_ONE)

    def after_both(g, a, b, x):
        return (two[g, a, b, x] + PRIOR_TWO * after(g, a, x)) / (n_two[g, a, b] + PRIOR_TWO)

    ratios = [
        [[np.log(after(g, a, x) / popular[g, x] * len(ids)) for x in range(e)] for a in range(e)]
        for g in range(n)
    ]
    np.testing.assert_allclose(arrays["one"], ratios, atol=4e-3)
    section = {key: arrays[key] for key in ("one", "popularity")}
    for name, learned, table in (
        ("activation-path", arrays, edgemoe.TABLE),
        ("activation-path", arrays, 0),
        ("eap", section, 0),
    ):
        with mock.patch.object(edgemoe, "TABLE", table):
            predictor = get_predictor(name)(recording.router, learned)
        prediction = [predictor.observe(event)[0] for event in recording.events(1, 2)][1]
        if name == "eap":  # the layer before alone
            expected = np.exp(
                [
                    sum(np.log(after(2, a, x)) for a in ids[1, 1]) - np.log(popular[2, x])
                    for x in range(e)
                ]
            )
            expected /= expected.max()
        else:
            expected = np.exp(
                [
                    np.mean([np.log(after_both(2, a, b, x)) for a in ids[1, 1] for b in ids[1, 0]])
                    for x in range(e)
                ]
            )
        np.testing.assert_allclose(prediction.scores[0], expected, rtol=5e-3)


def wide() -> Recording:
    """128 experts, where each topic has its own in every layer."""
    rng, n, e, k, t = np.random.default_rng(3), 12, 128, 8, 300
    topic = rng.integers(0, 6, t // 20).repeat(20)
    ranks = np.stack([[rng.permutation(e) for _ in range(n)] for _ in range(6)])
    ids = np.stack(
        [[ranks[topic[i], g, :24][rng.permutation(24)[:k]] for g in range(n)] for i in range(t)]
    ).astype(np.int32)
    model = TraceHeader("wide", k, tuple(TensorInfo(g, g, 0, e, 1) for g in range(n)))
    router = Router([None] * n, [k] * n, n_experts=e)
    return Recording(
        model,
        router,
        np.zeros(t, np.int32),
        np.arange(t) % 20 == 0,
        ids,
        np.ones(ids.shape, np.float32),
        None,
        None,
    )


def test_path_of_128_experts():
    """A table of all triples would be 48 MiB: the counts take what was seen. With room
    for few, the last pairs of a layer back off to one layer.
    """
    recording, k, n = wide(), 8, 12
    sparse = fit_pairs(recording)
    assert sum(array.nbytes for array in sparse.values()) < 16 << 20
    few = fit_pairs(recording, FitOptions(room=3 << 19))
    assert 0 < len(few["pair_expert"]) <= (1 << 19) // 3 < len(sparse["pair_expert"])
    some = few["pair_seen"] > 0
    assert (
        some.any(axis=(1, 2)).all() and (few["pair_seen"][some] == sparse["pair_seen"][some]).all()
    )
    predictor = get_predictor("activation-path")(
        recording.router, get_predictor("activation-path").fit(recording) | sparse
    )
    predictions = [p for event in recording.events(0, 4) for p in predictor.observe(event)]
    hits = [
        len(set(top_k(p.scores, k)[0]) & set(recording.ids[i // n + (p.gate == 0), p.gate])) / k
        for i, p in enumerate(predictions)
        if i % n > 1
    ]
    assert np.mean(hits) > 0.3, (
        "24 of 128 experts are likely: 8 of them at random are right by a third, 8 of all by a"
        " sixteenth"
    )


def test_static_layers_are_known_from_the_token(recording):
    """EdgeMoE §3.1: a layer that routes by the token needs no prediction; it is asked
    for before the batch, and not predicted from the path.
    """
    table = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    router = Router([None] * 3, [2] * 3, n_experts=6, tables=[table, None, None])
    predictor = get_predictor("activation-path")(router, None)
    assert (
        predictor.wants_tokens
        and not get_predictor("activation-path")(recording.router, None).wants_tokens
    )
    (p,) = predictor.begin(np.array([2, 0]))
    assert (
        p.gate == 0
        and set(top_k(p.scores, 2)[0]) == {4, 5}
        and set(top_k(p.scores, 2)[1]) == {0, 1}
    )
    gates = [
        q.gate
        for g in (0, 1, 2)
        for q in predictor.observe(GateEvent(g, np.array([[0, 1]]), np.ones((1, 2), np.float32)))
    ]
    assert gates == [1, 2]


def test_path_learns_while_it_runs():
    """Without a profile: after enough of the same, it expects the same."""
    recording = tiny()
    predictor = get_predictor("activation-path")(recording.router)
    loop = [GateEvent(g, np.array([[g, g + 1]]), np.ones((1, 2), np.float32)) for g in range(3)]
    for _ in range(30):
        predictions = {p.gate: p.scores for event in loop for p in predictor.observe(event)}
    for gate, scores in predictions.items():
        assert set(top_k(scores, 2)[0]) == {gate, gate + 1}


def test_token_table_by_brute_force():
    recording = tiny()
    arrays = get_predictor("token-table").fit(recording)
    predictor = get_predictor("token-table")(recording.router, arrays)
    popularity = recording.used().mean(axis=0)
    predictions = {p.gate: p.scores for p in predictor.begin(np.array([3, 77]))}
    assert sorted(predictions) == [0, 1, 2]
    where = np.flatnonzero(recording.tokens == 3)
    for gate, scores in predictions.items():
        expected = [
            (sum(x in recording.ids[t, gate] for t in where) + PRIOR * popularity[gate, x])
            / (len(where) + PRIOR)
            for x in range(6)
        ]
        np.testing.assert_allclose(scores[0], expected, rtol=2e-3)
        np.testing.assert_allclose(scores[1], popularity[gate], rtol=1e-6)


def test_tokens_that_decide_alone():
    """deepseek4's first layers: known before the batch, without a profile, and not for
    the gate predictors.
    """
    table = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
    router = Router([np.ones((6, 4), np.float32)] * 2, [2, 2], tables=[None, table], n_experts=6)
    (prediction,) = get_predictor("token-table")(router).begin(np.array([2, 0]))
    assert prediction.gate == 1
    np.testing.assert_array_equal(np.sort(top_k(prediction.scores, 2)), [[4, 5], [0, 1]])
    event = GateEvent(
        0, np.array([[0, 1]]), np.ones((1, 2), np.float32), None, np.ones((1, 4), np.float32)
    )
    assert get_predictor("gate")(router).observe(event) == []


def test_sequences_side_by_side_are_predicted_as_each_alone(recording, sections):
    """A batch of one token of each: each row has its own path, over the tokens before,
    too.
    """
    n, texts = recording.model.n_gates, [range(6), range(20, 26)]
    alone = []
    for text in texts:
        predictor = make("activation-path", recording, sections)
        alone.append(
            [
                predictor.observe(event)[0].scores[0]
                for event in recording.events(text.start, text.stop)
            ]
        )
    predictor = make("activation-path", recording, sections)
    for i, events in enumerate(zip(*(recording.events(text.start, text.stop) for text in texts))):
        ids, weights = (
            np.concatenate([getattr(event, name) for event in events])
            for name in ("ids", "weights")
        )
        (p,) = predictor.observe(GateEvent(i % n, ids, weights, decode=True))
        assert p.gate == (i + 1) % n
        np.testing.assert_allclose(p.scores, [scores[i] for scores in alone], rtol=1e-5)


def test_gates_are_the_routers(recording, sections):
    """Raw: the next router on this input; the stack's first layer: the same;
    calibrated: one of the two, by the profile.
    """
    router, event = recording.router, recording.events(0, 1)[4]
    (raw,) = get_predictor("gate")(router, norm=False).observe(event)
    assert raw.logits
    exact = router.logits(5, event.gate_input)
    # the product's rows are Q8_0
    np.testing.assert_allclose(raw.scores, exact, atol=0.03 * exact.std())
    (normed,) = get_predictor("gate")(router, norm=True).observe(event)
    assert not np.array_equal(raw.scores, normed.scores)
    for chosen, expected in ((False, raw), (True, normed)):
        arrays = sections["gate"] | {"next_norm": np.full(12, chosen)}
        np.testing.assert_allclose(
            get_predictor("gate")(router, arrays).observe(event)[0].scores,
            expected.scores,
            rtol=1e-5,
        )
    stack = get_predictor("stacked")(router, p=3, norm=True).observe(event)
    assert [p.gate for p in stack] == [5, 6, 7]
    np.testing.assert_allclose(stack[0].scores, normed.scores, rtol=1e-4)
    assert [
        p.gate for p in get_predictor("stacked")(router, p=3).observe(recording.events(0, 1)[10])
    ] == [11]


def recall(predictor: Predictor, recording: Recording, tokens: range) -> np.ndarray:
    """[n_gates] at k, in decode."""
    n, waiting = recording.model.n_gates, {}
    hits, seen = np.zeros(n), np.zeros(n)
    for i, event in enumerate(recording.events(tokens.start, tokens.stop)):
        t = tokens.start + i // n
        if event.gate == 0:
            if recording.starts[t]:
                predictor.reset_sequence()
                waiting.clear()
            waiting |= {
                p.gate: p.scores.copy() for p in predictor.begin(recording.tokens[t : t + 1])
            }
        if event.gate in waiting:
            hits[event.gate] += np.isin(event.ids[0], top_k(waiting.pop(event.gate), 4)[0]).mean()
            seen[event.gate] += 1
        waiting |= {p.gate: p.scores.copy() for p in predictor.observe(event)}
    return hits / np.maximum(seen, 1)


def test_what_they_are_worth(recording):
    """On text that none of them has seen: the router ahead beats the path of two
    layers, that of one, popularity, the token before; all beat chance.
    """
    train, held = (recording.take(mask) for mask in recording.split(0.25))
    fitted = {"path": get_predictor("activation-path").fit(train), "pairs": fit_pairs(train)}
    names = ("gate", "activation-path", "eap", "previous-token")
    recalls = {
        name: recall(make(name, recording, fitted), held, range(held.n_tokens))[2:].mean()
        for name in names
    }
    best = np.argsort(-train.popularity(), axis=1)[:, :4]
    popular = np.take_along_axis(held.used().mean(axis=0), best, axis=1).sum(axis=1)[2:].mean() / 4
    assert (
        recalls["gate"] > 0.7 > recalls["activation-path"] > recalls["eap"] + 0.005
        and recalls["eap"] > popular + 0.03
    )
    assert recalls["eap"] > recalls["previous-token"] > popular > 1.3 * 4 / 32


def test_learned_on_text_it_has_not_seen(recording, sections):
    """Better than the popular experts on the sequences left out, and as good as it
    says.
    """
    arrays, (_, held) = sections["learned"], recording.split()
    used = recording.used()[held]
    for gate in (3, 7, 11):
        predictor = get_predictor("learned")(recording.router, arrays)
        x = recording.inputs[held, gate - 1].astype(np.float32)
        (prediction,) = predictor.observe(
            GateEvent(
                gate - 1, recording.ids[held, gate - 1], recording.weights[held, gate - 1], None, x
            )
        )
        right = np.take_along_axis(used[:, gate], top_k(prediction.scores, 4), axis=1).mean()
        popular = used[:, gate][:, np.argsort(-recording.popularity()[gate])[:4]].mean()
        assert right > 1.5 * popular
        # the weights are kept in 16 bits
        assert right == pytest.approx(arrays["recall_1"][gate], abs=0.005)
        ahead = recall(
            get_predictor("gate")(recording.router),
            recording.take(recording.split()[1]),
            range(int(held.sum())),
        )[gate]
        assert right > ahead - 0.02, "training has made it worse than the router that it began as"
    strides = {
        s: (
            get_predictor("learned")(recording.router, arrays, stride=s)
            .observe(recording.events(0, 1)[3])[0]
            .gate
        )
        for s in (1, 2)
    }
    assert strides == {1: 4, 2: 5}
    with pytest.raises(OptionError, match="stride is one of 1, 2, not 3"):
        get_predictor("learned")(recording.router, arrays, stride=3)


def test_learned_never_sees_the_tenth_that_it_is_judged_on():
    """Other choices there change what is said of it, and nothing of what it is: the
    best epoch is chosen on text that it trains on.
    """
    recording = random_recording(n_tokens=400)
    held = recording.split()[1]
    other = replace(
        recording,
        ids=np.where(
            held[:, None, None], (recording.ids + 3) % recording.router.n_experts, recording.ids
        ),
    )
    first, second = (
        get_predictor("learned").fit(r, FitOptions(hidden=16)) for r in (recording, other)
    )
    assert all(
        np.array_equal(first[name], second[name]) for name in first if not name.startswith("recall")
    )
    assert not np.array_equal(first["recall_1"], second["recall_1"])


def test_learned_on_fewer_tokens_than_components():
    """A wide model and a short text: the input has no more main components than there
    are tokens.
    """
    wide = random_recording(n_tokens=100, n_embd=320)
    arrays = get_predictor("learned").fit(wide, FitOptions(hidden=16))
    assert arrays["there_1"].tolist() == [False, True, True, True] and arrays["first_1"].shape == (
        4,
        16,
        320,
    )
    # these choices are random: what chance gives, and no more
    assert (np.abs(arrays["recall_1"][1:] - 2 / 8) < 0.15).all()
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_shallow_boundary():
    assert shallow_boundary(np.array([0, 0.3, 0.6, 0.7, 0.8, 0.8, 0.8, 0.75])) == 3
    assert shallow_boundary(np.array([0, 0.8, 0.8])) == 1
    assert shallow_boundary(np.array([0.0])) == 0
