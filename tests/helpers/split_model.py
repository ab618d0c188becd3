"""A GGUF in several files, as llama.cpp's gguf-split writes them."""

import struct
from pathlib import Path

from moeoff.gguf.file import ModelFile, ModelWriter
from moeoff.gguf.split_name import SplitName


def split_model(source: str, folder: Path, n_parts: int) -> list[Path]:
    """Parts of nearly equal numbers of tensors; the first carries the metadata."""
    with ModelFile(source) as model:
        tensors = list(model.tensors.values())
        cuts = [len(tensors) * i // n_parts for i in range(n_parts + 1)]
        paths = []
        for i in range(n_parts):
            split = {
                "split.no": struct.pack("<IH", 2, i),
                "split.count": struct.pack("<IH", 2, n_parts),
                "split.tensors.count": struct.pack("<Ii", 5, len(tensors)),
            }
            part = tensors[cuts[i] : cuts[i + 1]]
            paths.append(folder / SplitName("model", i + 1, n_parts).part(i + 1))
            with ModelWriter(paths[-1], (model.metadata if i == 0 else {}) | split, part) as writer:
                for tensor in part:
                    writer.write(model.data(tensor.name))
    return paths
