"""A memory cgroup around a command, versions 1 and 2 of the kernel's interface. Needs root.

What the command maps and what it reads through the page cache both count, as in a container or on a small machine.
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
class MemoryCgroup:
    folder: str
    peak_file: str

    @property
    def peak_bytes(self) -> int:
        """The most that was ever charged, page cache included."""
        with open(f"{self.folder}/{self.peak_file}") as file:
            return int(file.read())

    def run(self, command: list[str], **kwargs) -> subprocess.CompletedProcess:
        """`subprocess.run` inside the cgroup; return code -9 means that the kernel killed it for memory."""

        def enter() -> None:
            with open(f"{self.folder}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))

        return subprocess.run(command, preexec_fn=enter, **kwargs)


def _root() -> tuple[str, str, str, dict[str, str]]:
    """(parent folder, limit file, peak file, further settings)"""
    if os.path.isdir("/sys/fs/cgroup/memory"):
        return "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", {"memory.swappiness": "0"}
    with open("/sys/fs/cgroup/cgroup.subtree_control") as file:
        if "memory" not in file.read().split():
            with open("/sys/fs/cgroup/cgroup.subtree_control", "w") as control:
                control.write("+memory")
    return "/sys/fs/cgroup", "memory.max", "memory.peak", {"memory.swap.max": "0"}


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
    parent, limit_file, peak_file, settings = _root()
    folder = f"{parent}/moeoff-{os.getpid()}-{time.monotonic_ns()}"
    os.mkdir(folder)
    try:
        with open(f"{folder}/{limit_file}", "w") as file:
            file.write(str(limit_bytes))
        for name, value in settings.items():
            with contextlib.suppress(OSError):
                with open(f"{folder}/{name}", "w") as file:
                    file.write(value)
        yield MemoryCgroup(folder, peak_file)
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
