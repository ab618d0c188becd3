"""GGUF files as containers: raw metadata, tensor infos, tensor bytes.

A reader of its own, because it opens every model that is run: gguf-py's takes 133 ms for the demo model's header, where this one takes 2, and importing
gguf-py another 50. It accepts what ggml's own parser accepts and nothing else, and refuses a damaged file with one sentence: a test
compares the two on damaged headers. What it shares with gguf-py are the format's numbers, which a test compares. Writing is gguf-py's (`writer`).

It knows the container, not what a tensor means. Metadata values stay the bytes they are in the file, so that a copy is exact whatever their types are;
tensor types are ggml numbers, so that a type newer than gguf-py is no obstacle. Nothing is mapped: of a file that is cut while it is read, a
read says so, and a mapping would end the process.
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
from ..system.files import Closing, open_file
from ..system.memory import format_size
from .quantize import dequantize, row_bytes, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the same arrangement; 1 had 32-bit counts and is long gone
UINT32, STRING, ARRAY = 4, 8, 9  # gguf.GGUFValueType
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# characters of a number of that type, as std::to_string writes it, with ", " behind
_WRITTEN = {0: 5, 1: 6, 2: 7, 3: 8, 4: 12, 5: 13, 6: 49, 7: 7, 10: 22, 11: 22, 12: 319}
DEFAULT_ALIGNMENT = 32
# limits of ggml's parser
_NAME_LIMIT = 64  # bytes, with a final zero
_MAX_DIMS = 4
_MAX_LENGTH = 1 << 30  # of an array, and bytes of a string
_MAX_KEY = 65535  # bytes, of a key or name: the format's own limit, which ggml does not check; what is longer is not even read
LONGEST_TEMPLATE = 16 << 20  # bytes of a chat template that is read; what no conversation's budget holds is refused by its size in memory
_LONGEST_HEADER = 64 << 20  # bytes; a vocabulary of 262,144 tokens and its merges are 17 MiB, the names of 300,000 slices 25
MAX_TENSORS = 1 << 16  # of a model: llama.cpp reads no more than 512 layers
_MAX_VALUES = 1 << 12  # llama.cpp compares each key with all others, and llama_cpp walks to each: 100,000 take minutes. Models have less than a hundred
_INT64_MAX = (1 << 63) - 1
_HEADER_PIECE = 1 << 18  # bytes of a header that are read at once


class _DamagedHeader(Exception):
    """A header is damaged; the message says how."""


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


def parse(raw: bytes) -> tuple[Any, int, int | None]:
    """A metadata value, the number of its type, and of an array's elements: strings as bytes, arrays of numbers [n] as numpy's.

    Raises:
        struct.error: it is cut short, or an array of arrays.
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
    """A metadata value as Python has it; bytes that are not UTF-8 are replaced. Raises struct.error as `parse`."""
    value, code, of = parse(raw)
    if code == STRING:
        value = value.decode("utf-8", "replace")
    elif of == STRING:
        value = [text.decode("utf-8", "replace") for text in value]
    unpacked: int | float | bool | str | list[str] | np.ndarray = value
    return unpacked


