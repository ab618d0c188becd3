"""Copy a GGUF file with its routed experts in another type, or with a tensor for each of them; everything else stays bit for bit.

Works for every architecture: routed experts are recognized by their tensors' names. Tensors whose rows do not fit the
type are copied as they are and reported. Types that ggml only quantizes with an importance matrix get a flat one: good
for tests, not for quality.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import numpy as np

from model_writer import ModelWriter, quantize_chunks
from moeoff.gguf.file import ModelFile, Tensor
from moeoff.gguf.model_index import is_expert
from moeoff.gguf.quantize import fits, needs_imatrix

__all__ = ["Requantized", "requantize_experts"]

_CHUNK_VALUES = 1 << 20  # values quantized at once: 4 MiB of floats


@dataclass(frozen=True)
class Requantized:
    """What `requantize_experts` did: names of the tensors changed, and of routed experts' tensors left as they were."""

    changed: tuple[str, ...]
    left: tuple[str, ...]


def requantize_experts(
    source: str | os.PathLike[str], out: str | os.PathLike[str], type: int, *, overwrite: bool = False, threads: int = 2, only: str = ""
) -> Requantized:
    """Write `source` to `out` with the routed experts' weights in ggml type `type`, where their row length allows it, and `only`, a regular expression, is in their tensors' names.

    Metadata, tensor order and all other tensors stay bit for bit (so general.file_type may no longer describe the
    file).
    Raises ModelError for a damaged source or an unknown type, WriteError for an existing `out` (unless overwrite).
    """
    with ModelFile(source) as model:
        tensors: list[Tensor] = []
        changed, left = [], []
        for tensor in model.tensors.values():
            if is_expert(tensor.name) and re.search(only, tensor.name):
                if fits(type, tensor.shape[-1]) and tensor.type != type:
                    changed.append(tensor.name)
                    tensor = replace(tensor, type=int(type))
                else:
                    left.append(tensor.name)
            tensors.append(tensor)
        with ModelWriter(out, model.metadata, tensors, model.alignment, overwrite) as writer:
            for tensor in tensors:
                if tensor == model.tensors[tensor.name]:
                    writer.write(model.data(tensor.name))
                    continue
                imatrix = np.ones(tensor.shape[-1], np.float32) if needs_imatrix(type) else None
                for data in quantize_chunks(_chunks(model, tensor), type, imatrix, threads):
                    writer.write(data)
    return Requantized(tuple(changed), tuple(left))


def _chunks(model: ModelFile, tensor: Tensor):
    n_rows = int(np.prod(tensor.shape[:-1]))
    step = max(1, _CHUNK_VALUES // tensor.shape[-1])
    for start in range(0, n_rows, step):
        yield lambda start=start: model.rows(tensor.name, start, min(start + step, n_rows))
