"""Whether prefetching shortens tokens: an online comparison of token times with and without it.

Blocks of tokens with and without alternate (on, off, off, on, ...); the faster way is kept for a while, then compared again.
A difference within the noise changes nothing: what was on stays on. Knows nothing of what it switches.
"""

from __future__ import annotations

import math
import statistics

BLOCK = 8  # tokens
ORDER = (True, False, False, True, False, True, True, False)
HOLD = 512  # tokens between two comparisons
_SKIP = 2  # first tokens of a block: they still feel the one before


class PrefetchABTest:
    """Attributes:
    on: what to do for the token that begins now.
    gain: speed with, relative to without, minus 1, as last measured; None before the first comparison has ended.
    """

    def __init__(self) -> None:
        self.on = self._faster = True
        self.gain: float | None = None
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._block = self._in_block = 0
        self._times: dict[bool, list[int]] = {True: [], False: []}
        self._left = 0
        self.on = ORDER[0]

    def token(self, ns: int) -> None:
        """Counts a token that took this many nanoseconds."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._begin_trial()
            return
        if self._in_block >= _SKIP:
            self._times[self.on].append(ns)
        self._in_block += 1
        if self._in_block < BLOCK:
            return
        self._in_block, self._block = 0, self._block + 1
        if self._block < len(ORDER):
            self.on = ORDER[self._block]
            return
        (with_, error_with), (without, error_without) = (_trimmed(self._times[way]) for way in (True, False))
        self.gain = without / with_ - 1
        if abs(self.gain) > math.hypot(error_with, error_without):
            self._faster = self.gain > 0
        self.on = self._faster
        self._left = HOLD


def _trimmed(times: list[int]) -> tuple[float, float]:
    """Mean and its relative standard error, without the highest and lowest tenth: a burst of other work on the machine must not decide."""
    cut = len(times) // 10
    kept = sorted(times)[cut : len(times) - cut]
    mean = statistics.fmean(kept)
    return mean, statistics.stdev(kept) / math.sqrt(len(kept)) / mean
