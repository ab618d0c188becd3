"""The processor: its name, its cores, and the build of llama.cpp's CPU backend for it.

A wheel may contain several backends (scripts/build/wheels.py), a fork built on this
machine contains one. The backend must be loaded before llama.cpp's other libraries,
which link to the loaded one. This module reads the environment variables about kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
from pathlib import Path

from ..errors import OptionError

ENVIRONMENT = "MOEOFF_CPU_LEVEL"
ROW_KERNELS = "MOEOFF_ROW_KERNELS"
_BACKEND = "libggml-cpu.so"

LEVEL: str | None = None  # of the loaded backend; None before, or if there is only one


def load() -> str | None:
    """Load the best CPU backend, or that of MOEOFF_CPU_LEVEL.

    Returns:
        Level of the backend, None if there is only one.

    Raises:
        OptionError: The requested level, or every level, cannot run here.
    """
    global LEVEL
    spec = importlib.util.find_spec("llama_cpp")
    if (
        LEVEL is not None
        or spec is None
        or not spec.submodule_search_locations
        or "LLAMA_CPP_LIB_PATH" in os.environ
    ):
        return LEVEL
    LEVEL = load_from(Path(spec.submodule_search_locations[0]) / "lib")
    return LEVEL


def load_from(folder: Path) -> str | None:
    """Load the best backend in a folder of libraries as `load` does."""
    if not (folder / "level").exists():
        return None
    lowest = (folder / "level").read_text().strip()
    able = supported(folder)
    runnable = [level for level in able if level == lowest or (folder / level / _BACKEND).exists()]
    named = os.environ.get(ENVIRONMENT)
    if named and named not in runnable:
        levels = ", ".join(runnable) or "none of the levels in this wheel"
        raise OptionError(f"{ENVIRONMENT}={named}: this machine can run {levels}")
    if not runnable:
        why = f"this CPU cannot run {lowest}, the lowest level in the installed wheel"
        raise OptionError(f"{why}: build moeoff from its repository (make env)")
    level = named or runnable[0]
    if level != lowest:
        ctypes.CDLL(str(folder / level / _BACKEND))
    return level


@functools.cache
def libraries_digest(folder: Path, level: str | None) -> str:
    """Return a digest of llama.cpp's libraries, and of the CPU backend of a level.

    Args:
        folder: Folder of the libraries. A file over 64 MiB, as a GPU backend, counts by
            its size and time of change.
    """
    whole = hashlib.blake2b(str(level).encode(), digest_size=16)
    for path in sorted([*folder.glob("libggml*"), *folder.glob("libllama.*")]):
        chosen = folder / str(level) / path.name
        path = chosen if chosen.exists() else path
        state = path.stat()
        small = state.st_size <= 64 << 20
        content = path.read_bytes() if small else f"{state.st_size} {state.st_mtime_ns}".encode()
        whole.update(path.name.encode() + content)
    return whole.hexdigest()


def supported(folder: Path) -> list[str]:
    """Return the levels that this CPU and system can run, the best first."""
    ask = ctypes.CDLL(str(folder / "libmoeoff-level.so")).moeoff_cpu_levels
    ask.restype = ctypes.c_char_p
    levels: bytes = ask()
    return levels.decode().split()


def wants_row_kernels() -> bool:
    """Return True unless MOEOFF_ROW_KERNELS is off.

    Row kernels compute four rows at once; without them the same text takes longer.
    Raise OptionError for other values.
    """
    switch = os.environ.get(ROW_KERNELS) or "on"
    if switch not in ("on", "off"):
        raise OptionError(f"{ROW_KERNELS}: expected on or off, got {switch!r}")
    return switch == "on"


def n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_info(key: str) -> str:
    """Return a value of the first core in /proc/cpuinfo ("flags"), empty if unknown."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith(key)), "")
    except OSError:  # not Linux
        return ""


def cpu_name() -> str:
    """Return the system's name of the processor."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def machine_name() -> str:
    """Return cores and processor in words, to which measurements are bound."""
    return f"{n_cores()} cores of {cpu_name()}"
