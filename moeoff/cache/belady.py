"""Belady's optimum: evicts what is used again last. The bound that every report shows."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from ..gate_event import GateEvent
from .base import Policy


class Belady(Policy):
    """Priority = -(index of the event that uses the expert next). Knows the future, so it only runs on a trace."""

    name, summary, offline = "belady", "the optimum, which knows the future", True

    def prepare(self, events: Iterable[GateEvent]) -> None:
        self._next: list[list[deque[int]]] = [[deque() for _ in range(self.shape.n_experts)] for _ in range(self.shape.n_gates)]
        n = 0
        for n, event in enumerate(events, 1):
            for expert in set(event.ids.ravel().tolist()):
                self._next[event.gate][expert].append(n)
        self._never = -float(n + 1)  # exact in a float32 up to 16 million events
        for gate, queues in enumerate(self._next):
            self.priorities[gate] = [-q[0] if q else self._never for q in queues]

    def update(self, event: GateEvent) -> None:
        row, queues = self.priorities[event.gate], self._next[event.gate]
        for expert in np.unique(event.ids).tolist():
            queue = queues[expert]
            queue.popleft()
            row[expert] = -queue[0] if queue else self._never
