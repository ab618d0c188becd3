"""A model's profile: the measurements of its calibration.

The file is an npz without pickle with keys "section/array"; a command replaces its own
sections. A hash of samples of the experts binds the profile to the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, WriteError
from ..gguf.model_index import ModelIndex, model_stem
from ..system.arrays import ArchiveError, NoArchive, TooLargeArchive, WrongArrays, read_npz
from ..system.files import StrPath, atomic_file, cache_folder, demo_model
from ..system.memory import available
from .sidecar import source_sample

VERSION = 1
_HEADER = "moeoff"  # key of the header, JSON as bytes
_LONGEST_HEADER = 1 << 20  # bytes


def profile_path(model: StrPath) -> str:
    """Return the default path, MODEL.profile.npz without a first part's number."""
    return model_stem(model) + ".profile.npz"


def profile_output(model_index: ModelIndex) -> str:
    """Return a writable path, the default or a cached one, or raise WriteError."""
    default = profile_path(model_index.files[0])
    folder = os.path.dirname(os.path.abspath(default))
    installed = os.path.isdir(folder) and os.path.samefile(folder, os.path.dirname(demo_model()))
    if os.path.exists(default) or (os.access(folder, os.W_OK) and not installed):
        return default
    try:
        cached = _cached_path(model_index)
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"its folder and the cache folder are not writable: {error.strerror or error}"
        raise WriteError(f"{default}: {why}") from None
    return str(cached)


def _cached_path(model_index: ModelIndex) -> Path:
    """Return the path in the cache folder. Raise OSError if there is no folder."""
    return cache_folder() / "profiles" / f"{model_index.identity}.npz"


class Profile:
    """A profile in memory.

    Attributes:
        info: Facts of the calibration, such as tokens and texts.
    """

    def __init__(self, path: str, arrays: Mapping[str, np.ndarray], info: dict[str, Any]):
        self.path, self.info = path, info
        self._sections: dict[str, dict[str, np.ndarray]] = {}
        for key, array in arrays.items():
            section, _, name = key.partition("/")
            self._sections.setdefault(section, {})[name] = array

    @contextlib.contextmanager
    def taking(self, *sections: str) -> Iterator[dict[str, np.ndarray] | None]:
        """Yield these sections' arrays merged, None without the first section.

        Raises:
            ModelError: The block raised WrongArrays.
        """
        found = [self._sections.get(name, {}) for name in sections]
        try:
            yield functools.reduce(operator.or_, found) if found[0] else None
        except WrongArrays as error:
            why = f"the section {' or '.join(sections)} is damaged: {error}"
            raise ModelError(f"{self.path}: {why}: run moeoff calibrate again") from None

    @property
    def sections(self) -> list[str]:
        return sorted(self._sections)

    def section(self, name: str) -> dict[str, np.ndarray] | None:
        """Return a section's arrays by name, None if it is absent."""
        return self._sections.get(name)

    @classmethod
    def find(
        cls, model_index: ModelIndex, only: Collection[str] | None = None, room: int | None = None
    ) -> Profile | None:
        """Call `read` on the default path or else the one in the cache, if any."""
        path = profile_path(model_index.files[0])
        if not os.path.exists(path):
            try:
                path = str(_cached_path(model_index))
            except OSError:
                return None
        return cls.read(path, model_index, only, room) if os.path.exists(path) else None

    @classmethod
    def read(
        cls,
        path: StrPath,
        model_index: ModelIndex,
        only: Collection[str] | None = None,
        room: int | None = None,
    ) -> Profile:
        """Read a profile and check that it belongs to the model.

        Args:
            only: Sections to read, None for all; sections of predictors may be large.
            room: Maximum bytes of the arrays. Default: half of the available memory.

        Raises:
            ModelError: The profile is missing, damaged, or of another version or model.
        """
        path = os.fspath(path)
        try:
            raw = read_npz(path, _LONGEST_HEADER, lambda key: key == _HEADER)
            if _HEADER not in raw:
                raise ModelError(f"{path}: not a moeoff profile; make one with moeoff calibrate")
            header = json.loads(raw[_HEADER].tobytes().decode())
            if header["version"] != VERSION:
                wanted = f"expected profile version {VERSION}, got {header['version']}"
                raise ModelError(f"{path}: {wanted}: run moeoff calibrate again")
            if header["source"] != source_sample(model_index):
                other = f"another model ({header['model']}), not of {model_index.files[0]}"
                raise ModelError(f"{path}: was made of {other}: run moeoff calibrate again")
            info = dict(header["info"])
            arrays = read_npz(
                path,
                available() // 2 if room is None else room,
                lambda key: "/" in key and (only is None or key.partition("/")[0] in only),
            )
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        except TooLargeArchive as error:
            why = f"no profile for this budget ({error}): give more memory, or move it away"
            raise ModelError(f"{path}: {why}") from None
        except NoArchive:
            why = "is no profile: name another file, or move it away"
            raise ModelError(f"{path}: {why}") from None
        except (ArchiveError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"the profile is damaged ({error}): run moeoff calibrate again"
            raise ModelError(f"{path}: {why}") from None
        return cls(path, arrays, info)

    @classmethod
    def write(
        cls,
        path: StrPath,
        model_index: ModelIndex,
        sections: Mapping[str, Mapping[str, np.ndarray]],
        info: dict[str, Any] | None = None,
    ) -> Profile:
        """Replace these sections and keep the others, or create the file. Atomic.

        Raises:
            ModelError: The existing file is not a profile of this model.
            WriteError: Writing failed.
        """
        path = os.fspath(path)
        old = cls.read(path, model_index) if os.path.exists(path) else cls(path, {}, {})
        arrays = {
            f"{section}/{name}": np.asarray(array)
            for section, named in (old._sections | dict(sections)).items()
            for name, array in named.items()
        }
        if any(array.dtype.kind not in "biufU" for array in arrays.values()):
            raise TypeError("expected arrays of numbers")
        info = old.info | (info or {})
        header = {
            "version": VERSION,
            "source": source_sample(model_index),
            "model": os.path.basename(model_index.files[0]),
            "info": info,
        }
        raw = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez_compressed(file, **{_HEADER: raw, **arrays})  # type: ignore[arg-type]
        return cls(path, arrays, info)
