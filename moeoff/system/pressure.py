"""Memory pressure, as Linux counts it: the time in which programs wait for memory to be reclaimed.

`/proc/pressure/memory` is the machine's, `memory.pressure` that of a cgroup with a limit. Other
systems, older kernels and containers that hide these files report none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from .memory import limited_folders

_WINDOW = 0.5  # seconds that a share is taken of, as of the kernel's own triggers
_MACHINE = ("/proc/pressure/memory", "/proc/vmstat", ("pgscan_direct", "pgscan_kswapd"))


class _Source:
    """One pair of counters: microseconds that programs have waited, and pages that were scanned.

    Where pages are not scanned, programs wait for something else, such as the compaction of huge
    pages. The machine's pages do not include those that a cgroup scans below its own limit.
    """

    def __init__(self, pressure: str, scans: str, names: tuple[str, ...]):
        self._pressure, self._scans, self._names = pressure, scans, names
        self._before = self._read()

    def _read(self) -> tuple[int, int] | None:
        try:
            with open(self._pressure) as file:
                waited = int(file.readline().rpartition("total=")[2])
            with open(self._scans) as file:
                lines = (line.split() for line in file)
                return waited, sum(int(line[1]) for line in lines if line[0] in self._names)
        except (OSError, ValueError, IndexError):
            return None

    def waited(self) -> float:
        """Return the seconds since the last call; 0 if nothing was reclaimed, or it is unknown."""
        before, self._before = self._before, self._read()
        if before is None or self._before is None or self._before[1] == before[1]:
            return 0.0
        return (self._before[0] - before[0]) / 1e6


class Pressure:
    """The share of time in which some program waits for memory.

    Args:
        sources: File of the pressure, file of the scanned pages, and the names of these counters.
            None: those of the machine and of the cgroups around this process.
    """

    def __init__(self, sources: Iterable[tuple[str, str, tuple[str, ...]]] | None = None):
        if sources is None:
            groups = ((f"{f}/memory.pressure", f"{f}/memory.stat", ("pgscan",)) for f in limited_folders())
            sources = (_MACHINE, *groups)
        self._sources = [_Source(*source) for source in sources]
        self._read_at = time.monotonic()

    def share(self) -> float:
        """Return the share since the last window, 0 to 1; 0 within a window."""
        now, seconds = time.monotonic(), time.monotonic() - self._read_at
        if seconds < _WINDOW:
            return 0.0
        self._read_at = now
        return max((source.waited() for source in self._sources), default=0.0) / seconds
