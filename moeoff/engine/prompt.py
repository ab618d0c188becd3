"""A prompt's text as tokens, within the budget.

llama.cpp's tokenizers take dozens of bytes for each character of a text. What is far longer than the context is therefore found out piece by piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ContextError

if TYPE_CHECKING:
    from .llama import Llama

__all__ = ["prompt_tokens"]

_PIECE = 1 << 15  # characters
_SLACK = 64  # tokens that a cut may add


def prompt_tokens(llm: Llama, text: str, *, add_bos: bool) -> list[int]:
    """Tokens of a text, special ones by their names.

    Raises:
        ContextError: it is longer than the context; of how many tokens is then told of its pieces, each read for itself.
    """
    pieces = range(0, len(text), _PIECE)
    if len(pieces) > 1:
        n = sum(len(_tokens(llm, text[at : at + _PIECE], False)) for at in pieces)
        if n - _SLACK * len(pieces) >= llm.n_ctx():
            raise ContextError(n, llm.n_ctx())
    return _tokens(llm, text, add_bos)


def _tokens(llm: Llama, text: str, add_bos: bool) -> list[int]:
    return llm.tokenize(text.encode("utf-8", "replace"), add_bos=add_bos, special=True)
