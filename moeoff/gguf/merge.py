"""Old files with a tensor for each expert ("blk.0.ffn_gate.5.weight", Mixtral's until April 2024) as files of today, with one for all of them.

llama.cpp no longer reads the old form. Nothing is computed: an expert's bytes go to its place in the new tensor as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from ..errors import ModelError, OptionError
from ..system.files import atomic_file, require_new
from .file import ModelFile, Tensor
from .model_index import SINGLE_EXPERT, ModelIndex, model_stem
from .writer import header_bytes

__all__ = ["Merged", "merge", "merged_path"]

_PIECE = 1 << 24  # bytes read and written at once, of rows that are shorter


@dataclass(frozen=True)
class Merged:
    """The file that was written, its size in bytes, and the number of experts' tensors before and after."""

    path: str
    n_bytes: int
    n_before: int
    n_after: int


def merged_path(model: str | os.PathLike[str]) -> str:
    """Default path of the new file: MODEL.merged.gguf."""
    return model_stem(model) + ".merged.gguf"


def merge(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Writes a model of the old form in today's; the old file stays as it is.

    Args:
        output: by default `merged_path`.
        force: replaces an existing file.
        progress: called with the bytes that are written, and all.

    Raises:
        ModelError: not a model of the old form, or one whose experts differ in number, shape or type.
        OptionError: the output exists already, is the model itself, or cannot be written.
        WriteError: it cannot be written.
    """
    files = ModelIndex.read(model).files
    target = os.fspath(output) if output is not None else merged_path(files[0])
    require_new(target, files, "`output`")
    if os.path.exists(target) and not force:
        raise OptionError(f"{target} exists already", hint={"force": True, "output": ...})
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(ModelFile(file)) for file in files]
        where = {name: part for part in parts for name in part.tensors}
        groups: dict[str, list[str]] = {}  # new name -> the old ones, or the one of a tensor that stays
        for name in where:
            match = SINGLE_EXPERT.match(name)
            groups.setdefault(f"{match[1]}_exps.weight" if match else name, []).append(name)
        tensors = [_joined(new, [where[name].tensors[name] for name in old], files[0]) for new, old in groups.items()]
        n_before = sum(len(old) for new, old in groups.items() if old != [new])
        if not n_before:
            raise ModelError(f"{files[0]}: not a file with a tensor for each expert: there is nothing to merge")
        metadata = {key: raw for key, raw in parts[0].metadata.items() if not key.startswith("split.")}
        total, done = sum(tensor.n_bytes for tensor in tensors), 0
        with atomic_file(target, overwrite=force) as file:
            file.write(header_bytes(metadata, tensors, parts[0].alignment))
            for old in groups.values():
                for name in sorted(old, key=_number):
                    tensor = where[name].tensors[name]
                    n_rows = prod(tensor.shape[:-1])
                    step = max(_PIECE * n_rows // max(tensor.n_bytes, 1), 1)
                    for start in range(0, n_rows, step):
                        data = where[name].data(name, start, start + step)
                        file.write(data.data)
                        done += data.nbytes
                        if progress:
                            progress(done, total)
                file.write(bytes(-file.tell() % parts[0].alignment))
    return Merged(target, os.path.getsize(target), n_before, sum(old != [new] for new, old in groups.items()))


def _number(name: str) -> int:
    match = SINGLE_EXPERT.match(name)
    return int(match[2]) if match else 0


def _joined(name: str, old: list[Tensor], path: str) -> Tensor:
    """The tensor that holds all of these, each an expert."""
    first = old[0]
    if [first.name] == [name]:
        return first
    numbers = sorted(_number(tensor.name) for tensor in old)
    if numbers != list(range(len(old))):
        raise ModelError(f"{path}: {name.removesuffix('_exps.weight')} has experts {numbers}, expected 0 to {len(old) - 1}")
    if any((tensor.shape, tensor.type) != (first.shape, first.type) for tensor in old):
        raise ModelError(f"{path}: the experts of {name.removesuffix('_exps.weight')} differ in shape or type: quantize the original model again")
    return replace(first, name=name, shape=(len(old), *first.shape))
