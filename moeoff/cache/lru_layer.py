"""ProMoE's cache: least recently used in each layer, as many experts in each (§6.1)."""

import numpy as np

from ..gate_event import GateEvent
from .arc import quotas
from .base import Policy

_OVER = 2.0  # an expert within its layer's quota outranks one beyond it by this much
_OWN = 1.0  # the layer that evicts next takes from itself first
_ORDER = 0.5  # the latest of a layer outranks its oldest by this much at most


class LayerLRU(Policy):
    """Each layer keeps the experts that it used last, as many as fit evenly; what a layer misses takes the place of its own oldest.

    The buffer has one arena for all layers, so that a quota is a rank: experts beyond their layer's go first, whatever layer misses,
    then those of the layer that is about to select, the oldest first. What was prefetched and not selected is beyond the quota. Until the
    arena is full a layer may have more than its quota.
    """

    name, summary = "lru-layer", "keeps the most recently used of each layer, as many in each (ProMoE)"

    def start(self) -> None:
        self._last = np.zeros(self.priorities.shape, np.int64)
        self._clock, self._next = 0, 0
        self.resize(self.shape.capacity)

    def resize(self, capacity: float) -> None:
        """New quotas, the same for every layer."""
        super().resize(capacity)
        self._quotas = quotas(self.shape, 0)
        for gate in range(self.shape.n_gates):
            self._rank(gate)
        self.priorities[self._next] -= _OWN

    def update(self, event: GateEvent) -> None:
        gate, ids = event.gate, event.ids.ravel()
        self._last[gate, ids] = np.arange(self._clock + 1, self._clock + 1 + len(ids))  # of a batch's tokens the last counts
        self._clock += len(ids)
        self._rank(gate)
        if gate != self._next:
            self._rank(self._next)
        self._next = (gate + 1) % self.shape.n_gates
        self.priorities[self._next] -= _OWN

    def _rank(self, gate: int) -> None:
        last, quota = self._last[gate], self._quotas[gate]
        quota = min(quota, len(last))
        oldest = max(int(np.partition(last, len(last) - quota)[len(last) - quota]), 1) if quota else self._clock + 1
        # one event's experts have been used at once: without an order of their own the buffer would take a matrix of each
        recency = (last - oldest) * (_ORDER / (self._clock - oldest + 2))
        self.priorities[gate] = np.where(last >= oldest, recency, -_OVER)
