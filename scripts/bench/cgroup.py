"""A cgroup around a process that slows its disk. Needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from moeoff.system.cgroup import Cgroup, controller, make_folder, set_value


@contextlib.contextmanager
def disk_cgroup(path: str, bytes_per_second: int) -> Iterator[Cgroup]:
    """A cgroup that reads no faster than this from the disk that holds a file; removed
    afterwards.

    Raises:
        OSError: no rights, or no controller.
    """
    parent, v1 = controller("io", "blkio")
    device = os.stat(path).st_dev
    which = f"{os.major(device)}:{os.minor(device)}"
    with make_folder(parent) as folder:
        set_value(
            folder,
            *(
                ("blkio.throttle.read_bps_device", f"{which} {bytes_per_second}")
                if v1
                else ("io.max", f"{which} rbps={bytes_per_second}")
            ),
        )
        group = Cgroup(folder)
        try:
            yield group
        finally:
            # this process, if it had entered: a cgroup with processes is not removed
            Cgroup(parent).enter()
