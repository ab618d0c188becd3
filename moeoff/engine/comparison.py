"""Online A/B tests, which switch between two ways of computing and keep the faster one.

`ABTest` tests prefetching, `ModeTuner` the use of devices.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

BLOCK_TOKENS = 4  # tokens per block
ORDER = (False, True, True, False) * 4
ROUND = 4  # blocks of a round, both ways in each; a round may decide
EARLY_STOP_SIGMA = 3.0  # difference in standard errors that ends a test early
HOLD, LONGEST_HOLD = 256, 4096  # tokens between two tests
SKIP = 1  # first tokens of a block, affected by the previous block


class ABTest:
    """An A/B test of a feature in alternating blocks of tokens.

    Args:
        block, skip: Tokens of a block, and how many of its first are ignored.
        hopeless: Slowdown without the feature that delays the next test the longest.

    Attributes:
        on: True if the feature is on for the next token.
        gain: Last measured speed-up minus 1; None before the first result.
        left: Tokens until the next test; 0 during one.
    """

    def __init__(
        self, block: int = BLOCK_TOKENS, skip: int = SKIP, hopeless: float = math.inf
    ) -> None:
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
        """Record a token's duration in nanoseconds."""
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
        """Return True if the test has ended."""
        # relative to the round's median, because rounds differ more than the two ways
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
    """Return mean and relative standard error without the highest and lowest tenth.

    Trimming removes bursts of other work on the machine.
    """
    cut = len(times) // 10
    middle = sorted(times)[cut : len(times) - cut]
    mean = statistics.fmean(middle)
    return mean, statistics.stdev(middle) / math.sqrt(len(middle)) / mean


WITHOUT = "cpu"
# tokens: after a switch to the CPU, experts held by the device alone are read again
_BLOCK, _SKIP = 16, 8
# tokens of a batch that is compared as a prompt, and of the longest for first trials
_PROMPT, _LONG = 32, 128
_EACH = 2  # batches to measure each way before a choice
_HOPELESS = 2.0  # slowdown after which one measurement is enough
# batches until another way, or a hopeless one, is measured again
_AGAIN, _HOPELESS_AGAIN = 16, 256


class ModeTuner:
    """An A/B test of the device modes and the CPU alone.

    Args:
        ways: Device modes for decoding, at least one.
        prompts: Modes for prompt processing. Default: the first of `ways`, and the CPU.
        compares: False to decode with the first mode only.
    """

    def __init__(self, ways: Sequence[str], prompts: Sequence[str] = (), *, compares: bool = True):
        self._ways, self._compares = tuple(ways), compares
        # by tokens per batch, because their times are not comparable
        self._contests: dict[int, _Contest] = {}
        self._short = _Prompts(tuple(prompts) or (self._ways[0], WITHOUT))
        self._long = _Prompts(self._short.ways, self._short)
        self._has_read = False
        self.mode = self._ways[0]

    @property
    def gain(self) -> float | None:
        """Speed-up of single tokens by the device minus 1; None until measured."""
        return self._contests[1].gain if 1 in self._contests else None

    @property
    def decode_mode(self) -> str:
        """The mode for the next single token."""
        return self._contests[1].mode if 1 in self._contests else self._ways[0]

    def begin(self, n_tokens: int, decodes: bool) -> str:
        """Return the mode for the next batch."""
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
        """Record the batch's duration."""
        if decodes:
            if n_tokens in self._contests:
                self._contests[n_tokens].token(int(1e9 * seconds))
        elif n_tokens >= _PROMPT:
            if self._has_read:  # the first batch read the experts from disk
                self._prompts(n_tokens).add(self.mode, seconds / n_tokens)
            self._has_read = True

    def _prompts(self, n_tokens: int) -> _Prompts:
        return self._short if n_tokens <= _LONG else self._long


class _Contest:
    """A knockout of the decoding modes by A/B tests."""

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
    """The mode with the best recent time per prompt token.

    Args:
        shorter: Results for shorter batches, where trials are cheap. Modes that are
            hopeless or untried there are tried late.
    """

    def __init__(self, ways: tuple[str, ...], shorter: _Prompts | None = None):
        self.ways = ways
        self._times: dict[str, list[float]] = {way: [] for way in ways}
        self._n = Counter[str]()
        self._since = 0  # batches since another way than the best
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
