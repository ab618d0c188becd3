"""Tables of a benchmark: each row printed as Markdown when it is known, and all of them kept as a data file with --json FILE.

A data file says what was run, where and when, and holds the tables as they were printed:

    {"command": ..., "machine": ..., "date": ..., "tables": [{"name": ..., "title": ..., "columns": [...], "rows": [[...], ...]}, ...]}

scripts/results.py puts the data files of docs/results/data on the pages of docs/results.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from timing import machine

HELP = "Keep the tables as a data file for docs/results."


def command_line() -> str:
    """What was typed, but for --json; of files only the names, since folders differ from machine to machine."""

    def short(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        return name + equals + Path(value).name if os.path.isabs(value) else argument

    typed = sys.argv[1:]
    if "--json" in typed:
        at = typed.index("--json")
        del typed[at : at + 2]
    program = Path(sys.argv[0]).resolve()
    return shlex.join(["python", f"scripts/{program.parent.name}/{program.name}", *map(short, typed)])


def commit() -> str:
    """What is run: the commit, and whether something of it was changed."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


class Table:
    """Rows of text under columns of text."""

    def __init__(self, name: str, title: str, columns: Sequence[str]):
        self.name, self.title, self.columns, self.rows = name, title, list(columns), []
        print(f"\n**{title}**\n\n{_line(self.columns)}\n|---|{'---:|' * (len(self.columns) - 1)}", flush=True)

    def row(self, *cells: str) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.name}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))
        print(_line(cells), flush=True)


class ResultsFile:
    """The tables of one run of a benchmark; a context manager that writes them if nothing was raised.

    Args:
        path: the data file, or None if nothing is to be kept.
    """

    def __init__(self, path: str | Path | None):
        self.path, self.tables = path, []

    def table(self, name: str, title: str, columns: Sequence[str]) -> Table:
        self.tables.append(Table(name, title, columns))
        return self.tables[-1]

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None and self.path:
            head = {"command": command_line(), "machine": machine(), "date": datetime.date.today().isoformat()}
            write(self.path, head | {"tables": [vars(table) for table in self.tables]})


def write(path: str | Path, data: dict) -> None:
    """The data file, with each row on a line of its own: a new measurement then reads well as a diff."""
    say = functools.partial(json.dumps, ensure_ascii=False)
    head = [f"{say(key)}: {say(data[key])}" for key in ("command", "machine", "date")]
    tables = []
    for table in data["tables"]:
        rows = ",\n".join(f"    {say(row)}" for row in table["rows"])
        fields = [f"{say(key)}: {say(table[key])}" for key in ("name", "title", "columns")]
        tables.append("  {" + ",\n   ".join([*fields, f'"rows": [\n{rows}\n   ]']) + "}")
    body = ",\n ".join([*head, '"tables": [\n' + ",\n".join(tables) + "\n ]"])
    Path(path).write_text(f"{{\n {body}\n}}\n", encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
