"""docs/img/run.svg and inspect.svg: a conversation, and what inspect says, recorded in
a real terminal.

usage: record.py run MODEL [--memory SIZE]        an animation that keeps the session's times
       record.py inspect MODEL [--memory SIZE]    the last screen
"""

from __future__ import annotations

import os
import re
import sys
import time
from html import escape
from pathlib import Path
from typing import NamedTuple

import click
import pexpect
import pyte

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.terminal import READING

COLUMNS, ROWS = 80, 60
# the demo model gets it right
QUESTION = "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?"
TYPING = 0.04  # seconds for a character
END = 4.0  # seconds that the last screen stays
STEP = 0.05  # seconds; what changes within them is one change
CELL, LINE, TOP = 8.4, 18, 22  # pixels of a character, a line, and above the first one
COLOURS = {
    "default": "#e6edf3",
    "brightblack": "#8b949e",
    "green": "#3fb950",
    "cyan": "#56d4dd",
    "blue": "#58a6ff",
    "red": "#ff7b72",
}
DIM = re.compile(r"\x1b\[2m")  # pyte has no dim text

Row = tuple[tuple[str, str, bool], ...]  # of each character: itself, its colour, whether it is bold


class Piece(NamedTuple):
    """Characters of one style that appear at one time and stay until another."""

    row: int
    column: int
    text: str
    colour: str
    bold: bool
    begin: float
    end: float | None


class Recorder:
    """A terminal, and what it showed when."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream, self._started = pyte.Stream(self.screen), time.monotonic()
        self.frames: list[tuple[float, list[Row]]] = []

    def show(self, text: str) -> None:
        """Feed output to the terminal."""
        self._stream.feed(DIM.sub("\x1b[90m", text))
        rows = []
        for y in range(ROWS):
            line = self.screen.buffer[y]
            cells = [(cell.data, cell.fg, cell.bold) for cell in (line[x] for x in range(COLUMNS))]
            while cells and cells[-1][0] == " ":
                cells.pop()
            rows.append(tuple(cells))
        self.frames.append((time.monotonic() - self._started, rows))

    def type_command(self, words: list[str]) -> None:
        """Show a shell's prompt and a command as it is typed."""
        self.show("\x1b[32m$\x1b[0m ")
        for character in " ".join(words):
            time.sleep(TYPING)
            self.show(character)
        self.show("\r\n")

    def run(self, argv: list[str], folder: Path, keys: str = "") -> None:
        """Run a program in a pseudo terminal and, once it reads, type keys into it,
        then Ctrl-D.
        """
        # a pseudo terminal does not answer prompt_toolkit's question where the cursor
        # is
        env = os.environ | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        child = pexpect.spawn(
            argv[0],
            argv[1:],
            cwd=str(folder),
            env=env,
            encoding="utf-8",
            dimensions=(ROWS, COLUMNS),
        )
        seen, lines = "", [keys + "\r", "\x04"] if keys else []
        while True:
            try:
                text = child.read_nonblocking(4096, timeout=600)
            except pexpect.EOF:
                break
            self.show(text)
            seen += text
            if lines and re.search(READING, seen, re.DOTALL):
                seen = ""
                time.sleep(0.5)
                for key in lines.pop(0):
                    child.send(key)
                    time.sleep(TYPING)
        child.close()
        if child.exitstatus:
            raise click.ClickException(f"{argv[0]} ended with {child.exitstatus}: {seen[-2000:]}")


def pieces(frames: list[tuple[float, list[Row]]]) -> list[Piece]:
    """Return what has to be drawn: of a line that grows, only what is added."""
    out = []
    for y in range(ROWS):
        versions: list[tuple[float, Row]] = []
        for at, rows in frames:
            at = round(at / STEP) * STEP
            if versions and versions[-1][0] == at:
                versions[-1] = (at, rows[y])
            elif not versions or versions[-1][1] != rows[y]:
                versions.append((at, rows[y]))
        for i, (begin, row) in enumerate(versions):
            before = versions[i - 1][1] if i else ()
            start = len(before) if row[: len(before)] == before else 0
            later = versions[i + 1 :]
            end = next((at for at, other in later if other[: len(row)] != row), None)
            if row and (start == 0 or start < len(row)):
                out += _runs(y, start, row, begin, end)
    return out


