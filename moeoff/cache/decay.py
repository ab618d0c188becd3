"""Exponentially decayed counts: frequency and recency in one number."""

from ..gate_event import GateEvent
from .base import Policy, used

_LARGEST = 1e18  # of a float32 with room to add


class Decay(Policy):
    """Each use counts 1, and loses the share `rate` with each token since. The increment grows instead of all counts shrinking."""

    name, summary = "decay", "counts uses, older ones for less"
    defaults = {"rate": 0.02}

    def start(self) -> None:
        self._step = 1.0
        self._growth = 1 / (1 - self.options["rate"])

    def update(self, event: GateEvent) -> None:
        experts, count = used(event)
        self.priorities[event.gate][experts] += count * self._step
        if event.gate == self.shape.n_gates - 1:
            # one prompt of many tokens fades like as many tokens, but never past what a float holds
            self._step *= min(self._growth ** len(event.ids), 1e6)
            if self._step > _LARGEST:
                self.priorities /= self._step
                self._step = 1.0
