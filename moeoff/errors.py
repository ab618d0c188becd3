"""Errors of one sentence: the thing, what was expected and found, and what to do.

Messages name options in backticks by their names in Python, and hints have options and
values that help. `str(error)` shows both as Python, the command line in its own terms
(cli/options.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OPTION = re.compile(r"`(\w+)`")
_LONGEST = 1500  # characters of a message


def one_line(text: str) -> str:
    """Make a text printable on one line of bounded length: parts come from files."""
    text = _shortened(text)
    if text.isprintable():
        return text
    escaped = (" " if c.isspace() else c.encode("unicode_escape").decode() for c in text)
    return _shortened("".join(c if c.isprintable() else e for c, e in zip(text, escaped)))


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


class MoeoffError(Exception):
    """Base class of moeoff's errors.

    Attributes:
        message: Sentence on one line, without the hint.
        hint: Helpful options with their values; `...` is the user's choice.
    """

    def __init__(self, message: str = "", *, hint: Mapping[str, object] | None = None):
        self.message, self.hint = one_line(message), dict(hint or {})
        super().__init__(self.message)

    def __str__(self) -> str:
        message = _OPTION.sub(r"\1", self.message)
        values = {name: "..." if value is ... else repr(value) for name, value in self.hint.items()}
        options = ", or ".join(f"{name}={value}" for name, value in values.items())
        return f"{message}: give {options}" if options else message


class ForkError(MoeoffError, ImportError):
    """The installed llama-cpp-python is not moeoff's build or has another version."""


class ModelError(MoeoffError):
    """A model file is missing, damaged, of the wrong kind, or unfit for an option."""


class BudgetError(MoeoffError):
    """The memory budget is below what the model needs to run."""


class ReadError(MoeoffError):
    """Experts could not be read during a computation. The model stays usable."""


class ComputeError(MoeoffError, RuntimeError):
    """llama.cpp could not compute a batch for lack of memory or context length.

    The model stays usable.
    """


class WriteError(MoeoffError, OSError):
    """A file could not be written."""


class Cancelled(MoeoffError):
    """`Llama.cancel()` ended the computation. The model stays usable."""


class OptionError(MoeoffError, ValueError):
    """An option is unknown or its value is invalid."""


class ContextError(MoeoffError):
    """A prompt with its conversation is longer than the context."""

    def __init__(self, n_tokens: int, n_ctx: int):
        self.n_tokens, self.n_ctx = n_tokens, n_ctx
        message = f"the prompt has {n_tokens} tokens, expected fewer than the context's {n_ctx}"
        super().__init__(f"{message}: shorten it, or increase the context", hint={"n_ctx": ...})
