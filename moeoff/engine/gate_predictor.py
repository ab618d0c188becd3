"""The `gate` predictor on the native driver thread: with each gate event it predicts
and prefetches there, without Python (moeoff-gate-predictor).

Python says what it goes by, once a token, and learns then what it has predicted. All of
it is read and written on that thread, or while nothing computes and no event waits.
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
    """Routers of the next gates, of a predictor, as the native thread reads them.

    Args:
        predictor: of which `native` says so.
        n_experts: columns of the priority table.
        n_candidates: of a prediction for each token.
        max_rows: tokens of an event that are predicted for.

    Attributes:
        settings: struct moeoff_prefetching.
        max_rank: [n_gates] int32, up to which place what is absent is read.
        selected: [n_gates, n_experts] bool, what each gate's last event of decoded
            tokens selected.
    """

    def __init__(self, predictor: RoutersAhead, n_experts: int, n_candidates: int, max_rows: int):
        n_gates = len(predictor.steps)
        # whose numbers are read for as long as this lives
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
        """Of these gates, one behind the other; None: they choose by the order of their
        logits.
        """
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
        """Pass each event of tokens that are decoded to the score on that thread, which
        publishes its priorities.
        """
        self._score = score
        self.settings.score = pointer(score)

    def take_counts(self) -> tuple[int, int]:
        """Return decoded tokens, at least 1, and slices that they missed, both since
        the last call.
        """
        settings = self.settings
        counts = max(settings.n_tokens, 1), settings.n_missed
        settings.n_tokens = settings.n_missed = 0
        return counts

    def stop(self) -> None:
        """Predicts no more."""
        self.settings.is_on, self.settings.n_together, self.settings.n_quiet = False, 1, 0

    def predictions(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of those since the last call: gate, experts, and the place of each. Valid
        until the next event.
        """
        for gate in np.flatnonzero(self._n_predicted).tolist():
            n = self._n_predicted[gate]
            yield gate, self._experts[gate, :n], self._places[gate, :n]
        self._n_predicted[:] = 0
