"""A reader of GGUF files as containers: raw metadata, tensor infos, tensor bytes.

Every run opens a model with this reader, which parses the demo model's header in 2 ms;
gguf-py takes 133 ms after an import of 50 ms. The reader accepts exactly the files that
ggml's parser accepts: a test compares both on damaged headers. `writer` uses gguf-py.

Metadata values stay raw bytes, so that copies are exact, and types are ggml numbers, so
that types newer than gguf-py work. Files are not mapped: the process would be killed if
a mapped file were truncated.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from ..system.files import Closing, StrPath, open_file
from ..system.memory import format_size
from .quantize import dequantize, row_bytes, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # of identical layout; version 1 has 32-bit counts and is obsolete
UINT32, STRING, ARRAY = 4, 8, 9  # gguf.GGUFValueType
FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# maximum length of std::to_string for each type, plus ", "
_TEXT_LENGTHS = {0: 5, 1: 6, 2: 7, 3: 8, 4: 12, 5: 13, 6: 49, 7: 7, 10: 22, 11: 22, 12: 319}
DEFAULT_ALIGNMENT = 32
# limits of ggml's parser
_NAME_LIMIT = 64  # bytes, including the final zero
_MAX_DIMS = 4
_MAX_LENGTH = 1 << 30  # elements of an array, bytes of a string
_MAX_KEY = 65535  # bytes of a key or name: the format's limit, which ggml does not check
LONGEST_TEMPLATE = 16 << 20  # bytes of a chat template
# Bytes. A vocabulary of 262,144 tokens with merges takes 17 MiB, the names of 300,000
# slices take 25 MiB.
_LONGEST_HEADER = 64 << 20
MAX_TENSORS = 1 << 16  # llama.cpp reads at most 512 layers
# llama.cpp compares each key with all others: 100,000 keys take minutes, models have <
# 100
_MAX_VALUES = 1 << 12
_INT64_MAX = (1 << 63) - 1
_HEADER_PIECE = 1 << 18  # minimum bytes of a read


class _DamagedHeader(Exception):
    """The header is damaged as the message describes."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's description.

    Attributes:
        shape: Sizes, slowest dimension first as in numpy; the last is the row length.
        type: ggml type number.
    """

    name: str
    shape: tuple[int, ...]
    type: int

    @property
    def n_bytes(self) -> int:
        """Size in bytes, unpadded. Raise ModelError if rows do not fit the type."""
        return prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1]) if self.shape[-1] else 0


def parse(raw: bytes) -> tuple[Any, int, int | None]:
    """Parse a metadata value.

    Returns:
        The value (strings as bytes, arrays of numbers as numpy arrays [n]), its type
        number, and the type number of an array's elements.

    Raise struct.error for truncated values and nested arrays.
    """
    (code,) = struct.unpack_from("<I", raw)
    if code == STRING:
        return raw[12:], code, None
    if code != ARRAY:
        return struct.unpack_from("<" + FORMATS[code], raw, 4)[0], code, None
    of, n = struct.unpack_from("<IQ", raw, 4)
    if of in FORMATS:
        return np.frombuffer(raw, np.dtype(FORMATS[of]).newbyteorder("<"), n, 16), code, of
    if of != STRING:
        raise struct.error("an array of arrays")
    values, offset = [], 16
    for _ in range(n):
        (size,) = struct.unpack_from("<Q", raw, offset)
        values.append(raw[offset + 8 : offset + 8 + size])
        offset += 8 + size
    return values, code, of


def unpack(raw: bytes) -> int | float | bool | str | list[str] | np.ndarray:
    """Convert a metadata value to Python; replace bytes that are not UTF-8."""
    value, code, of = parse(raw)
    if code == STRING:
        value = value.decode("utf-8", "replace")
    elif of == STRING:
        value = [text.decode("utf-8", "replace") for text in value]
    unpacked: int | float | bool | str | list[str] | np.ndarray = value
    return unpacked


@dataclass
class FileState:
    """The identity of a file's content, known without reading the content.

    Attributes:
        ctime_ns: Time of the last change, which no program can set back.
        attributes: Mode, owner, group and number of hard links.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    attributes: tuple[int, ...]

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        attributes = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            attributes,
        )

    def is_same(self, now: FileState | None) -> bool:
        """Return True if `now` describes the same content, and adopt its attributes.

        chmod, chown and hard links change ctime together with the attributes. A changed
        ctime alone means that the file was overwritten and its mtime restored.
        """
        if now is None or replace(now, ctime_ns=self.ctime_ns, attributes=self.attributes) != self:
            return False
        if now.ctime_ns != self.ctime_ns and now.attributes == self.attributes:
            return False
        self.ctime_ns, self.attributes = now.ctime_ns, now.attributes
        return True

    @classmethod
    def read(cls, path: StrPath) -> FileState | None:
        """Return the state of the file at this path, None if it is inaccessible."""
        try:
            return cls.of(os.stat(path))
        except OSError:
            return None


