"""Bounded reading of NumPy archives (.npz).

np.load trusts an archive, of which a few kB can unpack to gigabytes or to objects. Here
headers are checked before data is unpacked.
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

_DIRECTORY = 1 << 20  # bytes of the central directory, about ten thousand members
_HEADER = 1 << 14  # bytes of a member's header


class ArchiveError(MoeoffError):
    """The archive is damaged or contains more than arrays of numbers."""


class NoArchive(ArchiveError):
    """The file does not start like an archive."""


class TooLargeArchive(ArchiveError):
    """The archive unpacks to more than the limit."""


class WrongArrays(ValueError):
    """Arrays do not have the expected layout, as the message describes."""


class _BoundedFile:
    """A file that bounds the reads of zipfile, which trusts sizes in the file."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, n: int = -1) -> bytes:
        data = self._file.read(n if 0 <= n <= _DIRECTORY else _DIRECTORY + 1)
        if len(data) > _DIRECTORY:
            raise zipfile.BadZipFile("its table of contents is too long")
        return data


def read_npz(
    path: str | os.PathLike[str], limit: int, select: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """Read arrays by name into memory.

    Args:
        limit: Maximum bytes of all arrays.
        select: Predicate of names to read.

    Raises:
        OSError: The file is unreadable; `strerror` has the reason.
        NoArchive: The file is not an archive.
        ArchiveError: The archive is damaged or has other types than numbers and text.
        TooLargeArchive: The arrays exceed the limit.
    """
    with open_file(path) as file:
        if file.read(2) != b"PK":
            raise NoArchive("no archive")
        try:
            with zipfile.ZipFile(_BoundedFile(file)) as archive:
                infos = archive.infolist()
                members = {n: i for i in infos if select(n := i.filename.removesuffix(".npy"))}
                size = sum(info.file_size for info in members.values())
                if size > limit:
                    raise TooLargeArchive(
                        f"it unpacks to {format_size(size)}, and there is room for"
                        f" {format_size(max(limit, 0))}"
                    )
                return {name: _array(archive, info, name) for name, info in members.items()}
        except (
            ValueError,
            KeyError,
            EOFError,
            RuntimeError,
            NotImplementedError,
            struct.error,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise ArchiveError(str(error) or type(error).__name__) from None


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(f"{name!r} has a compression that NumPy does not write")
    with archive.open(info) as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise ArchiveError(f"{name!r} is no array of numbers")
        try:
            shape, _, dtype = np.lib.format.read_array_header_1_0(member, max_header_size=_HEADER)
        except Exception:  # NumPy passes on errors of Python's parser
            raise ArchiveError(f"{name!r} has a damaged header") from None
        if dtype.kind not in "biufU" or not dtype.isnative:
            raise ArchiveError(f"{name!r} holds {dtype}, expected numbers")
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or nbytes != info.file_size - member.tell():
            raise ArchiveError(
                f"{name!r} has {info.file_size - member.tell()} bytes, expected {nbytes} for"
                f" {shape} of {dtype}"
            )
    with archive.open(info) as member:
        array: np.ndarray = np.lib.format.read_array(
            member, allow_pickle=False, max_header_size=_HEADER
        )
        if member.read(1):  # the final read also verifies the checksum
            raise ArchiveError(f"{name!r} is longer than it says")
    return array


Layout = tuple[str, tuple[int | str, ...]] | tuple[str, tuple[int | str, ...], float, float]


def require_arrays(arrays: Mapping[str, np.ndarray], layouts: Mapping[str, Layout]) -> None:
    """Compare arrays with the expected layouts and check that all numbers are finite.

    Args:
        layouts: (kinds, shape) or (kinds, shape, least, most) by name. Kinds are f
            (floating point), i (integer) or b (boolean). A word in a shape is a length
            that is the same in all shapes with that word.

    Raises:
        WrongArrays: An array is missing or different.
    """
    lengths: dict[str, int] = {}
    for name, (kind, shape, *bounds) in layouts.items():
        array = arrays.get(name)
        if array is None:
            raise WrongArrays(f"{name!r} is missing")
        if array.dtype.kind not in kind.replace("i", "iu"):
            raise WrongArrays(f"{name!r} holds {array.dtype}, expected {_KINDS[kind[0]]}")
        expected = [n if isinstance(n, int) else lengths.get(n, n) for n in shape]
        if array.ndim != len(shape) or any(
            isinstance(n, int) and n != length for n, length in zip(expected, array.shape)
        ):
            raise WrongArrays(
                f"{name!r} has the shape {array.shape}, expected ({', '.join(map(str, expected))})"
            )
        lengths |= {
            word: length for word, length in zip(shape, array.shape) if isinstance(word, str)
        }
        if array.size and kind != "b":
            least, most = bounds or (-np.inf, np.inf)
            lowest, highest = float(array.min()), float(array.max())  # NaN if there is any
            if not (
                math.isfinite(lowest)
                and math.isfinite(highest)
                and least <= lowest
                and highest <= most
            ):
                raise WrongArrays(
                    f"{name!r} has numbers from {lowest:g} to {highest:g}"
                    + (f", expected {least:g} to {most:g}" if bounds else "")
                )


_KINDS = {"f": "floating point numbers", "i": "whole numbers", "b": "truth values"}
