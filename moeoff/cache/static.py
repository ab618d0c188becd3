"""The experts that were popular on other text, independent of this one."""

from typing import Any

import numpy as np

from ..gate_event import GateEvent
from .base import Policy, Sections, used


class Static(Policy):
    """Keeps the most popular experts of a calibration run.

    Options:
        counts: [n_gates, n_experts] uses on other text. Without it the policy counts the first `learn` tokens and then stops.
    """

    name, summary = "static", "keeps the experts that were popular before"
    defaults = {"counts": None, "learn": 512}
    profile_sections = ("popularity",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {"counts": profile["popularity"]["counts"]} if "popularity" in profile else {}

    def start(self) -> None:
        counts = self.options["counts"]
        self._left = self.options["learn"] if counts is None else 0
        if counts is not None:
            self.priorities[:] = np.asarray(counts, np.float32)

    def update(self, event: GateEvent) -> None:
        if self._left > 0:
            experts, count = used(event)
            self.priorities[event.gate][experts] += count
            if event.gate == self.shape.n_gates - 1:
                self._left -= len(event.ids)
