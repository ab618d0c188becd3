"""Files: those that are read, bounded and without waiting for anybody; those that are written, whole or not at all, also after a crash; and the folders
for them. The only place that asks the environment for folders.

A reader says how much it may take before it takes it: what a file, or a field in it, claims to need is compared first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from ..errors import MoeoffError, OptionError, WriteError
from .memory import format_size

if TYPE_CHECKING:
    from typing_extensions import Self

SMALL = 1 << 16  # bytes of a file that holds a few facts
TEXT = 16 << 20  # bytes of a prompt, or of a text to measure on: several books

DEMO_MODEL = "demo-moe-q8_0.gguf"

_LONGEST_PREFIX = 64  # characters of a name of four bytes each: what is added must not make it too long for the file system

_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))

# a folder that may not be listed, and file systems that cannot sync one
_UNSYNCABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class Closing:
    """Base of what is closed where the `with` block ends that has opened it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading, without a buffer. What is none is not opened: a pipe would wait for a writer, and a device may have no end.

    Raises:
        OSError: it cannot be opened; `strerror` says why in words.
    """
    # without waiting, should it be replaced between the two calls
    _require_regular(path, os.stat(path).st_mode)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(path, os.fstat(fd).st_mode)
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{next((name for test, name in _KINDS if test(mode)), 'something else')}, expected a file", os.fspath(path))


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """All of a regular file of at most so many bytes. Raises `OSError`, whose `strerror` says why in words."""
    with open_file(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size, path, limit)


def _read(file: BinaryIO, size: int, path: str | os.PathLike[str], limit: int) -> bytes:
    """Reads the rest of a file that is said to have so many bytes; of a pipe nobody says it."""
    parts, left = list[bytes](), limit + 1
    while size <= limit and left > 0:
        part = file.read(min(left, 1 << 20))
        if part is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), os.fspath(path))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    if size > limit or left <= 0:
        length = f"it has {format_size(size)}" if size > limit else "it is longer"
        raise OSError(errno.EFBIG, f"{length}, expected at most {format_size(limit)}", os.fspath(path))
    return b"".join(parts)


def read_text(path: str | os.PathLike[str], limit: int = TEXT, *, errors: str = "strict", newlines: bool = False) -> str:
    """A text in UTF-8. It may come from a pipe that is open already, as a shell's <(...) and /dev/stdin are.

    Args:
        newlines: lines end with a newline alone, however they end in the file.

    Raises:
        OptionError: it cannot be read, is too long, or is not UTF-8.
    """
    try:
        if os.path.exists(path) and not os.path.exists(os.path.realpath(path)):  # a pipe without a name
            with open(path, "rb", buffering=0) as file:
                data = _read(file, 0, path, limit)
        else:
            data = read_file(path, limit)
        text = data.decode("utf-8", errors)
    except OSError as error:
        raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{os.fspath(path)}: is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if newlines else text


def require_new(output: str | os.PathLike[str] | None, inputs: Iterable[str | os.PathLike[str] | None], what: str) -> None:
    """Checks before any work that what will be written is none of the files that are read, under whatever name, and can be written. Raises `OptionError`.

    Args:
        output: path; None: nothing will be written.
        what: the option that gives it.
    """
    if output is None:
        return

    def refuse(why: str) -> NoReturn:
        raise OptionError(f"{what} {os.fspath(output)}: {why}")

    folder = os.path.dirname(os.path.realpath(output))
    if os.path.isdir(output):
        refuse("is a folder: give the name of a file in it")
    if os.path.exists(output) and not os.path.isfile(output):  # as /dev/null, which nothing is lost in
        return
    if not os.path.isdir(folder):
        refuse(f"there is no such folder, {folder}")
    if folder == os.path.dirname(os.path.realpath(demo_model())):
        refuse("lies in moeoff's own package: copy the model elsewhere, or name another file")
    if not os.access(folder, os.W_OK):
        refuse(f"nothing can be written in {folder}, which is read-only: name a file elsewhere")
    if (room := os.statvfs(folder)).f_blocks and not room.f_bavail:
        refuse(f"the disk of {folder} is full")
    for path in (path for path in inputs if path is not None):
        try:
            same = os.path.samefile(output, path)
        except OSError:  # one of them is not there
            same = os.path.realpath(output) == os.path.realpath(path)
        if same:
            refuse(f"would replace {os.fspath(path)}, which is in use: give another name")


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
        mode: int | None = None
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(path).st_mode  # of what it links to
        if mode is not None and not overwrite:
            raise WriteError(f"{os.fspath(path)} exists already; choose another name, or ask to overwrite it")
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with open(path, "wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name[:_LONGEST_PREFIX]}.{secrets.token_hex(8)}.part")  # no other thread's
        try:
            with open(partial, "xb") as file:  # not mkstemp, whose files nobody else may read
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


def cache_folder() -> Path:
    """The user's cache folder for moeoff, made if it is absent: platformdirs' (on Linux in XDG_CACHE_HOME or ~/.cache). Raises `OSError` if it cannot be made."""
    from platformdirs import user_cache_path

    try:
        return user_cache_path("moeoff", appauthor=False, ensure_exists=True)
    except RuntimeError as error:  # a user without a home
        raise FileNotFoundError(errno.ENOENT, str(error)) from None


def demo_model() -> str:
    """Path of the model that ships inside the package."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data", DEMO_MODEL)


def machine_wide_file(name: str) -> str | None:
    """The path of a file that all processes of moeoff's on this machine share, or in this container; None if there is no place for one."""
    return next((f"{folder}/moeoff-{name}" for folder in ("/dev/shm", "/tmp") if os.access(folder, os.W_OK)), None)
