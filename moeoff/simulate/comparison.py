"""Policies compared on one trace: each at each arena size, with LRU and Belady's optimum between which a policy can win. And pictures of that."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import OptionError
from ..policies import get_policy
from ..policies.hobbit import PAPERS_COST, MissCost
from ..trace import DEMAND_LEVEL, Trace
from .rerouting import Rerouting
from .simulator import Result, simulate

__all__ = ["compare", "gap_recovered", "left_out", "recorded_reads"]


def left_out(trace: Trace, policies: Sequence[str]) -> dict[str, str]:
    """Those of the policies that cannot be replayed as they would run live, by name, and why.

    Raises:
        OptionError: there is no such policy.
    """
    if any(event.probs is not None for event in trace.events):
        return {}
    why = "it reads the routers' probabilities of all experts, and the trace has none"
    return {name: why for name in policies if get_policy(name).wants_probs}


def compare(trace: Trace, policies: Sequence[str], arenas: Sequence[int], *, seed: int = 0, rerouting: Rerouting | None = None, tau: float = 0.0,
            cost: MissCost = PAPERS_COST, progress: Callable[[str, int, int], None] | None = None) -> list[Result]:  # fmt: skip
    """Replays a trace through each policy at each size; LRU comes first and Belady's optimum last at every size.

    Args:
        policies: names; those of LRU and Belady need not be given.
        arenas: bytes of the experts' arena.
        rerouting, tau: of all but Belady's optimum, which knows what the routers chose.
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
        options: dict[str, Any] = {"t1": cost.t1} if "t1" in get_policy(name).defaults else {}
        lossy: dict[str, Any] = {} if name == "belady" else {"rerouting": rerouting, "tau": tau}
        done = simulate(trace, name, arena, seed=seed, cost=cost, progress=report, **lossy, **options)
        results.append(replace(done, policy=name))  # a variant's result is named after the variant, not after its policy
    return results


def recorded_reads(trace: Trace) -> dict[str, float] | None:
    """Numbers of reads in the runs that the trace was recorded in; None for traces without reads."""
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


def plot(path: str | os.PathLike[str], trace: Trace, results: list[Result]) -> None:
    """Writes three panels, as PNG or in the format of the name's ending.

    Raises:
        OptionError: matplotlib is not installed, or cannot write such a file.
    """
    figure = new_figure(16)
    sizes, layers, heat = figure.subplots(1, 3)
    full = trace.model.full_bytes
    strategies = list(dict.fromkeys(r.policy for r in results))
    middle = sorted({r.arena_bytes for r in results})[len({r.arena_bytes for r in results}) // 2]
    for name in strategies:
        mine = sorted((r for r in results if r.policy == name), key=lambda r: r.arena_bytes)
        style = {"label": name, "marker": "o", "markersize": 3} | ({"color": "black", "linestyle": "--"} if name == "belady" else {})
        sizes.plot([100 * r.arena_bytes / full for r in mine], [100 * r.hit_rate for r in mine], **style)
        at = next((r for r in mine if r.arena_bytes == middle), None)
        if at is not None:
            layers.plot(100 * at.gate_hits / np.maximum(at.gate_hits + at.gate_misses, 1), **style)
    sizes.set(xlabel="buffer, % of all experts", ylabel="hit rate, %", title="Hit rate by buffer size")
    layers.set(xlabel="layer", ylabel="hit rate, %", title=f"Hit rate by layer, buffer {100 * middle / full:.0f} %")
    sizes.legend(fontsize=8)
    counts = trace.counts()
    image = heat.imshow(counts / max(trace.n_tokens, 1), aspect="auto", cmap="viridis", interpolation="nearest")
    heat.set(xlabel="expert", ylabel="layer", title=f"Share of {trace.n_tokens:,} tokens that used an expert")
    figure.colorbar(image, ax=heat)
    save(figure, path)


def plot_scores(path: str | os.PathLike[str], scores: np.ndarray, t1: float, t2: float) -> None:
    """Writes the cumulative distribution of unimportance scores [n] (HOBBIT figure 5b), with two thresholds.

    Raises:
        OptionError: as `plot`.
    """
    figure = new_figure(7)
    axes = figure.subplots()
    ordered = np.sort(scores)
    axes.step(ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), where="post")
    for name, t in (("T1", t1), ("T2", t2)):
        axes.axvline(t, linestyle="--", color="gray")
        axes.annotate(f"{name} {t:.2f}", (t, 3), rotation=90, ha="right")
    axes.set(xlabel="unimportance of a selected expert", ylabel="experts up to it, %", xlim=(-0.02, 1.02), ylim=(0, 102))
    save(figure, path)


def new_figure(width: float, height: float = 4.6) -> Any:
    """A figure of matplotlib, inches. Raises `OptionError` if that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plots need matplotlib: pip install 'moeoff[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def require_drawable(path: str | os.PathLike[str] | None, what: str) -> None:
    """Before any work: raises `OptionError` if such a figure cannot be written.

    Args:
        path: None: none will be.
        what: the option that gives it.
    """
    if path is None:
        return
    kinds = new_figure(1).canvas.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in kinds:
        raise OptionError(f"{what} {os.fspath(path)}: no such picture can be drawn; end the name in .svg, .png or .pdf")


def save(figure: Any, path: str | os.PathLike[str], dpi: int | str = 110) -> None:
    """In the format of the name's ending. Raises `OptionError` if there is no such format."""
    try:
        figure.savefig(path, dpi=dpi)
    except ValueError as error:
        raise OptionError(f"{os.fspath(path)}: {error}") from None
