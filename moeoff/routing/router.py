"""A model's routers: how gates select experts, as in llama.cpp's `build_moe_ffn`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ..errors import ModelError
from ..gguf.model_index import ModelBytes, ModelIndex, count
from ..gguf.quantize import I32, dequantize, fits, quantize, type_from_name
from ..system.console import note

# enum llama_expert_gating_func_type
SOFTMAX, SIGMOID, SOFTMAX_WEIGHT, SQRT_SOFTPLUS = 1, 2, 3, 4
# Candidates for weight and bias of the norm before the router.
_NORMS = tuple(
    (f"{name}.weight", f"{name}.bias")
    for name in ("ffn_norm", "post_attention_norm", "attn_output_norm")
)
_OWN_NORMS = {"gemma4": (("ffn_gate_inp.scale", ""),)}  # routers that normalize the residual
_Norm = tuple[np.ndarray, "np.ndarray | None"] | None  # weight and bias
_RATIO_LIMIT = 16.0  # of two layers' norm weights; larger quotients are noise


class Router:
    """The routers of all gates.

    Attributes:
        gating: Gating function, one of the constants above.
        n_experts: Number of experts of the widest gate.
        n_used: [n_gates] experts per token.
        weights: [n_gates] arrays [n_experts, n_embd] float32, None for gates without. A
            lazy router reads them at each access.
        tables: [n_gates] arrays [n_vocab, n_used] int32 for gates that select by token
            (first layers of deepseek4), else None.
    """

    def __init__(
        self,
        weights: Sequence[np.ndarray | None],
        n_used: Sequence[int],
        gating: int = SOFTMAX,
        bias: Sequence[np.ndarray | None] | None = None,
        selection_bias: Sequence[np.ndarray | None] | None = None,
        norms: Sequence[_Norm] | None = None,
        tables: Sequence[np.ndarray | None] | None = None,
        n_groups: int = 0,
        n_groups_used: int = 0,
        n_experts: int = 0,
        by_logits: bool = False,
    ):
        """Create a router. Sequences have an entry for each gate.

        Args:
            bias: Added to the logits.
            selection_bias: Added to the probabilities for the selection (DeepSeek V3).
            norms: Weight and bias of the norm before the gate.
            n_groups_used: Number of groups, the best ones, to select from.
            n_experts: As the attribute; 0 to take it from the weights.
            by_logits: True to select before the gating function (llama4).
        """
        nothing = [None] * len(weights)
        self.weights = weights if isinstance(weights, _LazyTensors) else list(weights)
        self.n_used, self.gating = list(n_used), gating
        self.bias, self.selection_bias = list(bias or nothing), list(selection_bias or nothing)
        self.norms, self.tables = list(norms or nothing), list(tables or nothing)
        self.n_groups, self.n_groups_used, self._by_logits = n_groups, n_groups_used, by_logits
        self.n_gates = len(self.weights)
        self.n_experts = n_experts or max(
            (len(w) for w in self.weights if w is not None), default=0
        )

    @classmethod
    def read(
        cls,
        model_index: ModelIndex,
        layers: Sequence[int],
        gating: int,
        n_experts: int = 0,
        lazy: bool = False,
    ) -> Router:
        """Read the routers of a model.

        Args:
            layers: [n_gates] layer of each gate.
            lazy: True to read weights at each access: they may be gigabytes.

        Raises:
            ModelError: The file was truncated meanwhile.
        """
        norm_names = _OWN_NORMS.get(model_index.architecture, _NORMS)
        with _Tensors(model_index) as tensors:

            def each(name: str, rank: int = 1) -> list[np.ndarray | None]:
                return [tensors.get(f"blk.{i}.{name}", rank) for i in layers]

            names = [f"blk.{i}.ffn_gate_inp.weight" for i in layers]
            weights = _LazyTensors(model_index, names) if lazy else each("ffn_gate_inp.weight", 2)
            bias = each("ffn_gate_inp.bias")
            named = zip(each("exp_probs_b.bias"), each("exp_probs_b"))
            selection = [old if new is None else new for new, old in named]
            tables = each("ffn_gate_tid2eid.weight", 2)
            candidates = [zip(each(weight), each(bias)) for weight, bias in norm_names]
            layer_norms = zip(*candidates)
            norms = [next((n for n in pairs if n[0] is not None), None) for pairs in layer_norms]
        return cls(
            weights,
            [model_index.experts_used(i) for i in layers],
            gating,
            bias,
            selection,
            norms,
            tables,
            count(model_index.hparams, "expert_group_count"),
            count(model_index.hparams, "expert_group_used_count"),
            n_experts or model_index.n_expert,
            model_index.architecture == "llama4",
        )

    @property
    def by_probs(self) -> bool:
        """True if the order of logits does not decide: a selection bias or groups."""
        return self.n_groups > 1 or any(bias is not None for bias in self.selection_bias)

    def knows(self, gate: int) -> bool:
        """Return True if the gate's input determines its selection."""
        return self.weights[gate] is not None and self.tables[gate] is None

    def logits(self, gate: int, x: np.ndarray) -> np.ndarray:
        """Return float32 logits [n_tokens, n_experts] of inputs [n_tokens, n_embd].

        Raise ModelError if the gate has no router weights.
        """
        weight = self.weights[gate]
        if weight is None:
            raise ModelError(f"gate {gate} of the model has no router weights")
        out = matmul(x, weight)
        if self.bias[gate] is not None:
            out += self.bias[gate]
        return out

    def gated(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities of logits.

        SOFTMAX_WEIGHT, a softmax of selected experts alone, has the same order.
        """
        out: np.ndarray
        if self.gating == SIGMOID:
            out = 1 / (1 + np.exp(-logits))
        elif self.gating == SQRT_SOFTPLUS:
            out = np.sqrt(np.logaddexp(0, logits))
        else:
            out = logits - logits.max(axis=-1, keepdims=True)
            np.exp(out, out=out)
            out /= out.sum(axis=-1, keepdims=True)
        return out

    def probs(self, gate: int, x: np.ndarray) -> np.ndarray:
        """Return probabilities [n_tokens, n_experts] float32 of gate inputs."""
        return self.gated(self.logits(gate, x))

    def selection(self, gate: int, probs: np.ndarray) -> np.ndarray:
        """Return selection scores: biased, experts of unused groups below others."""
        bias = self.selection_bias[gate]
        scores = probs if bias is None else probs + bias
        return self._grouped(scores) if self.n_groups > 1 else scores

    def _grouped(self, scores: np.ndarray) -> np.ndarray:
        n, e = scores.shape
        groups = scores.reshape(n, self.n_groups, e // self.n_groups)
        best = (
            np.partition(groups, -2, axis=2)[:, :, -2:].sum(axis=2)
            if groups.shape[2] > 1
            else groups[:, :, 0]
        )
        best_groups = np.argsort(-best, axis=1, kind="stable")[:, : self.n_groups_used]
        out = np.ones((n, self.n_groups), bool)
        np.put_along_axis(out, best_groups, False, axis=1)
        span = np.ptp(scores, axis=1, keepdims=True) + 1
        lowered: np.ndarray = scores - np.repeat(out, e // self.n_groups, axis=1) * span
        return lowered

    def select(self, gate: int, probs: np.ndarray) -> np.ndarray:
        """Return the selected experts [n_tokens, n_used], best first."""
        scores = probs if self._by_logits else self.selection(gate, probs)
        return np.argsort(-scores, axis=1, kind="stable")[:, : self.n_used[gate]]

    def choose(self, gate: int, x: np.ndarray) -> np.ndarray:
        """Return the experts [n_tokens, n_used] of gate inputs [n_tokens, n_embd]."""
        logits = self.logits(gate, x)
        return self.select(gate, logits if self._by_logits else self.gated(logits))

    def ahead(
        self, source: int, target: int, norm: bool
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return `target`'s router for gate inputs of `source`.

        Args:
            norm: True to assume equal residuals r at both gates. Inputs are r * w + b,
                so the target's, (x - b) / w * w' + b', are folded into its router.

        Returns:
            Weight [n_experts, n_embd] and bias, None without finite ones.
        """
        weight, bias = self.weights[target], self.bias[target]
        if weight is None or self.tables[target] is not None:
            return None
        if norm:
            weight, bias = self._folded(weight, bias, self.norms[source], self.norms[target])
        return (
            (weight, bias)
            if all(numbers is None or np.isfinite(numbers).all() for numbers in (weight, bias))
            else None
        )

    @staticmethod
    def _folded(
        weight: np.ndarray, bias: np.ndarray | None, source: _Norm, target: _Norm
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if source is None or target is None:
            return weight, bias
        (w, b), (w2, b2) = source, target
        if w.shape != w2.shape or w.shape[0] != weight.shape[1]:
            return weight, bias
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(w == 0, 1, w2 / w)
        folded = weight * np.clip(ratio, -_RATIO_LIMIT, _RATIO_LIMIT)
        if b is not None or b2 is not None:
            moved = np.asarray(
                (weight @ b2 if b2 is not None else 0) - (folded @ b if b is not None else 0)
            )
            bias = moved if bias is None else bias + moved
        return np.ascontiguousarray(folded, np.float32), bias


class _LazyTensors(Sequence["np.ndarray | None"]):
    """Tensors by name, read at each access; None for missing ones."""

    def __init__(self, model_index: ModelIndex, names: Sequence[str]):
        self._model_index, self._names = model_index, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> np.ndarray | None:  # type: ignore[override]  # no slices
        with _Tensors(self._model_index) as tensors:
            return tensors.get(self._names[index], 2)


class _Tensors(ModelBytes):
    """A model's dense tensors by name, as float32 or int32."""

    def __init__(self, model_index: ModelIndex):
        super().__init__(model_index.files)
        self._model_index = model_index

    def get(self, name: str, rank: int = 1) -> np.ndarray | None:
        """Return a tensor of rank 1 or 2 (GGUF drops final 1s), None if missing."""
        span = self._model_index.dense.get(name)
        if span is None:
            return None
        data = self.read(span.file, span.offset, span.nbytes, name)
        n = math.prod(span.shape)
        shape = (n,) if rank == 1 else (n // max(span.shape[0], 1), span.shape[0])
        if span.type == I32:
            return np.frombuffer(data, np.int32).reshape(shape)
        numbers = dequantize(data, span.type, shape)
        if not np.isfinite(numbers).all():
            what = f"{self._model_index.files[span.file]}: {name} holds numbers that are not finite"
            _note_once(f"{what}: the file is damaged, and answers will be useless")
        return numbers


_note_once = functools.cache(note)  # lazy routers read tensors again and again


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return x @ w.T of [n, d] and [m, d], computed by the calling thread.

    BLAS threads would take cores from the next layer: 86 instead of 110 tok/s in prompt
    processing on 2 cores. Dot products of rows are below BLAS's threshold for threads.
    """
    out: np.ndarray = np.vecdot(x[:, None], w)
    return out


class Rows:
    """A matrix in Q8_0, because products with single tokens are limited by memory.

    Predictions only need the order of results. Rows not of 32s stay float32.

    Args:
        weight: [m, d] float.
    """

    def __init__(self, weight: np.ndarray):
        self.n_rows, self.n_cols = weight.shape
        name = "Q8_0" if fits(type_from_name("Q8_0"), self.n_cols) else "F32"
        self.type = type_from_name(name)
        self._rows = quantize(weight, self.type)
        self.address: int = self._rows.ctypes.data
        from ..llamacpp import native  # replays of traces do not load llama.cpp

        self._row_products = native.row_products

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def product(self, x: np.ndarray) -> np.ndarray:
        """Return x @ weight.T, [n, m] float32 of [n, d], on the calling thread."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self.n_rows), np.float32)
        if (
            self._row_products(
                self.type,
                self.address,
                self.n_rows,
                self.n_cols,
                x.ctypes.data,
                len(x),
                out.ctypes.data,
            )
            != 0
        ):
            raise MemoryError("no memory for one row of a router")
        return out
