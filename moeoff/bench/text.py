"""The tokens that a measurement feeds: real text, the same for every engine and setting, so that all see the same routing."""

from __future__ import annotations

import os
from typing import Protocol

from ..errors import OptionError, Remedy

_CHUNK = 1 << 16  # characters that are tokenized at once


class Tokenizer(Protocol):
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]: ...

    def token_bos(self) -> int: ...


def usual_text() -> str:
    """Half a million characters of English prose about Python, with code in it, which every Python brings along: the help of its `help()`.

    Raises:
        OptionError: this Python has been stripped of it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise OptionError("this Python comes without its help texts, which are fed by default", Remedy.GIVE_TEXT) from None
    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: str | os.PathLike[str] | None) -> str:
    """Of a file, or the usual one.

    Raises:
        OptionError: it cannot be read, or is empty.
    """
    if path is None:
        return usual_text()
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise OptionError(f"{os.fspath(path)}: holds no text")
    return text


class TokenStream:
    """Pieces of a text, one behind the other and from its beginning again where it ends.

    Args:
        adds_bos: each piece that begins a context begins with the token that the model wants there.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, adds_bos: bool):
        self._tokenizer, self._text = tokenizer, text
        self._bos = tokenizer.token_bos() if adds_bos else None
        self._tokens: list[int] = []
        self._at = 0

    def take(self, n: int, first: bool = False) -> list[int]:
        """The next n tokens.

        Args:
            first: they begin a context.
        """
        while len(self._tokens) < n:
            piece = self._text[self._at : self._at + _CHUNK]
            self._at = self._at + _CHUNK if self._at + _CHUNK < len(self._text) else 0
            self._tokens += self._tokenizer.tokenize(piece.encode("utf-8", "replace"), add_bos=False)
        out, self._tokens = self._tokens[:n], self._tokens[n:]
        if first and self._bos is not None and out:
            out[0] = self._bos
        return out
