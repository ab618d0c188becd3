"""Where moeoff keeps what it remembers between two runs, and where its demo model is. The only place that asks the environment for folders."""

from __future__ import annotations

import importlib.resources
import os
import sys
from pathlib import Path

DEMO_MODEL = "demo-moe-q8_0.gguf"


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


def demo_model() -> str:
    """Path of the model that ships inside the package."""
    return str(importlib.resources.files("moeoff") / "data" / DEMO_MODEL)


def machine_wide_file(name: str) -> str | None:
    """The path of a file that all processes of moeoff's on this machine share, or in this container; None if there is no place for one."""
    return next((f"{folder}/moeoff-{name}" for folder in ("/dev/shm", "/tmp") if os.access(folder, os.W_OK)), None)
