"""Measured rates of prompt processing, by which later starts choose the micro-batch
(`moeoff/budget/micro_batch.py`).
"""

from __future__ import annotations

from ..budget.micro_batch import LEAST, PROMPT, SIZES, PromptRates
from .buffer import ExpertBuffer

_LEAST_TOKENS = 256  # prompt tokens until the rate is reliable
_LEAST_BYTES = 64 << 20
_PAUSE = 1.5  # longest wait of an answer for another prompt, in seconds


class PromptMeter:
    """A meter of a started buffer's prompt processing."""

    def __init__(self, buffer: ExpertBuffer):
        self._buffer = buffer
        self._tokens = self._ns = self._bytes = self._busy_ns = 0
        self._seen: tuple[int, int, int] | None = None
        self._n_beside = 0

    def begin(self, depth: int) -> None:
        """Begin a prompt's batch at a context depth of `depth` tokens."""
        self._depth, self._seen = depth, self._counters()

    def end(self, n_tokens: int, seconds: float) -> None:
        """End the batch."""
        if self._seen is None:
            return
        stall, nbytes, busy = (
            now - before for now, before in zip(self._counters(), self._seen, strict=True)
        )
        computing = max(int(seconds * 1e9) - stall, 1)
        if n_tokens >= LEAST:
            self._n_beside = max(int(n_tokens * max(_PAUSE * 1e9, busy) / computing), SIZES[0])
        # attention takes longer here than in the prompt that the choice assumes
        if self._depth >= PROMPT:
            return
        self._tokens += n_tokens
        self._ns += computing
        self._bytes += nbytes
        self._busy_ns += busy

    def n_beside(self) -> int:
        """Return the prompt tokens to compute while an answer waits.

        If the disk is the bottleneck, fewer tokens would not take less time.
        """
        return self._n_beside or SIZES[-1]

    def _counters(self) -> tuple[int, int, int]:
        stats = self._buffer.stats()
        return stats.stall_ns, stats.bytes_read, stats.disk_busy_ns

    @property
    def rates(self) -> PromptRates | None:
        """Measured rates, or None with too little data."""
        if (
            self._tokens < _LEAST_TOKENS
            or self._bytes < _LEAST_BYTES
            or not self._busy_ns
            or self._ns <= 0
        ):
            return None
        return PromptRates(self._ns / 1e9 / self._tokens, self._bytes / self._busy_ns * 1e9)
