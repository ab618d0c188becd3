"""The processor: its name, the cores this process may use, the build of llama.cpp's CPU backend it takes where the installed wheel brings several
(scripts/build/wheels.py), and whether row kernels are used. The environment's wishes about kernels are read here.

A library that is loaded already serves everyone who names it, so the chosen backend has to be loaded before the rest. A fork that was built on this
machine has one backend, and nothing is done.
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

LEVEL: str | None = None  # that was loaded; None: there is one build, or nothing was loaded yet


def load() -> str | None:
    """Loads the best backend for this CPU, or the one that MOEOFF_CPU_LEVEL names; returns its level, None where there is nothing to choose.

    Raises:
        OptionError: the level that was asked for is not there or cannot run here, or none can.
    """
    global LEVEL
    spec = importlib.util.find_spec("llama_cpp")
    if LEVEL is not None or spec is None or not spec.submodule_search_locations or "LLAMA_CPP_LIB_PATH" in os.environ:
        return LEVEL
    LEVEL = load_from(Path(spec.submodule_search_locations[0]) / "lib")
    return LEVEL


def load_from(folder: Path) -> str | None:
    """Loads the best backend out of a folder of libraries, as `load`."""
    if not (folder / "level").exists():
        return None
    lowest = (folder / "level").read_text().strip()
    able = supported(folder)
    runnable = [level for level in able if level == lowest or (folder / level / _BACKEND).exists()]
    named = os.environ.get(ENVIRONMENT)
    if named and named not in runnable:
        raise OptionError(f"{ENVIRONMENT}={named}: this machine can run {', '.join(runnable) or 'none of the levels in this wheel'}")
    if not runnable:
        raise OptionError(f"this CPU cannot run even the level {lowest}, the lowest in the installed wheel: build moeoff from its repository (make env)")
    level = named or runnable[0]
    if level != lowest:
        ctypes.CDLL(str(folder / level / _BACKEND))
    return level


@functools.cache
def libraries_digest(folder: Path) -> str:
    """Return a digest of llama.cpp's libraries, and of the CPU backend that was chosen.

    Args:
        folder: Folder of the libraries. A file over 64 MiB, as a GPU backend, counts by its size and time of change.
    """
    whole = hashlib.blake2b(str(LEVEL).encode(), digest_size=16)
    for path in sorted([*folder.glob("libggml*"), *folder.glob("libllama.*")]):
        chosen = folder / str(LEVEL) / path.name
        path = chosen if chosen.exists() else path
        state = path.stat()
        small = state.st_size <= 64 << 20
        content = path.read_bytes() if small else f"{state.st_size} {state.st_mtime_ns}".encode()
        whole.update(path.name.encode() + content)
    return whole.hexdigest()


def supported(folder: Path) -> list[str]:
    """Levels that this CPU and its system can run, the best first."""
    ask = ctypes.CDLL(str(folder / "libmoeoff-level.so")).moeoff_cpu_levels
    ask.restype = ctypes.c_char_p
    levels: bytes = ask()
    return levels.decode().split()


def wants_row_kernels() -> bool:
    """True if products are to be computed by our kernels of four rows, as they are unless MOEOFF_ROW_KERNELS is off: slower then, the text is the same.

    Raises:
        OptionError: it is neither on nor off.
    """
    switch = os.environ.get(ROW_KERNELS) or "on"
    if switch not in ("on", "off"):
        raise OptionError(f"{ROW_KERNELS}={switch}: expected on or off")
    return switch == "on"


def n_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cpu_info(key: str) -> str:
    """What /proc/cpuinfo says of the first core: "model name", "flags"; empty: nothing."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith(key)), "")
    except OSError:  # not Linux
        return ""


def cpu_name() -> str:
    """The processor, as the system calls it."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def machine_name() -> str:
    """Cores and processor in words: what is measured on one machine is not true on another."""
    return f"{n_cores()} cores of {cpu_name()}"
