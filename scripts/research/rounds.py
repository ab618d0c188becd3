"""Measurements in rounds: jobs take turns, each in a process of its own; medians, ranges, and ratios of the same round."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moeoff.experts.sidecar import sidecar_path
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.job import BenchTest, Job, Measurement, rates
from moeoff.measure.run import drop_from_page_cache, measure


def prompt_then_tokens(n_prompt: int, n_gen: int) -> tuple[BenchTest, BenchTest]:
    """A prompt and the answer behind it, each with rates of its own."""
    return BenchTest(n_prompt, 0), BenchTest(0, n_gen, n_prompt, continues=True)


class Spread(NamedTuple):
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Comparison:
    """One job's test, over the rounds in which it ended.

    Attributes:
        figures: those of `rates`, and of its process open_seconds, arena_bytes, budget_bytes, peak_rss_bytes, cgroup_peak_bytes.
        ratio: speed over that of the first job in the same round; None if no round has both.
        error: why a round did not end; empty: all did.
    """

    name: str
    test: BenchTest
    figures: dict[str, Spread]
    ratio: Spread | None
    error: str
    measurements: list[Measurement]


def compare(
    jobs: Mapping[str, Job],
    rounds: int = 3,
    *,
    cold: bool = True,
    timeout: float | None = None,
    progress: Callable[[str, int, Measurement], None] | None = None,
) -> list[Comparison]:
    """Runs jobs in turn, round by round, each in a process of its own, so that what becomes slower does so for all of them.

    Every other round goes backwards: none always runs right behind the same other one. A job that fails is left out of that round, and
    what it said is in `error`; the others go on.

        compare({"lru": Job(path, options={"strategy": "lru"}, tests=prompt_then_tokens(512, 128), repetitions=1, warm_up=False),
                 "score": Job(path, options={"strategy": "score"}, tests=prompt_then_tokens(512, 128), repetitions=1, warm_up=False)})

    Args:
        jobs: by name; the others' speeds are told against the first one's. `Job.limit_bytes` puts a memory cgroup around a job.
        cold: drops the files that a job reads from the page cache before it.
        timeout: seconds of one job; what is not finished then has failed.
        progress: told the name, the round from 0 and the measurement, as they come.

    Returns:
        a row for each test of each job, job after job.

    Raises:
        OSError: a memory cgroup was asked for and cannot be made.
    """
    found: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for index in range(rounds):
        for name, job in list(jobs.items())[:: 1 if index % 2 == 0 else -1]:
            if cold:
                for path in {*ModelIndex.read(job.model).files, *filter(os.path.exists, [sidecar_path(job.model), str(job.options.get("experts", ""))])}:
                    drop_from_page_cache(path)
            done = measure(job, timeout=timeout)
            found[name].append(done)
            if progress:
                progress(name, index, done)
    return summarize(found)


def summarize(found: Mapping[str, list[Measurement]]) -> list[Comparison]:
    """The comparison of measurements that were taken in turn, one of each for each round."""
    first = next(iter(found.values()), [])
    out = []
    for name, measurements in found.items():
        for i, test in enumerate(measurements[0].job.tests):
            ended = [m for m in measurements if not m.error]
            found_here = [rates(m.of(i)) | _process_figures(m) for m in ended]
            figures = {key: Spread.over([row[key] for row in found_here if key in row]) for key in dict.fromkeys(itertools.chain(*found_here))}
            pairs = [(rates(a.of(i)).get("tps", 0.0), rates(b.of(i)).get("tps", 0.0)) for a, b in zip(first, measurements) if not a.error and not b.error]
            ratios = [theirs / base for base, theirs in pairs if base and theirs]
            error = next((m.error for m in measurements if m.error), "")
            out.append(Comparison(name, test, figures, Spread.over(ratios) if ratios else None, error, measurements))
    return out


def _process_figures(m: Measurement) -> dict[str, float]:
    facts = {"open_seconds": m.opened.get("seconds")} | {name: m.opened.get(name) for name in ("arena_bytes", "budget_bytes")}
    facts |= {name: m.closed.get(name) for name in ("peak_rss_bytes", "cgroup_peak_bytes")}
    return {name: value for name, value in facts.items() if value is not None}
