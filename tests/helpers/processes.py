"""Processes: functions of tests in some of their own, since memory that other tests
have freed is neither theirs to plan with nor to use; and what one takes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from helpers.files import ROOT


def own_process(test: Callable[..., None]) -> Callable[..., None]:
    """A test, or a part of one, in a new interpreter. Its arguments are pickled."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
            processes.submit(_call, test.__module__, test.__name__, args, kwargs).result()

    return wrapper


def _call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)


def run_python(code: str, *args: object, **environment: str) -> str:
    """Run code in a new interpreter that can import these helpers, and return its
    standard output. Its exit code must be 0.
    """
    folders = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": folders} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@contextlib.contextmanager
def soft_limit(kind: int, soft: int) -> Iterator[None]:
    """Give this process another soft limit of a kind such as resource.RLIMIT_FSIZE."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def status_bytes(name: str = "VmRSS", pid: int | str = "self") -> int:
    """A size that the kernel tells of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
