"""How much an expert matters, told from what the gates chose: the sum over tokens of g² · ‖E(x) − Ê(x)‖².

g is the gate's weight, x its input, E the expert and Ê the same in a lower type: what quantizing it adds, squared, to the
residual stream. Needs one pass of the lossless model, and each expert computed once for a sample of its tokens. It does not
know what later layers make of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..companion.file import Companion
from ..gate_event import GateEvent
from ..gguf.layout import Layout, TensorSpan
from ..gguf.model_bytes import ModelBytes
from ..gguf.quantize import dequantize
from ..gguf.tensor_name import parse_tensor_name
from .perplexity import Window, evaluate, open_model

__all__ = ["estimate_importance"]

N_SAMPLES = 512  # tokens whose inputs are kept, of each gate


class _Sample:
    """Of one gate: the first tokens' inputs, [n, n_embd] float16, who was chosen with what weight; and everyone's sum of g²."""

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


def estimate_importance(layout: Layout, companion: Companion, tier: str, windows: Sequence[Window], **options: Any) -> dict[tuple[int, int], float]:
    """By (layer, expert). An expert that no token chose has 0, one whose tokens were not sampled the mean of its layer.

    Takes every expert for SwiGLU without biases: for other activations it is a rougher estimate.

    Args:
        companion: has `tier`, the lower type.
        windows: calibration text.
        **options: of `moeoff.Llama`.
    """
    samples = _listen(layout, windows, options)
    out: dict[tuple[int, int], float] = {}
    with ModelBytes((*layout.files, companion.path)) as files:
        by_layer: dict[int, dict[str, TensorSpan]] = {}
        for name, span in layout.experts.items():
            where = parse_tensor_name(name)
            if not where.chunk:
                by_layer.setdefault(where.layer, {})[where.matrix_name] = span
        for layer, spans in by_layer.items():
            for expert, value in enumerate(_layer(spans, samples.get(layer), companion, tier, files)):
                out[layer, expert] = float(value)
    return out


def _listen(layout: Layout, windows: Sequence[Window], options: dict[str, Any]) -> dict[int, _Sample]:
    samples: dict[int, _Sample] = {}
    with open_model(layout.files[0], len(windows[0].tokens), experts=False, gate_input=True, **options) as llm:
        gates = {info.gate: info for info in llm.expert_buffer.tensors if not parse_tensor_name(info.name.decode()).chunk}

        def note(event: GateEvent) -> None:
            if event.gate in gates:
                samples.setdefault(event.layer, _Sample(gates[event.gate].ne[2])).add(event)

        llm.expert_buffer.set_gate_callback(note)
        evaluate(llm, windows)
        llm.expert_buffer.drain()
        llm.expert_buffer.check()
        llm.expert_buffer.set_gate_callback(None)
    return samples


def _layer(spans: dict[str, TensorSpan], sample: _Sample | None, companion: Companion, tier: str, files: ModelBytes) -> np.ndarray:
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
        high = {m: _read(files, s.file, s.offset + expert * (s.nbytes // s.shape[2]), s.nbytes // s.shape[2], s.type, s) for m, s in spans.items()}
        y = _expert(high, x)
        low = {}
        for m, s in spans.items():
            piece = companion.slices[s.name, expert, tier]
            low[m] = _read(files, len(files) - 1, piece.offset, piece.nbytes, piece.type, s)
        y -= _expert(low, x)
        g2 = weights[token, place_].astype(np.float64) ** 2
        # the sampled tokens' mean error for each g², times all tokens' g²
        values[expert] = (g2 * (y.astype(np.float64) ** 2).sum(axis=1)).sum() / max(g2.sum(), 1e-30) * sample.used[expert]
        sampled[expert] = True
    unheard = ~sampled & (sample.used > 0)
    if unheard.any() and sampled.any():
        values[unheard] = values[sampled].sum() / sample.used[sampled].sum() * sample.used[unheard]
    return values


def _read(files: ModelBytes, file: int, offset: int, nbytes: int, type: int, span: TensorSpan) -> np.ndarray:
    return dequantize(files.read(file, offset, nbytes, span.name), type, (span.shape[1], span.shape[0]))


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
