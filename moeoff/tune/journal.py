"""What a tuning has measured so far, so that it goes on where it was interrupted: small JSON values by name, in a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..atomic_file import atomic_file

T = TypeVar("T")
VERSION = 1


class Journal:
    """Args:
    folder: made if it is absent; files of the tuning may lie in it, too.
    key: what the values depend on; others that were kept under another key are forgotten.
    """

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.folder, self._key = folder, {"version": VERSION, **key}
        folder.mkdir(parents=True, exist_ok=True)
        self._values: dict[str, Any] = {}
        try:
            kept = json.loads(self._file.read_text())
            if kept["key"] == json.loads(json.dumps(self._key)):
                self._values = dict(kept["values"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    @property
    def _file(self) -> Path:
        return self.folder / "journal.json"

    @property
    def resumed(self) -> bool:
        """Something was kept."""
        return bool(self._values)

    def has(self, name: str) -> bool:
        return name in self._values

    def once(self, name: str, measure: Callable[[], T]) -> T:
        """What `measure` gives, which is something that JSON holds; or what it gave before the interruption."""
        if name not in self._values:
            value = measure()
            self._values[name] = json.loads(json.dumps(value))  # as it will be read again
            with atomic_file(self._file) as file:
                file.write(json.dumps({"key": self._key, "values": self._values}).encode())
        kept: T = self._values[name]
        return kept

    def path(self, name: str) -> str:
        """Of a file in the folder."""
        return os.fspath(self.folder / name)

    def remove(self) -> None:
        """When nothing of it is needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
