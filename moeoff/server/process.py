"""`ServerProcess`: a `Server` in a process of its own, on a Unix socket.

The parent's memory does not count against the model's budget, and a crash of the engine
does not reach the parent. The process ends with its standard input, or parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from typing import Any

from ..errors import MoeoffError
from ..system.console import note
from ..system.files import remove_folder

_STOPPING = 20  # seconds for answers and the warm-start file
_POLL = 0.2  # seconds


class ServerProcess:
    """A running server. The constructor returns once requests can be answered.

    Args:
        **options: Options of `Server` except host and port.

    Attributes:
        popen: Child process, to wait for or to kill.
        socket: Path of its Unix socket.

    Raises:
        MoeoffError: `Server` raised an error, or the process has ended.
    """

    def __init__(self, model: str, **options: Any):
        command = [sys.executable, "-m", "moeoff.server.process"]
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.popen.stdin is not None and self.popen.stdout is not None  # pipes
        self._stdin, self.socket = self.popen.stdin, ""
        with self.popen.stdout as stdout:
            try:
                pickle.dump((model, options), self._stdin)
                self._stdin.flush()
                self.socket, error = pickle.load(stdout)
            except (BrokenPipeError, EOFError):
                error = f"{model}: its server process has {self.ending()}"
        if error:
            self.stop()
            raise MoeoffError(error)

    def ending(self) -> str:
        """Return how the process ended, as the end of a sentence."""
        code = self.popen.wait()
        return (
            f"ended with code {code}"
            if code >= 0
            else f"been ended by {signal.Signals(-code).name}"
        )

    def stop(self) -> None:
        """End all answers, then the process. May be called twice."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self.popen.wait(_STOPPING + 1)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        if self.socket:  # a killed process leaves its folder
            remove_folder(os.path.dirname(self.socket))


def _main() -> None:
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # llama.cpp prints on standard output
    model, options = pickle.load(sys.stdin.buffer)
    with tempfile.TemporaryDirectory(prefix="moeoff-") as folder:
        socket, error = os.path.join(folder, "http.sock"), ""
        try:
            from .server import Server

            server = Server(model, host=socket, on_remark=note, **options).start()
        except Exception as failure:
            error = str(failure) if isinstance(failure, MoeoffError) else f"{model}: {failure!r}"
        with stdout:
            pickle.dump((socket, error), stdout)
        if error:
            sys.exit(1)
        while not select.select([sys.stdin], [], [], _POLL)[0]:
            server.wait(0)  # raises if the server has ended by itself
        signal.alarm(_STOPPING)  # kills the process
        server.stop()


if __name__ == "__main__":
    _main()
