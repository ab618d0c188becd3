"""Policies compared on one trace: each at each arena size, with LRU and Belady's optimum between which a policy can win."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..routing.trace import Trace
from .hobbit import PAPERS_COST, MissCost
from .replay import Result, simulate
from .strategy import policy_of


def left_out(trace: Trace, policies: Sequence[str]) -> dict[str, str]:
    """Those of these policies and strategies that cannot be replayed as they would run live, by name, and why.

    Raises:
        OptionError: there is no such policy.
    """
    if any(event.probs is not None for event in trace.events):
        return {}
    why = "it reads the routers' probabilities of all experts, and the trace has none"
    return {name: why for name in policies if policy_of(name).wants_probs}


def compare(trace: Trace, policies: Sequence[str], arenas: Sequence[int], *, seed: int = 0, tau: float = 0.0,
            cost: MissCost = PAPERS_COST, progress: Callable[[str, int, int], None] | None = None) -> list[Result]:  # fmt: skip
    """Replays a trace through each policy at each size; LRU comes first and Belady's optimum last at every size.

    Args:
        policies: names, of strategies, too; those of LRU and Belady need not be given.
        arenas: bytes of the experts' arena.
        tau: of all but Belady's optimum, which knows what the routers chose.
        cost: of misses, for the penalty; a policy that weighs precision gets its T1.
        progress: called with what is replayed, events done, and all.

    Raises:
        OptionError: the trace is empty, or there is no such policy.
        BudgetError: an arena is below the floor.
    """
    if not trace.events:
        raise OptionError("there is no gate event in the trace")
    names = list(dict.fromkeys(["lru", *policies, "belady"]))
    policy = {name: policy_of(name) for name in names}
    results = []
    runs = [(arena, name) for arena in arenas for name in names]
    for i, (arena, name) in enumerate(runs, 1):
        report = progress and functools.partial(lambda stage, n: progress(stage, n, len(trace.events)), f"{name} ({i} of {len(runs)})")
        options: dict[str, Any] = {"t1": cost.t1} if "t1" in policy[name].defaults else {}
        done = simulate(trace, policy[name].name, arena, seed=seed, tau=0.0 if name == "belady" else tau, cost=cost, progress=report, **options)
        results.append(replace(done, policy=name))  # a strategy's or variant's result is named after it, not after its policy
    return results


def gap_recovered(result: Result, results: list[Result]) -> float | None:
    """Share of the way from LRU's hit rate to Belady's at the same size."""
    rate = {r.policy: r.hit_rate for r in results if r.arena_bytes == result.arena_bytes and r.policy in ("lru", "belady")}
    return (result.hit_rate - rate["lru"]) / (rate["belady"] - rate["lru"]) if rate["belady"] > rate["lru"] else None