def require_unchanged(states: Mapping[str, FileState]) -> None:
    """Raise ModelError if a file was written to since its state was recorded.

    Replaced files are ignored, because open descriptors still refer to the old content.
    """
    for path, state in states.items():
        now = FileState.read(path)
        if (
            now is not None
            and (now.device, now.inode) == (state.device, state.inode)
            and not state.is_same(now)
        ):
            raise ModelError(
                f"{path}: the file was changed while the model was in use: load it again"
            )


def read_range(fd: int, path: StrPath, offset: int, nbytes: int, what: str) -> bytearray:
    """Read a range of an open file.

    Args:
        what: Description of the range, for errors.

    Raises:
        ModelError: The file is unreadable or ends inside the range.
    """
    data = bytearray(nbytes)
    rest = memoryview(data)
    while rest:
        try:
            n = os.preadv(fd, [rest], offset)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read at byte {offset}: {error.strerror}") from None
        if n == 0:
            raise ModelError(f"{path}: truncated at byte {offset}, inside {what}")
        rest, offset = rest[n:], offset + n
    return data


def _describe_content(magic: bytes) -> str:
    """Guess from the first four bytes what was downloaded instead of a GGUF file."""
    if not magic:
        return "it is empty"
    if magic == b"vers":
        return "it looks like a git-lfs pointer; fetch the file with git lfs pull"
    if magic.lower() in (b"<!do", b"<htm"):
        return "it looks like a web page; download the file itself"
    return "it is damaged or in another format; llama.cpp's convert_hf_to_gguf.py converts models"


