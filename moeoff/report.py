"""`moeoff simulate`: traces replayed through strategies at several buffer sizes, as a table, JSON or a plot."""

from __future__ import annotations

import functools
import json

import numpy as np

from .cache import get_policy
from .console import progress_bar
from .errors import OptionError
from .memory import format_size, parse_size
from .simulate.read_log import DEMAND_LEVEL
from .simulate.simulator import Result, simulate
from .simulate.trace import Trace

SIZES = ("10%", "25%", "50%", "75%", "90%")


def report(*, traces: tuple[str, ...], strategy: tuple[str, ...] = (), memory: tuple[str, ...] = (), plot: str | None = None,
           as_json: bool = False, seed: int = 0) -> list[Result]:  # fmt: skip
    """Replays the traces one after the other as one run, for each strategy and size; see `moeoff simulate --help`.

    LRU and Belady's optimum are always there: the gap between them is what a strategy can win.
    """
    trace = Trace.join([Trace.read(path) for path in traces])
    if not trace.events:
        raise OptionError(f"{traces[0]}: there is no gate event in it")
    # a name may come with a comma, as lru,lfu
    asked = [name for item in strategy for name in item.split(",")]
    names = list(dict.fromkeys(["lru", *asked, "belady"]))
    for name in names:
        get_policy(name)
    arenas = [_arena(size, trace.model.full_bytes) for size in memory or SIZES]
    results = []
    runs = [(arena, name) for arena in arenas for name in names]
    with progress_bar("events") as update:
        for i, (arena, name) in enumerate(runs, 1):
            progress = update and functools.partial(lambda stage, n: update(stage, n, len(trace.events)), f"{name} ({i} of {len(runs)})")
            results.append(simulate(trace, name, arena, seed=seed, progress=progress))
    if plot:
        from .simulate.plots import plot as draw

        draw(plot, trace, results)
    rows = [r.to_dict() | {"strategy": name, "gap_recovered": _gap(r, results)} for r, name in zip(results, names * len(arenas), strict=True)]
    reads = _reads(trace)
    if as_json:
        head = {"model": trace.model.name, "full_bytes": trace.model.full_bytes, "events": len(trace.events), "recorded_reads": reads}
        print(json.dumps(head | {"results": rows}, indent=2))
    else:
        print(_table(rows, trace.model.full_bytes))
        if reads:
            low = f" ({reads['low']:,} of low versions)" if reads["low"] else ""
            print(
                f"\nin the recorded runs: {reads['reads']:,} reads{low}, {100 * reads['late']:.0f} % with compute waiting; medians: "
                f"{reads['median_wait_us'] / 1000:.2f} ms in the queue, {reads['median_read_us'] / 1000:.2f} ms to read"
            )
    return results


def _reads(trace: Trace) -> dict | None:
    """What the trace says of the runs it was recorded in; traces of version 1 say nothing."""
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


def _arena(size: str, full: int) -> int:
    if size.strip().endswith("%"):
        try:
            share = float(size.strip()[:-1]) / 100
        except ValueError:
            share = 0
        if share <= 0:
            raise OptionError(f"{size!r} is no share of the experts")
        return int(full * share)
    return parse_size(size)


def _gap(result: Result, results: list[Result]) -> float | None:
    """Share of the way from LRU's hit rate to Belady's at the same size."""
    rate = {r.policy: r.hit_rate for r in results if r.arena_bytes == result.arena_bytes and r.policy in ("lru", "belady")}
    return (result.hit_rate - rate["lru"]) / (rate["belady"] - rate["lru"]) if rate["belady"] > rate["lru"] else None


def _table(rows: list[dict], full: int) -> str:
    lines = [f"{'buffer':>10} {'':>5} {'strategy':<16} {'hit rate':>8} {'read/token':>11} {'penalty':>8} {'of the gap':>10}"]
    for row in rows:
        gap = "" if row["gap_recovered"] is None else f"{100 * row['gap_recovered']:.0f} %"
        lines.append(
            f"{format_size(row['arena_bytes']):>10} {100 * row['arena_bytes'] / full:4.0f}% {row['strategy']:<16} {100 * row['hit_rate']:7.2f}% "
            f"{format_size(int(row['bytes_per_token'])):>11} {row['miss_penalty_per_token']:8.3f} {gap:>10}"
        )
    return "\n".join(lines)
