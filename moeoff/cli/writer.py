"""Streaming of an answer to standard output, wrapped at words on a terminal."""

from __future__ import annotations

import re
import shutil
import sys

_DIMMED, _PLAIN, _BACK = "\x1b[2m", "\x1b[0m", "\x1b[{}D\x1b[K"
_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class Writer:
    """A writer of an answer. Thoughts are dimmed on a terminal, else omitted.

    Args:
        strips: True to format a chat's answer: leading blanks are removed.
    """

    def __init__(self, strips: bool = True):
        self._strips = strips
        self._terminal = strips and sys.stdout.isatty()
        self._begun = self._newline = self._code = self._thinks = False
        self._line = self._word = ""
        self._column = 0

    def write(self, text: str, is_thought: bool = False) -> None:
        if is_thought and not self._terminal:
            return
        if is_thought != self._thinks:
            self._end_thought()
            sys.stdout.write(_DIMMED if is_thought else "")
            self._begun, self._thinks = False, is_thought
        if self._strips and not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            self._newline = text.endswith("\n")
            if self._terminal:
                for part in _PARTS.findall(text):
                    self._write_part(part)
            else:
                sys.stdout.write(text)
            sys.stdout.flush()

    def _end_thought(self) -> None:
        if self._thinks:
            sys.stdout.write(_PLAIN + ("" if self._newline else "\n") + "\n")
            self._line, self._word, self._column, self._code = "", "", 0, False

    def _write_part(self, part: str) -> None:
        """Write a line end, blanks, or a word or part of a word."""
        from rich.cells import cell_len  # slow to import, and not needed for a pipe

        width, columns = cell_len(part), shutil.get_terminal_size().columns
        if part == "\n":
            self._code ^= self._line.lstrip().startswith("```")
            self._line, self._word, self._column = "", "", 0
        elif part.isspace():
            self._word = ""
        else:
            before = cell_len(self._word)
            if not self._code and self._column + width > columns and before < self._column:
                sys.stdout.write((_BACK.format(before) if before else "") + "\n" + self._word)
                self._column = before
            self._word += part
        self._line += part
        if part != "\n":
            self._column += width
        sys.stdout.write(part)

    def end(self) -> None:
        if self._terminal:
            sys.stdout.write(_PLAIN)
        if not (self._terminal and (self._newline or not self._begun)):
            sys.stdout.write("\n")
        sys.stdout.flush()
