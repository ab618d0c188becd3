"""The `gate` predictor on the native driver thread (moeoff-gate-predictor).

Python sets its parameters and reads its predictions once per token, on that thread or
while no event waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_float, c_int32, c_uint8, pointer
from typing import Any

import numpy as np

from ..llamacpp import native
from ..policies.base import RoutersAhead


def _address(numbers: np.ndarray | None) -> Any:
    return None if numbers is None else numbers.ctypes.data_as(POINTER(c_float))


class GatePredictor:
    """A predictor's routers for the native thread.

    Args:
        predictor: Predictor with `native` routers.
        n_experts: Columns of the priority table.
        n_candidates: Candidates per token.
        max_rows: Most tokens of an event to predict for.

    Attributes:
        settings: struct moeoff_prefetching.
        max_rank: [n_gates] int32, last rank at which absent experts are read.
        selected: [n_gates, n_experts] bool, experts of each gate's last decode event.
    """

    def __init__(self, predictor: RoutersAhead, n_experts: int, n_candidates: int, max_rows: int):
        n_gates = len(predictor.steps)
        # keeps alive the arrays that the native thread reads
        self._predictor, self._selection_biases = predictor, list[np.ndarray]()
        self._routers = (native.RoutersAhead * n_gates)()
        for gate, step in enumerate(predictor.steps):
            if step is not None:
                rows, bias, targets = step
                n, selection = (
                    len(targets),
                    self._selection_bias(targets, rows.n_rows // len(targets)),
                )
                self._routers[gate] = native.RoutersAhead(
                    rows.address,
                    _address(bias),
                    _address(selection),
                    rows.nbytes,
                    rows.type,
                    rows.n_cols,
                    rows.n_rows // n,
                    n,
                )
        self.max_rank = np.full(n_gates, n_candidates, np.int32)
        self._n_predicted, self.selected = (
            np.zeros(n_gates, np.int32),
            np.zeros((n_gates, n_experts), bool),
        )
        self._experts, self._places = (np.zeros((n_gates, n_experts), np.int32) for _ in range(2))
        arrays = (
            array.ctypes.data_as(POINTER(c_int32))
            for array in (self.max_rank, self._experts, self._places, self._n_predicted)
        )
        self.settings = native.Prefetching(
            self._routers,
            *arrays,
            n_candidates=n_candidates,
            max_rows=max_rows,
            n_together=1,
            selected=self.selected.ctypes.data_as(POINTER(c_uint8)),
        )

    def _selection_bias(self, targets: Sequence[int], n_experts: int) -> np.ndarray | None:
        """Return the concatenated biases, or None if selection follows the logits."""
        router = self._predictor.router
        if not router.by_probs:
            return None
        parts = [
            np.zeros(n_experts, np.float32)
            if (bias := router.selection_bias[gate]) is None
            else bias
            for gate in targets
        ]
        self._selection_biases.append(np.concatenate(parts, dtype=np.float32))
        return self._selection_biases[-1]

    def take_for(self, score: native.Score) -> None:
        """Update and publish the native score with decode events."""
        self._score = score
        self.settings.score = pointer(score)

    def take_counts(self) -> tuple[int, int]:
        """Return decoded tokens, at least 1, and missed slices since the last call."""
        settings = self.settings
        counts = max(settings.n_tokens, 1), settings.n_missed
        settings.n_tokens = settings.n_missed = 0
        return counts

    def stop(self) -> None:
        """Stop predicting."""
        self.settings.is_on, self.settings.n_together, self.settings.n_quiet = False, 1, 0

    def predictions(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield gate, experts and ranks of each prediction since the last call.

        The arrays are valid until the next event.
        """
        for gate in np.flatnonzero(self._n_predicted).tolist():
            n = self._n_predicted[gate]
            yield gate, self._experts[gate, :n], self._places[gate, :n]
        self._n_predicted[:] = 0
