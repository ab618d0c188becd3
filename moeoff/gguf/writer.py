"""Headers of GGUF files. Not imported by running models: importing gguf takes 50 ms."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFValueType, GGUFWriter
from gguf.gguf_writer import WriterState

from .file import Tensor, parse

Value = bytes | str | bool | int | float | np.generic | np.ndarray | Sequence[str]
_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}


def header_bytes(
    metadata: Mapping[str, Value],
    tensors: Sequence[Tensor],
    alignment: int = GGUF_DEFAULT_ALIGNMENT,
) -> bytes:
    """Return all bytes before the first tensor, of tensors aligned one after the other.

    Args:
        metadata: Strings, bools, ints (as uint32), floats (as float32), numpy scalars
            and arrays (as their dtype), lists of strings, or raw bytes of
            `ModelFile.metadata`. Empty arrays are left out: gguf-py cannot write them.
    """
    writer = GGUFWriter(None, "")  # no path: opens no file; no architecture: adds no key
    writer.data_alignment = alignment
    for key, raw in metadata.items():
        value, kind, of = _typed(raw)
        if kind != GGUFValueType.ARRAY or value:
            writer.add_key_value(_text(key), value, kind, of)
    for tensor in tensors:
        writer.add_tensor_info(
            _text(tensor.name),
            tensor.shape,
            np.dtype(np.float32),
            tensor.n_bytes,
            raw_dtype=tensor.type,  # type: ignore[arg-type]
        )
    header = io.BytesIO()
    writer.fout, writer.state = [header], WriterState.EMPTY  # type: ignore[list-item]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return header.getvalue() + bytes(-header.tell() % alignment)


def _text(name: str) -> str:
    """Encode a key or name; gguf-py copies bytes, also those that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape")  # type: ignore[return-value]


def _typed(value: Value) -> tuple[object, GGUFValueType, GGUFValueType | None]:
    """Return a value for gguf-py, its type, and the type of an array's elements."""
    if isinstance(value, bytes):
        parsed, code, of = parse(value)
        return (
            (parsed.tolist() if isinstance(parsed, np.ndarray) else parsed),
            GGUFValueType(code),
            None if of is None else GGUFValueType(of),
        )
    if isinstance(value, np.ndarray):
        return value.tolist(), GGUFValueType.ARRAY, GGUFValueType[value.dtype.name.upper()]
    if isinstance(value, np.generic):
        return value.item(), GGUFValueType[value.dtype.name.upper()], None
    if isinstance(value, (str, bool, int, float)):
        return value, _TYPES[type(value)], None
    return value, GGUFValueType.ARRAY, GGUFValueType.STRING
