"""Whether drafts pay: with experts on disk they save computing, and cost the reads of tokens that are thrown away.

Knows nothing of how drafts are made. Drafting is compared with not drafting while answers are written, in windows of a few batches
each, and stays on only while it gives more tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..engine.ab_test import ABTest
from ..engine.batch_spans import Span

WINDOW = 4  # batches whose tokens and time are taken together: one alone may have gained 1 token or all of its draft


class DraftJudge:
    """Told of every batch, before it is computed. The drafts of that one are made already: what is said counts for the next."""

    def __init__(self) -> None:
        self._test = ABTest(block=1, skip=0)
        self._firsts: dict[int, int] = {}  # of each sequence in the batch before, its first position
        self._last = 0.0
        self._clear()

    def _clear(self) -> None:
        """A new window begins with the next batch but one, the first that was drafted, or not, as is said now."""
        self._n, self._tokens, self._seconds = -1, 0, 0.0

    @property
    def on(self) -> bool:
        return self._test.on

    @property
    def gain(self) -> float | None:
        """Tokens per second with drafts, relative to without, minus 1, as last compared."""
        return self._test.gain

    def begin(self, spans: Mapping[int, Span], decodes: bool, now: float) -> None:
        """A sequence has gained what its first position has moved by since the batch before: what was accepted of a draft, and one more.

        Args:
            decodes: nothing of the batch is a prompt.
            now: in seconds.
        """
        seconds, self._last = now - self._last, now
        before, self._firsts = self._firsts, {sequence: span.first for sequence, span in spans.items()} if decodes else {}
        if not decodes or before.keys() != self._firsts.keys():  # others decode now, or a prompt came between
            self._clear()
            return
        self._n += 1
        if self._n == 0:
            return
        self._tokens += sum(first - before[sequence] for sequence, first in self._firsts.items())
        self._seconds += seconds
        if self._n == WINDOW:
            if self._tokens > 0:
                self._test.token(int(1e9 * self._seconds / self._tokens))
            self._clear()
