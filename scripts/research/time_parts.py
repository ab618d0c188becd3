"""Where the time of single tokens goes, from counters: the store's of waiting, the log
of reads, the kernel's of each thread, and clocks around the decode.

A compute thread's time inside llama_decode is in one of these:

- it runs, by the kernel's count (`/proc/self/task/*/schedstat`): it computes, or spins
  at a barrier of OpenMP, which nothing counts;
- it waits for slices (`moeoff_get_gate_stats`). Which kind of request it waited for is
  told by the log of reads: what compute was waiting for has the level demand, and was a
  prefetch if it was queued before the layer's router had selected;
- it is ready to run, and no core is free (schedstat);
- it sleeps elsewhere: at barriers and for locks. That is what is left. Waiting for
  slices ends when the thread runs again, so that time without a core behind it counts
  there, too, and what is left may lie a little below zero on a busy machine.

Each is the mean over the compute threads. Python and sampling come on top, outside
llama_decode. Threads are told by their names, and what compute threads are by having
run.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moeoff.errors import MoeoffError
from moeoff.routing.trace import DEMAND_LEVEL, GATE_LEVEL

if TYPE_CHECKING:
    from moeoff.engine.llama import Llama
    from moeoff.measure.job import Sample
    from moeoff.routing.event import GateEvent

IO_THREAD, DRIVER = "moeoff-io", "moeoff-driver"  # names of native threads
_TASKS = "/proc/self/task"
_TAKE_READS = 16  # tokens: the log keeps 65,536 reads
_RAN = 0.01  # of the time, that a compute thread runs at least

WAITED = {
    "gate": "the router's choice",
    "prefetch": "a prefetch that was late",
    "both": "both in one layer",
    "other": "none of that layer",
}
READS = {
    "waited_gate": "router's choice, compute waited",
    "waited_prefetch": "prefetch, compute waited",
    "in_time": "router's choice, in time",
    "prefetched": "prefetch, in time or not used",
    "dropped": "given up",
}


class ThreadTimes(NamedTuple):
    """The times of one thread so far in seconds, and its number of voluntary sleeps."""

    name: str
    running: float
    core_wait: float
    system: float
    switches: int


def threads() -> dict[int, ThreadTimes]:
    """Those of this process.

    Raises:
        MoeoffError: the kernel does not tell.
    """
    tick, times = os.sysconf("SC_CLK_TCK"), {}
    for tid in map(int, os.listdir(_TASKS)):
        try:
            folder = f"{_TASKS}/{tid}"
            with (
                open(f"{folder}/schedstat") as schedstat,
                open(f"{folder}/stat") as stat,
                open(f"{folder}/status") as status,
            ):
                running, core_wait, _ = map(int, schedstat.read().split())
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
                switches = next(
                    int(line.split()[1])
                    for line in status
                    if line.startswith("voluntary_ctxt_switches")
                )
        except FileNotFoundError:  # it has ended, or this kernel has no such file
            continue
        times[tid] = ThreadTimes(
            name, running / 1e9, core_wait / 1e9, int(rest.split()[12]) / tick, switches
        )
    if not times:
        raise MoeoffError(
            "this system does not tell how long each thread has run: where the time goes is"
            " measured on Linux"
        )
    return times


class TimeMeter:
    """Meters single tokens of a model, from here to `end()`.

    Args:
        llm: just computed something, so that its threads are there.
    """

    def __init__(self, llm: Llama):
        self._llm, self._buffer = llm, llm.engine.buffer
        self._gates = np.array([tensor.gate for tensor in self._buffer.tensors])
        self._events: list[tuple[int, int]] = []  # when, and of which gate
        self._starts: list[int] = []
        self._stalls = [self._buffer.gate_stats()["stall_ns"]]
        self._reads: list[np.ndarray] = []
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._main_running = 0.0
        self._unwrapped = llm.engine.begin, llm.engine.end
        self._buffer.log_reads()
        self._buffer.take_reads()
        llm.engine.set_gate_callback(self._on_gate)
        vars(llm.engine).update(begin=self._begin, end=self._end)  # of this one object
        self._before = threads()

    def _on_gate(self, event: GateEvent) -> None:
        self._events.append((event.t_ns, event.gate))

    def _begin(self, *args: Any) -> None:
        self._unwrapped[0](*args)
        self._main_running -= time.thread_time()

    def _end(self, *args: Any) -> None:
        self._main_running += time.thread_time()
        self._unwrapped[1](*args)

    def token(self, compute: Callable[[], None]) -> None:
        """Computes one, and samples the next from its logits."""
        self._starts.append(time.monotonic_ns())
        started = time.perf_counter()
        compute()
        computed = time.perf_counter()
        self._llm.sample()
        self._parts["evaluated"] += computed - started
        self._parts["sampling"] += time.perf_counter() - computed
        self._stalls.append(self._buffer.gate_stats()["stall_ns"])
        if len(self._starts) % _TAKE_READS == 0:
            self._reads.append(self._buffer.take_reads())

    def end(self, seconds: float) -> dict[str, float]:
        """Sums over the tokens, in seconds, bytes and numbers.

        Args:
            seconds: inside llama_decode.
        """
        after, engine = threads(), self._llm.engine
        for name in ("begin", "end"):
            del vars(engine)[name]
        self._buffer.drain()
        engine.set_gate_callback(None)
        self._reads.append(self._buffer.take_reads())
        self._buffer.log_reads(False)
        out = dict(self._parts) | {
            "decoding": seconds,
            "python": self._parts["evaluated"] - seconds,
        }
        return out | self._of_threads(after, seconds) | self._of_reads()

    def _of_threads(self, after: Mapping[int, ThreadTimes], seconds: float) -> dict[str, float]:
        main, out = self._llm.lock.thread.native_id, defaultdict[str, float](float)
        zero = ThreadTimes("", 0.0, 0.0, 0.0, 0)
        for tid, now in after.items():
            if tid == os.getpid() != main:  # who waits for the model's thread
                continue
            before = self._before.get(tid, zero)
            running = self._main_running if tid == main else now.running - before.running
            if now.name == IO_THREAD:
                role = "io_"
            elif now.name == DRIVER:
                role = "driver_"
            elif tid == main or running > _RAN * seconds:
                role = ""
            else:
                continue
            out[f"{role}threads"] += 1
            out[f"{role}running"] += running
            out[f"{role}core_wait"] += now.core_wait - before.core_wait
            out[f"{role}system"] += now.system - before.system
            out[f"{role}switches"] += now.switches - before.switches
        for name in ("running", "core_wait", "system"):
            out[name] /= out["threads"]
        return dict(out)

    def _of_reads(self) -> dict[str, float]:
        out: defaultdict[str, float] = defaultdict(float)
        reads = np.concatenate(self._reads)
        selected = {(bisect_right(self._starts, t), gate): t for t, gate in self._events}
        tokens, gates = (
            np.searchsorted(self._starts, reads["t_done"], "right"),
            self._gates[reads["tensor"]],
        )
        waited: dict[tuple[int, int], set[str]] = {}
        for read, token, gate in zip(reads, tokens.tolist(), gates.tolist()):
            if read["result"] != 0:
                kind = "dropped"
            elif read["level"] == DEMAND_LEVEL:
                asked = "prefetch" if read["t_queued"] < selected.get((token, gate), 0) else "gate"
                waited.setdefault((token, gate), set()).add(asked)
                kind = f"waited_{asked}"
            else:
                kind = "in_time" if read["level"] == GATE_LEVEL else "prefetched"
            out[f"reads_{kind}"] += 1
            out[f"bytes_{kind}"] += int(read["nbytes"])
            out[f"queued_{kind}"] += (int(read["t_start"]) - int(read["t_queued"])) / 1e9
            out[f"reading_{kind}"] += (int(read["t_done"]) - int(read["t_start"])) / 1e9
        for token, gate in zip(
            *np.nonzero(stalls := np.diff(np.array(self._stalls, np.int64), axis=0))
        ):
            kinds = waited.get((int(token) + 1, int(gate)), set())
            out[f"stall_{'both' if len(kinds) > 1 else next(iter(kinds), 'other')}"] += (
                int(stalls[token, gate]) / 1e9
            )
        order = np.argsort(reads["t_start"])
        begins, ends = reads["t_start"][order], np.maximum.accumulate(reads["t_done"][order])
        gaps = np.maximum(begins[1:] - ends[:-1], 0).sum() if len(reads) else 0
        out["disk_busy"] = (int(ends[-1]) - int(begins[0]) - int(gaps)) / 1e9 if len(reads) else 0.0
        return dict(out)


def _per_token(samples: Sequence[Sample]) -> defaultdict[str, float]:
    n, out = sum(s.n_tokens for s in samples), defaultdict[str, float](float)
    for sample in samples:
        for name, value in sample.parts.items():
            out[name] += value / n
    for name in ("threads", "io_threads", "driver_threads"):
        out[name] *= n / len(samples)
    return out


def token_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Milliseconds of one token by what a compute thread did, Python and sampling;
    their sum is the token's time.
    """
    p = _per_token(samples)
    out = {
        "running: computing, and spinning at barriers": p["running"] - p["system"],
        "running: in the kernel": p["system"],
    }
    out |= {f"waiting for experts: {text}": p[f"stall_{kind}"] for kind, text in WAITED.items()}
    out["waiting for a core"] = p["core_wait"]
    out["asleep at barriers and for locks"] = p["decoding"] - sum(out.values())
    out |= {"Python around the decode": p["python"], "sampling": p["sampling"]}
    return {name: 1e3 * seconds for name, seconds in out.items()}


