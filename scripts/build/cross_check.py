"""Compiles the native core for systems that are not at hand, with the headers that zig ships: macOS on both processors, aarch64, an old glibc.

usage: cross_check.py [TARGET...]

Needs `pip install ziglang`. Each file is compiled, not linked; warnings are errors. Windows is a target, too, and says what is missing there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "llamacpp_patches" / "src" / "core"
TARGETS = ("aarch64-macos", "x86_64-macos", "aarch64-linux-gnu.2.28", "x86_64-linux-gnu.2.28")
WINDOWS = "x86_64-windows-gnu"  # refused, and expected to fail


def failures(target: str) -> dict[str, str]:
    """The first error of each file that does not compile."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="moeoff-cross-") as folder:
        for source in sorted(CORE.glob("*.cpp")):
            command = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-c", str(source)]
            done = subprocess.run([*command, "-o", f"{folder}/out.o"], capture_output=True, text=True)
            if done.returncode:
                found[source.name] = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr.strip()[-200:])
    return found


if __name__ == "__main__":
    bad = False
    for target in sys.argv[1:] or TARGETS:
        found = failures(target)
        print(
            f"{target}: {'compiles' if not found else f'{len(found)} files do not compile'}", *(f"  {error}" for error in found.values()), sep="\n", flush=True
        )
        bad |= bool(found)
    sys.exit(bad)
