"""Fate: the next layer's router on this layer's input, and a cache that favors shallow
layers.

    §4.2  cross-layer gate, 75th percentile   `base.RoutersAhead`, CrossLayerGate;
                                              `share` of the preset is 0.25
    §4.3  n = T / t_expert in decode          engine.prefetcher measures both
          prompts in descending popularity    GateEvent.demand; moeoff-gate-events
    §4.4  boundary L, cache_deep, ARC         shallow_boundary, `base.quotas`,
          in each layer                       ShallowFavoringARC
    §4.5  share p of a prompt's least         `base.n_low`, `prefill_low_fraction`;
          popular experts in int2             moeoff-version-selector
    §5.3  a mispredicted expert in int2       `Precision.mispredicted_low`;
                                              moeoff-version-selector

The presets are `fate`, which is lossless, and `fate-lossy`, with §4.5's four and two
bits; §5.3 applies to the low-end PC only. Baselines: scripts/papers/baselines.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..precision import INT4, LOWEST, Precision
from ..routing.event import GateEvent
from ..routing.recording import Recording
from .base import (
    DEFAULT_FIT,
    CacheShape,
    FitOptions,
    Policy,
    Progress,
    RoutersAhead,
    Section,
    quotas,
    recall,
)
from .classic import ARC
from .strategy import Strategy, register

# --- §4.2, 4.3: cross-layer expert prefetch ---


@register
class CrossLayerGate(RoutersAhead):
    """The router of layer i + 1 on the gate input of layer i (§4.2), also ProMoE's
    skip-based baseline (its §4.2).

    Options:
        norm: True to apply layer i + 1's norm weights (`Router.ahead`). None: where
            calibration measured a gain; without one, True.
    """

    name, summary = "gate", "the next layer's router on this layer's input"
    defaults = {"norm": None}
    compared = True

    def start(self) -> None:
        self.look_ahead(1, self.options["norm"])

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray] | None:
        """Fit a `Recording`, or return None without gate inputs.

        Returns:
            [n_gates] each: next_norm, true where the next layer's norm predicts better;
            recall_raw, recall_norm at k without and with the norm.
        """
        if recording.inputs is None:
            return None
        router, inputs = recording.router, recording.inputs
        n, used = router.n_gates, recording.used()[recording.input_tokens]
        arrays = {name: np.zeros(n, np.float32) for name in ("recall_raw", "recall_norm")}
        arrays["next_norm"] = np.ones(n, bool)
        for target in range(1, n):
            x, y = inputs[:, target - 1].astype(np.float32), used[:, target]
            for name, norm in (("recall_raw", False), ("recall_norm", True)):
                if (ahead := router.ahead(target - 1, target, norm)) is not None:
                    weight, bias = ahead
                    logits = x @ weight.T + (0 if bias is None else bias)
                    arrays[name][target] = recall(
                        router.selection(target, router.gated(logits)), y, router.n_used[target]
                    )
                    arrays["next_norm"][target] = (
                        arrays["recall_norm"][target] > arrays["recall_raw"][target]
                    )
            if progress:
                progress(target, n - 1)
        return arrays

    sections = (Section("gate", fit),)


# --- §4.4: shallow-favoring expert cache ---

MAX_GATES = 4096  # larger than any model's
SHALLOW = 0.85  # share of the median recall, below which a layer is shallow
JUDGED = 1024  # tokens to measure recall with


def shallow_boundary(recall: np.ndarray) -> int:
    """Return L, the first layers with recall [n_gates] below 85 % of the median.

    The recall of gate 0 is 0.
    """
    if len(recall) < 2:
        return 0
    good = np.flatnonzero(recall >= SHALLOW * np.median(recall[1:]))
    return int(good[0]) if len(good) else 0


def proportional_boundary(n_gates: int) -> int:
    """Return the default L, in the proportion of 3 to Qwen1.5-MoE's 24 layers."""
    return max(round(3 * n_gates / 24), 1)


_BEYOND_QUOTA = -1e6  # priority of experts beyond their layer's quota


@register
class ShallowFavoringARC(Policy):
    """ARC's lists for each layer, with the quotas of §4.4.

    Experts evicted by a layer's ARC rank below all experts in T1 and T2. The buffer
    evicts them only when it needs memory, so other layers can use unused quotas. Device
    slots are divided by the quotas.

    Options:
        shallow: L; None: `proportional_boundary`.
    """

    name, summary = "arc", "shallow layers first, recency and frequency balanced in each (Fate)"
    defaults = {"shallow": None}
    compared = True

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray] | None:
        """Return L, shallow [1], of a `Recording`, or None without gate inputs."""
        judged = recording.input_tokens[:JUDGED]
        gate = (
            CrossLayerGate.fit(recording.part(0, int(judged[-1]) + 1), options, progress)
            if len(judged)
            else None
        )
        return (
            None
            if gate is None
            else {
                "shallow": np.array(
                    [shallow_boundary(np.maximum(gate["recall_raw"], gate["recall_norm"]))]
                )
            }
        )

    sections = (Section("shallow", fit, {"shallow": ("i", (1,), 0, MAX_GATES)}),)

    def start(self) -> None:
        self._layers = [ARC() for _ in range(self.shape.n_gates)]
        self.resize(self.shape.capacity)
        self.priorities[:] = _BEYOND_QUOTA

    @classmethod
    def divide(cls, shape: CacheShape, options: Mapping[str, Any]) -> list[int]:
        """Return the quotas of §4.4."""
        shallow = options["shallow"]
        if shallow is None:
            shallow = proportional_boundary(shape.n_gates)
        return quotas(shape, min(shallow, shape.n_gates))

    def resize(self, capacity: float) -> None:
        """Set new quotas. Lists lose their oldest entries, those used once first."""
        super().resize(capacity)
        self.quotas = self.divide(self.shape, self.options)
        for gate, (size, layer) in enumerate(zip(self.quotas, self._layers)):
            for evicted in layer.resize(size):
                self.priorities[gate, evicted] = _BEYOND_QUOTA

    def update(self, event: GateEvent) -> None:
        layer, size, row = (
            self._layers[event.gate],
            self.quotas[event.gate],
            self.priorities[event.gate],
        )
        for expert in dict.fromkeys(event.ids.ravel().tolist()):
            for evicted in layer.use(expert, size):
                row[evicted] = _BEYOND_QUOTA
        if order := layer.eviction_order():
            row[order] = np.arange(len(order), dtype=np.float32) / self.shape.n_experts


# --- §4.5: popularity-aware hybrid quantization of a prompt's experts ---

P = 0.25  # the paper's, of Qwen1.5-MoE

FATE = register(
    Strategy(
        "fate",
        "Fate: shallow-favoring ARC, cross-layer gate widened to a quarter",
        policy=ShallowFavoringARC,
        predictor=CrossLayerGate,
        share=0.25,
        vram_mode="centric",
    )
)
register(
    replace(
        FATE,
        name="fate-lossy",
        summary=(
            "Fate, lossy: all experts in four bits, and of a prompt's the quarter that the fewest"
            " tokens chose in the sidecar's lowest tier"
        ),
        precision=Precision(prefill_low_fraction=P, low_tier=LOWEST),
        tier=INT4,
    )
)
