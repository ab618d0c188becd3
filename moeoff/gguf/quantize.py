"""ggml's quantizer for numpy arrays.

A type is a ggml type number, as in `gguf.GGMLQuantizationType`; `type_from_name` also
knows types newer than gguf-py.

Arguments are checked here because ggml aborts or stays silent on wrong ones. Rows are
independent: any split into runs of rows gives the same bytes. All functions may be
called from several threads (ctypes releases the GIL). The first call loads libggml.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from moeoff.errors import ModelError

# GGML_TYPE_COUNT of the pinned ggml.h; release builds of ggml do not check the range
_N_TYPES = 43
I32 = 26
F32, F16, BF16 = 0, 1, 30
# ggml_quantize_chunk aborts on Q8_1, Q8_K (activations only), I8, I16, I32, I64, F64
_NOT_WRITTEN = frozenset({9, 15, 24, 25, 26, 27, 28})
# I32 is for tables of ids; a graph with another of these types ends in a null pointer
_NOT_COMPUTED = _NOT_WRITTEN - {I32}


class _Type(NamedTuple):
    """A ggml type: name, and values and bytes per block."""

    name: str
    block: int
    nbytes: int


@functools.cache
def _type(type: int) -> _Type:
    from ..llamacpp import native  # loads llama.cpp

    number = int(type) if 0 <= type < _N_TYPES else -1
    kind = (
        None
        if number < 0
        else _Type(
            (native.type_name(number) or b"").decode().upper(),
            native.blck_size(number),
            native.type_size(number),
        )
    )
    # removed types have no name or an empty block
    if kind is None or not kind.name or kind.nbytes == 0 or kind.block == 0:
        raise ModelError(f"ggml type {int(type)} is unknown to this build")
    return kind


def type_name(type: int) -> str:
    """Return ggml's name such as "Q4_K". Raise ModelError for an unknown type."""
    return _type(type).name


@functools.cache
def type_from_name(name: str) -> int:
    """Return the number of a type by name, in any case, or raise ModelError."""
    names = {}
    for type in range(_N_TYPES):
        try:
            names[type_name(type)] = type
        except ModelError:
            continue
    if name.upper() not in names:
        raise ModelError(f"expected a ggml type ({', '.join(sorted(names))}), got {name!r}")
    return names[name.upper()]


def fits(type: int, n_cols: int) -> bool:
    """Return True if rows of n_cols values are whole blocks of the type."""
    return n_cols > 0 and n_cols % _type(type).block == 0


def is_computed(type: int) -> bool:
    """Return True if llama.cpp can compute with tensors of this type."""
    return type not in _NOT_COMPUTED


def is_written(type: int) -> bool:
    """Return True if `quantize` can write this type."""
    return type not in _NOT_WRITTEN


def row_bytes(type: int, n_cols: int) -> int:
    """Return the bytes of a row. Raise ModelError if it is not whole blocks."""
    kind = _type(type)
    if not fits(type, n_cols):
        raise ModelError(f"{kind.name}: expected rows of a multiple of {kind.block}, got {n_cols}")
    return n_cols // kind.block * kind.nbytes


def needs_imatrix(type: int) -> bool:
    """Return True if `quantize` needs an importance matrix (the smallest IQ types)."""
    from ..llamacpp import native

    _type(type)
    return bool(native.quantize_requires_imatrix(int(type)))


def quantize(rows: np.ndarray, type: int, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Quantize rows, float32 [n_rows, n_cols] -> uint8 [n_rows, row_bytes].

    Args:
        imatrix: float32 [n_cols], importance of each column on any positive scale.

    Raises:
        ModelError: The row length does not fit, values are not finite (F32, F16 and
            BF16 take any), ggml does not write the type, or it needs an imatrix.
    """
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if rows.ndim != 2:
        raise ModelError(f"expected rows of shape [n_rows, n_cols], got {rows.shape}")
    if not is_written(type):
        raise ModelError(f"ggml does not quantize to {type_name(type)}")
    n_rows, n_cols = rows.shape
    out = np.empty((n_rows, row_bytes(type, n_cols)), dtype=np.uint8)
    weights = None
    if imatrix is not None:
        weights = np.ascontiguousarray(imatrix, dtype=np.float32)
        if weights.shape != (n_cols,) or not np.isfinite(weights).all():
            raise ModelError(f"expected a finite imatrix of shape [{n_cols}], got {weights.shape}")
    elif needs_imatrix(type):
        raise ModelError(
            f"{type_name(type)} needs an importance matrix; give imatrix, f32 [{n_cols}]"
        )
    if type not in (F32, F16, BF16) and not np.isfinite(rows).all():
        raise ModelError(f"cannot quantize to {type_name(type)}: the values are not all finite")
    if n_rows:
        from ..llamacpp import native

        native.quantize_chunk(
            int(type),
            rows.ctypes.data,
            out.ctypes.data,
            0,
            n_rows,
            n_cols,
            None if weights is None else weights.ctypes.data,
        )
    return out


def dequantize(
    data: bytes | memoryview | np.ndarray, type: int, shape: Sequence[int]
) -> np.ndarray:
    """Dequantize bytes to float32 of `shape`, whose last number is the row length.

    Raise ModelError if the size is wrong or ggml has no conversion (Q8_1, integers).
    """
    shape = tuple(int(n) for n in shape)
    if not shape:
        raise ModelError("expected a shape with at least the row length, got ()")
    source = np.ascontiguousarray(
        np.frombuffer(data, dtype=np.uint8) if not isinstance(data, np.ndarray) else data
    )
    expected = prod(shape[:-1]) * row_bytes(type, shape[-1])
    if source.nbytes != expected:
        name = type_name(type)
        raise ModelError(f"expected {expected} bytes of {name} for {shape}, got {source.nbytes}")
    if type == F32:  # ggml has no function for this one
        values: np.ndarray = source.reshape(-1).view(np.float32).reshape(shape).copy()
        return values
    out = np.empty(shape, dtype=np.float32)
    from ..llamacpp import native

    if not native.to_float(int(type), source.ctypes.data, out.ctypes.data, out.size):
        raise ModelError(f"ggml does not convert {type_name(type)} to floats")
    return out
