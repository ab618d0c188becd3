"""`moeoff verify`: is a companion what was written, and does it belong to the model beside it?"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import ModelError
from ..gguf.layout import Layout
from ..machine import n_cores
from .file import Companion, slice_name
from .hashing import hash_range

__all__ = ["Verified", "verify"]

_SHOWN = 5  # damaged slices that a message names


@dataclass(frozen=True)
class Verified:
    """What was checked: tiers, slices and bytes of the companion; the model's path, or None where there was none to check."""

    path: str
    tiers: tuple[str, ...]
    n_slices: int
    n_bytes: int
    quantized: str
    model: str | None


def verify(
    file: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Verified:
    """Reads a companion whole, and the experts of its model, and compares every slice with its hash.

    Args:
        file: the companion.
        model: the model; by default the one whose name the companion knows, if it is in the same folder.
        progress: told the bytes done and the bytes there are.

    Raises:
        ModelError: damaged; or the model is another one, or has changed. The message names the experts.
    """
    companion = Companion(file)
    if model is None:
        beside = os.path.join(os.path.dirname(companion.path), companion.source_name)
        model = beside if os.path.exists(beside) else None
    ranges = {slice_name(*key): (0, s.offset, s.nbytes, s.hash) for key, s in companion.slices.items()}
    paths = [companion.path]
    if model is not None:
        layout = Layout.read(model)
        companion.check_belongs(layout)
        paths += layout.files
        for span in layout.experts.values():
            nbytes = span.nbytes // span.shape[2]
            for expert in range(span.shape[2]):
                value = companion.source_hashes.get((span.name, expert))
                if value is None:
                    raise ModelError(f"{companion.path}: has no expert {expert} of {span.name}: convert the model again")
                ranges[f"{span.name}, expert {expert}"] = (1 + span.file, span.offset + expert * nbytes, nbytes, value)
    bad = _damaged(paths, ranges, threads or n_cores(), progress)
    if bad:
        names = ", ".join(name for name, _ in bad[:_SHOWN]) + (f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
        if any(file == 0 for _, file in bad):
            raise ModelError(f"{companion.path}: damaged in {len(bad)} of {len(ranges)} slices: {names}; convert the model again")
        raise ModelError(f"{model}: not the model that {companion.path} was made of: {names} changed since; convert the model again")
    n_bytes = sum(s.nbytes for s in companion.slices.values())
    return Verified(companion.path, tuple(companion.tiers), len(companion.slices), n_bytes, companion.quantized, None if model is None else os.fspath(model))


def _damaged(
    paths: list[str], ranges: dict[str, tuple[int, int, int, int]], threads: int, progress: Callable[[int, int], None] | None
) -> list[tuple[str, int]]:
    """Names and files of the ranges that do not have their hash."""
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        total, done, bad = sum(nbytes for _, _, nbytes, _ in ranges.values()), 0, []
        with ThreadPoolExecutor(threads) as pool:
            try:
                checked = pool.map(lambda r: hash_range(fds[r[0]], r[1], r[2]) == r[3], ranges.values())
                for (name, (file, _, nbytes, _)), good in zip(ranges.items(), checked):
                    if not good:
                        bad.append((name, file))
                    done += nbytes
                    if progress:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return bad
    except OSError as error:
        raise ModelError(f"{error.filename or paths[0]}: cannot be read: {error.strerror}") from None
    finally:
        for fd in fds:
            os.close(fd)
