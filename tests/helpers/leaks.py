"""Checks that a process does not grow with each cycle of an action."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable

from helpers.waiting import wait_until, wait_until_still
from moeoff.system.memory import rss


def held() -> tuple[int, int]:
    """Threads and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes, without what the allocator holds back, which is not a leak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss()


def check_leaves_nothing(
    cycle: Callable[[], object], n: int, nbytes: int, warm_ups: int = 1
) -> None:
    """After n cycles there are as many threads and descriptors as before, and at most
    so many bytes more.
    """
    for _ in range(warm_ups):  # libraries keep what they allocate once
        cycle()
    gc.collect()
    wait_until_still(held)  # a thread of another test may end
    before, memory = held(), resident()
    for _ in range(n):
        cycle()
    # OpenMP's second thread stays where cores were not bound, as when another process
    # of ours has them; a leak is one for each cycle. A thread that has ended is listed
    # for a moment still.
    wait_until(lambda: held()[0] <= before[0] + 1 and held()[1] <= before[1], 60)
    assert resident() - memory < nbytes
