"""The machine, as far as measurements depend on it: its processor and how many cores this process may use."""

from __future__ import annotations

import functools
import os
import platform


def n_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def cpu_name() -> str:
    """As the system calls it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    except OSError:  # not Linux
        return platform.processor() or platform.machine()


def machine_name() -> str:
    """In words: what is measured on one machine is not true on another."""
    return f"{n_cores()} cores of {cpu_name()}"
