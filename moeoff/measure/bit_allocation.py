"""A type for each expert, as few bits as a tolerated loss allows: EdgeMoE §3.2.

1. Every type is tried for all experts at once: the smallest that stays within the tolerance is the upper bound, the next
   smaller one, which does not, the lower.
2. Experts are ordered by importance: how much worse the model gets with this one alone in the lower bound's type; measured
   one by one, or estimated from what the gates chose (`estimate_importance`).
3. From the least important on, experts get the lower type, as many as the tolerance allows (bisection over their number).

Loss is the relative increase of perplexity over the lossless model on the calibration text. The paper counts accuracy; it
calls its own bound soft, and so is this: text that was not calibrated on may lose more.
"""

from __future__ import annotations

import contextlib
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
from .statistics import Estimate, Quality

_LADDER = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"), ("Q8_0", "Q5_0", "Q4_0", "Q2_0")  # rows of whole blocks of 256, and others


@dataclass(frozen=True)
class BitsPlan:
    """The types of a model's experts, and how they were found.

    Attributes:
        upper, lower: types; ORIGINAL is the model's own. Equal if one type for all does.
        low: (layer, expert) of those that get the lower one, those first that lose the least for each byte that it saves.
        n_experts: in all.
        n_bytes: of the experts as planned.
        quality: as planned, on the calibration text.
        uniform: by type, for all experts at once: (bytes, quality).
        importance: by (layer, expert): KL in nats, or what was estimated.
    """

    upper: str
    lower: str
    low: tuple[tuple[int, int], ...]
    n_experts: int
    n_bytes: int
    quality: Quality
    uniform: dict[str, tuple[int, Quality]]
    importance: dict[tuple[int, int], float]

    def to_json(self) -> str:
        """The plan as `moeoff convert --bits` reads it."""
        layers: dict[str, dict[str, str]] = {}
        for layer, expert in sorted(self.low):
            layers.setdefault(str(layer), {})[str(expert)] = self.lower
        return json.dumps({"default": self.upper, "layers": layers}, indent=1) + "\n"


def default_types(model_index: ModelIndex) -> list[str]:
    """Types to try, below the model's own in bits per weight, and such as its rows can hold."""
    spans = model_index.experts.values()
    own = max(bits_per_weight(span.type) for span in spans)
    whole = all(span.shape[0] % 256 == 0 for span in spans)
    return [name for name in _LADDER[0 if whole else 1] if bits_per_weight(type_from_name(name)) < own]


