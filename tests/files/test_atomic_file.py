"""A file is there whole or not at all; whatever goes wrong, what was there before stays
and nothing is left beside it.
"""

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest

from helpers.interrupts import Interrupt, at_event
from moeoff.errors import ModelError, WriteError
from moeoff.system.files import atomic_file, open_file, remove_folder


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def untouched(path) -> bool:
    return path.read_bytes() == b"old" and os.listdir(path.parent) == [path.name]


def test_it_appears_when_it_is_complete(path):
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["file"]


def test_threads_that_write_the_same_file(path):
    """Each writes a whole file, and one of them stays: none is a mixture."""
    letters = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]

    def write(letter: bytes) -> None:
        for _ in range(5):
            with atomic_file(path) as file:
                for _ in range(20):
                    file.write(letter * 1000)
                    file.flush()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, letters))
    assert path.read_bytes() in [letter * 20_000 for letter in letters] and os.listdir(
        path.parent
    ) == ["file"]


def test_a_name_as_long_as_a_file_system_takes(tmp_path):
    path = tmp_path / ("ä" * 127)
    with atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, ModelError("damaged")])
def test_errors_of_the_block_pass_through(path, error):
    with (
        pytest.raises(type(error) if isinstance(error, Exception) else error),
        atomic_file(path) as file,
    ):
        file.write(b"new")
        raise error
    assert untouched(path)


@pytest.mark.parametrize("fails", ["", "fsync", "replace"])
def test_its_bytes_reach_the_disk_before_its_name(path, monkeypatch, fails):
    """The file is synced, renamed, and then its folder is synced. If the disk fails,
    nothing has changed.
    """
    calls = []

    def noted(name, call, *args):
        if name == fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        state = os.fstat(args[0]) if name == "fsync" else None
        is_file = state is not None and stat.S_ISREG(state.st_mode)
        calls.append(f"{name} of {state.st_size} bytes" if is_file else name)
        call(*args)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, partial(noted, name, getattr(os, name)))
    error = pytest.raises(WriteError, match="file: cannot be written: Input/output error")
    with error if fails else nullcontext(), atomic_file(path) as file:
        file.write(b"new!")
    assert untouched(path) if fails else calls == ["fsync of 4 bytes", "replace", "fsync"]


def test_no_room():
    with (
        pytest.raises(WriteError, match="/dev/full: cannot be written: No space left"),
        atomic_file("/dev/full") as file,
    ):
        file.write(b"new")


def test_no_such_folder(tmp_path):
    with (
        pytest.raises(WriteError, match="cannot be written: No such file"),
        atomic_file(tmp_path / "absent" / "file"),
    ):
        pass
    with (
        pytest.raises(WriteError, match="cannot be written: Is a directory"),
        atomic_file(tmp_path),
    ):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where others may not")
def test_no_rights(path):
    path.parent.chmod(0o500)
    try:
        with (
            pytest.raises(WriteError, match="cannot be written: Permission denied"),
            atomic_file(path),
        ):
            pass
    finally:
        path.parent.chmod(0o700)
    assert untouched(path)


def test_without_overwriting(path):
    with pytest.raises(WriteError, match="file exists already"), atomic_file(path, overwrite=False):
        pass
    assert untouched(path)
    with atomic_file(path.with_name("other"), overwrite=False) as file:
        file.write(b"new")
    assert path.with_name("other").read_bytes() == b"new"


def test_links_and_permissions_stay(path):
    path.chmod(0o640)
    (path.parent / "link").symlink_to("file")
    with atomic_file(path.parent / "link") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (path.parent / "link").is_symlink() and len(os.listdir(path.parent)) == 2


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    with atomic_file(tmp_path / "pipe") as file:
        file.write(b"new")
    reader.join()
    assert read == [b"new"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_an_error_of_fstat_names_the_file_and_removes_no_folder_halfway(path, monkeypatch):
    def fails(_fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(OSError) as raised:
        patch.setattr(os, "fstat", fails)
        open_file(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fails)
        remove_folder(path.parent)  # raises nothing
    assert raised.value.filename == str(path)


def test_an_interrupt_while_a_file_is_opened_closes_it_once(path):
    """A second close would fail, or close what another thread has opened since."""
    with at_event(0) as counted:
        open_file(path).close()
    for nth in range(1, counted.places + 1):
        with pytest.raises(Interrupt), at_event(nth):
            open_file(path).close()
