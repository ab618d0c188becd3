"""Which way of computing with experts is the fastest: with a device that holds some of them, or without. Found by measuring, while it computes.

Tokens that are decoded are compared by `ABTest`, in blocks that are long enough for both memories to adapt; first the ways to use the
device with each other, then the better one with the CPU alone. Prompts are compared by their time for a token. Knows neither
devices nor contexts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .ab_test import ABTest

__all__ = ["WITHOUT", "DeviceJudge"]

WITHOUT = "cpu"
_BLOCK, _SKIP = 16, 8  # tokens: an expert that was on the device alone has to be read again when the CPU needs it
_PROMPT = 32  # tokens of a batch that is compared as a prompt
_EACH = 2  # batches that each way is measured by, before one is chosen
_AGAIN = 16  # batches after which the other way is measured again


class DeviceJudge:
    """Args:
    ways: to use the device for tokens that are decoded, at least one.
    prompts: ways to read text, by default the first of these and the CPU alone.
    compares: ways to decode; else they take the first.
    """

    def __init__(self, ways: Sequence[str], prompts: Sequence[str] = (), *, compares: bool = True):
        self._ways, self._compares = tuple(ways), compares
        self._contests: dict[int, _Contest] = {}  # by tokens of a batch: their times cannot be compared
        self._prompts = _Prompts(tuple(prompts) or (self._ways[0], WITHOUT))
        self.mode = self._ways[0]

    @property
    def gain(self) -> float | None:
        """Speed of single tokens with the device relative to without, minus 1; None before it was compared."""
        return self._contests[1].gain if 1 in self._contests else None

    @property
    def decode_mode(self) -> str:
        """Of the next single token."""
        return self._contests[1].mode if 1 in self._contests else self._ways[0]

    def begin(self, n_tokens: int, decodes: bool) -> str:
        """How to compute the next batch."""
        if decodes:
            self.mode = self._contests.setdefault(n_tokens, _Contest(self._ways)).mode if self._compares else self._ways[0]
        elif n_tokens >= _PROMPT:
            self.mode = self._prompts.next()
        return self.mode

    def end(self, n_tokens: int, seconds: float, decodes: bool) -> None:
        """It has been computed."""
        if decodes:
            if n_tokens in self._contests:
                self._contests[n_tokens].token(int(1e9 * seconds))
        elif n_tokens >= _PROMPT:
            self._prompts.add(self.mode, seconds / n_tokens)


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
        self._test = ABTest(_BLOCK, _SKIP)
        self._pair = (self._left[0], self._left[1]) if len(self._left) > 1 else (WITHOUT, self._left[0])  # off, on


class _Prompts:
    """Ways to read text, by the best time for a token that each has had lately."""

    def __init__(self, ways: tuple[str, ...]):
        self._times: dict[str, list[float]] = {way: [] for way in ways}
        self._n = Counter[str]()
        self._since = 0

    def next(self) -> str:
        fewest = min(self._times, key=lambda way: self._n[way])
        if self._n[fewest] < _EACH:
            return fewest
        best = min(self._times, key=lambda way: min(self._times[way]))
        return min((way for way in self._times if way != best), key=lambda way: self._n[way]) if self._since >= _AGAIN else best

    def add(self, way: str, seconds: float) -> None:
        best = min(self._times, key=lambda w: min(self._times[w], default=0.0))
        self._since = 0 if way != best else self._since + 1
        self._times[way] = [*self._times[way][1 - _EACH :], seconds]
        self._n[way] += 1
