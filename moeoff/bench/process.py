"""Runs a `Job` in a process of its own, inside a memory cgroup where that is asked for and possible."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from .cgroup import memory_cgroup
from .job import Job, Measurement, Sample

_KILLED = -9
KILLED_TEXT = "killed by the system: out of memory"
Listener = Callable[[dict[str, Any]], None]


def measure(job: Job, listener: Listener | None = None, timeout: float | None = None) -> Measurement:
    """Runs it to its end, and kills it if the caller is interrupted.

    Args:
        listener: told of every line, as it comes.
        timeout: seconds; what is not finished then is an error of the measurement.

    Raises:
        OSError: a memory cgroup was asked for and cannot be made.
    """
    out = Measurement(job)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context(memory_cgroup(job.limit_bytes)).enter if job.limit_bytes else None
        errors = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        command = [sys.executable, "-m", "moeoff.bench.worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=enter)
        stack.callback(process.wait)
        stack.callback(process.kill)
        timer = stack.enter_context(_deadline(process, timeout))
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(job)))
            process.stdin.close()
        for line in process.stdout:
            event = json.loads(line)
            if listener is not None:
                listener(event)
            _take(out, event)
        code = process.wait()
        if code != 0 and not out.error:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            if timer():
                last = f"not finished after {timeout:.0f} s"
            elif code == _KILLED:
                last = KILLED_TEXT
            out.error = last
    return out


def drop_from_page_cache(path: str) -> None:
    """What other processes have read of a file is no memory of the next one's cgroup, and would be found there all the same."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # what is not on the disk yet stays
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _take(out: Measurement, event: dict[str, Any]) -> None:
    kind = event.pop("kind")
    if kind == "sample":
        out.samples.append(Sample(**event))
    elif kind == "opened":
        out.opened = event
    elif kind == "closed":
        out.closed = event
    else:
        out.error = event["text"]


@contextlib.contextmanager
def _deadline(process: subprocess.Popen[str], timeout: float | None) -> Iterator[Callable[[], bool]]:
    """Kills the process after so many seconds; yields whether it has."""
    fired = threading.Event()

    def kill() -> None:
        fired.set()
        process.kill()

    timer = threading.Timer(timeout, kill) if timeout is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield fired.is_set
    finally:
        if timer is not None:
            timer.cancel()
