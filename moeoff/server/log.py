"""What llama-server logs first as an error, which is why it ends, as a sentence."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable

_ERROR = re.compile(r"\S+ E (?:\w+ {2,})?(?:[\w:]+: )*(.*)")  # time, level, where it happens, what
_PATIENCE = 1.0  # seconds


class ErrorPipe:
    """The log of a server while it runs: a pipe, which a thread reads, so that nothing is held but that line. `path` is a file to llama-server."""

    def __init__(self) -> None:
        reads, self._writes = os.pipe()
        self.path = f"/dev/fd/{self._writes}"
        self._first = ""
        self._thread = threading.Thread(target=self._read, args=(reads,), name="moeoff-log", daemon=True)
        self._thread.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, "rb") as file:
            self._first = _first_error(file)
            for _ in file:  # else whoever writes would wait
                pass

    def close(self) -> str:
        """The first error, when llama-server has ended; empty: there was none."""
        os.close(self._writes)
        self._thread.join(_PATIENCE)
        return self._first


def first_error(path: str) -> str:
    """The same of a file that the user named; empty, too, if that is none, as a terminal."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return _first_error(file)


def _first_error(lines: Iterable[bytes]) -> str:
    return next((match[1].strip() for line in lines if (match := _ERROR.match(line.decode("utf-8", "replace")))), "")
