"""A prompt that was computed before, kept in a file of llama.cpp's format: its tokens and the context after them."""

from __future__ import annotations

import os

from ..atomic_file import atomic_file
from ..binding import PatchedLlama
from ..errors import ModelError, OptionError, WriteError

__all__ = ["PromptCache"]


class PromptCache:
    """Args:
    path: of the file; it need not be there yet.
    read_only: it is used and never written.
    answers: what the model has answered is kept, too.

    Raises:
        OptionError: a file that is only to be read is not there.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, answers: bool = False):
        if read_only and answers:
            raise OptionError("a prompt cache that is only read keeps no answers")
        if read_only and not os.path.exists(path):
            raise OptionError(f"{os.fspath(path)}: there is no such prompt cache, and it is not to be made")
        self.path, self._read_only, self.answers = os.fspath(path), read_only, answers

    def load(self, llm: PatchedLlama) -> int:
        """Fills the context, and returns its tokens: a prompt that begins with them goes on behind them. 0: there is no file yet.

        Raises:
            ModelError: the file is damaged, or of another model or context.
        """
        if not os.path.exists(self.path):
            return 0
        if reason := llm.load_context(self.path):
            raise ModelError(f"{self.path}: not a prompt cache of this model and context: {reason}")
        return llm.n_tokens

    def save(self, llm: PatchedLlama) -> None:
        """Writes what the context holds, whole or not at all.

        Raises:
            WriteError: it cannot be written.
        """
        if self._read_only:
            return
        with atomic_file(self.path) as file:
            if reason := llm.save_context(file.name):
                raise WriteError(f"{self.path}: cannot be written: {reason}")
