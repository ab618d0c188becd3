#!/usr/bin/env python3
"""The fork's wheel with CUDA, made on any x86-64 Linux: without a GPU, a driver or an
installed toolkit.

usage: cuda.py [-o dist/cuda] [--arch 90] [--arch 89 ...]

The toolkit is put together from NVIDIA's wheels, which pip downloads: compiler,
headers, runtime, cuBLAS, of CUDA 13.0, which drivers from 580 on run. It lies in the
cache (fork.py), in cuda/, as do source tree and objects of this build; one that was
interrupted goes on from its last object. There are 141 sources of kernels.
CMAKE_BUILD_PARALLEL_LEVEL bounds how many are compiled at a time.

What differs from llama.cpp's own CUDA build, and why:

- GGML_CUDA_NO_VMM: without it the library needs the driver's libcuda.so.1 to be loaded
  at all. So the wheel imports on a machine without a driver, finds no device there and
  computes on the CPU. It costs the growing pool of work memory, in whose place freed
  pieces are kept and used again.
- GGML_CUDA_FA_QUANTS=f16-f16: flash attention's vector kernels for the usual KV cache
  only; another one is converted first, which is slower.
- GGML_CUDA_NCCL=OFF: no library for several GPUs is looked for on the machine that
  compiles.

cuBLAS has 590 MB and is not in the wheel: pip installs it with it (nvidia-cublas,
nvidia-cuda-runtime), and the library looks for it there.

Progress goes to stderr; stdout has the path of the finished wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path

import fork as tool
from fork import Fork, ForkError, digest
from wheels import Outside, fork_wheel, run

SMALL_CUBLAS = tool.ROOT / "scripts/bench/small_cublas.cu"
# code for sm_90, and what drivers translate for all others
COMPILED = ("-O3", "-std=c++17", "-shared", "-cudart=shared", "-Xcompiler=-fPIC", "-diag-suppress=20011", "-Xlinker=-soname=libcublas.so.13",
            "-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_75,code=compute_75")  # fmt: skip
# What is needed to run is installed with the wheel, too.
TO_RUN = ("nvidia-cuda-runtime==13.0.96", "nvidia-cublas==13.0.2.14")
TOOLKIT = (
    *TO_RUN,
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
)
INSTALLED = "nvidia/cu13"  # the folder of each of these wheels, in site-packages
OUTSIDE = Outside(
    ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"),
    f"{INSTALLED}/lib",
    TO_RUN,
    "libggml-cuda.so",
)


def toolkit(cache: Path) -> Path:
    """CUDAToolkit_ROOT, from the cache or put together there."""
    home = cache / f"toolkit-{digest(*(name.encode() for name in TOOLKIT))[:8]}"
    root = home / INSTALLED
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        with tool.locked(cache / "lock") as lock:
            command = [
                str(tool.tool_environment(cache, lock).python),
                "-m",
                "pip",
                "install",
                "--no-deps",
                "--no-compile",
                "--target",
                str(home),
                *TOOLKIT,
            ]
            tool.run_logged(
                "fetching the CUDA toolkit (500 MB)", command, cache / "toolkit.log", lock
            )
        (root / "lib64").symlink_to("lib")
        # the linker's names, which wheels lack
        for library in sorted((root / "lib").glob("*.so.*")):
            (root / "lib" / f"{library.name.partition('.so')[0]}.so").symlink_to(library.name)
        (home / "ready").touch()
    return root


def settings(root: Path, architectures: list[str]) -> list[str]:
    """CMake's arguments, with machine code for each architecture and none that a driver
    translates for another one.
    """
    if wrong := [name for name in architectures if not name.rstrip("af").isdigit()]:
        raise ForkError(
            f"--arch {wrong[0]}: expected a compute capability without its dot, as 90 for sm_90."
        )
    return [
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={root / 'bin/nvcc'}",
        f"-DCUDAToolkit_ROOT={root}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{name}-real' for name in architectures)}",
        "-DGGML_CUDA_NO_VMM=ON",
        "-DGGML_CUDA_FA_QUANTS=f16-f16",
        "-DGGML_CUDA_NCCL=OFF",
        "-DGGML_NATIVE=OFF",  # the wheel has a CPU backend for each level of CPU
    ]


def for_trial() -> list[Path]:
    """Return the libraries that a trial uses instead of the wheel's requirements: the
    runtime, and small_cublas.cu, compiled. The requirements are ten times too large.
    """
    cache = cuda_cache()
    root = toolkit(cache)
    out = (
        cache
        / "small_cublas"
        / digest(SMALL_CUBLAS.read_bytes(), *(word.encode() for word in COMPILED))[:16]
        / "libcublas.so.13"
    )
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        names = out.parent / "names.map"  # the version that libggml-cuda.so asks cuBLAS for
        names.write_text(f"{out.name} {{ global: cublas*; local: *; }};\n")
        run(
            [
                root / "bin/nvcc",
                *COMPILED,
                f"-Xlinker=--version-script={names}",
                SMALL_CUBLAS,
                "-o",
                part := out.with_suffix(".part"),
            ]
        )
        os.replace(part, out)
    return [out, root / "lib/libcudart.so.13"]


def cuda_cache() -> Path:
    """A folder of its own in the cache, so that hours of compiling lock no other build;
    release, tools and page are the other builds'.
    """
    base = tool.cache_root()
    fork = Fork.load()
    tool.pinned_sdist(fork, base)
    tool.optional_page(fork, base)
    cache = base / "cuda"
    cache.mkdir(exist_ok=True)
    for name in ("sdist", "webpage"):
        if (base / name).exists() and not (cache / name).exists():
            (cache / name).symlink_to(Path("..", name))
    return cache


@tool.ends_in_words
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=tool.ROOT / "dist/cuda",
        help="folder of the finished wheel (default: dist/cuda, as its name is the other wheel's)",
    )
    parser.add_argument(
        "--arch",
        action="append",
        help=(
            "compute capability, as 90 for sm_90; several of them make the library larger"
            " (default: 90)"
        ),
    )
    options = parser.parse_args(arguments)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ForkError("the toolkit's wheels are taken for Linux on x86-64 alone.")
    cache = cuda_cache()
    root = toolkit(cache)
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["CMAKE_ARGS"] = shlex.join(
        [*settings(root, options.arch or ["90"]), *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    )
    print(fork_wheel(Fork.load(), cache, platform.machine(), "", options.output, OUTSIDE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
