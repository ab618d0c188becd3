"""How good predictions are while a model runs: GoodPred = accuracy x fetch rate (ProMoE §4.1), both counted and none assumed.

Whether an expert was there in time is what the I/O workers' log says: a read of a selected expert that ended after its router
had selected was late. Knows nothing of scores, queues or how far ahead was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..gate_event import GateEvent


@dataclass
class _Selected:
    """What a gate selected that had been predicted, and when."""

    t_ns: int
    right: frozenset[int]


class PredictionMeter:
    """Of tokens that are decoded.

    Args:
        tensors: of the buffer; `gate` of each.
        n_gates: rows of the priority table.
    """

    def __init__(self, tensors: Sequence[Any], n_gates: int):
        self._gate_of = [int(t.gate) for t in tensors]
        self._n_matrices = np.bincount(self._gate_of, minlength=n_gates).tolist()
        self._predicted: list[frozenset[int] | None] = [None] * n_gates
        self._selected: list[list[_Selected]] = [[] for _ in range(n_gates)]  # of the last two tokens, the newest first
        self._n_selected = self._n_right = 0  # experts
        self._right_slices = self._late_slices = 0

    def reset(self) -> None:
        """Counts from here on; predictions that are waiting stay."""
        self._n_selected = self._n_right = self._right_slices = self._late_slices = 0

    def predicted(self, gate: int, best: np.ndarray) -> None:
        """The experts [n] that this gate will select next, as many as serve its tokens."""
        self._predicted[gate] = frozenset(best.tolist())

    def selected(self, event: GateEvent) -> None:
        """A router has selected."""
        gate, ids = event.gate, frozenset(event.ids.ravel().tolist())
        right = ids & (self._predicted[gate] or frozenset())
        self._predicted[gate] = None
        self._selected[gate] = [_Selected(event.t_ns, right), *self._selected[gate][:1]]
        self._n_selected += len(ids)
        self._n_right += len(right)
        self._right_slices += len(right) * self._n_matrices[gate]

    def read(self, reads: np.ndarray) -> None:
        """Finished reads, of `READ_DTYPE`, at the latest a token after they ended."""
        if not len(reads):
            return
        for tensor, expert, t_done, result in zip(*(reads[name].tolist() for name in ("tensor", "expert", "t_done", "result"))):
            found = next((s for s in self._selected[self._gate_of[tensor]] if s.t_ns < t_done), None)
            if result == 0 and found is not None and expert in found.right:
                self._late_slices += 1

    @property
    def accuracy(self) -> float | None:
        """Of the experts that were selected, the share that had been predicted; a layer without a prediction counts 0."""
        return self._n_right / self._n_selected if self._n_selected else None

    @property
    def fetch_rate(self) -> float | None:
        """Of the slices of experts that were predicted and selected, the share that was resident when their router selected."""
        return max(1 - self._late_slices / self._right_slices, 0.0) if self._right_slices else None

    @property
    def good_pred(self) -> float | None:
        """Of the experts that were selected, the share that had been predicted and was there in time."""
        return self.accuracy * self.fetch_rate if self.accuracy is not None and self.fetch_rate is not None else None
