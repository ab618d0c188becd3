"""Runs a `Job` in a process of its own, inside a memory cgroup where that is asked for and possible; and every combination of options that way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..budget.dry_load import context_for
from ..cpu import n_cores
from ..gguf.model_index import ModelIndex
from ..memory import cgroup_limit, format_size, parse_size
from ..sidecar.file import sidecar_path
from .cgroup import memory_cgroup, unavailable
from .job import MOEOFF, STOCK, BenchTest, Job, Measurement, Sample, rates
from .rows import Row, rows

_KILLED = -9
KILLED_TEXT = "killed by the system: out of memory"
Listener = Callable[[dict[str, Any]], None]


def measure(job: Job, listener: Listener | None = None, timeout: float | None = None) -> Measurement:
    """Runs it to its end, and kills it if the caller is interrupted.

    Args:
        listener: told of every line, as it comes.
        timeout: seconds; what is not finished then is an error of the measurement.

    Raises:
        OSError: a memory cgroup was asked for and cannot be made.
    """
    out = Measurement(job)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_cgroup(job.limit_bytes)) if job.limit_bytes else None
        errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        command = [sys.executable, "-m", "moeoff.bench.worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | job.environment,
                                   preexec_fn=group.enter if group else None)  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        started = time.monotonic()
        if timeout is not None:
            timer = threading.Timer(timeout, process.kill)
            timer.daemon = True
            stack.callback(timer.cancel)
            timer.start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps(replace(job, tells=listener is not None)))
            process.stdin.close()
        for line in process.stdout:
            event = json.loads(line)
            if listener is not None:
                listener(event)
            match event.pop("kind"):
                case "sample":
                    out.samples.append(Sample(**event))
                case "error":
                    out.error = event["text"]
                case "progress":
                    pass
                case facts:  # opened or closed
                    setattr(out, facts, event)
        code = process.wait()
        if group is not None:
            out.closed["cgroup_peak_bytes"] = group.peak_bytes
        if code != 0 and not out.error:
            errors.seek(0)
            out.error = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            if timeout is not None and time.monotonic() - started >= timeout:
                out.error = f"not finished after {timeout:.0f} s"
            elif code == _KILLED:
                out.error = KILLED_TEXT
    return out


def drop_from_page_cache(path: str) -> None:
    """Forgets what other processes have read of a file: it is no memory of the next one's cgroup, and would be found there all the same."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # what is not on the disk yet stays
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


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


# of the options, those that llama_cpp.Llama has, too
_SHARED = ("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "n_ctx")
STOCK_SECONDS = 300.0  # of one test: where it thrashes, a token takes seconds; less would leave it fewer tokens than the others
_STOCK_TIMEOUT = 900.0
_OWN_LIMIT = 1.1  # times the wanted one: a cgroup that we are in already, and that is as tight


@dataclass(frozen=True)
class Grid:
    """Every combination of options, one after the other.

    Attributes:
        model: path of the GGUF.
        tests: of each configuration.
        axes: options of `moeoff.Llama`, with all values of each; memory as people write it, or None.
        options: the others, one value each.
        compare_stock: stock llama.cpp, too, at each memory, with its repacked kernels and with plain ones; each in a cgroup with that limit where
            one can be made.
        flags: as those of a `Job`.
    """

    model: str
    tests: tuple[BenchTest, ...]
    axes: Mapping[str, Sequence[Any]]
    options: Mapping[str, Any]
    repetitions: int = 5
    warm_up: bool = True
    text: str | None = None
    compare_stock: bool = False
    seconds: float | None = None
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def n_ctx(self) -> int:
        """Tokens of the context, unless one is given: those of `moeoff run`, so that the numbers are those of a run; more if a test needs them."""
        return context_for(ModelIndex.read(self.model), max(test.depth + test.n_tokens for test in self.tests))

    def jobs(self) -> list[tuple[Job, int, str]]:
        """Each with its bound of memory (0: none) and a note about its surroundings."""
        expert_bytes, n_ctx = ModelIndex.read(self.model).expert_bytes, self.n_ctx
        combinations = [dict(zip(self.axes, values)) for values in itertools.product(*self.axes.values())]
        out: list[tuple[Job, int, str]] = []
        stock: dict[str, tuple[Job, int, str]] = {}
        for chosen in combinations:
            options = {name: value for name, value in (dict(self.options) | chosen).items() if value is not None}
            options.setdefault("n_ctx", n_ctx)
            memory = parse_size(options["memory"]) if "memory" in options else 0
            if memory:
                options["memory"] = memory
            limit, note = _limit(memory) if self.compare_stock else (None, "")
            job = Job(self.model, MOEOFF, options, self.tests, self.repetitions, self.warm_up, self.text, seconds=self.seconds, limit_bytes=limit,
                      flags=self.flags)  # fmt: skip
            out.append((job, memory, note))
            if self.compare_stock:
                theirs = {"n_threads": n_cores(), **{name: options[name] for name in _SHARED if name in options}}
                theirs.setdefault("n_threads_batch", theirs["n_threads"])  # llama_cpp would take half of the cores
                slow = bool(memory) and memory < expert_bytes
                for extra in (True, False):  # repacked kernels, its default, need the weights twice while it loads: it may be killed for that
                    options = theirs | {"use_extra_bufts": extra}
                    stock.setdefault(
                        f"{memory} {options}",
                        (replace(job, engine=STOCK, options=options, warm_up=self.warm_up and not slow, seconds=STOCK_SECONDS), memory, note),
                    )
        return out + list(stock.values())

    def run(self, listener: Callable[[Job], Listener | None] | None = None) -> Iterator[list[Row]]:
        """The rows of one job after the other.

        Args:
            listener: asked, before each job, for someone to tell of it.
        """
        for job, memory, note in self.jobs():
            yield rows(self._measure(job, listener, None if job.engine == MOEOFF else _STOCK_TIMEOUT), memory, note)

    def _measure(self, job: Job, listener: Callable[[Job], Listener | None] | None, timeout: float | None) -> Measurement:
        if self.compare_stock:
            for path in ModelIndex.read(job.model).files:
                drop_from_page_cache(path)
        return measure(job, listener and listener(job), timeout)


def _limit(memory: int) -> tuple[int | None, str]:
    """A cgroup for this bound, and what to say of it."""
    if not memory:
        return None, ""
    own = cgroup_limit()
    if own is not None and own <= _OWN_LIMIT * memory:
        return None, f"in this container's {format_size(own)}"
    why = unavailable()
    if why is not None:
        return None, f"no limit around it: {why}"
    return memory, f"in a cgroup of {format_size(memory)}"
