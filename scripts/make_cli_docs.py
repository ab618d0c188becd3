"""Writes docs/reference/cli.md from the program's own help. tests/test_docs.py checks that it is up to date.

usage: make_cli_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from moeoff.cli.main import main

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"


def page() -> str:
    parts = ["# The command line\n\nMade by `python scripts/make_cli_docs.py` from `--help`.\n"]
    # as the program makes them: a context made by hand would leave out the commands' settings, -h among them
    width = {"max_content_width": 100, "terminal_width": 100, "resilient_parsing": True}
    top = main.make_context("moeoff", [], **width)
    parts.append(f"```\n{main.get_help(top)}\n```\n")
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        context = command.make_context(name, [], parent=top, **width)
        parts.append(f"## moeoff {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is out of date: run {__file__}")
    PAGE.write_text(page())
