"""Reading ahead in a prompt: the next gate's experts come in while this one's are computed.

Of hundreds of tokens some select nearly every expert of a gate, so nothing has to be predicted: all are queued, those that the
most tokens selected before first, and the disk works while layers compute. The gate gives up what it does not select.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..budget.precision import Precision
from ..gate_event import GateEvent
from .expert_buffer import ExpertBuffer

_MOST = 0.75  # share of a gate's experts; a batch that selects fewer leaves the next gate to the predictor
_KEEP = 0.5  # what a count keeps from batch to batch


class ReadAhead:
    """Args:
    buffer: started.
    precision: its share of the least popular experts is read in low precision, as the gate will decide (Fate §4.5).
    """

    def __init__(self, buffer: ExpertBuffer, precision: Precision):
        self._buffer, self._precision = buffer, precision
        self._n_experts = [0] * buffer.priorities.shape[0]
        self._n_slices = [0] * len(self._n_experts)
        for tensor in buffer.tensors:
            self._n_experts[tensor.gate] = max(self._n_experts[tensor.gate], tensor.ne[2])
            self._n_slices[tensor.gate] += tensor.ne[2]
        self._uses = [np.zeros(n, np.float32) for n in self._n_experts]
        self._slices_per_byte = sum(self._n_slices) / buffer.arena_full

    def observe(self, event: GateEvent, first: Sequence[int] = ()) -> bool:
        """After a batch's router has selected; False if it selected too few experts to tell what the next gate needs.

        Args:
            first: of the next gate, what a predictor expects, the most popular first (Fate §4.3); the others follow.
        """
        uses, n = self._uses[event.gate], self._n_experts[event.gate]
        count = np.bincount(event.ids.ravel(), minlength=n)
        uses *= _KEEP
        uses += count
        if np.count_nonzero(count) < _MOST * n:
            return False
        if event.gate + 1 < len(self._uses):
            self._read(event.gate + 1, self._n_slices[event.gate], first)
        return True

    def begin(self, n_tokens: int, n_used: int) -> bool:
        """Before a batch, while nothing computes; False if it is too small to tell what the first gate needs."""
        if 1 - (1 - n_used / self._n_experts[0]) ** n_tokens < _MOST:
            return False
        self._read(0, 0)
        return True

    def _read(self, gate: int, n_computing: int, first: Sequence[int] = ()) -> None:
        """As many as fit beside the slices of the gate that is computed: more would be evicted again before their turn."""
        room = int(self._buffer.stats().arena_bytes * self._slices_per_byte) - n_computing
        self.read(gate, list(dict.fromkeys([*first, *np.argsort(-self._uses[gate], kind="stable").tolist()])), max(room, 0))

    def read(self, gate: int, order: list[int], limit: int = -1) -> int:
        """Queues these experts, those that the most tokens select first, but at most `limit` slices; -1: all. Returns how many it has queued."""
        n_high = len(order) - int(self._precision.prefill_low_share * len(order))
        queued = self._buffer.prefetch(gate, order[:n_high], limit=limit)
        if n_high < len(order):
            queued += self._buffer.prefetch(gate, order[n_high:], low=True, limit=limit if limit < 0 else limit - queued)
        return queued
