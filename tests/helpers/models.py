"""Models that tests make: with a next-token (MTP) layer or tables of rows; copies that
say something else, in other types, in several files.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from model_writer import ModelWriter
from moeoff.gguf.file import ModelFile, Tensor
from moeoff.gguf.model_index import SplitName, is_expert
from moeoff.gguf.quantize import I32, fits, needs_imatrix, quantize, type_from_name
from shape_model import SHAPES, Weights, metadata, scales_of, shape_model, tensors, tokenizer

F64 = type_from_name("F64")


def write_nextn_model(path: str | os.PathLike[str], published: str = "glm-4.5-air") -> None:
    """GLM-4.5's architecture, 34 MB: a dense layer, two with experts, and a next-token
    layer with experts. Or Qwen 3.6's: two of the layers are recurrent.

    The rows of the output are those of the embedding in another order, so that a text
    is mostly a walk through the vocabulary in that order. The next-token layer reads
    the latest token, and so guesses often right, but not always.
    """
    tokens, vocabulary = tokenizer(0)
    shape = replace(
        SHAPES[published].cut(layers=4, shrink=16),
        n_expert=32,
        n_used=4,
        n_vocab=len(tokens),
        expert_type="Q8_0",
    )
    # the next-token layer is none
    shape = replace(shape, delta=shape.delta and replace(shape.delta, every=2))
    n_embd, nextn = shape.n_embd, f"blk.{shape.n_layer - 1}.nextn"
    weights, rng = Weights(shape, scales_of(shape), 0, len(tokens)), np.random.default_rng(0)
    plan = [
        replace(tensor, type=0) if tensor.name in ("token_embd.weight", "output.weight") else tensor
        for tensor in tensors(shape)
    ]
    embedding = np.concatenate(list(weights.pieces(plan[0]))).view(np.float32).reshape(-1, n_embd)
    made = {
        "token_embd.weight": embedding,
        "output.weight": embedding[rng.permutation(len(embedding))],
        f"{nextn}.eh_proj.weight": np.hstack(
            [np.eye(n_embd), 0.02 * rng.standard_normal((n_embd, n_embd))]
        ),
        **{
            f"{nextn}.{name}.weight": np.ones(n_embd)
            for name in ("enorm", "hnorm", "shared_head_norm")
        },
    }
    plan += [
        Tensor(name, values.shape, 0) for name, values in made.items() if name.startswith(nextn)
    ]
    with ModelWriter(
        path, metadata(shape) | {f"{shape.arch}.nextn_predict_layers": 1} | vocabulary, plan
    ) as writer:
        for tensor in plan:
            if tensor.name in made:
                writer.write(
                    np.ascontiguousarray(made[tensor.name], np.float32).reshape(-1).view(np.uint8)
                )
            else:
                for piece in weights.pieces(tensor):
                    writer.write(piece)


def write_per_layer_model(path: str | os.PathLike[str], width: int) -> None:
    """Gemma 4's architecture, with experts and with a table of which each token reads
    one row, in F16: `width` values for each of its layers.
    """
    tokens, vocabulary = tokenizer(0)
    shape = replace(
        SHAPES["gemma-4-26b-a4b"].cut(layers=6, shrink=8, hidden=64),
        n_expert=16,
        n_used=2,
        n_vocab=len(tokens),
    )
    weights, rng, n_embd, n_row = (
        Weights(shape, scales_of(shape), 0, len(tokens)),
        np.random.default_rng(0),
        shape.n_embd,
        width * shape.n_layer,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "per_layer_model_proj.weight": (n_row, n_embd),
        "per_layer_proj_norm.weight": (width,),
    }
    for layer in range(shape.n_layer):
        shapes |= {
            f"blk.{layer}.inp_gate.weight": (width, n_embd),
            f"blk.{layer}.proj.weight": (n_embd, width),
            f"blk.{layer}.post_norm.weight": (n_embd,),
        }
    plan = [
        *tensors(shape),
        Tensor("per_layer_token_embd.weight", (len(tokens), n_row), type_from_name("F16")),
    ]
    plan += [Tensor(name, dims, 0) for name, dims in shapes.items()]
    with ModelWriter(
        path,
        metadata(shape) | {"gemma4.embedding_length_per_layer_input": width} | vocabulary,
        plan,
    ) as writer:
        for tensor in plan:
            if tensor.name == "per_layer_token_embd.weight":
                for _ in tokens:
                    writer.write(
                        rng.standard_normal(n_row, np.float32).astype(np.float16).view(np.uint8)
                    )
            elif tensor.name in shapes:
                values = rng.standard_normal(tensor.shape, np.float32) * np.float32(n_embd**-0.5)
                writer.write(
                    (1 + values if len(tensor.shape) == 1 else values).reshape(-1).view(np.uint8)
                )
            else:
                for piece in weights.pieces(tensor):
                    writer.write(piece)


def write_one_expert_model(path: str | os.PathLike[str]) -> None:
    """Write a model of one expert, in whose header a tensor of experts has two
    dimensions: ggml leaves out those that are 1 at the end.
    """
    whole = Path(path).with_suffix(".whole")
    shape_model(
        replace(
            SHAPES["qwen3-30b-a3b"].cut(layers=3, shrink=8, expert_type="Q8_0"),
            n_expert=1,
            n_used=1,
        ),
        whole,
    )
    with ModelFile(whole) as model:
        plan = [
            replace(t, shape=t.shape[sum(n == 1 for n in t.shape[:-1]) :])
            for t in model.tensors.values()
        ]
        with ModelWriter(path, model.metadata, plan) as writer:
            for tensor in plan:
                writer.write(model.data(tensor.name))
    whole.unlink()


def rewritten(
    source: str | os.PathLike[str],
    out: Path,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    types: Mapping[str, int] = MappingProxyType({}),
    arrays: Mapping[str, np.ndarray | None] = MappingProxyType({}),
) -> str:
    """A copy of a GGUF file, in which keys say something else, and tensors are stored
    otherwise.

    Args:
        metadata: by key; None: the key is not there.
        types: in which these tensors' values are stored; types that want an importance
            matrix get a flat one.
        arrays: of float32 or int32, in the place of these tensors or behind all others;
            None: the tensor is not there.
    """
    with ModelFile(source) as model:
        values = {
            key: value for key, value in (model.metadata | metadata).items() if value is not None
        }
        tensors = {
            name: replace(tensor, type=types.get(name, tensor.type))
            for name, tensor in model.tensors.items()
        }
        tensors |= {
            name: array
            if array is None
            else Tensor(name, array.shape, I32 if array.dtype == np.int32 else 0)
            for name, array in arrays.items()
        }
        plan = [tensor for tensor in tensors.values() if tensor is not None]
        with ModelWriter(out, values, plan, model.alignment) as writer:
            for tensor in plan:
                if (array := arrays.get(tensor.name)) is not None:
                    writer.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
                elif tensor == model.tensors[tensor.name]:
                    writer.write(model.data(tensor.name))
                elif tensor.type == F64:
                    writer.write(model.rows(tensor.name).astype(np.float64).view(np.uint8))
                else:
                    imatrix = (
                        np.ones(tensor.shape[-1], np.float32)
                        if needs_imatrix(tensor.type)
                        else None
                    )
                    writer.write(quantize(model.rows(tensor.name), tensor.type, imatrix))
    return str(out)


def with_template(model: str, path: Path, template: str) -> str:
    """A copy of the model at the path."""
    return rewritten(model, path, {"tokenizer.chat_template": template})


def requantize_experts(
    source: str | os.PathLike[str], out: Path, type: int, only: str = ""
) -> list[str]:
    """A copy with the routed experts in another type, where their rows hold its blocks.
    Returns the names of those tensors.

    Args:
        only: a regular expression of their names.
    """
    with ModelFile(source) as model:
        experts = [
            tensor
            for tensor in model.tensors.values()
            if is_expert(tensor.name) and re.search(only, tensor.name)
        ]
    changed = [
        tensor.name for tensor in experts if fits(type, tensor.shape[-1]) and tensor.type != type
    ]
    rewritten(source, out, types=dict.fromkeys(changed, type))
    return changed


def split_model(source: str, folder: Path, n_parts: int) -> list[Path]:
    """As llama.cpp's gguf-split writes them: parts of nearly equal numbers of tensors;
    the first carries the metadata.
    """
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
