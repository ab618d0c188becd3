"""Bounded reads of files, atomic writes, and folders.

Readers state a limit, with which sizes are compared before anything is read. No other
module reads folders from the environment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from ..errors import MoeoffError, OptionError, WriteError
from .memory import format_size

if TYPE_CHECKING:
    from typing_extensions import Self

StrPath = str | os.PathLike[str]
SMALL = 1 << 16  # bytes of a file of a few facts
TEXT = 16 << 20  # bytes of a prompt or text to measure, several books

DEMO_MODEL = "demo-moe-q8_0.gguf"

_LONGEST_PREFIX = 64  # characters of up to four bytes; file systems allow 255 bytes
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# from folders without read permission, and from file systems that cannot sync one
_UNSYNCABLE = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class Closing:
    """Base of context managers that call `close`."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def open_file(path: StrPath) -> BinaryIO:
    """Open a regular file for unbuffered reading.

    Other files are refused unopened: a pipe may block, a device may be endless.

    Raises:
        OSError: The file cannot be opened; `strerror` has the reason.
    """

    def opened(name: StrPath, _flags: int) -> int:
        # O_NONBLOCK in case the file is replaced between the two calls
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_regular(path, os.fstat(fd).st_mode)
        except BaseException:
            os.close(fd)
            raise
        return fd  # from here on the file object closes it, even if a signal comes first

    try:
        _require_regular(path, os.stat(path).st_mode)
        return open(path, "rb", buffering=0, opener=opened)
    except OSError as error:
        if not isinstance(error.filename, str):
            error.filename = os.fspath(path)  # an error of fstat has none, or the descriptor
        raise


def remove_folder(path: StrPath) -> None:
    """Delete a folder as far as possible."""
    # rmtree raises errors of fstat even if it is to ignore errors
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True)


def _require_regular(path: StrPath, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(
            errno.EINVAL,
            f"{next((name for test, name in _KINDS if test(mode)), 'something else')}, expected a"
            " file",
            os.fspath(path),
        )


def read_file(path: StrPath, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raise OSError with `strerror`."""
    with open_file(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size, path, limit)


def _read(file: BinaryIO, size: int, path: StrPath, limit: int) -> bytes:
    """Read the rest of a file; `size` is 0 for pipes."""
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
        raise OSError(
            errno.EFBIG, f"{length}, expected at most {format_size(limit)}", os.fspath(path)
        )
    return b"".join(parts)


def read_text(
    path: StrPath,
    limit: int = TEXT,
    *,
    errors: str = "strict",
    newlines: bool = False,
) -> str:
    """Read UTF-8 text of a file or an open pipe (a shell's <(...), /dev/stdin).

    Args:
        newlines: True to convert all line ends to newlines.

    Raises:
        OptionError: The file is unreadable, too long, or not UTF-8.
    """
    try:
        if os.path.exists(path) and not os.path.exists(os.path.realpath(path)):  # unnamed pipe
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


def require_new(output: StrPath | None, inputs: Iterable[StrPath | None], what: str) -> None:
    """Check that `output` is writable and none of the inputs, or raise OptionError.

    Args:
        output: Path to be written, None for none.
        inputs: Paths to be read.
        what: Option of the output, for errors.
    """
    if output is None:
        return

    def refuse(why: str) -> NoReturn:
        raise OptionError(f"{what} {os.fspath(output)}: {why}")

    folder = os.path.dirname(os.path.realpath(output))
    if os.path.isdir(output):
        refuse("is a folder: give the name of a file in it")
    if os.path.exists(output) and not os.path.isfile(output):  # such as /dev/null
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
        except OSError:  # one does not exist
            same = os.path.realpath(output) == os.path.realpath(path)
        if same:
            refuse(f"would replace {os.fspath(path)}, which is in use: give another name")


@contextlib.contextmanager
def atomic_file(path: StrPath, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` after the block, once the file is synced.

    The file has a temporary name in the same folder and is removed after errors.
    Symbolic links and permissions are kept. Devices (/dev/stdout) are written directly.

    Raises:
        WriteError: `path` exists and overwrite is False, or the block raised OSError.
    """
    try:
        mode: int | None = None
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
        if mode is not None and not overwrite:
            raise WriteError(
                f"{os.fspath(path)} exists already; choose another name, or ask to overwrite it"
            )
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with open(path, "wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name[:_LONGEST_PREFIX]}.{secrets.token_hex(8)}.part")
        try:
            with open(partial, "xb") as file:  # mkstemp would make it private
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
        raise WriteError(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}"
        ) from None


def publish(fd: int, partial: StrPath, path: StrPath) -> None:
    """Sync a complete file, rename it, and sync its folder, or raise OSError."""
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
    """Return moeoff's cache folder, created if needed, or raise OSError."""
    from platformdirs import user_cache_path

    try:
        return user_cache_path("moeoff", appauthor=False, ensure_exists=True)
    except RuntimeError as error:  # no home folder
        raise FileNotFoundError(errno.ENOENT, str(error)) from None


def demo_model() -> str:
    """Return the path of the model in the package."""
    return str(Path(__file__).absolute().parents[1] / "data" / DEMO_MODEL)


def machine_wide_file(name: str) -> str | None:
    """Return the path of a file for all processes of the machine, if possible."""
    return next(
        (
            f"{folder}/moeoff-{name}"
            for folder in ("/dev/shm", "/tmp")
            if os.access(folder, os.W_OK)
        ),
        None,
    )