class ReadsOfKind(NamedTuple):
    """For each token: how many, 10^6 bytes, and the mean milliseconds of one in the
    queue and on the disk.
    """

    n: float
    mb: float
    queued: float
    reading: float


def read_parts(samples: Sequence[Sample]) -> dict[str, ReadsOfKind]:
    """Reads of one token, by kind; those that there are."""
    p, out = _per_token(samples), {}
    for kind, text in READS.items():
        if n := p[f"reads_{kind}"]:
            out[text] = ReadsOfKind(
                n,
                p[f"bytes_{kind}"] / 1e6,
                1e3 * p[f"queued_{kind}"] / n,
                1e3 * p[f"reading_{kind}"] / n,
            )
    return out


def other_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Return activity beside computing for one token: milliseconds, and sleeps."""
    p = _per_token(samples)
    return {
        "the disk is busy": 1e3 * p["disk_busy"],
        "I/O threads run": 1e3 * p["io_running"],
        "the driver thread runs": 1e3 * p["driver_running"],
        "sleeps of compute threads": p["switches"],
        "sleeps of I/O threads": p["io_switches"],
    }


class Ceiling(NamedTuple):
    """The bounds of a run's speed in tokens per second, by the speed in memory and by
    the disk's rate over the missed bytes; and its own speed.
    """

    in_memory: float
    disk: float
    tps: float

    @property
    def reached(self) -> float:
        return self.tps / min(self.in_memory, self.disk)

    @classmethod
    def of(cls, samples: Sequence[Sample], in_memory: float, disk: float) -> Ceiling:
        """Args:
        in_memory: tokens per second with all experts in memory.
        disk: bytes per second that it gives when it is asked for nothing else.
        """
        n, seconds = sum(s.n_tokens for s in samples), sum(s.seconds for s in samples)
        nbytes = sum(s.counters["bytes_read"] for s in samples) / n
        return cls(in_memory, disk / nbytes if nbytes else float("inf"), n / seconds)
