"""HOBBIT's weights, fitted on a trace."""

import pytest

from helpers.files import SMALL_TRACE
from helpers.recordings import random_recording
from moeoff import OptionError
from moeoff.cache.hobbit import Hobbit
from moeoff.cache.importance import T1, T2, thresholds
from moeoff.calibrate import fit_hobbit as fit_hobbit_module
from moeoff.calibrate.fit_hobbit import fit, fit_hobbit, scores
from moeoff.predict import FitOptions
from moeoff.simulate.simulator import simulate
from moeoff.simulate.trace import Trace


def test_hobbit_weights_lower_the_penalty():
    trace, arena = Trace.read(SMALL_TRACE), int(Trace.read(SMALL_TRACE).model.full_bytes * 0.5)
    calls = []
    weights = fit_hobbit(trace, shares=(0.5,), progress=calls.append)
    assert sum(weights.values()) == pytest.approx(1, abs=1e-3) and set(weights) == {"lru", "lfu", "lhu", "fld"}
    fitted = simulate(trace, "hobbit", arena, **weights).miss_penalty
    for other in ({}, *({name: float(name == only) for name in weights} for only in weights)):
        assert fitted <= simulate(trace, "hobbit", arena, **other).miss_penalty * (1 + 1e-6)
    assert calls == sorted(calls) and len(calls) > 10 and sum(Hobbit.defaults[n] for n in weights) == pytest.approx(1, abs=1e-3)


def test_the_penalty_is_the_models_own():
    """Thresholds from its own scores, and what its own low versions weigh: both are kept, and both are what the fit was for."""
    recording, calls = random_recording(n_tokens=24, n_gates=2), []

    def penalty(trace, *_, cost, t1, **weights):
        calls.append((cost.t1, cost.t2, cost.low, t1))
        return simulate(trace, *_, cost=cost, t1=t1, **weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_hobbit_module, "simulate", penalty)
        found = fit(recording, FitOptions(low_cost=0.9))
    t1, t2 = thresholds(scores(recording))
    assert (t1, t2) != (T1, T2) and set(calls) == {(t1, t2, 0.9, t1)}
    assert (found["t1"], found["t2"], found["low_cost"]) == (t1, t2, 0.9)
    assert sum(float(found[name]) for name in ("lru", "lfu", "lhu", "fld")) == pytest.approx(1, abs=1e-3)


def test_hobbit_needs_events():
    with pytest.raises(OptionError, match="empty"):
        fit_hobbit(Trace.read(SMALL_TRACE).slice(0, 0))
