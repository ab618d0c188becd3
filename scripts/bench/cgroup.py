"""Cgroups around a command: one that bounds its memory, one that slows its disk. Versions 1 and 2 of the kernel's interface. Needs root.

What the command maps and what it reads through the page cache both count as memory, as in a container or on a small machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Cgroup:
    folder: str

    def run(self, command: list[str], **kwargs) -> subprocess.CompletedProcess:
        """`subprocess.run` inside the cgroup; return code -9 means that the kernel killed it for memory."""

        def enter() -> None:
            with open(f"{self.folder}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))

        return subprocess.run(command, preexec_fn=enter, **kwargs)


@dataclass(frozen=True)
class MemoryCgroup(Cgroup):
    peak_file: str

    @property
    def peak_bytes(self) -> int:
        """The most that was ever charged, page cache included."""
        with open(f"{self.folder}/{self.peak_file}") as file:
            return int(file.read())


def _parent(controller: str, v1: str) -> tuple[str, bool]:
    """The folder of cgroups of a controller (its name, and that of version 1), and whether it is version 1."""
    if os.path.isdir(f"/sys/fs/cgroup/{v1}"):
        return f"/sys/fs/cgroup/{v1}", True
    with open("/sys/fs/cgroup/cgroup.subtree_control") as file:
        if controller not in file.read().split():
            with open("/sys/fs/cgroup/cgroup.subtree_control", "w") as control:
                control.write(f"+{controller}")
    return "/sys/fs/cgroup", False


def unavailable() -> str | None:
    """Why no memory cgroup can be made here, or None."""
    try:
        with memory_cgroup(64 << 20):
            return None
    except OSError as error:
        return f"no memory cgroup can be made here: {error}"


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A cgroup with this limit and no swap; removed afterwards.

    Raises:
        OSError: no rights, or no memory controller.
    """
    parent, v1 = _parent("memory", "memory")
    with _folder(parent) as folder:
        _set(folder, "memory.limit_in_bytes" if v1 else "memory.max", str(limit_bytes))
        with contextlib.suppress(OSError):
            _set(folder, *(("memory.swappiness", "0") if v1 else ("memory.swap.max", "0")))
        yield MemoryCgroup(folder, "memory.max_usage_in_bytes" if v1 else "memory.peak")


@contextlib.contextmanager
def disk_cgroup(path: str, bytes_per_second: int) -> Iterator[Cgroup]:
    """A cgroup that reads no faster than this from the disk that holds a file; removed afterwards.

    Raises:
        OSError: no rights, or no controller.
    """
    parent, v1 = _parent("io", "blkio")
    device = os.stat(path).st_dev
    which = f"{os.major(device)}:{os.minor(device)}"
    with _folder(parent) as folder:
        _set(folder, *(("blkio.throttle.read_bps_device", f"{which} {bytes_per_second}") if v1 else ("io.max", f"{which} rbps={bytes_per_second}")))
        yield Cgroup(folder)


def _set(folder: str, name: str, value: str) -> None:
    with open(f"{folder}/{name}", "w") as file:
        file.write(value)


@contextlib.contextmanager
def _folder(parent: str) -> Iterator[str]:
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


def main() -> int:
    """usage: cgroup.py MIB COMMAND..."""
    if len(sys.argv) < 3:
        print(main.__doc__, file=sys.stderr)
        return 2
    with memory_cgroup(int(sys.argv[1]) << 20) as group:
        result = group.run(sys.argv[2:])
        print(f"peak {group.peak_bytes / (1 << 20):.0f} MiB, exit {result.returncode}", file=sys.stderr)
    return result.returncode if result.returncode >= 0 else 128 - result.returncode


if __name__ == "__main__":
    sys.exit(main())
