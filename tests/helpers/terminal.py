"""Programs in a real terminal: a `moeoff run` driven by a program, for the chat's
tests; and bars.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pexpect
import pexpect.fdpexpect

from helpers.files import COMMAND

# prompt_toolkit switches bracketed paste on when it begins to read and off when it has
# a line; redraws do neither
READING = r"\x1b\[\?2004h.*?>>>.*?\x1b\[\?25h"
ENTERED = r"\x1b\[\?2004l"
STATS = r"prompt \d+ tokens.*?\| memory [^\n\x1b]*"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r|\x07")


def plain(text: str) -> str:
    """Without the escape sequences."""
    return _ESCAPES.sub("", text)


def start_with_bars(
    command: list[str], **kwargs
) -> tuple[subprocess.Popen, pexpect.fdpexpect.fdspawn]:
    """A program whose standard error is a terminal, and what reads there: its progress
    bars say how far it has come.
    """
    ours, theirs = os.openpty()
    process = subprocess.Popen(command, stderr=theirs, text=True, **kwargs)
    os.close(theirs)
    return process, pexpect.fdpexpect.fdspawn(ours, encoding="utf-8", timeout=300)


class Terminal:
    """A chat on a pseudo terminal. Keys go in with `say` and `press`; `read_to` waits
    for what comes out.
    """

    def __init__(self, *args: str, cache: Path, columns: int = 160, timeout: float = 300):
        # a pseudo terminal does not answer prompt_toolkit's question where the cursor
        # is
        env = os.environ | {
            "XDG_CACHE_HOME": str(cache),
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        self.child = pexpect.spawn(
            COMMAND,
            ["run", *args],
            env=env,
            encoding="utf-8",
            dimensions=(50, columns),
            timeout=timeout,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exc) -> None:
        if self.child.isalive():  # pexpect gives a killed process a tenth of a second to be gone
            self.child.kill(signal.SIGKILL)
            self.child.wait()
        self.child.close()

    def read_to(self, pattern: str) -> str:
        """Everything up to the end of what matches, without escape sequences."""
        self.child.expect(pattern)
        return plain(self.child.before + self.child.after)

    def ready(self) -> str:
        """Everything up to the next prompt."""
        return self.read_to(READING)

    def say(self, text: str) -> None:
        """Types a line, which has been taken when this returns; the answer is yet to be
        read.
        """
        self.child.send(text + "\r")
        self.child.expect(ENTERED)

    def ask(self, text: str) -> str:
        """Types a line and reads what comes before the next prompt."""
        self.say(text)
        return self.ready()

    def leave(self) -> int:
        """Ctrl-D; the exit code."""
        self.child.send("\x04")
        return self.ended()

    def ended(self) -> int:
        """Waits for the program to end; the exit code."""
        self.child.expect(pexpect.EOF)
        self.child.wait()
        return self.child.exitstatus
