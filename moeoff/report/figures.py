"""The numbers of the page: one run whose every gate event and read is recorded, and what follows from them. Knows nothing of how they are drawn."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..bench.job import Sample, TokenStream, read_text, usual_text
from ..bench.rows import ceiling_share
from ..bench.worker import disk_rate
from ..budget.disk_probe import DiskRate
from ..budget.dry_load import context_for
from ..engine.llama import Llama
from ..engine.stats import Stats
from ..gguf.model_index import ModelIndex
from ..memory import MIB, format_size, peak_rss
from ..simulate.simulator import simulate
from ..trace import PREFETCH_LEVEL, Trace

N_PROMPT, N_DECODE = 128, 96
GIB = 1 << 30
_PROBE_SECONDS = 1.0


@dataclass(frozen=True)
class Session:
    """Everything that was recorded of a run.

    Attributes:
        prompt, decode: statistics of the two parts.
        trace: of all events; those of the single tokens begin at `first_single`.
        reads: [n] `moeoff.trace.READ` of the single tokens.
        disk: measured right afterwards.
        n_ctx: tokens of the context, and
        needed: the smallest budget at it.
    """

    model_index: ModelIndex
    prompt: Stats
    decode: Stats
    n_tokens: tuple[int, int]
    trace: Trace
    first_single: int
    reads: np.ndarray
    disk: DiskRate
    io_threads: int
    policy: str
    peak_rss: int
    n_ctx: int
    needed: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Inside llama_decode: of the prompt, and of the single tokens."""
        return self.prompt.prompt_seconds, self.decode.gen_seconds

    @property
    def arena(self) -> int:
        return self.decode.arena_bytes


