"""Which experts a simulated device holds, and which gives way: the rules of moeoff-device-slots.cpp, or those of one pool.

Experts are numbered gate after gate, as the priority table is. Knows neither bytes nor time.
"""

from __future__ import annotations

import numpy as np

__all__ = ["DeviceExperts"]

_HALVING = 180.0  # steps in which the heat of an expert that is not used halves


class DeviceExperts:
    """Args:
    n_gates, n_experts: of the priority table.
    capacity: experts; of each gate, unless it is one pool.
    one_pool: the gates compete, and among equals the least recently used goes first: the papers' buffers. Otherwise each gate has
        slots of its own, as moeoff's devices do, and among equals that of the least heat goes first.

    Attributes:
        served, writing: [n_gates * n_experts] bool: there; or on its way, with a slot of its own.
        expected: likewise, what a predictor wants kept: evicted last.
    """

    def __init__(self, n_gates: int, n_experts: int, capacity: int, *, one_pool: bool = False):
        n = n_gates * n_experts
        self.one_pool = one_pool
        self.capacity = min(capacity, n if one_pool else n_experts)
        self._n_experts = n_experts
        self.served, self.writing, self.expected = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        self._heat, self._last, self._clock = np.zeros(n), np.zeros(n, np.int64), 0
        self._steps = np.zeros(n_gates, np.int64)

    def use(self, gate: int, chosen: np.ndarray) -> None:
        """The gate's next step: its router has selected these."""
        self._steps[gate] += 1
        self._clock += 1
        self._heat[chosen] = self.heat(chosen) + 1
        self._last[chosen] = self._steps[gate] if not self.one_pool else self._clock

    def heat(self, experts: np.ndarray) -> np.ndarray:
        now = self._clock if self.one_pool else self._steps[experts // self._n_experts]
        faded: np.ndarray = self._heat[experts] * np.exp2(-(now - self._last[experts]) / _HALVING)
        return faded

    def best(self, candidates: np.ndarray, priority: np.ndarray, n: int) -> np.ndarray:
        """Of the candidates the `n` that rank highest, the highest first."""
        order = np.lexsort((-self.heat(candidates), -priority[candidates]))
        return candidates[order[:n]]

    def take(self, expert: int, priority: np.ndarray, needed: np.ndarray, *, forced: bool) -> bool:
        """A slot to write the expert into: a free one, else that of the lowest that is not needed [n] bool, forced or if that gives way."""
        if self.served[expert] or self.writing[expert]:
            return False
        first = 0 if self.one_pool else expert // self._n_experts * self._n_experts
        mine = slice(None) if self.one_pool else slice(first, first + self._n_experts)
        if int(np.count_nonzero(self.served[mine] | self.writing[mine])) >= self.capacity:
            found = first + np.flatnonzero(self.served[mine] & ~needed[mine])
            if not len(found):
                return False
            tie = self._last[found] if self.one_pool else self.heat(found)
            lowest = int(found[np.lexsort((found, tie, priority[found], self.expected[found]))[0]])
            if not forced and not self._displaces(expert, lowest, priority):
                return False
            self.served[lowest] = self.expected[lowest] = False
        self.writing[expert] = True
        return True

    def _displaces(self, expert: int, other: int, priority: np.ndarray) -> bool:
        if priority[expert] != priority[other]:
            return bool(priority[expert] > priority[other])
        heat = self.heat(np.array([expert, other]))
        return bool(heat[0] > heat[1] + 1)

    def finish(self, expert: int) -> None:
        """It has been written."""
        self.writing[expert], self.served[expert] = False, True

    def drop(self, experts: np.ndarray) -> None:
        self.served[experts] = self.expected[experts] = False
