"""Progress bars and notes on standard error. No bar is drawn where that is no terminal.

rich is imported when a bar appears: a command that shows none does not pay for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LOADING_DELAY = 0.3  # seconds; a model that loads faster shows no bar
LOADING_INTERVAL = 0.1
LINE_DELAY = 1.0  # before a line appears on a terminal
LINE_MINUTE = 60.0  # between lines elsewhere


COLUMNS = 80
_LEAST_COLUMNS = 60  # of tables: a narrower terminal breaks their lines better than their cells can be folded


def table_console() -> Console:
    """Of standard output, for tables: as wide as the terminal is."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_COLUMNS)
    return console


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
    """How far a job is, on one line of standard error: rewritten on a terminal, else a new one each minute. A job that ends soon shows nothing."""

    def __init__(self, unit: str = "tokens"):
        self._unit, self._terminal, self._shown, self._done = unit, sys.stderr.isatty(), False, 0
        self._stage, self._started = "", time.monotonic()
        self._next = self._started + (LINE_DELAY if self._terminal else LINE_MINUTE)

    def update(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._done = stage, now, done
        if now < self._next:
            return
        self._next = now + (LOADING_INTERVAL if self._terminal else LINE_MINUTE)
        rate = (done - self._done) / max(now - self._started, 1e-9)
        each = "tok/s" if self._unit == "tokens" else "/s"
        left = f", {rate:.3g} {each}, {_clock((total - done) / rate)} left" if rate and total else ""
        text = f"{stage}: {done} of {total} {self._unit}".rstrip() + left
        self._shown = self._terminal
        print(f"\r\x1b[2K\x1b[2m{text}\x1b[0m" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._shown = False


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}" if seconds >= 3600 else f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@contextmanager
def progress_bar(unit: str = "") -> Iterator[Callable[[str, int, int], None] | None]:
    """Yields `update(stage, done, total)`: a bar, or where standard error is no terminal a line each minute. One at a time: a new stage replaces the last.

    Args:
        unit: "bytes" for sizes with their rate, else a word such as "tokens" behind the count.
    """
    if not sys.stderr.isatty():
        yield ProgressLine(unit).update
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amount = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    with Progress(TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None, visible=False)
        current = ""

        def update(stage: str, done: int, total: int) -> None:
            nonlocal current
            if stage != current:
                shown.reset(task, description=stage, visible=True)
                current = stage
            shown.update(task, completed=done, total=total)

        yield update


@contextmanager
def loading_bar(name: str, nbytes: int) -> Iterator[Callable[[float], None] | None]:
    """Yields a function that takes the loaded fraction, or None where standard error is no terminal.

    Apart from `progress_bar`, because llama_cpp redirects both descriptors while it loads: this bar writes to a copy of its own.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace") as terminal:
        bar = _LoadingBar(name, nbytes, terminal)
        try:
            yield bar.update
        finally:
            bar.stop()


class _LoadingBar:
    def __init__(self, name: str, nbytes: int, terminal: TextIO):
        self._name, self._nbytes, self._terminal = name, nbytes, terminal
        self._progress: Progress | None = None
        self._next = time.monotonic() + LOADING_DELAY

    def update(self, fraction: float) -> None:
        now = time.monotonic()
        if now < self._next or (self._progress is None and fraction >= 1):
            return
        self._next = now + LOADING_INTERVAL
        if self._progress is None:
            self._progress = self._start()
        self._progress.update(self._task, completed=int(fraction * self._nbytes), refresh=True)

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        progress = Progress(
            *columns,
            console=Console(file=self._terminal, force_terminal=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # both are llama_cpp's while it loads
            redirect_stderr=False,
        )
        self._task = progress.add_task(self._name, total=self._nbytes)
        progress.start()
        return progress

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
