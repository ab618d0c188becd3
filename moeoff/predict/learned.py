"""A small network for each layer, trained on what the layers before read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import OptionError
from ..gate_event import GateEvent
from .base import DEFAULT_FIT, FitOptions, Prediction, Predictor, Progress
from .matmul import Rows
from .recording import Recording

STRIDES = (1, 2)
EPOCHS, FINE_EPOCHS = 8, 4  # the last ones at a quarter of the learning rate
RATE, ALPHA, BATCH = 2e-3, 1e-3, 256
GAIN = 2.0  # of a router's logit, in deviations, in the logit that the network begins with
COMPONENTS = 256  # of wider gate inputs; a linear map, folded into the first layer


class Learned(Predictor):
    """ProMoE §4.3: a two-layer perceptron for each layer, on the gate input `stride` layers before (§4.4). Needs a profile.

    Options:
        stride: 1 (layer-wise) or 2.
    """

    name, summary = "learned", "a small network on the gate input one or two layers before"
    wants_gate_input = True
    profile_section = "learned"
    needs_profile = True
    defaults = {"stride": 1}
    strides: tuple[int, ...] = STRIDES  # that `fit` trains for

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        if (stride := options.get("stride", STRIDES[0])) not in STRIDES:
            raise OptionError(f"{cls.name}: stride is one of {', '.join(map(str, STRIDES))}, not {stride}")

    def start(self) -> None:
        stride = self.options["stride"]
        self._steps: dict[int, tuple[Rows, np.ndarray, Rows, np.ndarray]] = {}
        if self.arrays is None:
            return
        for target in np.flatnonzero(self.arrays[f"there_{stride}"]):
            first, first_bias, second, second_bias = (
                self.arrays[f"{name}_{stride}"][target].astype(np.float32) for name in ("first", "first_bias", "second", "second_bias")
            )
            self._steps[int(target) - stride] = Rows(first), first_bias, Rows(second), second_bias

    def observe(self, event: GateEvent) -> list[Prediction]:
        step = self._steps.get(event.gate)
        if step is None or event.gate_input is None:
            return []
        first, first_bias, second, second_bias = step
        hidden = first.product(event.gate_input)
        hidden += first_bias
        np.maximum(hidden, 0, out=hidden)
        logits = second.product(hidden)
        logits += second_bias
        np.negative(logits, out=logits)
        np.exp(np.minimum(logits, 80, out=logits), out=logits)
        logits += 1
        return [Prediction(event.gate + self.options["stride"], np.reciprocal(logits, out=logits))]

    @classmethod
    def fit(cls, recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
        """From a `Recording` with gate inputs, 9:1 by sequence; None if it has none. A network for each of `strides`.

        Returns:
            for each stride s: first_s [n_gates, hidden, n_embd], first_bias_s, second_s [n_gates, E, hidden], second_bias_s,
            there_s [n_gates] whether the gate has a network, recall_s [n_gates] at k on the tenth that was not trained on.
        """
        from sklearn.neural_network import MLPClassifier
        from threadpoolctl import threadpool_limits  # scikit-learn depends on it

        if recording.inputs is None:
            return None
        router, hidden, strides = recording.router, options.hidden, cls.strides
        n, e, d = router.n_gates, router.n_experts, recording.inputs.shape[2]
        used = recording.used()[recording.kept]
        train, held = (mask[recording.kept] for mask in recording.split())
        arrays: dict[str, np.ndarray] = {}
        for s in strides:
            arrays |= {
                f"first_{s}": np.zeros((n, hidden, d), np.float16), f"first_bias_{s}": np.zeros((n, hidden), np.float32),
                f"second_{s}": np.zeros((n, e, hidden), np.float16), f"second_bias_{s}": np.zeros((n, e), np.float32),
                f"there_{s}": np.zeros(n, bool), f"recall_{s}": np.zeros(n, np.float32),
            }  # fmt: skip
        jobs = [(g, s) for g in range(n) for s in strides if g + s < n and router.knows(g + s)]
        for done, (g, s) in enumerate(jobs):
            x, ahead = recording.inputs[:, g].astype(np.float32), router.ahead(g, g + s, True)
            if not x.any() or ahead is None:
                continue
            fold, shift = _features(x[train], ahead[0])
            x = x @ fold.T - shift
            y = used[:, g + s]
            active = np.flatnonzero(y[train].any(axis=0))  # the classifier needs both classes of each output
            active = active[~y[train][:, active].all(axis=0)]
            if not len(active):
                continue
            network = MLPClassifier((hidden,), alpha=ALPHA, batch_size=min(BATCH, int(train.sum())), learning_rate_init=RATE, random_state=options.seed)
            best: tuple[float, list[np.ndarray], list[np.ndarray]] = (-1.0, [], [])
            # products this small take longer on more threads, and many times longer where other processes want the cores
            with warnings.catch_warnings(), threadpool_limits(1):
                warnings.simplefilter("ignore")
                network.partial_fit(x[train][:2], y[train][:2][:, active].astype(int), classes=np.arange(len(active)))
                _begin_as_router(network, active, e, y[train].mean(axis=0))
                for epoch in range(EPOCHS + FINE_EPOCHS):
                    network.partial_fit(x[train], y[train][:, active].astype(int), classes=np.arange(len(active)))
                    if epoch == EPOCHS - 1:
                        network._optimizer.learning_rate_init = RATE / 4
                    logits = _logits(network.coefs_, network.intercepts_, x[held])
                    recall = _recall(logits, y[held][:, active], router.n_used[g + s])
                    if recall >= best[0]:
                        best = (recall, [c.copy() for c in network.coefs_], [b.copy() for b in network.intercepts_])
                    if progress:
                        progress(done * (EPOCHS + FINE_EPOCHS) + epoch + 1, len(jobs) * (EPOCHS + FINE_EPOCHS))
            recall, (w1, w2), (b1, b2) = best
            arrays[f"first_{s}"][g + s] = np.clip(w1.T @ fold, -65504, 65504)
            arrays[f"first_bias_{s}"][g + s] = b1 - w1.T @ shift
            arrays[f"second_{s}"][g + s, active] = w2.T
            arrays[f"second_bias_{s}"][g + s] = -30
            arrays[f"second_bias_{s}"][g + s, active] = b2
            arrays[f"there_{s}"][g + s], arrays[f"recall_{s}"][g + s] = True, recall
        return arrays


def _features(x: np.ndarray, ahead: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fold [m, n_embd] and shift [m]: x @ fold.T - shift is the input (its main components if wide) and the logits of the router
    `ahead` [n_experts, n_embd] on it, each of mean 0 and deviation 1."""
    d = x.shape[1]
    if d > COMPONENTS:
        sample = x[:: max(len(x) // 2048, 1)]
        basis = np.linalg.svd(sample - sample.mean(axis=0), full_matrices=False)[2][:COMPONENTS]
    else:
        basis = np.eye(d, dtype=np.float32)
    fold = np.concatenate([basis, ahead])
    seen = x @ fold.T
    scale = 1 / np.maximum(seen.std(axis=0), 1e-6)
    return (fold * scale[:, None]).astype(np.float32), (seen.mean(axis=0) * scale).astype(np.float32)


def _begin_as_router(network: Any, active: np.ndarray, n_experts: int, share: np.ndarray) -> None:
    """Where there is room, the first 2 E units pass on the router ahead's logits: training begins at its accuracy.

    The last E features are its logits; relu(z) - relu(-z) = z.
    """
    hidden, m = network.coefs_[1].shape[0], network.coefs_[0].shape[0]
    if hidden < 2 * n_experts:
        return
    first, second = network.coefs_
    first[:, : 2 * n_experts], second[:] = 0, 0
    for i, expert in enumerate(active):
        feature = m - n_experts + expert
        first[feature, 2 * expert], first[feature, 2 * expert + 1] = 1, -1
        second[2 * expert, i], second[2 * expert + 1, i] = GAIN, -GAIN
    network.intercepts_[0][: 2 * n_experts] = 0
    odds = np.clip(share[active], 1e-3, 1 - 1e-3)
    network.intercepts_[1][:] = np.log(odds / (1 - odds)) - 1


def _logits(coefs: list[np.ndarray], intercepts: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.maximum(x @ coefs[0] + intercepts[0], 0) @ coefs[1] + intercepts[1]
    return out


def _recall(scores: np.ndarray, used: np.ndarray, k: int) -> float:
    k = min(k, scores.shape[1])
    top = np.argpartition(scores, -k, axis=1)[:, -k:]
    return float(np.take_along_axis(used, top, axis=1).sum() / max(used.sum(), 1))