class Planner:
    """Searches for plans; makes once what all of them need: windows, a sidecar with all types, importance. Use with `with`.

    Args:
        model: GGUF with routed experts; of a split one the first part.
        text: Calibration texts. Default: `default_texts`.
        types: to choose from; by default `default_types`. The model's own is always among them.
        measure: importance by quantizing one expert at a time: exact, and as many evaluations as there are experts. An estimate needs one.
        ctx: tokens of a window, see `read_windows`.
        tokens: in all, as many from each text.
        progress: told what is being done, how much of it is done and how much there is.
        **options: of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: an option or a text makes no sense.
        ModelError: the model is no good.
    """

    def __init__(self, model: str | os.PathLike[str], text: Sequence[str | os.PathLike[str]], *, types: Sequence[str] | None = None,
                 measure: bool = False, ctx: int = 512, tokens: int = 16384,
                 progress: Callable[[str, int, int], None] | None = None, **options: Any):  # fmt: skip
        self._model, self.model_index = os.fspath(model), ModelIndex.read(model)
        self.model_index.require_text()
        self.types = list(types) if types is not None else default_types(self.model_index)
        n_cols = min(span.shape[0] for span in self.model_index.experts.values())
        for name in self.types:
            if needs_imatrix(nearest(type_from_name(name), n_cols)):
                raise OptionError(f"{name} needs an importance matrix and cannot be planned with")
        if not self.types:
            raise OptionError(f"{model}: its experts have the fewest bits already; name types to try")
        self._measure, self._text, self._ctx, self._tokens = measure, text, ctx, tokens
        self._tell = progress or (lambda what, n, total: None)
        self._options = options
        self._uniform: dict[str, tuple[int, Quality]] = {}
        self._importance: dict[str, dict[tuple[int, int], float]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Planner:
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="moeoff-bits-"))
            tiers, out = ",".join([ORIGINAL, *self.types]), os.path.join(folder, "types.experts.gguf")
            with default_texts(self._text) as files, open_model(self._model, self._ctx, experts=False, **self._options) as llm:
                self.windows = read_windows(llm, files, self._ctx, max(self._tokens // (self._ctx * len(files)), 1))
                total = len(self.windows) * self._ctx
                recorded = Reference.record(llm, self.windows, progress=lambda n: self._tell("lossless", n, total))
                self.reference = self._stack.enter_context(recorded)
            made = convert(self._model, output=out, tiers=tiers, progress=lambda n, total: self._tell("converting", n, total))
            self.sidecar = Sidecar(made.path)
            self.experts = sorted({(role.layer, e) for name, e, _ in self.sidecar.slices if not (role := parse_tensor_name(name)).chunk})
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def quality(self, default: str, others: dict[tuple[int, int], str] = {}) -> Quality:  # noqa: B006  never written
        """Evaluates the model with its experts in tier `default`, and others, by (layer, expert), in theirs."""
        composite = CompositeSidecar(self.sidecar, default, others)
        with open_model(self._model, len(self.windows[0].tokens), experts=composite, tier=composite.tiers[0], **self._options) as llm:
            return evaluate(llm, self.windows, self.reference).quality()

    def n_bytes(self, default: str, others: dict[tuple[int, int], str] = {}) -> int:  # noqa: B006
        composite = CompositeSidecar(self.sidecar, default, others)
        return sum(s.nbytes for span in self.model_index.experts.values() for s in composite.sources(span, composite.tiers[0]))

    def gained(self, upper: str, lower: str) -> dict[tuple[int, int], int]:
        """Bytes that each (layer, expert) saves in the lower tier: what it would no longer have to be read for (EdgeMoE §3.2)."""
        out = dict.fromkeys(self.experts, 0)
        sizes = [CompositeSidecar(self.sidecar, tier, {}) for tier in (upper, lower)]
        for span in self.model_index.experts.values():
            layer = parse_tensor_name(span.name).layer
            for expert, (high, low) in enumerate(zip(*(c.sources(span, c.tiers[0]) for c in sizes))):
                out[layer, expert] += high.nbytes - low.nbytes
        return out

    def uniform(self) -> dict[str, tuple[int, Quality]]:
        """By type, all experts in it: bytes and quality, the most bytes first."""
        if not self._uniform:
            lossless = Quality(0, 0, 0, 0, Estimate(0, 0, 0), Estimate(0, 0, 0), Estimate(1, 1, 1))
            uniform = {ORIGINAL: (self.n_bytes(ORIGINAL), lossless)}
            for i, name in enumerate(self.types):
                self._tell("types", i, len(self.types))
                uniform[name] = (self.n_bytes(name), self.quality(name))
            self._uniform = dict(sorted(uniform.items(), key=lambda item: -item[1][0]))
        return self._uniform

    def importance(self, lower: str) -> dict[tuple[int, int], float]:
        """By (layer, expert), with `lower` for the lower type."""
        if lower not in self._importance:
            if self._measure:
                importance = self._measured_importance(lower)
            else:
                self._tell("estimating", 0, 1)
                importance = estimate_importance(self.model_index, self.sidecar, lower, self.windows, **self._options)
            self._importance[lower] = importance
        return self._importance[lower]

    def _measured_importance(self, lower: str) -> dict[tuple[int, int], float]:
        """Mean KL against the lossless model with each expert alone in the lower tier.

        KL and not the increase of perplexity: one expert of hundreds moves perplexity by less than its noise, and as often down
        as up; KL is never negative.
        """
        out = {}
        for i, key in enumerate(self.experts):
            self._tell("experts", i, len(self.experts))
            out[key] = self.quality(ORIGINAL, {key: lower}).distance.kl.value
        return out

    def plan(self, tolerance: float) -> BitsPlan:
        """The plan with the fewest bytes whose loss on the text is within the tolerance: 0.05 is 5 % of perplexity."""
        if not 0 < tolerance < 10:
            raise OptionError(f"a tolerance is a relative increase of perplexity, as 0.05 or 5%, not {tolerance}")
        uniform = self.uniform()
        order = list(uniform)
        # the first that is too bad ends the ladder: a smaller one that happens to be good again is chance
        within = next((i for i, name in enumerate(order) if uniform[name][1].distance.loss.value > tolerance), len(order))
        upper = order[within - 1]
        if within == len(order):
            return BitsPlan(upper, upper, (), len(self.experts), *uniform[upper], uniform, {})
        lower = order[within]
        importance, gained = self.importance(lower), self.gained(upper, lower)
        ranked = by_importance({key: importance[key] for key in self.experts}, gained)
        best, quality = 0, uniform[upper][1]
        bad, step = len(ranked), 0
        while bad - best > 1:
            self._tell("low experts", step, len(ranked).bit_length())
            step += 1
            middle = (best + bad) // 2
            tried = self.quality(upper, dict.fromkeys(ranked[:middle], lower))
            if tried.distance.loss.value <= tolerance:
                best, quality = middle, tried
            else:
                bad = middle
        low = tuple(ranked[:best])
        return BitsPlan(upper, lower, low, len(self.experts), self.n_bytes(upper, dict.fromkeys(low, lower)), quality, uniform, importance)


N_SAMPLES = 512  # tokens whose inputs are kept, of each gate


class _Sample:
    """One gate's record: the first tokens' inputs, [n, n_embd] float16, who was chosen with what weight; and everyone's sum of g²."""

    def __init__(self, n_experts: int):
        self.inputs: list[np.ndarray] = []
        self.ids: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.n = 0
        self.used = np.zeros(n_experts)

    def add(self, event: GateEvent) -> None:
        np.add.at(self.used, event.ids.ravel(), event.weights.ravel().astype(np.float64) ** 2)
        room = N_SAMPLES - self.n
        if room > 0 and event.gate_input is not None:
            # spread over the batch, so that more than the beginning of the first text is heard
            rows = np.linspace(0, len(event.ids) - 1, min(room, max(len(event.ids) // 4, 1))).astype(int)
            self.inputs.append(event.gate_input[rows].astype(np.float16))
            self.ids.append(event.ids[rows])
            self.weights.append(event.weights[rows])
            self.n += len(rows)


def estimate_importance(model_index: ModelIndex, sidecar: Sidecar, tier: str, windows: Sequence[Window], **options: Any) -> dict[tuple[int, int], float]:
    """By (layer, expert). An expert that no token chose has 0, one whose tokens were not sampled the mean of its layer.

    Takes every expert for SwiGLU without biases: for other activations it is a rougher estimate.

    Args:
        sidecar: has `tier`, the lower type.
        windows: calibration text.
        **options: of `moeoff.Llama`.
    """
    samples = _listen(model_index, windows, options)
    out: dict[tuple[int, int], float] = {}
    with ModelBytes((*model_index.files, sidecar.path)) as files:
        by_layer: dict[int, dict[str, TensorSpan]] = {}
        for name, span in model_index.experts.items():
            where = parse_tensor_name(name)
            if not where.chunk:
                by_layer.setdefault(where.layer, {})[where.matrix_name] = span
        for layer, spans in by_layer.items():
            for expert, value in enumerate(_layer(spans, samples.get(layer), sidecar, tier, files)):
                out[layer, expert] = float(value)
    return out


def _listen(model_index: ModelIndex, windows: Sequence[Window], options: dict[str, Any]) -> dict[int, _Sample]:
    samples: dict[int, _Sample] = {}
    with open_model(model_index.files[0], len(windows[0].tokens), experts=False, gate_input=True, **options) as llm:
        gates = {info.gate: info for info in llm.engine.buffer.tensors if not parse_tensor_name(info.name.decode()).chunk}

        def note(event: GateEvent) -> None:
            if event.gate in gates:
                samples.setdefault(event.layer, _Sample(gates[event.gate].ne[2])).add(event)

        llm.engine.buffer.set_gate_callback(note)
        evaluate(llm, windows)
        llm.engine.buffer.drain()
        llm.engine.buffer.check()
        llm.engine.buffer.set_gate_callback(None)
    return samples


def _layer(spans: dict[str, TensorSpan], sample: _Sample | None, sidecar: Sidecar, tier: str, files: ModelBytes) -> np.ndarray:
    n_experts = next(iter(spans.values())).shape[2]
    values = np.zeros(n_experts)
    if sample is None or not sample.n:
        return values if sample is None else sample.used
    inputs = np.concatenate(sample.inputs)
    ids, weights = np.concatenate(sample.ids), np.concatenate(sample.weights)
    sampled = np.zeros(n_experts, bool)
    for expert in range(n_experts):
        token, place_ = np.nonzero(ids == expert)
        if not len(token):
            continue
        x = inputs[token].astype(np.float32)
        high, low = {}, {}
        for m, s in spans.items():
            piece, own = sidecar.slices[s.name, expert, tier], files.read(s.file, s.offset + expert * s.slice_bytes, s.slice_bytes, s.name)
            high[m] = dequantize(own, s.type, piece.shape)
            low[m] = dequantize(files.read(len(files) - 1, piece.offset, piece.nbytes, s.name), piece.type, piece.shape)
        y = _expert(high, x)
        y -= _expert(low, x)
        g2 = weights[token, place_].astype(np.float64) ** 2
        # the sampled tokens' mean error for each g², times all tokens' g²
        values[expert] = (g2 * (y.astype(np.float64) ** 2).sum(axis=1)).sum() / max(g2.sum(), 1e-30) * sample.used[expert]
        sampled[expert] = True
    unheard = ~sampled & (sample.used > 0)
    if unheard.any() and sampled.any():
        values[unheard] = values[sampled].sum() / sample.used[sampled].sum() * sample.used[unheard]
    return values


def _expert(w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """[n, n_embd] through one expert."""
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
