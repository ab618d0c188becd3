"""Paired rounds: a machine that becomes slower does so for both runs of a ratio."""

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
    """Yield (round, name), with every other round reversed."""
    order = list(names)
    for index in range(rounds):
        for name in order[:: -1 if index % 2 else 1]:
            yield index, name


def ratios_of(base: Sequence[Measurement], theirs: Sequence[Measurement], i: int) -> list[float]:
    """Return test i's speeds over the base's, of rounds that both ended."""
    ended = [(a.of(i), b.of(i)) for a, b in zip(base, theirs) if not a.error and not b.error]
    return [rates(b)["tps"] / rates(a)["tps"] for a, b in ended if rates(a) and rates(b)]


def joined(rounds: Sequence[Measurement]) -> Measurement:
    """Return the samples of all rounds as one measurement, with the first error."""
    ended = [m for m in rounds if not m.error] or list(rounds[-1:])
    job = replace(ended[-1].job, repetitions=ended[-1].job.repetitions * len(ended))
    samples = [sample for m in ended for sample in m.samples]
    error = next((m.error for m in rounds if m.error), "")
    return replace(ended[-1], job=job, samples=samples, error=error)
