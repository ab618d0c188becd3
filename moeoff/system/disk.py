"""The disk under a model: its file system, whether it reads around the page cache, how fast, and with how many threads best. Reads as I/O threads do."""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import ModelError
from .machine import machine_name
from .user_cache import CacheEntry

IO_THREADS = 4  # where nothing says that others would be faster
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_F_NOCACHE = 48  # of macOS's fcntl.h
LONGEST_READ = 1 << 20  # an I/O thread reads a slice in pieces of this size
_COUNTS = (IO_THREADS, 8, 16)  # of threads that are compared; fewer would leave what one waits for to the others' pace
_ROUNDS, _TURN, _LONGEST_SEARCH = 3, 0.1, 1.0  # seconds: of one count's turn in a round, and of all together
_LOOKS, _FRESH = 5, 24 * 3600.0  # that a mean is of, and seconds for which one is enough: a disk may be busy with something else
LEAST_BYTES = 64 << 20  # of experts, for which it is worth while to compare numbers of threads
_NEARLY = 0.65  # of the best rate: fewer threads take less of what computes. Where 8 read 1.36 times as fast as 4, a token took 1.09 times as long with them


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


def _aligned(n: int) -> int:
    return -(-n // mmap.PAGESIZE) * mmap.PAGESIZE


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


def probe(path: str | os.PathLike[str], block_bytes: int, seconds: float = 2.0, n_threads: int = IO_THREADS) -> DiskRate:
    """Reads blocks from random places of a file for some seconds.

    Raises:
        ModelError: the file is empty, or cannot be read.
    """
    with _Blocks(os.fspath(path), block_bytes) as blocks:
        started = time.perf_counter()
        rate = blocks.read(seconds, n_threads)
        return DiskRate(rate, blocks.nbytes, blocks.direct, time.perf_counter() - started)


class _Blocks:
    """Blocks at random places of a file. Raises `ModelError`: the file is empty, or cannot be read."""

    def __init__(self, path: str, block_bytes: int):
        self.nbytes = min(_aligned(block_bytes), LONGEST_READ)
        self._path, self._turn = path, 0
        try:
            size = os.path.getsize(path)
            if size == 0:
                raise ModelError(f"{path}: empty: no rate can be measured on it")
            fd = _open_direct(path)
            self.direct = fd is not None
            if fd is None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        self._fd, self._n = fd, max(1, size // self.nbytes)

    def read(self, seconds: float, n_threads: int) -> float:
        """Bytes per second of so many threads together, which begin no read after this time but their first."""
        started = time.perf_counter()
        self._turn += 1  # other places than before, which a disk's own cache may hold

        def work(index: int) -> int:
            places, nbytes = random.Random(self._turn << 16 | index), 0  # nosec: places to read, the same ones every time
            with mmap.mmap(-1, self.nbytes) as buffer:
                while True:  # once at least: a busy machine may let a thread begin when the time is over
                    nbytes += os.preadv(self._fd, [buffer], places.randrange(self._n) * self.nbytes)
                    if time.perf_counter() - started >= seconds:
                        return nbytes

        try:
            with ThreadPoolExecutor(n_threads) as pool:
                return sum(pool.map(work, range(n_threads))) / (time.perf_counter() - started)
        except OSError as error:
            raise ModelError(f"{self._path}: cannot be read: {error.strerror}") from None

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class IoThreads:
    """A number of I/O threads: reads that may be under way at a time. Prefetches may be fewer (`moeoff-read-depth.h`)."""

    n: int
    reason: str


@dataclass(frozen=True)
class _Looks:
    """Bytes per second of `_COUNTS` threads, the mean of the last looks at a disk; 0: too slow to be tried. Raises `ValueError` for what cannot be."""

    n: int
    time: float
    rate_4: float
    rate_8: float
    rate_16: float

    def __post_init__(self) -> None:
        if not (self.n >= 1 and 0 < self.rate_4 < math.inf and 0 <= self.rate_8 < math.inf and 0 <= self.rate_16 < math.inf):
            raise ValueError("no rates of a disk")

    @property
    def rates(self) -> dict[int, float]:
        return dict(zip(_COUNTS, (self.rate_4, self.rate_8, self.rate_16), strict=True))

    def choice(self, kind: str) -> IoThreads:
        """The usual number, unless another is plainly faster on this file system."""
        n = next(n for n, rate in self.rates.items() if rate >= _NEARLY * max(self.rates.values()))
        measured = ", ".join(f"{n}: {rate / 1e6:.0f}" for n, rate in self.rates.items() if rate)
        return IoThreads(n, f"measured on this disk ({kind}) on {self.n} day{'s' * (self.n > 1)}, MB/s by number of threads: {measured}")


def choose_io_threads(path: str | os.PathLike[str], block_bytes: int, total_bytes: int) -> IoThreads:
    """The number of threads that read blocks of a file the fastest: `IO_THREADS` unless more are plainly faster.

    Measured in a second, once a day for the file system, the size of blocks and the machine; the mean of the last days decides. Where it cannot be measured
    or saved, `IO_THREADS`.

    Args:
        total_bytes: that may be read of the file; of less than `LEAST_BYTES` nothing is measured.
    """
    if total_bytes < LEAST_BYTES:
        return IoThreads(IO_THREADS, "the usual number: the experts are too few to need another")
    path = os.fspath(path)
    try:
        kind, block = file_system(path), min(_aligned(block_bytes), LONGEST_READ)  # sixteen threads' buffers must not take what a small budget has
        if kind in IN_MEMORY:
            return IoThreads(IO_THREADS, f"the usual number: {kind} is no disk")
        entry = CacheEntry("disks.json", device=os.stat(path).st_dev, file_system=kind, block=block.bit_length(), machine=machine_name())
        before, now = entry.load(_Looks), time.time()
        if before is not None and 0 <= now - before.time < _FRESH:
            return before.choice(kind)
        if not os.access(folder := entry.path().parent, os.W_OK):  # it would be measured each time
            return IoThreads(IO_THREADS, f"the usual number: what is measured cannot be saved in {folder}")
        with _Blocks(path, block) as blocks:
            if not blocks.direct:
                return IoThreads(IO_THREADS, f"the usual number: {kind} reads through the page cache here, so that the disk cannot be measured")
            rates = _compare(blocks)
        n, means = (1, rates) if before is None else (min(before.n + 1, _LOOKS), before.rates)
        looks = _Looks(n, now, *(means[count] + (rate - means[count]) / n for count, rate in rates.items()))
        entry.save(looks)
        return looks.choice(kind)
    except (OSError, ModelError) as error:  # reading the model will say so, too, if it is the file
        return IoThreads(IO_THREADS, f"the usual number: the disk cannot be measured: {error}")


def _compare(blocks: _Blocks) -> dict[int, float]:
    """Bytes per second by number of threads, in turns, so that what else the disk does falls on all of them; 0: of too slow a disk."""
    rates: dict[int, list[float]] = {n: [] for n in _COUNTS}
    end, slowest = time.perf_counter() + _LONGEST_SEARCH, 0.0
    for _ in range(_ROUNDS):
        for n in _COUNTS:
            last_reads = n * blocks.nbytes / slowest if slowest else 0.0  # that have begun when its turn is over
            if time.perf_counter() + _TURN + last_reads < end:
                rates[n].append(blocks.read(_TURN, n))
                slowest = min(slowest or rates[n][-1], rates[n][-1])
    return {n: sum(of) / len(of) if of else 0.0 for n, of in rates.items()}
