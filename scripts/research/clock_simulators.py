"""Recorded text decoded against a simulated clock, with experts on a disk. device_simulator.py has a device behind a link instead.

What `moeoff.simulate` leaves out: reads take time, a prefetch may be too late, and what was read for nothing has delayed what was needed.
`TimedBuffer` is as much of an expert buffer as a policy and a prefetcher ask of one, so that the live objects run on it unchanged; it
knows neither. Its rules are the native store's: demand before prefetches, of a prompt's demand that of the most tokens first, a
prefetch that is not chosen is given up unless it is being read, and what is expected is evicted last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from moeoff.engine.batch import Span
from moeoff.engine.driver import Driver, attach_driver
from moeoff.engine.expert_buffer import ExpertBuffer
from moeoff.errors import BudgetError
from moeoff.gate_event import GateEvent
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import Strategy
from moeoff.policies.recording import Recording
from moeoff.sidecar.profile import Profile
from moeoff.trace import TraceHeader

__all__ = ["GATE_NS", "TimedBuffer", "TimedResult", "decode", "on_clock"]

ALL_MATRICES = 15
READ_FIELDS = np.dtype([(name, np.int64) for name in ("t_queued", "t_start", "t_done", "tensor", "expert", "level", "result")])
ABSENT, QUEUED, LOADING, READY = range(4)
PREFETCH, DEMAND = 0, 2


@dataclass(frozen=True)
class TimedResult:
    """Time and reads of a replay. Times in nanoseconds of the simulated clock, counts of slices.

    Attributes:
        stall_ns: in which nothing was computed.
    """

    n_tokens: int
    ns: int
    stall_ns: int
    hits: int
    misses: int
    prefetched: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


class TimedBuffer:
    """Slices in an arena, read one after the other.

    A gate computes one matrix of all its experts after the other, as llama.cpp does, and of a matrix what is there before what comes.

    Args:
        model: every gate must have the same matrices.
        arena_bytes: of the arena.
        read_ns: that the disk takes for a slice.
        gate_ns: from one router's selection to the next one's, if nothing has to be waited for.
        keep: as a strategy's: False drops slices after their use.
        eager: as a strategy's: False requests a matrix's slices when it is its turn to be computed, not when the router has selected.
        expert_share: of that, what computing the experts takes; the rest, attention above all, comes after it and needs no slice.

    Raises:
        BudgetError: the arena is too small for what one gate selects.
    """

    def __init__(self, model: TraceHeader, arena_bytes: int, read_ns: int, gate_ns: int, expert_share: float = 0.5, *,
                 keep: bool = True, eager: bool = True):  # fmt: skip
        self._model, self._read_ns, self._gate_ns = model, read_ns, gate_ns
        self._keep, self._eager = keep, eager
        self._experts_ns = int(expert_share * gate_ns)
        self._width = model.n_experts
        self.priorities = np.zeros((model.n_gates, model.n_experts), np.float32)
        self.tensors = [SimpleNamespace(gate=t.gate, layer=t.layer, matrix=t.matrix, ne=(1, 1, t.n_experts), nbytes=t.nbytes) for t in model.tensors]
        self.arena_full = model.full_bytes
        self._arena_bytes = arena_bytes
        self._slot = np.repeat([t.slot_bytes for t in model.tensors], self._width)
        self._of_gate = [sorted((i for i, t in enumerate(model.tensors) if t.gate == g), key=lambda i: model.tensors[i].matrix) for g in range(model.n_gates)]
        if arena_bytes < 2 * model.n_used * max(sum(model.tensors[i].slot_bytes for i in tensors) for tensors in self._of_gate):
            raise BudgetError(f"an arena of {arena_bytes} bytes holds fewer experts than a gate selects")
        n = len(model.tensors) * self._width
        self._gate = np.repeat([t.gate for t in model.tensors], self._width)
        self._state = np.full(n, ABSENT, np.int8)
        self._last_use = np.zeros(n, np.int64)
        self._expected = np.zeros(n, bool)
        self._wanted = np.zeros(n, bool)  # by the gate that computes
        self._queued_at = np.zeros(n, np.int64)
        self._queues: dict[int, deque[int]] = {DEMAND: deque(), PREFETCH: deque()}
        self._loading: tuple[int, int, int, int] | None = None  # slice, start, end, level
        self._clock = 0
        self.now = self._idle_since = 0
        self.counts = dict.fromkeys(("hits", "misses", "reads", "prefetched", "stall_ns", "busy_ns"), 0)
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
            io_thread_busy_ns=c["busy_ns"], reads=c["reads"], arena_bytes=self._arena_bytes, low_arena_bytes=0, prefetch_issued=c["prefetched"]
        )

    def residency(self, *, low: bool = False) -> np.ndarray:
        out = np.zeros(self.priorities.shape, np.uint8)
        ready = (self._state == READY).reshape(-1, self._width)
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
            self._expected[s] |= self._state[s] != ABSENT and not self._wanted[s]
        for place, s in slices:
            if self._state[s] == ABSENT and place < n_read and n_queued != limit:
                self._expected[s] = True
                self._queue(s, PREFETCH)
                n_queued += 1
        self.counts["prefetched"] += n_queued
        self._start()
        return n_queued

    # --- the clock ---

    def select(self, event: GateEvent) -> None:
        """A router selects, now: the event gets its hits, misses and time; demand is queued, and what it does not choose is given up."""
        gate, self._clock = event.gate, self._clock + 1
        chosen = event.demand().tolist()
        self._stages = [[i * self._width + e for e in chosen] for i in self._of_gate[gate]]
        want = [s for stage in self._stages for s in stage]
        ready = self._state[want] == READY
        hits = int(ready.sum())
        self.counts["hits"] += hits
        self.counts["misses"] += len(want) - hits
        event.n_hit, event.n_miss, event.t_ns = hits, len(want) - hits, self.now
        self._last_use[want] = self._clock
        self._wanted[want] = True
        self._expected[want] = False
        for s in np.flatnonzero(self._expected & (self._gate == gate)).tolist():  # not chosen
            if self._state[s] == QUEUED:
                self._queues[PREFETCH].remove(s)
                self._state[s] = ABSENT
            self._expected[s] = False
        if self._eager:
            self._request(want)
        self._start()

    def _request(self, slices: Sequence[int]) -> None:
        """Those that are absent, before all prefetches."""
        for s in slices:
            if self._state[s] == QUEUED and s in self._queues[PREFETCH]:
                self._queues[PREFETCH].remove(s)
                self._state[s] = ABSENT
            if self._state[s] == ABSENT:
                self._queue(s, DEMAND)

    def compute(self, event: GateEvent) -> None:
        """From a router's selection until the gate is done; then its slices may be evicted."""
        self.select(event)
        if self._callback is not None:
            self._callback(event)
        want = [s for stage in self._stages for s in stage]
        began, t, each = self.now, float(self.now), self._experts_ns / len(want)
        for left in self._stages:
            if not self._eager:
                self._request(left)
                self._start()
            while left:
                if (ready := next((s for s in left if self._state[s] == READY), None)) is not None:
                    left.remove(ready)
                    t += each
                    self._until(int(t))
                else:
                    t = max(t, self._finish_read())
        end = round(t)
        self.counts["stall_ns"] += end - began - self._experts_ns
        self._wanted[want] = False
        if not self._keep:
            self._state[want] = ABSENT
        self._until(end + self._gate_ns - self._experts_ns)

    def _until(self, t: int) -> None:
        while self._loading is not None and self._loading[2] <= t:
            self._finish_read()
        self.now = max(self.now, t)

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
        self._state[s] = READY
        self._idle_since = end
        self._start()
        return end

    def _queue(self, s: int, level: int) -> None:
        self._state[s], self._queued_at[s] = QUEUED, self.now
        self._queues[level].append(s)

    def _start(self) -> None:
        """The disk takes the next request, as soon as it is idle."""
        if self._loading is not None:
            return
        for level in (DEMAND, PREFETCH):
            queue = self._queues[level]
            if queue and self._make_room(queue[0]):
                s = queue.popleft()
                start = max(self._idle_since, int(self._queued_at[s]))
                self._state[s] = LOADING
                self._loading = (s, start, start + self._read_ns, level)
                return

    def _make_room(self, s: int) -> bool:
        """Evicts until the slice fits."""
        held = np.flatnonzero(self._state >= LOADING)
        over = int(self._slot[held].sum() + self._slot[s]) - self._arena_bytes
        if over <= 0:
            return True
        free = held[(self._state[held] == READY) & ~self._wanted[held]]
        if over > int(self._slot[free].sum()):
            return False
        for victim in free[np.lexsort((free, self._last_use[free], self.priorities[self._gate[free], free % self._width], self._expected[free]))].tolist():
            self._state[victim] = ABSENT
            over -= int(self._slot[victim])
            if over <= 0:
                break
        return True


