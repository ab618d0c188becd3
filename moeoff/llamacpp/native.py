"""The native side seen from Python: the ctypes mirror of our C headers and the handshake that proves both agree.

Nothing here decides anything. `_abi` holds the mirror, which is made from the headers. Importing this module loads llama.cpp and
raises `ForkError` if it is not moeoff's build.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_uint8, c_uint64, c_void_p
from typing import Any

import numpy as np

from ..errors import ForkError, OptionError
from ..system import machine
from . import _abi
from ._abi import *  # noqa: F403
from ._abi import ABI_VERSION, N_MATRIX, STRUCTS, VERSION_HIGH, VERSION_LOW, VERSION_SKIP, abi_layout, abi_version
from .llama import api

ALL_MATRICES = (1 << N_MATRIX) - 1

HIGH, LOW, SKIP = VERSION_HIGH, VERSION_LOW, VERSION_SKIP  # of a slice; skip is a decision about an expert, its output is zero


class TensorOverrides:
    """Where tensors go when a model is loaded: an array of llama_model_tensor_buft_override, which lives as long as this.

    Args:
        pairs: (regular expression, ggml_backend_buffer_type_t): the first that is found in a tensor's name decides.

    Attributes:
        address: of the array, which an empty one ends.
    """

    def __init__(self, pairs: Sequence[tuple[str, int]]):
        patterns, kinds = (c_char_p * len(pairs))(*(pattern.encode() for pattern, _ in pairs)), (c_void_p * len(pairs))(*(kind for _, kind in pairs))
        self.address: int = _abi.overrides_new(patterns, kinds, len(pairs))
        weakref.finalize(self, _abi.overrides_free, self.address)


class Simulation:
    """A model's expert buffer without files, memory and threads, in which every read ends at once.

    Args:
        tensors: `moeoff.routing.trace.TensorInfo` of each, gate by gate.
        cache_bytes: of the arena, at least two of the largest expert.

    Attributes:
        residency: [n_gates, n_experts] uint8, not 0: the expert is in memory.

    Raises:
        OptionError: no model has such tensors.
    """

    def __init__(self, tensors: Sequence[Any], cache_bytes: int):
        of_each = [_abi.TensorInfo(gate=t.gate, matrix=t.matrix, ne=(1, 1, t.n_experts), nbytes=t.nbytes) for t in tensors]
        self._at = _abi.simulation_init((_abi.TensorInfo * len(of_each))(*of_each), len(of_each), cache_bytes)
        if not self._at:
            raise OptionError(_abi.last_error().decode())
        weakref.finalize(self, _abi.simulation_free, self._at)
        self.residency = np.zeros((1 + max(t.gate for t in tensors), max(t.n_experts for t in tensors)), np.uint8)
        self._out = self.residency.ctypes.data_as(POINTER(c_uint8))

    def take(self, ids: np.ndarray, weights: np.ndarray, priorities: np.ndarray, tau: float, **event: int) -> tuple[int, int, np.ndarray | None]:
        """A gate selects.

        Args:
            ids, weights: [n_tokens, n_used], as of a gate event.
            priorities: [n_gates, n_experts] float32.
            tau: of `Precision`.
            event: gate and decode.

        Returns:
            Slices that it finds, slices that are evicted for it, and the versions [n_tokens, n_used] that serve; None: all high.
        """
        ids, weights = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(weights, np.float32)
        told = _abi.GateEvent(n_tokens=len(ids), n_used=ids.shape[1], ids=ids.ctypes.data_as(POINTER(c_int32)),
                              weights=weights.ctypes.data_as(POINTER(c_float)), **event)  # fmt: skip
        n_evicted = _abi.simulation_take(self._at, told, priorities.ctypes.data, tau, self._out)
        if n_evicted < 0:
            raise MemoryError(_abi.last_error().decode())
        return told.n_hit, n_evicted, np.ctypeslib.as_array(told.versions, ids.shape).copy() if told.versions else None


def layout(structs: Mapping[str, type[Structure]]) -> str:
    """Structs of the mirror in the words of moeoff_abi_layout()."""
    return ";".join(
        f"{name}:{ctypes.sizeof(struct)}" + "".join(f",{field[0]}:{getattr(struct, field[0]).offset}" for field in struct._fields_)
        for name, struct in structs.items()
    )


if abi_version() != ABI_VERSION or abi_layout().decode() != layout(STRUCTS):
    raise ForkError(
        f"the installed llama-cpp-python speaks version {abi_version()} of the expert buffer's interface, "
        f"this moeoff version {ABI_VERSION}: run `make env` to rebuild it"
    )

# bool moeoff_should_abort(void * eb);  -- as a ggml_abort_callback
should_abort = api.ggml_abort_callback(ctypes.cast(_abi.should_abort, c_void_p).value or 0)


def memory_of_context(ctx: int) -> tuple[int, ...] | None:
    """Bytes in host memory of weights, KV and recurrent state, compute buffers, work area and logits; None: no memory for the graph of the largest batch.
    Needs the experts' sources. Not while the context decodes."""
    out = (c_uint64 * 5)()
    return tuple(out) if _abi.context_memory(ctx, out) == 0 else None


def memory_of_batches(ctx: int, n_tokens: int, gives_back: bool) -> tuple[int, int] | None:
    """Bytes of the compute buffer and of the work area for batches of at most so many tokens; None: a device computes, too, or, with
    `gives_back`, the system has taken nothing back. Not while the context decodes.

    Args:
        gives_back: what such batches do not use of the compute buffer, until a larger one comes.
    """
    out = (c_uint64 * 2)()
    return (out[0], out[1]) if _abi.batch_memory(ctx, n_tokens, gives_back, out) == 0 else None


def device_memory_of(ctx: int, device: int) -> int:
    """Bytes that llama.cpp has allocated for a context on a device: weights, caches and buffers."""
    out = (c_uint64 * 3)()
    _abi.device_memory(ctx, device, out)
    return sum(out)


_abi.guard(0)
_abi.use_row_kernels(machine.wants_row_kernels())
_abi.use_attention_kernels(machine.wants_row_kernels())
