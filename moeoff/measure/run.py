"""Benchmark runs, each in its own process and memory cgroup."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..budget.dry_load import context_for
from ..experts.sidecar import sidecar_path
from ..gguf.model_index import ModelIndex
from ..options import TABLE
from ..system.cgroup import memory_cgroup, unavailable
from ..system.disk import cached_bytes, leave_page_cache
from ..system.machine import n_cores
from ..system.memory import cgroup_limit, format_size, parse_size
from .job import MOEOFF, STOCK, Job, Measurement, Sample
from .rounds import interleaved, joined, ratios_of
from .rows import Row, rows

_KILLED = -9
KILLED_TEXT = "killed by the system: out of memory"
Listener = Callable[[dict[str, Any]], None]


def measure(
    job: Job, listener: Listener | None = None, timeout: float | None = None
) -> Measurement:
    """Run a job in a process, which is killed if the caller is interrupted.

    Args:
        listener: Callback with each event.
        timeout: Seconds until the process is killed, which is an error of the
            measurement.

    Raises:
        OSError: The job's memory cgroup cannot be created.
    """
    out = Measurement(job)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_cgroup(job.limit_bytes)) if job.limit_bytes else None
        errors = stack.enter_context(
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        )
        command = [sys.executable, "-m", "moeoff.measure.worker"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | job.environment,
            preexec_fn=group.enter if group else None,
        )
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


def drop_from_page_cache(path: str) -> str:
    """Drop a file from the page cache, which would speed up the next process uncounted.

    Returns:
        Remark on pages that stayed, e.g. mapped ones, or "".
    """
    with open(path, "rb") as file:
        leave_page_cache(file.fileno(), sync=True)
    if not (stayed := cached_bytes(path)):
        return ""
    size, name = format_size(stayed), os.path.basename(path)
    return f"{size} of {name} were in the page cache and could not be dropped"


def drop_files(job: Job) -> list[str]:
    """Drop a job's model and sidecar from the page cache, and return remarks."""
    sidecars = {sidecar_path(job.model), str(job.options.get("experts") or "")}
    files = {*ModelIndex.read(job.model).files, *filter(os.path.exists, sidecars)}
    return list(filter(None, map(drop_from_page_cache, sorted(files))))


STOCK_SECONDS = 300.0  # time limit of a test: a token takes seconds where stock thrashes
_STOCK_TIMEOUT = 900.0  # seconds
_OWN_LIMIT = 1.1  # a limit of this process's cgroup up to 1.1x suffices


@dataclass(frozen=True)
class Grid:
    """All combinations of options.

    Attributes:
        job: Job that the combinations share.
        axes: Values of options of `moeoff.Llama`. Memory is a string or None.
        compare_stock: True to add stock llama.cpp, with repacked and with plain
            kernels, at each memory limit. Implies `cold`.
        cold: True to drop files from the page cache before each run, and to run in
            memory cgroups, if possible.
        rounds: Number of rounds, each of all jobs.
    """

    job: Job
    axes: Mapping[str, Sequence[Any]]
    compare_stock: bool = False
    cold: bool = False
    rounds: int = 1

    @property
    def n_ctx(self) -> int:
        """Default context length: that of `moeoff run`, or what a test needs."""
        return context_for(
            ModelIndex.read(self.job.model),
            max(test.depth + test.n_tokens for test in self.job.tests),
        )

    def jobs(self) -> list[tuple[Job, int, str]]:
        """Return jobs with their memory limit (0: none) and a remark for `mode`."""
        expert_bytes, n_ctx = ModelIndex.read(self.job.model).expert_bytes, self.n_ctx
        combinations = [
            dict(zip(self.axes, values)) for values in itertools.product(*self.axes.values())
        ]
        out: list[tuple[Job, int, str]] = []
        stock: dict[str, tuple[Job, int, str]] = {}
        for chosen in combinations:
            given = (dict(self.job.options) | chosen).items()
            options = {name: value for name, value in given if value is not None}
            options.setdefault("n_ctx", n_ctx)
            memory = parse_size(options["memory"]) if "memory" in options else 0
            if memory:
                options["memory"] = memory
            limit, note = None, ""
            if memory and (self.cold or self.compare_stock):
                limit, note = limit_around(memory, cgroup_limit(), unavailable())
            job = replace(self.job, options=options, limit_bytes=limit)
            out.append((job, memory, note))
            if self.compare_stock:
                theirs = {"n_threads": n_cores(), "flash_attn": True}
                theirs |= {name: options[name] for name in options if TABLE[name].llama}
                # llama_cpp's default is half
                theirs.setdefault("n_threads_batch", theirs["n_threads"])
                slow = bool(memory) and memory < expert_bytes
                # repacking may exceed the limit: it needs the weights twice
                for extra in (True, False):
                    options = theirs | {"use_extra_bufts": extra}
                    theirs_job = replace(job, engine=STOCK, options=options, seconds=STOCK_SECONDS)
                    theirs_job = replace(theirs_job, warm_up=job.warm_up and not slow)
                    stock.setdefault(f"{memory} {options}", (theirs_job, memory, note))
        return out + list(stock.values())

    def run(
        self,
        listener: Callable[[Job], Listener | None] | None = None,
        measure: Callable[..., Measurement] = measure,
    ) -> Iterator[list[Row]]:
        """Measure all jobs, and yield the rows of each.

        Args:
            listener: Function that returns a listener for a job.
            measure: Function that measures a job.
        """
        jobs = self.jobs()
        found: list[list[Measurement]] = [[] for _ in jobs]
        notes = [{note: None} for *_, note in jobs]

        def rows_of(at: int) -> list[Row]:
            out = rows(joined(found[at]), jobs[at][1], ", ".join(filter(None, notes[at])))
            for i, row in enumerate(out if self.rounds > 1 else ()):
                row["samples_ratio"] = ratios_of(found[0], found[at], i)
            return out

        for _, at in interleaved(range(len(jobs)), self.rounds):
            job = jobs[at][0]
            stayed = drop_files(job) if self.cold or self.compare_stock else []
            if job.engine == STOCK:  # moeoff does not read through the page cache
                notes[at] |= dict.fromkeys(stayed)
            timeout = None if job.engine == MOEOFF else _STOCK_TIMEOUT
            found[at].append(measure(job, listener and listener(job), timeout))
            if self.rounds == 1:
                yield rows_of(at)
        if self.rounds > 1:
            yield from map(rows_of, range(len(jobs)))


def limit_around(memory: int, own: int | None, why: str | None) -> tuple[int | None, str]:
    """Return the cgroup's limit for a memory limit, or None, and a remark.

    `own` is the limit of this process's cgroup, `why` the reason that none can be made.
    """
    if own is not None and own <= _OWN_LIMIT * memory:
        return None, f"in this container's {format_size(own)}"
    if why is not None:
        return None, f"no limit around it: {why}"
    return memory, f"in a cgroup of {format_size(memory)}"
