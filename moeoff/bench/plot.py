"""A picture of benchmark rows: tokens per second over memory, a line for each strategy and test; bars where there is one memory only."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import OptionError
from ..memory import format_size
from .row import STOCK_NAME, Row

_GIB = 1 << 30


def plot(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Writes it as SVG, or in the format of the name's ending.

    Raises:
        OptionError: matplotlib is not installed, or cannot write such a file, or nothing was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plots need matplotlib: pip install 'moeoff[plot]'") from None
    measured = [row for row in rows if row.avg_ts is not None]
    if not measured:
        raise OptionError(f"{os.fspath(path)}: there is nothing to draw: no test has ended")
    tests = list(dict.fromkeys(row.test for row in measured))
    figure = Figure(figsize=(6.4 * len(tests), 4.2), layout="constrained")
    panels = figure.subplots(1, len(tests), squeeze=False)[0]
    for panel, test in zip(panels, tests, strict=True):
        mine = [row for row in measured if row.test == test]
        names = list(dict.fromkeys(row.strategy for row in mine))
        if len({row.memory for row in mine}) > 1:
            for name in names:
                line = sorted((row for row in mine if row.strategy == name), key=lambda row: row.memory)
                style = {"color": "black", "linestyle": "--"} if name == STOCK_NAME else {}
                panel.errorbar([row.memory / _GIB for row in line], [row.avg_ts for row in line], yerr=[row.stddev_ts for row in line],
                               marker="o", markersize=4, capsize=3, label=name, **style)  # fmt: skip
            panel.set(xlabel="memory, GiB")
            panel.set_ylim(bottom=0)
            panel.legend()
        else:
            panel.barh(names, [next(row.avg_ts for row in mine if row.strategy == name) or 0.0 for name in names],
                       xerr=[next(row.stddev_ts for row in mine if row.strategy == name) or 0.0 for name in names])  # fmt: skip
            panel.invert_yaxis()
            panel.set(xlabel="tokens per second")
        panel.set(title=f"{test}, {mine[0].model_type}, {format_size(mine[0].model_size)}")
        if len({row.memory for row in mine}) > 1:
            panel.set(ylabel="tokens per second")
    figure.suptitle(f"{measured[0].cpu_info}, {measured[0].n_threads} threads", fontsize=9)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise OptionError(f"{os.fspath(path)}: {error}") from None
