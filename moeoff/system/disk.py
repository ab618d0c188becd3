"""The disk under a model: its file system, whether it reads around the page cache, and how fast. Reads as I/O threads do."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError

# As moeoff-read-depth.h has it: more take the rate of a disk from the reads that compute waits for, unless it gains from them; fewer leave those to one
# another's pace
IO_THREADS, MOST_IO_THREADS = 4, 16
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_F_NOCACHE = 48  # of macOS's fcntl.h
LONGEST_READ = 1 << 20  # an I/O thread reads a slice in pieces of this size


@dataclass(frozen=True)
class DiskRate:
    """The rate of a disk, as measured.

    Attributes:
        bytes_per_second: of all threads together.
        block_bytes: of one read.
        direct_io: False where the reads went through the page cache, whose speed they may then show.
        seconds: how long it was measured.
    """

    bytes_per_second: float
    block_bytes: int
    direct_io: bool
    seconds: float


def _open_direct(path: str) -> int | None:
    """A descriptor that has proved to read around the page cache, or None. On macOS it is told to leave the cache alone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, getattr(fcntl, "F_NOCACHE", _F_NOCACHE), 1)
            return fd
        if hasattr(os, "O_DIRECT"):
            with mmap.mmap(-1, mmap.PAGESIZE) as page:  # some file systems take the flag and refuse the read
                os.preadv(fd, [page], 0)
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def leave_page_cache(fd: int, sync: bool = False) -> None:
    """Takes a file out of the page cache, which a cgroup counts.

    Args:
        sync: what is not on the disk yet goes there first; else it stays.
    """
    if sync:
        getattr(os, "fdatasync", os.fsync)(fd)  # macOS has none
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(path: str | os.PathLike[str]) -> int:
    """Count the bytes of a file that are in the page cache. 0 also where the system does not tell, as of others' files."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        if mincore is None or not status.st_size or not (status.st_uid == os.geteuid() or os.access(path, os.W_OK)):
            return 0
        pages = (ctypes.c_ubyte * -(-status.st_size // mmap.PAGESIZE))()
        # a copy on write, for ctypes takes the address of what it might write to; nothing is touched
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            start = ctypes.c_char.from_buffer(mapped)
            failed = mincore(ctypes.byref(start), ctypes.c_size_t(status.st_size), pages)
            del start  # which keeps the mapping
    return 0 if failed else mmap.PAGESIZE * sum(page & 1 for page in pages)


def direct_io(path: str | os.PathLike[str]) -> bool:
    """True if this file can be read around the page cache.

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
    import psutil

    path = os.path.realpath(path)
    try:
        around = [mount for mount in psutil.disk_partitions(all=True) if Path(path).is_relative_to(mount.mountpoint)]
    except (OSError, psutil.Error):
        around = []
    innermost = max(reversed(around), key=lambda mount: len(mount.mountpoint), default=None)  # the last of equals was mounted over the others
    return innermost.fstype if innermost is not None else "unknown"


def probe(path: str | os.PathLike[str], block_bytes: int, seconds: float = 2.0, n_threads: int = IO_THREADS) -> DiskRate:
    """Reads blocks from random places of a file for some seconds, other places with another number of threads: a disk's own cache may hold those.

    Raises:
        ModelError: the file is empty, or cannot be read.
    """
    path, nbytes = os.fspath(path), min(-(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, LONGEST_READ)
    try:
        size = os.path.getsize(path)
        if size == 0:
            raise ModelError(f"{path}: empty: no rate can be measured on it")
        fd = _open_direct(path)
        direct = fd is not None
        if fd is None:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    started = time.perf_counter()

    def work(index: int) -> int:
        places, total = random.Random(n_threads << 16 | index), 0  # nosec: places to read, the same ones every time
        with mmap.mmap(-1, nbytes) as buffer:
            while True:  # once at least: a busy machine may let a thread begin when the time is over
                total += os.preadv(fd, [buffer], places.randrange(max(1, size // nbytes)) * nbytes)
                if time.perf_counter() - started >= seconds:
                    return total

    try:
        if not direct:
            leave_page_cache(fd)
        with ThreadPoolExecutor(n_threads) as pool:
            total = sum(pool.map(work, range(n_threads)))
        took = time.perf_counter() - started
        return DiskRate(total / took, nbytes, direct, took)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
