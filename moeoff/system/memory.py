"""Memory: sizes in human form, the process's limits, and its use.

psutil provides free memory, and resident bytes without /proc. Limits of cgroups and the
peak (VmHWM) are read here. psutil is imported lazily, for a fast `moeoff --help`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import sys
from dataclasses import dataclass

from ..errors import OptionError

MIB = 1 << 20
DEFAULT_SHARE = 0.8  # of what is available, when the user states no budget

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*$", re.IGNORECASE)
_M_ARENA_MAX = -8  # of malloc.h
_MOST = 1 << 60  # bytes
# the native page_size, and the machine's, which may be larger
_SLOT_PAGE, _SYSTEM_PAGE = 4096, mmap.PAGESIZE
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def slot_bytes(*slices: int, page: int = _SYSTEM_PAGE) -> int:
    """Return the bytes of an expert's arena slot.

    Each slice has whole pages and one for a start inside a page; the slot has the
    system's pages (moeoff-arena).
    """
    nbytes = sum(-(-n // _SLOT_PAGE) * _SLOT_PAGE + _SLOT_PAGE for n in slices)
    return -(-nbytes // page) * page


def parse_size(text: str | float, whole: int | None = None) -> int:
    """Return the bytes of "6G", "6GiB", "700M", "6000000000", or "80%" of `whole`.

    G and GiB both mean 2^30; GB means 10^9. `whole` is by default what is available.

    Raises:
        OptionError: The text is not a size, or zero.
    """
    if not isinstance(text, str):
        size = _whole(text)
    elif text.strip().endswith("%"):
        try:
            share = parse_percent(text)
        except ValueError:
            raise OptionError(
                f"not a size: {text!r}; write for example 6G, 700MiB or 80%"
            ) from None
        if not 0 < share <= 1:
            raise OptionError(f"a share of memory lies between 0% and 100%, not {text!r}")
        size = int((available() if whole is None else whole) * share)
    else:
        match = _SIZE.match(text)
        if not match:
            raise OptionError(f"not a size: {text!r}; write for example 6G, 700MiB or 80%")
        number, unit, suffix = match.groups()
        if not unit and 0 < float(number) < MIB:
            raise OptionError(f"{text.strip()} is a number of bytes: was {number}G meant?")
        base = 1000 if unit and suffix.lower() == "b" else 1024
        size = int(min(float(number), _MOST) * base ** _UNITS[unit.lower()])
    if size <= 0:
        raise OptionError(f"a memory size must be positive, not {text!r}")
    if size > _MOST:
        raise OptionError(f"a memory size of {text!r} is more than any machine has")
    return size


def _whole(number: float) -> int:
    """Return a whole number of bytes as int. Raise `OptionError` for others."""
    try:
        if number == (size := int(number)) and not isinstance(number, bool):
            return size
    except (TypeError, ValueError, OverflowError):  # nothing like a number, NaN, infinite
        pass
    raise OptionError(f"not a size: {number!r}; write for example 6G, 700MiB or 80%")


def parse_percent(text: str) -> float:
    """Return 0.8 for "80%". Raise ValueError for other forms."""
    return float(text.strip().removesuffix("%")) / 100


def format_size(n: int) -> str:
    """Format bytes: "1.63 GiB", "700 MiB"."""
    if n >= 1 << 30:
        return f"{n / (1 << 30):.2f} GiB"
    if n >= 10 * MIB:
        return f"{n / MIB:.0f} MiB"
    return f"{n / MIB:.2f} MiB"


@dataclass(frozen=True)
class Budget:
    """A model's memory budget in bytes, the single basis of all choices.

    Attributes:
        process: Limit of the whole process; None: only the experts are limited.
        experts: Limit of the experts alone.
        is_default: True if the user has set no limit.
    """

    process: int | None = None
    experts: int | None = None
    is_default: bool = False

    @classmethod
    def of(cls, memory: str | float | None = None, experts: int | None = None) -> Budget:
        """Make the budget from the user's options, or from a share of available memory.

        Raises:
            OptionError: A value is not a size, or free memory is unknown.
        """
        if memory is None and experts is None:
            return cls(int(available() * DEFAULT_SHARE), is_default=True)
        return cls(None if memory is None else parse_size(memory), experts)

    @property
    def most(self) -> int:
        """Most bytes that the process may take."""
        return available() if self.process is None else self.process

    def left(self, fixed: int) -> int:
        """Return the bytes for experts beside the rest of the process."""
        return self.experts or 0 if self.process is None else self.process - fixed


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup: its folder, and its version's names of limits and statistics.

    Attributes:
        charged: Entries of `memory.stat` for anonymous and shared memory, which the
            kernel cannot reload from files.
    """

    folder: str
    limit_files: tuple[str, ...]
    charged: tuple[str, ...]

    @property
    def limit(self) -> int | None:
        """Lowest limit in bytes at which the kernel kills or throttles, or None."""
        limits = []
        for name in self.limit_files:
            try:
                with open(f"{self.folder}/{name}") as file:
                    limits.append(int(file.read()))
            except (OSError, ValueError):  # absent, or "max"
                continue
        # version 1 writes a huge number for "none"
        return min((n for n in limits if n < _MOST), default=None)

    def held_by_others(self, own: int) -> int:
        """Return other processes' bytes that need swap to be reclaimed, with tmpfs."""
        return max(0, self._held() - own)

    def _held(self) -> int:
        try:
            with open(f"{self.folder}/memory.stat") as file:
                stat = {name: int(value) for name, value in (line.split() for line in file)}
        except (OSError, ValueError):
            return 0
        return sum(stat.get(name, 0) for name in self.charged)

    def free_share(self) -> float:
        """Return the attainable share of the limit, page cache included."""
        return 1 - self._held() / limit if (limit := self.limit) else 1.0


