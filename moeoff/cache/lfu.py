"""Least frequently used, counted in one text or in all."""

from ..gate_event import GateEvent
from .base import Policy, used


class LFU(Policy):
    """Counts uses. `sequence` forgets them when a text begins (HOBBIT §3.4: +4.5 % hits for LFU)."""

    name, summary = "lfu", "keeps the experts this text has used most often"
    defaults = {"sequence": True}

    def update(self, event: GateEvent) -> None:
        experts, count = used(event)
        self.priorities[event.gate][experts] += count

    def reset_sequence(self) -> None:
        if self.options["sequence"]:
            self.priorities[:] = 0
