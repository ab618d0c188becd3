"""EdgeMoE's frequency over distance (§3.3.3)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..gate_event import GateEvent
from .base import Sections, used
from .grouped import GroupedPolicy


class EdgeMoE(GroupedPolicy):
    """Eviction score -f / distance (EdgeMoE §3.3.3): rarely used experts of layers that run late are evicted first.

    The paper prints the distance as (S - i + I) mod S, which is smallest for the layer that has just run: against the paper's
    own text, the layer that runs next would be evicted first. Here it is (i - I + S) mod S; `printed` takes the paper's form. A
    distance of 0, the layer that is evicting now, is a whole token (S): an expert that it has not selected cannot be used before.
    `counts` [n_gates, n_experts], uses in other text, order what this run has not used: the buffer begins with the most frequent.
    """

    name, summary = "edgemoe", "keeps what is used often and in layers that come soon"
    defaults = {"printed": False, "counts": None}
    profile_sections = ("popularity",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {"counts": profile["popularity"]["counts"]} if "popularity" in profile else {}

    def start(self) -> None:
        super().start()
        n = self.shape.n_gates
        i = np.arange(n)
        sign = -1 if self.options["printed"] else 1
        distance = (sign * (i[None] - i[:, None])) % n  # [I, i]
        distance[distance == 0] = n
        self._nearness = (1 / distance).astype(np.float32)[:, :, None]
        self._counts = np.zeros_like(self.priorities)
        if (counts := self.options["counts"]) is not None:  # less than one use: who goes first among those that this run has not used
            self._counts += np.asarray(counts, np.float32) / (np.max(counts) + 1)
            np.multiply(self._counts, self._nearness[0], out=self.priorities)

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        for event in events:
            experts, count = used(event)
            self._counts[event.gate][experts] += count
        np.multiply(self._counts, self._nearness[(first + len(events)) % self.shape.n_gates], out=self.priorities)
