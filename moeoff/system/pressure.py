"""Memory pressure: the time in which programs wait for memory to be reclaimed.

Linux reports it for the machine (`/proc/pressure/memory`) and for cgroups with a limit
(`memory.pressure`). Other systems, older kernels and some containers have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .memory import free_share, limited_groups

_WINDOW = 0.5  # seconds, as of the kernel's own triggers
# share of the memory that is free, above which programs wait for something else: for
# free share above which the wait is for a cgroup's limit or huge pages, not for memory
_PLENTY = 0.3


@dataclass(frozen=True)
class Source:
    """A source of pressure.

    Attributes:
        pressure: File with the accumulated waiting time.
        scans: File with counters of pages scanned for reclaim.
        names: Names of these counters.
        free_share: Function that returns the share of free memory.
    """

    pressure: str
    scans: str
    names: tuple[str, ...]
    free_share: Callable[[], float]

    def read(self) -> tuple[int, int] | None:
        """Return microseconds of waiting and scanned pages, or None if unavailable."""
        try:
            with open(self.pressure) as file:
                waited = int(file.readline().rpartition("total=")[2])
            with open(self.scans) as file:
                lines = (line.split() for line in file)
                return waited, sum(int(line[1]) for line in lines if line[0] in self.names)
        except (OSError, ValueError, IndexError):
            return None


def _sources() -> list[Source]:
    """Return the sources of the machine and of this process's cgroups."""
    names = ("pgscan_direct", "pgscan_kswapd")  # without what cgroups scan below their own limits
    machine = Source("/proc/pressure/memory", "/proc/vmstat", names, free_share)
    groups = [(group.folder, group.free_share) for group in limited_groups()]
    files = [
        (f"{folder}/memory.pressure", f"{folder}/memory.stat", free) for folder, free in groups
    ]
    return [machine, *(Source(first, second, ("pgscan",), free) for first, second, free in files)]


class Pressure:
    """A meter of the share of time in which some program waits for memory.

    Args:
        sources: Sources; None: the machine and this process's cgroups.
        window: Seconds that a share is taken of.
    """

    def __init__(self, sources: Iterable[Source] | None = None, window: float = _WINDOW):
        self._sources, self._window = list(_sources() if sources is None else sources), window
        self._before = [source.read() for source in self._sources]
        self._read_at = time.monotonic()

    def share(self) -> float:
        """Return the share since the last window, 0 to 1; 0 within a window."""
        now, seconds = time.monotonic(), time.monotonic() - self._read_at
        if seconds < self._window:
            return 0.0
        before, self._before = self._before, [source.read() for source in self._sources]
        self._read_at, share = now, 0.0
        for source, then, since in zip(self._sources, before, self._before, strict=True):
            # without scans nothing was reclaimed: programs waited for huge pages etc.
            if then and since and since[1] != then[1]:
                waited = (since[0] - then[0]) / 1e6 / seconds
                if waited > share and source.free_share() < _PLENTY:
                    share = waited
        return share
