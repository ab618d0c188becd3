"""`FirstError`: what llama-server logs first as an error, which is why it ends, as a sentence.

llama-server writes its log to a file, too: here a pipe, which a thread reads, so that nothing is kept but that line. Where the user wants a file,
it is looked for there.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable

_ERROR = re.compile(r"\S+ E (?:\w+ {2,})?(?:[\w:]+: )*(.*)")  # time, level, where it happens, what
_END = b"\x00\n"  # which llama-server does not write
_PATIENCE = 1.0  # seconds


class FirstError:
    """Reads from the start on. `path` is a file to llama-server."""

    def __init__(self) -> None:
        reads, writes = os.pipe()
        self._writes = os.fdopen(writes, "wb", buffering=0)
        self.path = f"/dev/fd/{writes}"
        self._first, self._seen = "", threading.Event()
        threading.Thread(target=self._read, args=(reads,), name="moeoff-log", daemon=True).start()

    def _read(self, fd: int) -> None:
        """Until every copy of the other end is closed: llama-server's is, when it opens another log."""
        with os.fdopen(fd, "rb") as file:
            for line in file:
                if line == _END:
                    self._seen.set()
                elif not self._first:
                    self._first = _first_error([line])

    def sentence(self) -> str:
        """Of what has been written up to now; empty if there was no error."""
        if not self._writes.closed:
            self._writes.write(_END)
            self._seen.wait(_PATIENCE)
            self._writes.close()
        return self._first


class FirstErrorOf:
    """The same of a file that the user named: what a server has written there when it has ended."""

    def __init__(self, path: str):
        self.path = path

    def sentence(self) -> str:
        """As `FirstError.sentence`; empty, too, if that is no file, as a terminal."""
        if not os.path.isfile(self.path):
            return ""
        with open(self.path, "rb") as file:
            return _first_error(file)


def _first_error(lines: Iterable[bytes]) -> str:
    return next((found[1].strip() for line in lines if (found := _ERROR.match(line.decode("utf-8", "replace")))), "")
