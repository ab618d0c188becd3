"""Replay of traces through the live policies and the native residency, to compare
policies.

A policy gets an event after the gate has its slices, so the replay of a run whose
policy kept up evicts exactly what the run evicted. If the arena cannot hold one gate's
selection (large prompts), a run's evictions depend on the timing of reads; in a replay
reads complete at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import BudgetError, OptionError
from ..llamacpp import native
from ..routing.trace import Trace
from ..system.memory import format_size
from . import CacheShape, Policy, get_policy
from .hobbit import HIGH, PAPERS_COST, MissCost
from .strategy import policy_of


@dataclass(frozen=True)
class Result:
    """The result of a replay. Counts are of slices, sizes in bytes.

    Attributes:
        gate_hits, gate_misses: [n_gates].
        bytes_read: Bytes of slices read.
        miss_penalty: HOBBIT §3.4, in misses of an expert in high precision. A low
            version costs B_l/B_h, a skipped expert nothing.
        event_hits: [n_events].
        resident: [n_gates * n_experts] bool at the end.
        skipped: Number of skipped experts.
        decoded: Number of experts routed for decoded tokens, with tau only.
    """

    policy: str
    cache_bytes: int
    n_tokens: int
    gate_hits: np.ndarray
    gate_misses: np.ndarray
    evictions: int
    bytes_read: int
    miss_penalty: float
    resident: np.ndarray
    event_hits: np.ndarray
    skipped: int = 0
    decoded: int = 0

    @property
    def hit_rate(self) -> float:
        uses = self.gate_hits.sum() + self.gate_misses.sum()
        return float(self.gate_hits.sum() / uses) if uses else 0.0

    def to_dict(self) -> dict[str, Any]:
        n = max(self.n_tokens, 1)
        per_layer = self.gate_hits / np.maximum(self.gate_hits + self.gate_misses, 1)
        return {
            "strategy": self.policy,
            "cache_bytes": self.cache_bytes,
            "tokens": self.n_tokens,
            "hit_rate": self.hit_rate,
            "evictions": self.evictions,
            "bytes_per_token": self.bytes_read / n,
            "miss_penalty_per_token": self.miss_penalty / n,
            "skipped_per_token": self.skipped / n,
            "skipped_share": self.skipped / max(self.decoded, 1),
            "hit_rate_by_layer": per_layer.round(6).tolist(),
        }


def simulate(
    trace: Trace,
    policy: str | Policy,
    cache_bytes: int,
    *,
    lag: str = "event",
    tau: float = 0.0,
    cost: MissCost = PAPERS_COST,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Result:
    """Replay a trace. The result is deterministic.

    Args:
        policy: Policy or its name in `moeoff.policies`.
        cache_bytes: Arena size in bytes, slot padding included, as
            `Llama(expert_memory=...)`.
        lag: "event" for priorities updated by the gate before, "token" by the token
            before.
        tau: Weight below which missing experts are skipped. Later events stay as
            recorded.
        cost: Costs of misses, for the penalty.

    Raises:
        OptionError: The policy or an option is unknown.
        BudgetError: The arena is below the floor.
    """
    model = trace.model
    cache_bytes, floor = min(cache_bytes, model.full_bytes), model.arena_floor
    if cache_bytes < floor:
        message = (
            f"a replay needs at least {format_size(floor)} for experts, got"
            f" {format_size(cache_bytes)}"
        )
        raise BudgetError(message, hint={"memory": floor})
    if isinstance(policy, str):
        policy = get_policy(policy)(CacheShape.of(model, cache_bytes), **options)
    policy.prepare(trace.events)
    arena = native.Simulation(model.tensors, cache_bytes)
    table = policy.priorities if lag == "event" else policy.priorities.copy()
    last = model.n_gates - 1
    n_matrices, nbytes = np.array(model.n_matrices), np.array(model.expert_bytes)
    hits, misses = np.zeros(model.n_gates, np.int64), np.zeros(model.n_gates, np.int64)
    event_hits = np.zeros(len(trace.events), np.int64)
    evictions, penalty, n_skipped, n_decoded = 0, 0.0, 0, 0
    costs = _costs(trace, cost)
    for n, event in enumerate(trace.events):
        if trace.starts[n]:
            policy.reset_sequence()
            if lag != "event":
                table[:] = policy.priorities
        absent = arena.residency[event.gate] == 0
        n_hit, n_evicted, versions = arena.take(
            event.ids, event.weights, table, tau, gate=event.gate, decode=bool(event.decode)
        )
        served = event.ids if versions is None else event.ids[versions == HIGH]
        missing = np.unique(served[absent[served]])
        if versions is not None and event.decode:
            event = replace(event, versions=versions)
            n_skipped += int(np.count_nonzero(versions))
            n_decoded += event.ids.size
        event_hits[n] = n_hit
        hits[event.gate] += n_hit
        misses[event.gate] += missing.size
        evictions += n_evicted
        penalty += costs[n][missing].sum()
        policy.update(event)
        if lag != "event" and event.gate == last:
            table[:] = policy.priorities
        if progress and n % 4096 == 0:
            progress(n)
    counts = hits, misses * n_matrices, evictions, int((misses * nbytes).sum()), float(penalty)
    rest = arena.residency.ravel() != 0, event_hits, n_skipped, n_decoded
    return Result(policy.name, cache_bytes, trace.n_tokens, *counts, *rest)


def _costs(trace: Trace, cost: MissCost) -> np.ndarray:
    """Return the cost of a miss of each expert, [n_events, n_experts] float32."""
    if trace.miss_costs is None or trace.miss_costs[0] != cost:
        n = trace.model.n_experts
        costs = [cost.of(event, n) for event in trace.events]
        trace.miss_costs = cost, np.stack(costs) if costs else np.zeros((0, n), np.float32)
    return trace.miss_costs[1]


# --- comparison of policies on one trace, between LRU and Belady's optimum ---


def without_probs(trace: Trace, policies: Sequence[str]) -> list[str]:
    """Return the policies that want probabilities which the trace lacks, and get the
    selected experts' weights. Raise OptionError for an unknown policy.
    """
    if any(event.probs is not None for event in trace.events):
        return []
    return [name for name in policies if policy_of(name).wants_probs]


def compare(
    trace: Trace,
    policies: Sequence[str],
    arenas: Sequence[int],
    *,
    tau: float = 0.0,
    cost: MissCost = PAPERS_COST,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Result]:
    """Replay a trace through each policy at each size, LRU first and Belady's optimum
    last.

    Args:
        policies: Policies and strategies besides lru and belady.
        arenas: Arena sizes in bytes.
        tau: As in `simulate`, without effect on belady.
        cost: Costs of misses, whose T1 a policy with that option gets.
        progress: Callback with policy, events done and total.

    Raises:
        OptionError: The trace is empty, or a policy is unknown.
        BudgetError: An arena is below the floor.
    """
    if not trace.events:
        raise OptionError("the trace has no gate events")
    names = list(dict.fromkeys(["lru", *policies, "belady"]))
    policy = {name: policy_of(name) for name in names}
    results = []
    runs = [(arena, name) for arena in arenas for name in names]
    for i, (arena, name) in enumerate(runs, 1):
        report = progress and functools.partial(
            lambda stage, n: progress(stage, n, len(trace.events)), f"{name} ({i} of {len(runs)})"
        )
        options: dict[str, Any] = {"t1": cost.t1} if "t1" in policy[name].defaults else {}
        options |= {"tau": 0.0 if name == "belady" else tau, "cost": cost, "progress": report}
        result = simulate(trace, policy[name].name, arena, **options)
        results.append(replace(result, policy=name))  # the strategy's name, not its policy's
    return results


def gap_recovered(result: Result, results: list[Result]) -> float | None:
    """Return the share of the gap from LRU's to Belady's hit rate that a policy closes."""
    rate = {
        r.policy: r.hit_rate
        for r in results
        if r.cache_bytes == result.cache_bytes and r.policy in ("lru", "belady")
    }
    gap = rate["belady"] - rate["lru"]
    return (result.hit_rate - rate["lru"]) / gap if gap > 0 else None
