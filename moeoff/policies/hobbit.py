"""HOBBIT: mixed precision by gate weight, prediction several layers ahead, and a
weighted cache.

    §3.2  unimportance s (equation 2)                 unimportance
          T1, T2: high, low, or not at all            versions, thresholds; t1, t2 of `Precision`;
                                                      moeoff-version-selector
    §3.3  p routers stacked                           StackedGate
          versions of predicted experts               predicted_versions
          lookahead while all are resident,           engine.prefetcher
          protection from eviction
    §3.4  cost of a miss, C or B_l/B_h C              MissCost
          priority p (equation 3), reset by text      Hobbit
          weights that minimize the miss penalty      Hobbit.fit, fit_weights
          caches for high and for low precision       two arenas of the buffer, `low_share`

Equation 1 is the layer itself. The presets are `hobbit`, which is lossless,
`hobbit-lossy`, the paper's in float16 and int4, and `hobbit-jetson`, its int8 and int2
from flash (§5).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import OptionError
from ..precision import INT4, LOWEST, Precision
from ..routing.event import GateEvent
from ..routing.recording import Recording
from ..routing.trace import Trace
from .base import (
    DEFAULT_FIT,
    FitOptions,
    GroupedPolicy,
    Progress,
    RoutersAhead,
    Section,
    chosen,
    n_low,
)
from .fate import CrossLayerGate
from .strategy import Strategy, register

# --- §3.2: token-level dynamic expert loading ---

T1, T2 = 0.6, 0.9  # the paper's thresholds on Mixtral
# shares of accesses in high and in low precision under those thresholds on Mixtral
# (figure 5b)
HIGH_SHARE, LOW_SHARE = 0.67, 0.30
HIGH, LOW, SKIP = 0, 1, 2  # versions, as in `GateEvent.versions` and the native store


def unimportance(weights: np.ndarray, n_scale: int | None = None) -> np.ndarray:
    """Return the sum of the larger gate weights of the same token (equation 2), all
    scaled to 1.

    The order of sums is the native rule's, so results are bit-identical. Of equal
    weights the first counts as larger. If a token's weights sum to 0, all its experts
    are important.

    Args:
        weights: [n_tokens, n] float.
        n_scale: Number of largest weights scaled to sum to 1. Default: all.

    Returns:
        [n_tokens, n], 0 for the most important.
    """
    rows, order = np.arange(len(weights))[:, None], np.argsort(-weights, axis=1, kind="stable")
    upto = np.cumsum(weights[rows, order], axis=1)
    total = upto[:, -1:] if n_scale is None else upto[:, n_scale - 1 : n_scale]
    out = np.zeros_like(weights)
    out[rows, order[:, 1:]] = np.where(total > 0, upto[:, :-1] / np.where(total > 0, total, 1), 0)
    return out


def versions(s: np.ndarray, t1: float, t2: float) -> np.ndarray:
    """Return the version of absent experts by unimportance: HIGH for s <= t1, LOW for
    t1 < s <= t2, else SKIP.
    """
    return np.where(s <= t1, HIGH, np.where(s <= t2, LOW, SKIP))


def thresholds(
    scores: np.ndarray, high: float = HIGH_SHARE, low: float = LOW_SHARE
) -> tuple[float, float]:
    """Return T1 and T2 from a model's distribution of unimportance (figure 5b).

    Args:
        scores: [n] of all accesses.
        high, low: Least shares of accesses in high and in low precision; the rest is
            skipped.

    Returns:
        The smallest thresholds with these shares; T1 <= T2 <= 1.

    Raises:
        OptionError: There are no scores, or the shares are invalid.
    """
    if not len(scores) or not (0 <= high <= 1 and 0 <= low <= 1):
        raise OptionError(
            f"thresholds need scores and two shares between 0 and 1, not {len(scores)} scores,"
            f" {high} and {low}"
        )
    t1, t2 = np.quantile(np.minimum(scores, 1), [high, min(high + low, 1)], method="inverted_cdf")
    return float(t1), float(t2)


def recorded_unimportance(recording: Recording) -> np.ndarray:
    """Return the unimportance [n] of every routed expert."""
    used = recording.ids[0] >= 0
    rows = [
        unimportance(recording.weights[:, g, used[g]]).ravel()
        for g in range(recording.model.n_gates)
    ]
    return np.concatenate(rows)


def fit_thresholds(
    recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Return the section "thresholds": t1 and t2 with the paper's shares."""
    t1, t2 = thresholds(recorded_unimportance(recording))
    return {"t1": np.array(t1), "t2": np.array(t2)}


