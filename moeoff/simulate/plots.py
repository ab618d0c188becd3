"""Pictures of a simulation: hit rate against buffer size, hit rate by layer, how often each expert is used; and how unimportant experts are."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..errors import OptionError
from .simulator import Result
from .trace import Trace


def plot(path: str | os.PathLike[str], trace: Trace, results: list[Result]) -> None:
    """Writes three panels, as PNG or in the format of the name's ending.

    Raises:
        OptionError: matplotlib is not installed, or cannot write such a file.
    """
    figure = _figure(16)
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
    _save(figure, path)


def plot_scores(path: str | os.PathLike[str], scores: np.ndarray, t1: float, t2: float) -> None:
    """Writes the cumulative distribution of unimportance scores [n] (HOBBIT figure 5b), with two thresholds.

    Raises:
        OptionError: as `plot`.
    """
    figure = _figure(7)
    axes = figure.subplots()
    ordered = np.sort(scores)
    axes.step(ordered, 100 * np.arange(1, len(ordered) + 1) / len(ordered), where="post")
    for name, t in (("T1", t1), ("T2", t2)):
        axes.axvline(t, linestyle="--", color="gray")
        axes.annotate(f"{name} {t:.2f}", (t, 3), rotation=90, ha="right")
    axes.set(xlabel="unimportance of a selected expert", ylabel="experts up to it, %", xlim=(-0.02, 1.02), ylim=(0, 102))
    _save(figure, path)


def _figure(width: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plots need matplotlib: pip install 'moeoff[plot]'") from None
    return Figure(figsize=(width, 4.6), layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise OptionError(f"{path}: {error}") from None
