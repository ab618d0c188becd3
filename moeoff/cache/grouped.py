"""Policies that take the events of several gates at once: numpy's calls cost more than their numbers.

A token changes a gate's row once, and a table of priorities that is a few gates old evicts almost the same. The events wait inside the
policy, so that the simulator and a live driver see the same table at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..gate_event import GateEvent
from .base import Policy

UPDATES = 8  # of the table for each token at least, or one for each gate if there are fewer


class GroupedPolicy(Policy):
    """Override `update_gates`; call `super().start()` in `start`, and `super().reset_sequence(sequence)` first in `reset_sequence`.

    Attributes:
        gated: probabilities of router logits, if a policy that `wants_probs` shall make them of events that have logits alone.
    """

    gated: Callable[[np.ndarray], np.ndarray] | None = None

    def start(self) -> None:
        self.group = max(self.shape.n_gates // UPDATES, 1)
        self._waiting: list[GateEvent] = []

    def update(self, event: GateEvent) -> bool:
        """Whether `priorities` has changed."""
        waiting = self._waiting
        changed = bool(waiting) and (event.gate != waiting[-1].gate + 1 or len(event.ids) != len(waiting[0].ids))
        if changed:
            self._apply()
        waiting.append(event)
        if len(waiting) < self.group and event.gate < self.shape.n_gates - 1 and event.decode:
            return changed
        self._apply()
        return True

    def _apply(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        if self.gated is not None:
            for event in waiting:
                if event.probs is None and event.logits is not None:
                    event.probs = self.gated(event.logits)
        self.update_gates(waiting[0].gate, waiting)
        waiting.clear()

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        """Changes `priorities` after the gates `first`, `first` + 1, ... have selected, at most `group` of them and all for as many tokens.

        `events` is valid during the call.
        """
        raise NotImplementedError

    def reset_sequence(self, sequence: int = 0) -> None:
        self._apply()
