"""What can go wrong, each with one sentence that names the file, the expectation, the finding and the way out."""


class MoeoffError(Exception):
    """Base of every error that moeoff raises on purpose."""


class ForkError(MoeoffError, ImportError):
    """The installed llama-cpp-python is not moeoff's build, or another version of it."""


class ModelError(MoeoffError):
    """A model file is missing, damaged, of the wrong kind, or does not fit what is asked of it."""


class BudgetError(MoeoffError):
    """The memory budget is below what the model needs to run at all."""


class ReadError(MoeoffError):
    """Experts could not be read while the model was computing. The model stays usable."""


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
        super().__init__(f"the prompt has {n_tokens} tokens and must be shorter than the context, which has {n_ctx}: shorten it, or give a larger -c")