def _runs(y: int, start: int, row: Row, begin: float, end: float | None) -> list[Piece]:
    """Split a part of a line by style."""
    out, x = [], start
    while x < len(row):
        stop = x
        while stop < len(row) and row[stop][1:] == row[x][1:]:
            stop += 1
        text = "".join(cell[0] for cell in row[x:stop])
        if text.strip():
            left = len(text) - len(text.lstrip())
            out.append(Piece(y, x + left, text.strip(), row[x][1], row[x][2], begin, end))
        x = stop
    return out


def draw(frames: list[tuple[float, list[Row]]], title: str) -> str:
    """Return an SVG. A viewer without animations shows the last screen."""
    parts = pieces(frames)
    height = max(piece.row for piece in parts if piece.end is None or piece.end > frames[0][0]) + 1
    width, length = round(COLUMNS * CELL) + 24, frames[-1][0] + END
    size = (
        f'width="{width}" height="{TOP + height * LINE}" viewBox="0 0 {width}'
        f' {TOP + height * LINE}"'
    )
    font = (
        'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"'
        ' font-size="14"'
    )
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}'
            f' fill="{COLOURS["default"]}" xml:space="preserve">'
        ),
        f'<title>{escape(title)}</title><rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
    ]
    if len(frames) > 1:  # what all times are relative to, again and again
        out.append(
            f'<rect width="0" height="0"><animate id="a" attributeName="x" dur="{length:.2f}s"'
            ' begin="0s;a.end" to="0"/></rect>'
        )
    for piece in parts:
        style = (
            f' fill="{COLOURS.get(piece.colour, COLOURS["default"])}"'
            if piece.colour != "default"
            else ""
        )
        style += ' font-weight="bold"' if piece.bold else ""
        style += f' textLength="{len(piece.text) * CELL:.0f}"' if len(piece.text) > 1 else ""
        moves = ""
        if piece.end is not None:
            style += ' visibility="hidden"'
            moves = (
                f'<set attributeName="visibility" to="visible" begin="a.begin+{piece.begin:.2f}s"'
                f' dur="{piece.end - piece.begin:.2f}s"/>'
            )
        elif piece.begin > frames[0][0] and len(frames) > 1:
            moves = (
                '<set attributeName="visibility" to="hidden" begin="a.begin"'
                f' dur="{piece.begin:.2f}s"/>'
            )
        x, y = 12 + piece.column * CELL, TOP + piece.row * LINE
        out.append(f'<text x="{x:.0f}" y="{y}"{style}>{escape(piece.text)}{moves}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


@click.command()
@click.argument("what", type=click.Choice(["run", "inspect"]))
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--memory", metavar="SIZE", default="700M", show_default=True)
def main(what: str, model: Path, memory: str) -> None:
    """Record a session and draw it."""
    words = ["moeoff", what, model.name, "--memory", memory]
    typed, keys = ([*words, "--temp", "0"], QUESTION) if what == "run" else (words, "")
    recorder = Recorder()
    recorder.type_command(typed)
    recorder.run(
        [str(Path(sys.executable).with_name("moeoff")), *typed[1:]], model.absolute().parent, keys
    )
    frames = recorder.frames if what == "run" else recorder.frames[-1:]
    path = ROOT / "docs" / "img" / f"{what}.svg"
    path.write_text(draw(frames, f"A terminal: {' '.join(words)}"), encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1000:.1f} kB, {recorder.frames[-1][0]:.1f} s")


if __name__ == "__main__":
    main()
