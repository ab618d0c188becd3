"""A trace replayed against a clock with three places for experts: a device, host memory, disk.

`TieredBuffer` is a `TimedBuffer`, whose arena is host memory, with a device beside it: one link between the two, one computation on each
side. Its modes are those of docs/guides/gpu.md: *cooperative*, where the device computes with what it holds and the CPU with the rest at the same
time; *centric*, where every chosen expert goes to the device first; *cpu*. The live policies and prefetchers run on it unchanged. A
processor computes with what is there first, and with the rest as it comes.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..cache import Policy, create
from ..cache.importance import unimportance
from ..errors import BudgetError, OptionError
from ..gate_event import GateEvent
from .bandwidths import Bandwidths
from .device_experts import DeviceExperts
from .tiered_result import TieredResult
from .timed import _ABSENT, _DEMAND, _LOADING, _PREFETCH, _QUEUED, _READY, ALL_MATRICES, TimedBuffer
from .trace import Model, Trace

__all__ = ["MODES", "LowVersions", "TieredBuffer", "replay"]

MODES = ("cooperative", "centric", "cpu")
_PENDING = 8  # uploads beside which no other begins, as in moeoff-store.cpp


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


class TieredBuffer(TimedBuffer):
    """Args:
    vram_bytes, arena_bytes: for experts, on the device and in host memory. An arena that has room for all of them begins with them.
    one_pool: of the device, for all layers (`DeviceExperts`).
    keep, serial: of the place that the experts are computed from, as a strategy's.
    n_uploads: of a gate at each of its events (cooperative).
    low: copies in lower precision (centric, with all experts in host memory).

    Raises:
        BudgetError: an arena, or the device, has no room for what one gate selects.
        OptionError: there is no such mode, or smaller copies where they cannot be.
    """

    def __init__(self, model: Model, speeds: Bandwidths, vram_bytes: int, arena_bytes: int, mode: str = "cooperative", *,
                 one_pool: bool = False, keep: bool = True, serial: bool = False, n_uploads: int = 2, low: LowVersions | None = None):  # fmt: skip
        if mode not in MODES:
            raise OptionError(f"vram mode: one of {', '.join(MODES)}, not {mode!r}")
        reads = np.array([speeds.on_disk_ns(t.nbytes) for t in model.tensors])
        super().__init__(model, arena_bytes, reads, speeds.layer_ns, 0.0, keep=keep, serial=serial)
        is_all = arena_bytes >= model.full_bytes
        if low is not None and not (is_all and mode == "centric"):
            raise OptionError("smaller copies are simulated where all experts are in host memory and the device computes with them")
        self._speeds, self._mode, self._n_uploads, self._low, self._vram_bytes = speeds, mode, n_uploads, low, vram_bytes
        self._whole = np.zeros(model.n_gates, np.uint8)  # all matrices of each gate, as bits
        for t in model.tensors:
            self._whole[t.gate] |= 1 << t.matrix
        self._of_tensor = np.array([t.nbytes for t in model.tensors])
        self._expert_bytes = np.array([sum(model.tensors[i].nbytes for i in tensors) for tensors in self._of_gate])
        whole = max(self._expert_bytes)
        capacity = vram_bytes // int(whole) if one_pool else vram_bytes // int(self._expert_bytes.sum())
        if mode == "centric" and capacity < model.n_used * (2 if one_pool else 1) or mode == "cooperative" and capacity < 1:
            raise BudgetError(f"a device with {vram_bytes} bytes for experts holds fewer of them than a gate selects" if mode == "centric" else
                              f"a device with {vram_bytes} bytes has no room for an expert of each layer: {int(self._expert_bytes.sum())}")  # fmt: skip
        self.on_device = DeviceExperts(model.n_gates, model.n_experts, capacity, one_pool=one_pool)
        n = model.n_gates * model.n_experts
        self._needed = np.zeros(n, bool)  # by the gate that computes
        self._holds = np.zeros(len(self._state), np.int32)  # slices that an upload needs
        self._low_state = np.full(n, _ABSENT, np.int8)
        self._links: dict[int, deque[tuple[int, bool]]] = {_DEMAND: deque(), _PREFETCH: deque()}  # expert, as its copy
        self._sending: tuple[int, bool, int, int] | None = None  # expert, as its copy, start, end
        self._link_idle_since = 0
        self.tiers = dict.fromkeys(
            ("device", "host", "disk", "low", "skipped", "uploads", "up_bytes", "read_bytes", "link_busy_ns", "decode_ns", "tokens", "decoded"), 0
        )
        if is_all:
            self._state[:] = _READY

    # --- what policies and prefetchers ask ---

    def stats(self) -> Any:
        """Of the way that prefetches take."""
        c, t, n = self.counts, self.tiers, len(self._of_gate[0])
        if self._mode != "centric":
            return super().stats()
        return SimpleNamespace(
            io_worker_busy_ns=c["busy_ns"] + t["link_busy_ns"], reads=n * t["uploads"], arena_bytes=self._vram_bytes, low_arena_bytes=0,
            prefetch_issued=c["prefetched"],
        )  # fmt: skip

    def residency(self, *, low: bool = False) -> np.ndarray:
        """As `ExpertBuffer.residency`; in centric mode what the device holds."""
        here = ((self._low_state == _READY) if low else self.on_device.served).reshape(self.priorities.shape) * self._whole[:, None]
        return here if low or self._mode == "centric" else super().residency() | here

    def prefetch(
        self, gate: int, experts: Sequence[int], n_read: int | None = None, matrices: int = ALL_MATRICES, *, low: bool = False, limit: int = -1
    ) -> int:
        """Into host memory; in centric mode onto the device, whole experts only."""
        first = gate * self._width
        if self._mode != "centric":
            absent = [e for e in experts[: len(experts) if n_read is None else n_read] if not self.on_device.served[first + e]]
            rest = [e for e in experts if e not in absent]
            self.on_device.expected[first + np.array(rest, np.int64)] |= self.on_device.served[first + np.array(rest, np.int64)]
            return super().prefetch(gate, [*absent, *rest], len(absent), matrices, limit=limit)
        n_queued, n_each = 0, len(self._of_gate[gate])
        for place, e in enumerate(experts):
            i = first + e
            if self.on_device.served[i] or self.on_device.writing[i]:
                self.on_device.expected[i] |= not self._needed[i]
                continue
            is_due = self._low_state[i] == _ABSENT and (i, False) not in self._links[_PREFETCH] and (i, False) not in self._links[_DEMAND]
            if is_due and (n_read is None or place < n_read) and (limit < 0 or n_queued + n_each <= limit):
                self._send(i, _PREFETCH, low)
                n_queued += n_each
        self.counts["prefetched"] += n_queued
        self._start()
        return n_queued

    # --- the clock ---

    def compute(self, event: GateEvent) -> None:
        gate, speeds = event.gate, self._speeds
        chosen, first, n_rows = np.unique(event.ids, return_index=True, return_counts=True)
        rows = dict(zip(chosen.tolist(), n_rows.tolist()))
        chosen = chosen[np.argsort(first)]
        self._clock += 1
        mode = self._mode
        if mode == "centric" and len(chosen) > self.on_device.capacity:
            mode = "cpu"  # as the live tier: the batch needs more experts than there are slots
        mine = gate * self._width + chosen
        by_device, low, skipped = self._versions(event, chosen, mine) if mode == "centric" else ([], [], [])
        if mode == "cooperative":
            by_device = chosen[self.on_device.served[mine]].tolist()
        by_host = [e for e in chosen.tolist() if e not in by_device] if mode != "centric" else []
        self._count(event, chosen, mine, by_device, by_host, low, skipped, mode)
        if mode != "cpu":
            self.on_device.use(gate, mine)
        self._needed[mine] = True
        self._want = [i * self._width + e for i in self._of_gate[gate] for e in by_host]
        self._last_use[[i * self._width + e for i in self._of_gate[gate] for e in chosen.tolist()]] = self._clock
        self._wanted[self._want] = True
        self._prefetched[self._want] = False
        self._give_up(gate, chosen)
        for s in self._want:
            if self._state[s] == _QUEUED and s in self._queues[_PREFETCH]:
                self._queues[_PREFETCH].remove(s)
                self._state[s] = _ABSENT
            if self._state[s] == _ABSENT:
                self._queue(s, _DEMAND)
        if mode == "cooperative":
            self._upload_some(gate, by_host)
        if mode == "centric":
            for e in by_device:
                self._demand(gate * self._width + e, False)
            for e in low:
                self._demand(gate * self._width + e, True)
        self._start()
        if self._callback is not None:
            self._callback(event)
        began, n = self.now, len(self._needed)
        device_parts = {gate * self._width + e: speeds.device_ns(self._expert_bytes[gate], rows[e]) for e in by_device}
        device_parts |= {n + gate * self._width + e: speeds.device_ns(self._low_bytes(gate), rows[e]) for e in low}
        host_parts = {s: speeds.host_ns(self._of_tensor[s // self._width], rows[s % self._width]) for s in self._want}
        end = max(self._work(device_parts, self._is_on_device, began), self._work(host_parts, self._is_in_memory, began, gives_up=True))
        self.counts["stall_ns"] += end - began - max(sum(device_parts.values()), sum(host_parts.values()))
        self._wanted[self._want] = False
        self._needed[mine] = False
        self._low_state[[gate * self._width + e for e in low]] = _ABSENT
        if not self._keep and mode == "centric":
            self.on_device.drop(mine)
        elif not self._keep:
            self._state[self._want] = _ABSENT
        self._until(end + self._gate_ns)
        self.tiers["tokens"] += len(event.ids) if gate == 0 else 0
        self.tiers["decoded"] += len(event.ids) if gate == 0 and event.decode else 0
        self.tiers["decode_ns"] += self.now - began if event.decode else 0

    def _is_on_device(self, part: int) -> bool:
        """An expert, or its copy."""
        n = len(self._needed)
        return bool(self.on_device.served[part] if part < n else self._low_state[part - n] == _READY)

    def _is_in_memory(self, part: int) -> bool:
        return bool(self._state[part] == _READY)

    def _work(self, parts: dict[int, int], is_there: Callable[[int], bool], began: int, gives_up: bool = False) -> int:
        """When one processor is done with its parts, which take so long: each begins when it is there and the one before is done."""
        at, left = began, list(parts)
        while self._serial and not all(is_there(part) for part in left):
            at = max(at, self._step([]))
        while left:
            for part in [part for part in left if is_there(part)]:
                at += parts[part]
                left.remove(part)
            if left:
                at = max(at, self._step([part for part in parts if gives_up and part not in left]))
        return at

    def _step(self, done: list[int]) -> int:
        """Goes on until something has come; where nothing can, for want of room in host memory, what is computed gives up its own."""
        if self._loading is None and self._sending is None:
            self._wanted[done] = False
            self._start()
        return self._finish_read()

    def _until(self, t: int) -> None:
        while min(self._next_ends()) <= t:
            self._finish_read()
        self.now = max(self.now, t)

    def _next_ends(self) -> tuple[float, float]:
        """When the disk's and the link's transfers end."""
        return math.inf if self._loading is None else self._loading[2], math.inf if self._sending is None else self._sending[3]

    def _finish_read(self) -> int:
        """The next of the two ends; returns when."""
        on_disk, on_link = self._next_ends()
        if self._sending is None or on_disk <= on_link:
            if self._loading is not None:
                self.tiers["read_bytes"] += int(self._of_tensor[self._loading[0] // self._width])
            return super()._finish_read()
        i, is_low, start, end = self._sending
        self._sending, self.now, self._link_idle_since = None, max(self.now, end), end
        gate = i // self._width
        if is_low:
            self._low_state[i] = _READY
        else:
            self.on_device.finish(i)
            self._hold(i, -1)
        self.tiers["uploads"] += 1
        self.tiers["up_bytes"] += int(self._low_bytes(gate) if is_low else self._expert_bytes[gate])
        self.tiers["link_busy_ns"] += end - start
        self._start()
        return end

    def _start(self) -> None:
        super()._start()
        if self._sending is not None:
            return
        for level in (_DEMAND, _PREFETCH):
            for job in self._links[level]:
                i, is_low = job
                if not is_low and not bool((self._state[self._slices(i)] == _READY).all()):
                    continue
                if not is_low and not self.on_device.writing[i] and not self.on_device.take(i, self.priorities.ravel(), self._needed, forced=True):
                    continue
                self._links[level].remove(job)
                nbytes = self._low_bytes(i // self._width) if is_low else self._expert_bytes[i // self._width]
                start = max(self._link_idle_since, self.now)
                if is_low:
                    self._low_state[i] = _LOADING
                self._sending = (i, is_low, start, start + self._speeds.on_link_ns(nbytes))
                return

    # --- parts of a gate's step ---

    def _versions(self, event: GateEvent, chosen: np.ndarray, mine: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Of the chosen: those that the device computes with as they are, as smaller copies, and not at all. Where an expert is there it serves."""
        if self._low is None or not event.decode:
            return chosen.tolist(), [], []
        scores = np.minimum(unimportance(event.weights), 1)
        best = {e: float(scores[event.ids == e].min()) for e in chosen.tolist()}
        high = [e for e, i in zip(chosen.tolist(), mine) if self.on_device.served[i] or best[e] <= self._low.t1]
        low = [e for e in chosen.tolist() if e not in high and best[e] <= self._low.t2]
        return high, low, [e for e in chosen.tolist() if e not in high and e not in low]

    def _low_bytes(self, gate: int) -> float:
        return float(self._expert_bytes[gate]) * (1.0 if self._low is None else self._low.share)

    def _count(self, event: GateEvent, chosen: np.ndarray, mine: np.ndarray, by_device: list[int], by_host: list[int], low: list[int],
               skipped: list[int], mode: str) -> None:  # fmt: skip
        n_each, t = len(self._of_gate[event.gate]), self.tiers
        there = self.on_device.served[mine] if mode != "cpu" else np.zeros(len(mine), bool)
        in_host = np.array([bool((self._state[self._slices(i)] == _READY).all()) for i in mine.tolist()], bool)
        t["device"] += int(there.sum())
        t["host"] += int((in_host & ~there).sum())
        t["disk"] += int((~in_host & ~there).sum())
        t["low"] += len(low)
        t["skipped"] += len(skipped)
        if mode == "centric":
            hits = n_each * (int(there.sum()) + sum(self._low_state[event.gate * self._width + e] == _READY for e in low))
            misses = n_each * (len(by_device) + len(low)) - hits
        else:
            ready = int(sum((self._state[self._slices(event.gate * self._width + e)] == _READY).sum() for e in by_host))
            hits, misses = n_each * len(by_device) + ready, n_each * len(by_host) - ready
        self.counts["hits"] += hits
        self.counts["misses"] += misses
        event.n_hit, event.n_miss, event.t_ns = hits, misses, self.now

    def _give_up(self, gate: int, chosen: np.ndarray) -> None:
        """What was expected of this gate and is not chosen."""
        span = slice(gate * self._width, (gate + 1) * self._width)
        is_chosen = np.zeros(len(self._needed), bool)
        is_chosen[gate * self._width + chosen] = True
        for job in [j for j in self._links[_PREFETCH] if j[0] // self._width == gate and not is_chosen[j[0]]]:
            self._links[_PREFETCH].remove(job)
            if job[1]:
                self._low_state[job[0]] = _ABSENT
            else:
                self._hold(job[0], -1)
        self._low_state[span][(self._low_state[span] == _READY) & ~is_chosen[span]] = _ABSENT
        self.on_device.expected[span] = False
        for s in np.flatnonzero(self._expected & (self._gate == gate)).tolist():
            if self._state[s] == _QUEUED and not is_chosen[gate * self._width + s % self._width]:
                self._queues[_PREFETCH].remove(s)
                self._state[s] = _ABSENT
            self._expected[s] = self._prefetched[s] = False

    def _upload_some(self, gate: int, by_host: list[int]) -> None:
        n_pending = len(self._links[_DEMAND]) + (self._sending is not None)
        mine = gate * self._width + np.array(by_host, np.int64)
        here = mine[[bool((self._state[self._slices(i)] == _READY).all()) for i in mine.tolist()]] if len(mine) else mine
        priority = self.priorities.ravel()
        for i in self.on_device.best(here, priority, min(self._n_uploads, _PENDING - n_pending)).tolist():
            if self.on_device.take(i, priority, self._needed, forced=False):
                self._hold(i, 1)
                self._links[_DEMAND].append((i, False))

    def _demand(self, i: int, low: bool) -> None:
        """The device needs it now."""
        if low:
            if self._low_state[i] == _ABSENT:
                self._send(i, _DEMAND, True)
            elif (i, True) in self._links[_PREFETCH]:
                self._links[_PREFETCH].remove((i, True))
                self._links[_DEMAND].append((i, True))
        elif not self.on_device.served[i] and not self.on_device.writing[i]:
            if (i, False) in self._links[_PREFETCH]:
                self._links[_PREFETCH].remove((i, False))
                self._links[_DEMAND].append((i, False))
                for s in self._slices(i).tolist():
                    if self._state[s] == _QUEUED and s in self._queues[_PREFETCH]:
                        self._queues[_PREFETCH].remove(s)
                        self._queues[_DEMAND].append(s)
            else:
                self._send(i, _DEMAND, False)

    def _send(self, i: int, level: int, low: bool) -> None:
        self._links[level].append((i, low))
        if low:
            self._low_state[i] = _QUEUED
            return
        self._hold(i, 1)
        for s in self._slices(i).tolist():
            if self._state[s] == _ABSENT:
                self._expected[s] = level == _PREFETCH
                self._queue(s, level)

    def _slices(self, i: int) -> np.ndarray:
        slices: np.ndarray = np.array(self._of_gate[i // self._width]) * self._width + i % self._width
        return slices

    def _hold(self, i: int, by: int) -> None:
        """Its slices stay in host memory, or may go again."""
        slices = self._slices(i)
        self._holds[slices] += by

    def _pinned(self, slices: np.ndarray) -> np.ndarray:
        pinned: np.ndarray = super()._pinned(slices) | (self._holds[slices] > 0)
        return pinned

    def _order(self, slices: np.ndarray) -> tuple[np.ndarray, ...]:
        """What a device holds leaves host memory first."""
        experts = self._gate[slices] * self._width + slices % self._width
        return (*super()._order(slices), ~self.on_device.served[experts])

    def result(self) -> TieredResult:
        t = self.tiers
        names = ("decoded", "decode_ns", "device", "host", "disk", "low", "skipped", "uploads", "up_bytes", "read_bytes")
        return TieredResult(n_tokens=t["tokens"], ns=self.now, wait_ns=self.counts["stall_ns"], **{name: t[name] for name in names})


def replay(trace: Trace, policy: str | Policy, speeds: Bandwidths, vram_bytes: int, arena_bytes: int, mode: str = "cooperative", *, seed: int = 0,
           progress: Callable[[int], None] | None = None) -> TieredResult:  # fmt: skip
    """A trace through a policy, without prefetches; the same arguments give the same result.

    Args:
        policy: a name of `moeoff.cache`, or one ready to use, whose table both memories go by.

    Raises:
        OptionError: no such policy or mode.
        BudgetError: as `TieredBuffer`.
    """
    model = trace.model
    buffer = TieredBuffer(model, speeds, vram_bytes, min(arena_bytes, model.full_bytes), mode)
    if isinstance(policy, str):
        policy = create(policy, model.shape(vram_bytes if mode == "centric" else arena_bytes), buffer.priorities, seed=seed)
    buffer.priorities = policy.priorities
    policy.prepare(trace.events)
    sequences = {0}  # so far
    for n, event in enumerate(trace.events):
        if trace.starts[n]:
            for sequence in trace.begins.get(n, sequences):
                policy.reset_sequence(sequence)
        event = copy.copy(event)  # the recorded run's hits stay
        buffer.compute(event)
        policy.update(event)
        if event.sequences is not None:
            sequences.update(event.sequences.tolist())
        if progress and n % 1024 == 0:
            progress(n)
    return buffer.result()
