"""Runs a command on a model again and again, each time with other bytes in its file: what may end the process ends a child.

As a program: `damaged_runs.py MODEL ARGS...` with JSON [[offset, bytes as hex], ...] on standard input; prints [[exit code, standard error], ...].
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

SECONDS = 60  # for one run
BYTES = 8 << 30  # of address space: llama.cpp believes a file that asks for more


def damaged_runs(model: str | Path, patches: list[tuple[int, bytes]], *args: str) -> list[tuple[int, str]]:
    """(exit code, standard error) of `moeoff ARGS` for each patch; a signal is a negative code. The file is as it was afterwards."""
    command = [sys.executable, str(Path(__file__)), str(model), *args]
    done = subprocess.run(command, input=json.dumps([(at, data.hex()) for at, data in patches]), capture_output=True, text=True, check=True)
    return [(code, text) for code, text in json.loads(done.stdout)]


def _child(args: list[str]) -> None:
    from moeoff.cli.main import main

    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS)
    try:
        main(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        sys.stderr.flush()
        os._exit(code)


def _run(args: list[str]) -> tuple[int, str]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        os.close(reader)
        try:
            _child(args)
        finally:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(99)
    os.close(writer)
    with open(reader, errors="replace") as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def _main(model: str, args: list[str]) -> None:
    import moeoff.cli.main
    import moeoff.engine.open  # noqa: F401  # what takes time is imported once, before the children

    results = []
    with open(model, "r+b") as file:
        for at, data in json.load(sys.stdin):
            file.seek(at)
            before = file.read(len(data) // 2)
            for content in (bytes.fromhex(data), before):
                file.seek(at)
                file.write(content)
                file.flush()
                if content is not before:
                    results.append(_run(args))
    print(json.dumps(results))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
