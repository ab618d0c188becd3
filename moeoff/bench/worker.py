"""The process that measures: a `Job` as JSON on its standard input, what happens as lines of JSON on its standard output.

usage: python -m moeoff.bench.worker < JOB
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .job import MOEOFF, BenchTest, Job, Sample
from .text import TokenStream, read_text

if TYPE_CHECKING:
    from ..engine.expert_buffer import ExpertBuffer
    from ..engine.llama import Llama

Emit = Callable[..., None]
_WARM_UP_TOKENS = 32  # of a test of single tokens


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the process that reads our lines
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no line of ours

    def emit(kind: str, **fields: Any) -> None:
        lines.write(json.dumps({"kind": kind, **fields}) + "\n")
        lines.flush()

    from ..errors import MoeoffError

    try:
        work(Job.from_dict(json.load(sys.stdin)), emit)
    except (MoeoffError, OSError, MemoryError, ValueError, RuntimeError) as error:
        # without the way out, which is said in Python's terms
        emit("error", text=error.message if isinstance(error, MoeoffError) and error.message else str(error) or type(error).__name__)
        sys.exit(1)


def work(job: Job, emit: Emit) -> None:
    """Opens the model, runs the tests, and tells of it: "opened", "sample" for each repetition, "closed"."""
    started = time.perf_counter()
    engine = _Engine(job)
    emit("opened", seconds=time.perf_counter() - started, **engine.opened())
    stream = TokenStream(engine.llm, read_text(job.text), engine.adds_bos)
    stream.take(job.skip)
    for index, test in enumerate(job.tests):
        if job.warm_up:
            engine.run(index, BenchTest(test.n_prompt, min(test.n_gen, _WARM_UP_TOKENS)), stream, job.seconds)
        for _ in range(job.repetitions):
            sample = engine.run(index, test, stream, job.seconds)
            emit("sample", **asdict(sample))
            if sample.n_tokens < test.n_tokens:
                break
    closed = engine.closed()
    engine.llm.close()
    if job.probe_seconds:
        closed |= _disk(job)
    emit("closed", **closed)


class _Engine:
    """moeoff's class and llama_cpp's as the same few calls."""

    def __init__(self, job: Job):
        options = {"verbose": False} | dict(job.options)
        self.llm: Any
        self._moeoff: Llama | None = None
        if job.engine == MOEOFF:
            from ..engine.llama import Llama

            self.llm = self._moeoff = Llama(job.model, **options)
        else:
            from ..binding import StockLlama
            from ..engine.llama_options import read_options

            self.llm = StockLlama(job.model, **read_options(options))
        self.adds_bos: bool = self.llm.adds_bos()
        if self._moeoff is not None and self._moeoff.stats().arena_bytes >= self._moeoff.expert_buffer.arena_full:
            load_everything(self._moeoff.expert_buffer)

    def opened(self) -> dict[str, Any]:
        if self._moeoff is None:
            return {}
        stats = self._moeoff.stats()
        names = ("arena_bytes", "budget_bytes", "micro_batch", "micro_batch_reason", "strategy", "tier", "max_loss", "memory")
        return {name: getattr(stats, name) for name in names} | {
            "n_lanes": self._moeoff.n_lanes,
            "settings": self._moeoff.settings_summary,
            "resident_share": stats.arena_bytes / max(self._moeoff.expert_buffer.arena_full, 1),
        }

    def _seconds(self) -> float:
        """Inside llama_decode so far."""
        if self._moeoff is not None:
            return self._moeoff.timing.prompt_seconds + self._moeoff.timing.gen_seconds
        return float(self.llm.decode_seconds)

    def run(self, index: int, test: BenchTest, stream: TokenStream, limit: float | None) -> Sample:
        llm, model = self.llm, self._moeoff
        llm.reset()
        if test.depth:
            llm.eval(stream.take(test.depth, first=True))
        prompt = stream.take(test.n_prompt, first=not test.depth)
        single = stream.take(test.n_gen, first=not test.depth and not test.n_prompt)
        if model is not None:
            model.expert_buffer.drain()
            model.reset_stats()
        before, cpu, started, done = self._seconds(), time.process_time(), time.perf_counter(), 0
        if prompt:
            llm.eval(prompt)
            done = len(prompt)
        for token in single:
            if limit is not None and done and time.perf_counter() - started > limit:
                break
            llm.eval([token])
            done += 1
        seconds, cpu = self._seconds() - before, time.process_time() - cpu
        if model is None:
            return Sample(index, done, seconds, cpu_seconds=cpu)
        model.expert_buffer.drain()
        s = model.stats()
        return Sample(index, done, seconds, s.bytes_read, s.stall_seconds, s.demand_hits, s.demand_misses, s.driver_seconds, cpu, s.device_hits)

    def closed(self) -> dict[str, Any]:
        from ..memory import peak_rss

        facts: dict[str, Any] = {"peak_rss_bytes": peak_rss()}
        if self._moeoff is not None:
            stats = self._moeoff.stats()
            names = ("direct_io", "prefetch_on", "prefetch_gain", "events_dropped", "precision_summary", "estimated_loss")
            facts |= {name: getattr(stats, name) for name in names}
        return facts


def load_everything(buffer: ExpertBuffer) -> None:
    """Where all experts fit, what is measured is the time after all have been read, as with any other program that has loaded its weights."""
    n_gates, n_experts = buffer.priorities.shape
    queued = sum(buffer.preload(gate, range(n_experts)) for gate in range(n_gates))
    while buffer.stats().resident_slices < queued:
        buffer.check()
        time.sleep(0.01)


def _disk(job: Job) -> dict[str, Any]:
    """The disk's rate at the size of the model's slices, with as many workers as the model has."""
    from ..budget.disk_probe import N_WORKERS, probe
    from ..budget.footprint import slice_kinds
    from ..gguf.layout import Layout

    layout = Layout.read(job.model)
    file = next(iter(layout.experts.values())).file
    block = max(kind.nbytes for kind in slice_kinds(layout))
    rate = probe(layout.files[file], block, job.probe_seconds, job.options.get("n_lanes") or N_WORKERS)
    return {"disk_bytes_per_second": rate.bytes_per_second}


if __name__ == "__main__":
    main()
