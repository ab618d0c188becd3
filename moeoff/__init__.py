"""moeoff: Mixture-of-Experts models (GGUF) in less memory than they need."""

import os as _os
import sys as _sys
from importlib import metadata as _metadata

from .errors import BudgetError, Cancelled, ForkError, ModelError, MoeoffError, OptionError, ReadError

__all__ = ["BudgetError", "Cancelled", "ForkError", "Llama", "ModelError", "MoeoffError", "OptionError", "ReadError", "Stats", "__version__", "register"]

__version__ = "0.1.0"


def _require_fork() -> None:
    """Raises `ForkError` unless the installed llama-cpp-python is moeoff's build; the ABI is compared when it is loaded."""
    try:
        version = _metadata.version("llama-cpp-python")
    except _metadata.PackageNotFoundError:
        version = "absent"
    if "+moeoff." not in version:
        raise ForkError(
            f"moeoff needs its own build of llama-cpp-python, but the installed one is {version}: "
            "run `make env` in the moeoff repository, or install the wheel that `scripts/fork.py build` makes"
        )


try:
    _require_fork()
except ForkError as _error:
    if _os.path.basename(_sys.argv[0]) != "moeoff":
        raise
    _sys.exit(f"Error: {_error}")  # the command says it in one sentence


def __getattr__(name: str):
    # loading llama.cpp takes longer than `moeoff --help` should
    if name == "register":
        from .cache import register

        return register
    if name == "Llama":
        from .llama import Llama

        return Llama
    if name == "Stats":
        from .stats import Stats

        return Stats
    raise AttributeError(f"module 'moeoff' has no attribute {name!r}")