def record(
    model: str, *, memory: str | int | None = None, text: str | None = None, n_prompt: int = N_PROMPT, n_decode: int = N_DECODE,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Session:  # fmt: skip
    """Runs the model.

    Args:
        text: file whose tokens are fed; None: the usual text of measurements.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    model_index = ModelIndex.read(model)
    model_index.require_text()
    words = None if text is None else read_text(text)
    options = {"n_ctx": context_for(model_index, n_prompt + n_decode)} | options
    with tempfile.TemporaryDirectory(prefix="moeoff-report-") as folder:
        path = os.path.join(folder, "session.trace")
        with Llama(model, memory=memory, trace=path, **options) as llm:
            # the usual text takes memory to be read, and is nobody's mistake: what the model needs is planned without it
            stream = TokenStream(llm, words or usual_text(), llm.adds_bos())
            tokens = stream.take(n_prompt + n_decode, first=True)
            llm.eval(tokens[:n_prompt])
            llm.engine.buffer.drain()
            prompt = llm.stats()
            llm.reset_stats()
            for i, token in enumerate(tokens[n_prompt:], 1):
                llm.eval([token])
                if progress:
                    progress("single tokens", i, n_decode)
            llm.engine.buffer.drain()
            decode = llm.stats()
            policy = llm.engine.config.strategy.policy
            io_threads, policy_name, peak = llm.engine.io_threads.n, "lru" if policy is None else policy.name, peak_rss()
            n_ctx, needed = llm.n_ctx(), llm.engine.planned.floor
        trace = Trace.read(path)
    disk = disk_rate(model_index, io_threads, _PROBE_SECONDS)
    first = next((i for i, event in enumerate(trace.events) if event.decode and event.gate == 0), len(trace.events))
    start = trace.events[first].t_ns if first < len(trace.events) else 0
    reads = trace.reads[(trace.reads["result"] == 0) & (trace.reads["t_queued"] >= start)]
    return Session(model_index, prompt, decode, (n_prompt, n_decode), trace, first, reads, disk, io_threads, policy_name, peak, n_ctx, needed)


_SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)  # of all experts in memory
_TOKENS = 3  # that the timeline shows


class Part(NamedTuple):
    """A part of a whole: of memory, say."""

    name: str
    value: float
    text: str


class LayerUse(NamedTuple):
    """One layer, over the single tokens: hit rate of slices; bytes read for each token, and those of them that were prefetched."""

    layer: int
    hit_rate: float
    nbytes: float
    prefetched: float


class MoreMemory(NamedTuple):
    """A run as it would be with this share of all experts in memory, or (here) was; the process's bound in bytes, 0 where only the experts are bounded."""

    share: float
    memory: int
    hit_rate: float
    mb_per_token: float
    tps: float
    here: bool = False


class Bar(NamedTuple):
    """On the timeline, in milliseconds from its start; row 0 is computing, the others are I/O threads."""

    row: int
    start: float
    end: float
    kind: str
    text: str


class Timeline(NamedTuple):
    milliseconds: float
    rows: list[str]
    bars: list[Bar]


_MEMORY = {
    "experts": "experts",
    "weights": "other weights",
    "token_embedding": "token embedding",
    "state": "KV cache and state",
    "compute_buffers": "compute buffers",
    "work_area": "work area",
    "outputs": "outputs",
    "python": "Python and libraries",
    "reserve": "reserve",
}


def memory_parts(session: Session) -> list[Part]:
    """Memory that the process holds or plans for, the largest first."""
    items = sorted(session.decode.memory.items(), key=lambda item: -item[1])
    return [Part(_MEMORY.get(name, name), nbytes, format_size(nbytes)) for name, nbytes in items if nbytes]


def time_parts(session: Session) -> list[Part]:
    """A token's milliseconds: computing, and waiting for bytes."""
    n, seconds = session.n_tokens[1], session.seconds[1]
    stall = min(session.decode.stall_seconds, seconds)
    return [Part(name, ms, f"{ms:.1f} ms") for name, ms in (("computing", 1e3 * (seconds - stall) / n), ("waiting for experts", 1e3 * stall / n))]


def ceiling(session: Session) -> float:
    """`moeoff.bench.rows.ceiling_share` of the single tokens."""
    counters = {"bytes_read": session.decode.bytes_read, "stall_seconds": session.decode.stall_seconds}
    return ceiling_share([Sample(0, session.n_tokens[1], session.seconds[1], counters=counters)], session.disk.bytes_per_second)


def layers(session: Session) -> list[LayerUse]:
    trace, n = session.trace, session.n_tokens[1]
    events = [event for event in trace.events[session.first_single :] if event.decode]
    hits, misses = np.zeros(trace.model.n_gates), np.zeros(trace.model.n_gates)
    for event in events:
        hits[event.gate] += event.n_hit
        misses[event.gate] += event.n_miss
    gates = np.array([t.gate for t in trace.model.tensors])
    of_read = gates[session.reads["tensor"]]
    nbytes = np.bincount(of_read, session.reads["nbytes"], trace.model.n_gates)
    early = session.reads["level"] == PREFETCH_LEVEL
    prefetched = np.bincount(of_read[early], session.reads["nbytes"][early], trace.model.n_gates)
    layer = {t.gate: t.layer for t in trace.model.tensors}
    uses = np.maximum(hits + misses, 1)
    return [LayerUse(layer[g], float(hits[g] / uses[g]), float(nbytes[g] / n), float(prefetched[g] / n)) for g in range(trace.model.n_gates)]


def more_memory(session: Session) -> list[MoreMemory]:
    """By replaying the recorded selections through the policy with other arenas.

    Bytes are those that were read here, times what the replay says of the one size against the other; the time is computing, which
    stays, and waiting, which shrinks as the bytes do.
    """
    trace, full = session.trace, session.trace.model.full_bytes
    n, seconds = session.n_tokens[1], session.seconds[1]
    stall, mb = session.decode.stall_seconds, session.decode.bytes_read / 1e6 / n
    floor = trace.model.arena_floor
    rest = session.decode.budget_bytes - session.arena if session.decode.budget_bytes else 0

    here = min(session.arena, full)
    replayed = simulate(trace, session.policy, here)
    out = [MoreMemory(here / full, session.decode.budget_bytes, session.decode.hit_rate, mb, n / seconds, True)]
    for share in _SHARES:
        arena = int(share * full)
        if arena < floor or (rest and rest + arena < session.needed) or abs(share - here / full) < 0.02:
            continue
        # with everything in memory a replay would still read each slice once
        ratio, hit_rate = 0.0, 1.0
        if share < 1:
            done = simulate(trace, session.policy, arena)
            ratio = done.bytes_read / replayed.bytes_read if replayed.bytes_read else float(share < here / full)
            hit_rate = 1 - (1 - session.decode.hit_rate) * (1 - done.hit_rate) / max(1 - replayed.hit_rate, 1e-9)
        out.append(MoreMemory(share, rest + arena if rest else 0, min(max(hit_rate, 0.0), 1.0), mb * ratio, n / (seconds - stall + stall * ratio)))
    return sorted(out, key=lambda row: row.share)


_WORTH = 1.15  # times the speed that more memory is advised for


def advice(rows: list[MoreMemory]) -> str:
    """What to do, in one sentence: the least memory that is worth it; or that more gives little."""
    here = next(row for row in rows if row.here)
    best = max(row.tps for row in rows)
    if best < _WORTH * here.tps:
        return "More memory would give little: it is computing that takes the time."
    row = next(row for row in rows if row.tps >= min(1.5 * here.tps, 0.95 * best) and row.share > here.share)
    if row.memory:
        return f"With --memory {_typed(row.memory)} instead of {_typed(here.memory)}: about {row.tps / here.tps:.1f} x as fast."
    return f"With {row.share:.0%} of the experts in memory instead of {here.share:.0%}: about {row.tps / here.tps:.1f} x as fast."


def _typed(nbytes: int) -> str:
    """A budget as people type it, at least as large: 8G, 6.5G, 760M."""
    return f"{math.ceil(nbytes / (GIB / 10)) / 10:g}G" if nbytes >= GIB else f"{-(-nbytes // MIB)}M"


def timeline(session: Session) -> Timeline | None:
    """A few tokens in the middle of the run; None if the trace is too short."""
    events = [event for event in session.trace.events[session.first_single :] if event.decode]
    starts = [i for i, event in enumerate(events) if event.gate == 0]
    if len(starts) < 2 * _TOKENS:
        return None
    first = starts[len(starts) // 2]
    shown = events[first : starts[min(len(starts) // 2 + _TOKENS, len(starts) - 1)] + 1]
    t0, t1 = shown[0].t_ns, shown[-1].t_ns
    bars = []
    for event, following in zip(shown, shown[1:]):
        text = f"layer {event.layer}: {event.n_hit} slices in memory, {event.n_miss} missing"
        bars.append(Bar(0, _ms(event.t_ns, t0), _ms(following.t_ns, t0), "hit" if not event.n_miss else "miss", text))
    reads = session.reads
    start = reads["t_queued"] + reads["wait_us"].astype(np.int64) * 1000
    end = start + reads["read_us"].astype(np.int64) * 1000
    inside = np.flatnonzero((end > t0) & (start < t1))
    free = [0] * session.io_threads  # when each worker has ended; which one read is not recorded, and any that was free may have
    layer = {i: t.layer for i, t in enumerate(session.trace.model.tensors)}
    for i in inside[np.argsort(start[inside], kind="stable")]:
        row = next((w for w in range(session.io_threads) if free[w] <= start[i]), int(np.argmin(free)))
        free[row] = int(end[i])
        early = reads["level"][i] == PREFETCH_LEVEL
        text = f"{'prefetch' if early else 'read'}: layer {layer[int(reads['tensor'][i])]}, expert {int(reads['expert'][i])}, {format_size(int(reads['nbytes'][i]))}"
        bars.append(Bar(1 + row, max(_ms(int(start[i]), t0), 0), min(_ms(int(end[i]), t0), _ms(t1, t0)), "prefetch" if early else "read", text))
    n_rows = max(bar.row for bar in bars)
    return Timeline(_ms(t1, t0), ["computing", *(f"I/O thread {i + 1}" for i in range(n_rows))], bars)


def _ms(t: int, t0: int) -> float:
    return (t - t0) / 1e6