# --- §3.3: layer-level adaptive expert prefetching ---


@register
class StackedGate(RoutersAhead):
    """The stacked routers of the next p layers on this layer's gate input.

    Options:
        p: Number of layers.
        norm: As in `CrossLayerGate`.
    """

    name, summary = "stacked", "the next p layers' routers on this layer's input"
    defaults = {"p": 3, "norm": None}
    sections = CrossLayerGate.sections

    def start(self) -> None:
        self.look_ahead(self.options["p"], self.options["norm"])


def predicted_versions(
    scores: np.ndarray, top: np.ndarray, n_used: int, precision: Precision
) -> np.ndarray:
    """Return predicted experts' versions, taking scores for gate weights.

    As in the native rule, the best version that any token needs counts.

    Args:
        scores: [n_tokens, n_experts].
        top: [n_tokens, n] candidates of each token, best first.
        n_used: Number of experts whose weights sum to 1.

    Returns:
        [n_experts] of HIGH, LOW and SKIP.
    """
    weights = np.take_along_axis(scores, top, axis=1)
    of_tokens = versions(np.minimum(unimportance(weights, n_used), 1), precision.t1, precision.t2)
    of_tokens[weights[:, -1] < 0] = HIGH  # no weights
    out = np.full(scores.shape[1], SKIP)
    np.minimum.at(out, top, of_tokens)
    return out


# --- §3.4: sequence-level multidimensional expert caching ---

LOW_COST = 0.25  # B_l / B_h of an int4 version and float16


@dataclass(frozen=True)
class MissCost:
    """The cost of a miss, in misses of a high version.

    Attributes:
        t1, t2: Thresholds for decoded tokens: high precision up to t1, low up to t2,
            skipped above.
        low: Size of a low version relative to the high one, B_l/B_h.
        prefill_low_fraction: Share of a prompt's experts in low precision, least
            popular first (Fate §4.5). None: thresholds apply to prompts, and an expert
            costs its most expensive token.

    Raises:
        OptionError: A value is out of range.
    """

    t1: float = T1
    t2: float = T2
    low: float = LOW_COST
    prefill_low_fraction: float | None = None

    def __post_init__(self) -> None:
        if not (
            0 <= self.t1 <= self.t2 <= 1
            and 0 <= self.low <= 1
            and 0 <= (self.prefill_low_fraction or 0) <= 1
        ):
            raise OptionError(
                f"a miss costs by 0 <= t1 <= t2 <= 1 and by shares between 0 and 1, not {self}"
            )

    def decoded(self, weights: np.ndarray) -> np.ndarray:
        """Return each routed expert's cost, [n_tokens, n_used], by gate weights."""
        cost: np.ndarray = np.array([1.0, self.low, 0.0])[
            versions(unimportance(weights), self.t1, self.t2)
        ]
        return cost

    def of(self, event: GateEvent, n_experts: int) -> np.ndarray:
        """Return the costs of an event's experts, [n_experts] float32; 0 for others."""
        out = np.zeros(n_experts, np.float32)
        if event.decode or self.prefill_low_fraction is None:
            np.maximum.at(out, event.ids.ravel(), self.decoded(event.weights).ravel())
            return out
        count = np.bincount(event.ids.ravel(), minlength=n_experts)
        experts = np.flatnonzero(count)
        out[experts] = 1
        out[
            experts[np.argsort(count[experts], kind="stable")][
                : n_low(len(experts), self.prefill_low_fraction)
            ]
        ] = self.low
        return out


PAPERS_COST = MissCost()


