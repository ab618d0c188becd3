"""Notes and progress lines on standard error, tables on standard output.

rich is imported by tables only, to keep other commands fast.
"""

from __future__ import annotations

import functools
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .memory import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LINE_DELAY = 1.0  # seconds until a line appears on a terminal
LINE_INTERVAL = 0.1  # seconds until it is rewritten
LINE_MINUTE = 60.0  # seconds between lines elsewhere

COLUMNS = 80
_LEAST_COLUMNS = 60  # of tables; narrower terminals wrap lines better than cells fold

_fill = functools.partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)


def table_console() -> Console:
    """Return a console on standard output for tables, as wide as the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_COLUMNS)
    return console


def table(*columns: str, title: str | None = None) -> Table:
    """Return a table with a first column of names; without column names, no header."""
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=any(columns),
    )
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", overflow="fold")
    return made


def wrapped(text: str, indent: str = "") -> str:
    """Wrap text at 80 columns between words, with an indent from the second line."""
    return _fill(text, COLUMNS, subsequent_indent=indent)


def note(text: str) -> None:
    """Print a line on standard error, dimmed and wrapped on a terminal."""
    text = f"\x1b[2m{_wrap_to_terminal(text)}\x1b[0m" if sys.stderr.isatty() else text
    print(text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line on standard output, wrapped on a terminal."""
    print(_wrap_to_terminal(text) if sys.stdout.isatty() else text, flush=True)


def _wrap_to_terminal(text: str) -> str:
    width = shutil.get_terminal_size().columns
    return "\n".join(_fill(line, width) for line in text.split("\n"))


class ProgressLine:
    """A job's progress on standard error: one line on a terminal, else one a minute.

    Args:
        unit: "bytes" for sizes, or a word after the count such as "tokens".
        delay: Seconds until the line appears on a terminal. Default: 1.
        slows: True if each unit takes longer than the last, as tokens of a prompt do;
            the remaining time is extrapolated accordingly.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        unit: str = "tokens",
        delay: float | None = None,
        slows: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._unit, self._terminal, self._shown, self._done = unit, sys.stderr.isatty(), False, 0
        self._stage, self._started, self._now = "", clock(), clock
        self._slows, self._points = slows, list[tuple[int, float]]()  # units, seconds of updates
        self._next = self._started + (
            LINE_MINUTE if not self._terminal else LINE_DELAY if delay is None else delay
        )

    def update(self, stage: str, n: int, total: int) -> None:
        now = self._now()
        if stage != self._stage:
            self._stage, self._started, self._done, self._points = stage, now, n, []
        if self._slows and n > self._done:
            self._points.append((n - self._done, now - self._started))
        if now < self._next:
            return
        self._next = now + (LINE_INTERVAL if self._terminal else LINE_MINUTE)
        rate = (n - self._done) / max(now - self._started, 1e-9)
        if self._unit == "bytes":
            text, speed = (
                f"{stage}: {format_size(n)} of {format_size(total)}",
                f"{rate / 1e6:.0f} MB/s",
            )
        else:
            text, speed = (
                f"{stage}: {n} of {total} {self._unit}".rstrip() if total else stage,
                f"{rate:.3g} {'tok/s' if self._unit == 'tokens' else '/s'}",
            )
        text += f", {speed}, {_clock(self._left(total - n, rate))} left" if rate and total else ""
        self._shown = self._terminal
        if self._terminal:
            text = f"\r\x1b[2K\x1b[2m{text[: shutil.get_terminal_size().columns - 1]}\x1b[0m"
        print(text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def _left(self, n: int, rate: float) -> float:
        """Return the seconds for n more units.

        If units slow down, the time of n units is a n + b n^2, fitted to the time now
        and at half of the units.
        """
        if not self._points:
            return n / rate
        at, seconds = self._points[-1]
        half, at_half = min(self._points, key=lambda point: abs(2 * point[0] - at))
        b = (seconds / at - at_half / half) / (at - half) if half < at else 0.0
        b = min(max(b, 0.0), seconds / at**2)
        return (seconds / at + b * n) * (at + n) - seconds

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._shown = False


def _clock(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return (
        f"{hours}:{minutes:02}:{int(seconds) % 60:02}"
        if hours
        else f"{minutes}:{int(seconds) % 60:02}"
    )


@contextmanager
def progress_bar(unit: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Yield `update(stage, done, total)` of a `ProgressLine` that the block shows."""
    line = ProgressLine(unit, delay=0.0)
    try:
        yield line.update
    finally:
        line.clear()
