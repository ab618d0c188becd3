"""hash64: XXH64 of each MiB in turn, of bytes in memory, bytes that come in pieces, and ranges of files. The native library computes it."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from .. import native

__all__ = ["Hasher", "hash64", "hash_range"]

Data = bytes | bytearray | memoryview | np.ndarray

MIB = 1 << 20  # hash64 may be continued at multiples of this


def hash64(data: Data, seed: int = 0) -> int:
    """XXH64 of each MiB of a contiguous buffer in turn, seeded with the one before."""
    array = np.frombuffer(data, np.uint8)
    return int(native.hash64(array.ctypes.data_as(ctypes.c_void_p), array.nbytes, seed))


class Hasher:
    """hash64 of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._value, self._rest = 0, b""

    def update(self, data: Data) -> None:
        data = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy's arrays are buffers before 3.12, too
        if self._rest:
            data = memoryview(self._rest + bytes(data))
        whole = len(data) // MIB * MIB
        self._value = hash64(data[:whole], self._value) if whole else self._value
        self._rest = bytes(data[whole:])

    def value(self) -> int:
        return hash64(self._rest, self._value) if self._rest else self._value


def hash_range(fd: int, offset: int, nbytes: int) -> int | None:
    """hash64 of a range of a file; None if the file ends before the range does."""
    hasher = Hasher()
    while nbytes > 0:
        data = os.pread(fd, min(nbytes, 4 * MIB), offset)
        if not data:
            return None
        hasher.update(data)
        offset, nbytes = offset + len(data), nbytes - len(data)
    return hasher.value()
