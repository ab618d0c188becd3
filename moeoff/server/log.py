"""The first error in llama-server's log, which is the reason why it exits."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable

_ERROR = re.compile(r"\S+ E (?:\w+ {2,})?(?:[\w:]+: )*(.*)")  # time, level, function, message
_PATIENCE = 1.0  # seconds


class ErrorPipe:
    """A pipe for a server's log. A thread reads the log and keeps the first error.

    Attributes:
        path: Path for llama-server's --log-file.
    """

    def __init__(self) -> None:
        reads, self._writes = os.pipe()
        self.path = f"/dev/fd/{self._writes}"
        self._first = ""
        self._thread = threading.Thread(
            target=self._read, args=(reads,), name="moeoff-log", daemon=True
        )
        self._thread.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as file:
            self._first = _first_error(file)
            for _ in file:  # drain the pipe, or the server would block
                pass

    def close(self) -> str:
        """Return the first error, or "". Call it after llama-server has ended."""
        os.close(self._writes)
        self._thread.join(_PATIENCE)
        return self._first


def first_error(path: str) -> str:
    """Return the first error in a log file, or "", also for a terminal."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return _first_error(file)


def _first_error(lines: Iterable[bytes]) -> str:
    return next(
        (
            match[1].strip()
            for line in lines
            if (match := _ERROR.match(line.decode("utf-8", "replace")))
        ),
        "",
    )
