"""Paired rounds: contenders measured in turn, compared with one of the same round.

A ratio of two runs of one round is not affected by a machine that becomes slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from .job import Measurement, rates

Name = TypeVar("Name")


class Spread(NamedTuple):
    """The median and the range of a figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def interleaved(names: Iterable[Name], rounds: int) -> Iterator[tuple[int, Name]]:
    """Yield (round from 0, name). Every other round is reversed, so that no contender
    always runs right behind the same other one.
    """
    order = list(names)
    for index in range(rounds):
        for name in order[:: -1 if index % 2 else 1]:
            yield index, name


def ratios_of(base: Sequence[Measurement], theirs: Sequence[Measurement], i: int) -> list[float]:
    """Return the speeds of test i relative to the base's, of rounds that both ended."""
    pairs = [
        (rates(a.of(i)).get("tps", 0.0), rates(b.of(i)).get("tps", 0.0))
        for a, b in zip(base, theirs)
        if not a.error and not b.error
    ]
    return [speed / to for to, speed in pairs if to and speed]


def joined(rounds: Sequence[Measurement]) -> Measurement:
    """Return the samples of all rounds as one measurement, with the first error."""
    ended = [m for m in rounds if not m.error] or list(rounds[-1:])
    job = replace(ended[-1].job, repetitions=ended[-1].job.repetitions * len(ended))
    samples = [sample for m in ended for sample in m.samples]
    error = next((m.error for m in rounds if m.error), "")
    return replace(ended[-1], job=job, samples=samples, error=error)