class ModelFile(Closing):
    """A GGUF file opened for reading; close it or use it as a context manager.

    Args:
        longest: Maximum bytes of a metadata value to keep, None to keep all.

    Attributes:
        alignment: Alignment of tensors in bytes.
        metadata: Raw values by key (see `unpack`), in file order.
        tensors: Tensors by name, in file order.
        n_strings: Number of strings in all values.
        written: Maximum characters of the longest numeric array, written as text.
        data_start: Offset of the first tensor in bytes.

    Raises:
        ModelError: llama.cpp's parser would refuse the file, the file ends before its
            tensors, or its header exceeds 64 MiB.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        longest: int | None = None,
        max_tensors: int = MAX_TENSORS,
    ) -> None:
        self.path, self._longest, self._max_tensors = Path(path), longest, max_tensors
        try:
            self._file = open_file(path)
            self.state = FileState.of(os.fstat(self._file.fileno()))
            magic = self._file.read(len(MAGIC))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            if magic != MAGIC:
                raise ModelError(f"{path}: not a GGUF file: {_describe_content(magic)}")
            self._head, self._begin = bytearray(), 0  # current part of the header, its offset
            self._read_header()
            del self._head
        except (struct.error, OverflowError, ModelError, _DamagedHeader) as error:
            self.close()
            if isinstance(error, ModelError):
                raise
            why = error if isinstance(error, _DamagedHeader) else "it is cut short"
            raise ModelError(
                f"{path}: the GGUF header is damaged: {why}; download or copy it again"
            ) from None

    def close(self) -> None:
        """Close the file. Metadata and tensor infos stay available."""
        self._file.close()

    def offset(self, name: str) -> int:
        """Return the offset of a tensor in the file, in bytes."""
        return self._offsets[name]

    def header(self) -> bytes:
        """Read all bytes before the first tensor."""
        return bytes(read_range(self._file.fileno(), self.path, 0, self.data_start, "the header"))

    def data(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows of a tensor, leading dimensions flattened, or raise ModelError.

        Returns:
            uint8 [stop - start, bytes per row].
        """
        tensor = self.tensors[name]
        n_rows = prod(tensor.shape[:-1])
        start, stop, _ = slice(start, stop).indices(n_rows)
        size = tensor.n_bytes // n_rows if n_rows else 0
        n_rows = max(stop - start, 0)
        flat = read_range(
            self._file.fileno(), self.path, self._offsets[name] + start * size, n_rows * size, name
        )
        return np.frombuffer(flat, np.uint8).reshape(n_rows, size)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read and dequantize rows: f32 [stop - start, row length]."""
        tensor = self.tensors[name]
        data = self.data(name, start, stop)
        return dequantize(data, tensor.type, (len(data), tensor.shape[-1]))

    def _require(self, end: int, keep: int) -> None:
        """Buffer the header up to byte `end`, dropping the bytes before `keep`."""
        if end > self.state.size:
            raise _DamagedHeader("it is cut short")
        if end > _LONGEST_HEADER:
            raise _DamagedHeader(
                f"it is longer than {format_size(_LONGEST_HEADER)}, which no vocabulary takes"
            )
        if end <= self._begin + len(self._head):
            return
        del self._head[: keep - self._begin]
        self._begin = keep
        start = keep + len(self._head)
        self._head += read_range(
            self._file.fileno(),
            self.path,
            start,
            min(max(end - start, _HEADER_PIECE), self.state.size - start),
            "the header",
        )

    def _read_header(self) -> None:
        self._offset = 0
        _, self.version, n_tensors, n_values = self._take("4sIqq")
        if self.version not in VERSIONS:
            expected = f"expected GGUF version 2 or 3, little-endian, got {self.version}"
            raise ModelError(f"{self.path}: {expected}")
        limits = {"tensors": (n_tensors, self._max_tensors), "values": (n_values, _MAX_VALUES)}
        for what, (n, most) in limits.items():
            if not 0 <= n <= most:
                raise _DamagedHeader(f"{n} {what}, expected at most {most}")
        self.metadata: dict[str, bytes] = {}
        self.n_strings = self.written = 0
        keys: set[str] = set()
        for _ in range(n_values):
            key = self._string()
            if not key or key in keys:
                raise _DamagedHeader(f"the key {key!r} is empty or there twice")
            keys.add(key)
            if (value := self._value(key)) is not None:
                self.metadata[key] = value
        self.alignment = self._read_alignment()
        self.tensors: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        end = 0  # relative to data_start
        for _ in range(n_tensors):
            tensor, offset = self._read_tensor()
            if offset != end:
                raise _DamagedHeader(
                    f"tensor {tensor.name!r} begins at {offset} of the data, expected {end}"
                )
            self.tensors[tensor.name], self._offsets[tensor.name] = tensor, offset
            end += tensor.n_bytes + -tensor.n_bytes % self.alignment
        self.data_start = self._offset + -self._offset % self.alignment
        if n_tensors and self.data_start > self.state.size:
            raise _DamagedHeader("it is cut short")
        last = 0
        for name, tensor in self.tensors.items():
            self._offsets[name] += self.data_start
            last = self._offsets[name] + tensor.n_bytes
        if last > self.state.size:
            found = f"expected {last} bytes, got {self.state.size}"
            raise ModelError(f"{self.path}: truncated: {found}; download or copy it again")

    def _read_alignment(self) -> int:
        raw = self.metadata.get("general.alignment")
        if raw is None:
            return DEFAULT_ALIGNMENT
        code, value = struct.unpack_from("<II", raw)
        if code != UINT32 or value == 0 or value & (value - 1):
            raise _DamagedHeader("general.alignment is not a power of 2")
        return int(value)

    def _read_tensor(self) -> tuple[Tensor, int]:
        """Return the next tensor and its offset relative to data_start."""
        name = self._string()
        if len(name.encode("utf-8", "surrogateescape")) >= _NAME_LIMIT or name in self.tensors:
            raise _DamagedHeader(
                f"the tensor name {name!r} is there twice, or longer than {_NAME_LIMIT - 1} bytes"
            )
        (n_dims,) = self._take("I")
        if n_dims > _MAX_DIMS:
            raise _DamagedHeader(
                f"tensor {name!r} has {n_dims} dimensions, expected at most {_MAX_DIMS}"
            )
        *dims, type, offset = self._take(f"{n_dims}qiQ")
        if any(n < 0 for n in dims) or any(n > _INT64_MAX for n in accumulate(dims, operator.mul)):
            raise _DamagedHeader(f"tensor {name!r} has the shape {dims}")
        tensor = Tensor(name, tuple(reversed(dims)) or (1,), type)
        try:
            type_name(type)
            tensor.n_bytes  # noqa: B018
        except ModelError as error:
            raise _DamagedHeader(f"tensor {name!r}: {error}") from None
        return tensor, offset

    def _take(self, form: str, keep: int | None = None) -> tuple[Any, ...]:
        start, self._offset = self._offset, self._offset + struct.calcsize("<" + form)
        self._require(self._offset, start if keep is None else keep)
        return struct.unpack_from("<" + form, self._head, start - self._begin)

    def _string(self) -> str:
        """Read a key or name; bytes that are not UTF-8 become surrogates."""
        (n,) = self._take("Q")
        if n > _MAX_KEY:
            raise _DamagedHeader(f"a key or name of {n} bytes")
        text: bytes = self._take(f"{n}s")[0]
        return text.decode("utf-8", "surrogateescape")

    def _value(self, key: str) -> bytes | None:
        """Return the next value's bytes, None if it is longer than `longest`."""
        start = self._offset
        (code,), n = self._take("I"), 1
        if code == ARRAY:
            code, n = self._take("IQ", keep=start)
        if n > _MAX_LENGTH:
            raise _DamagedHeader(f"{key!r} has {n} elements")
        longest = _LONGEST_HEADER if self._longest is None else self._longest
        if code in FORMATS:
            self._offset += n * struct.calcsize(FORMATS[code])
            self.written = max(self.written, n * _TEXT_LENGTHS[code])
        elif code == STRING:  # inlined for vocabularies of hundreds of thousands of tokens
            self.n_strings += n
            offset, length, data, begin, end = (
                self._offset,
                struct.Struct("<Q").unpack_from,
                self._head,
                self._begin,
                self._begin + len(self._head),
            )
            for _ in range(n):
                if offset + 8 > end:
                    self._require(offset + 8, start if offset + 8 - start <= longest else offset)
                    begin, end = self._begin, self._begin + len(data)
                (n_bytes,) = length(data, offset - begin)
                if n_bytes > _MAX_LENGTH:
                    raise _DamagedHeader(f"{key!r} has a string of {n_bytes} bytes")
                offset += 8 + n_bytes
            self._offset = offset
        else:
            raise _DamagedHeader(f"{key!r} has the type {code}")
        if self._offset - start > longest:
            self._require(self._offset, self._offset)
            return None
        self._require(self._offset, start)
        return bytes(self._head[start - self._begin : self._offset - self._begin])
