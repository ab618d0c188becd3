"""A memory cgroup around a process, as a container or a small machine has one. Versions 1 and 2 of the kernel's interface; needs the right to make one.

What the process maps and what it reads through the page cache count as its memory, too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Cgroup:
    """One cgroup; peak_file of a memory cgroup has what was charged."""

    folder: str
    peak_file: str = ""

    def enter(self) -> None:
        """Moves the calling process into it: for a child between fork and exec."""
        with open(f"{self.folder}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))

    def run(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` inside the cgroup; return code -9 means that the kernel killed it for memory."""
        return subprocess.run(command, preexec_fn=self.enter, **kwargs)

    @property
    def peak_bytes(self) -> int:
        """The most that was ever charged, page cache included."""
        with open(f"{self.folder}/{self.peak_file}") as file:
            return int(file.read())


def controller(name: str, v1: str) -> tuple[str, bool]:
    """The folder of cgroups of a controller (its name, and that of version 1), and whether it is version 1. Raises `OSError` if there is none."""
    if os.path.isdir(f"{_ROOT}/{v1}"):
        return f"{_ROOT}/{v1}", True
    with open(f"{_ROOT}/cgroup.subtree_control") as file:
        if name not in file.read().split():
            set_value(_ROOT, "cgroup.subtree_control", f"+{name}")
    return _ROOT, False


def unavailable() -> str | None:
    """Why no memory cgroup can be made here, or None."""
    try:
        with memory_cgroup(64 << 20):
            return None
    except OSError as error:
        return f"no memory cgroup can be made here: {error.strerror or error}"


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Cgroup]:
    """A cgroup with this limit and no swap; removed afterwards.

    Raises:
        OSError: no rights, or no memory controller.
    """
    parent, v1 = controller("memory", "memory")
    with make_folder(parent) as folder:
        set_value(folder, "memory.limit_in_bytes" if v1 else "memory.max", str(limit_bytes))
        with contextlib.suppress(OSError):
            set_value(folder, *(("memory.swappiness", "0") if v1 else ("memory.swap.max", "0")))
        yield Cgroup(folder, "memory.max_usage_in_bytes" if v1 else "memory.peak")


def set_value(folder: str, name: str, value: str) -> None:
    with open(f"{folder}/{name}", "w") as file:
        file.write(value)


@contextlib.contextmanager
def make_folder(parent: str) -> Iterator[str]:
    """A new cgroup, removed when its processes have gone."""
    folder = f"{parent}/moeoff-{os.getpid()}-{time.monotonic_ns()}"
    os.mkdir(folder)
    try:
        yield folder
    finally:
        for _ in range(100):  # processes that were killed leave a moment later
            try:
                os.rmdir(folder)
                break
            except OSError:
                time.sleep(0.05)
