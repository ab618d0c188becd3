"""The demo model with fewer layers and experts: what makes a thousand calls into the system there, makes a hundred here, so that each can fail once."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

from common import DEMO

from moeoff.gguf.file import ModelFile, ModelWriter, Tensor, pack

__all__ = ["write_small_model"]

LAYERS, EXPERTS, USED = 2, 6, 2


def write_small_model(path: str | os.PathLike[str]) -> None:
    """Its text means nothing, but it is always the same."""
    with ModelFile(DEMO) as model:
        numbers = {"block_count": LAYERS, "expert_count": EXPERTS, "expert_used_count": USED}
        metadata = model.metadata | {f"qwen2moe.{key}": pack(value) for key, value in numbers.items()}
        tensors = [_cut(t) for t in model.tensors.values() if not t.name.startswith("blk.") or int(t.name.split(".")[1]) < LAYERS]
        with ModelWriter(path, metadata, tensors) as writer:
            for tensor in tensors:
                writer.write(model.data(tensor.name)[: prod(tensor.shape[:-1])])


def _cut(tensor: Tensor) -> Tensor:
    """Of experts and their rows in a router, the first."""
    return replace(tensor, shape=(EXPERTS, *tensor.shape[1:])) if "_exps." in tensor.name or ".ffn_gate_inp." in tensor.name else tensor
