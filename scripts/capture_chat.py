"""Writes docs/guides/chat.txt: a short chat with the demo model in a real terminal, what was typed and what came out.

python scripts/capture_chat.py [-o docs/guides/chat.txt]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.terminal import Terminal

ARGS = ["--memory", "100M", "--temp", "0", "-n", "48", "-c", "512"]
LINES = [
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "And how many in June?",
    "/memory 120M",
    "/stats",
    "/reset",
    "/exit",
]


def capture() -> str:
    with tempfile.TemporaryDirectory() as cache, Terminal(*ARGS, cache=Path(cache)) as terminal:
        parts = [f"$ moeoff run {' '.join(ARGS)}\n", terminal.ready()]
        for line in LINES[:-1]:
            parts += [" ", line, "\n", terminal.ask(line).lstrip("\n")]
        terminal.say(LINES[-1])
        if terminal.ended() != 0:
            raise SystemExit("the chat did not end well")
    return "".join(parts) + f" {LINES[-1]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "guides" / "chat.txt")
    output = parser.parse_args().output
    output.write_text(capture())
    print(output)


if __name__ == "__main__":
    main()
