"""ggml's quantizer for numpy arrays.

A thin layer over libggml: it knows types, rows and bytes, but neither model files nor tensors' names. A *type* is a
ggml type number; members of `gguf.GGMLQuantizationType` are such numbers, and `type_from_name` also knows the types a
given gguf-py does not.

Invariants: every argument is checked here, because ggml answers a wrong one with abort() or silence; a row never
depends on its neighbours, so any split into runs of rows gives the same bytes; all functions may be called from several
threads (ctypes releases the GIL while ggml works). libggml is loaded at the first call, not at import.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from moeoff.errors import ModelError

# GGML_TYPE_COUNT of the pinned ggml.h; the accessors do not check their argument in release builds, so we must.
_N_TYPES = 43
I32 = 26
F32, F16, BF16 = 0, 1, 30
# Types that ggml_quantize_chunk aborts on: Q8_1, Q8_K (activations only), I8, I16, I32, I64, F64.
_NOT_WRITTEN = frozenset({9, 15, 24, 25, 26, 27, 28})
# Of these a model may hold I32 (tables of ids); no graph of llama.cpp computes with the others: F64 ends in a null pointer.
_NOT_COMPUTED = _NOT_WRITTEN - {I32}


@dataclass(frozen=True)
class _Type:
    """A type of ggml's: its name, and the values and bytes of a block."""

    name: str
    block: int
    nbytes: int


@functools.cache
def _type(type: int) -> _Type:
    from ..llamacpp import native  # here, because it loads llama.cpp

    number = int(type) if 0 <= type < _N_TYPES else -1
    kind = None if number < 0 else _Type((native.type_name(number) or b"").decode().upper(), native.blck_size(number), native.type_size(number))
    # numbers of removed types are holes in ggml's table: no name, or a name with an empty block
    if kind is None or not kind.name or kind.nbytes == 0 or kind.block == 0:
        raise ModelError(f"ggml type {int(type)} is unknown to this build (types 0 to {_N_TYPES - 1}, less the removed ones)")
    return kind


def type_name(type: int) -> str:
    """ggml's name of a type as gguf-py writes it, e.g. "Q4_K". Raises ModelError for an unknown type."""
    return _type(type).name


@functools.cache
def type_from_name(name: str) -> int:
    """The type number of a name in any case ("q4_k", "Q4_K"). Raises ModelError if ggml has no such type."""
    names = {}
    for type in range(_N_TYPES):
        try:
            names[type_name(type)] = type
        except ModelError:
            continue
    if name.upper() not in names:
        raise ModelError(f"no ggml type is called {name!r}; there are {', '.join(sorted(names))}")
    return names[name.upper()]


def fits(type: int, n_cols: int) -> bool:
    """True if rows of n_cols values can be stored in this type, that is, hold whole blocks of it."""
    return n_cols > 0 and n_cols % _type(type).block == 0


def is_computed(type: int) -> bool:
    """True if a model can have tensors of this type."""
    return type not in _NOT_COMPUTED


def is_written(type: int) -> bool:
    """True if `quantize` makes this type."""
    return type not in _NOT_WRITTEN


def row_bytes(type: int, n_cols: int) -> int:
    """Bytes of one row of n_cols values. Raises ModelError if the type's blocks do not divide n_cols."""
    kind = _type(type)
    if not fits(type, n_cols):
        raise ModelError(f"{kind.name} stores blocks of {kind.block} values: a row of {n_cols} is not a multiple of it")
    return n_cols // kind.block * kind.nbytes


def needs_imatrix(type: int) -> bool:
    """True if `quantize` refuses this type without an importance matrix (the smallest IQ types)."""
    from ..llamacpp import native

    _type(type)
    return bool(native.quantize_requires_imatrix(int(type)))


def quantize(rows: np.ndarray, type: int, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Quantize rows: f32 [n_rows, n_cols] -> uint8 [n_rows, row_bytes(type, n_cols)].

    imatrix: f32 [n_cols], the importance of each column (any positive scale), or None.
    Raises ModelError if the row length does not fit, the values are not finite, the type cannot be written by ggml
    (Q8_1, Q8_K, integers), or it needs an imatrix and none is given. F32, F16 and BF16 are plain conversions and take
    any value.
    """
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    if rows.ndim != 2:
        raise ModelError(f"expected rows of shape [n_rows, n_cols], found {rows.shape}")
    if not is_written(type):
        raise ModelError(f"ggml does not quantize to {type_name(type)}")
    n_rows, n_cols = rows.shape
    out = np.empty((n_rows, row_bytes(type, n_cols)), dtype=np.uint8)
    weights = None
    if imatrix is not None:
        weights = np.ascontiguousarray(imatrix, dtype=np.float32)
        if weights.shape != (n_cols,) or not np.isfinite(weights).all():
            raise ModelError(f"expected a finite imatrix of shape [{n_cols}], found {weights.shape}")
    elif needs_imatrix(type):
        raise ModelError(f"{type_name(type)} needs an importance matrix; give imatrix, f32 [{n_cols}]")
    if type not in (F32, F16, BF16) and not np.isfinite(rows).all():
        raise ModelError(f"cannot quantize to {type_name(type)}: the values are not all finite")
    if n_rows:
        from ..llamacpp import native

        native.quantize_chunk(int(type), rows.ctypes.data, out.ctypes.data, 0, n_rows, n_cols, None if weights is None else weights.ctypes.data)
    return out


def dequantize(data: bytes | memoryview | np.ndarray, type: int, shape: Sequence[int]) -> np.ndarray:
    """Dequantize a buffer of any type ggml can read: bytes -> f32 of `shape`, whose last number is the row length.

    Raises ModelError if the buffer's size is not the shape's, or ggml has no conversion to floats for the type (Q8_1,
    integers).
    """
    shape = tuple(int(n) for n in shape)
    if not shape:
        raise ModelError("expected a shape with at least the row length, found ()")
    source = np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8) if not isinstance(data, np.ndarray) else data)
    expected = prod(shape[:-1]) * row_bytes(type, shape[-1])
    if source.nbytes != expected:
        raise ModelError(f"{type_name(type)} of shape {shape} takes {expected} bytes, found {source.nbytes}")
    out = np.empty(shape, dtype=np.float32)
    if type == F32:  # ggml has no function for what needs no conversion
        out.reshape(-1).view(np.uint8)[:] = source.reshape(-1).view(np.uint8)
        return out
    from ..llamacpp import native

    if not native.to_float(int(type), source.ctypes.data, out.ctypes.data, out.size):
        raise ModelError(f"ggml does not convert {type_name(type)} to floats")
    return out
