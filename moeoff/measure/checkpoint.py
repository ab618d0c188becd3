"""Finished parts of a calibration, to resume after an interruption."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..gguf.model_index import ModelIndex
from ..system.arrays import ArchiveError, read_npz
from ..system.files import atomic_file, cache_folder, remove_folder
from ..system.memory import available
from ..system.user_cache import digest

Arrays = dict[str, np.ndarray]


class Checkpoint:
    """The parts of one calibration, if the cache folder is writable.

    Parts of the same model with other dependencies are deleted.

    Args:
        options: Options that the model is opened with.
        warn: Callback with a sentence about a damaged part.
        **depends: Further dependencies of the parts.

    Attributes:
        key: Hash of everything the parts depend on.
    """

    def __init__(
        self,
        model_index: ModelIndex,
        options: Mapping[str, Any],
        warn: Callable[[str], None] | None = None,
        **depends: Any,
    ):
        self._warn = warn or (lambda sentence: None)
        self._folder: Path | None = None
        name = f"profile-{model_index.identity}"
        depends |= {
            "moeoff": __version__,
            "options": repr(sorted(options.items())),
            "changed": [state.ctime_ns for state in model_index.states],
        }
        self.key = digest(depends)
        with contextlib.suppress(OSError):
            root = cache_folder() / "calibrate"
            folder = root / f"{name}-{self.key}"
            for other in root.glob(f"{name}-*"):
                if other != folder:
                    remove_folder(other)
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = folder

    def load(self, name: str) -> Arrays | None:
        """Return a part's arrays, or None if it is missing or damaged."""
        if self._folder is None:
            return None
        path = self._folder / f"{name}.npz"
        try:
            return read_npz(path, available() // 2)
        except FileNotFoundError:
            return None
        except (OSError, ArchiveError):
            self._warn(f"{path}: damaged: this part is calibrated again")
            return None

    def save(self, name: str, arrays: Arrays) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError), atomic_file(self._folder / f"{name}.npz") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]  # its other parameter is a bool

    def remove(self) -> None:
        """Delete all parts."""
        if self._folder is not None:
            remove_folder(self._folder)
