"""Processes: functions of tests in some of their own, since memory that other tests have freed is neither theirs to plan with nor to use; and what one takes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_process_of_its_own(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module returns, or raises, in a new interpreter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *args).result()


def status_bytes(name: str = "VmRSS", pid: int | str = "self") -> int:
    """A size that the kernel tells of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
