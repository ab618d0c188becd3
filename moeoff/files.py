"""Files that moeoff writes: whole or not at all, also after a crash; and the folders it has for them. The only place that asks the environment for folders."""

from __future__ import annotations

import contextlib
import errno
import importlib.resources
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import MoeoffError, WriteError

__all__ = ["atomic_file", "cache_folder", "demo_model", "machine_wide_file", "publish"]

DEMO_MODEL = "demo-moe-q8_0.gguf"

# a folder that may not be listed, and file systems that cannot sync one
_UNSYNCABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EBADF}


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes `path`'s place when the block has ended well and its bytes are on the disk.

    Until then it has a temporary name in the same folder; on any error it is removed, and what `path` held stays. A symbolic link
    stays one, and permissions stay as they were. What is no regular file, as /dev/stdout, is written to directly.

    Raises:
        WriteError: `path` exists and overwrite is false; no room, no rights, no such folder. Any OSError of the block counts
            as a failed write.
    """
    try:
        mode = _mode(path)
        if mode is not None and not overwrite:
            raise WriteError(f"{os.fspath(path)} exists already; choose another name, or ask to overwrite it")
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with open(path, "wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with open(partial, "wb") as file:
                if mode is not None:
                    os.chmod(partial, stat.S_IMODE(mode))
                yield file
                file.flush()
                publish(file.fileno(), partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except MoeoffError:
        raise
    except OSError as error:
        raise WriteError(f"{os.fspath(path)}: cannot be written: {error.strerror or error}") from None


def publish(fd: int, partial: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Renames an open file that is complete: its bytes reach the disk before its name does. Raises OSError."""
    os.fsync(fd)
    os.replace(partial, path)
    try:
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


def _mode(path: str | os.PathLike[str]) -> int | None:
    """Mode of what is at a path, through links; None: nothing."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def cache_folder() -> Path:
    """The user's cache folder for moeoff, made if it is absent: platformdirs' (on Linux in XDG_CACHE_HOME or ~/.cache). Raises `OSError` if it cannot be made."""
    from platformdirs import user_cache_path

    return user_cache_path("moeoff", appauthor=False, ensure_exists=True)


def demo_model() -> str:
    """Path of the model that ships inside the package."""
    return str(importlib.resources.files("moeoff") / "data" / DEMO_MODEL)


def machine_wide_file(name: str) -> str | None:
    """The path of a file that all processes of moeoff's on this machine share, or in this container; None if there is no place for one."""
    return next((f"{folder}/moeoff-{name}" for folder in ("/dev/shm", "/tmp") if os.access(folder, os.W_OK)), None)
