"""moeoff: Mixture-of-Experts models (GGUF) in less memory than they need."""

from importlib import metadata as _metadata

from .errors import BudgetError, ForkError, ModelError, MoeoffError, OptionError, ReadError

__all__ = ["BudgetError", "ForkError", "Llama", "ModelError", "MoeoffError", "OptionError", "ReadError", "Stats", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str):
    # loading llama.cpp takes longer than `moeoff --help` should
    if name == "Llama":
        from .llama import Llama

        return Llama
    if name == "Stats":
        from .stats import Stats

        return Stats
    raise AttributeError(f"module 'moeoff' has no attribute {name!r}")
