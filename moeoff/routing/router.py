"""The routers of a model: how each gate turns its input into a choice, as llama.cpp's `build_moe_ffn` does it.

Read from the GGUF, dequantized. Knows every gating function that llama.cpp has; knows nothing of events or predictors.
"""

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
# what may stand before the router, weight and bias, first found; and of routers that norm the stream themselves
_NORMS = tuple((f"{name}.weight", f"{name}.bias") for name in ("ffn_norm", "post_attention_norm", "attn_output_norm"))
_OWN_NORMS = {"gemma4": (("ffn_gate_inp.scale", ""),)}
_Norm = tuple[np.ndarray, "np.ndarray | None"] | None  # weight and bias
_RATIO_LIMIT = 16.0  # of two layers' norm weights; beyond it the quotient is noise


class Router:
    """The routers of all gates.

    Attributes:
        gating: the function, one of the constants above.
        n_gates, n_experts: the priority table's shape; a gate with fewer experts uses the first columns.
        n_used: [n_gates] experts for each token.
        weights: [n_gates] arrays [n_experts, n_embd] float32, or None where the gate has no such tensor; of a lazy router read anew
            each time.
        tables: [n_gates] arrays [n_vocab, n_used] int32 where the token alone decides (deepseek4's first layers), else None.
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
        """All sequences: one entry for each gate.

        Args:
            bias: added to the logits.
            selection_bias: added to the probabilities for the choice alone (DeepSeek V3).
            norms: weight and bias of the norm that made the gate's input.
            n_groups, n_groups_used: experts come in groups of which the best take part.
            n_experts: of the widest gate; 0 takes it from the weights.
            by_logits: the choice is made before the function (llama4).
        """
        nothing = [None] * len(weights)
        self.weights = weights if isinstance(weights, _FromFile) else list(weights)
        self.n_used, self.gating = list(n_used), gating
        self.bias, self.selection_bias = list(bias or nothing), list(selection_bias or nothing)
        self.norms, self.tables = list(norms or nothing), list(tables or nothing)
        self.n_groups, self.n_groups_used, self._by_logits = n_groups, n_groups_used, by_logits
        self.n_gates = len(self.weights)
        self.n_experts = n_experts or max((len(w) for w in self.weights if w is not None), default=0)

    @classmethod
    def read(cls, model_index: ModelIndex, layers: Sequence[int], gating: int, n_experts: int = 0, lazy: bool = False) -> Router:
        """Reads the routers of a model.

        Args:
            layers: [n_gates] the layer of each gate.
            gating: Gating function of the model's graphs, `ExpertBuffer.gating`.
            lazy: weights are read from the file each time they are asked for, and not kept: in a large model they are as large as
                some layers, and who predicts with them keeps what it needs.

        Raises:
            ModelError: the file was cut while it was read.
        """
        with _Tensors(model_index) as tensors:
            get = tensors.get
            names = [f"blk.{i}.ffn_gate_inp.weight" for i in layers]
            weights = _FromFile(model_index, names) if lazy else [get(name, 2) for name in names]
            bias = [get(f"blk.{i}.ffn_gate_inp.bias") for i in layers]
            selection = [get(name if (name := f"blk.{i}.exp_probs_b.bias") in model_index.dense else f"blk.{i}.exp_probs_b") for i in layers]
            tables = [get(f"blk.{i}.ffn_gate_tid2eid.weight", 2) for i in layers]
            names_of_norms = _OWN_NORMS.get(model_index.architecture, _NORMS)
            norms = [
                next(((norm, get(f"blk.{i}.{bias}")) for weight, bias in names_of_norms if (norm := get(f"blk.{i}.{weight}")) is not None), None)
                for i in layers
            ]
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
        """True if the choice needs more than the order of the logits: a selection bias, or groups."""
        return self.n_groups > 1 or any(bias is not None for bias in self.selection_bias)

    def knows(self, gate: int) -> bool:
        """True if the gate's selection can be computed from its input."""
        return self.weights[gate] is not None and self.tables[gate] is None

    def logits(self, gate: int, x: np.ndarray) -> np.ndarray:
        """[n_tokens, n_experts] float32, of gate inputs [n_tokens, n_embd].

        Raises:
            ModelError: the model has no such tensor for this gate.
        """
        weight = self.weights[gate]
        if weight is None:
            raise ModelError(f"gate {gate} of the model has no router weights")
        out = matmul(x, weight)
        if self.bias[gate] is not None:
            out += self.bias[gate]
        return out

    def gated(self, logits: np.ndarray) -> np.ndarray:
        """Probabilities of logits. Where llama.cpp takes the softmax of the chosen alone, that of all: the order is the same."""
        out: np.ndarray
        if self.gating == SIGMOID:
            out = 1 / (1 + np.exp(-logits))
            return out
        if self.gating == SQRT_SOFTPLUS:
            out = np.sqrt(np.logaddexp(0, logits))
            return out
        out = logits - logits.max(axis=-1, keepdims=True)
        np.exp(out, out=out)
        out /= out.sum(axis=-1, keepdims=True)
        return out

    def probs(self, gate: int, x: np.ndarray) -> np.ndarray:
        """[n_tokens, n_experts] float32: the architecture's own probabilities, from which the gate chooses and weighs."""
        return self.gated(self.logits(gate, x))

    def selection(self, gate: int, probs: np.ndarray) -> np.ndarray:
        """Scores that the gate chooses by: probabilities with its selection bias, experts of groups left out below all others."""
        bias = self.selection_bias[gate]
        scores = probs if bias is None else probs + bias
        return self._grouped(scores) if self.n_groups > 1 else scores

    def _grouped(self, scores: np.ndarray) -> np.ndarray:
        n, e = scores.shape
        groups = scores.reshape(n, self.n_groups, e // self.n_groups)
        best = np.partition(groups, -2, axis=2)[:, :, -2:].sum(axis=2) if groups.shape[2] > 1 else groups[:, :, 0]
        best_groups = np.argsort(-best, axis=1, kind="stable")[:, : self.n_groups_used]
        out = np.ones((n, self.n_groups), bool)
        np.put_along_axis(out, best_groups, False, axis=1)
        span = np.ptp(scores, axis=1, keepdims=True) + 1
        lowered: np.ndarray = scores - np.repeat(out, e // self.n_groups, axis=1) * span
        return lowered

    def select(self, gate: int, probs: np.ndarray) -> np.ndarray:
        """[n_tokens, n_used] experts that the gate chooses, best first."""
        scores = probs if self._by_logits else self.selection(gate, probs)
        return np.argsort(-scores, axis=1, kind="stable")[:, : self.n_used[gate]]

    def choose(self, gate: int, x: np.ndarray) -> np.ndarray:
        """[n_tokens, n_used] experts for gate inputs [n_tokens, n_embd]."""
        logits = self.logits(gate, x)
        return self.select(gate, logits if self._by_logits else self.gated(logits))

    def ahead(self, source: int, target: int, norm: bool) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Weight [n_experts, n_embd] and bias of `target`'s router for the gate input of `source`; None if it has none, or none of finite numbers.

        norm: as if the residual stream were the same at both and only the norms' weights differed. A gate's input is
        r * w + b of a normed residual r, so the target's would be (x - b) / w * w' + b': folded into the router.
        """
        weight, bias = self.weights[target], self.bias[target]
        if weight is None or self.tables[target] is not None:
            return None
        if norm:
            weight, bias = self._folded(weight, bias, self.norms[source], self.norms[target])
        return (weight, bias) if all(numbers is None or np.isfinite(numbers).all() for numbers in (weight, bias)) else None

    @staticmethod
    def _folded(weight: np.ndarray, bias: np.ndarray | None, source: _Norm, target: _Norm) -> tuple[np.ndarray, np.ndarray | None]:
        if source is None or target is None:
            return weight, bias
        (w, b), (w2, b2) = source, target
        if w.shape != w2.shape or w.shape[0] != weight.shape[1]:
            return weight, bias
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(w == 0, 1, w2 / w)
        folded = weight * np.clip(ratio, -_RATIO_LIMIT, _RATIO_LIMIT)
        if b is not None or b2 is not None:
            moved = np.asarray((weight @ b2 if b2 is not None else 0) - (folded @ b if b is not None else 0))
            bias = moved if bias is None else bias + moved
        return np.ascontiguousarray(folded, np.float32), bias


class _FromFile(Sequence["np.ndarray | None"]):
    """Tensors by name that are read whenever one is asked for; None for those that the model lacks."""

    def __init__(self, model_index: ModelIndex, names: Sequence[str]):
        self._model_index, self._names = model_index, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> np.ndarray | None:  # type: ignore[override]  # nobody asks for a part of them
        with _Tensors(self._model_index) as tensors:
            return tensors.get(self._names[index], 2)


class _Tensors(ModelBytes):
    """Dense tensors of a model by name, as float32 (or their own integers)."""

    def __init__(self, model_index: ModelIndex):
        super().__init__(model_index.files)
        self._model_index = model_index

    def get(self, name: str, rank: int = 1) -> np.ndarray | None:
        """An array of so many dimensions, None if there is no such tensor: a file does not say those that are 1 at the end, as of one expert."""
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
            _say(f"{self._model_index.files[span.file]}: {name} holds numbers that are not finite: the file is damaged, and what the model says is of no use")
        return numbers


_say = functools.cache(note)  # once: a lazy router's weights are read again


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w.T of [n, d] and [m, d], on the calling thread alone.

    BLAS would wake threads of its own, even for a vector, and take the cores from the threads that compute the next layer:
    86 instead of 110 tok/s in a prompt on 2 cores. Dot products of single rows are below its threshold.
    """
    out: np.ndarray = np.vecdot(x[:, None], w)
    return out


class Rows:
    """A matrix that is multiplied for every token, as Q8_0: such a product takes the time to read the matrix, and a prediction needs
    no more than the order of the results. Rows that are no whole blocks of 32 stay float32.

    Args:
        weight: [m, d] float.

    Attributes:
        type, address: ggml's number of the type, and where the rows are.
    """

    def __init__(self, weight: np.ndarray):
        self.n_rows, self.n_cols = weight.shape
        name = "Q8_0" if fits(type_from_name("Q8_0"), self.n_cols) else "F32"
        self.type = type_from_name(name)
        self._rows = quantize(weight, self.type)
        self.address: int = self._rows.ctypes.data
        from ..llamacpp import native  # what only replays traces loads no llama.cpp

        self._row_products = native.row_products

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def product(self, x: np.ndarray) -> np.ndarray:
        """x @ weight.T: [n, m] float32 of [n, d], on the calling thread alone (see `matmul`)."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self.n_rows), np.float32)
        if self._row_products(self.type, self.address, self.n_rows, self.n_cols, x.ctypes.data, len(x), out.ctypes.data) != 0:
            raise MemoryError("no memory for one row of a router")
        return out
