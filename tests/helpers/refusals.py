"""The table of what is refused, tests/data/refusals.txt: the only place where tests have
the sentences of errors that several options, commands or files share.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from helpers.files import ROOT
from moeoff.errors import MoeoffError
from moeoff.precision import Precision

TABLE = (ROOT / "tests" / "data" / "refusals.txt").read_text(encoding="utf-8")


def refusals(section: str) -> list:
    """Return a section's rows as parameters of a test: given, code, words."""
    lines = TABLE.split(f"\n[{section}]\n")[1].split("\n\n[")[0].rstrip("\n").split("\n")
    return [
        pytest.param(given, *below.strip("\n")[2:].split(": ", 1), id=given[:60])
        for given, below in zip(lines[::2], lines[1::2], strict=True)
    ]


def parse_options(given: str) -> dict:
    """Return the options that a row gives."""
    return eval(given, {"nan": float("nan"), "inf": float("inf"), "Precision": Precision})


def has_words(text: str, words: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, words.split("..."))), text, re.DOTALL))


@contextlib.contextmanager
def refused(code: str, words: str) -> Iterator[None]:
    """Check that an exception of this class is raised, whose one printable line has the
    words.
    """
    with pytest.raises(MoeoffError) as caught:
        yield
    text = str(caught.value)
    assert type(caught.value).__name__ == code and has_words(text, words), repr(caught.value)
    assert text.isprintable() and len(text) < 2100, text
