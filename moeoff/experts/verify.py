"""`moeoff verify`: compare a sidecar and its model's experts with their hashes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import ModelError
from ..gguf.model_index import ModelBytes, ModelIndex
from ..system.machine import n_cores
from .sidecar import Sidecar, hash_range, slice_name

_SHOWN = 5  # damaged slices in a message


@dataclass(frozen=True)
class Verification:
    """The result of a successful verification.

    Attributes:
        model: Path of the model, None if only the sidecar was verified.
    """

    path: str
    tiers: tuple[str, ...]
    n_slices: int
    n_bytes: int
    model: str | None


def verify(
    file: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Read a sidecar and the experts of its model and compare their hashes.

    Args:
        model: Path of the model. Default: the sidecar's source, if in its folder.
        progress: Callback with bytes done and bytes in total.

    Raises:
        ModelError: Slices are damaged (the message names them), or the model differs.
    """
    sidecar = Sidecar(file)
    if model is None:
        source = os.path.join(os.path.dirname(sidecar.path), sidecar.source_name)
        model = source if os.path.exists(source) else None
    ranges = {
        slice_name(*key): (0, s.offset, s.nbytes, s.hash) for key, s in sidecar.slices.items()
    }
    paths = [sidecar.path]
    if model is not None:
        model_index = ModelIndex.read(model)
        sidecar.check_belongs(model_index)
        paths += model_index.files
        for span in model_index.experts.values():
            for expert in range(span.shape[2]):
                value = sidecar.source_hashes.get((span.name, expert))
                if value is None:
                    raise ModelError(
                        f"{sidecar.path}: has no expert {expert} of {span.name}: convert the model"
                        " again"
                    )
                ranges[f"{span.name}, expert {expert}"] = (
                    1 + span.file,
                    span.offset + expert * span.slice_bytes,
                    span.slice_bytes,
                    value,
                )
    damaged: list[tuple[str, int]] = []  # slices and files
    n, total = 0, sum(nbytes for _, _, nbytes, _ in ranges.values())
    with ModelBytes(paths) as files, ThreadPoolExecutor(n_cores()) as pool:
        try:
            hashes = pool.map(lambda name: hash_range(files, *ranges[name][:3], name), ranges)
            for (name, (file_index, _, nbytes, expected)), value in zip(ranges.items(), hashes):
                if value != expected:
                    damaged.append((name, file_index))
                n += nbytes
                if progress:
                    progress(n, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if damaged:
        more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        names = ", ".join(name for name, _ in damaged[:_SHOWN]) + more
        if any(file_index == 0 for _, file_index in damaged):
            why = f"{sidecar.path}: damaged in {len(damaged)} of {len(ranges)} slices: {names}"
        else:
            why = f"{model}: not the model that {sidecar.path} was made of: {names} changed since"
        raise ModelError(f"{why}; convert the model again")
    n_bytes = sum(s.nbytes for s in sidecar.slices.values())
    return Verification(
        sidecar.path,
        tuple(sidecar.tiers),
        len(sidecar.slices),
        n_bytes,
        None if model is None else os.fspath(model),
    )
