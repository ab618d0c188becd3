"""The bar that shows how far loading is, on a terminal's standard error and only if it takes long enough to wonder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 0.3  # seconds; what is faster shows nothing
INTERVAL = 0.1


@contextmanager
def loading_bar(name: str, nbytes: int) -> Iterator[Callable[[float], None] | None]:
    """Yields a function that is told the fraction done, or None if nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    # llama_cpp points descriptor 2 elsewhere while it loads: the bar gets one of its own
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace") as terminal:
        bar = _Bar(name, nbytes, terminal)
        try:
            yield bar.update
        finally:
            bar.stop()


class _Bar:
    def __init__(self, name: str, nbytes: int, terminal):
        self._name, self._nbytes, self._terminal = name, nbytes, terminal
        self._progress = None
        self._next = time.monotonic() + DELAY

    def update(self, fraction: float) -> None:
        now = time.monotonic()
        if now < self._next or (self._progress is None and fraction >= 1):
            return
        self._next = now + INTERVAL
        if self._progress is None:
            self._start()
        self._progress.update(self._task, completed=int(fraction * self._nbytes), refresh=True)

    def _start(self) -> None:
        # imported only now: a model that loads at once does not pay for it
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
        self._progress = Progress(
            *columns,
            console=Console(file=self._terminal, force_terminal=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # both are llama_cpp's while it loads
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(self._name, total=self._nbytes)
        self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def stages_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yields a function that is told a stage's name, what is done of it and all of it; None if nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, int] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    shown.update(task, visible=False)
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield update
