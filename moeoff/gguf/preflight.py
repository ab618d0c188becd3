"""Checks of a model's headers before llama.cpp sees the file: it ends the process over what it does not expect.

Most of what llama.cpp asserts while it loads comes back as an error (`moeoff.llamacpp.llama.assertions_raise`). Here is the rest, and what
deserves a sentence of its own: counts that it divides by, types that fail while it computes, and tables that name experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from ..errors import ModelError
from .model_index import ModelBytes, ModelIndex, count, parse_tensor_name
from .quantize import BF16, F16, F32, I32, is_computed, type_name

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
_MAX_INT = (1 << 31) - 1  # llama_cpp takes it as a signed number
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")  # those that llama.cpp knows


# what is added, multiplied element by element, or scanned: of two operands ggml's CPU backend wants the second in F32
_ELEMENTWISE = re.compile(
    r"norm|\.bias$|ssm_(a|d|conv1d)\b|ssm_conv1d_|shortconv\.conv|ple_conv1d|exp_probs_b|attn_sinks|rope_(freqs|factors_)"
    r"|hc_(base|scale)|hc_\w+_(base|scale)|res_score|output_scale|_conv_base|(?<!_exps)\.scale$"
)
_EXPERTS_OF_TOKENS = ".ffn_gate_tid2eid.weight"  # where a token alone decides
_CAST = "ple_conv1d"  # before it is multiplied; the quantizer leaves it in halves
_ID_TABLES = re.compile(r"tid2eid|d2t|ordering")  # tensors of integers


def preflight(index: ModelIndex) -> None:
    """Checks that llama.cpp would not end the process over what the file says. A model without experts is asked for none. Raises `ModelError`."""
    for key, good, expected in _counts(index):
        if not good:
            value = repr(index.hparams[key]) if key in index.hparams else "missing"
            raise ModelError(f"{index.files[0]}: {key} is {value}, expected {expected}: the file is damaged, or not for llama.cpp")
    _check_tensors(index)
    _check_tables(index)


def _counts(index: ModelIndex) -> Iterator[tuple[str, bool, str]]:
    """(key, whether its value will do, what would). A missing or mistyped key llama.cpp refuses in words."""
    h, n_layer, scaling = index.hparams, index.n_layer, index.hparams.get("rope.scaling.type", "linear")
    yield "block_count", "block_count" not in h or 1 <= n_layer <= _MAX_LAYERS, f"1 to {_MAX_LAYERS}"
    yield "context_length", "context_length" not in h or 1 <= count(h, "context_length") <= _MAX_INT, f"1 to {_MAX_INT}"
    yield "nextn_predict_layers", count(h, "nextn_predict_layers") <= n_layer, f"at most the {n_layer} of block_count"
    if index.experts or index.n_expert:
        yield from _expert_counts(index)
    n_head = count(h, "attention.head_count")
    for kind in ("", "_swa"):
        width = count(h, f"attention.key_length{kind}") or count(h, "attention.key_length") or (count(h, "embedding_length") // n_head if n_head else 0)
        yield f"rope.dimension_count{kind}", not width or count(h, f"rope.dimension_count{kind}") <= width, f"at most the {width} numbers of a key"
    if index.architecture == "deepseek2" and h.get("attention.temperature_scale"):
        yield "attention.temperature_length", count(h, "attention.temperature_length") > 0, "1 or more, because attention.temperature_scale is set"
    for key, value in h.items():
        if key.endswith("epsilon"):
            yield key, not isinstance(value, float) or 0 <= value < math.inf, "a small positive number"
    yield "rope.scaling.type", not isinstance(scaling, str) or scaling in _ROPE_SCALINGS, ", ".join(_ROPE_SCALINGS)


def _expert_counts(index: ModelIndex) -> Iterator[tuple[str, bool, str]]:
    h, n_expert, n_used = index.hparams, index.n_expert, index.n_expert_used
    n_groups, n_groups_used = count(h, "expert_group_count"), count(h, "expert_group_used_count")
    yield "expert_count", 1 <= n_expert <= _MAX_EXPERTS, f"1 to {_MAX_EXPERTS}"
    yield "expert_used_count", 1 <= n_used <= n_expert, f"1 to the {n_expert} of expert_count"
    yield "expert_group_count", n_groups < n_expert and (n_groups < 2 or n_expert % n_groups == 0), f"a divisor of the {n_expert} of expert_count"
    yield "expert_group_used_count", n_groups < 2 or 1 <= n_groups_used < n_groups, f"1 to {n_groups - 1}, less than expert_group_count"
    if isinstance(used := h.get("expert_used_count"), tuple):
        layers = {parse_tensor_name(name).layer for name in index.experts}
        each = [n for layer, n in enumerate(used) if layer in layers]
        yield "expert_used_count", all(type(n) is int and 1 <= n <= n_expert for n in each), f"1 to the {n_expert} of expert_count in each layer"


def _check_tensors(index: ModelIndex) -> None:
    for name, span in {**index.dense, **index.experts}.items():
        path = index.files[span.file]
        if not is_computed(span.type):
            raise ModelError(f"{path}: {name!r} is stored as {type_name(span.type)}, which ggml does not compute with: convert the model to another type")
        elementwise = (F32, F16, BF16) if _CAST in name else (F32,)
        if (span.type not in elementwise and _ELEMENTWISE.search(name)) or (span.type == I32 and not _ID_TABLES.search(name)):
            raise ModelError(f"{path}: {name!r} is stored as {type_name(span.type)}, with which llama.cpp cannot compute it: convert the model again")
        if name in index.experts and not parse_tensor_name(name).chunk and span.shape[2] != index.n_expert:
            raise ModelError(f"{path}: {name} holds {span.shape[2]} experts, expected the {index.n_expert} of expert_count")


def _check_tables(index: ModelIndex) -> None:
    with ModelBytes(index.files) as files:
        for name, span in index.dense.items():
            if name.endswith(_EXPERTS_OF_TOKENS) and span.type == I32:
                ids = np.frombuffer(files.read(span.file, span.offset, span.nbytes, name), np.int32)
                if (wrong := ids[(ids < 0) | (ids >= index.n_expert)]).size:
                    raise ModelError(f"{index.files[span.file]}: {name} names expert {wrong[0]}, expected 0 to {index.n_expert - 1}: the file is damaged")
