"""Where the files are that tests use, and one flipped bit in a copy of one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "moeoff" / "data" / "demo-moe-q8_0.gguf"
SMALL_TRACE = ROOT / "tests" / "data" / "small.trace"
# words and code of this project as they once were: what is measured on them must not
# change with the docs
PROSE, MORE_PROSE, CODE = (
    ROOT / "tests" / "data" / name for name in ("prose.txt", "prose-2.txt", "code.txt")
)
COMMAND = str(Path(sys.executable).with_name("moeoff"))  # as it is installed
CALIBRATION_TEXTS = [str(PROSE), str(CODE)]


def flip_bit(path: str | Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Take away the right to write to a folder.

    Root may write anywhere: its real user ID, by which `os.access` decides, is another
    user's meanwhile.
    """
    user = os.getuid()
    folder.chmod(0o555)
    if user == 0:
        os.setreuid(65534, -1)
    try:
        yield
    finally:
        os.setreuid(user, -1)
        folder.chmod(0o755)
