"""The native side seen from Python: the ctypes mirror of `moeoff.h` and the handshake that proves both agree.

Nothing here decides anything. `_abi` holds the mirror, which is made from the header. Importing this module loads llama.cpp and
raises `ForkError` if it is not moeoff's build.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p

from . import _abi, cpu
from ._abi import *  # noqa: F403
from ._abi import ABI_VERSION, N_MATRIX, STRUCTS, VERSION_HIGH, VERSION_LOW, VERSION_SKIP, abi_layout, abi_version, function
from .binding import api, lib
from .errors import ForkError

MATRICES = ("gate_up", "up", "gate", "down")  # enum moeoff_matrix, in the order the graph computes them
ALL_MATRICES = (1 << N_MATRIX) - 1

HIGH, LOW, SKIP = VERSION_HIGH, VERSION_LOW, VERSION_SKIP  # of a slice; skip is a decision about an expert, its output is zero

__all__ = [
    *_abi.__all__,
    "ALL_MATRICES",
    "HIGH",
    "LOW",
    "MATRICES",
    "SKIP",
    "BuftOverride",
    "batch_memory",
    "context_memory",
    "cpu_buffer_type",
    "device_memory_of",
    "layer_device",
    "lib",
    "replan",
    "row_kernel",
    "row_kernel_agrees",
    "row_products",
    "tensor_overrides",
    "use_row_kernels",
]


class BuftOverride(Structure):
    """struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };"""

    _fields_ = [("pattern", c_char_p), ("buft", c_void_p)]


def tensor_overrides(pairs: Sequence[tuple[str, int]]) -> ctypes.Array[BuftOverride]:
    """Overrides from (regular expression, ggml_backend_buffer_type_t), ended by an empty one: the first that is found in a tensor's name says where it goes."""
    array = (BuftOverride * (len(pairs) + 1))()
    for i, (pattern, buffer_type) in enumerate(pairs):
        array[i] = BuftOverride(pattern.encode(), buffer_type)
    return array


def _layout() -> str:
    """The structs of the mirror in the words of moeoff_abi_layout()."""
    return ";".join(
        f"{name}:{ctypes.sizeof(struct)}" + "".join(f",{field[0]}:{getattr(struct, field[0]).offset}" for field in struct._fields_)
        for name, struct in STRUCTS.items()
    )


if abi_version() != ABI_VERSION or abi_layout().decode() != _layout():
    raise ForkError(
        f"the installed llama-cpp-python speaks version {abi_version()} of the expert buffer's interface, "
        f"this moeoff version {ABI_VERSION}: run `make env` to rebuild it"
    )

# bool moeoff_should_abort(void * eb);  -- as a ggml_abort_callback
should_abort = api.ggml_abort_callback(ctypes.cast(_abi.should_abort, c_void_p).value or 0)
# int moeoff_context_memory(struct llama_context * ctx, uint64_t * bytes);  -- of moeoff-llama.h
context_memory = function("moeoff_context_memory", c_int, c_void_p, POINTER(c_uint64))
# int moeoff_batch_memory(struct llama_context * ctx, uint32_t n_tokens, bool gives_back, uint64_t * bytes);
# -- of moeoff-llama.h
_batch_memory = function("moeoff_batch_memory", c_int, c_void_p, c_uint32, c_bool, POINTER(c_uint64))
# uint64_t moeoff_unused_state(const struct llama_context * ctx, uint32_t n_tokens, bool gives_back);
unused_state = function("moeoff_unused_state", c_uint64, c_void_p, c_uint32, c_bool)
# void * moeoff_layer_device(const struct llama_context * ctx, int32_t layer);  -- a ggml_backend_dev_t, or None: the CPU
layer_device = function("moeoff_layer_device", c_void_p, c_void_p, c_int32)
# int moeoff_replan(struct llama_context * ctx);
replan = function("moeoff_replan", c_int, c_void_p)
# void moeoff_device_memory(const struct llama_context * ctx, void * device, uint64_t * bytes);
_device_memory = function("moeoff_device_memory", None, c_void_p, c_void_p, POINTER(c_uint64))
# int moeoff_row_products(int32_t type, const void * rows, int32_t n_rows, int32_t n_cols, const float * x, int32_t n_x, float * out);
# -- of moeoff-row-kernels.h
row_products = function("moeoff_row_products", c_int, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p)
# int moeoff_row_kernel(int32_t type);  -- 1: four rows at a time, 0: one, or they are off, -1: one, since our kernel did not give vec_dot's bits
row_kernel = function("moeoff_row_kernel", c_int, c_int32)
# void moeoff_use_row_kernels(bool use);  -- from now on; not while anything computes
use_row_kernels = function("moeoff_use_row_kernels", None, c_bool)
# bool moeoff_row_kernel_agrees(int32_t type, int n_unit, moeoff_four_rows kernel, moeoff_four_columns four_columns);
row_kernel_agrees = function("moeoff_row_kernel_agrees", c_bool, c_int32, c_int, c_void_p, c_void_p)
# ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);  -- of ggml-backend.h
cpu_buffer_type = function("ggml_backend_cpu_buffer_type", c_void_p)


def batch_memory(ctx: int, n_tokens: int, gives_back: bool) -> tuple[int, int] | None:
    """Bytes of the compute buffer and of the work area for batches of at most so many tokens; None: a device computes, too, or, with
    `gives_back`, the system has taken nothing back. Not while the context decodes.

    Args:
        gives_back: what such batches do not use of the compute buffer, until a larger one comes.
    """
    out = (c_uint64 * 2)()
    return (out[0], out[1]) if _batch_memory(ctx, n_tokens, gives_back, out) == 0 else None


def device_memory_of(ctx: int, device: int) -> int:
    """Bytes that llama.cpp has allocated for a context on a device: weights, caches and buffers."""
    out = (c_uint64 * 3)()
    _device_memory(ctx, device, out)
    return sum(out)


use_row_kernels(cpu.wants_row_kernels())
