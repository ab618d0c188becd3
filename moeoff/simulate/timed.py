"""A trace replayed against a clock: one disk, one computation, and an expert buffer that both work on.

What `simulator` leaves out: reads take time, a prefetch may be too late, and what was read for nothing has delayed what was needed.
`TimedBuffer` is as much of an expert buffer as a policy and a prefetcher ask of one, so that the live objects run on it unchanged; it
knows neither. Its rules are the native store's: demand before prefetches, of a prompt's demand that of the most tokens first, a
prefetch that is not chosen is given up unless it is being read, and what is expected is evicted last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import BudgetError
from ..gate_event import GateEvent
from .trace import Model

ALL_MATRICES = 15
READ_FIELDS = np.dtype([(name, np.int64) for name in ("t_queued", "t_start", "t_done", "tensor", "expert", "level", "result")])
_ABSENT, _QUEUED, _LOADING, _READY = range(4)
_PREFETCH, _DEMAND = 0, 2


@dataclass(frozen=True)
class TimedResult:
    """What a replay took. Times in nanoseconds of the simulated clock, counts of slices.

    Attributes:
        stall_ns: in which nothing was computed.
        useful: of those prefetched, how many a router then selected; in_time: and had been read by then.
    """

    n_tokens: int
    ns: int
    stall_ns: int
    hits: int
    misses: int
    reads: int
    prefetched: int
    useful: int
    in_time: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


class TimedBuffer:
    """Slices in an arena, read one after the other.

    Args:
        model: every gate must have the same matrices.
        arena_bytes: of the arena.
        read_ns: that the disk takes for a slice, or [n_tensors] for one of each tensor.
        gate_ns: from one router's selection to the next one's, if nothing has to be waited for.
        keep, serial: as a strategy's: False drops slices after their use; True computes nothing of a gate before all of it is there.
        expert_share: of that, what computing the experts takes; the rest, attention above all, comes after it and needs no slice.

    Raises:
        BudgetError: the arena is too small for what one gate selects.
    """

    def __init__(self, model: Model, arena_bytes: int, read_ns: int | np.ndarray, gate_ns: int, expert_share: float = 0.5, *,
                 keep: bool = True, serial: bool = False):  # fmt: skip
        self._model, self._gate_ns = model, gate_ns
        self._keep, self._serial = keep, serial
        self._experts_ns = int(expert_share * gate_ns)
        self._width = model.n_experts
        self.priorities = np.zeros((model.n_gates, model.n_experts), np.float32)
        self.tensors = [SimpleNamespace(gate=t.gate, layer=t.layer, matrix=t.matrix, ne=(1, 1, t.n_experts), nbytes=t.nbytes) for t in model.tensors]
        self.arena_full = model.full_bytes
        self._arena_bytes = arena_bytes
        self._slot = np.repeat([t.slot_bytes for t in model.tensors], self._width)
        self._read_ns = np.repeat(np.broadcast_to(read_ns, len(model.tensors)), self._width)
        self._of_gate = [sorted((i for i, t in enumerate(model.tensors) if t.gate == g), key=lambda i: model.tensors[i].matrix) for g in range(model.n_gates)]
        if arena_bytes < 2 * model.n_used * max(sum(model.tensors[i].slot_bytes for i in tensors) for tensors in self._of_gate):
            raise BudgetError(f"an arena of {arena_bytes} bytes holds fewer experts than a gate selects")
        n = len(model.tensors) * self._width
        self._gate = np.repeat([t.gate for t in model.tensors], self._width)
        self._state = np.full(n, _ABSENT, np.int8)
        self._last_use = np.zeros(n, np.int64)
        self._expected = np.zeros(n, bool)
        self._prefetched = np.zeros(n, bool)
        self._wanted = np.zeros(n, bool)  # by the gate that computes
        self._queued_at = np.zeros(n, np.int64)
        self._queues: dict[int, deque[int]] = {_DEMAND: deque(), _PREFETCH: deque()}
        self._loading: tuple[int, int, int, int] | None = None  # slice, start, end, level
        self._clock = 0
        self.now = self._idle_since = 0
        self.counts = dict.fromkeys(("hits", "misses", "reads", "prefetched", "useful", "in_time", "stall_ns", "busy_ns"), 0)
        self._log: list[tuple[int, ...]] = []
        self._logs = False
        self._callback: Callable[[GateEvent], None] | None = None

    # --- what policies and prefetchers ask ---

    running = True
    low_arena_full = 0

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        self._callback = callback

    def log_reads(self, on: bool = True) -> None:
        self._logs = on

    def publish(self) -> None:
        """The table is read as it is."""

    def drain(self) -> None:
        """Events are delivered at once."""

    def stats(self) -> Any:
        c = self.counts
        return SimpleNamespace(
            io_worker_busy_ns=c["busy_ns"], reads=c["reads"], arena_bytes=self._arena_bytes, low_arena_bytes=0, prefetch_issued=c["prefetched"]
        )

    def residency(self, *, low: bool = False) -> np.ndarray:
        out = np.zeros(self.priorities.shape, np.uint8)
        ready = (self._state == _READY).reshape(-1, self._width)
        for i, t in enumerate(self._model.tensors):
            out[t.gate] |= ready[i].astype(np.uint8) << t.matrix
        return out

    def take_reads(self) -> np.ndarray:
        log, self._log = self._log, []
        return np.array(log, READ_FIELDS)

    def prefetch(
        self, gate: int, experts: Sequence[int], n_read: int | None = None, matrices: int = ALL_MATRICES, *, low: bool = False, limit: int = -1
    ) -> int:
        n_queued, n_read = 0, len(experts) if n_read is None else n_read
        slices = [(place, i * self._width + e) for i in self._of_gate[gate] for place, e in enumerate(experts)]
        for _, s in slices:
            self._expected[s] |= self._state[s] != _ABSENT and not self._wanted[s]
        for place, s in slices:
            if self._state[s] == _ABSENT and place < n_read and n_queued != limit:
                self._expected[s] = self._prefetched[s] = True
                self._queue(s, _PREFETCH)
                n_queued += 1
        self.counts["prefetched"] += n_queued
        self._start()
        return n_queued

    # --- the clock ---

    def select(self, event: GateEvent) -> None:
        """A router selects, now: demand is queued, the event gets its hits, misses and time."""
        gate, self._clock = event.gate, self._clock + 1
        chosen = event.demand().tolist()
        want = [i * self._width + e for i in self._of_gate[gate] for e in chosen]
        ready = self._state[want] == _READY
        hits = int(ready.sum())
        self.counts["hits"] += hits
        self.counts["misses"] += len(want) - hits
        self.counts["useful"] += int(self._prefetched[want].sum())
        self.counts["in_time"] += int(self._prefetched[want][ready].sum())
        event.n_hit, event.n_miss, event.t_ns = hits, len(want) - hits, self.now
        self._last_use[want] = self._clock
        self._wanted[want] = True
        self._prefetched[want] = self._expected[want] = False
        for s in np.flatnonzero(self._expected & (self._gate == gate)).tolist():  # not chosen
            if self._state[s] == _QUEUED:
                self._queues[_PREFETCH].remove(s)
                self._state[s] = _ABSENT
            self._expected[s] = self._prefetched[s] = False
        for s in want:
            if self._state[s] == _QUEUED:
                self._queues[_PREFETCH].remove(s)
                self._state[s] = _ABSENT
            if self._state[s] == _ABSENT:
                self._queue(s, _DEMAND)
        self._want = want
        self._start()

    def compute(self, event: GateEvent) -> None:
        """From a router's selection until the gate is done: at once what is there, the rest as it comes; then its slices may be evicted."""
        self.select(event)
        if self._callback is not None:
            self._callback(event)
        began = last = self.now
        end = began + self._experts_ns
        while any(self._state[s] != _READY for s in self._want):
            last = self._finish_read()
        if last > began:  # what comes last is computed after it has come
            end = max(end, last + (self._experts_ns if self._serial else self._experts_ns // len(self._want)))
        self.counts["stall_ns"] += end - began - self._experts_ns
        self._wanted[self._want] = False
        if not self._keep:
            self._state[self._want] = _ABSENT
        self._until(end + self._gate_ns - self._experts_ns)

    def _until(self, t: int) -> None:
        while self._loading is not None and self._loading[2] <= t:
            self._finish_read()
        self.now = t

    def _finish_read(self) -> int:
        if self._loading is None:
            raise AssertionError("a slice is waited for that nobody reads")
        s, start, end, level = self._loading
        self._loading = None
        self.now = max(self.now, end)
        self.counts["reads"] += 1
        self.counts["busy_ns"] += end - start
        if self._logs:
            self._log.append((int(self._queued_at[s]), start, end, s // self._width, s % self._width, level, 0))
        self._state[s] = _READY
        self._idle_since = end
        self._start()
        return end

    def _queue(self, s: int, level: int) -> None:
        self._state[s], self._queued_at[s] = _QUEUED, self.now
        self._queues[level].append(s)

    def _start(self) -> None:
        """The disk takes the next request, as soon as it is idle."""
        if self._loading is not None:
            return
        for level in (_DEMAND, _PREFETCH):
            queue = self._queues[level]
            if queue and self._make_room(queue[0]):
                s = queue.popleft()
                start = max(self._idle_since, int(self._queued_at[s]))
                self._state[s] = _LOADING
                self._loading = (s, start, start + int(self._read_ns[s]), level)
                return

    def _make_room(self, s: int) -> bool:
        """Evicts until the slice fits."""
        held = np.flatnonzero(self._state >= _LOADING)
        over = int(self._slot[held].sum() + self._slot[s]) - self._arena_bytes
        if over <= 0:
            return True
        free = held[(self._state[held] == _READY) & ~self._pinned(held)]
        if over > int(self._slot[free].sum()):
            return False
        for victim in free[np.lexsort((free, self._last_use[free], *self._order(free)))].tolist():
            self._state[victim] = _ABSENT
            over -= int(self._slot[victim])
            if over <= 0:
                break
        return True

    def _pinned(self, slices: np.ndarray) -> np.ndarray:
        wanted: np.ndarray = self._wanted[slices]
        return wanted

    def _order(self, slices: np.ndarray) -> tuple[np.ndarray, ...]:
        """What decides who is evicted first, beside the time of its last use; the last of these above all."""
        return self.priorities[self._gate[slices], slices % self._width], self._expected[slices]


def replay(buffer: TimedBuffer, events: Sequence[GateEvent], begin: Callable[[int], None] | None = None) -> TimedResult:
    """Computes recorded events one after the other on the buffer's clock; its callback is told of each right after the selection.

    Args:
        begin: called before event n, where it is a token's or batch's first, as `Driver.begin` is before a decode.
    """
    t0, n_tokens = buffer.now, 0
    for n, event in enumerate(events):
        if event.gate == 0:
            n_tokens += len(event.ids)
            if begin is not None:
                begin(n)
        buffer.compute(event)
    c = buffer.counts
    names = ("stall_ns", "hits", "misses", "reads", "prefetched", "useful", "in_time")
    return TimedResult(n_tokens=n_tokens, ns=buffer.now - t0, **{name: c[name] for name in names})
