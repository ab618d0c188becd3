"""Checkpoint: finished parts of a calibration, kept in the cache folder until all of it is done, so that it goes on where it was interrupted."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MoeoffError
from ..files import atomic_file, cache_folder, read_file
from ..memory import available
from ..npz import ArchiveError, read_npz

__all__ = ["Checkpoint"]

_LONGEST_KEY = 1 << 20  # bytes
Arrays = dict[str, np.ndarray]


class Checkpoint:
    """Parts are arrays by name. Where nothing can be written nothing is kept, which costs the resumption alone.

    Args:
        name: of its folder.
        key: JSON that the parts depend on; those that were kept under another key are removed.
        warn: told in a sentence of each part that is damaged, which is then made again.
    """

    def __init__(self, name: str, key: dict[str, Any], warn: Callable[[str], None] | None = None):
        self._warn = warn or (lambda sentence: None)
        self._folder: Path | None = None
        text = json.dumps(key, sort_keys=True)
        with contextlib.suppress(OSError, MoeoffError):
            folder = cache_folder() / "calibrate" / name
            key_file = folder / "key.json"
            if not key_file.is_file() or read_file(key_file, _LONGEST_KEY) != text.encode():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_file(key_file) as file:
                    file.write(text.encode())
            self._folder = folder

    def has(self, name: str) -> bool:
        return self._folder is not None and (self._folder / f"{name}.npz").exists()

    def load(self, name: str) -> Arrays | None:
        """A part's arrays; None if it is not there, or damaged."""
        if self._folder is None:
            return None
        path = self._folder / f"{name}.npz"
        try:
            return read_npz(path, available() // 2)
        except FileNotFoundError:
            return None
        except (OSError, ArchiveError):
            self._warn(f"{path}: is damaged and left out: that part is done again")
            return None

    def save(self, name: str, arrays: Arrays) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError, MoeoffError), atomic_file(self._folder / f"{name}.npz") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]  # its other parameter is a bool

    def once(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """A part as it was kept, or made now and kept."""
        found = self.load(name)
        if found is None:
            found = make()
            self.save(name, found)
        return found

    def remove(self) -> None:
        """Nothing of it is needed any more."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
