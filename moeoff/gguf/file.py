"""GGUF files as containers: raw metadata, tensor infos, tensor bytes.

It knows the container, not what a tensor means. Metadata values stay the bytes they are in the file, so that a copy is
exact whatever their types are; tensor types are ggml numbers, so that a type newer than gguf-py is no obstacle. Reading
maps the file; writing streams, to a temporary name that is renamed when the file is complete: an error, a full disk or
Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelError
from .quantize import dequantize, row_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ModelFile", "ModelWriter", "Tensor", "header_bytes", "pack", "pack_array", "partial_file", "unpack"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the same layout; 1 had 32-bit counts and is long gone
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, shape (slowest dimension first, as numpy has it; the last is the row length) and ggml type
    number."""

    name: str
    shape: tuple[int, ...]
    type: int

    @property
    def n_bytes(self) -> int:
        """Size in bytes, without padding. Raises ModelError if the row length does not fit the type."""
        return prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1])


def pack(value: float | bool | str) -> bytes:
    """A metadata value as the file stores it: its type (u32 for int, f32 for float) followed by its bytes."""
    if isinstance(value, str):
        data = value.encode()
        return struct.pack("<IQ", _STRING, len(data)) + data
    code = {bool: 7, int: 4, float: 6}[type(value)]
    return struct.pack("<I" + _FORMATS[code], code, value)


def pack_array(values: Sequence[str] | np.ndarray) -> bytes:
    """An array of strings, uint32 or uint64 as the file stores it."""
    if isinstance(values, np.ndarray):
        code = {"uint32": 4, "uint64": 10}[values.dtype.name]
        return struct.pack("<IIQ", _ARRAY, code, values.size) + values.astype(values.dtype.newbyteorder("<")).tobytes()
    encoded = [value.encode() for value in values]
    return struct.pack("<IIQ", _ARRAY, _STRING, len(encoded)) + b"".join(struct.pack("<Q", len(e)) + e for e in encoded)


