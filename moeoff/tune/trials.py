"""Short runs of a model with different options, in turn: each in a process of its own, cold.

Round by round every candidate runs once, on the same tokens, so that a disk that becomes slower does so for all; each round is on another
piece of text, so that nothing is chosen for what one text happens to say. A candidate is taken in the place of the first one only if it
was faster in every round, and by more than chance makes of short runs.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..bench.job import BenchTest, Job, Measurement
from ..errors import MoeoffError
from .journal import Journal

CLEARLY = 1.02  # times as fast, in the mean over the rounds
CLEARLY_ONCE = 1.05  # where there is one round only
_STRIDE = 4096  # tokens from one piece of text to the next: another subject
Run = Callable[[Job], Measurement]


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a prompt and of single tokens; peak_rss in bytes; error: why there are none."""

    prompt_tps: float
    gen_tps: float
    peak_rss: int
    error: str = ""

    def seconds(self, n_prompt: int, n_gen: int) -> float:
        """Of a prompt and an answer of so many tokens."""
        if self.error:
            return float("inf")
        return (n_prompt / self.prompt_tps if n_prompt else 0.0) + (n_gen / self.gen_tps if n_gen else 0.0)


@dataclass(frozen=True)
class Candidate:
    """Options to try, and their name in tables."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Of a candidate against the first one: times as fast in each round. The first one's are all 1."""

    candidate: Candidate
    speeds: tuple[Speed, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.geometric_mean(self.ratios) if all(self.ratios) else 0.0

    @property
    def better(self) -> bool:
        """Plainly faster than the first one."""
        return min(self.ratios) > 1 and self.ratio > (CLEARLY if len(self.ratios) > 1 else CLEARLY_ONCE)

    @property
    def error(self) -> str:
        return next((s.error for s in self.speeds if s.error), "")


class Trials:
    """Args:
    run: starts a job's process and waits for it.
    common: options of every candidate.
    n_prompt, n_gen: tokens that are run of each, of the usual text of measurements: nothing was fitted to that.
    """

    def __init__(self, run: Run, journal: Journal, model: str, common: Mapping[str, Any], n_prompt: int, n_gen: int):
        self._run, self._journal, self._model, self._common = run, journal, model, dict(common)
        self._n_prompt, self._n_gen = n_prompt, n_gen

    def compare(
        self, what: str, candidates: Sequence[Candidate], rounds: int, *, prompt: int = 0, first_piece: int = 0,
        tell: Callable[[str, int, int], None] | None = None,
    ) -> list[Outcome]:  # fmt: skip
        """Each candidate against the first.

        Args:
            what: name of the comparison in the journal.
            prompt: instead of a prompt and an answer, a prompt of so many tokens alone.
            first_piece: of the text, for the first round.

        Raises:
            MoeoffError: the first does not run.
        """
        speeds: dict[str, list[Speed]] = {c.name: [] for c in candidates}
        for index in range(rounds):
            # forwards and backwards: none always runs right behind the same other
            for n, c in enumerate(candidates if index % 2 == 0 else list(reversed(candidates))):
                if tell:
                    tell(f"{what}: {c.name}", index * len(candidates) + n, rounds * len(candidates))
                kept = self._journal.once(f"{what}/{c.name}/{index}", functools.partial(self._measured, c, prompt, first_piece + index, c is candidates[0]))
                speeds[c.name].append(Speed(**kept))
        n_prompt, n_gen = (prompt, 0) if prompt else (self._n_prompt, self._n_gen)
        base = [s.seconds(n_prompt, n_gen) for s in speeds[candidates[0].name]]
        out = []
        for c in candidates:
            ratios = tuple(before / s.seconds(n_prompt, n_gen) for before, s in zip(base, speeds[c.name], strict=True))
            out.append(Outcome(c, tuple(speeds[c.name]), ratios))
        return out

    def known(self, what: str, candidates: Sequence[Candidate], rounds: int) -> bool:
        """The comparison was ended before an interruption."""
        return all(self._journal.has(f"{what}/{c.name}/{index}") for c in candidates for index in range(rounds))

    def _measured(self, candidate: Candidate, prompt: int, piece: int, required: bool) -> dict[str, Any]:
        """For the journal. What others are compared with has to run; that a candidate does not is a result."""
        speed = self.measure(candidate, prompt, piece)
        if required and speed.error:
            raise MoeoffError(f"{self._model}: a trial ({candidate.name}) failed: {speed.error}")
        return asdict(speed)

    def measure(self, candidate: Candidate, prompt: int = 0, piece: int = 0) -> Speed:
        """One run, on a piece of the text."""
        tests = (BenchTest(prompt, 0),) if prompt else (BenchTest(self._n_prompt, 0), BenchTest(0, self._n_gen))
        options = self._common | dict(candidate.options)
        done = self._run(Job(self._model, options=options, tests=tests, repetitions=1, warm_up=False, skip=piece * _STRIDE, probe_seconds=0))
        if done.error or len(done.samples) < len(tests):
            return Speed(0.0, 0.0, 0, done.error or "it did not end")
        speeds = [s.tps for s in done.samples]
        return Speed(speeds[0], speeds[-1] if not prompt else 0.0, done.closed["peak_rss_bytes"])
