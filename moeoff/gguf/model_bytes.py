"""The files of a model, open for reading ranges of them into memory. What cannot be read is an error that names file and offset."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import ModelError

__all__ = ["ModelBytes"]


class ModelBytes:
    """Raises `ModelError` if a file cannot be opened. A context manager."""

    def __init__(self, paths: Sequence[str]):
        self._paths, self._fds = list(paths), list[int]()
        try:
            for path in self._paths:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._fds)

    def __enter__(self) -> ModelBytes:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def read(self, file: int, offset: int, nbytes: int, what: str) -> memoryview:
        """A range of one of the files.

        Args:
            what: it holds, for people.

        Raises:
            ModelError: it cannot be read, or the file ends before it does.
        """
        view, at = memoryview(bytearray(nbytes)), 0
        while at < nbytes:
            try:
                got = os.preadv(self._fds[file], [view[at:]], offset + at)
            except OSError as error:
                raise ModelError(f"{self._paths[file]}: cannot be read at byte {offset + at}: {error.strerror}") from None
            if got == 0:
                raise ModelError(f"{self._paths[file]}: ends at byte {offset + at}, inside {what}; was it cut while it was read?")
            at += got
        return view
