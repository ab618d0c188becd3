"""Writes a model with a tensor for each expert, as Mixtral's files were until April 2024: what `moeoff merge` puts together again.

usage: split_experts.py MODEL.gguf OLD.gguf
"""

from __future__ import annotations

import os
import sys

from moeoff.gguf.file import ModelFile, ModelWriter, Tensor
from moeoff.gguf.tensor_name import is_expert


def split(model: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    with ModelFile(model) as file:
        tensors, pieces = [], []
        for name, tensor in file.tensors.items():
            n_experts = tensor.shape[0] if is_expert(name) else 1
            data = file.data(name).reshape(n_experts, -1)
            for expert in range(n_experts):
                old = name.replace("_exps.", f".{expert}.") if is_expert(name) else name
                tensors.append(Tensor(old, tensor.shape[1:] if is_expert(name) else tensor.shape, tensor.type))
                pieces.append(data[expert])
        with ModelWriter(output, file.metadata, tensors, file.alignment) as writer:
            for piece in pieces:
                writer.write(piece)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    split(*sys.argv[1:])
