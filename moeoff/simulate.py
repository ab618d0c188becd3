"""Replays traces through the live policies, with the native buffer's rules of eviction.

The same objects, the same order: a gate counts its slices as hits or misses, stamps them, takes slots for what is absent from
the lowest (priority, last use, index) that it has not chosen itself, and only then does the policy learn of it. So the replay
of a run whose policy kept up with it evicts exactly what the run evicted. Where the arena cannot hold one gate's choice (large
prompts) the native order depends on the reads' timing, and the replay takes one possible order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .cache import Policy, create
from .cache.importance import miss_cost
from .errors import BudgetError
from .trace import Model, Trace


@dataclass(frozen=True)
class Result:
    """What one policy did with one buffer. Counts are of slices, sizes in bytes.

    Attributes:
        gate_hits, gate_misses: [n_gates].
        bytes_read: of slices, what disks would have given.
        miss_penalty: HOBBIT §3.4, in misses of a whole expert in high precision; low ones cost B_l/B_h, skipped ones nothing.
        event_hits: [n_events], with `events=True` only.
        resident: [n_slices] bool at the end.
    """

    policy: str
    arena_bytes: int
    n_tokens: int
    gate_hits: np.ndarray
    gate_misses: np.ndarray
    evictions: int
    bytes_read: int
    miss_penalty: float
    resident: np.ndarray
    event_hits: np.ndarray | None = None

    @property
    def hit_rate(self) -> float:
        uses = self.gate_hits.sum() + self.gate_misses.sum()
        return float(self.gate_hits.sum() / uses) if uses else 0.0

    def to_dict(self) -> dict:
        n = max(self.n_tokens, 1)
        per_layer = self.gate_hits / np.maximum(self.gate_hits + self.gate_misses, 1)
        return {
            "strategy": self.policy,
            "arena_bytes": self.arena_bytes,
            "tokens": self.n_tokens,
            "hit_rate": self.hit_rate,
            "evictions": self.evictions,
            "bytes_per_token": self.bytes_read / n,
            "miss_penalty_per_token": self.miss_penalty / n,
            "hit_rate_by_layer": per_layer.round(6).tolist(),
        }


class Replay:
    """Slices of a model in an arena of `arena_bytes`: hits, misses and victims of one gate after the other.

    Slices are numbered as natively, tensor after tensor, in a grid [n_tensors, n_experts] as wide as the widest tensor.
    """

    def __init__(self, model: Model, arena_bytes: int):
        floor = 2 * max(t.slot_bytes for t in model.tensors)
        if arena_bytes < floor:
            raise BudgetError(f"an arena of {arena_bytes} bytes is below the floor of {floor}")
        self.width, self.limit = model.n_experts, arena_bytes
        n = len(model.tensors) * self.width
        self.nbytes = np.repeat([t.nbytes for t in model.tensors], self.width)
        self.slot = np.repeat([t.slot_bytes for t in model.tensors], self.width)
        self.one_class = len({t.slot_bytes for t in model.tensors}) == 1
        self.tensor_gate = np.array([t.gate for t in model.tensors])
        # the order the graph uses a gate's matrices in; equal matrices cannot be
        order = sorted(range(len(model.tensors)), key=lambda i: model.tensors[i].matrix)
        self.firsts = [np.array([i * self.width for i in order if model.tensors[i].gate == g])[:, None] for g in range(model.n_gates)]
        self.resident = np.zeros(n, bool)
        self.last_use = np.zeros(n, np.int64)
        self.clock = 0
        self.free: dict[int, int] = dict.fromkeys((t.slot_bytes for t in model.tensors), 0)  # committed slots that hold nothing
        self.committed = 0
        self.evictions = 0

    def gate(self, gate: int, chosen: np.ndarray, table: np.ndarray) -> tuple[int, np.ndarray]:
        """One gate event; returns the number of resident slices and the absent ones (now resident)."""
        self.clock += 1
        want = (self.firsts[gate] + chosen).ravel()
        self.last_use[want] = self.clock
        here = self.resident[want]
        n_hit = int(np.count_nonzero(here))
        missing = want[~here]
        if missing.size:
            self._admit(missing, want, table)
        return n_hit, missing

    def _admit(self, missing: np.ndarray, want: np.ndarray, table: np.ndarray) -> None:
        victims = None
        if self.one_class:
            stride = int(self.slot[0])
            room = (self.limit - self.committed) // stride
            need = missing.size - room
            self.committed += min(missing.size, room) * stride
            if need <= 0:
                self.resident[missing] = True
                return
            victims = self._victims(want, table, int(need))
            self.resident[victims] = False
            self.evictions += len(victims)
            fits = missing.size - (need - len(victims))
            self.resident[missing[:fits]] = True
            self._squeeze(missing[fits:], want)
            return
        queue = None
        for at, index in enumerate(missing):
            stride = int(self.slot[index])
            while not self._take(stride):
                if queue is None:
                    queue = iter(self._victims(want, table, int(self.resident.sum())))
                victim = next(queue, None)
                if victim is None:
                    self._squeeze(missing[at:], want)
                    return
                self._evict(victim)
            self.resident[index] = True

    def _take(self, stride: int) -> bool:
        """arena::take: a free slot of the class, or bytes of free slots of any class."""
        if self.free[stride]:
            self.free[stride] -= 1
            return True
        for size in self.free:
            while self.committed + stride > self.limit and self.free[size]:
                self.free[size] -= 1
                self.committed -= size
        if self.committed + stride > self.limit:
            return False
        self.committed += stride
        return True

    def _evict(self, index: int) -> None:
        self.resident[index] = False
        self.free[int(self.slot[index])] += 1
        self.evictions += 1

    def _victims(self, want: np.ndarray, table: np.ndarray, n: int) -> np.ndarray:
        """The `n` lowest residents outside `want`, in order if there is more than one size class."""
        rank = np.take(table, self.tensor_gate, axis=0).ravel()
        mask = self.resident.copy()
        mask[want] = False
        candidates = np.flatnonzero(mask)
        if candidates.size <= n and self.one_class:
            return candidates
        rank = rank[candidates]
        if n < candidates.size:
            kth = np.partition(rank, n - 1)[n - 1]
            keep = rank <= kth
            candidates, rank = candidates[keep], rank[keep]
            if candidates.size == n and self.one_class:
                return candidates
        return candidates[np.lexsort((candidates, self.last_use[candidates], rank))[:n]]

    def _squeeze(self, late: np.ndarray, want: np.ndarray) -> None:
        """The choice of one gate does not fit: each late slice takes the place of one that is computed already, or needed last."""
        for index in late:
            place = want.tolist().index(index)
            done = [i for i in want[:place] if self.resident[i]]
            ahead = [i for i in want[place + 1 :] if self.resident[i]]
            stride = int(self.slot[index])
            queue = iter([*done, *reversed(ahead)])
            if self.one_class:
                victim = next(queue, None)
                if victim is not None:
                    self.resident[victim] = False
                    self.evictions += 1
                    self.resident[index] = True
                continue
            while not self._take(stride):
                victim = next(queue, None)
                if victim is None:
                    break
                self._evict(victim)
            else:
                self.resident[index] = True


def simulate(trace: Trace, policy: str | Policy, arena_bytes: int, *, seed: int = 0, lag: str = "event", events: bool = False,
             progress: Callable[[int], None] | None = None, **options) -> Result:  # fmt: skip
    """Replays a trace; the same arguments give the same result.

    Args:
        policy: a name of `moeoff.cache`, or one ready to use.
        arena_bytes: of the experts' arena, slot padding included, as `Llama(expert_memory=...)`.
        lag: "event": a gate sees what the policy made of the gate before it. "token": of the token before (`Driver(hold=True)`).
        events: also returns hits of each event.
        progress: called with the number of events done, now and then.

    Raises:
        OptionError: no such policy or option.
        BudgetError: the arena is below the floor.
    """
    model = trace.model
    arena_bytes = min(arena_bytes, model.full_bytes)
    if isinstance(policy, str):
        policy = create(policy, model.shape(arena_bytes), seed=seed, **options)
    if policy.static and type(policy).update is Policy.update and len({t.slot_bytes for t in model.tensors}) == 1:
        return _simulate_lru(trace, policy.name, arena_bytes, events, progress)
    policy.prepare(trace.events)
    replay = Replay(model, arena_bytes)
    table = policy.priorities if lag == "event" else policy.priorities.copy()
    last = model.n_gates - 1
    hits, misses = np.zeros(model.n_gates, np.int64), np.zeros(model.n_gates, np.int64)
    event_hits = np.zeros(len(trace.events), np.int64) if events else None
    bytes_read, penalty = 0, 0.0
    costs = _costs(trace)
    for n, event in enumerate(trace.events):
        if trace.starts[n]:
            policy.reset_sequence()
            if lag != "event":
                table[:] = policy.priorities
        chosen = event.ids[0] if len(event.ids) == 1 else _first_seen(event.ids)
        n_hit, missing = replay.gate(event.gate, chosen, table)
        hits[event.gate] += n_hit
        if missing.size:
            misses[event.gate] += missing.size
            bytes_read += int(replay.nbytes[missing].sum())
            penalty += costs[n][missing % replay.width].sum() / len(replay.firsts[event.gate])
        if events:
            event_hits[n] = n_hit
        policy.update(event)
        if lag != "event" and event.gate == last:
            table[:] = policy.priorities
        if progress and n % 4096 == 0:
            progress(n)
    return Result(policy.name, arena_bytes, trace.n_tokens, hits, misses, replay.evictions, bytes_read, float(penalty), replay.resident, event_hits)


def _simulate_lru(trace: Trace, name: str, arena_bytes: int, events: bool, progress) -> Result:
    """All priorities equal, all slots of one size: an ordered dictionary is the whole buffer."""
    model = trace.model
    width, capacity = model.n_experts, arena_bytes // model.tensors[0].slot_bytes
    nbytes = model.tensors[0].nbytes
    same = len({t.nbytes for t in model.tensors}) == 1
    firsts = [[i * width for i, t in enumerate(model.tensors) if t.gate == g] for g in range(model.n_gates)]
    if any(len(np.unique(e.ids)) * len(firsts[e.gate]) > capacity for e in trace.events if len(e.ids) > 1) or capacity < max(
        model.n_used * len(f) for f in firsts
    ):
        return simulate(trace, _Zero(model.shape(arena_bytes)), arena_bytes, events=events, progress=progress)
    hits, misses = [0] * model.n_gates, [0] * model.n_gates
    event_hits = np.zeros(len(trace.events), np.int64) if events else None
    recent: OrderedDict[int, None] = OrderedDict()  # the least recent, and among equals the lowest index, first
    n_read, bytes_read, penalty, evictions = 0, 0, 0.0, 0
    costs = _costs(trace)
    touch, pop = recent.move_to_end, recent.popitem
    for n, event in enumerate(trace.events):
        gate = event.gate
        chosen = sorted(set(event.ids.ravel().tolist()))
        n_hit = 0
        absent = []
        for first in firsts[gate]:
            for expert in chosen:
                index = first + expert
                if index in recent:
                    touch(index)
                    n_hit += 1
                else:
                    recent[index] = None
                    absent.append(expert)
                    if not same:
                        bytes_read += model.tensors[index // width].nbytes
        hits[gate] += n_hit
        if absent:
            misses[gate] += len(absent)
            n_read += len(absent)
            cost = costs[n]
            penalty += sum([cost[e] for e in absent]) / len(firsts[gate])
            while len(recent) > capacity:
                pop(False)
                evictions += 1
        if events:
            event_hits[n] = n_hit
        if progress and n % 4096 == 0:
            progress(n)
    resident = np.zeros(len(model.tensors) * width, bool)
    resident[list(recent)] = True
    bytes_read = n_read * nbytes if same else bytes_read
    return Result(name, arena_bytes, trace.n_tokens, np.array(hits), np.array(misses), evictions, bytes_read, float(penalty), resident, event_hits)


class _Zero(Policy):
    """LRU on the general path."""

    name = "lru"

    def update(self, event) -> None:
        pass


def _first_seen(ids: np.ndarray) -> np.ndarray:
    """The distinct experts of [n_tokens, n_used], in the order they appear."""
    distinct, first = np.unique(ids, return_index=True)
    return distinct[np.argsort(first)]


def _costs(trace: Trace) -> np.ndarray:
    """[n_events, n_experts] float32: what a miss of each expert costs, the dearest token's if several chose it."""
    cached = getattr(trace, "_miss_costs", None)
    if cached is None:
        cached = np.zeros((len(trace.events), trace.model.n_experts), np.float32)
        single = [n for n, e in enumerate(trace.events) if e.ids.shape == (1, trace.model.n_used)]
        if single:
            ids = np.concatenate([trace.events[n].ids for n in single])
            cached[np.array(single)[:, None], ids] = miss_cost(np.concatenate([trace.events[n].weights for n in single]))
        rest = set(range(len(trace.events))) - set(single)
        for n in rest:
            event = trace.events[n]
            np.maximum.at(cached[n], event.ids.ravel(), miss_cost(event.weights).ravel())
        trace._miss_costs = cached
    return cached
