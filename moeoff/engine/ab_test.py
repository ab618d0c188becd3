"""Whether something (prefetching, drafts) shortens tokens: an online comparison of token times with and without it.

Blocks of tokens with and without alternate (off, on, on, off, ...). The comparison ends as soon as the difference is plain, and it stays
on only if it has shortened the tokens by more than the noise: where both ways are equally fast, the one that does less is kept.
The answer holds for a while, for longer each time it is found again. Knows nothing of what it switches.
"""

from __future__ import annotations

import math
import statistics

BLOCK = 4  # tokens
ORDER = (False, True, True, False) * 4
ROUND = 4  # blocks after which the times so far may decide, both ways in each
PLAIN = 3.0  # standard errors of a difference that ends the comparison early
HOLD, LONGEST_HOLD = 256, 4096  # tokens between two comparisons
SKIP = 1  # first tokens of a block: they still feel the one before


class ABTest:
    """Args:
    block, skip: times in a block, and how many of its first are left out.

    Attributes:
        on: what to do for the token that begins now.
        gain: speed with, relative to without, minus 1, as last measured; None before the first comparison has ended.
    """

    def __init__(self, block: int = BLOCK, skip: int = SKIP) -> None:
        self._n_block, self._skip = block, skip
        self.gain: float | None = None
        self._last: bool | None = None
        self._hold = HOLD
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
        if self._in_block >= self._skip:
            self._times[self.on].append(ns)
        self._in_block += 1
        if self._in_block < self._n_block:
            return
        self._in_block, self._block = 0, self._block + 1
        if self._block % ROUND == 0 and self._decide(self._block == len(ORDER)):
            return
        self.on = ORDER[self._block]

    def _decide(self, last_round: bool) -> bool:
        """Whether the comparison has ended."""
        (with_, error_with), (without, error_without) = (_trimmed(self._times[way]) for way in (True, False))
        gain, noise = without / with_ - 1, math.hypot(error_with, error_without)
        if not last_round and abs(gain) <= PLAIN * noise:
            return False
        self.gain, self.on = gain, gain > noise
        self._hold = min(2 * self._hold, LONGEST_HOLD) if self.on == self._last else HOLD
        self._last, self._left = self.on, self._hold
        return True


def _trimmed(times: list[int]) -> tuple[float, float]:
    """Mean and its relative standard error, without the highest and lowest tenth: a burst of other work on the machine must not decide."""
    cut = len(times) // 10
    kept = sorted(times)[cut : len(times) - cut]
    mean = statistics.fmean(kept)
    return mean, statistics.stdev(kept) / math.sqrt(len(kept)) / mean
