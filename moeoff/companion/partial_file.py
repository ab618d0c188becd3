"""A file that is being made: it has a temporary name until it is complete, and may be taken up again if it never was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

from ..atomic_file import publish
from ..errors import OptionError
from .hashing import hash_range

__all__ = ["PartialFile"]


class PartialFile:
    """The unfinished file, and beside it, where it may be resumed, a journal of what is in it.

    The journal may be ahead of the disk after a crash: what it claims is hashed again before it is believed.
    """

    def __init__(self, path: str, keep: bool):
        self.path, self._journal_path, self._keep = path, path + ".journal", keep
        self._journal: FileIO | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartialFile:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._stack.callback(os.close, self.fd)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self.fd), os.stat(self.path)):
                raise FileNotFoundError  # another one has just finished: what was opened is its companion now
            if not self._keep:
                os.ftruncate(self.fd, 0)
        except (BlockingIOError, FileNotFoundError):
            self._stack.close()
            raise OptionError(f"{self.path}: another conversion is writing this companion") from None
        except OSError:
            self._stack.close()
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if kind is not None and not (self._keep and os.path.exists(self._journal_path)):
            self._remove()
        if self._journal:
            self._journal.close()
        self._stack.close()

    def _remove(self) -> None:
        for path in (self.path, self._journal_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def publish(self, out: str) -> None:
        publish(self.fd, self.path, out)
        self._remove()

    def begin_journal(self, fingerprint: bytes, done: dict[int, tuple[int, ...]]) -> None:
        self._journal = open(self._journal_path, "wb", buffering=0)
        self._journal.write(fingerprint)
        for index, values in done.items():
            self.note(index, values)

    def note(self, index: int, values: tuple[int, ...]) -> None:
        if self._journal:
            self._journal.write(struct.pack(f"<I{len(values)}Q", index, *values))

    def resume(self, fingerprint: bytes, n_tiers: int, ranges: Callable[[int], list[tuple[int, int]]], threads: int) -> dict[int, tuple[int, ...]]:
        """What an earlier attempt at the same work finished.

        Args:
            fingerprint: 32 bytes that are equal for the same work only.
            ranges: offsets and bytes of what a job writes, one for each tier; raises IndexError for a job that there is not.

        Returns:
            By job: the hash of its source, then of each tier.
        """
        try:
            with open(self._journal_path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return {}
        if data[:32] != fingerprint:
            return {}
        record = struct.Struct(f"<I{1 + n_tiers}Q")
        claimed: dict[int, tuple[int, ...]] = {}
        for at in range(32, len(data) - record.size + 1, record.size):
            index, *values = record.unpack_from(data, at)
            claimed[index] = tuple(values)

        def holds(item: tuple[int, tuple[int, ...]]) -> bool:
            try:
                places = ranges(item[0])
            except IndexError:
                return False
            return all(hash_range(self.fd, offset, nbytes) == value for (offset, nbytes), value in zip(places, item[1][1:]))

        with ThreadPoolExecutor(threads) as pool:
            return {index: values for (index, values), good in zip(claimed.items(), pool.map(holds, claimed.items())) if good}
