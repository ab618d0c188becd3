"""Bit allocation: the smallest type for each expert within a tolerated loss (EdgeMoE
§3.2).

1. Evaluate each type for all experts. The smallest type within the tolerance is the
   upper type, the next smaller one the lower type.
2. Rank experts by importance: the loss with this expert alone in the lower type,
   measured or estimated from the routing (`estimate_importance`).
3. Give the lower type to as many of the least important experts as the tolerance allows
   (bisection).

Loss is the relative increase of perplexity on the calibration text, where the paper
counts accuracy. As in the paper the bound is soft: other text may lose more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError
from ..experts.convert import convert
from ..experts.sidecar import ORIGINAL, CompositeSidecar, Sidecar
from ..experts.tiers import bits_per_weight, nearest
from ..gguf.model_index import ModelBytes, ModelIndex, TensorSpan, parse_tensor_name
from ..gguf.quantize import dequantize, needs_imatrix, type_from_name
from ..policies.edgemoe import by_importance
from ..routing.event import GateEvent
from .job import default_texts
from .perplexity import Reference, Window, evaluate, open_model, read_windows
from .statistics import Estimate, QualityMetrics

Expert = tuple[int, int]  # layer, expert
# default types for rows of whole blocks of 256, and for other rows
_K_QUANTS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")
_BLOCKS_OF_32 = ("Q8_0", "Q5_0", "Q4_0", "Q2_0")


@dataclass(frozen=True)
class BitsPlan:
    """A type for each of a model's experts, and the measurements behind the choice.

    Attributes:
        upper, lower: Types, equal if all experts have one. ORIGINAL is the model's own.
        low: Experts in the lower type, least loss for each saved byte first.
        uniform: (bytes, quality) with all experts in one type, by type.
        importance: KL in nats or its estimate.
    """

    upper: str
    lower: str
    low: tuple[Expert, ...]
    n_experts: int
    n_bytes: int
    quality: QualityMetrics
    uniform: dict[str, tuple[int, QualityMetrics]]
    importance: dict[Expert, float]

    def to_json(self) -> str:
        """Return the plan in the format of `moeoff convert --bits`."""
        layers: dict[str, dict[str, str]] = {}
        for layer, expert in sorted(self.low):
            layers.setdefault(str(layer), {})[str(expert)] = self.lower
        return json.dumps({"default": self.upper, "layers": layers}, indent=1) + "\n"


def default_types(model_index: ModelIndex) -> list[str]:
    """Return types with fewer bits per weight than the model's that fit its rows."""
    spans = model_index.experts.values()
    own = max(bits_per_weight(span.type) for span in spans)
    names = _K_QUANTS if all(span.shape[0] % 256 == 0 for span in spans) else _BLOCKS_OF_32
    return [name for name in names if bits_per_weight(type_from_name(name)) < own]


