"""A profile: a calibration's measurements of a model, in one file.

An npz without pickle; keys are "section/array", so that each command writes its own sections and leaves the others. Bound to
the model by a hash of samples of its experts. Knows nothing of what the sections mean.
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
from ..system.files import atomic_file, cache_folder, demo_model
from ..system.memory import available
from .sidecar import source_sample

VERSION = 1
_HEADER = "moeoff"  # key of the header: JSON in bytes
_LONGEST_HEADER = 1 << 20  # bytes


def profile_path(model: str | os.PathLike[str]) -> str:
    """Default path of a model's profile: MODEL.profile.npz, without the number of a first part."""
    return model_stem(model) + ".profile.npz"


def profile_output(model_index: ModelIndex) -> str:
    """The path to write a model's profile to: the default one, or in the cache folder where the model's folder cannot be written to.

    Raises:
        WriteError: neither can be written.
    """
    default = profile_path(model_index.files[0])
    folder = os.path.dirname(os.path.abspath(default))
    installed = os.path.isdir(folder) and os.path.samefile(folder, os.path.dirname(demo_model()))
    if os.path.exists(default) or (os.access(folder, os.W_OK) and not installed):
        return default
    try:
        cached = _cached_path(model_index)
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{default}: its folder cannot be written to, and the cache folder neither: {error.strerror or error}") from None
    return str(cached)


def _cached_path(model_index: ModelIndex) -> Path:
    """Path of a model's profile in the cache folder. Raises `OSError` if there is none."""
    return cache_folder() / "profiles" / f"{model_index.identity}.npz"


class Profile:
    """A profile that was read; all of it is in memory.

    Attributes:
        path: of the file.
        info: the header's facts: tokens and texts of the calibration, say.
    """

    def __init__(self, path: str, arrays: Mapping[str, np.ndarray], info: dict[str, Any]):
        self.path, self.info = path, info
        self._sections: dict[str, dict[str, np.ndarray]] = {}
        for key, array in arrays.items():
            section, _, name = key.partition("/")
            self._sections.setdefault(section, {})[name] = array

    @contextlib.contextmanager
    def taking(self, *sections: str) -> Iterator[dict[str, np.ndarray] | None]:
        """Yield the arrays of these sections together, or None without the first. Inside, `WrongArrays` becomes a `ModelError`."""
        found = [self._sections.get(name, {}) for name in sections]
        try:
            yield functools.reduce(operator.or_, found) if found[0] else None
        except WrongArrays as error:
            raise ModelError(f"{self.path}: the section {' or '.join(sections)} is damaged: {error}: run moeoff calibrate again") from None

    @property
    def sections(self) -> list[str]:
        return sorted(self._sections)

    def section(self, name: str) -> dict[str, np.ndarray] | None:
        """Its arrays by name, or None if the profile has no such section."""
        return self._sections.get(name)

    @classmethod
    def find(cls, model_index: ModelIndex, only: Collection[str] | None = None, room: int | None = None) -> Profile | None:
        """The profile of a model, at its default path or in the cache folder; None if there is none.

        Args:
            only, room: as for `read`.

        Raises:
            ModelError: as `read`.
        """
        path = profile_path(model_index.files[0])
        if not os.path.exists(path):
            try:
                path = str(_cached_path(model_index))
            except OSError:
                return None
        return cls.read(path, model_index, only, room) if os.path.exists(path) else None

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_index: ModelIndex, only: Collection[str] | None = None, room: int | None = None) -> Profile:
        """Reads a profile and checks that it is this model's.

        Args:
            only: sections that are read: those of predictors may be large. None: all.
            room: bytes that they may take. None: half of what is available.

        Raises:
            ModelError: missing, damaged, of another version, or of another model.
        """
        path = os.fspath(path)
        try:
            raw = read_npz(path, _LONGEST_HEADER, lambda key: key == _HEADER)
            if _HEADER not in raw:
                raise ModelError(f"{path}: not a moeoff profile; make one with moeoff calibrate")
            header = json.loads(raw[_HEADER].tobytes().decode())
            if header["version"] != VERSION:
                raise ModelError(f"{path}: profile version {header['version']}, this moeoff reads {VERSION}: run moeoff calibrate again")
            if header["source"] != source_sample(model_index):
                raise ModelError(
                    f"{path}: was made of another model ({header['model']}), not of {model_index.files[0]}: run moeoff calibrate, or move the profile away"
                )
            info = dict(header["info"])
            arrays = read_npz(
                path,
                available() // 2 if room is None else room,
                lambda key: "/" in key and (only is None or key.partition("/")[0] in only),
            )
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        except TooLargeArchive as error:
            raise ModelError(f"{path}: no profile for this budget ({error}): give more memory, or move it away") from None
        except NoArchive:
            raise ModelError(f"{path}: is no profile: name another file, or move it away and run moeoff calibrate") from None
        except (ArchiveError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"{path}: the profile is damaged ({error}): delete it, or run moeoff calibrate again") from None
        return cls(path, arrays, info)

    @classmethod
    def write(
        cls, path: str | os.PathLike[str], model_index: ModelIndex, sections: Mapping[str, Mapping[str, np.ndarray]], info: dict[str, Any] | None = None
    ) -> Profile:
        """Replaces these sections of the file, or makes it; others that it has stay. Complete, or not at all.

        Raises:
            ModelError: the file is there and is no profile of this model.
            WriteError: it cannot be written.
        """
        path = os.fspath(path)
        old = cls.read(path, model_index) if os.path.exists(path) else cls(path, {}, {})
        arrays = {f"{section}/{name}": np.asarray(array) for section, named in (old._sections | dict(sections)).items() for name, array in named.items()}
        if any(array.dtype.kind not in "biufU" for array in arrays.values()):
            raise TypeError("a profile holds numbers only")
        info = old.info | (info or {})
        header = {"version": VERSION, "source": source_sample(model_index), "model": os.path.basename(model_index.files[0]), "info": info}
        raw = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez_compressed(file, **{_HEADER: raw}, **arrays)  # type: ignore[arg-type]  # for mypy any keyword may be allow_pickle
        return cls(path, arrays, info)
