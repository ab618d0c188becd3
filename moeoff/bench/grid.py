"""Every combination of the values that were given, one process after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..gguf.layout import Layout
from ..machine import n_cores
from ..memory import cgroup_limit, format_size, parse_size
from .cgroup import unavailable
from .job import MOEOFF, STOCK, BenchTest, Job, Measurement
from .process import KILLED_TEXT, Listener, drop_from_page_cache, measure
from .row import Row, rows

# of the options, those that llama_cpp.Llama has, too
_SHARED = ("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "n_ctx")
STOCK_SECONDS = 300.0  # of one test: where it thrashes, a token takes seconds; less would leave it fewer tokens than the others
_STOCK_TIMEOUT = 900.0
_CTX_STEP = 256
_OWN_LIMIT = 1.1  # times the wanted one: a cgroup that we are in already, and that is as tight


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        model: path of the GGUF.
        tests: of each configuration.
        axes: options of `moeoff.Llama`, with all values of each; memory as people write it, or None.
        options: the others, one value each.
        compare_stock: stock llama.cpp, too, at each memory; both in a cgroup with that limit where one can be made.
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

    @property
    def n_ctx(self) -> int:
        """Tokens that the largest test needs, as llama-bench sizes its context."""
        most = max(test.depth + test.n_tokens for test in self.tests)
        return -(-most // _CTX_STEP) * _CTX_STEP

    def jobs(self) -> list[tuple[Job, int, str]]:
        """Each with its bound of memory (0: none) and a note about its surroundings."""
        expert_bytes = Layout.read(self.model).expert_bytes
        combinations = [dict(zip(self.axes, values)) for values in itertools.product(*self.axes.values())]
        out: list[tuple[Job, int, str]] = []
        stock: dict[str, tuple[Job, int, str]] = {}
        for chosen in combinations:
            options = {name: value for name, value in (dict(self.options) | chosen).items() if value is not None}
            options.setdefault("n_ctx", self.n_ctx)
            memory = parse_size(options["memory"]) if "memory" in options else 0
            if memory:
                options["memory"] = memory
            limit, note = _limit(memory) if self.compare_stock else (None, "")
            job = Job(self.model, MOEOFF, options, self.tests, self.repetitions, self.warm_up, self.text, seconds=self.seconds, limit_bytes=limit)
            out.append((job, memory, note))
            if self.compare_stock:
                theirs = {"n_threads": n_cores(), **{name: options[name] for name in _SHARED if name in options}}
                theirs.setdefault("n_threads_batch", theirs["n_threads"])  # llama_cpp would take half of the cores
                slow = bool(memory) and memory < expert_bytes
                stock.setdefault(
                    f"{memory} {theirs}",
                    (replace(job, engine=STOCK, options=theirs, warm_up=self.warm_up and not slow, seconds=STOCK_SECONDS), memory, note),
                )
        return out + list(stock.values())

    def run(self, listener: Callable[[Job], Listener | None] | None = None) -> Iterator[list[Row]]:
        """The rows of one job after the other.

        Args:
            listener: asked, before each job, for someone to tell of it.
        """
        for job, memory, note in self.jobs():
            if job.engine == MOEOFF:
                yield rows(self._measure(job, listener), memory, note)
                continue
            for extra in (True, False):  # with its repacked kernels it needs the weights twice while it loads, and may be killed for that
                done = self._measure(replace(job, options={**job.options, "use_extra_bufts": extra}), listener, _STOCK_TIMEOUT)
                if done.error != KILLED_TEXT:
                    break
                note += (", " if note else "") + "repacking was killed for memory"
            yield rows(done, memory, note)

    def _measure(self, job: Job, listener: Callable[[Job], Listener | None] | None, timeout: float | None = None) -> Measurement:
        if self.compare_stock:
            for path in Layout.read(job.model).files:
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
