"""Options of llama.cpp as people write them, as the arguments of llama_cpp.Llama that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..binding import llama_cpp, supports_gpu
from ..devices import backends
from ..errors import OptionError
from ..gguf.layout import Layout, count
from ..gguf.quantize import type_from_name, type_name

__all__ = ["CACHE_TYPES", "NO_RPC", "NUMA_STRATEGIES", "ROPE_SCALINGS", "SPLIT_MODES", "check_model", "check_options", "read_options"]

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # llama.cpp's programs take no others
_UNQUANTIZED = CACHE_TYPES[:3]
SPLIT_MODES = {"none": llama_cpp.LLAMA_SPLIT_MODE_NONE, "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER}
_ROW_SPLITS = ("row", "tensor")
ROPE_SCALINGS = {
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
NUMA_STRATEGIES = {
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}
NO_RPC = (
    "llama.cpp's RPC server would be handed whole tensors, and addresses that mean nothing on another machine, while experts are read here, slice by slice; "
    "on several machines run a replica on each: moeoff.ray"
)
_HADAMARD = 64  # numbers of a head that llama.cpp rotates together before it quantizes them
_GPU_OPTIONS = ("tensor_split", "split_mode", "main_gpu")
_YARN_OPTIONS = ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options with llama.cpp's numbers in the place of names.

    Raises:
        OptionError: there is no such name, or it cannot be used here.
    """
    out = dict(options)
    if out.pop("rpc_servers", None):
        raise OptionError(NO_RPC)
    for name in ("type_k", "type_v"):
        if isinstance(value := out.get(name), str):
            out[name] = type_from_name(_one_of(name, value, CACHE_TYPES))
    if out.get("split_mode") in _ROW_SPLITS:
        raise OptionError(f"split_mode {out['split_mode']!r}: experts are computed from the expert buffer, which holds whole rows: choose layer or none")
    for name, values in (("split_mode", SPLIT_MODES), ("rope_scaling_type", ROPE_SCALINGS), ("numa", NUMA_STRATEGIES)):
        if isinstance(value := out.get(name), str):
            out[name] = values[_one_of(name, value, tuple(values))]
    if isinstance(split := out.get("tensor_split"), str):
        try:
            out["tensor_split"] = [float(share) for share in split.split(",")]
        except ValueError:
            raise OptionError(f"tensor_split: shares of the GPUs as 3,1, not {split!r}") from None
    return out


def _one_of(name: str, value: str, values: tuple[str, ...]) -> str:
    if value.lower() not in values:
        raise OptionError(f"{name}: one of {', '.join(values)}, not {value!r}")
    return value.lower()


def check_options(options: Mapping[str, Any]) -> None:
    """Raises OptionError for values that llama.cpp would refuse, or that would have no effect."""
    for name in ("type_k", "type_v"):
        if (number := options.get(name)) is not None and type_name(number).lower() not in CACHE_TYPES:
            raise OptionError(f"{name}: one of {', '.join(CACHE_TYPES)}, not {type_name(number)}")
    value_type = options.get("type_v")
    if value_type is not None and type_name(value_type).lower() not in _UNQUANTIZED and not options.get("flash_attn"):
        raise OptionError(f"type_v {type_name(value_type).lower()}: quantized values need flash attention, which is off")
    for name in ("n_batch", "n_ubatch"):
        if name in options and options[name] < 1:
            raise OptionError(f"{name}: at least 1 token, not {options[name]}")
    gpu = [name for name in ("n_gpu_layers", *_GPU_OPTIONS) if options.get(name)]
    if gpu and not supports_gpu() and (found := backends()):
        raise OptionError(
            f"{gpu[0]}: this build has {' and '.join(found)}, and no driver offers a device; Vulkan's software driver has to be named: GGML_VK_VISIBLE_DEVICES=0"
        )
    if gpu and not supports_gpu():
        raise OptionError(f"{gpu[0]}: this build of llama.cpp has no GPU backend; rebuild with CMAKE_ARGS=-DGGML_CUDA=ON (or METAL, VULKAN)")
    if gpu and not options.get("n_gpu_layers"):
        raise OptionError(f"{gpu[0]} has no effect while no layer goes to the GPU: give n_gpu_layers")


def check_model(options: Mapping[str, Any], layout: Layout, context_shift: bool = False) -> None:
    """Raises OptionError for values that have no effect with this model, or that llama.cpp would crash over."""
    given = [name for name in _YARN_OPTIONS if name in options]
    scaling = options.get("rope_scaling_type", -1)
    yarn = layout.hparams.get("rope.scaling.type") == "yarn" if scaling == -1 else scaling == ROPE_SCALINGS["yarn"]
    if given and not yarn and options.get("yarn_ext_factor", -1.0) <= 0:
        raise OptionError(f"{given[0]} has no effect: the model's rope scaling is not YaRN; ask for it with rope_scaling_type")
    if context_shift and options.get("type_k") is not None and type_name(options["type_k"]).lower() not in _UNQUANTIZED:
        widths = set(_key_widths(layout))
        if len(widths) > 1 or any(width % _HADAMARD for width in widths):
            # it rotates them back first, with a matrix that it has for these sizes alone, and reads a null pointer where it has none
            raise OptionError(
                f"context_shift: quantized keys of {', '.join(map(str, sorted(widths)))} numbers cannot be moved: take f16, bf16 or f32 for type_k"
            )


def _key_widths(layout: Layout) -> list[int]:
    """Numbers in a head's keys, of ordinary layers and of those with a sliding window."""
    n_head, n_embd = count(layout.hparams, "attention.head_count"), count(layout.hparams, "embedding_length")
    width = count(layout.hparams, "attention.key_length") or (n_embd // n_head if n_head else 0)
    return [width, count(layout.hparams, "attention.key_length_swa") or width]
