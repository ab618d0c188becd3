"""The numbers of the page, from a recorded session. Knows nothing of how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory import format_size
from ..simulate.read_log import PREFETCH_LEVEL
from ..simulate.simulator import simulate
from .session import Session

_SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)  # of all experts in memory
_TOKENS = 3  # that the timeline shows


@dataclass(frozen=True)
class Part:
    """Of a whole: bytes of memory, say."""

    name: str
    value: float
    text: str


@dataclass(frozen=True)
class LayerUse:
    """One layer, over the single tokens. hit_rate of slices; bytes read for each token, and those of them that were prefetched."""

    layer: int
    hit_rate: float
    nbytes: float
    prefetched: float


@dataclass(frozen=True)
class MoreMemory:
    """What a run would be with another arena.

    Attributes:
        share: of all experts in memory.
        memory: the process's bound, in bytes; 0 where only the experts are bounded.
        mb_per_token, tps: estimated; here is the size that was run.
    """

    share: float
    memory: int
    hit_rate: float
    mb_per_token: float
    tps: float
    here: bool = False


@dataclass(frozen=True)
class Bar:
    """On the timeline: milliseconds from its start."""

    row: int
    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """milliseconds: how long it is. Row 0 is computing, the others are I/O workers."""

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
    """What the process holds or plans for, the largest first."""
    items = sorted(session.decode.memory.items(), key=lambda item: -item[1])
    return [Part(_MEMORY.get(name, name), nbytes, format_size(nbytes)) for name, nbytes in items if nbytes]


def time_parts(session: Session) -> list[Part]:
    """A token's milliseconds: computing, and waiting for bytes."""
    n, seconds = session.n_tokens[1], session.seconds[1]
    stall = min(session.decode.stall_seconds, seconds)
    parts = {"computing": seconds - stall, "waiting for experts": stall}
    return [Part(name, 1e3 * value / n, f"{1e3 * value / n:.1f} ms") for name, value in parts.items()]


def ceiling(session: Session) -> float:
    """The longer one of computing alone and reading alone, over the time that was taken; as `moeoff.bench.row.ceiling_share`."""
    seconds = session.seconds[1]
    rate = max(session.disk.bytes_per_second, session.decode.bytes_read / seconds)
    return max(seconds - session.decode.stall_seconds, session.decode.bytes_read / rate) / seconds


def layers(session: Session) -> list[LayerUse]:
    trace, n = session.trace, session.n_tokens[1]
    events = [event for event in trace.events[session.first_single :] if len(event.ids) == 1]
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
    floor = 2 * max(t.slot_bytes for t in trace.model.tensors)
    rest = session.decode.budget_bytes - session.arena if session.decode.budget_bytes else 0

    def missed(arena: int) -> tuple[float, int]:
        done = simulate(trace, session.policy, arena)
        return done.hit_rate, done.bytes_read

    here = min(session.arena, full)
    hit_here, bytes_here = missed(here)
    out = [MoreMemory(here / full, session.decode.budget_bytes, session.decode.hit_rate, mb, n / seconds, True)]
    for share in _SHARES:
        arena = int(share * full)
        if arena < floor or abs(share - here / full) < 0.02:
            continue
        # with everything in memory the replay still reads each slice once
        hit, nbytes = missed(arena) if share < 1 else (1.0, 0)
        ratio = nbytes / bytes_here if bytes_here else float(share < here / full)
        hit_rate = 1 - (1 - session.decode.hit_rate) * (1 - hit) / max(1 - hit_here, 1e-9) if share < 1 else 1.0
        out.append(MoreMemory(share, rest + arena if rest else 0, min(max(hit_rate, 0.0), 1.0), mb * ratio, n / (seconds - stall + stall * ratio)))
    return sorted(out, key=lambda row: row.share)


def timeline(session: Session) -> Timeline | None:
    """A few tokens in the middle of the run; None if the trace is too short."""
    events = [event for event in session.trace.events[session.first_single :] if len(event.ids) == 1]
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
    free = [0] * session.n_lanes  # when each worker has ended; which one read is not recorded, and any that was free may have
    layer = {i: t.layer for i, t in enumerate(session.trace.model.tensors)}
    for i in inside[np.argsort(start[inside], kind="stable")]:
        row = next((w for w in range(session.n_lanes) if free[w] <= start[i]), int(np.argmin(free)))
        free[row] = int(end[i])
        early = reads["level"][i] == PREFETCH_LEVEL
        text = f"{'prefetch' if early else 'read'}: layer {layer[int(reads['tensor'][i])]}, expert {int(reads['expert'][i])}, {format_size(int(reads['nbytes'][i]))}"
        bars.append(Bar(1 + row, max(_ms(int(start[i]), t0), 0), min(_ms(int(end[i]), t0), _ms(t1, t0)), "prefetch" if early else "read", text))
    return Timeline(_ms(t1, t0), ["computing", *(f"I/O worker {i + 1}" for i in range(session.n_lanes))], bars)


def _ms(t: int, t0: int) -> float:
    return (t - t0) / 1e6
