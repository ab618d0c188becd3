"""Rates of prompts, as they run: what a later start chooses its micro-batch by (`moeoff/budget/micro_batch.py`)."""

from __future__ import annotations

from ..budget.micro_batch import PROMPT, PromptRates
from .buffer import ExpertBuffer

_LEAST_TOKENS = 256  # of prompts, before their rate means anything
_LEAST_BYTES = 64 << 20


class PromptMeter:
    """Args:
    buffer: started.
    """

    def __init__(self, buffer: ExpertBuffer):
        self._buffer = buffer
        self._tokens = self._ns = self._bytes = self._busy_ns = 0
        self._seen: tuple[int, int, int] | None = None

    def begin(self, depth: int) -> None:
        """Before a prompt's batch, behind so many tokens: where attention takes longer than in the prompt that a choice is made for, it does not count."""
        self._seen = self._counters() if depth < PROMPT else None

    def end(self, n_tokens: int, seconds: float) -> None:
        """After it."""
        if self._seen is None:
            return
        stall, nbytes, busy = (now - before for now, before in zip(self._counters(), self._seen, strict=True))
        self._tokens += n_tokens
        self._ns += int(seconds * 1e9) - stall
        self._bytes += nbytes
        self._busy_ns += busy

    def _counters(self) -> tuple[int, int, int]:
        stats = self._buffer.stats()
        return stats.stall_ns, stats.bytes_read, stats.disk_busy_ns

    @property
    def rates(self) -> PromptRates | None:
        """None: too little was computed or read."""
        if self._tokens < _LEAST_TOKENS or self._bytes < _LEAST_BYTES or not self._busy_ns or self._ns <= 0:
            return None
        return PromptRates(self._ns / 1e9 / self._tokens, self._bytes / self._busy_ns * 1e9)
