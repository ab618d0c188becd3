"""The disk of a model: file system, direct I/O and read rate."""

from __future__ import annotations

import contextlib
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

# As in moeoff-read-depth.h: more threads slow the reads that compute waits for, unless
# the disk gains from them; with fewer, these reads wait for each other.
IO_THREADS, MOST_IO_THREADS = 4, 16
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_F_NOCACHE = 48  # fcntl.h of macOS
LONGEST_READ = 1 << 20  # bytes per read of an I/O thread


@dataclass(frozen=True)
class DiskRate:
    """A measured read rate.

    Attributes:
        bytes_per_second: Rate of all threads together.
        direct_io: False if reads used the page cache, which may distort the rate.
    """

    bytes_per_second: float
    block_bytes: int
    direct_io: bool
    seconds: float


def _open_direct(path: str) -> int | None:
    """Open a file for reads around the page cache; None if the file system has none."""
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
            with mmap.mmap(-1, mmap.PAGESIZE) as page:  # some accept the flag, not the read
                os.preadv(fd, [page], 0)
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def leave_page_cache(fd: int, sync: bool = False) -> None:
    """Drop a file from the page cache, which counts as a cgroup's memory.

    Args:
        sync: True to write dirty pages first; otherwise they stay.
    """
    if sync:
        getattr(os, "fdatasync", os.fsync)(fd)  # absent on macOS
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(path: str | os.PathLike[str]) -> int:
    """Return a file's bytes in the page cache, 0 if the system does not say."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        if (
            mincore is None
            or not status.st_size
            or not (status.st_uid == os.geteuid() or os.access(path, os.W_OK))
        ):
            return 0
        pages = (ctypes.c_ubyte * -(-status.st_size // mmap.PAGESIZE))()
        # ctypes needs a writable buffer for its address; copy-on-write is never written
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            start = ctypes.c_char.from_buffer(mapped)
            failed = mincore(ctypes.byref(start), ctypes.c_size_t(status.st_size), pages)
            del start  # releases the mapping
    return 0 if failed else mmap.PAGESIZE * sum(page & 1 for page in pages)


def direct_io(path: str | os.PathLike[str]) -> bool:
    """Return True if the file can be read around the page cache, or raise OSError."""
    fd = _open_direct(os.fspath(path))
    if fd is None:
        return False
    os.close(fd)
    return True


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of a path's file system ("ext4", "overlay"), or "unknown"."""
    import psutil

    path = os.path.realpath(path)
    try:
        around = [
            mount
            for mount in psutil.disk_partitions(all=True)
            if Path(path).is_relative_to(mount.mountpoint)
        ]
    except (OSError, psutil.Error):
        around = []
    # of equal mount points the last one hides the others
    innermost = max(reversed(around), key=lambda mount: len(mount.mountpoint), default=None)
    return innermost.fstype if innermost is not None else "unknown"


def probe(
    path: str | os.PathLike[str],
    block_bytes: int,
    seconds: float = 2.0,
    n_threads: int = IO_THREADS,
) -> DiskRate:
    """Measure the rate of reads from random offsets of a file.

    The offsets depend on n_threads: the disk may cache those of another probe.

    Raises:
        ModelError: The file is empty or unreadable.
    """
    path, nbytes = (
        os.fspath(path),
        min(-(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, LONGEST_READ),
    )

    def read_blocks(index: int) -> int:
        offsets, total = random.Random(n_threads << 16 | index), 0  # nosec: not for secrets
        with mmap.mmap(-1, nbytes) as buffer:
            while True:  # at least once, even if the thread starts late
                total += os.preadv(fd, [buffer], offsets.randrange(max(1, size // nbytes)) * nbytes)
                if time.perf_counter() - started >= seconds:
                    return total

    with contextlib.ExitStack() as stack:
        try:
            size = os.path.getsize(path)
            if size == 0:
                raise ModelError(f"{path}: expected a file to measure a rate on, got an empty one")
            direct = _open_direct(path)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if direct is None else direct
            stack.callback(os.close, fd)
            if direct is None:
                leave_page_cache(fd)
            started = time.perf_counter()
            with ThreadPoolExecutor(n_threads) as pool:
                total = sum(pool.map(read_blocks, range(n_threads)))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    took = time.perf_counter() - started
    return DiskRate(total / took, nbytes, direct is not None, took)
