"""Routers of coming layers, applied to this layer's gate input in one matrix product: the common part of Fate's and HOBBIT's predictors."""

from __future__ import annotations

import numpy as np

from ..gate_event import GateEvent
from ..npz import require_arrays
from .base import Prediction, Predictor
from .router import Rows


class RoutersAhead(Predictor):
    """Routers of the next gates on a gate's input: call `look_ahead` in `start`."""

    wants_gate_input = True
    profile_section = "gate"

    def look_ahead(self, p: int, norm: bool | None) -> None:
        """Stacks the routers of the next `p` gates.

        Args:
            norm: as for `Router.ahead`; None takes what calibration measured for each gate, and True where there is none.
        """
        router = self.router
        measured = None
        if norm is None and self.arrays is not None:
            require_arrays(self.arrays, {"next_norm": ("b", (router.n_gates,))})
            measured = self.arrays["next_norm"]
        self._steps: list[tuple[Rows, np.ndarray | None, list[int]] | None] = []
        for gate in range(router.n_gates):
            parts: list[tuple[int, tuple[np.ndarray, np.ndarray | None]]] = []
            for target in range(gate + 1, min(gate + p, router.n_gates - 1) + 1):
                use = bool(measured[target]) if measured is not None else norm is not False
                found = router.ahead(gate, target, use)
                if found is None or (parts and found[0].shape != parts[0][1][0].shape):
                    break  # the look ahead ends at a layer that routes by token, or whose router has another shape
                parts.append((target, found))
            if not parts:
                self._steps.append(None)
                continue
            weight = np.concatenate([w for _, (w, _) in parts])
            if any(b is not None for _, (_, b) in parts):
                bias = np.concatenate([np.zeros(len(w), np.float32) if b is None else b for _, (w, b) in parts])
            else:
                bias = None
            self._steps.append((Rows(weight), bias, [target for target, _ in parts]))

    def observe(self, event: GateEvent) -> list[Prediction]:
        step = self._steps[event.gate]
        if step is None or event.gate_input is None:
            return []
        rows, bias, targets = step
        logits = rows.product(event.gate_input)
        if bias is not None:
            logits += bias
        router = self.router
        scores = logits.reshape(len(logits), len(targets), -1)
        if router.by_probs:
            scores = router.gated(scores)
            return [Prediction(gate, router.selection(gate, scores[:, i])) for i, gate in enumerate(targets)]
        return [Prediction(gate, scores[:, i], True) for i, gate in enumerate(targets)]
