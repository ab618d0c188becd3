"""Fits HOBBIT's four weights on a trace: the miss penalty of its replay, made small (§3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cache.hobbit import Hobbit
from ..cache.importance import PAPERS_COST, MissCost, thresholds, unimportance
from ..errors import OptionError
from ..predict.base import FitOptions, Progress
from ..predict.recording import Recording
from ..simulate.simulator import simulate
from ..simulate.trace import Trace

NAMES = ("lru", "lfu", "lhu", "fld")
MAX_EVENTS = 6_144
SHARES = (0.25, 0.5, 0.75)  # of the experts in memory
FACTORS = (0.0, 0.25, 0.5, 2.0, 4.0)


def fit(recording: Recording, options: FitOptions, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
    """The section "hobbit" of a profile; None if the recording has no probabilities.

    Returns:
        the weights, fitted to what misses of this model cost: t1 and t2 from the distribution of its scores, low_cost from the options.
    """
    if recording.probs is None:
        return None
    if progress:
        progress(0, 1)  # how many replays it takes shows in the end
    cost = MissCost(*thresholds(scores(recording)), options.low_cost)
    weights = fit_hobbit(recording.trace(MAX_EVENTS // recording.model.n_gates), cost)
    if progress:
        progress(1, 1)
    return {name: np.array(value) for name, value in (weights | {"t1": cost.t1, "t2": cost.t2, "low_cost": cost.low}).items()}


def scores(recording: Recording) -> np.ndarray:
    """[n] unimportance of every expert that a gate selected (§3.2)."""
    there = recording.ids >= 0
    rows = [unimportance(recording.weights[:, g, there[0, g]]).ravel() for g in range(recording.model.n_gates)]
    return np.concatenate(rows)


def fit_hobbit(
    trace: Trace, cost: MissCost = PAPERS_COST, shares: Sequence[float] = SHARES, max_events: int = MAX_EVENTS, progress: Callable[[int], None] | None = None
) -> dict[str, float]:
    """Weights `lru`, `lfu`, `lhu`, `fld`, of sum 1, for `create("hobbit", ...)`.

    The paper gives no procedure: here one weight after the other is multiplied by `FACTORS` as long as that lowers the penalty,
    the geometric mean over buffer sizes. A weight that reached 0 may come back at the smallest other weight.

    Args:
        cost: of misses; its t1 says which uses count for H.
        trace: at most `max_events` of it are replayed, from its beginning.
        progress: called with the number of replays so far.

    Raises:
        OptionError: an empty trace.
    """
    if not trace.events:
        raise OptionError("HOBBIT's weights are fitted on a trace, and this one is empty")
    part = trace.slice(0, max_events // trace.model.n_gates * trace.model.n_gates or max_events)
    known: dict[tuple[float, ...], float] = {}

    def penalty(weights: tuple[float, ...]) -> float:
        total = sum(weights)
        key = tuple(round(w / total, 4) for w in weights)
        if key not in known:
            product = 1.0
            for share in shares:
                arena = max(int(trace.model.full_bytes * share), 2 * max(t.slot_bytes for t in trace.model.tensors))
                options: dict[str, Any] = dict(zip(NAMES, key, strict=True))
                product *= simulate(part, "hobbit", arena, cost=cost, t1=cost.t1, **options).miss_penalty + 1e-9
                if progress:
                    progress(len(known) * len(shares))
            known[key] = product
        return known[key]

    best = tuple(Hobbit.defaults[name] for name in NAMES)
    improved = True
    while improved:
        improved = False
        for i in range(len(NAMES)):
            now = best[i] or min(w for w in best if w > 0)
            for factor in (*FACTORS, 1.0):
                tried = (*best[:i], now * factor, *best[i + 1 :])
                if sum(tried) > 0 and penalty(tried) < penalty(best) * (1 - 1e-4):
                    best, improved = tried, True
    total = sum(best)
    return {name: round(w / total, 4) for name, w in zip(NAMES, best, strict=True)}