def _memory_groups() -> list[MemoryGroup]:
    """Return this process's memory cgroup and its parents, of versions 1 and 2."""
    groups = []
    limits: tuple[str, ...]
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, charged = "/sys/fs/cgroup", ("anon", "shmem")
            limits = ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            root, charged = "/sys/fs/cgroup/memory", ("total_rss", "total_shmem")
            limits = ("memory.limit_in_bytes",)
        else:
            continue
        while True:
            groups.append(MemoryGroup(root + path.rstrip("/"), limits, charged))
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return groups


def cgroup_limit() -> int | None:
    """Return the lowest memory limit of this process's cgroups, or None."""
    return min((group.limit for group in _memory_groups() if group.limit is not None), default=None)


def limited_groups() -> list[MemoryGroup]:
    """Return the cgroups around this process that have a memory limit."""
    return [group for group in _memory_groups() if group.limit is not None]


def free_share() -> float:
    """Return the attainable share of the machine's memory, page cache included."""
    import psutil

    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)


def available() -> int:
    """Return the bytes attainable for this process, including its own.

    The page cache of a cgroup counts as free, other processes' memory does not.

    Raises:
        OptionError: Free memory is unknown.
    """
    import psutil

    own = _own("RssAnon", "RssShmem")  # files that are mapped count as free already
    try:
        free = [int(psutil.virtual_memory().available) + (own or rss())]
    except (OSError, RuntimeError, ValueError, psutil.Error):
        # what psutil raises where /proc is not mounted, or a call is refused
        raise OptionError(
            "this system does not say how much memory is free (is /proc mounted?)",
            hint={"memory": ...},
        ) from None
    for group in _memory_groups():
        if (limit := group.limit) is not None:
            free.append(max(0, limit - group.held_by_others(own)))
    return min(free)


def _own(*keys: str) -> int:
    """Return the sum of entries of /proc/self/status in bytes, 0 without them."""
    try:
        with open("/proc/self/status") as file:
            lines = (line for line in file if line.partition(":")[0] in keys)
            return sum(int(line.split()[1]) * 1024 for line in lines)
    except OSError:  # not Linux
        return 0


def rss() -> int:
    """Return the resident bytes of this process.

    It is called for every token: /proc takes a third of psutil's time.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        pass
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except (OSError, psutil.Error):
        raise OptionError(
            "this system does not say how much memory a process takes, which no bound can be kept"
            " without: is /proc mounted?"
        ) from None


_MADV_DONTNEED = 4  # of sys/mman.h


def peak_rss() -> int:
    """Return the peak resident bytes: VmHWM, or ru_maxrss without /proc."""
    return _own("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def share_malloc_arenas() -> None:
    """Limit glibc's malloc arenas: each thread's would keep freed memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


def trim() -> None:
    """Give back the C allocator's free memory (glibc): tens of MB of a closed model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def unmap_files() -> None:
    """Unmap unmodified library pages, and call `trim` (Linux only).

    Pages that loading has read are seldom needed again; the page cache restores others.
    """
    trim()
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/smaps") as file:
        begin = end = 0
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):  # a mapping: where, rights, offset, device, inode
                is_file = rest[0] in ("r-xp", "r--p") and rest[3] != "0"
                begin, end = (
                    (int(address, 16) for address in first.split("-")) if is_file else (0, 0)
                )
            elif first == "Anonymous:" and rest[0] == "0" and begin:
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