@dataclass
class FileState:
    """The identity of a file's content, without reading it.

    Attributes:
        ctime_ns: Time of the last change of content or attributes, which no program can set back.
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
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, attributes)

    def is_same(self, now: FileState | None) -> bool:
        """Tell whether a later state is one of the same content.

        chmod, chown and hard links change ctime alone: where the attributes show one of them, the later state takes
        the place of this one. A ctime that nothing explains is that of an overwritten file with its old mtime.
        """
        if now is None or replace(now, ctime_ns=self.ctime_ns, attributes=self.attributes) != self:
            return False
        if now.ctime_ns != self.ctime_ns and now.attributes == self.attributes:
            return False
        self.ctime_ns, self.attributes = now.ctime_ns, now.attributes
        return True

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FileState | None:
        """The state of the file that has this name now; None: there is none, or it is out of reach."""
        try:
            return cls.of(os.stat(path))
        except OSError:
            return None


def require_unchanged(states: Mapping[str, FileState]) -> None:
    """Check that no file was written to since its state was read, by path.

    A file that was replaced by another of the same name is no harm to those who still hold the old one open.

    Raises:
        ModelError: A file was written to.
    """
    for path, state in states.items():
        now = FileState.read(path)  # None: what is open stays readable
        if now is not None and (now.device, now.inode) == (state.device, state.inode) and not state.is_same(now):
            raise ModelError(f"{path}: the file was changed while the model was in use: load it again")


def read_range(fd: int, path: str | os.PathLike[str], offset: int, nbytes: int, what: str) -> bytearray:
    """A range of an open file.

    Args:
        path: of the file, and `what` lies there: for people.

    Raises:
        ModelError: it cannot be read, or the file ends before it does.
    """
    data = bytearray(nbytes)
    rest = memoryview(data)
    while rest:
        try:
            n = os.preadv(fd, [rest], offset)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read at byte {offset}: {error.strerror}") from None
        if n == 0:
            raise ModelError(f"{path}: ends at byte {offset}, inside {what}; was it cut while it was read?")
        rest, offset = rest[n:], offset + n
    return data


def _what_begins(magic: bytes) -> str:
    """A guess at what a file that begins with these bytes is, where it has come from a download."""
    if not magic:
        return "it is empty"
    if magic == b"vers":
        return "it looks like what git leaves in the place of a large file (git lfs pull fetches it)"
    if magic.lower() in (b"<!do", b"<htm"):
        return "it looks like a web page that was saved in its place (download the file itself)"
    return "it is something else, or damaged (llama.cpp's convert_hf_to_gguf.py makes one of a model in other files)"


class ModelFile(Closing):
    """A GGUF file opened for reading; close it or use it as a context manager.

    Raises ModelError for every file that llama.cpp's own parser refuses, for one that ends before its tensors do, and for one whose header would take
    more memory than any that is real.

    Args:
        longest: bytes of a metadata value that is kept; longer ones are passed over. None: all are kept.
        max_tensors: that it may have.

    Attributes:
        path: as given.
        state: of the file when it was opened.
        version, alignment: of the header.
        metadata: key -> its value's bytes (see `unpack`), in file order.
        tensors: name -> Tensor, in file order.
        n_strings: of all values together.
        written: characters that the numbers of the longest array take as text, at most.
        data_start: where the first tensor's bytes begin.
    """

    def __init__(self, path: str | os.PathLike[str], *, longest: int | None = None, max_tensors: int = MAX_TENSORS) -> None:
        self.path, self._longest, self._max_tensors = Path(path), longest, max_tensors
        try:
            self._file = open_file(path)
            self.state = FileState.of(os.fstat(self._file.fileno()))
            magic = self._file.read(len(MAGIC))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            if magic != MAGIC:
                raise ModelError(f"{path}: not a GGUF file: {_what_begins(magic)}")
            self._head, self._begin = bytearray(), 0  # the part of the header that was read last, and where it begins
            self._read_header()
            del self._head
        except (struct.error, OverflowError, _DamagedHeader) as error:
            self.close()
            why = error if isinstance(error, _DamagedHeader) else "it is cut short"
            raise ModelError(f"{path}: the GGUF header is damaged: {why}; download or copy it again") from None
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; what was read of it stays."""
        self._file.close()

    def value(self, key: str) -> int | float | bool | str:
        """A scalar or string of the metadata. Raises ModelError if the key is missing or holds an array."""
        raw = self.metadata.get(key)
        value = unpack(raw) if raw is not None else None
        if value is None or isinstance(value, (list, np.ndarray)):
            raise ModelError(f"{self.path}: expected a single value under {key!r}, found {'nothing' if raw is None else 'an array'}")
        return value

    def offset(self, name: str) -> int:
        """Byte of the file at which a tensor begins."""
        return self._offsets[name]

    def header(self) -> bytes:
        """Everything before the first tensor's bytes."""
        return bytes(read_range(self._file.fileno(), self.path, 0, self.data_start, "the header"))

    def data(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start to stop of a tensor, its leading dimensions flattened, as they are in the file: uint8 [stop - start, bytes a row], read now.

        Raises:
            ModelError: the file has been cut, or cannot be read.
        """
        tensor = self.tensors[name]
        n_rows = prod(tensor.shape[:-1])
        start, stop, _ = slice(start, stop).indices(n_rows)
        size = tensor.n_bytes // n_rows if n_rows else 0
        n_rows = max(stop - start, 0)
        flat = read_range(self._file.fileno(), self.path, self._offsets[name] + start * size, n_rows * size, name)
        return np.frombuffer(flat, np.uint8).reshape(n_rows, size)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """`data` as numbers: f32 [stop - start, row length]."""
        tensor = self.tensors[name]
        data = self.data(name, start, stop)
        return dequantize(data, tensor.type, (len(data), tensor.shape[-1]))

    def _require(self, end: int, keep: int) -> None:
        """Reads the header up to this byte at least. What lies before `keep` is forgotten, or never read."""
        if end > self.state.size:
            raise _DamagedHeader("it is cut short")
        if end > _LONGEST_HEADER:
            raise _DamagedHeader(f"it is longer than {format_size(_LONGEST_HEADER)}, which no vocabulary takes")
        if end <= self._begin + len(self._head):
            return
        del self._head[: keep - self._begin]
        self._begin = keep
        start = keep + len(self._head)
        self._head += read_range(self._file.fileno(), self.path, start, min(max(end - start, _HEADER_PIECE), self.state.size - start), "the header")

    def _read_header(self) -> None:
        self._offset = 0
        _, self.version, n_tensors, n_values = self._take("4sIqq")
        if self.version not in VERSIONS:
            raise ModelError(f"{self.path}: GGUF of a version that llama.cpp does not read: {self.version}, expected 2 or 3, little-endian")
        if n_tensors < 0 or n_values < 0:
            raise _DamagedHeader(f"{n_tensors} tensors, {n_values} values")
        if n_tensors > self._max_tensors:
            raise _DamagedHeader(f"{n_tensors} tensors, expected at most {self._max_tensors}")
        if n_values > _MAX_VALUES:
            raise _DamagedHeader(f"{n_values} values, expected at most {_MAX_VALUES}")
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
        end = 0  # of the tensors so far, from where their bytes begin
        for _ in range(n_tensors):
            tensor, offset = self._read_tensor()
            if offset != end:
                raise _DamagedHeader(f"tensor {tensor.name!r} begins at {offset} of the data, expected {end}")
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
            raise ModelError(f"{self.path}: truncated: its tensors end at byte {last}, the file at {self.state.size}; download or copy it again")

    def _read_alignment(self) -> int:
        raw = self.metadata.get("general.alignment")
        if raw is None:
            return DEFAULT_ALIGNMENT
        value: int
        code, value = struct.unpack_from("<II", raw)
        if code != UINT32 or value == 0 or value & (value - 1):
            raise _DamagedHeader("general.alignment is no power of 2")
        return int(value)

    def _read_tensor(self) -> tuple[Tensor, int]:
        """The next tensor, and where its bytes begin after those of the header."""
        name = self._string()
        if len(name.encode("utf-8", "surrogateescape")) >= _NAME_LIMIT or name in self.tensors:
            raise _DamagedHeader(f"the tensor name {name!r} is there twice, or longer than {_NAME_LIMIT - 1} bytes")
        (n_dims,) = self._take("I")
        if n_dims > _MAX_DIMS:
            raise _DamagedHeader(f"tensor {name!r} has {n_dims} dimensions, expected at most {_MAX_DIMS}")
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
        """A key or a name; what is not UTF-8 in it comes back when it is written."""
        (n,) = self._take("Q")
        if n > _MAX_KEY:
            raise _DamagedHeader(f"a key or name of {n} bytes")
        text: bytes = self._take(f"{n}s")[0]
        return text.decode("utf-8", "surrogateescape")

    def _value(self, key: str) -> bytes | None:
        """The next value's bytes; None if they are more than are kept."""
        start = self._offset
        (code,), n = self._take("I"), 1
        if code == ARRAY:
            code, n = self._take("IQ", keep=start)
        if n > _MAX_LENGTH:
            raise _DamagedHeader(f"{key!r} has {n} elements")
        longest = _LONGEST_HEADER if self._longest is None else self._longest
        if code in FORMATS:
            self._offset += n * struct.calcsize(FORMATS[code])
            self.written = max(self.written, n * _WRITTEN[code])
        elif code == STRING:  # a vocabulary has hundreds of thousands
            self.n_strings += n
            offset, length, data, begin, end = self._offset, struct.Struct("<Q").unpack_from, self._head, self._begin, self._begin + len(self._head)
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
