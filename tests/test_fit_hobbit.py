"""HOBBIT's weights, fitted on a trace."""

import pytest

from helpers.files import SMALL_TRACE
from moeoff import OptionError
from moeoff.cache.hobbit import Hobbit
from moeoff.calibrate.fit_hobbit import fit_hobbit
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


def test_hobbit_needs_events():
    with pytest.raises(OptionError, match="empty"):
        fit_hobbit(Trace.read(SMALL_TRACE).slice(0, 0))
