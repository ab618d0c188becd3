"""Entries of the user's cache folder, which save a measurement: a file for each set of what its content depends on (machine, model, options). The hash of
these is its name, so that what was measured of another is never taken for it.

None is needed: one that is absent, damaged or out of reach is measured again, and where nothing can be written nothing is.
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
    """The name of what depends on these values, which JSON has."""
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]


class CacheEntry:
    """A file of the cache folder.

    Args:
        kind: its folder, and a suffix: "rates.json" is a file in "rates" that ends in ".json".
        **depends: what its content depends on.
    """

    def __init__(self, kind: str, **depends: Any):
        folder, suffix = os.path.splitext(kind)
        self._name = f"{folder}/{digest(depends)}{suffix}"

    def path(self) -> Path:
        """Its path, in a folder that is there. Raises `OSError` if none can be made."""
        path = cache_folder() / self._name
        path.parent.mkdir(exist_ok=True)
        return path

    def load(self, kind: type[_Facts]) -> _Facts | None:
        """The facts that were saved, as a dataclass of numbers and texts, which raises `ValueError` for those that cannot be; None: there are none."""
        try:
            facts = kind(**json.loads(read_file(self.path(), SMALL)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        types = get_type_hints(kind)
        return facts if all(type(value) is types[name] for name, value in vars(facts).items()) else None

    def save(self, facts: Any) -> None:
        """Takes the place of what is there."""
        with contextlib.suppress(OSError), atomic_file(self.path()) as file:
            file.write(json.dumps(asdict(facts)).encode())

    def load_arrays(self, layouts: Mapping[str, Layout], limit: int) -> dict[str, np.ndarray] | None:
        """The arrays that were saved, of at most so many bytes; None: there are none, or others than these."""
        from .arrays import ArchiveError, WrongArrays, read_npz, require_arrays  # `moeoff --help` should not load numpy

        try:
            arrays = read_npz(self.path(), limit)
            require_arrays(arrays, layouts)
            return arrays
        except (OSError, ArchiveError, WrongArrays):
            return None

    def save_arrays(self, **arrays: np.ndarray) -> None:
        """Takes the place of what is there."""
        import numpy as np

        with contextlib.suppress(OSError), atomic_file(self.path()) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # for mypy any keyword may be allow_pickle
