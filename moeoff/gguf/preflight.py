"""Checks of a model's headers for what would make llama.cpp end the process.

`moeoff.llamacpp.llama.assertions_raise` turns most assertions of loading into errors.
Here are the rest: counts that llama.cpp divides by, types that fail in a graph, and
tables of expert ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from ..errors import ModelError
from .model_index import ModelBytes, ModelIndex, count, parse_tensor_name, type_error
from .quantize import BF16, F16, F32, I32, is_computed

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS
_MAX_INT = (1 << 31) - 1  # llama_cpp converts to int32
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

# Operands of additions, elementwise products and scans: ggml's CPU backend needs F32.
_ELEMENTWISE = re.compile(
    r"norm|\.bias$|ssm_(a|d|conv1d)\b|ssm_conv1d_|shortconv\.conv|ple_conv1d|exp_probs_b|"
    r"attn_sinks|rope_(freqs|factors_)"
    r"|hc_(base|scale)|hc_\w+_(base|scale)|res_score|output_scale|_conv_base|(?<!_exps)\.scale$"
)
_EXPERTS_OF_TOKENS = ".ffn_gate_tid2eid.weight"  # expert ids by token
_CAST = "ple_conv1d"  # cast before use; the quantizer leaves it in F16
_ID_TABLES = re.compile(r"tid2eid|d2t|ordering")  # integers


def preflight(index: ModelIndex) -> None:
    """Check that llama.cpp can load and compute the model, or raise ModelError.

    Models without experts pass without the checks of experts.
    """
    for key, good, expected in _counts(index):
        if not good:
            value = repr(index.hparams[key]) if key in index.hparams else "missing"
            raise ModelError(
                f"{index.files[0]}: {key} is {value}, expected {expected}: the file is damaged, or"
                " not for llama.cpp"
            )
    _check_tensors(index)
    _check_tables(index)


def _counts(index: ModelIndex) -> Iterator[tuple[str, bool, str]]:
    """Yield (key, whether its value is valid, valid values).

    llama.cpp itself reports keys that are missing or of a wrong type.
    """
    h, n_layer, scaling = (
        index.hparams,
        index.n_layer,
        index.hparams.get("rope.scaling.type", "linear"),
    )
    yield (
        "block_count",
        "block_count" not in h or 1 <= n_layer <= _MAX_LAYERS,
        f"1 to {_MAX_LAYERS}",
    )
    yield (
        "context_length",
        "context_length" not in h or 1 <= count(h, "context_length") <= _MAX_INT,
        f"1 to {_MAX_INT}",
    )
    yield (
        "nextn_predict_layers",
        count(h, "nextn_predict_layers") <= n_layer,
        f"at most the {n_layer} of block_count",
    )
    if index.experts or index.n_expert:
        yield from _expert_counts(index)
    for kind in ("", "_swa"):
        width = index.key_width(kind)
        yield (
            f"rope.dimension_count{kind}",
            not width or count(h, f"rope.dimension_count{kind}") <= width,
            f"at most the {width} numbers of a key",
        )
    if index.architecture == "deepseek2" and h.get("attention.temperature_scale"):
        yield (
            "attention.temperature_length",
            count(h, "attention.temperature_length") > 0,
            "1 or more, because attention.temperature_scale is set",
        )
    for key, value in h.items():
        if key.endswith("epsilon"):
            yield (
                key,
                not isinstance(value, float) or 0 <= value < math.inf,
                "a small positive number",
            )
    yield (
        "rope.scaling.type",
        not isinstance(scaling, str) or scaling in _ROPE_SCALINGS,
        ", ".join(_ROPE_SCALINGS),
    )


def _expert_counts(index: ModelIndex) -> Iterator[tuple[str, bool, str]]:
    h, n_expert, n_used = index.hparams, index.n_expert, index.n_expert_used
    n_groups, n_groups_used = count(h, "expert_group_count"), count(h, "expert_group_used_count")
    yield "expert_count", 1 <= n_expert <= _MAX_EXPERTS, f"1 to {_MAX_EXPERTS}"
    yield "expert_used_count", 1 <= n_used <= n_expert, f"1 to the {n_expert} of expert_count"
    yield (
        "expert_group_count",
        n_groups < n_expert and (n_groups < 2 or n_expert % n_groups == 0),
        f"a divisor of the {n_expert} of expert_count",
    )
    yield (
        "expert_group_used_count",
        n_groups < 2 or 1 <= n_groups_used < n_groups,
        f"1 to {n_groups - 1}, less than expert_group_count",
    )
    if isinstance(used := h.get("expert_used_count"), tuple):
        layers = {parse_tensor_name(name).layer for name in index.experts}
        each = [n for layer, n in enumerate(used) if layer in layers]
        yield (
            "expert_used_count",
            all(type(n) is int and 1 <= n <= n_expert for n in each),
            f"1 to the {n_expert} of expert_count in each layer",
        )


def _check_tensors(index: ModelIndex) -> None:
    for name, span in {**index.dense, **index.experts}.items():
        path = index.files[span.file]
        elementwise = (F32, F16, BF16) if _CAST in name else (F32,)
        is_operand = span.type not in elementwise and _ELEMENTWISE.search(name)
        is_integer = span.type == I32 and not _ID_TABLES.search(name)
        if is_operand or is_integer or not is_computed(span.type):
            raise type_error(path, span)
        if (
            name in index.experts
            and not parse_tensor_name(name).chunk
            and span.shape[2] != index.n_expert
        ):
            raise ModelError(
                f"{path}: {name} holds {span.shape[2]} experts, expected the {index.n_expert} of"
                " expert_count"
            )


def _check_tables(index: ModelIndex) -> None:
    with ModelBytes(index.files) as files:
        for name, span in index.dense.items():
            if name.endswith(_EXPERTS_OF_TOKENS) and span.type == I32:
                ids = np.frombuffer(files.read(span.file, span.offset, span.nbytes, name), np.int32)
                if (wrong := ids[(ids < 0) | (ids >= index.n_expert)]).size:
                    raise ModelError(
                        f"{index.files[span.file]}: {name} names expert {wrong[0]}, expected 0 to"
                        f" {index.n_expert - 1}: the file is damaged"
                    )
