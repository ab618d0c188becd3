"""What can go wrong, each with one sentence that names the file, the expectation and the finding, and with the way out.

The way out is a `Remedy`: its value says it in Python's terms, and the command line says it in its own (cli/errors.py).
"""

from __future__ import annotations

from enum import Enum


class Remedy(Enum):
    """What to do about an error; {names} are the error's facts."""

    MORE_MEMORY = "give memory={needed}"
    MORE_MEMORY_OR_SMALLER_CONTEXT = "give memory={needed}, or n_ctx={n_ctx}"
    MORE_VRAM = "give vram={needed}"
    LESS_VRAM = "give vram={needed} at most"
    MAKE_COMPANION = "make one with moeoff.convert, or name it with experts="
    CONVERT_AGAIN = "convert the model again, or go without the companion: experts=False"
    CHOOSE_TIER = "choose it with tier={tier!r}"
    CALIBRATE = "calibrate the model with moeoff.calibrate"
    MEASURE_LOSS = "measure it with search_precision"
    GIVE_TEXT = "give text to calibrate on"
    MORE_TEXT = "give more text, or more tokens of it"
    SHORTER_WINDOWS = "give a longer text, or a smaller ctx"
    FEWER_CHUNKS = "evaluate fewer chunks, or set TMPDIR"
    GIVE_TIERS = "give tiers or bits"
    GIVE_IMATRIX = "give imatrix, or another type"
    MERGE = "join them with moeoff.gguf.merge.merge({model!r})"
    OVERWRITE = "give force=True to replace it, or another output"
    OTHER_OUTPUT = "give another output"
    SHORTEN_PROMPT = "shorten it, or give a larger n_ctx"
    CONTINUE_TEXT = "give a text to continue instead"
    OTHER_ADDRESS = "choose another host or port"


class MoeoffError(Exception):
    """Base of every error that moeoff raises on purpose.

    Attributes:
        message: the sentence without the way out.
        remedy: the way out, if there is a simple one.
        facts: what the remedy names, by name: `needed` and `n_ctx` (bytes and tokens), `model`, `tier`, `max_loss`.
    """

    def __init__(self, message: str = "", remedy: Remedy | None = None, **facts: object):
        super().__init__(message)
        self.message, self.remedy, self.facts = message, remedy, facts

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}: {self.remedy.value.format(**self.facts)}"


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
        super().__init__(f"the prompt has {n_tokens} tokens and must be shorter than the context, which has {n_ctx}", Remedy.SHORTEN_PROMPT)
