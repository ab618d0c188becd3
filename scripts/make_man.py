"""Writes man pages from the program's own help, one for moeoff and one for each of its commands.

usage: make_man.py FOLDER

Needs click-man, which the extra `docs` brings. wheels.py puts the pages into moeoff's wheel, where `man` finds them if the environment's bin is on PATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

from click_man.core import write_man_pages

import moeoff
from moeoff.cli.main import main


def write(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    write_man_pages("moeoff", main, version=moeoff.__version__, target_dir=str(folder))
    return sorted(folder.glob("*.1"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*write(Path(sys.argv[1])), sep="\n")