class Planner:
    """A search for plans, used with `with`. Plans share windows, a sidecar and
    importance.

    Args:
        model: GGUF with routed experts, the first part of a split one.
        text: Calibration texts. Default: `default_texts`.
        types: Types to choose from, besides the model's. Default: `default_types`.
        measure: True to measure importance with an evaluation for each expert, not to
            estimate it from one pass.
        ctx: Window length in tokens, see `read_windows`.
        tokens: Number of tokens of all texts.
        progress: Callback with stage, amount done and total.
        **options: Options of `moeoff.Llama`.

    Raises:
        OptionError: An option or a text is invalid.
        ModelError: The model cannot be used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        text: Sequence[str | os.PathLike[str]],
        *,
        types: Sequence[str] | None = None,
        measure: bool = False,
        ctx: int = 512,
        tokens: int = 16384,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ):
        self._model, self.model_index = os.fspath(model), ModelIndex.read(model)
        self.model_index.require_text()
        self.types = list(types) if types is not None else default_types(self.model_index)
        n_cols = min(span.shape[0] for span in self.model_index.experts.values())
        for name in self.types:
            if needs_imatrix(nearest(type_from_name(name), n_cols)):
                raise OptionError(
                    f"type {name} needs an importance matrix, which a plan does not have"
                )
        if not self.types:
            raise OptionError(
                f"{model}: the experts have the fewest bits already; give types to try"
            )
        self._measure, self._text, self._ctx, self._tokens = measure, text, ctx, tokens
        self._report = progress or (lambda stage, n, total: None)
        self._options = options
        self._uniform: dict[str, tuple[int, QualityMetrics]] = {}
        self._importance: dict[str, dict[Expert, float]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Planner:
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="moeoff-bits-"))
            tiers, out = (
                ",".join([ORIGINAL, *self.types]),
                os.path.join(folder, "types.experts.gguf"),
            )
            with (
                default_texts(self._text) as files,
                open_model(self._model, self._ctx, experts=False, **self._options) as llm,
            ):
                self.windows = read_windows(
                    llm, files, self._ctx, max(self._tokens // (self._ctx * len(files)), 1)
                )
                total = len(self.windows) * self._ctx
                recorded = Reference.record(
                    llm, self.windows, progress=lambda n: self._report("lossless", n, total)
                )
                self.reference = self._stack.enter_context(recorded)
            made = convert(
                self._model,
                output=out,
                tiers=tiers,
                progress=functools.partial(self._report, "converting"),
            )
            self.sidecar = Sidecar(made.path)
            self.experts = sorted(
                {
                    (role.layer, e)
                    for name, e, _ in self.sidecar.slices
                    if not (role := parse_tensor_name(name)).chunk
                }
            )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def quality(self, default: str, others: dict[Expert, str] = {}) -> QualityMetrics:  # noqa: B006
        """Evaluate experts in tier `default`, or in those of `others`."""
        composite = CompositeSidecar(self.sidecar, default, others)
        with open_model(
            self._model,
            len(self.windows[0].tokens),
            experts=composite,
            tier=composite.tiers[0],
            **self._options,
        ) as llm:
            return evaluate(llm, self.windows, self.reference).quality()

    def n_bytes(self, default: str, others: dict[Expert, str] = {}) -> int:  # noqa: B006
        composite = CompositeSidecar(self.sidecar, default, others)
        return sum(
            s.nbytes
            for span in self.model_index.experts.values()
            for s in composite.sources(span, composite.tiers[0])
        )

    def gained(self, upper: str, lower: str) -> dict[Expert, int]:
        """Return the bytes that each expert saves in the lower tier."""
        out = dict.fromkeys(self.experts, 0)
        sizes = [CompositeSidecar(self.sidecar, tier, {}) for tier in (upper, lower)]
        for span in self.model_index.experts.values():
            layer = parse_tensor_name(span.name).layer
            for expert, (high, low) in enumerate(
                zip(*(c.sources(span, c.tiers[0]) for c in sizes))
            ):
                out[layer, expert] += high.nbytes - low.nbytes
        return out

    def uniform(self) -> dict[str, tuple[int, QualityMetrics]]:
        """Return bytes and quality with all experts in one type, by type, largest
        first.
        """
        if not self._uniform:
            lossless = QualityMetrics(
                0, 0, 0, 0, Estimate(0, 0, 0), Estimate(0, 0, 0), Estimate(1, 1, 1)
            )
            uniform = {ORIGINAL: (self.n_bytes(ORIGINAL), lossless)}
            for i, name in enumerate(self.types):
                self._report("types", i, len(self.types))
                uniform[name] = (self.n_bytes(name), self.quality(name))
            self._uniform = dict(sorted(uniform.items(), key=lambda item: -item[1][0]))
        return self._uniform

    def importance(self, lower: str) -> dict[Expert, float]:
        """Return each expert's importance for a lower type."""
        if lower not in self._importance:
            if self._measure:
                importance = self._measured_importance(lower)
            else:
                self._report("estimating", 0, 1)
                importance = estimate_importance(
                    self.model_index, self.sidecar, lower, self.windows, **self._options
                )
            self._importance[lower] = importance
        return self._importance[lower]

    def _measured_importance(self, lower: str) -> dict[Expert, float]:
        # KL: one of hundreds of experts changes perplexity by less than its noise
        out = {}
        for i, key in enumerate(self.experts):
            self._report("experts", i, len(self.experts))
            out[key] = self.quality(ORIGINAL, {key: lower}).distance.kl.value
        return out

    def plan(self, tolerance: float) -> BitsPlan:
        """Return the smallest plan within a relative increase of perplexity, e.g. 0.05."""
        if not 0 < tolerance < 10:
            raise OptionError(
                f"tolerance: expected a relative increase of perplexity, e.g. 0.05, got {tolerance}"
            )
        uniform = self.uniform()
        order = list(uniform)
        # A smaller type that is within the tolerance again is chance.
        within = next(
            (i for i, name in enumerate(order) if uniform[name][1].distance.loss.value > tolerance),
            len(order),
        )
        upper = order[within - 1]
        if within == len(order):
            return BitsPlan(upper, upper, (), len(self.experts), *uniform[upper], uniform, {})
        lower = order[within]
        importance, gained = self.importance(lower), self.gained(upper, lower)
        ranked = by_importance({key: importance[key] for key in self.experts}, gained)
        best, quality = 0, uniform[upper][1]
        bad, step = len(ranked), 0
        while bad - best > 1:
            self._report("low experts", step, len(ranked).bit_length())
            step += 1
            middle = (best + bad) // 2
            tried = self.quality(upper, dict.fromkeys(ranked[:middle], lower))
            if tried.distance.loss.value <= tolerance:
                best, quality = middle, tried
            else:
                bad = middle
        low = tuple(ranked[:best])
        return BitsPlan(
            upper,
            lower,
            low,
            len(self.experts),
            self.n_bytes(upper, dict.fromkeys(low, lower)),
            quality,
            uniform,
            importance,
        )


N_SAMPLES = 512  # tokens of each gate whose inputs are kept


