"""What the scripts of this folder share: the tables' file, one sentence for each error, what a process holds."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "bench"), str(ROOT / "scripts")]

from results_file import HELP, ResultsFile, Table, commit

__all__ = ["DEMO", "HELP", "ROOT", "ResultsFile", "Table", "commit", "is_sentence", "n_descriptors", "n_threads", "rss"]

DEMO = str(ROOT / "moeoff" / "data" / "demo-moe-q8_0.gguf")


def is_sentence(text: str) -> bool:
    """One line, no traceback."""
    return bool(text.strip()) and "\n" not in text.strip() and not re.search(r"Traceback|0x[0-9a-f]{8}", text)


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def rss(pid: int | str = "self", name: str = "VmRSS") -> int:
    """Bytes."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
