"""Row kernels against ggml's vec_dot for every processor and compiler that can be had here: how many products have other bits, or how fast they are.

usage: fuzz_row_kernels.py [--products N | --speed] [--only TEXT] [--json FILE]

Each variant is compiled and run by scripts/build/fuzz_row_kernels.sh, which says what it compares. Instructions that this processor lacks are compiled,
and not run; ARM's are emulated by QEMU, if that and a cross compiler are installed. Compilers that are not here are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import HELP, ROOT, ResultsFile

AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
EMULATOR = next((name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)), "")
LINE = re.compile(r"(?P<type>\w+) +(?P<refused>refused; )?(?P<differ>\d+) of (?P<done>\d+) differ, (?P<numberless>\d+) are no numbers")


@dataclass(frozen=True)
class Variant:
    """Instructions for which the kernels are compiled, and what a processor that runs them has in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    is_arm: bool = False

    def runner(self, flags: set[str]) -> str | None:
        """The program that runs it, nothing if it runs by itself; None: it cannot be run here."""
        if self.is_arm:
            return f"{EMULATOR} -cpu max" if EMULATOR else None
        return "" if flags >= set(self.needs) else None


VARIANTS = (
    Variant("AVX-512, VNNI", ("-march=x86-64-v4", "-mavx512vnni"), ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")),
    Variant("AVX2", AVX2, ("avx2", "fma", "f16c", "bmi2")),
    Variant("AVX2, AVX-VNNI", (*AVX2, "-mavxvnni"), ("avx2", "fma", "f16c", "bmi2", "avx_vnni")),
    Variant("NEON, dot products", ("-march=armv8.2-a+dotprod+fp16",), (), True),
    Variant("NEON, dot products, i8mm", ("-march=armv8.2-a+dotprod+i8mm+fp16",), (), True),
)
COMPILERS = (("gcc", "g++"), ("clang", "clang++"), ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++"))


def processor_flags() -> set[str]:
    with open("/proc/cpuinfo") as file:
        return set(next((line.split(":")[1].split() for line in file if line.startswith("flags")), []))


def version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def short_name(compiler: str) -> str:
    found = re.search(r"(\d+\.\d+)", version(compiler))
    return f"{compiler} {found[1]}" if found else compiler


def output(variant: Variant, compilers: tuple[str, str], run: str, what: str, tree: Path) -> list[str]:
    """The program's lines, of each type one; none where `run` is `true`."""
    command = ["bash", str(ROOT / "scripts" / "build" / "fuzz_row_kernels.sh"), what, *variant.flags]
    environment = os.environ | dict(zip(("CC", "CXX"), compilers, strict=True)) | {"RUN": run, "TREE": str(tree)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and not done.stdout:  # else something differs, which the lines say
        sys.exit(f"{variant.name}, {compilers[0]}: {done.stderr[-3000:]}")
    return done.stdout.splitlines()


def compare(results: ResultsFile, variants: Iterable[tuple[Variant, tuple[str, str]]], n_products: int, tree: Path) -> None:
    columns = ["instructions", "compiler", "kernels of types", "run", "products", "of which no numbers", "refused", "differ"]
    table = results.table("fuzz", "Products by row kernels against vec_dot's", columns)
    for variant, compilers in variants:
        runner = variant.runner(processor_flags())
        lines = output(variant, compilers, "true" if runner is None else runner, str(n_products), tree)
        found = [match.groupdict() for match in map(LINE.match, lines) if match]
        how = "compiled only" if runner is None else "emulated" if runner else "here"
        total = {key: sum(int(each[key]) for each in found) for key in ("done", "numberless", "differ")}
        cells = [f"{total['done']:,}", f"{total['numberless']:,}", str(sum(bool(each["refused"]) for each in found)), str(total["differ"])]
        types = ", ".join(each["type"].upper() for each in found)
        table.row(variant.name, short_name(compilers[0]), types or "-", how, *(cells if found else ["-"] * 4))


def measure(results: ResultsFile, variants: Iterable[tuple[Variant, tuple[str, str]]], tree: Path) -> None:
    """In weights times numbers a nanosecond, one thread."""
    kinds = ("in a cache", "in memory", "64 columns")
    columns = ["instructions", "compiler", "type", *(f"{kind}: {what}" for kind in kinds for what in ("vec_dot", "ours", "gain"))]
    table = results.table(
        "speed", "Weights multiplied in a nanosecond by one thread: 512 rows of 2048 weights, 65,536 rows, and 512 rows by 64 columns", columns
    )
    for variant, compilers in variants:
        if variant.runner(processor_flags()) == "":
            for name, *speeds in map(str.split, output(variant, compilers, "", "speed", tree)):
                pairs = list(zip(speeds[::2], speeds[1::2], strict=True))
                table.row(variant.name, short_name(compilers[0]), name.upper(), *(cell for a, b in pairs for cell in (a, b, f"{float(b) / float(a):.2f} x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, default=100_000, help="of each type and variant")
    parser.add_argument("--speed", action="store_true", help="measure, on an idle machine")
    parser.add_argument("--only", default="", help="variants with this in their name")
    parser.add_argument("--json", help=HELP)
    options = parser.parse_args()
    compilers = [pair for pair in COMPILERS if shutil.which(pair[1])]
    chosen = [(each, pair) for each in VARIANTS if options.only in each.name for pair in compilers if each.is_arm == pair[0].startswith("aarch64")]
    with tempfile.TemporaryDirectory() as folder, ResultsFile(options.json) as results:
        tree = Path(folder) / "tree"
        subprocess.run([sys.executable, str(ROOT / "scripts" / "build" / "fork.py"), "tree", str(tree)], check=True, stdout=subprocess.DEVNULL)
        if options.speed:
            measure(results, chosen, tree)
        else:
            compare(results, chosen, options.products, tree)


if __name__ == "__main__":
    main()
