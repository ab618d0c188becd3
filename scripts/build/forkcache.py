"""The fork's cache: where it is, who may write to it, and the keys under which builds are found again.

A key names everything that a build depends on; an input that is missing here would let a stale build be used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from forktree import Fork, ForkError, digest, say

# Before the user's CMAKE_ARGS, which may override them.
DEFAULT_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON")
# After them: the expert buffer lives in the CPU backend, which therefore has to be linked in; the rest is never used.
FIXED_FLAGS = ("-DGGML_BACKEND_DL=OFF", "-DLLAVA_BUILD=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_TESTS_INSTALL=OFF")
COMPILERS = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CUDAARCHS", "HIPCXX")


def cache_root() -> Path:
    """$MOEOFF_CACHE, else $XDG_CACHE_HOME/moeoff, else ~/.cache/moeoff; created, with links resolved."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("MOEOFF_CACHE") or Path(base) / "moeoff")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForkError(f"{root} cannot be made ({error.strerror}): set MOEOFF_CACHE to a writable folder.") from None
    return root.resolve()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Holds an exclusive lock; yields its descriptor, with which a child can keep it if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build is running (lock {path}); waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def compiler(variable: str, names: tuple[str, ...]) -> str:
    """The compiler that CMake will choose, and its version."""
    command = shlex.split(os.environ.get(variable, "")) or [name for name in names if shutil.which(name)][:1]
    if not command or not shutil.which(command[0]):
        wanted = command[0] if command else " or ".join(names)
        raise ForkError(f"No compiler found ({wanted}): install a C and C++ compiler, or name them in CC and CXX.")
    done = subprocess.run([*command, "--version"], text=True, capture_output=True)
    return f"{shlex.join(command)} {done.stdout.partition(chr(10))[0]}"


def cpu_flags() -> str:
    """What -march=native would see."""
    if "-DGGML_NATIVE=OFF" in os.environ.get("CMAKE_ARGS", ""):
        return platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            lines = {line for line in cpuinfo if re.match(r"flags|Features|model name|CPU part", line)}
        return "".join(sorted(lines))
    except OSError:
        return platform.processor() + platform.machine() + platform.version()


def place_key(fork: Fork) -> str:
    """Key of the folder that is compiled in: everything but patches and sources."""
    compilers = compiler("CC", ("cc", "gcc", "clang")) + compiler("CXX", ("c++", "g++", "clang++"))
    settings = [f"{name}={os.environ.get(name, '')}" for name in COMPILERS]
    parts = (fork.sha256, *flags(tests=True), *settings, compilers, cpu_flags(), sys.platform)
    return digest(*(part.encode() for part in parts))[:16]


def full_key(fork: Fork, page: Path | None = None) -> str:
    """Key of what is made from all of it; `page` is the web page's folder, which has its own key as its name."""
    return digest(place_key(fork).encode(), fork.digest().encode(), page.name.encode() if page else b"")[:16]


def flags(tests: bool) -> list[str]:
    """CMake's arguments, all of them each time: the wheel and the tests take turns in one build folder."""
    switch = "ON" if tests else "OFF"
    # the server needs common and tools, of which only what is asked for is compiled
    wanted = ["-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON", f"-DLLAMA_BUILD_TESTS={switch}"]
    return [*DEFAULT_FLAGS, *shlex.split(os.environ.get("CMAKE_ARGS", "")), *FIXED_FLAGS, *wanted]
