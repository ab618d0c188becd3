"""Going on when the context is full: the oldest half of what need not be kept is forgotten, as llama.cpp's programs do it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from ..binding import PatchedLlama
from ..errors import MoeoffError, OptionError

__all__ = ["ContextShift"]

_ROOM = 4  # tokens that are never kept, so that each shift makes some room

Generate = Callable[..., Generator[int, Sequence[int] | None, None]]


class ContextShift:
    """Args:
    llm: a loaded model.
    n_keep: tokens of a prompt, beside the token that begins a text, that stay; -1: all of them.

    Attributes:
        n_discarded: tokens forgotten since the last prompt.

    Raises:
        OptionError: the model's memory cannot forget a part of a text and move the rest.
    """

    def __init__(self, llm: PatchedLlama, n_keep: int = 0):
        if not llm.can_shift:
            raise OptionError(
                "context_shift: this model's memory cannot forget a part of a text and move the rest, as recurrent layers, sliding windows "
                "with a cache of their own and positions in several dimensions cannot"
            )
        self._llm, self._n_keep = llm, n_keep
        self.n_discarded = 0

    def generate(self, generate: Generate, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """`generate` without an end of its own.

        Raises:
            ValueError: the prompt alone fills the context.
        """
        llm, n_ctx = self._llm, self._llm.n_ctx()
        if len(tokens) >= n_ctx:
            raise ValueError(f"Requested tokens ({len(tokens)}) exceed context window of {n_ctx}")  # llama_cpp's words, which its server looks for
        n_keep = len(tokens) if self._n_keep < 0 else self._n_keep + llm.adds_bos()
        n_keep = min(n_keep, len(tokens), n_ctx - _ROOM)
        self.n_discarded = 0
        tokens = list(tokens)
        answer = generate(tokens, *args, **kwargs)
        try:
            while True:
                for token in answer:
                    yield token
                    if llm.n_tokens + 1 >= n_ctx:
                        break
                else:
                    return
                answer.close()
                self._shift(n_keep)
                with llm.same_sampler():
                    answer = generate([*llm.input_ids[: llm.n_tokens].tolist(), token], *args, **kwargs)
                    first = next(answer, None)  # takes its sampler
                if first is None:
                    return
                yield first
                # `for` goes on behind it, and the bound is looked at there
        finally:
            answer.close()

    def _shift(self, n_keep: int) -> None:
        llm = self._llm
        n = (llm.n_tokens - n_keep) // 2
        if not llm.shift_context(n_keep, n):
            raise MoeoffError("the context is full, and the model's memory cannot forget a part of it")
        self.n_discarded += n
