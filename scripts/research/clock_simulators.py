"""Recorded text decoded against a simulated clock: experts on a disk (`on_clock`), or in host memory behind a device's link (`on_device`).

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
from moeoff.errors import BudgetError, OptionError
from moeoff.gate_event import GateEvent
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import Strategy
from moeoff.policies.hobbit import unimportance
from moeoff.policies.recording import Recording
from moeoff.sidecar.profile import Profile
from moeoff.trace import TraceHeader

__all__ = ["Bandwidths", "DeviceBuffer", "DeviceResult", "GATE_NS", "LowVersions", "TimedBuffer", "TimedResult", "on_clock", "on_device"]

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

    Args:
        model: every gate must have the same matrices.
        arena_bytes: of the arena.
        read_ns: that the disk takes for a slice.
        gate_ns: from one router's selection to the next one's, if nothing has to be waited for.
        keep: as a strategy's: False drops slices after their use.
        expert_share: of that, what computing the experts takes; the rest, attention above all, comes after it and needs no slice.

    Raises:
        BudgetError: the arena is too small for what one gate selects.
    """

    def __init__(self, model: TraceHeader, arena_bytes: int, read_ns: int, gate_ns: int, expert_share: float = 0.5, *,
                 keep: bool = True):  # fmt: skip
        self._model, self._read_ns, self._gate_ns = model, read_ns, gate_ns
        self._keep = keep
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
        """A router selects, now: demand is queued, the event gets its hits, misses and time."""
        gate, self._clock = event.gate, self._clock + 1
        chosen = event.demand().tolist()
        want = [i * self._width + e for i in self._of_gate[gate] for e in chosen]
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
        for s in want:
            if self._state[s] == QUEUED:
                self._queues[PREFETCH].remove(s)
                self._state[s] = ABSENT
            if self._state[s] == ABSENT:
                self._queue(s, DEMAND)
        self._want = want
        self._start()

    def compute(self, event: GateEvent) -> None:
        """From a router's selection until the gate is done: at once what is there, the rest as it comes; then its slices may be evicted."""
        self.select(event)
        if self._callback is not None:
            self._callback(event)
        began = last = self.now
        end = began + self._experts_ns
        while any(self._state[s] != READY for s in self._want):
            last = self._finish_read()
        if last > began:  # what comes last is computed after it has come
            end = max(end, last + self._experts_ns // len(self._want))
        self.counts["stall_ns"] += end - began - self._experts_ns
        self._wanted[self._want] = False
        if not self._keep:
            self._state[self._want] = ABSENT
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
    buffer = TimedBuffer(model, int(model.full_bytes * share), max(int(read * GATE_NS), 1), GATE_NS, keep=strategy.keep)
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


@dataclass(frozen=True)
class Bandwidths:
    """Rates in GB/s (10^9 bytes). Decoding reads every weight once, so that a processor's rate is its memory's.

    The defaults are a desktop computer with an RTX 4090 in a PCIe 4.0 x16 slot: 85 % of what data sheets say.

    Attributes:
        link: from host memory to the device.
        device: of weights that the device computes with.
        layer_us: what a layer takes without its routed experts.
    """

    link: float = 26.8
    device: float = 857.0
    layer_us: float = 150.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise OptionError(f"{name} of a simulated machine must be positive, not {value}")


@dataclass(frozen=True)
class LowVersions:
    """Smaller copies that a device is sent in the place of absent experts of little weight (HOBBIT §3.2); they are not kept.

    Attributes:
        t1, t2: of unimportance: up to t1 the expert itself is sent, up to t2 the copy, above it nothing.
        share: of an expert's bytes, that its copy has.
    """

    t1: float
    t2: float
    share: float


@dataclass(frozen=True)
class DeviceResult:
    """Attributes:
    ns: of the simulated clock; stall_ns: in which the device did not compute.
    device, host: uses of experts by where these were when their router had selected.
    low, skipped: of the uses, those that a smaller copy served, and those that nothing did.
    uploads, up_bytes: what was sent over the link.
    """

    n_tokens: int
    ns: int
    stall_ns: int
    device: int
    host: int
    low: int
    skipped: int
    uploads: int
    up_bytes: int

    @property
    def tps(self) -> float:
        return 1e9 * self.n_tokens / max(self.ns, 1)


class DeviceBuffer(TimedBuffer):
    """Whole experts in one pool of a device, for all layers; all of them lie in host memory, and those absent from the pool are sent over one link.

    Among experts of equal priority the least recently used goes first. What a predictor asks for goes to the device.

    Args:
        vram_bytes: for experts, on the device.
        low: smaller copies, sent where an expert weighs little.

    Raises:
        BudgetError: the device has room for fewer than twice what one gate selects.
    """

    def __init__(self, model: TraceHeader, speeds: Bandwidths, vram_bytes: int, *, keep: bool = True,
                 low: LowVersions | None = None):  # fmt: skip
        super().__init__(model, model.full_bytes, 1, round(1000 * speeds.layer_us), 0.0, keep=keep)
        self._speeds, self._low, self._vram_bytes = speeds, low, vram_bytes
        self._expert_bytes = [sum(model.tensors[i].nbytes for i in tensors) for tensors in self._of_gate]
        self._matrices = np.array([[sum(1 << model.tensors[i].matrix for i in tensors)] for tensors in self._of_gate], np.uint8)
        n = model.n_gates * model.n_experts
        self._capacity = min(vram_bytes // max(self._expert_bytes), n)
        if self._capacity < 2 * model.n_used:
            raise BudgetError(f"a device with {vram_bytes} bytes for experts holds fewer of them than a gate selects")
        self._there, self._keeps, self._needed = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)  # keeps: what a predictor wants, evicted last
        self._used_at = np.zeros(n, np.int64)
        self._copies: set[int] = set()  # on the device, for the gate that computes
        self._jobs: dict[int, deque[tuple[int, bool]]] = {DEMAND: deque(), PREFETCH: deque()}  # expert, as its copy
        self._sending: tuple[int, bool, int, int] | None = None  # expert, as its copy, start, end
        self.sent = dict.fromkeys(("device", "host", "low", "skipped", "uploads", "up_bytes"), 0)

    def stats(self) -> Any:
        reads = len(self._of_gate[0]) * self.sent["uploads"]
        return SimpleNamespace(**(vars(super().stats()) | {"reads": reads, "arena_bytes": self._vram_bytes}))

    def residency(self, *, low: bool = False) -> np.ndarray:
        return (self._there & (not low)).reshape(self.priorities.shape) * self._matrices

    def prefetch(
        self, gate: int, experts: Sequence[int], n_read: int | None = None, matrices: int = ALL_MATRICES, *, low: bool = False, limit: int = -1
    ) -> int:
        n_queued, n_each = 0, len(self._of_gate[gate])
        for place, i in enumerate(gate * self._width + e for e in experts):
            if self._there[i] or self._sending is not None and self._sending[:2] == (i, False):
                self._keeps[i] |= not self._needed[i]
            elif not any((i, False) in jobs for jobs in self._jobs.values()):
                if (n_read is None or place < n_read) and (limit < 0 or n_queued + n_each <= limit):
                    self._jobs[PREFETCH].append((i, False))
                    self._keeps[i] = True
                    n_queued += n_each
        self.counts["prefetched"] += n_queued
        self._start()
        return n_queued

    def compute(self, event: GateEvent) -> None:
        """Sends what is absent, and computes in the order in which it comes."""
        gate, self._clock = event.gate, self._clock + 1
        experts = gate * self._width + event.ids[0].astype(np.int64)
        high, low = self._versions(event, experts)
        there, n_each, t = int(self._there[experts].sum()), len(self._of_gate[gate]), self.sent
        for name, n in zip(("device", "host", "low", "skipped"), (there, len(experts) - there, len(low), len(experts) - len(high) - len(low))):
            t[name] += n
        event.n_hit, event.n_miss, event.t_ns = n_each * there, n_each * (len(high) + len(low) - there), self.now
        self.counts["hits"] += event.n_hit
        self.counts["misses"] += event.n_miss
        self._used_at[experts] = self._clock
        self._needed[experts] = True
        span = slice(gate * self._width, (gate + 1) * self._width)
        self._jobs[PREFETCH] = deque(job for job in self._jobs[PREFETCH] if job[0] // self._width != gate or self._needed[job[0]])
        self._keeps[span] = False
        for i in high:
            if not self._there[i] and (self._sending is None or self._sending[:2] != (i, False)):
                if (i, False) in self._jobs[PREFETCH]:
                    self._jobs[PREFETCH].remove((i, False))
                self._jobs[DEMAND].append((i, False))
        self._jobs[DEMAND].extend((i, True) for i in low)
        self._start()
        if self._callback is not None:
            self._callback(event)
        began = end = self.now
        left = {(i, is_low): round(self._nbytes(i, is_low) / self._speeds.device) for part, is_low in ((high, False), (low, True)) for i in part}
        computing = sum(left.values())
        while left:
            for part in [part for part in left if self._has(part)]:
                end += left.pop(part)
            if left:
                end = max(end, self._finish_read())
        self.counts["stall_ns"] += end - began - computing
        self._needed[experts] = False
        self._copies.clear()
        if not self._keep:
            self._there[experts] = self._keeps[experts] = False
        self._until(end + self._gate_ns)

    def _versions(self, event: GateEvent, experts: np.ndarray) -> tuple[list[int], list[int]]:
        """Those that the device computes with as they are, and as smaller copies; the others not at all. Where an expert is there it serves."""
        if self._low is None:
            return experts.tolist(), []
        scores = dict(zip(experts.tolist(), np.minimum(unimportance(event.weights)[0], 1)))
        high = [i for i in scores if self._there[i] or scores[i] <= self._low.t1]
        return high, [i for i in scores if i not in high and scores[i] <= self._low.t2]

    def _has(self, part: tuple[int, bool]) -> bool:
        i, is_low = part
        return i in self._copies if is_low else bool(self._there[i])

    def _nbytes(self, i: int, is_low: bool) -> float:
        return self._expert_bytes[i // self._width] * (self._low.share if is_low and self._low is not None else 1.0)

    def _until(self, t: int) -> None:
        while self._sending is not None and self._sending[3] <= t:
            self._finish_read()
        self.now = max(self.now, t)

    def _finish_read(self) -> int:
        if self._sending is None:
            raise AssertionError("an expert is waited for that nobody sends")
        i, is_low, start, end = self._sending
        self._sending, self.now, self._idle_since = None, max(self.now, end), end
        if is_low:
            self._copies.add(i)
        else:
            self._there[i] = True
        self.sent["uploads"] += 1
        self.sent["up_bytes"] += int(self._nbytes(i, is_low))
        self.counts["busy_ns"] += end - start
        self._start()
        return end

    def _start(self) -> None:
        """The link takes the next request that there is room for, as soon as it is idle."""
        if self._sending is not None:
            return
        for level in (DEMAND, PREFETCH):
            for i, is_low in self._jobs[level]:
                if is_low or self._evict():
                    self._jobs[level].remove((i, is_low))
                    start = max(self._idle_since, self.now)
                    self._sending = (i, is_low, start, start + round(self._nbytes(i, is_low) / self._speeds.link))
                    return

    def _evict(self) -> bool:
        """Makes room for an expert: of those that are not needed the lowest goes."""
        if int(np.count_nonzero(self._there)) < self._capacity:
            return True
        found = np.flatnonzero(self._there & ~self._needed)
        if not len(found):
            return False
        lowest = found[np.lexsort((found, self._used_at[found], self.priorities.ravel()[found], self._keeps[found]))[0]]
        self._there[lowest] = self._keeps[lowest] = False
        return True


def on_device(recording: Recording, strategy: Strategy, model_index: ModelIndex, speeds: Bandwidths, *, share: float, low: LowVersions | None = None,
              profile: Profile | None = None, tokens: int = 256) -> DeviceResult:  # fmt: skip
    """Decodes the text's first tokens with all experts in host memory and a device that computes with them: it holds some, and the others are
    sent to it before they are used, as the papers' systems do. One pool for all layers; prefetches go to the device.

    Args:
        share: of the experts' bytes, that the device holds.
        low: copies in lower precision that are sent in the place of experts of little weight.
        profile, tokens: as of `on_clock`.

    Raises:
        BudgetError, OptionError: as of `on_clock`.
    """
    model = recording.model
    buffer = DeviceBuffer(model, speeds, int(share * sum(t.nbytes * t.n_experts for t in model.tensors)), keep=strategy.keep, low=low)
    driver = attach_driver(cast(ExpertBuffer, buffer), strategy, model_index, io_threads=1, profile=profile)
    result = decode(buffer, recording, driver, tokens)
    return DeviceResult(result.n_tokens, result.ns, result.stall_ns, **buffer.sent)
