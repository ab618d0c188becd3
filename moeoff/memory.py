"""Memory: sizes as people write them, what this process may use, and what it uses."""

from __future__ import annotations

import ctypes
import os
import re

from .errors import OptionError

MIB = 1 << 20
DEFAULT_SHARE = 0.8  # of what is available, when the user states no budget

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\s*$", re.IGNORECASE)
_M_ARENA_MAX = -8  # of malloc.h
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SLOT_PAGE = 4096  # the native page_size, whatever the machine's pages are
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def slot_bytes(slice_bytes: int) -> int:
    """What a slice takes in an arena: whole pages, and one for a start inside a page (moeoff-arena)."""
    return -(-slice_bytes // _SLOT_PAGE) * _SLOT_PAGE + _SLOT_PAGE


def parse_size(text: str | int) -> int:
    """Bytes of "6G", "6GiB", "700M", "6000000000", or "80%" (of what is available). G and GiB both mean 2^30; GB means 10^9.

    Raises:
        OptionError: not a size, or zero.
    """
    if isinstance(text, int):
        size = text
    elif text.strip().endswith("%"):
        try:
            share = float(text.strip()[:-1])
        except ValueError:
            raise OptionError(f"not a size: {text!r}; write for example 6G, 700MiB or 80%") from None
        if not 0 < share <= 100:
            raise OptionError(f"a share of memory lies between 0% and 100%, not {text!r}")
        size = int(available() * share / 100)
    else:
        match = _SIZE.match(text)
        if not match:
            raise OptionError(f"not a size: {text!r}; write for example 6G, 700MiB or 80%")
        number, unit, suffix = match.groups()
        base = 1000 if unit and suffix.lower() == "b" else 1024
        size = int(float(number) * base ** _UNITS[unit.lower()])
    if size <= 0:
        raise OptionError(f"a memory size must be positive, not {text!r}")
    return size


def format_size(n: int) -> str:
    """Bytes for people: "1.63 GiB", "700 MiB"."""
    if n >= 1 << 30:
        return f"{n / (1 << 30):.2f} GiB"
    if n >= 10 * MIB:
        return f"{n / MIB:.0f} MiB"
    return f"{n / MIB:.2f} MiB"


def _read_int(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _cgroup_folders() -> list[tuple[str, str, str]]:
    """(folder, limit file, usage file) of this process's memory cgroup and its parents, versions 1 and 2."""
    folders = []
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = "/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        while True:
            folders.append((root + path.rstrip("/"), *names))
            if path in ("/", ""):
                break
            path = os.path.dirname(path)
    return folders


def cgroup_limit() -> int | None:
    """The lowest memory limit of the cgroups this process is in, or None."""
    found = [_read_int(f"{folder}/{limit}") for folder, limit, _ in _cgroup_folders()]
    return min((limit for limit in found if limit is not None and limit < 1 << 60), default=None)  # version 1 writes a huge number for "none"


def available() -> int:
    """Bytes this process could use in all: its own, and what the system and its cgroups still have.

    The page cache counts as free in a cgroup: the kernel takes it back before it kills.
    """
    free = [_meminfo("MemAvailable") + rss()]
    limit = cgroup_limit()
    if limit is not None:
        free.append(limit)
    return min(free)


def _meminfo(key: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise OptionError("this system does not say how much memory is free: state a budget")


def rss() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def peak_rss() -> int:
    """The most that was ever resident (VmHWM)."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)


def share_malloc_arenas() -> None:
    """For a process of many threads: glibc gives each of them an arena of its own, and each keeps what was once freed in it. Elsewhere nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


def trim() -> None:
    """Gives back what the C allocator holds of memory that is free, where it can (glibc): a closed model's tens of MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
