"""Warm start: which slices were resident when a model was closed, so that the next start loads them in the background.

One small file for each model in the user's cache folder, named after the model's path, size and time of change: another or
changed model never finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np

from . import hooks
from .buffer import ExpertBuffer
from .layout import Layout
from .paths import cache_folder

VERSION = 1
PAGE = 4096


def _file(layout: Layout) -> Path:
    identity = hashlib.sha256()
    for path in layout.files:
        status = os.stat(path)
        identity.update(f"{os.path.realpath(path)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return cache_folder() / "warm" / f"{identity.hexdigest()[:32]}.npz"


def remember(buffer: ExpertBuffer, layout: Layout) -> None:
    """Writes down what is resident. A cache folder that cannot be written is no error: the next start is a cold one."""
    residency = buffer.residency()
    if not residency.any():
        return
    with contextlib.suppress(OSError):
        path = _file(layout)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(partial, "wb") as file:
                np.savez_compressed(file, version=VERSION, residency=residency)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def recall(buffer: ExpertBuffer, layout: Layout, arena_bytes: int) -> int:
    """Queues what was resident, as far as the arena goes; returns how many slices. Demand always comes first."""
    try:
        with np.load(_file(layout), allow_pickle=False) as saved:
            residency = saved["residency"]
            if int(saved["version"]) != VERSION or residency.shape != buffer.priorities.shape:
                return 0
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # never closed before, or a damaged file
        return 0
    room, queued = arena_bytes, 0
    # a slot holds whole pages, and a slice may begin anywhere in its first
    slot = {(info.gate, info.matrix): -(-info.nbytes // PAGE) * PAGE + PAGE for info in buffer.tensors}
    for gate, row in enumerate(residency):
        for matrix in range(len(hooks.MATRICES)):
            size = slot.get((gate, matrix))
            experts = np.flatnonzero(row & (1 << matrix))[: room // size if size else 0]
            if len(experts):
                room -= size * len(experts)
                queued += buffer.preload(gate, experts.tolist(), 1 << matrix)
    return queued
