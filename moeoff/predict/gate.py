"""The next layers' own routers, applied one or several layers early."""

from __future__ import annotations

import numpy as np

from ..gate_event import GateEvent
from .base import DEFAULT_FIT, FitOptions, Prediction, Predictor, Progress, top_k, widened
from .matmul import Rows
from .recording import Recording

SHALLOW = 0.85  # of the median layer's recall


class _Ahead(Predictor):
    """Routers of the next `p` gates on a gate's input, as one matrix product."""

    wants_gate_input = True
    profile_section = "gate"

    def _prepare(self, p: int, norm: bool | None) -> None:
        """norm: None takes what calibration measured for each gate, and True where there is none."""
        router = self.router
        chosen = None if norm is not None or self.arrays is None else self.arrays.get("next_norm")
        self._steps: list[tuple[Rows, np.ndarray | None, list[int]] | None] = []
        for gate in range(router.n_gates):
            parts: list[tuple[int, tuple[np.ndarray, np.ndarray | None]]] = []
            for target in range(gate + 1, min(gate + p, router.n_gates - 1) + 1):
                use = bool(chosen[target]) if chosen is not None else norm is not False
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

    @classmethod
    def fit(cls, recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
        """From a `Recording` with gate inputs; None if it has none.

        Returns:
            [n_gates] each: next_norm, whether the next layer's norm predicts better; recall_raw, recall_norm at k without and
            with it; recall_widened at the 75th percentile of the better; cosine of the gate input with the one before.
            shallow [1]: Fate's L (§4.4), how many first layers are predicted badly.
        """
        if recording.inputs is None:
            return None
        router, inputs = recording.router, recording.inputs
        n, used = router.n_gates, recording.used()[recording.kept]
        arrays = {name: np.zeros(n, np.float32) for name in ("recall_raw", "recall_norm", "recall_widened", "cosine")}
        arrays["next_norm"] = np.ones(n, bool)
        for target in range(1, n):
            x, y = inputs[:, target - 1].astype(np.float32), used[:, target]
            total, k = max(y.sum(), 1), router.n_used[target]
            best = -1.0
            for name, norm in (("recall_raw", False), ("recall_norm", True)):
                if (found := router.ahead(target - 1, target, norm)) is None:
                    continue
                logits = x @ found[0].T + (0 if found[1] is None else found[1])
                scores = router.selection(target, router.gated(logits))
                arrays[name][target] = recall = np.take_along_axis(y, top_k(scores, k), axis=1).sum() / total
                if recall > best:
                    best, arrays["next_norm"][target] = recall, norm
                    arrays["recall_widened"][target] = np.take_along_axis(y, widened(scores), axis=1).sum() / total
            arrays["cosine"][target] = _cosine(x, inputs[:, target].astype(np.float32))
            if progress:
                progress(target, n - 1)
        arrays["shallow"] = np.array([shallow_boundary(np.maximum(arrays["recall_raw"], arrays["recall_norm"]))])
        return arrays


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Mean over rows."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / np.maximum(lengths, 1e-12)).mean())


def shallow_boundary(recall: np.ndarray) -> int:
    """Fate §4.4: the first layers whose prediction is worse than 85 % of the median layer's. recall: [n_gates], of gate 0: 0."""
    if len(recall) < 2:
        return 0
    good = np.flatnonzero(recall >= SHALLOW * np.median(recall[1:]))
    return int(good[0]) if len(good) else 0


class CrossLayerGate(_Ahead):
    """Fate §4.2: the router of layer i + 1 on the gate input of layer i. Also ProMoE's skip-based baseline.

    Options:
        norm: apply layer i + 1's own norm weights (see `Router.ahead`). None: where calibration measured that it helps; without one, yes.
    """

    name, summary = "gate", "the next layer's router on this layer's input"
    defaults = {"norm": None}

    def start(self) -> None:
        self._prepare(1, self.options["norm"])


class StackedGate(_Ahead):
    """HOBBIT §3.3: the routers of the next p layers, stacked.

    Options:
        p: layers.
        norm: as for `gate`.
    """

    name, summary = "stacked", "the next p layers' routers on this layer's input"
    defaults = {"p": 3, "norm": None}

    def start(self) -> None:
        self._prepare(self.options["p"], self.options["norm"])
