"""What can go wrong, each with one sentence that names the file, the expectation and the finding, and with the way out.

An option is named in backticks, by its name in Python; the way out is a hint: options and values that would do. `str(error)` says both in Python's
terms, and the command line in its own (cli/options.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OPTION = re.compile(r"`(\w+)`")
_LONGEST = 2000  # characters of a message


def one_line(text: str) -> str:
    """A text for people, printable and bounded: what comes from a file must not look like a line of ours, move the cursor, or fill the screen."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


class MoeoffError(Exception):
    """Base of every error that moeoff raises on purpose.

    Attributes:
        message: the sentence without the way out, on one line.
        hint: options by name, each with a value that would do; `...` stands for one that the user has to choose.
    """

    def __init__(self, message: str = "", *, hint: Mapping[str, object] | None = None):
        self.message, self.hint = one_line(message), dict(hint or {})
        super().__init__(self.message)

    def __str__(self) -> str:
        message = _OPTION.sub(r"\1", self.message)
        return message + (
            ": give " + ", or ".join(f"{name}={'...' if value is ... else repr(value)}" for name, value in self.hint.items()) if self.hint else ""
        )


class ForkError(MoeoffError, ImportError):
    """The installed llama-cpp-python is not moeoff's build, or another version of it."""


class ModelError(MoeoffError):
    """A model file is missing, damaged, of the wrong kind, or does not fit what is asked of it."""


class BudgetError(MoeoffError):
    """The memory budget is below what the model needs to run at all."""


class ReadError(MoeoffError):
    """Experts could not be read while the model was computing. The model stays usable."""


class ComputeError(MoeoffError, RuntimeError):
    """llama.cpp could not compute a batch: no memory for it, no room in the context. The model stays usable."""


class WriteError(MoeoffError, OSError):
    """A file could not be written: no room, no rights, a broken disk."""


class Cancelled(MoeoffError):
    """`Llama.cancel()` ended what was being computed. The model stays usable."""


class OptionError(MoeoffError, ValueError):
    """An option is unknown or its value makes no sense."""


class ContextError(MoeoffError):
    """A prompt, with the conversation before it, is longer than the context."""

    def __init__(self, n_tokens: int, n_ctx: int):
        self.n_tokens, self.n_ctx = n_tokens, n_ctx
        super().__init__(
            f"the prompt has {n_tokens} tokens and must be shorter than the context, which has {n_ctx}: shorten it, or make that larger", hint={"n_ctx": ...}
        )
