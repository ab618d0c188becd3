"""The measuring process: a pickled `Job` on stdin, events as JSON lines on stdout.

usage: python -m moeoff.measure.worker < JOB
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import pkgutil
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..budget.dry_load import slice_kinds
from ..engine.stats import COUNTERS
from ..errors import MoeoffError
from ..gguf.model_index import EXPERT_PATTERN, ModelIndex
from ..system.disk import IO_THREADS, DiskRate, probe
from ..system.memory import peak_rss
from .job import MOEOFF, BenchTest, Job, Sample, TokenStream, read_text_or_default

if TYPE_CHECKING:
    from ..engine.buffer import ExpertBuffer
    from ..engine.llama import Llama

Emit = Callable[..., None]
_WARM_UP_TOKENS = 32  # most decoded tokens in a warm-up
_PROGRESS_INTERVAL = 0.5  # seconds


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process handles Ctrl-C
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr

    lock = threading.Lock()

    def emit(kind: str, **fields: Any) -> None:
        with lock:
            lines.write(json.dumps({"kind": kind, **fields}) + "\n")
            lines.flush()

    from ..options import in_flags

    job: Job | None = None
    try:
        job = pickle.load(sys.stdin.buffer)
        assert job is not None
        for path in job.registers:
            sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
            importlib.import_module(os.path.splitext(os.path.basename(path))[0])
        work(job, emit)
    except (MoeoffError, OSError, MemoryError, ValueError, RuntimeError) as error:
        flags = job.flags if job else None
        text = in_flags(error, flags or None) if isinstance(error, MoeoffError) else str(error)
        emit("error", text=text or type(error).__name__)
        sys.exit(1)


def work(job: Job, emit: Emit) -> None:
    """Run a job and emit "opened", "progress", "sample" (repetition), "closed"."""
    started = time.perf_counter()
    engine = _Engine(job)
    opened = engine.facts() | {"n_ctx": engine.llm.n_ctx()}
    emit("opened", seconds=time.perf_counter() - started, **opened)
    stream = TokenStream(engine.llm, read_text_or_default(job.text), engine.llm.adds_bos())
    ended = threading.Event()
    if job.tells:
        threading.Thread(target=_emit_progress, args=(engine, emit, ended), daemon=True).start()
    for index, test in enumerate(job.tests):
        if job.warm_up:
            shorter = BenchTest(test.n_prompt, min(test.n_gen, _WARM_UP_TOKENS))
            engine.run(index, shorter, stream, job.seconds)
        for repetition in range(job.repetitions):
            engine.repetition = repetition
            meter = job.meter if job.engine == MOEOFF and not test.n_prompt else ""
            sample = engine.run(index, test, stream, job.seconds, meter)
            emit("sample", **asdict(sample))
            if sample.n_tokens < test.n_tokens:
                break
        engine.repetition = None
    ended.set()
    closed = engine.facts() | {"peak_rss_bytes": peak_rss()}
    closed |= {} if job.answer is None else {"answer": engine.answered}
    engine.llm.close()
    if job.probe_seconds:
        closed["disk_bytes_per_second"] = disk_rate(
            ModelIndex.read(job.model), closed.get("io_threads", IO_THREADS), job.probe_seconds
        ).bytes_per_second
    emit("closed", **closed)


def _emit_progress(engine: _Engine, emit: Emit, ended: threading.Event) -> None:
    while not ended.wait(_PROGRESS_INTERVAL):
        emit("progress", test=engine.test, repetition=engine.repetition, done=engine.n_done)


class _Engine:
    """A common interface to moeoff.Llama and llama_cpp.Llama."""

    test = 0  # index of the running one
    repetition: int | None = None  # None during the warm-up

    def __init__(self, job: Job):
        options = {"verbose": False} | dict(job.options)
        self._job, self._single = job, 0
        self.answered: list[int] = []  # tokens of the last test, if the job has an answer
        self.llm: Any
        self._moeoff: Llama | None = None
        if job.engine == MOEOFF:
            from ..engine.llama import Llama

            self.llm = self._moeoff = Llama(job.model, **options)
        else:
            from ..llamacpp.llama import StockLlama
            from ..llamacpp.native import TensorOverrides, cpu_buffer_type, use_attention_kernels
            from ..options import llama_keywords

            use_attention_kernels(False)  # a setting of the process
            if n_cpu_moe := options.pop("n_cpu_moe", 0):
                layers = "|".join(map(str, range(n_cpu_moe)))
                options["overrides"] = TensorOverrides(
                    [(EXPERT_PATTERN.replace("[0-9]+", layers), cpu_buffer_type())]
                )
            self.llm = StockLlama(job.model, **llama_keywords(options))
        if (model := self._moeoff) is not None:
            if model.stats().cache_bytes >= model.engine.buffer.arena_full:
                load_everything(model.engine.buffer)

    def facts(self) -> dict[str, Any]:
        """Return `moeoff.Stats` and more as a dict, empty for stock."""
        if self._moeoff is None:
            return {}
        stats, full = self._moeoff.stats(), self._moeoff.engine.buffer.arena_full
        return asdict(stats) | {
            "precision_summary": stats.precision_summary,
            "resident_share": stats.cache_bytes / max(full, 1),
        }

    @property
    def n_done(self) -> int:
        """Number of this repetition's computed tokens."""
        return self._single + (self._moeoff.engine.prompt_tokens if self._moeoff is not None else 0)

    def _seconds(self) -> float:
        if self._moeoff is None:
            return float(self.llm.decode_seconds)
        stats = self._moeoff.stats()
        return stats.prompt_seconds + stats.gen_seconds

    def _answers(self, n: int) -> Iterator[int]:
        """Yield the job's answer, continued by the model to n tokens."""
        answer = self._job.answer or ()
        if n:
            self.answered = []
        for i in range(n):
            self.answered.append(answer[i] if i < len(answer) else int(self.llm.sample(temp=0.0)))
            yield self.answered[-1]

    def run(
        self,
        index: int,
        test: BenchTest,
        stream: TokenStream,
        limit: float | None,
        meter_name: str = "",
    ) -> Sample:
        llm, model, self.test, self._single = self.llm, self._moeoff, index, 0
        if not test.continues:
            llm.reset()
            if test.depth:
                llm.eval(stream.take(test.depth, first=True))
        prompt = stream.take(test.n_prompt, first=not test.depth)
        single: Iterable[int] = (
            stream.take(test.n_gen, first=not test.depth and not test.n_prompt)
            if self._job.answer is None
            else self._answers(test.n_gen)
        )
        if model is not None:
            model.engine.buffer.drain()
            model.reset_stats()
        meter = pkgutil.resolve_name(meter_name)(model) if meter_name else None
        before, cpu, faults = self._seconds(), time.process_time(), _page_faults()
        started, n = time.perf_counter(), 0
        if prompt:
            llm.eval(prompt)
            n = len(prompt)
        for token in single:
            if limit is not None and n and time.perf_counter() - started > limit:
                break
            if meter is not None:
                meter.token(lambda: llm.eval([token]))  # noqa: B023  # called at once
            else:
                llm.eval([token])
            n, self._single = n + 1, self._single + 1
        seconds, cpu = self._seconds() - before, time.process_time() - cpu
        faults = _page_faults() - faults
        parts = meter.end(seconds) if meter is not None else {}
        if model is not None:
            model.engine.buffer.drain()
        facts = self.facts()
        counters = {name: facts[name] for name in COUNTERS if name in facts}
        return Sample(index, n, seconds, cpu, faults, counters, parts)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def load_everything(buffer: ExpertBuffer) -> None:
    """Load all experts, as other programs do. A token repeats a failed read."""
    n_gates, n_experts = buffer.priorities.shape
    failed = buffer.stats().read_errors
    queued = sum(buffer.preload(gate, range(n_experts)) for gate in range(n_gates))
    while (stats := buffer.stats()).resident_slices + stats.read_errors - failed < queued:
        buffer.check()
        time.sleep(0.01)


def disk_rate(model_index: ModelIndex, io_threads: int, seconds: float) -> DiskRate:
    """Measure the disk with reads of a slice's size on `io_threads` threads."""
    path = model_index.files[next(iter(model_index.experts.values())).file]
    return probe(path, max(k.nbytes for k in slice_kinds(model_index)), seconds, io_threads)


if __name__ == "__main__":
    main()
