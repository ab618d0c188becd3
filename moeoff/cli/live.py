"""The picture that `moeoff run --live` draws under an answer while it is computed: hits by layer, reads in flight, tokens per second, memory."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..memory import format_size, rss

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from ..engine.llama import Llama
    from ..engine.stats import Stats

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_INTERVAL = 0.25  # seconds between samples
_WINDOW = 8  # samples that "now" is the mean of
_ROWS, _COLUMNS = 3, 64  # of the layers' bars
_HISTORY = 24  # samples drawn
_BAR = 24  # columns of memory


class _Sample(NamedTuple):
    time: float
    stats: Stats
    layers: np.ndarray  # [n_gates, 2] slices found in memory, and not


class Live:
    """Draws in the terminal of standard output.

    Args:
        llm: computes the answers.
    """

    def __init__(self, llm: Llama):
        self._engine = llm.engine
        self._layers = llm.engine.count_layers()
        self._samples: deque[_Sample] = deque(maxlen=_WINDOW)
        self._reads: deque[float] = deque(maxlen=_HISTORY)
        self._speeds: deque[float] = deque(maxlen=_HISTORY)

    @contextlib.contextmanager
    def under(self, n_prompt: int) -> Iterator[None]:
        """While open, what is printed stands above the picture.

        Args:
            n_prompt: tokens of the prompt that will be computed.
        """
        from rich.console import Console
        from rich.live import Live as Display

        console = Console(file=sys.stdout, highlight=False)
        self._samples.clear()
        self._n_prompt, self._begin = n_prompt, self._sample()
        above = _Above(console)
        with Display(console=console, get_renderable=lambda: self._draw(above.open), refresh_per_second=1 / _INTERVAL, transient=True,
                     redirect_stdout=False, redirect_stderr=False), contextlib.redirect_stdout(above):  # fmt: skip
            yield
        sys.stdout.write(above.open)

    def _sample(self) -> _Sample:
        sample = _Sample(time.monotonic(), self._engine.stats(), self._layers.counts.copy())
        self._samples.append(sample)
        return sample

    def _draw(self, text: str) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        last = self._samples[-1]
        if time.monotonic() - last.time >= _INTERVAL:
            before, last = last, self._sample()
            seconds = last.time - before.time
            self._reads.append((last.stats.lane_busy_seconds - before.stats.lane_busy_seconds) / seconds)  # a mean, by Little's law
            self._speeds.append((_tokens(last) - _tokens(before)) / seconds)
        first, now = self._samples[0], last.stats
        seconds = max(last.time - first.time, 1e-9)
        answer, recent = now.since(self._begin.stats), now.since(first.stats)
        budget = now.budget_bytes or now.arena_bytes
        held = rss() if now.budget_bytes else now.arena_bytes
        rate = f"{(_tokens(last) - _tokens(first)) / seconds:.1f} tok/s"
        done = f"prompt {min(answer.prompt_tokens, self._n_prompt)} of {self._n_prompt}" if not answer.gen_tokens else f"{answer.gen_tokens} written"
        rows = Table.grid(padding=(0, 1))
        rows.add_row("layers", _bars(last.layers - first.layers))
        rows.add_row("hits", f"{recent.hit_rate:.0%} now, {answer.hit_rate:.0%} in this answer")
        rows.add_row("reads", Text.assemble((_spark(self._reads, now.io_threads), "cyan"), f" {self._reads[-1] if self._reads else 0:.1f} in flight, "
                                            f"{recent.bytes_read / seconds / 1e6:.0f} MB/s"))  # fmt: skip
        rows.add_row("tokens", Text.assemble((_spark(self._speeds, max(self._speeds, default=0)), "cyan"), f" {rate}, {done}"))
        full = round(_BAR * min(held / max(budget, 1), 1))
        rows.add_row("memory", Text.assemble(("█" * full, "cyan"), ("░" * (_BAR - full), "dim"),
                                             f" {format_size(held)} of {format_size(budget)}, experts {format_size(now.arena_bytes)}"))  # fmt: skip
        return Group(Text(text), Text(""), rows)


def _tokens(sample: _Sample) -> int:
    return sample.stats.prompt_tokens + sample.stats.gen_tokens


def _bars(counts: np.ndarray) -> Text:
    """A column for each layer, or for as many as share one: how many of its slices were in memory.

    Args:
        counts: [n, 2] slices found in memory, and not.
    """
    from rich.text import Text

    each, width = -(-len(counts) // _COLUMNS), max(min(_COLUMNS // len(counts), 4), 1)
    groups = [counts[i : i + each].sum(axis=0) for i in range(0, len(counts), each)]
    shares = [hits / (hits + misses) if hits + misses else 0.0 for hits, misses in groups]
    rows = []
    for row in reversed(range(_ROWS)):
        cells = [
            (
                (_EIGHTHS[round(min(max(share * _ROWS - row, 0), 1) * 8)] * max(width - 1, 1)).ljust(width),
                "green" if share >= 0.8 else "yellow" if share >= 0.5 else "red",
            )
            for share in shares
        ]
        rows.append(Text.assemble(*cells))
    return Text("\n").join(rows)


def _spark(values: Sequence[float], most: float) -> str:
    return "".join(_EIGHTHS[round(min(value / most, 1) * 8)] if most else " " for value in values).rjust(_HISTORY)


class _Above(io.TextIOBase):
    """Standard output above the picture, in whole rows; what is not one yet is drawn with the picture.

    Attributes:
        open: the row that is being written.
    """

    def __init__(self, console: Console):
        self._console, self.open = console, ""

    def write(self, text: str) -> int:
        from rich.text import Text

        *rows, self.open = (self.open + text).split("\n")
        if Text(self.open).cell_len > self._console.width:
            *wrapped, last = Text(self.open).wrap(self._console, self._console.width)
            rows, self.open = rows + [row.plain for row in wrapped], last.plain
        for row in rows:
            self._console.print(Text(row))
        return len(text)

    def isatty(self) -> bool:
        return True
