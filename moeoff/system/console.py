"""Notes and progress lines on standard error, tables on standard output.

rich is imported for tables: a command that prints none does not pay for it.
"""

from __future__ import annotations

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

LINE_DELAY = 1.0  # before a line appears on a terminal
LINE_INTERVAL = 0.1  # before it is rewritten
LINE_MINUTE = 60.0  # between lines elsewhere

COLUMNS = 80
_LEAST_COLUMNS = 60  # of tables: a narrower terminal breaks their lines better than their cells can be folded


def table_console() -> Console:
    """A console of standard output for tables, as wide as the terminal is."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_COLUMNS)
    return console


def table(*columns: str, title: str | None = None) -> Table:
    """A table of numbers, whose first column has their names; columns without names have no header."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", overflow="fold")
    return made


def wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 80 columns; words are never cut.

    Args:
        indent: of the second line and all after it.
    """
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def note(text: str) -> None:
    """A line on standard error; on a terminal dimmed, and broken between words where that is too narrow."""
    print(f"\x1b[2m{_broken(text)}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line on standard output, broken between words where that is a terminal and too narrow."""
    print(_broken(text) if sys.stdout.isatty() else text, flush=True)


def _broken(text: str) -> str:
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n"))


class ProgressLine:
    """How far a job is, on one line of standard error: rewritten on a terminal, else a new one each minute. A job that ends soon shows nothing.

    Args:
        unit: "bytes" for sizes, else a word such as "tokens" behind the count.
        delay: seconds before the line appears on a terminal; None: one.
        slows: each unit takes longer than the one before it, as a prompt's tokens do, whose attention grows: the time that is left counts with that.
    """

    def __init__(self, unit: str = "tokens", delay: float | None = None, slows: bool = False):
        self._unit, self._terminal, self._shown, self._done = unit, sys.stderr.isatty(), False, 0
        self._stage, self._started = "", time.monotonic()
        self._slows, self._points = slows, list[tuple[int, float]]()  # units and seconds so far, of each update
        self._next = self._started + (LINE_MINUTE if not self._terminal else LINE_DELAY if delay is None else delay)

    def update(self, stage: str, n: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._done, self._points = stage, now, n, []
        if self._slows and n > self._done:
            self._points.append((n - self._done, now - self._started))
        if now < self._next:
            return
        self._next = now + (LINE_INTERVAL if self._terminal else LINE_MINUTE)
        rate = (n - self._done) / max(now - self._started, 1e-9)
        if self._unit == "bytes":
            text, speed = f"{stage}: {format_size(n)} of {format_size(total)}", f"{rate / 1e6:.0f} MB/s"
        else:
            text, speed = f"{stage}: {n} of {total} {self._unit}".rstrip() if total else stage, f"{rate:.3g} {'tok/s' if self._unit == 'tokens' else '/s'}"
        text += f", {speed}, {_clock(self._left(total - n, rate))} left" if rate and total else ""
        self._shown = self._terminal
        if self._terminal:
            text = f"\r\x1b[2K\x1b[2m{text[: shutil.get_terminal_size().columns - 1]}\x1b[0m"
        print(text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def _left(self, n: int, rate: float) -> float:
        """Seconds for n more units. Where they slow down, all of them have taken a n + b n^2: a and b from now, and from when half as many were done."""
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
    return f"{hours}:{minutes:02}:{int(seconds) % 60:02}" if hours else f"{minutes}:{int(seconds) % 60:02}"


@contextmanager
def progress_bar(unit: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Yields `update(stage, done, total)` of a `ProgressLine`, which goes when the block ends."""
    line = ProgressLine(unit, delay=0.0)
    try:
        yield line.update
    finally:
        line.clear()
