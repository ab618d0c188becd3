"""`ServerProcess`: a `Server` in a process of its own, reached through a Unix socket.

For a program that has memory of its own, which the model's budget must not pay for, and that wants to outlive the engine. The process ends when
its standard input does, and so with whoever started it, however that ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

from ..errors import MoeoffError
from ..system.console import note

_READY = "ready"
_STOPPING = 20.0  # seconds that answers, and what is remembered for a warm start, have to end in


class ServerProcess:
    """Starts the process and returns when the first request can be answered.

    Args:
        model, **options: of `Server`, without host and port.

    Raises:
        MoeoffError: what `Server` raised there, or that the process has ended.
    """

    def __init__(self, model: str, **options: Any):
        self._folder = tempfile.mkdtemp(prefix="moeoff-")
        self.socket = os.path.join(self._folder, "http.sock")
        command = [sys.executable, "-m", "moeoff.server.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # pipes
        self._stdin = stdin
        with stdout:
            with contextlib.suppress(BrokenPipeError):
                pickle.dump((model, self.socket, options), stdin)
                stdin.flush()
            answer = stdout.readline().decode("utf-8", "replace").strip()
        if answer != _READY:
            self.stop()
            raise MoeoffError(answer or f"{model}: the process that was to serve it has {self.ending()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait()

    def ending(self) -> str:
        """How it has ended, for a sentence."""
        code = self._process.wait()
        return f"ended with code {code}" if code >= 0 else f"been ended by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Ends the process at once, also one that no longer does anything."""
        self._process.kill()

    def stop(self) -> None:
        """Ends every answer, then the process. May be called twice."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(_STOPPING + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _main() -> None:
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    os.dup2(2, 1)  # what llama.cpp prints is not an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the one that reads it
    model, socket, options = pickle.load(stdin)
    with stdout:
        try:
            from .server import Server

            server = Server(model, host=socket, on_remark=note, **options).start()
            print(_READY, file=stdout)
        except Exception as error:
            print(error if isinstance(error, MoeoffError) else f"{model}: {type(error).__name__}: {error}", file=stdout)
            sys.exit(1)
    ends = threading.Event()
    end = threading.Thread(target=_stop_at_the_end, args=(server, stdin, os.path.dirname(socket), ends), daemon=True)
    end.start()
    server.wait()
    if ends.is_set():
        end.join()  # it ends the process, when the folder is gone


def _stop_at_the_end(server: Any, stdin: Any, folder: str, ends: threading.Event) -> None:
    stdin.read()
    ends.set()
    threading.Timer(_STOPPING, os._exit, (1,)).start()
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
