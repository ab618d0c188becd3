"""The disk under a model: which file system it is, whether it reads around the page cache, and how fast.

Reads as the expert buffer's I/O workers do, aligned and in parallel; knows nothing of models.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import sys
import threading
import time
from dataclasses import dataclass

from ..errors import ModelError

N_WORKERS = 4  # as the expert buffer has by default
_F_NOCACHE = 48  # of macOS's fcntl.h
LONGEST_READ = 4 << 20  # an I/O worker reads a slice in pieces of this size


@dataclass(frozen=True)
class DiskRate:
    """What reading took.

    Attributes:
        bytes_per_second: of all workers together.
        block_bytes: of one read.
        direct_io: False where the reads went through the page cache, whose speed they may then show.
        seconds: how long it was measured.
    """

    bytes_per_second: float
    block_bytes: int
    direct_io: bool
    seconds: float


def _aligned(n: int) -> int:
    return -(-n // mmap.PAGESIZE) * mmap.PAGESIZE


def _open_direct(path: str) -> int | None:
    """A descriptor that has proved to read around the page cache, or None."""
    if sys.platform == "darwin":
        return _open_uncached(path)
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:  # some file systems take the flag and refuse the read
            os.preadv(fd, [page], 0)
    except OSError:
        os.close(fd)
        return None
    return fd


def _open_uncached(path: str) -> int | None:
    """As `_open_direct` on macOS, where a descriptor is told to leave the cache alone."""
    import fcntl

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, getattr(fcntl, "F_NOCACHE", _F_NOCACHE), 1)
    except OSError:
        os.close(fd)
        return None
    return fd


def direct_io(path: str | os.PathLike[str]) -> bool:
    """Whether this file can be read around the page cache.

    Raises:
        OSError: it cannot be read at all.
    """
    fd = _open_direct(os.fspath(path))
    if fd is None:
        return False
    os.close(fd)
    return True


def file_system(path: str | os.PathLike[str]) -> str:
    """Type of the file system a path is on ("ext4", "tmpfs", "overlay"), or "unknown"."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                fields, _, rest = line.partition(" - ")
                point = fields.split()[4].encode().decode("unicode_escape")  # blanks are written as \040
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):  # the last of equals was mounted over the others
                    best, kind = point, rest.split()[0]
    except OSError:  # not Linux
        pass
    return kind


def probe(path: str | os.PathLike[str], block_bytes: int, seconds: float = 2.0, n_workers: int = N_WORKERS) -> DiskRate:
    """Reads blocks from random places of a file for some seconds.

    Raises:
        ModelError: the file is empty, or cannot be read.
    """
    path = os.fspath(path)
    block = min(_aligned(block_bytes), LONGEST_READ)
    try:
        size = os.path.getsize(path)
        if size == 0:
            raise ModelError(f"{path}: empty: no rate can be measured on it")
        first = _open_direct(path)
        direct = first is not None
        if first is None:
            first = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(first, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    n_blocks = max(1, size // block)
    totals = [0] * n_workers
    failures: list[OSError] = []
    started = time.perf_counter()

    def work(index: int) -> None:
        places = random.Random(index)  # nosec: places to read, the same ones every time
        try:
            with mmap.mmap(-1, block) as buffer:
                while time.perf_counter() - started < seconds:
                    totals[index] += os.preadv(first, [buffer], places.randrange(n_blocks) * block)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(n_workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - started
    finally:
        os.close(first)
    if failures:
        raise ModelError(f"{path}: cannot be read: {failures[0].strerror}")
    return DiskRate(sum(totals) / elapsed, block, direct, elapsed)
