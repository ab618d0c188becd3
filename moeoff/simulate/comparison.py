"""Policies compared on one trace: each at each arena size, with LRU and Belady's optimum between which a policy can win."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..cache import get_policy
from ..cache.importance import PAPERS_COST, MissCost
from ..errors import OptionError
from .bandwidths import Bandwidths
from .read_log import DEMAND_LEVEL
from .rerouting import Rerouting
from .simulator import Result, simulate
from .tiered import replay
from .trace import Trace

__all__ = ["compare", "compare_tiers", "gap_recovered", "recorded_reads"]


def compare(trace: Trace, policies: Sequence[str], arenas: Sequence[int], *, seed: int = 0, rerouting: Rerouting | None = None,
            cost: MissCost = PAPERS_COST, progress: Callable[[str, int, int], None] | None = None) -> list[Result]:  # fmt: skip
    """Replays a trace through each policy at each size; LRU comes first and Belady's optimum last at every size.

    Args:
        policies: names; those of LRU and Belady need not be given.
        arenas: bytes of the experts' arena.
        rerouting: of all but Belady's optimum, which knows what the routers chose.
        cost: of misses, for the penalty; a policy that weighs precision gets its T1.
        progress: called with what is replayed, events done, and all.

    Raises:
        OptionError: the trace is empty, or there is no such policy.
        BudgetError: an arena is below the floor.
    """
    if not trace.events:
        raise OptionError("there is no gate event in the trace")
    names = list(dict.fromkeys(["lru", *policies, "belady"]))
    for name in names:
        get_policy(name)
    results = []
    runs = [(arena, name) for arena in arenas for name in names]
    for i, (arena, name) in enumerate(runs, 1):
        report = progress and functools.partial(lambda stage, n: progress(stage, n, len(trace.events)), f"{name} ({i} of {len(runs)})")
        # a variant's result is named after the variant, not after its policy
        results.append(
            replace(
                simulate(trace, name, arena, seed=seed, rerouting=None if name == "belady" else rerouting, cost=cost, progress=report, **_options(name, cost)),
                policy=name,
            )
        )
    return results


def compare_tiers(trace: Trace, policies: Sequence[str], vrams: Sequence[int], arenas: Sequence[int], modes: Sequence[str], speeds: Bandwidths, *,
                  seed: int = 0, progress: Callable[[str, int, int], None] | None = None) -> list[dict[str, Any]]:  # fmt: skip
    """Replays a trace with a device beside host memory and disk, on a clock.

    Args:
        vrams, arenas: bytes for experts on the device and in host memory.
        modes: of `tiered.MODES`; for each arena the CPU alone comes first.

    Returns:
        A row each: sizes, mode, strategy, what `TieredResult.to_dict` has, and "gain": decode speed over the CPU alone, minus 1.

    Raises:
        OptionError: the trace is empty, or there is no such policy or mode.
        BudgetError: a memory has no room for what one gate selects.
    """
    if not trace.events:
        raise OptionError("there is no gate event in the trace")
    runs = [
        (arena, name, vram, mode) for arena in arenas for name in policies for vram, mode in [(0, "cpu"), *((v, m) for v in vrams for m in modes if m != "cpu")]
    ]
    rows, alone = [], 0.0
    for i, (arena, name, vram, mode) in enumerate(runs, 1):
        report = progress and functools.partial(lambda stage, n: progress(stage, n, len(trace.events)), f"{name}, {mode} ({i} of {len(runs)})")
        result = replay(trace, name, speeds, vram, arena, mode, seed=seed, progress=report)
        alone = result.decode_tps if mode == "cpu" else alone
        rows.append(
            {
                "vram_bytes": vram,
                "arena_bytes": arena,
                "mode": mode,
                "strategy": name,
                **result.to_dict(),
                "gain": result.decode_tps / alone - 1 if alone else None,
            }
        )
    return rows


def _options(name: str, cost: MissCost) -> dict[str, Any]:
    """Of the policy, that follow from what misses cost."""
    return {"t1": cost.t1} if "t1" in get_policy(name).defaults else {}


def recorded_reads(trace: Trace) -> dict[str, float] | None:
    """Numbers of reads in the runs that the trace was recorded in; None for traces of version 1."""
    done = trace.reads[trace.reads["result"] == 0]
    if not len(done):
        return None
    return {
        "reads": len(done),
        "low": int(np.count_nonzero(done["version"])),
        "lost": trace.reads_lost,
        "late": float(np.mean(done["level"] == DEMAND_LEVEL)),
        "median_wait_us": float(np.median(done["wait_us"])),
        "median_read_us": float(np.median(done["read_us"])),
    }


def gap_recovered(result: Result, results: list[Result]) -> float | None:
    """Share of the way from LRU's hit rate to Belady's at the same size."""
    rate = {r.policy: r.hit_rate for r in results if r.arena_bytes == result.arena_bytes and r.policy in ("lru", "belady")}
    return (result.hit_rate - rate["lru"]) / (rate["belady"] - rate["lru"]) if rate["belady"] > rate["lru"] else None