def unpack(raw: bytes) -> int | float | bool | str | list[str] | np.ndarray:
    """The inverse of `pack` and `pack_array`. Raises struct.error for what is neither."""
    (code,) = struct.unpack_from("<I", raw)
    if code == _STRING:
        return raw[12:].decode()
    if code != _ARRAY:
        return struct.unpack_from("<" + _FORMATS[code], raw, 4)[0]
    code, n = struct.unpack_from("<IQ", raw, 4)
    if code in _FORMATS:
        return np.frombuffer(raw, np.dtype(_FORMATS[code]).newbyteorder("<"), n, 16)
    if code != _STRING:
        raise struct.error("an array of arrays")
    values, at = [], 16
    for _ in range(n):
        (size,) = struct.unpack_from("<Q", raw, at)
        values.append(raw[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return values


@contextlib.contextmanager
def partial_file(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends well and removed when it does not.

    Raises ModelError if `path` exists and overwrite is false.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ModelError(f"{path} exists; choose another name or ask to overwrite it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class ModelFile:
    """A GGUF file opened for reading; close it or use it as a context manager.

    metadata: key -> its value's bytes (see `pack`), in file order. tensors: name -> Tensor, in file order.
    Raises ModelError for anything that is not a complete little-endian GGUF of version 2 or 3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path}: cannot be read: {error}") from error
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, RecursionError, OverflowError) as error:
            self.close()
            raise ModelError(f"{path}: damaged or cut short: {error}") from error
        except ModelError as error:
            self.close()
            raise error if str(path) in str(error) else ModelError(f"{path}: damaged: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file, or leave that to the last array given out by `data` if one still exists."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def value(self, key: str) -> int | float | bool | str:
        """A scalar or string of the metadata. Raises ModelError if the key is missing or holds an array."""
        raw = self.metadata.get(key)
        code = struct.unpack_from("<I", raw)[0] if raw else _ARRAY
        if raw is None or code == _ARRAY:
            raise ModelError(f"{self.path}: expected a single value under {key!r}, found {'an array' if raw else 'nothing'}")
        return unpack(raw)

    def offset(self, name: str) -> int:
        """Where a tensor's bytes begin in the file."""
        return self._offsets[name]

    def header(self) -> bytes:
        """Everything before the first tensor's bytes."""
        return self._map[: self.data_start]

    def data(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [rows, bytes a row], a view of the mapped file."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, dtype=np.uint8, count=tensor.n_bytes, offset=self._offsets[name])
        return flat.reshape(prod(tensor.shape[:-1]), -1)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start to stop of a tensor, its leading dimensions flattened: f32 [stop - start, row length]."""
        tensor = self.tensors[name]
        data = self.data(name)[start:stop]
        return dequantize(data, tensor.type, (len(data), tensor.shape[-1]))

    def _read_header(self) -> None:
        magic, version, n_tensors, n_values = struct.unpack_from("<4sIQQ", self._map)
        if magic != _MAGIC or version not in _VERSIONS:
            raise ModelError(f"{self.path}: expected a little-endian GGUF file of version 2 or 3, found {magic!r}, version {version}")
        self.version = version
        self._at = 24
        self.metadata: dict[str, bytes] = {}
        for _ in range(n_values):
            key = self._string()
            start = self._at
            self._skip(*self._take("I"))
            self.metadata[key] = self._map[start : self._at]
        self.tensors: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        for _ in range(n_tensors):
            name = self._string()
            (n_dims,) = self._take("I")
            if not 1 <= n_dims <= 4:
                raise ModelError(f"{self.path}: tensor {name} has {n_dims} dimensions, expected 1 to 4")
            *dims, type, offset = self._take(f"{n_dims}QIQ")
            if name in self.tensors:
                raise ModelError(f"{self.path}: damaged: two tensors are called {name}")
            self.tensors[name] = Tensor(name, tuple(reversed(dims)), type)
            self._offsets[name] = offset
        alignment = self.value("general.alignment") if "general.alignment" in self.metadata else _DEFAULT_ALIGNMENT
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: damaged: an alignment of {alignment!r}")
        self.alignment = alignment
        self.data_start = self._at + -self._at % alignment
        for name, tensor in self.tensors.items():
            self._offsets[name] += self.data_start
            if self._offsets[name] + tensor.n_bytes > len(self._map):
                raise ModelError(f"{self.path}: cut short: tensor {name} ends beyond the file's {len(self._map)} bytes")

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._map, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (n,) = self._take("Q")
        return self._take(f"{n}s")[0].decode()

    def _skip(self, code: int) -> None:
        if code == _ARRAY:
            code, n = self._take("IQ")
            if code in _FORMATS:
                self._at += n * struct.calcsize(_FORMATS[code])
                return
            for _ in range(n):
                self._skip(code)
        elif code == _STRING:
            (n,) = self._take("Q")
            self._at += n
        elif code in _FORMATS:
            self._at += struct.calcsize(_FORMATS[code])
        else:
            raise ModelError(f"{self.path}: metadata value of unknown type {code}")
        if self._at > len(self._map):
            raise ModelError(f"{self.path}: cut short within its metadata")


class ModelWriter:
    """Writes a GGUF file whose tensors arrive as a stream, in the order of `tensors`, each in pieces of any size.

    A context manager: the file appears under its name when the block ends and every tensor is complete. Raises
    ModelError at the start for a tensor whose row length does not fit its type or a file that exists (unless
    overwrite), at the end for missing data.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, bytes],
        tensors: Sequence[Tensor],
        alignment: int = _DEFAULT_ALIGNMENT,
        version: int = 3,
        overwrite: bool = False,
    ) -> None:
        self._alignment = alignment
        self._header = header_bytes(metadata, tensors, alignment, version)
        self._left = [(tensor.name, tensor.n_bytes) for tensor in reversed(tensors)]
        self._expected = 0  # bytes the current tensor still needs
        self._name = ""
        self._stack = contextlib.ExitStack()
        self._path, self._overwrite = path, overwrite

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            partial = stack.enter_context(partial_file(self._path, self._overwrite))
            self._file = stack.enter_context(open(partial, "wb"))
            stack.callback(self._check_complete)
            self._file.write(self._header)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> bool | None:
        if error[0] is not None:
            self._left, self._expected = [], 0  # an error is on its way: do not replace it by "incomplete"
        return self._stack.__exit__(*error)

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


def header_bytes(metadata: Mapping[str, bytes], tensors: Sequence[Tensor], alignment: int, version: int = 3) -> bytes:
    """Everything before the first tensor's bytes; the tensors follow each other, each at a multiple of the alignment."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    parts = [struct.pack("<4sIQQ", _MAGIC, version, len(tensors), len(metadata))]
    for key, raw in metadata.items():
        parts += [string(key), raw]
    offset = 0
    for tensor in tensors:
        n_dims = len(tensor.shape)
        parts += [
            string(tensor.name),
            struct.pack(f"<I{n_dims}QIQ", n_dims, *reversed(tensor.shape), tensor.type, offset),
        ]
        offset += tensor.n_bytes + -tensor.n_bytes % alignment
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment)
