"""NumPy archives (.npz), read within a bound: what a member says of itself is checked before any of it is unpacked.

np.load believes an archive: a few kB can unpack to gigabytes, or to objects.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np

from ..errors import MoeoffError
from .files import open_file
from .memory import format_size

_DIRECTORY = 1 << 20  # bytes of an archive's table of contents: some ten thousand members
_HEADER = 1 << 14  # bytes of a member's description


class ArchiveError(MoeoffError):
    """An archive is damaged, or holds what is no array of numbers."""


class NoArchive(ArchiveError):
    """A file does not begin as an archive."""


class TooLargeArchive(ArchiveError):
    """An archive unpacks to more than it may; it may well be whole."""


class WrongArrays(ValueError):
    """Arrays are not what their reader expects; the message says which."""


class _BoundedFile:
    """A file for zipfile, which gives no more at once than an honest archive asks for."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, n: int = -1) -> bytes:
        data = self._file.read(n if 0 <= n <= _DIRECTORY else _DIRECTORY + 1)
        if len(data) > _DIRECTORY:
            raise zipfile.BadZipFile("its table of contents is too long")
        return data


def read_npz(path: str | os.PathLike[str], limit: int, select: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Arrays by name, all of them in memory.

    Args:
        limit: bytes that they may take together.
        select: true for names of those that are read.

    Raises:
        OSError: it cannot be read; `strerror` says why in words.
        NoArchive: it is something else.
        ArchiveError: it is damaged, or holds something else than numbers and short texts.
        TooLargeArchive: it is larger.
    """
    with open_file(path) as file:
        if file.read(2) != b"PK":
            raise NoArchive("no archive")
        try:
            with zipfile.ZipFile(_BoundedFile(file)) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                members = {name: info for name, info in members.items() if select(name)}
                size = sum(info.file_size for info in members.values())
                if size > limit:
                    raise TooLargeArchive(f"it unpacks to {format_size(size)}, and there is room for {format_size(max(limit, 0))}")
                return {name: _array(archive, info, name) for name, info in members.items()}
        except (ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error) as error:
            raise ArchiveError(str(error) or type(error).__name__) from None


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(f"{name!r} is packed in a way that NumPy does not write")
    with archive.open(info) as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise ArchiveError(f"{name!r} is no array of numbers")
        try:
            shape, _, dtype = np.lib.format.read_array_header_1_0(member, max_header_size=_HEADER)
        except Exception:  # whatever Python's parser raises, which NumPy asks
            raise ArchiveError(f"{name!r} does not say what it holds") from None
        if dtype.kind not in "biufU" or not dtype.isnative:
            raise ArchiveError(f"{name!r} holds {dtype}, expected numbers")
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or nbytes != info.file_size - member.tell():
            raise ArchiveError(f"{name!r} has {info.file_size - member.tell()} bytes, expected {nbytes} for {shape} of {dtype}")
    with archive.open(info) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False, max_header_size=_HEADER)
        if member.read(1):  # here its checksum is compared, too
            raise ArchiveError(f"{name!r} is longer than it says")
    return array


Layout = tuple[str, tuple[int | str, ...]] | tuple[str, tuple[int | str, ...], float, float]


def require_arrays(arrays: Mapping[str, np.ndarray], layouts: Mapping[str, Layout]) -> None:
    """Compares arrays with what is expected of them; no number may be NaN or infinite.

    Args:
        layouts: by name (kind, shape), or (kind, shape, least, most). Kinds are f, i and b, or several of them: floating point, whole numbers, truth values. A
            word in a shape is a length that is the same wherever it stands.

    Raises:
        WrongArrays: one is missing, or another than expected.
    """
    lengths: dict[str, int] = {}
    for name, (kind, shape, *bounds) in layouts.items():
        array = arrays.get(name)
        if array is None:
            raise WrongArrays(f"{name!r} is missing")
        if array.dtype.kind not in kind.replace("i", "iu"):
            raise WrongArrays(f"{name!r} holds {array.dtype}, expected {_KINDS[kind[0]]}")
        expected = [n if isinstance(n, int) else lengths.get(n, n) for n in shape]
        if array.ndim != len(shape) or any(isinstance(n, int) and n != length for n, length in zip(expected, array.shape)):
            raise WrongArrays(f"{name!r} has the shape {array.shape}, expected ({', '.join(map(str, expected))})")
        lengths |= {word: length for word, length in zip(shape, array.shape) if isinstance(word, str)}
        if array.size and kind != "b":
            least, most = bounds or (-np.inf, np.inf)
            lowest, highest = float(array.min()), float(array.max())  # NaN, if there is one
            if not (math.isfinite(lowest) and math.isfinite(highest) and least <= lowest and highest <= most):
                raise WrongArrays(f"{name!r} has numbers from {lowest:g} to {highest:g}" + (f", expected {least:g} to {most:g}" if bounds else ""))


_KINDS = {"f": "floating point numbers", "i": "whole numbers", "b": "truth values"}
