"""EdgeMoE's frequency over distance (§3.3.3)."""

from collections.abc import Sequence

import numpy as np

from ..gate_event import GateEvent
from .base import used
from .grouped import GroupedPolicy


class EdgeMoE(GroupedPolicy):
    """Eviction score -f / distance (EdgeMoE §3.3.3): rarely used experts of layers that run late are evicted first.

    The paper prints the distance as (S - i + I) mod S, which is smallest for the layer that has just run: against the paper's
    own text, the layer that runs next would be evicted first. Here it is (i - I + S) mod S; `printed` takes the paper's form. A
    distance of 0, the layer that is evicting now, is a whole token (S): an expert that it has not selected cannot be used before.
    """

    name, summary = "edgemoe", "keeps what is used often and in layers that come soon"
    defaults = {"printed": False}

    def start(self) -> None:
        super().start()
        n = self.shape.n_gates
        i = np.arange(n)
        sign = -1 if self.options["printed"] else 1
        distance = (sign * (i[None] - i[:, None])) % n  # [I, i]
        distance[distance == 0] = n
        self._nearness = (1 / distance).astype(np.float32)[:, :, None]
        self._counts = np.zeros_like(self.priorities)

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        for event in events:
            experts, count = used(event)
            self._counts[event.gate][experts] += count
        np.multiply(self._counts, self._nearness[(first + len(events)) % self.shape.n_gates], out=self.priorities)
