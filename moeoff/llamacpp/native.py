"""The ctypes mirror of our C headers (`_abi`, generated) and the check that both agree.

Importing this module loads llama.cpp. It raises `ForkError` if that is not moeoff's
build.
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
from ._abi import (
    ABI_VERSION,
    N_MATRIX,
    STRUCTS,
    VERSION_HIGH,
    VERSION_LOW,
    VERSION_SKIP,
    abi_layout,
    abi_version,
)
from .llama import api

ALL_MATRICES = (1 << N_MATRIX) - 1

# of a slice; a skipped expert outputs zero
HIGH, LOW, SKIP = VERSION_HIGH, VERSION_LOW, VERSION_SKIP


class TensorOverrides:
    """An array of llama_model_tensor_buft_override, which lives as long as this object.

    Args:
        pairs: (regular expression, ggml_backend_buffer_type_t). The first expression
            found in a tensor's name applies.

    Attributes:
        address: Address of the null-terminated array.
    """

    def __init__(self, pairs: Sequence[tuple[str, int]]):
        patterns = (c_char_p * len(pairs))(*(pattern.encode() for pattern, _ in pairs))
        kinds = (c_void_p * len(pairs))(*(kind for _, kind in pairs))
        self.address: int = _abi.overrides_new(patterns, kinds, len(pairs))
        weakref.finalize(self, _abi.overrides_free, self.address)


class Simulation:
    """An expert buffer without files, memory or threads, whose reads complete at once.

    Args:
        tensors: `moeoff.routing.trace.TensorInfo` of each expert tensor, gate by gate.
        cache_bytes: Arena size in bytes, at least two of the largest expert.

    Attributes:
        residency: [n_gates, n_experts] uint8, nonzero if the expert is resident.

    Raises:
        OptionError: The tensors are inconsistent.
    """

    def __init__(self, tensors: Sequence[Any], cache_bytes: int):
        infos = [
            _abi.TensorInfo(gate=t.gate, matrix=t.matrix, ne=(1, 1, t.n_experts), nbytes=t.nbytes)
            for t in tensors
        ]
        self._at = _abi.simulation_init(
            (_abi.TensorInfo * len(infos))(*infos), len(infos), cache_bytes
        )
        if not self._at:
            raise OptionError(_abi.last_error().decode())
        weakref.finalize(self, _abi.simulation_free, self._at)
        self.residency = np.zeros(
            (1 + max(t.gate for t in tensors), max(t.n_experts for t in tensors)), np.uint8
        )
        self._out = self.residency.ctypes.data_as(POINTER(c_uint8))

    def take(
        self, ids: np.ndarray, weights: np.ndarray, priorities: np.ndarray, tau: float, **event: int
    ) -> tuple[int, int, np.ndarray | None]:
        """Load a gate's selection.

        Args:
            ids, weights: [n_tokens, n_used], as in a gate event.
            priorities: [n_gates, n_experts] float32.
            tau: Threshold of `Precision`.
            event: `gate` and `decode` of the gate event.

        Returns:
            Number of slices hit, number of slices evicted, and the versions served
            [n_tokens, n_used], None if all are high.
        """
        ids, weights = (
            np.ascontiguousarray(ids, np.int32),
            np.ascontiguousarray(weights, np.float32),
        )
        gate_event = _abi.GateEvent(
            n_tokens=len(ids),
            n_used=ids.shape[1],
            ids=ids.ctypes.data_as(POINTER(c_int32)),
            weights=weights.ctypes.data_as(POINTER(c_float)),
            **event,
        )
        n_evicted = _abi.simulation_take(
            self._at, gate_event, priorities.ctypes.data, tau, self._out
        )
        if n_evicted < 0:
            raise MemoryError(_abi.last_error().decode())
        served = gate_event.versions
        versions = np.ctypeslib.as_array(served, ids.shape).copy() if served else None
        return gate_event.n_hit, n_evicted, versions


def layout(structs: Mapping[str, type[Structure]]) -> str:
    """Describe structs in the format of moeoff_abi_layout()."""
    return ";".join(
        f"{name}:{ctypes.sizeof(struct)}"
        + "".join(f",{field[0]}:{getattr(struct, field[0]).offset}" for field in struct._fields_)
        for name, struct in structs.items()
    )


if abi_version() != ABI_VERSION or abi_layout().decode() != layout(STRUCTS):
    found = f"version {abi_version()} of the expert buffer's interface"
    raise ForkError(f"llama-cpp-python has {found}, expected {ABI_VERSION}: run `make env`")

# bool moeoff_should_abort(void * eb);  -- as a ggml_abort_callback
should_abort = api.ggml_abort_callback(ctypes.cast(_abi.should_abort, c_void_p).value or 0)


def memory_of_context(ctx: int) -> tuple[int, ...] | None:
    """Return the bytes of a context in host memory. It must not be decoding.

    Requires the experts' sources.

    Returns:
        Weights, KV and recurrent state, compute buffers, work area, logits; None
        without memory for the largest batch's graph.
    """
    out = (c_uint64 * 5)()
    return tuple(out) if _abi.context_memory(ctx, out) == 0 else None


def memory_of_batches(ctx: int, n_tokens: int, gives_back: bool) -> tuple[int, int] | None:
    """Return the bytes of the compute buffer and the work area for batches of
    `n_tokens`.

    Do not call it while the context decodes.

    Args:
        gives_back: True to release what such batches leave of the compute buffer, until
            a larger batch comes.

    Returns:
        None if a device computes, too, or if nothing could be released.
    """
    out = (c_uint64 * 2)()
    return (out[0], out[1]) if _abi.batch_memory(ctx, n_tokens, gives_back, out) == 0 else None


def device_memory_of(ctx: int, device: int) -> int:
    """Return the bytes of a context on a device: weights, caches and buffers."""
    out = (c_uint64 * 3)()
    _abi.device_memory(ctx, device, out)
    return sum(out)


_abi.guard(0)
_abi.use_row_kernels(machine.wants_row_kernels())
_abi.use_attention_kernels(machine.wants_row_kernels())
