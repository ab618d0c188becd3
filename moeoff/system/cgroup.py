"""Cgroups (versions 1 and 2) that limit a process's memory; creating one needs rights.

The kernel charges mapped files and the page cache of a process's reads to its cgroup.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Cgroup:
    """A cgroup; a memory cgroup has a `peak_file` with its maximum charge."""

    folder: str
    peak_file: str = ""

    def enter(self) -> None:
        """Move the calling process into this cgroup, between fork and exec."""
        set_value(self.folder, "cgroup.procs", str(os.getpid()))

    def run(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        """Call `subprocess.run` in the cgroup; code -9 means it ran out of memory."""
        return subprocess.run(command, preexec_fn=self.enter, **kwargs)

    @property
    def peak_bytes(self) -> int:
        """Maximum charged bytes, including the page cache."""
        return int(Path(self.folder, self.peak_file).read_text())


def controller(name: str, v1: str) -> tuple[str, bool]:
    """Return a controller's parent folder and if it is version 1, or raise OSError.

    `name` and `v1` are the controller's names in versions 2 and 1.
    """
    if os.path.isdir(f"{_ROOT}/{v1}"):
        return f"{_ROOT}/{v1}", True
    if name not in Path(_ROOT, "cgroup.subtree_control").read_text().split():
        set_value(_ROOT, "cgroup.subtree_control", f"+{name}")
    return _ROOT, False


def unavailable() -> str | None:
    """Return why no memory cgroup can be created, None if one can."""
    try:
        with memory_cgroup(64 << 20):
            return None
    except OSError as error:
        return f"no memory cgroup can be made here: {error.strerror or error}"


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Cgroup]:
    """Create a cgroup with this limit and no swap. Raise OSError without rights."""
    parent, v1 = controller("memory", "memory")
    with make_folder(parent) as folder:
        set_value(folder, "memory.limit_in_bytes" if v1 else "memory.max", str(limit_bytes))
        with contextlib.suppress(OSError):
            set_value(folder, *(("memory.swappiness", "0") if v1 else ("memory.swap.max", "0")))
        yield Cgroup(folder, "memory.max_usage_in_bytes" if v1 else "memory.peak")


def set_value(folder: str, name: str, value: str) -> None:
    Path(folder, name).write_text(value)


@contextlib.contextmanager
def make_folder(parent: str) -> Iterator[str]:
    """Create a cgroup, and remove it after its processes have ended."""
    folder = f"{parent}/moeoff-{os.getpid()}-{time.monotonic_ns()}"
    os.mkdir(folder)
    try:
        yield folder
    finally:
        for _ in range(100):  # killed processes take a moment to leave
            try:
                os.rmdir(folder)
                break
            except OSError:
                time.sleep(0.05)
