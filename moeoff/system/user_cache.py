"""Measurements in the user's cache folder, in files named by hashes of conditions.

The cache is optional: damaged entries are measured again, failed writes are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from .files import SMALL, atomic_file, cache_folder, read_file

if TYPE_CHECKING:
    import numpy as np

    from .arrays import Layout

_Facts = TypeVar("_Facts")


def digest(depends: Mapping[str, Any]) -> str:
    """Return a hash of values that JSON can represent."""
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]


class CacheEntry:
    """A file in the cache folder.

    Args:
        kind: Folder and suffix: "rates.json" is a file in "rates" ending in ".json".
        **depends: Values that the content depends on.
    """

    def __init__(self, kind: str, **depends: Any):
        folder, suffix = os.path.splitext(kind)
        self._name = f"{folder}/{digest(depends)}{suffix}"

    def path(self) -> Path:
        """Return the path and create its folder, or raise OSError."""
        path = cache_folder() / self._name
        path.parent.mkdir(exist_ok=True)
        return path

    def load(self, kind: type[_Facts]) -> _Facts | None:
        """Read a dataclass of numbers and strings; None if there is no valid one."""
        try:
            facts = kind(**json.loads(read_file(self.path(), SMALL)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        types = get_type_hints(kind)
        return (
            facts
            if all(type(value) is types[name] for name, value in vars(facts).items())
            else None
        )

    def save(self, facts: Any) -> None:
        """Write a dataclass, replacing the old one."""
        with contextlib.suppress(OSError), atomic_file(self.path()) as file:
            file.write(json.dumps(asdict(facts)).encode())

    def load_arrays(
        self, layouts: Mapping[str, Layout], limit: int
    ) -> dict[str, np.ndarray] | None:
        """Read arrays of at most `limit` bytes; None if there are no valid ones."""
        from .arrays import ArchiveError, WrongArrays, read_npz, require_arrays  # imports numpy

        try:
            arrays = read_npz(self.path(), limit)
            require_arrays(arrays, layouts)
            return arrays
        except (OSError, ArchiveError, WrongArrays):
            return None

    def save_arrays(self, **arrays: np.ndarray) -> None:
        """Write arrays, replacing the old ones."""
        import numpy as np

        with contextlib.suppress(OSError), atomic_file(self.path()) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # allow_pickle
