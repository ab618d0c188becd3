"""moeoff runs Mixture-of-Experts models (GGUF) in less memory than they need."""

import os as _os
import sys as _sys
import typing as _typing
from importlib import import_module as _import_module
from importlib import metadata as _metadata

from .errors import (
    BudgetError,
    Cancelled,
    ComputeError,
    ForkError,
    ModelError,
    MoeoffError,
    OptionError,
    ReadError,
)

__all__ = [
    "BudgetError",
    "Cancelled",
    "ComputeError",
    "ForkError",
    "Llama",
    "ModelError",
    "MoeoffError",
    "OptionError",
    "ReadError",
    "Server",
    "Stats",
    "__version__",
    "convert",
    "demo_model",
    "register",
]

__version__ = "0.1.0"


def _require_fork() -> None:
    """Raise ForkError unless the installed llama-cpp-python is moeoff's build."""
    try:
        version = _metadata.version("llama-cpp-python")
    except _metadata.PackageNotFoundError:
        version = "absent"
    if "+moeoff." not in version:
        raise ForkError(
            f"expected moeoff's build of llama-cpp-python, got {version}: run `make env` in "
            "the moeoff repository, or install the wheel of `scripts/build/fork.py build`"
        )


try:
    _require_fork()
except ForkError as _error:
    if _os.path.basename(_sys.argv[0]) != "moeoff":
        raise
    _sys.exit(f"Error: {_error}")

if _typing.TYPE_CHECKING:
    from . import experts as experts
    from . import measure as measure
    from . import policies as policies
    from . import routing as routing
    from .engine.llama import Llama as Llama
    from .engine.stats import Stats as Stats
    from .experts.convert import convert as convert
    from .policies import register as register
    from .server.server import Server as Server
    from .system.files import demo_model as demo_model

# Imported on access: loading llama.cpp would slow down `moeoff --help`.
_NAMES = {
    "Llama": "engine.llama",
    "Stats": "engine.stats",
    "demo_model": "system.files",
    "register": "policies",
    "Server": "server.server",
    "convert": "experts.convert",
}
_MODULES = ("experts", "measure", "policies", "routing")


def _offer_modules(package: dict[str, _typing.Any]) -> None:
    """Import a package's modules on access; `package` is its namespace."""

    def module(name: str) -> object:
        path = f"{package['__name__']}.{name}"
        try:
            return _import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            raise AttributeError(
                f"module {package['__name__']!r} has no attribute {name!r}"
            ) from None

    package["__getattr__"] = module


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return getattr(_import_module(f"moeoff.{_NAMES[name]}"), name)
    if name in _MODULES:
        return _import_module(f"moeoff.{name}")
    raise AttributeError(f"module 'moeoff' has no attribute {name!r}")
