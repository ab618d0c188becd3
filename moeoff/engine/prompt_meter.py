"""Rates of prompts, as they run: what a later start chooses its micro-batch by
(`moeoff/budget/micro_batch.py`).
"""

from __future__ import annotations

from ..budget.micro_batch import LEAST, PROMPT, SIZES, PromptRates
from .buffer import ExpertBuffer

_LEAST_TOKENS = 256  # of prompts, before their rate means anything
_LEAST_BYTES = 64 << 20
_PAUSE = 1.5  # seconds that an answer waits at most for a part of another one's prompt


class PromptMeter:
    """Args:
    buffer: started.
    """

    def __init__(self, buffer: ExpertBuffer):
        self._buffer = buffer
        self._tokens = self._ns = self._bytes = self._busy_ns = 0
        self._seen: tuple[int, int, int] | None = None
        self._n_beside = 0

    def begin(self, depth: int) -> None:
        """Before a prompt's batch, behind so many tokens."""
        self._depth, self._seen = depth, self._counters()

    def end(self, n_tokens: int, seconds: float) -> None:
        """After it."""
        if self._seen is None:
            return
        stall, nbytes, busy = (
            now - before for now, before in zip(self._counters(), self._seen, strict=True)
        )
        computing = max(int(seconds * 1e9) - stall, 1)
        if n_tokens >= LEAST:
            self._n_beside = max(int(n_tokens * max(_PAUSE * 1e9, busy) / computing), SIZES[0])
        # attention takes longer than in the prompt that a choice is made for
        if self._depth >= PROMPT:
            return
        self._tokens += n_tokens
        self._ns += computing
        self._bytes += nbytes
        self._busy_ns += busy

    def n_beside(self) -> int:
        """Return how many tokens of a prompt are computed while an answer may wait.

        Where the disk needs longer for a layer's experts, as many as are computed
        meanwhile: fewer would not take less time.
        """
        return self._n_beside or SIZES[-1]

    def _counters(self) -> tuple[int, int, int]:
        stats = self._buffer.stats()
        return stats.stall_ns, stats.bytes_read, stats.disk_busy_ns

    @property
    def rates(self) -> PromptRates | None:
        """None: too little was computed or read."""
        if (
            self._tokens < _LEAST_TOKENS
            or self._bytes < _LEAST_BYTES
            or not self._busy_ns
            or self._ns <= 0
        ):
            return None
        return PromptRates(self._ns / 1e9 / self._tokens, self._bytes / self._busy_ns * 1e9)
