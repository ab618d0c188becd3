"""Writing GGUF files: the header by gguf-py, the tensors as a stream.

The file grows under a temporary name and is renamed when it is complete: an error, a full disk or Ctrl-C leaves nothing behind. That, and tensors that
arrive in pieces, is what gguf-py's own file does not do. Imports gguf-py: nothing that a running model needs imports this.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFValueType, GGUFWriter
from gguf.gguf_writer import WriterState

from ..errors import ModelError
from ..files import atomic_file
from .file import Tensor, parse

__all__ = ["ModelWriter", "Value", "header_bytes"]

Value = bytes | str | bool | int | float | np.generic | np.ndarray | Sequence[str]
_TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


class ModelWriter:
    """Writes a GGUF file whose tensors arrive as a stream, in the order of `tensors`, each in pieces of any size.

    A context manager: the file appears under its name when the block ends and every tensor is complete.

    Args:
        metadata: as `header_bytes` takes it.

    Raises:
        ModelError: at the start for a tensor whose row length does not fit its type, at the end for missing data.
        WriteError: the file exists (unless overwrite), or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, Value],
        tensors: Sequence[Tensor],
        alignment: int = GGUF_DEFAULT_ALIGNMENT,
        overwrite: bool = False,
    ) -> None:
        self._alignment = alignment
        self._header = header_bytes(metadata, tensors, alignment)
        self._left = [(tensor.name, tensor.n_bytes) for tensor in reversed(tensors)]
        self._expected = 0  # bytes the current tensor still needs
        self._name = ""
        self._stack = contextlib.ExitStack()
        self._path, self._overwrite = path, overwrite

    def __enter__(self) -> ModelWriter:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(atomic_file(self._path, overwrite=self._overwrite))
            stack.callback(self._check_complete)
            self._file.write(self._header)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        if kind is not None:
            self._left, self._expected = [], 0  # an error is on its way: do not replace it by "incomplete"
        return self._stack.__exit__(kind, error, trace)

    def write(self, data: np.ndarray) -> None:
        """Append bytes (uint8, contiguous) to the current tensor, or to the next one if that is complete."""
        if self._expected == 0:
            if not self._left:
                raise ModelError(f"{self._path}: more data than tensors")
            self._name, self._expected = self._left.pop()
        if data.nbytes > self._expected:
            raise ModelError(f"{self._path}: tensor {self._name} expects {self._expected} more bytes, got {data.nbytes}")
        self._file.write(data.data)
        self._expected -= data.nbytes
        if self._expected == 0:
            self._file.write(bytes(-self._file.tell() % self._alignment))

    def _check_complete(self) -> None:
        if self._expected or self._left:
            raise ModelError(f"{self._path}: incomplete: {len(self._left) + bool(self._expected)} tensors miss data")


def header_bytes(metadata: Mapping[str, Value], tensors: Sequence[Tensor], alignment: int = GGUF_DEFAULT_ALIGNMENT) -> bytes:
    """Everything before the first tensor's bytes; the tensors follow each other, each at a multiple of the alignment.

    Args:
        metadata: values to be stored: a string, bool, int (as uint32), float (as float32), a number or an array of numpy's (as its dtype), or strings; or
            the bytes that `ModelFile.metadata` has, which are copied. An empty array is left out: gguf-py writes none.
    """
    writer = GGUFWriter(None, "")  # without a path it opens no file, and without an architecture it adds no key
    writer.data_alignment = alignment
    for key, given in metadata.items():
        value, kind, of = _typed(given)
        if kind != GGUFValueType.ARRAY or value:
            writer.add_key_value(_text(key), value, kind, of)
    for tensor in tensors:
        writer.add_tensor_info(_text(tensor.name), tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type)  # type: ignore[arg-type]
    header = io.BytesIO()
    writer.fout, writer.state = [header], WriterState.EMPTY  # type: ignore[list-item]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return header.getvalue() + bytes(-header.tell() % alignment)


def _text(name: str) -> str:
    """A key or a name as gguf-py copies it, bytes that are no UTF-8 included."""
    return name.encode("utf-8", "surrogateescape")  # type: ignore[return-value]


def _typed(value: Value) -> tuple[object, GGUFValueType, GGUFValueType | None]:
    """A value as gguf-py packs it, its type, and that of an array's elements."""
    if isinstance(value, bytes):
        found, code, of = parse(value)
        return (found.tolist() if isinstance(found, np.ndarray) else found), GGUFValueType(code), None if of is None else GGUFValueType(of)
    if isinstance(value, np.ndarray):
        return value.tolist(), GGUFValueType.ARRAY, GGUFValueType[value.dtype.name.upper()]
    if isinstance(value, np.generic):
        return value.item(), GGUFValueType[value.dtype.name.upper()], None
    if isinstance(value, (str, bool, int, float)):
        return value, _TYPES[type(value)], None
    return value, GGUFValueType.ARRAY, GGUFValueType.STRING
