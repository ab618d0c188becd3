"""Where moeoff keeps what it remembers between two runs. The only place that asks the environment for folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for moeoff, made if it is absent. Raises `OSError` if it cannot be."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "moeoff"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
