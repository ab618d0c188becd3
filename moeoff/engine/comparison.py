"""Online comparisons: ways of computing the same are tried in turn while tokens are
computed, and the fastest stays.

`ABTest` compares prefetching with going without it, `ModeTuner` devices with the CPU
alone.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

BLOCK = 4  # tokens
ORDER = (False, True, True, False) * 4
ROUND = 4  # blocks after which the times so far may decide, both ways in each
EARLY_STOP_SIGMA = 3.0  # standard errors of a difference that ends the comparison early
HOLD, LONGEST_HOLD = 256, 4096  # tokens between two comparisons
SKIP = 1  # first tokens of a block: they still feel the one before


class ABTest:
    """Compares something with going without it, in blocks of tokens that take turns.

    Args:
        block, skip: times in a block, and how many of its first are left out.
        hopeless: where going without takes so many times as long, it is not tried again
            before the longest hold has passed.

    Attributes:
        on: what to do for the token that begins now.
        gain: speed with, relative to without, minus 1, as last measured; None before
            the first comparison has ended.
        left: Number of tokens before the next comparison; 0 while one runs.
    """

    def __init__(self, block: int = BLOCK, skip: int = SKIP, hopeless: float = math.inf) -> None:
        self._n_block, self._skip, self._hopeless = block, skip, hopeless
        self.gain: float | None = None
        self._last: bool | None = None
        self._hold = HOLD
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._block = self._in_block = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._round: list[tuple[bool, int]] = []
        self.left = 0
        self.on = ORDER[0]

    def token(self, ns: int) -> None:
        """Counts a token that took this many nanoseconds."""
        if self.left:
            self.left -= 1
            if not self.left:
                self._begin_trial()
            return
        if self._in_block >= self._skip:
            self._round.append((self.on, ns))
        self._in_block += 1
        if self._in_block < self._n_block:
            return
        self._in_block, self._block = 0, self._block + 1
        if self._block % ROUND == 0 and self._decide(self._block == len(ORDER)):
            return
        self.on = ORDER[self._block]

    def _decide(self, last_round: bool) -> bool:
        """True if the comparison has ended."""
        # as shares of the round's median: a buffer that fills, or text that turns,
        # makes rounds differ by more than the two ways do
        median = statistics.median(ns for _, ns in self._round) or 1
        for on, ns in self._round:
            self._times[on].append(ns / median)
        self._round.clear()
        (with_, error_with), (without, error_without) = (
            _trimmed(self._times[way]) for way in (True, False)
        )
        gain, noise = without / with_ - 1, math.hypot(error_with, error_without)
        if not last_round and abs(gain) <= EARLY_STOP_SIGMA * noise:
            return False
        self.gain, self.on = gain, gain > noise
        if without >= self._hopeless * with_:
            self._hold = LONGEST_HOLD
        else:
            self._hold = min(2 * self._hold, LONGEST_HOLD) if self.on == self._last else HOLD
        self._last, self.left = self.on, self._hold
        return True


def _trimmed(times: list[float]) -> tuple[float, float]:
    """Mean and its relative standard error, without the highest and lowest tenth: a
    burst of other work on the machine must not decide.
    """
    cut = len(times) // 10
    middle = sorted(times)[cut : len(times) - cut]
    mean = statistics.fmean(middle)
    return mean, statistics.stdev(middle) / math.sqrt(len(middle)) / mean


WITHOUT = "cpu"
# tokens: an expert that was on the device alone has to be read again when the CPU needs
# it
_BLOCK, _SKIP = 16, 8
# tokens of a batch that is compared as a prompt, and of the longest in which anything
# is tried for a first time
_PROMPT, _LONG = 32, 128
_EACH = 2  # batches that each way is measured by, before one is chosen
_HOPELESS = 2.0  # times the best: once is enough
# batches after which another way is measured again, and one that was hopeless
_AGAIN, _HOPELESS_AGAIN = 16, 256


class ModeTuner:
    """Compares ways to use a device with each other and with the CPU alone.

    Args:
        ways: to use the device for tokens that are decoded, at least one.
        prompts: ways to read text, by default the first of these and the CPU alone.
        compares: ways to decode; else they take the first.
    """

    def __init__(self, ways: Sequence[str], prompts: Sequence[str] = (), *, compares: bool = True):
        self._ways, self._compares = tuple(ways), compares
        # by tokens of a batch: their times cannot be compared
        self._contests: dict[int, _Contest] = {}
        self._short = _Prompts(tuple(prompts) or (self._ways[0], WITHOUT))
        self._long = _Prompts(self._short.ways, self._short)
        self._has_read = False
        self.mode = self._ways[0]

    @property
    def gain(self) -> float | None:
        """Speed of single tokens with the device relative to without, minus 1; None
        before it was compared.
        """
        return self._contests[1].gain if 1 in self._contests else None

    @property
    def decode_mode(self) -> str:
        """The way that the next single token will be decoded."""
        return self._contests[1].mode if 1 in self._contests else self._ways[0]

    def begin(self, n_tokens: int, decodes: bool) -> str:
        """How to compute the next batch."""
        if decodes:
            self.mode = (
                self._contests.setdefault(n_tokens, _Contest(self._ways)).mode
                if self._compares
                else self._ways[0]
            )
        elif n_tokens >= _PROMPT:
            self.mode = self._prompts(n_tokens).next()
        return self.mode

    def end(self, n_tokens: int, seconds: float, decodes: bool) -> None:
        """It has been computed."""
        if decodes:
            if n_tokens in self._contests:
                self._contests[n_tokens].token(int(1e9 * seconds))
        elif n_tokens >= _PROMPT:
            if self._has_read:  # the first had to read the experts from disk
                self._prompts(n_tokens).add(self.mode, seconds / n_tokens)
            self._has_read = True

    def _prompts(self, n_tokens: int) -> _Prompts:
        return self._short if n_tokens <= _LONG else self._long


class _Contest:
    """Ways to decode, two at a time."""

    def __init__(self, ways: Sequence[str]):
        self._left = list(ways)
        self._next()

    @property
    def mode(self) -> str:
        return self._pair[self._test.on]

    @property
    def gain(self) -> float | None:
        return self._test.gain if self._pair[0] == WITHOUT else None

    def token(self, ns: int) -> None:
        self._test.token(ns)
        if len(self._left) > 1 and self._test.gain is not None:
            self._left = [self.mode, *self._left[2:]]
            self._next()

    def _next(self) -> None:
        self._test = ABTest(_BLOCK, _SKIP, _HOPELESS)
        # off, on
        self._pair = (
            (self._left[0], self._left[1]) if len(self._left) > 1 else (WITHOUT, self._left[0])
        )


class _Prompts:
    """Ways to read text, by the best time for a token that each has had lately.

    Args:
        shorter: of shorter batches. A way is first tried with those, where it costs
            less; what is hopeless there, or was not tried there, is tried late here.
    """

    def __init__(self, ways: tuple[str, ...], shorter: _Prompts | None = None):
        self.ways = ways
        self._times: dict[str, list[float]] = {way: [] for way in ways}
        self._n = Counter[str]()
        self._since = 0  # batches, that another way than the best was taken
        self._shorter = shorter

    @property
    def _best(self) -> str:
        return min(self._times, key=lambda way: min(self._times[way], default=math.inf))

    def next(self) -> str:
        best, n = self._best, self._n
        if undecided := [
            way
            for way in self.ways
            if n[way] < _EACH and (way == best or self._promises(way, best))
        ]:
            return min(undecided, key=lambda way: n[way])
        due = [
            way
            for way in self.ways
            if way != best
            and self._since >= (_HOPELESS_AGAIN if self._is_hopeless(way, best) else _AGAIN)
        ]
        return min(due, key=lambda way: n[way], default=best)

    def _is_hopeless(self, way: str, best: str) -> bool:
        if self._times[way]:
            return min(self._times[way]) > _HOPELESS * min(self._times[best])
        return self._shorter is not None and self._shorter._is_hopeless(way, self._shorter._best)

    def _promises(self, way: str, best: str) -> bool:
        is_known = self._shorter is None or bool(self._times[way] or self._shorter._times[way])
        return is_known and not self._is_hopeless(way, best)

    def add(self, way: str, seconds: float) -> None:
        best = self._best
        self._since = 0 if way != best else self._since + 1
        self._times[way] = [*self._times[way][1 - _EACH :], seconds]
        self._n[way] += 1
