"""Which build of llama.cpp's CPU backend this process takes, where the installed wheel brings several (scripts/build/wheels.py).

A library that is loaded already serves everyone who names it, so the chosen backend has to be loaded before the rest. A fork that was built on this
machine has one backend, and nothing is done.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from .errors import OptionError

__all__ = ["LEVEL", "load"]

ENVIRONMENT = "MOEOFF_CPU_LEVEL"
_BACKEND = "libggml-cpu.so"

LEVEL: str | None = None  # that was loaded; None: there is one build, or nothing was loaded yet


def load() -> str | None:
    """Loads the best backend for this CPU, or the one that MOEOFF_CPU_LEVEL names; returns its level, None where there is nothing to choose.

    Raises:
        OptionError: the level that was asked for is not there or cannot run here, or none can.
    """
    global LEVEL
    found = importlib.util.find_spec("llama_cpp")
    if LEVEL is not None or found is None or not found.submodule_search_locations or "LLAMA_CPP_LIB_PATH" in os.environ:
        return LEVEL
    LEVEL = load_from(Path(found.submodule_search_locations[0]) / "lib")
    return LEVEL


def load_from(folder: Path) -> str | None:
    """As `load`, of the libraries in a folder."""
    if not (folder / "level").exists():
        return None
    lowest = (folder / "level").read_text().strip()
    able = supported(folder)
    there = [level for level in able if level == lowest or (folder / level / _BACKEND).exists()]
    wanted = os.environ.get(ENVIRONMENT)
    if wanted and wanted not in there:
        raise OptionError(f"{ENVIRONMENT}={wanted}: this machine can run {', '.join(there) or 'none of the levels in this wheel'}")
    if not there:
        raise OptionError(f"this CPU cannot run even the level {lowest}, the lowest in the installed wheel: build moeoff from its repository (make env)")
    level = wanted or there[0]
    if level != lowest:
        ctypes.CDLL(str(folder / level / _BACKEND))
    return level


def supported(folder: Path) -> list[str]:
    """Levels that this CPU and its system can run, the best first."""
    ask = ctypes.CDLL(str(folder / "libmoeoff-level.so")).moeoff_cpu_levels
    ask.restype = ctypes.c_char_p
    levels: bytes = ask()
    return levels.decode().split()
