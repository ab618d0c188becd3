"""ProMoE: prediction by a small network for each layer, one or two layers ahead, and a
cache for each layer.

    §4.1       GoodPred = accuracy x fetch rate  engine.prefetcher counts both
    §4.3, 6.3  a two-layer perceptron, 9:1       Learned, its fit; Recording.split
    §4.4       stride prefetching                Learned's `stride`, with_stride
    §5.1       chunked prefetching               the native store reads matrices one
                                                 by one, larger ones in pieces
    §5.2       early preemption (algorithm 2)    a gate's selection precedes prefetches
                                                 and cancels the others
    §5.3       reordered inference               the native matrix op takes resident
                                                 experts first, others as they come
    §6.1       LRU in each layer                 LayerLRU

The preset is `promoe`, with a stride of two. The token-based predictor (§4.2) is a
baseline, in scripts/papers/baselines.py; the skip-based one is Fate's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import OptionError
from ..routing.event import GateEvent
from ..routing.recording import Recording
from ..routing.router import Rows
from ..system.arrays import WrongArrays, require_arrays
from .base import DEFAULT_FIT, FitOptions, Policy, Prediction, Predictor, Progress, Section, recall
from .strategy import Strategy, register

# --- §4: learned predictor ---

STRIDES = (1, 2)
EPOCHS, FINE_EPOCHS = 8, 4  # the last ones at a quarter of the learning rate
RATE, ALPHA, BATCH = 2e-3, 1e-3, 256
GAIN = 2.0  # initial scale of a router's logit, in deviations
COMPONENTS = 256  # dimensions kept of wider inputs, folded into the first layer


@register
class Learned(Predictor):
    """A two-layer perceptron for each layer (§4.3), on the gate input `stride` layers
    before (§4.4). Needs a profile.

    Options:
        stride: 1 (layer-wise) or 2.
    """

    name, summary = "learned", "a small network on the gate input one or two layers before"
    wants_gate_input = True
    needs_profile = True
    defaults = {"stride": 1}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        if (stride := options.get("stride", STRIDES[0])) not in STRIDES:
            raise OptionError(
                f"{cls.name}: stride is one of {', '.join(map(str, STRIDES))}, not {stride}"
            )

    def start(self) -> None:
        stride = self.options["stride"]
        self._steps: dict[int, tuple[Rows, np.ndarray, Rows, np.ndarray]] = {}
        if self.arrays is None:
            return
        n, e = self.router.n_gates, self.router.n_experts
        # of a gate's input
        width = next((w.shape[1] for w in self.router.weights if w is not None), "width")
        require_arrays(
            self.arrays,
            {
                f"there_{stride}": ("b", (n,)),
                f"first_{stride}": ("f", (n, "hidden", width)),
                f"first_bias_{stride}": ("f", (n, "hidden")),
                f"second_{stride}": ("f", (n, e, "hidden")),
                f"second_bias_{stride}": ("f", (n, e)),
            },
        )
        if self.arrays[f"there_{stride}"][:stride].any():
            raise WrongArrays(f"'there_{stride}' begins too early")
        for target in np.flatnonzero(self.arrays[f"there_{stride}"]):
            first, first_bias, second, second_bias = (
                self.arrays[f"{name}_{stride}"][target].astype(np.float32)
                for name in ("first", "first_bias", "second", "second_bias")
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

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray] | None:
        """Fit a network for each of `STRIDES` to a `Recording`, 9:1 by sequence.

        Early stopping uses another tenth of the training text. Return None without gate
        inputs or memory.

        Returns:
            For each stride s: first_s [n_gates, hidden, n_embd], first_bias_s, second_s
                [n_gates, E, hidden], second_bias_s, there_s [n_gates] true where a gate
                has a network, recall_s [n_gates] at k on the held-out tenth.
        """
        from sklearn.neural_network import MLPClassifier
        from threadpoolctl import threadpool_limits

        if recording.inputs is None:
            return None
        router, hidden = recording.router, options.hidden
        n, e, d = router.n_gates, router.n_experts, recording.inputs.shape[2]
        parts = min(d, COMPONENTS)
        if (
            options.room is not None
            and 2 * len(STRIDES) * n * hidden * (d + e) + 24 * hidden * (parts + e) + 4 * d * parts
            > options.room
        ):
            return None
        used = recording.used()[recording.input_tokens]
        rest, held = recording.split()
        chosen = np.zeros(len(rest), bool)
        _, chosen[rest] = recording.take(rest).split()
        train, choose, held = (
            mask[recording.input_tokens]
            for mask in (rest & ~chosen, chosen if (rest & ~chosen).any() else rest, held)
        )
        arrays: dict[str, np.ndarray] = {}
        for s in STRIDES:
            arrays |= {
                f"first_{s}": np.zeros((n, hidden, d), np.float16),
                f"first_bias_{s}": np.zeros((n, hidden), np.float32),
                f"second_{s}": np.zeros((n, e, hidden), np.float16),
                f"second_bias_{s}": np.zeros((n, e), np.float32),
                f"there_{s}": np.zeros(n, bool),
                f"recall_{s}": np.zeros(n, np.float32),
            }
        jobs = [(g, s) for g in range(n) for s in STRIDES if g + s < n and router.knows(g + s)]
        for i, (g, s) in enumerate(jobs):
            x, ahead = recording.inputs[:, g].astype(np.float32), router.ahead(g, g + s, True)
            if not x.any() or ahead is None:
                continue
            y = used[:, g + s]
            # the classifier needs both classes of each output
            active = np.flatnonzero(y[train].any(axis=0) & ~y[train].all(axis=0))
            if not len(active):
                continue
            fold, shift = _features(x[train])
            x = x @ fold.T - shift
            x_train, y_train, classes = (
                x[train],
                y[train][:, active].astype(int),
                np.arange(len(active)),
            )
            few = x_train[:2], y_train[:2]
            network = MLPClassifier(
                (hidden,),
                alpha=ALPHA,
                batch_size=len(few[0]),
                learning_rate_init=RATE,
                random_state=options.seed,
            )
            best: tuple[float, list[np.ndarray], list[np.ndarray]] = (-1.0, [], [])
            # products this small run slower on more threads, and far slower on busy
            # cores
            with threadpool_limits(1):
                network.partial_fit(*few, classes=classes)  # creates its layers
                network.batch_size = min(BATCH, len(x_train))
                _begin_as_router(
                    network, x_train, ahead[0] @ np.linalg.pinv(fold), active, y[train].mean(axis=0)
                )
                for epoch in range(EPOCHS + FINE_EPOCHS):
                    network.partial_fit(x_train, y_train, classes=classes)
                    if epoch == EPOCHS - 1:
                        network._optimizer.learning_rate_init = RATE / 4
                    reached = recall(
                        network.predict_proba(x[choose]), y[choose][:, active], router.n_used[g + s]
                    )
                    if reached >= best[0]:
                        best = (
                            reached,
                            [c.copy() for c in network.coefs_],
                            [b.copy() for b in network.intercepts_],
                        )
                    if progress:
                        progress(
                            i * (EPOCHS + FINE_EPOCHS) + epoch + 1,
                            len(jobs) * (EPOCHS + FINE_EPOCHS),
                        )
            _, network.coefs_, network.intercepts_ = best
            (w1, w2), (b1, b2) = network.coefs_, network.intercepts_
            arrays[f"first_{s}"][g + s] = np.clip(w1.T @ fold, -65504, 65504)
            arrays[f"first_bias_{s}"][g + s] = b1 - w1.T @ shift
            arrays[f"second_{s}"][g + s, active] = w2.T
            arrays[f"second_bias_{s}"][g + s] = -30
            arrays[f"second_bias_{s}"][g + s, active] = b2
            arrays[f"there_{s}"][g + s] = True
            arrays[f"recall_{s}"][g + s] = (
                recall(network.predict_proba(x[held]), y[held][:, active], router.n_used[g + s])
                if held.any()
                else 0
            )
        return arrays

    sections = (Section("learned", fit),)


def _features(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return fold [m, n_embd] and shift [m] that standardize inputs: x @ fold.T -
    shift.

    Wide inputs are reduced to principal components.
    """
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    d = x.shape[1]
    sample, basis = x[:: max(len(x) // 2048, 1)], np.eye(d, dtype=np.float32)
    if d > COMPONENTS:
        # a short text has no more components than tokens
        basis = PCA(min(COMPONENTS, len(sample)), svd_solver="full").fit(sample).components_
    scaler = StandardScaler().fit(x @ basis.T)
    return (basis / scaler.scale_[:, None]).astype(np.float32), (
        scaler.mean_ / scaler.scale_
    ).astype(np.float32)


def _begin_as_router(
    network: Any, x: np.ndarray, router: np.ndarray, active: np.ndarray, share: np.ndarray
) -> None:
    """Initialize the first 2 E units to the logits of the router ahead, if there are
    enough.

    Training begins at the router's accuracy: relu(z) - relu(-z) = z. The router is
    [n_experts, m], the features x [n_tokens, m].
    """
    first, second = network.coefs_
    n = 2 * len(router)
    if len(second) < n:
        return
    logits = x @ router.T
    first[:, :n], second[:], network.intercepts_[0][:n] = 0, 0, 0
    for i, expert in enumerate(active):
        mean, deviation = logits[:, expert].mean(), max(logits[:, expert].std(), 1e-6)
        for unit, sign in ((2 * expert, 1), (2 * expert + 1, -1)):
            first[:, unit], network.intercepts_[0][unit] = (
                sign * router[expert] / deviation,
                -sign * mean / deviation,
            )
            second[unit, i] = sign * GAIN
    odds = np.clip(share[active], 1e-3, 1 - 1e-3)
    network.intercepts_[1][:] = np.log(odds / (1 - odds)) - 1


# --- §6.1: cache ---

_BEYOND_QUOTA = 2.0  # priority bonus within the layer's quota
_NEXT_LAYER = 1.0  # priority penalty of the next evicting layer
_RECENCY = 0.5  # largest bonus of recency within a layer


@register
class LayerLRU(Policy):
    """An LRU cache for each layer, with equal quotas.

    The buffer's arena is shared, so a quota is a rank: experts beyond their layer's
    quota are evicted first, then the oldest of the next layer. Unselected prefetches
    are beyond the quota. Until the arena is full a layer may exceed its quota.
    """

    name, summary = (
        "lru-layer",
        "keeps the most recently used of each layer, as many in each (ProMoE)",
    )

    def start(self) -> None:
        self._last = np.zeros(self.priorities.shape, np.int64)
        self._clock, self._next = 0, 0
        self.resize(self.shape.capacity)

    def resize(self, capacity: float) -> None:
        """Set new quotas, the same for every layer."""
        super().resize(capacity)
        self._quotas = self.divide(self.shape, self.options)
        for gate in range(self.shape.n_gates):
            self._rank(gate)
        self.priorities[self._next] -= _NEXT_LAYER

    def update(self, event: GateEvent) -> None:
        gate, ids = event.gate, event.ids.ravel()
        # the last of a batch's tokens counts
        self._last[gate, ids] = np.arange(self._clock + 1, self._clock + 1 + len(ids))
        self._clock += len(ids)
        self._rank(gate)
        if gate != self._next:
            self._rank(self._next)
        self._next = (gate + 1) % self.shape.n_gates
        self.priorities[self._next] -= _NEXT_LAYER

    def _rank(self, gate: int) -> None:
        last, quota = self._last[gate], self._quotas[gate]
        quota = min(quota, len(last))
        oldest = (
            max(int(np.partition(last, len(last) - quota)[len(last) - quota]), 1)
            if quota
            else self._clock + 1
        )
        # give one event's experts an order, or the buffer would evict a matrix of each
        recency = (last - oldest) * (_RECENCY / (self._clock - oldest + 2))
        self.priorities[gate] = np.where(last >= oldest, recency, -_BEYOND_QUOTA)


register(
    Strategy(
        "promoe",
        "ProMoE: LRU in each layer, learned predictor two layers ahead",
        policy=LayerLRU,
        predictor=Learned,
        options={"stride": 2},
        bounded=False,
        vram_mode="reordered",
    )
)