GATE_NS = 1_000_000  # any: all that matters is how reads compare with it


def on_clock(recording: Recording, strategy: Strategy, model_index: ModelIndex, *, share: float, read: float, profile: Profile | None = None, tokens: int = 256,
             **options: Any) -> tuple[TimedResult, Driver | None]:  # fmt: skip
    """Decodes the text's first tokens; the same arguments give the same result.

    Args:
        recording: with gate inputs, if the strategy's predictor reads them.
        share: of the experts, that the arena holds.
        read: time of a slice's read, as a share of what a layer takes to compute.
        tokens: how many of the recording at most.
        options: of `attach_driver`.

    Raises:
        BudgetError: the arena holds fewer experts than a gate selects.
        OptionError: the strategy needs a profile.
    """
    model = recording.model
    buffer = TimedBuffer(model, int(model.full_bytes * share), max(int(read * GATE_NS), 1), GATE_NS, keep=strategy.keep, eager=strategy.eager)
    driver = attach_driver(cast(ExpertBuffer, buffer), strategy, model_index, io_threads=1, profile=profile, **options)
    return decode(buffer, recording, driver, tokens), driver


def decode(buffer: TimedBuffer, recording: Recording, driver: Driver | None, tokens: int) -> TimedResult:
    """Computes a text's first tokens one by one, told to the driver as `Llama` tells it; the buffer's callback is told of each event right after the selection."""
    position, n_tokens = 0, 0
    for event in recording.events(0, tokens):
        if event.gate == 0:
            position = 0 if recording.starts[n_tokens] else position + 1
            if driver is not None:
                driver.begin(recording.tokens[n_tokens : n_tokens + 1], {0: Span(position, position + 1, 1, True)}, True)
            n_tokens += 1
        buffer.compute(event)
    c = buffer.counts
    return TimedResult(n_tokens, buffer.now, c["stall_ns"], c["hits"], c["misses"], c["prefetched"])
