"""GGUF files as containers: raw metadata, tensor infos, tensor bytes.

It knows the container, not what a tensor means. Metadata values stay the bytes they are in the file, so that a copy is
exact whatever their types are; tensor types are ggml numbers, so that a type newer than gguf-py is no obstacle. Reading
maps the file, and accepts what ggml's own parser accepts and nothing else: a test compares the two on damaged headers. Writing
streams, to a temporary name that is renamed when the file is complete: an error, a full disk or Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic_file import atomic_file
from ..errors import ModelError
from .quantize import dequantize, row_bytes, type_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FileState", "ModelFile", "ModelWriter", "Tensor", "header_bytes", "pack", "pack_array", "unpack"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the same layout; 1 had 32-bit counts and is long gone
_U32, _STRING, _ARRAY = 4, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
# limits of ggml's parser
_NAME_LIMIT = 64  # bytes, with a final zero
_MAX_DIMS = 4
_MAX_LENGTH = 1 << 30  # of an array, and bytes of a string
_MAX_KEY = 65535  # bytes, of a key or name: the format's own limit, which ggml does not check; what is longer is not even read
_INT64_MAX = (1 << 63) - 1


class _Damaged(Exception):
    """What is wrong with a header."""


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
        return prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1]) if self.shape[-1] else 0


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
    """The inverse of `pack` and `pack_array`; bytes that are not UTF-8 are replaced. Raises struct.error for what is neither."""
    (code,) = struct.unpack_from("<I", raw)
    if code == _STRING:
        return raw[12:].decode("utf-8", "replace")
    if code != _ARRAY:
        value: int | float | bool = struct.unpack_from("<" + _FORMATS[code], raw, 4)[0]
        return value
    code, n = struct.unpack_from("<IQ", raw, 4)
    if code in _FORMATS:
        return np.frombuffer(raw, np.dtype(_FORMATS[code]).newbyteorder("<"), n, 16)
    if code != _STRING:
        raise struct.error("an array of arrays")
    values, at = [], 16
    for _ in range(n):
        (size,) = struct.unpack_from("<Q", raw, at)
        values.append(raw[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return values


@dataclass(frozen=True)
class FileState:
    """What tells one content of a file from another without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class ModelFile:
    """A GGUF file opened for reading; close it or use it as a context manager.

    Raises ModelError for every file that llama.cpp's own parser refuses, and for one that ends before its tensors do.

    Attributes:
        path: as given.
        state: of the file when it was opened.
        version, alignment: of the header.
        metadata: key -> its value's bytes (see `pack`), in file order.
        tensors: name -> Tensor, in file order.
        data_start: where the first tensor's bytes begin.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                magic = file.read(len(_MAGIC))
                if magic != _MAGIC:
                    raise ModelError(f"{path}: not a GGUF file (it begins with {magic!r})")
                self.state = FileState.of(os.fstat(file.fileno()))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: emptied since its first bytes were read
            raise ModelError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        try:
            self._read_header()
        except (struct.error, OverflowError, _Damaged) as error:
            self.close()
            why = error if isinstance(error, _Damaged) else "it is cut short"
            raise ModelError(f"{path}: the GGUF header is damaged: {why}; download or copy it again") from None
        except ModelError:
            self.close()
            raise

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
        value = unpack(raw) if raw is not None else None
        if value is None or isinstance(value, (list, np.ndarray)):
            raise ModelError(f"{self.path}: expected a single value under {key!r}, found {'nothing' if raw is None else 'an array'}")
        return value

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
        _, self.version, n_tensors, n_values = struct.unpack_from("<4sIqq", self._map)
        if self.version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF of a version that llama.cpp does not read: {self.version}, expected 2 or 3, little-endian")
        if n_tensors < 0 or n_values < 0:
            raise _Damaged(f"{n_tensors} tensors, {n_values} values")
        self._at = 24
        self.metadata: dict[str, bytes] = {}
        for _ in range(n_values):
            key = self._string()
            if not key or key in self.metadata:
                raise _Damaged(f"the key {key!r} is empty or there twice")
            start = self._at
            self._skip_value(key)
            self.metadata[key] = self._map[start : self._at]
        self.alignment = self._read_alignment()
        self.tensors: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        end = 0  # of the tensors so far, from where their bytes begin
        for _ in range(n_tensors):
            tensor, offset = self._read_tensor()
            if offset != end:
                raise _Damaged(f"tensor {tensor.name!r} begins at {offset} of the data, expected {end}")
            self.tensors[tensor.name], self._offsets[tensor.name] = tensor, offset
            end += tensor.n_bytes + -tensor.n_bytes % self.alignment
        self.data_start = self._at + -self._at % self.alignment
        if n_tensors and self.data_start > len(self._map):
            raise _Damaged("it is cut short")
        last = 0
        for name, tensor in self.tensors.items():
            self._offsets[name] += self.data_start
            last = self._offsets[name] + tensor.n_bytes
        if last > len(self._map):
            raise ModelError(f"{self.path}: truncated: its tensors end at byte {last}, the file at {len(self._map)}; download or copy it again")

    def _read_alignment(self) -> int:
        raw = self.metadata.get("general.alignment")
        if raw is None:
            return _DEFAULT_ALIGNMENT
        value: int
        code, value = struct.unpack_from("<II", raw)
        if code != _U32 or value == 0 or value & (value - 1):
            raise _Damaged("general.alignment is no power of 2")
        return int(value)

    def _read_tensor(self) -> tuple[Tensor, int]:
        """The next tensor, and where its bytes begin after those of the header."""
        name = self._string()
        if len(name.encode("utf-8", "surrogateescape")) >= _NAME_LIMIT or name in self.tensors:
            raise _Damaged(f"the tensor name {name!r} is there twice, or longer than {_NAME_LIMIT - 1} bytes")
        (n_dims,) = self._take("I")
        if n_dims > _MAX_DIMS:
            raise _Damaged(f"tensor {name!r} has {n_dims} dimensions, expected at most {_MAX_DIMS}")
        *dims, type, offset = self._take(f"{n_dims}qiQ")
        if any(n < 0 for n in dims) or any(n > _INT64_MAX for n in accumulate(dims, operator.mul)):
            raise _Damaged(f"tensor {name!r} has the shape {dims}")
        tensor = Tensor(name, tuple(reversed(dims)) or (1,), type)
        try:
            type_name(type)
            tensor.n_bytes  # noqa: B018
        except ModelError as error:
            raise _Damaged(f"tensor {name!r}: {error}") from None
        return tensor, offset

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._map, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        """A key or a name; what is not UTF-8 in it comes back when it is written."""
        (n,) = self._take("Q")
        if n > _MAX_KEY:
            raise _Damaged(f"a key or name of {n} bytes")
        text: bytes = self._take(f"{n}s")[0]
        return text.decode("utf-8", "surrogateescape")

    def _skip_value(self, key: str) -> None:
        (code,), n = self._take("I"), 1
        if code == _ARRAY:
            code, n = self._take("IQ")
        if n > _MAX_LENGTH:
            raise _Damaged(f"{key!r} has {n} elements")
        if code in _FORMATS:
            self._at += n * struct.calcsize(_FORMATS[code])
        elif code == _STRING:  # a vocabulary has hundreds of thousands
            at, length, data = self._at, struct.Struct("<Q").unpack_from, self._map
            for _ in range(n):
                (n_bytes,) = length(data, at)
                if n_bytes > _MAX_LENGTH:
                    raise _Damaged(f"{key!r} has a string of {n_bytes} bytes")
                at += 8 + n_bytes
            self._at = at
        else:
            raise _Damaged(f"{key!r} has the type {code}")
        if self._at > len(self._map):
            raise _Damaged("it is cut short")


class ModelWriter:
    """Writes a GGUF file whose tensors arrive as a stream, in the order of `tensors`, each in pieces of any size.

    A context manager: the file appears under its name when the block ends and every tensor is complete. Raises
    ModelError at the start for a tensor whose row length does not fit its type, at the end for missing data, and
    WriteError for a file that exists (unless overwrite) or cannot be written.
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


def header_bytes(metadata: Mapping[str, bytes], tensors: Sequence[Tensor], alignment: int, version: int = 3) -> bytes:
    """Everything before the first tensor's bytes; the tensors follow each other, each at a multiple of the alignment."""

    def string(text: str) -> bytes:
        data = text.encode("utf-8", "surrogateescape")
        return struct.pack("<Q", len(data)) + data

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