class _Sample:
    """A gate's sampled inputs and routing, by batch."""

    def __init__(self, n_experts: int):
        self.inputs: list[np.ndarray] = []  # [n, n_embd] float16
        self.ids: list[np.ndarray] = []  # [n, n_used]
        self.weights: list[np.ndarray] = []
        self.n = 0
        self.used = np.zeros(n_experts)  # sum of squared weights over all tokens

    def add(self, event: GateEvent) -> None:
        np.add.at(self.used, event.ids.ravel(), event.weights.ravel().astype(np.float64) ** 2)
        left = N_SAMPLES - self.n
        if left > 0 and event.gate_input is not None:
            # a quarter of each batch, so that samples come from several batches
            rows = np.linspace(
                0, len(event.ids) - 1, min(left, max(len(event.ids) // 4, 1))
            ).astype(int)
            self.inputs.append(event.gate_input[rows].astype(np.float16))
            self.ids.append(event.ids[rows])
            self.weights.append(event.weights[rows])
            self.n += len(rows)


def estimate_importance(
    model_index: ModelIndex, sidecar: Sidecar, tier: str, windows: Sequence[Window], **options: Any
) -> dict[Expert, float]:
    """Estimate each expert's importance from one pass.

    An unused expert has 0, an expert without sampled tokens its layer's mean. Experts
    are computed as SwiGLU without biases: the estimate is rougher for others.

    Args:
        sidecar: Sidecar with the lower type `tier`.
        **options: Options of `moeoff.Llama`.
    """
    samples = _sample_gates(model_index, windows, options)
    out: dict[Expert, float] = {}
    with ModelBytes((*model_index.files, sidecar.path)) as files:
        by_layer: dict[int, dict[str, TensorSpan]] = {}
        for name, span in model_index.experts.items():
            where = parse_tensor_name(name)
            if not where.chunk:
                by_layer.setdefault(where.layer, {})[where.matrix_name] = span
        for layer, spans in by_layer.items():
            for expert, value in enumerate(
                _layer_importance(spans, samples.get(layer), sidecar, tier, files)
            ):
                out[layer, expert] = float(value)
    return out


def _sample_gates(
    model_index: ModelIndex, windows: Sequence[Window], options: dict[str, Any]
) -> dict[int, _Sample]:
    samples: dict[int, _Sample] = {}
    with open_model(
        model_index.files[0], len(windows[0].tokens), experts=False, gate_input=True, **options
    ) as llm:
        gates = {
            info.gate: info
            for info in llm.engine.buffer.tensors
            if not parse_tensor_name(info.name.decode()).chunk
        }

        def add(event: GateEvent) -> None:
            if event.gate in gates:
                samples.setdefault(event.layer, _Sample(gates[event.gate].ne[2])).add(event)

        llm.engine.buffer.set_gate_callback(add)
        evaluate(llm, windows)
        llm.engine.buffer.drain()
        llm.engine.buffer.check()
        llm.engine.buffer.set_gate_callback(None)
    return samples


def _layer_importance(
    spans: dict[str, TensorSpan],
    sample: _Sample | None,
    sidecar: Sidecar,
    tier: str,
    files: ModelBytes,
) -> np.ndarray:
    """Estimate the squared error of a layer's outputs for each expert, [n_experts]."""
    n_experts = next(iter(spans.values())).shape[2]
    values = np.zeros(n_experts)
    if sample is None or not sample.n:
        return values if sample is None else sample.used
    inputs = np.concatenate(sample.inputs)
    ids, weights = np.concatenate(sample.ids), np.concatenate(sample.weights)
    sampled = np.zeros(n_experts, bool)
    for expert in range(n_experts):
        token, rank = np.nonzero(ids == expert)
        if not len(token):
            continue
        x = inputs[token].astype(np.float32)
        high, low = {}, {}
        for m, s in spans.items():
            piece, own = (
                sidecar.slices[s.name, expert, tier],
                files.read(s.file, s.offset + expert * s.slice_bytes, s.slice_bytes, s.name),
            )
            high[m] = dequantize(own, s.type, piece.shape)
            low[m] = dequantize(
                files.read(len(files) - 1, piece.offset, piece.nbytes, s.name),
                piece.type,
                piece.shape,
            )
        y = _expert(high, x) - _expert(low, x)
        g2 = weights[token, rank].astype(np.float64) ** 2
        # the samples' mean error per squared weight, times all tokens' squared weights
        values[expert] = (
            (g2 * (y.astype(np.float64) ** 2).sum(axis=1)).sum()
            / max(g2.sum(), 1e-30)
            * sample.used[expert]
        )
        sampled[expert] = True
    unsampled = ~sampled & (sample.used > 0)
    if unsampled.any() and sampled.any():
        values[unsampled] = (
            values[sampled].sum() / sample.used[sampled].sum() * sample.used[unsampled]
        )
    return values


def _expert(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Compute one expert for x [n, n_embd]."""
    gate: np.ndarray | None
    if "gate_up" in w:
        gate, up = np.split(x @ w["gate_up"].T, 2, axis=1)
    else:
        up = x @ w["up"].T
        gate = x @ w["gate"].T if "gate" in w else None
    if gate is None:
        hidden = np.maximum(up, 0)
    else:
        hidden = gate / (1 + np.exp(-np.clip(gate, -60, 60))) * up
    out: np.ndarray = hidden @ w["down"].T
    return out
