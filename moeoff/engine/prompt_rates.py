"""What prompts of a model take on this machine: measured while they run, kept for the next time that the model is opened.

One small file for each model and number of threads in the user's cache folder. `moeoff.budget.micro_batch` chooses by it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from ..atomic_file import atomic_file
from ..budget.micro_batch import PromptRates
from ..gguf.layout import Layout
from ..paths import cache_folder
from .expert_buffer import ExpertBuffer

_LEAST_TOKENS = 256  # of prompts, before their rate means anything
_LEAST_BYTES = 64 << 20
_CHANGED = 1.5  # times what was kept; nearer to it the old one stays, so that the choice does too


class PromptMeter:
    """Args:
    buffer: started.
    n_lanes: its I/O workers.
    """

    def __init__(self, buffer: ExpertBuffer, n_lanes: int):
        self._buffer, self._n_lanes = buffer, n_lanes
        self._tokens = self._ns = self._bytes = self._busy_ns = 0
        self._seen = (0, 0, 0)

    def begin(self) -> None:
        """Before a prompt's batch."""
        self._seen = self._counters()

    def end(self, n_tokens: int, seconds: float) -> None:
        """After it."""
        stall, nbytes, busy = (now - before for now, before in zip(self._counters(), self._seen, strict=True))
        self._tokens += n_tokens
        self._ns += int(seconds * 1e9) - stall
        self._bytes += nbytes
        self._busy_ns += busy

    def _counters(self) -> tuple[int, int, int]:
        stats = self._buffer.stats()
        return stats.stall_ns, stats.bytes_read, stats.io_worker_busy_ns

    @property
    def rates(self) -> PromptRates | None:
        """None: too little was computed or read."""
        if self._tokens < _LEAST_TOKENS or self._bytes < _LEAST_BYTES or not self._busy_ns or self._ns <= 0:
            return None
        return PromptRates(self._ns / 1e9 / self._tokens, self._bytes / (self._busy_ns / self._n_lanes) * 1e9)


def recall_rates(layout: Layout, n_threads: int) -> PromptRates | None:
    """What was kept of this model; None if nothing was, or nothing that can be read."""
    try:
        return PromptRates(**json.loads(_file(layout, n_threads).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def keep_rates(layout: Layout, n_threads: int, rates: PromptRates) -> None:
    """Keeps them, unless they are much as before. A cache folder that cannot be written is no error."""
    kept = recall_rates(layout, n_threads)
    if kept is not None and all(1 / _CHANGED < new / old < _CHANGED for new, old in zip(asdict(rates).values(), asdict(kept).values(), strict=True)):
        return
    with contextlib.suppress(OSError):
        path = _file(layout, n_threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(json.dumps(asdict(rates)).encode())


def _file(layout: Layout, n_threads: int) -> Path:
    return cache_folder() / "rates" / f"{layout.identity}-{n_threads}.json"
