"""The learned score: its fit on traces, and what its weights are worth."""

import numpy as np
import pytest

from helpers.files import SMALL_TRACE
from helpers.gate_events import random_events, update_cost
from moeoff import OptionError
from moeoff.cache import Shape, create
from moeoff.cache.score import Score
from moeoff.calibrate.fit_score import HORIZONS, MAX_MATRIX, fit_score, next_use
from moeoff.gate_event import GateEvent
from moeoff.simulate.simulator import simulate
from moeoff.simulate.trace import Model, TensorInfo, Trace

MODEL = Model("none", 2, tuple(TensorInfo(g, g, m, 16, 5000) for g in range(4) for m in (2, 1, 3)))


def trace_of(events, model=MODEL):
    return Trace(model, events, np.zeros(len(events), bool))


def walk(n_tokens, seed=0):
    """A hidden state that goes round: the router's probabilities tell what comes, recency does not."""
    rng = np.random.default_rng(seed)
    favourites = np.random.default_rng(7).normal(size=(24, 4, 16)).astype(np.float32) * 2
    events, state = [], 0
    for _ in range(n_tokens):
        state = (state + 1) % 24 if rng.random() < 0.95 else int(rng.integers(24))
        for g in range(4):
            logits = favourites[state, g] + rng.normal(size=16).astype(np.float32) * 0.1
            probs = (np.exp(logits) / np.exp(logits).sum())[None]
            ids = np.argsort(-probs, axis=1)[:, :2].astype(np.int32)
            events.append(GateEvent(g, ids, np.take_along_axis(probs, ids, axis=1), probs))
    return trace_of(events)


@pytest.fixture(scope="module")
def fitted():
    return fit_score(walk(2000))


def test_next_use_by_its_definition():
    uses = (np.random.default_rng(0).random((60, 5)) < 0.2).astype(np.float32)
    got = next_use(uses, 0.7)
    for t in range(60):
        for e in range(5):
            later = np.flatnonzero(uses[t + 1 :, e])
            assert got[t, e] == pytest.approx(0.7 ** later[0] if later.size else 0, abs=1e-6)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_learns_what_recency_cannot_know(fitted, share):
    trace, arena = walk(600, seed=1), int(MODEL.full_bytes * share)
    lru, generic, best = (simulate(trace, name, arena).hit_rate for name in ("lru", "score", "belady"))
    learned = simulate(trace, "score", arena, weights=fitted).hit_rate
    assert (learned - lru) / (best - lru) > 0.6 and learned > generic + 0.05


def test_the_larger_the_buffer_the_longer_the_horizon(fitted):
    backs = [Score(Shape(4, 16, 2, 64 * share), weights=fitted)._back for share in (0.1, 0.5, 0.9)]
    assert all((b == w.astype(np.float32)).all() for b, w in zip(backs, fitted["back"], strict=True)) and len(HORIZONS) == 3


def test_weights_from_a_file_are_those_of_the_dict(fitted, tmp_path):
    np.savez(tmp_path / "w.npz", **fitted)
    trace, arena = walk(100, seed=2), MODEL.full_bytes // 2
    results = [simulate(trace, "score", arena, events=True, weights=w) for w in (fitted, str(tmp_path / "w.npz"))]
    assert (results[0].event_hits == results[1].event_hits).all()


def test_refuses_weights(fitted, tmp_path):
    with pytest.raises(OptionError, match="weights are for"):
        create("score", Shape(3, 16, 2, 8), weights=fitted)
    (tmp_path / "w.npz").write_bytes(b"nothing")
    for path in (tmp_path / "w.npz", tmp_path / "absent.npz"):
        with pytest.raises(OptionError, match="no weights of the score"):
            create("score", Shape(3, 16, 2, 8), weights=str(path))


def test_refuses_traces():
    with pytest.raises(OptionError, match="at least 64 tokens"):
        fit_score(walk(10))
    events = random_events(4 * 70, Shape(4, 16, 2, 8))
    for wrong in (
        [GateEvent(e.gate, e.ids, e.weights) for e in events],
        random_events(4 * 70, Shape(4, 16, 2, 8), n_tokens=2),
        [*events[1:], events[0]],
    ):
        with pytest.raises(OptionError, match="token by token"):
            fit_score(trace_of(wrong))


def test_many_experts_are_compressed(monkeypatch):
    """The features stay within their bound, and what comes out has the model's shape."""
    from moeoff.calibrate import fit_score as learn

    monkeypatch.setattr(learn, "MAX_FEATURES", 40)
    monkeypatch.setattr(learn, "MAX_VALUES", 4 * 16 * 512)
    weights = fit_score(walk(2000), rank=8)
    assert weights["project"].shape == (4, 8, 32) and weights["back"].shape == (3, 4, 16, 8)
    trace, arena = walk(400, seed=1), MODEL.full_bytes // 2
    lru, best = (simulate(trace, name, arena).hit_rate for name in ("lru", "belady"))
    assert (simulate(trace, "score", arena, weights=weights).hit_rate - lru) / (best - lru) > 0.4


@pytest.mark.perf
def test_update_cost_with_weights():
    """20 us for each event at 64 x 256 experts, with the bottleneck that such a model gets."""
    rng, rank = np.random.default_rng(0), MAX_MATRIX // 512
    shapes = {"project": (64, rank, 512), "back": (3, 64, 256, rank), "mean": (64, 512), "bias": (3, 64, 256), "coef": (3, 64, 5), "position": (3,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | {"share": np.array([0.3, 0.6, 1.0])}
    assert update_cost("score", weights=weights) < 20e-6


def test_the_demo_models_weights_beat_the_generic_ones():
    trace = Trace.read(SMALL_TRACE)
    for share in (0.25, 0.5, 0.75):
        arena = int(trace.model.full_bytes * share)
        generic, ours = (simulate(trace, "score", arena, weights=w).hit_rate for w in ("generic", None))
        assert ours > generic + 0.005
