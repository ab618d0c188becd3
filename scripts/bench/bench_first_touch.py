"""What memory costs when it is touched first, by the size of pages and by whether it was in use just before: what filling an empty arena waits for beside the disk.

usage: bench_first_touch.py [--mib N] [--rest SECONDS] [--json FILE]

A virtual machine may give free memory back to its host, in blocks of 2 MiB: then the host has to find it again. The kernel of the machine itself does the same work
in all rows of one page size. Milliseconds for 2 MiB; stalls are counts of /proc/vmstat: the system looked for memory, or moved some, before it could give a page.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import HELP, ResultsFile

HUGE, SMALL, POPULATE = 14, 15, 23  # MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE
COUNTS = ["thp_fault_alloc", "compact_stall", "allocstall_movable"]


def counts() -> list[int]:
    found = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return [int(found.get(name, 0)) for name in COUNTS]


def touch(mib: int, advice: int) -> list[float]:
    """Milliseconds for 2 MiB, of them the processor's, and what COUNTS grew by."""
    before = counts()
    with mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(advice)
        began, cpu = time.perf_counter(), time.thread_time()
        memory.madvise(POPULATE)
        took = [1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - cpu)]
    return [ms * 2 / mib for ms in took] + [b - a for a, b in zip(before, counts())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--rest", type=float, default=6.0, help="seconds in which the memory stays free")
    parser.add_argument("--json", help=HELP)
    options = parser.parse_args()
    with ResultsFile(options.json) as results:
        table = results.table("first-touch", "touching 2 MiB of new memory, ms", ["pages", "the memory was", "time", "CPU time", "huge pages", "stalls"])
        for pages, advice in (("2 MiB", HUGE), ("4 KiB", SMALL)):
            for i, state in enumerate((f"free for {options.rest:g} s", "freed just before", "freed just before")):
                time.sleep(0 if i else options.rest)
                ms, cpu, huge, *stalls = touch(options.mib, advice)
                table.row(pages, state, f"{ms:.2f}", f"{cpu:.2f}", f"{huge:.0f}", f"{sum(stalls):.0f}")


if __name__ == "__main__":
    main()
