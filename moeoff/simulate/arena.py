"""The native buffer's rules of eviction, without the bytes: which slices are in, which go, for one gate after the other.

The same order as moeoff-store.cpp: a gate counts its slices as hits or misses, stamps them, and evicts for those that are absent
the lowest (priority, last use, index) that it has not selected itself. Knows nothing of policies: it is given their table.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import BudgetError
from .trace import Model


class SimulatedArena:
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
        self.free: dict[int, int] = dict.fromkeys((t.slot_bytes for t in model.tensors), 0)  # committed slots without a slice
        self.spare = arena_bytes // 128  # arena::spare_bytes
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

    def resident_experts(self, gate: int) -> np.ndarray:
        """[n_experts] bool: all matrices of the expert are in."""
        rows: np.ndarray = self.resident.reshape(-1, self.width)[self.firsts[gate].ravel() // self.width]
        whole: np.ndarray = np.all(rows, axis=0)
        return whole

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
        queue = self._in_order(want, table)
        for at, index in enumerate(missing):
            if not self._take_slot(int(self.slot[index]), queue):
                self._squeeze(missing[at:], want)
                return
            self.resident[index] = True

    def _in_order(self, want: np.ndarray, table: np.ndarray) -> Iterator[int]:
        """All victims, told when the first is asked for."""
        yield from self._victims(want, table, int(self.resident.sum()))

    def _take_slot(self, stride: int, queue: Iterator[int]) -> bool:
        """slice_table::take_slot: a slot, after evictions if need be; with nothing left to evict, of spare ones too."""
        while not self._take(stride):
            victim = next(queue, None)
            if victim is None:
                return self._take(stride, borrows=True)
            self._evict(victim)
        return True

    def _take(self, stride: int, borrows: bool = False) -> bool:
        """arena::take: a free slot of the class, or bytes of free slots of any class."""
        if self.free[stride]:
            self.free[stride] -= 1
            return True
        if self.committed + stride > self.limit and not borrows and sum(size * n for size, n in self.free.items()) <= self.spare:
            return False
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
        candidates: np.ndarray = np.flatnonzero(mask)
        if candidates.size <= n and self.one_class:
            return candidates
        rank = rank[candidates]
        if n < candidates.size:
            kth = np.partition(rank, n - 1)[n - 1]
            keep = rank <= kth
            candidates, rank = candidates[keep], rank[keep]
            if candidates.size == n and self.one_class:
                return candidates
        candidates = candidates[np.lexsort((candidates, self.last_use[candidates], rank))[:n]]
        return candidates

    def _squeeze(self, late: np.ndarray, want: np.ndarray) -> None:
        """The choice of one gate does not fit: each late slice takes the place of one that is computed already, or needed last."""
        for index in late:
            place = want.tolist().index(index)
            done = [i for i in want[:place] if self.resident[i]]
            ahead = [i for i in want[place + 1 :] if self.resident[i]]
            queue = iter([*done, *reversed(ahead)])
            if self.one_class:
                victim = next(queue, None)
                if victim is not None:
                    self.resident[victim] = False
                    self.evictions += 1
                    self.resident[index] = True
                continue
            if self._take_slot(int(self.slot[index]), queue):
                self.resident[index] = True