@register
class Hobbit(GroupedPolicy):
    """HOBBIT's cache policy (equation 3), reset with each text.

    p = w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l_t - l_i + l_n) mod l_n) / l_n)

    R is the token of the last access, F the accesses in this text, H those in high
    precision, T the number of tokens, l_i the evicting layer. The table holds p times
    T, which has the same order. `fit` fits the weights to a penalty with the model's
    thresholds and sizes; the defaults fit the demo model. sequence=False never resets.

    actual: True for a lossy run, where H counts accesses served in high precision
    (`GateEvent.versions`). Otherwise H counts those that need it: unimportance <= t1
    (§3.2).
    """

    name, summary = "hobbit", "weighs recency, frequency, precision and layer distance"
    defaults = {
        "lru": 0.0784,
        "lfu": 0.1765,
        "lhu": 0.7059,
        "fld": 0.0392,
        "t1": T1,
        "actual": False,
        "sequence": True,
    }
    compared = True

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray] | None:
        """Return the four weights that minimize the cost of this model's misses.

        t1 and t2 follow from the distribution of scores, low_cost from the options.
        Return None without probabilities, or without options to replay.
        """
        if recording.probs is None or options.replay is None:
            return None
        if progress:
            progress(0, 1)  # the number of replays is unknown
        cost = MissCost(
            *thresholds(recorded_unimportance(recording)),
            LOW_COST if options.low_cost is None else options.low_cost,
        )
        weights = fit_weights(
            recording.trace(MAX_EVENTS // recording.model.n_gates),
            options.replay,
            cost,
            until=options.until,
        )
        if progress:
            progress(1, 1)
        return {
            name: np.array(value)
            for name, value in (
                weights | {"t1": cost.t1, "t2": cost.t2, "low_cost": cost.low}
            ).items()
        }

    sections = (
        Section("hobbit", fit, {name: ("f", ()) for name in ("lru", "lfu", "lhu", "fld", "t1")}),
        Section("thresholds", fit_thresholds, {name: ("f", (), 0, 1) for name in ("t1", "t2")}),
    )

    def start(self) -> None:
        super().start()
        o, n = self.options, self.shape.n_gates
        i = np.arange(n)
        # [l_i, l_t]
        self._fld = (o["fld"] * (1 - ((i[None] - i[:, None]) % n) / n)).astype(np.float32)[
            :, :, None
        ]
        self._last = np.zeros_like(self.priorities)
        self._all = np.zeros_like(self.priorities)  # the three parts that do not depend on l_i
        self._scratch = np.zeros((n, 1), np.float32)
        self._tokens = 1

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        o, n_tokens = self.options, len(events[0].ids)
        if first == 0:
            self._tokens += n_tokens
        gates = np.arange(first, first + len(events))
        if n_tokens == 1 and len({event.ids.shape[1] for event in events}) == 1:
            self._count(
                gates[:, None],
                np.concatenate([e.ids for e in events]),
                o["lfu"] + o["lhu"] * self._high(events),
            )
        else:
            for gate, event in enumerate(events, first):
                experts, count = chosen(event)
                high = np.bincount(event.ids[self._high([event])], minlength=self.shape.n_experts)
                self._count(gate, experts, o["lfu"] * count + o["lhu"] * high[experts])
        np.multiply(
            self._fld[(first + len(events)) % self.shape.n_gates], self._tokens, out=self._scratch
        )
        np.add(self._all, self._scratch, out=self.priorities)

    def _high(self, events: Sequence[GateEvent]) -> np.ndarray:
        """Return which accesses count for H, [n_tokens of all events, n_used] bool."""
        if not self.options["actual"]:
            needed: np.ndarray = (
                unimportance(np.concatenate([e.weights for e in events])) <= self.options["t1"]
            )
            return needed
        return np.concatenate(
            [
                np.ones(e.ids.shape, bool) if e.versions is None else e.versions == HIGH
                for e in events
            ]
        )

    def _count(self, gate: int | np.ndarray, experts: np.ndarray, worth: np.ndarray) -> None:
        self._all[gate, experts] += worth + self.options["lru"] * (
            self._tokens - self._last[gate, experts]
        )
        self._last[gate, experts] = self._tokens

    def reset_sequence(self) -> None:
        super().reset_sequence()
        if not self.options["sequence"]:
            return
        for array in (self._last, self._all, self.priorities):
            array[:] = 0
        self._tokens = 1


WEIGHT_NAMES = ("lru", "lfu", "lhu", "fld")  # weights' names
MAX_EVENTS = 6_144
SHARES = (0.25, 0.5, 0.75)  # resident shares
FACTORS = (0.0, 0.25, 0.5, 2.0, 4.0)


def fit_weights(
    trace: Trace,
    replay: Callable[..., Any],
    cost: MissCost = PAPERS_COST,
    shares: Sequence[float] = SHARES,
    max_events: int = MAX_EVENTS,
    until: float = math.inf,
) -> dict[str, float]:
    """Return w_lru, w_lfu, w_lhu and w_fld, of sum 1, that minimize the miss penalty.

    The paper has no procedure. This one multiplies a weight at a time by `FACTORS`
    while that lowers the penalty, the geometric mean over buffer sizes. A weight of 0
    may return at the smallest other weight.

    Args:
        trace: Trace, of which the first `max_events` events are replayed.
        replay: `replay.simulate`.
        cost: Cost of misses; its t1 defines H.
        until: Deadline in `time.monotonic`.

    Raises:
        OptionError: The trace is empty.
    """
    if not trace.events:
        raise OptionError("HOBBIT's weights are fitted on a trace, and this one is empty")
    part = trace.slice(0, max_events // trace.model.n_gates * trace.model.n_gates or max_events)
    # the accesses that count for H are the same in every replay
    part.events = [
        replace(e, versions=versions(unimportance(e.weights), cost.t1, cost.t2).astype(np.uint8))
        for e in part.events
    ]
    known: dict[tuple[float, ...], float] = {}

    def penalty(weights: tuple[float, ...]) -> float:
        total = sum(weights)
        key = tuple(round(w / total, 4) for w in weights)
        if key not in known:
            product = 1.0
            for share in shares:
                arena = max(int(trace.model.full_bytes * share), trace.model.arena_floor)
                options: dict[str, Any] = dict(zip(WEIGHT_NAMES, key, strict=True))
                product *= (
                    replay(part, "hobbit", arena, cost=cost, actual=True, **options).miss_penalty
                    + 1e-9
                )
            known[key] = product
        return known[key]

    best = tuple(Hobbit.defaults[name] for name in WEIGHT_NAMES)
    improved = True
    while improved:
        improved = False
        for i in range(len(WEIGHT_NAMES)):
            now = best[i] or min(w for w in best if w > 0)
            for factor in (*FACTORS, 1.0):
                if time.monotonic() > until:
                    break
                tried = (*best[:i], now * factor, *best[i + 1 :])
                if sum(tried) > 0 and penalty(tried) < penalty(best) * (1 - 1e-4):
                    best, improved = tried, True
    total = sum(best)
    return {name: round(w / total, 4) for name, w in zip(WEIGHT_NAMES, best, strict=True)}


HOBBIT = register(
    Strategy(
        "hobbit",
        "HOBBIT: weighted cache, three layers' gates stacked",
        policy=Hobbit,
        predictor=StackedGate,
        bounded=False,
        vram_mode="centric",
    )
)
register(
    replace(
        HOBBIT,
        name="hobbit-lossy",
        summary=(
            "HOBBIT, lossy: misses of less weight in four bits, of little weight skipped (a sidecar"
            " with Q4_0)"
        ),
        precision=Precision(t1=T1, t2=T2, low_tier=INT4, weigh_prompts=True),
    )
)
register(
    replace(
        HOBBIT,
        name="hobbit-jetson",
        summary=(
            "HOBBIT from flash, lossy: misses of less weight in the sidecar's lowest tier, of"
            " little weight skipped"
        ),
        precision=Precision(t1=T1, t2=T2, low_tier=LOWEST, weigh_prompts=True),
    )
)
