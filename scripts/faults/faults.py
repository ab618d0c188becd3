"""Faults on purpose: the n-th call of a kind fails in this process, or from its start in one that is started with `environment`.

A process that wants `Fault` has faults.c preloaded: `reexecute` begins it anew so.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

__all__ = ["Call", "Fault", "Kind", "environment", "library", "reexecute"]

_SOURCE = Path(__file__).with_name("faults.c")


class Call(IntEnum):
    """What fails, in the order of faults.c."""

    OPEN = 0
    STAT = 1
    READ = 2
    MAP = 3
    ADVISE = 4
    THREAD = 5
    ALLOC = 6
    WRITE = 7
    SYNC = 8
    RENAME = 9


class Kind(IntEnum):
    """How: an errno, half of what was asked for, EINTR, nothing more to read, other bytes; or a delay instead of a fault."""

    ERROR = 0
    SHORT = 1
    INTERRUPTED = 2
    END = 3
    WRONG = 4
    DELAY = 5


@functools.cache
def library() -> str:
    """The compiled faults.c, made anew for each process that asks."""
    folder = tempfile.mkdtemp(prefix="moeoff-faults-")
    out = os.path.join(folder, "faults.so")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fexceptions", str(_SOURCE), "-o", out, "-ldl"], check=True)
    return out


def environment(call: Call | None = None, kind: Kind = Kind.ERROR, value: int = 0, *, nth: int = 0, below: str = "") -> dict[str, str]:
    """Of a process with the library, and with a fault from its start on."""
    made = os.environ | {"LD_PRELOAD": library()}
    return made if call is None else made | {"MOEOFF_FAULT": f"{call:d}:{kind:d}:{value}:{nth}:{below}"}


def reexecute() -> None:
    """Begins this program anew with the library, unless it has it."""
    if not hasattr(ctypes.CDLL(None), "faults_arm"):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment())


class Fault:
    """While open, the n-th call fails; of this library's calls, and on files below this folder, if either is given.

    Attributes:
        seen: such calls, after it was closed.
        fired: those that failed.
    """

    def __init__(self, call: Call, kind: Kind, value: int, nth: int, *, of: str = "", below: str = ""):
        self._given = (int(call), int(kind), value, ctypes.c_long(nth), of.encode(), os.fsencode(below))
        self.seen = self.fired = 0

    def __enter__(self) -> Fault:
        if not ctypes.CDLL(None).faults_arm(*self._given):
            raise RuntimeError(f"the library {self._given[4].decode()} is not loaded")
        return self

    def __exit__(self, *_: object) -> None:
        seen, fired = ctypes.c_long(), ctypes.c_long()
        ctypes.CDLL(None).faults_disarm(ctypes.byref(seen), ctypes.byref(fired))
        self.seen, self.fired = seen.value, fired.value
