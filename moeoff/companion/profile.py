"""A profile: what calibration measured of a model, in one file beside it.

An npz without pickle; keys are "section/array", so that each command writes its own sections and leaves the others. Bound to
the model by a hash of samples of its experts. Knows nothing of what the sections mean.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ..atomic_file import atomic_file
from ..errors import ModelError, WriteError
from ..gguf.layout import Layout
from ..gguf.split_name import model_stem
from .beside import existing_path, writable_path
from .file import source_sample

__all__ = ["VERSION", "Profile", "profile_output", "profile_path"]

VERSION = 1
_HEADER = "moeoff"  # key of the header: JSON in bytes


def profile_path(model: str | os.PathLike[str]) -> str:
    """Where a model's profile is looked for, and made by default: MODEL.profile.npz, without the number of a first part."""
    return model_stem(model) + ".profile.npz"


def profile_output(layout: Layout) -> str:
    """Where a model's profile is written: beside it, or in the cache folder where nothing can be written there.

    Raises:
        WriteError: neither can be written.
    """
    beside = profile_path(layout.files[0])
    try:
        return beside if os.path.exists(beside) else writable_path(beside, layout, "profiles", "npz")
    except OSError as error:
        raise WriteError(f"{beside}: cannot be written: {error.strerror or error}") from None


class Profile:
    """A profile that was read; all of it is in memory.

    Attributes:
        path: of the file.
        info: the header's facts: tokens and texts of the calibration, say.
    """

    def __init__(self, path: str, arrays: dict[str, np.ndarray], info: dict[str, Any]):
        self.path, self._arrays, self.info = path, arrays, info

    @property
    def sections(self) -> list[str]:
        return sorted({key.split("/", 1)[0] for key in self._arrays})

    def section(self, name: str) -> dict[str, np.ndarray] | None:
        """Its arrays by name, or None if the profile has no such section."""
        found = {key.split("/", 1)[1]: array for key, array in self._arrays.items() if key.split("/", 1)[0] == name}
        return found or None

    def only(self, names: Iterable[str]) -> Profile:
        """With these sections alone: the others need not stay in memory."""
        wanted = set(names)
        return Profile(self.path, {key: array for key, array in self._arrays.items() if key.split("/", 1)[0] in wanted}, self.info)

    @classmethod
    def find(cls, layout: Layout, only: Collection[str] | None = None) -> Profile | None:
        """The profile beside a model, or in the cache folder where nothing can be written beside it; None if there is none.

        Args:
            only: sections that are read; None: all.

        Raises:
            ModelError: as `read`.
        """
        path = existing_path(profile_path(layout.files[0]), layout, "profiles", "npz")
        return cls.read(path, layout, only) if path is not None else None

    @classmethod
    def read(cls, path: str | os.PathLike[str], layout: Layout, only: Collection[str] | None = None) -> Profile:
        """
        Args:
            only: sections that are read: those of predictors may be large. None: all.

        Raises:
            ModelError: missing, damaged, of another version, or of another model.
        """
        path = os.fspath(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                if _HEADER not in file.files:
                    raise ModelError(f"{path}: not a moeoff profile; make one with moeoff calibrate")
                header = json.loads(bytes(file[_HEADER]).decode())
                if header["version"] != VERSION:
                    raise ModelError(f"{path}: profile version {header['version']}, this moeoff reads {VERSION}: run moeoff calibrate again")
                if header["source"] != source_sample(layout):
                    raise ModelError(
                        f"{path}: was made of another model ({header['model']}), not of {layout.files[0]}: run moeoff calibrate, or move the profile away"
                    )
                arrays = {key: file[key] for key in file.files if key != _HEADER and (only is None or key.split("/", 1)[0] in only)}
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise ModelError(f"{path}: the profile is damaged ({error}): delete it, or run moeoff calibrate again") from None
        return cls(path, arrays, header["info"])

    @classmethod
    def write(
        cls, path: str | os.PathLike[str], layout: Layout, sections: Mapping[str, Mapping[str, np.ndarray]], info: dict[str, Any] | None = None
    ) -> Profile:
        """Replaces these sections of the file, or makes it; others that it has stay. Complete, or not at all.

        Raises:
            ModelError: the file is there and is no profile of this model.
            WriteError: it cannot be written.
        """
        path = os.fspath(path)
        old = cls.read(path, layout) if os.path.exists(path) else cls(path, {}, {})
        arrays = {key: array for key, array in old._arrays.items() if key.split("/", 1)[0] not in sections}
        arrays |= {f"{section}/{name}": np.asarray(array) for section, named in sections.items() for name, array in named.items()}
        if any(array.dtype.hasobject for array in arrays.values()):
            raise TypeError("a profile holds numbers only")
        info = old.info | (info or {})
        header = {"version": VERSION, "source": source_sample(layout), "model": os.path.basename(layout.files[0]), "info": info}
        raw = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez_compressed(file, **{_HEADER: raw}, **arrays)  # type: ignore[arg-type]  # for mypy any keyword may be allow_pickle
        return cls(path, arrays, info)
