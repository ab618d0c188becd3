"""Least frequently used, counted in one text or in all."""

import numpy as np

from ..gate_event import GateEvent
from .base import Policy, used, with_row


class LFU(Policy):
    """Counts uses. `sequence` forgets a sequence's when it begins a text (HOBBIT §3.4: +4.5 % hits for LFU); several have their sum."""

    name, summary = "lfu", "keeps the experts this text has used most often"
    defaults = {"sequence": True}

    def start(self) -> None:
        # of each sequence; sequence 0's, mostly the only one, are what the others leave of the table, and its row means nothing
        self._own = np.zeros((1, *self.priorities.shape), np.float32)

    def update(self, event: GateEvent) -> None:
        experts, count = used(event)
        self.priorities[event.gate][experts] += count
        if event.sequences is not None and self.options["sequence"]:
            self._own = with_row(self._own, event.sequences.max())
            np.add.at(self._own[:, event.gate], (event.sequences[:, None], event.ids), 1)

    def reset_sequence(self, sequence: int = 0) -> None:
        if not self.options["sequence"]:
            return
        if sequence == 0:
            self.priorities[:] = self._own[1:].sum(axis=0)
        elif sequence < len(self._own):
            self.priorities -= self._own[sequence]
            self._own[sequence] = 0
