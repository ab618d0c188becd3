"""Small random models of kinds that no published file is small enough for: a projector for pictures, and a model with a next-token (MTP) layer."""

from __future__ import annotations

import os
from dataclasses import replace

import gguf
import numpy as np

from moeoff.gguf.file import ModelWriter, Tensor, pack
from shape_model import tokenizer
from shape_table import SHAPES, metadata, tensors
from shape_weights import Scales, Weights

__all__ = ["N_PATCHES", "write_nextn_model", "write_projector"]

_PATCH, _WIDTH, _FF, _LAYERS = 8, 32, 64, 2  # of the projector; llava's leaves the last layer out
_SIDE = 64
N_PATCHES = (_SIDE // _PATCH) ** 2


def write_projector(path: str | os.PathLike[str], n_embd: int, side: int = _SIDE) -> None:
    """llava's: of a picture, which becomes one of side x side pixels, n_embd numbers for each 8 x 8."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {"embedding_length": _WIDTH, "attention.head_count": 2, "feed_forward_length": _FF, "block_count": _LAYERS, "projection_dim": n_embd,
               "image_size": side, "patch_size": _PATCH}  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    shapes: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (_WIDTH, 3, _PATCH, _PATCH), "v.position_embd.weight": ((side // _PATCH) ** 2, _WIDTH)}
    for layer in range(_LAYERS):
        shapes |= {f"v.blk.{layer}.{part}.weight": (_WIDTH, _WIDTH) for part in ("attn_q", "attn_k", "attn_v", "attn_out")}
        shapes |= {f"v.blk.{layer}.{part}": (_WIDTH,) for part in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias")}
        shapes |= {f"v.blk.{layer}.ffn_up.weight": (_FF, _WIDTH), f"v.blk.{layer}.ffn_down.weight": (_WIDTH, _FF)}
    shapes |= {"mm.0.weight": (n_embd, _WIDTH), "mm.0.bias": (n_embd,), "mm.2.weight": (n_embd, n_embd), "mm.2.bias": (n_embd,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_nextn_model(path: str | os.PathLike[str]) -> None:
    """GLM-4.5's architecture, 34 MB: a dense layer, two with experts, and a next-token layer with experts.

    The rows of the output are those of the embedding in another order, so that a text is mostly a walk through the vocabulary in that order.
    The next-token layer reads the latest token, and so guesses often right, but not always.
    """
    tokens, vocabulary = tokenizer(0)
    shape = replace(SHAPES["glm-4.5-air"].cut(layers=4, shrink=16), n_expert=32, n_used=4, n_vocab=len(tokens), expert_type="Q8_0")
    n_embd, nextn = shape.n_embd, f"blk.{shape.n_layer - 1}.nextn"
    weights, rng = Weights(shape, Scales(), 0, len(tokens)), np.random.default_rng(0)
    plan = [replace(tensor, type=0) if tensor.name in ("token_embd.weight", "output.weight") else tensor for tensor in tensors(shape)]
    embedding = np.concatenate(list(weights.pieces(plan[0]))).view(np.float32).reshape(-1, n_embd)
    made = {
        "token_embd.weight": embedding,
        "output.weight": embedding[rng.permutation(len(embedding))],
        f"{nextn}.eh_proj.weight": np.hstack([np.eye(n_embd), 0.02 * rng.standard_normal((n_embd, n_embd))]),
        **{f"{nextn}.{name}.weight": np.ones(n_embd) for name in ("enorm", "hnorm", "shared_head_norm")},
    }
    plan += [Tensor(name, values.shape, 0) for name, values in made.items() if name.startswith(nextn)]
    with ModelWriter(path, metadata(shape) | {"glm4moe.nextn_predict_layers": pack(1)} | vocabulary, plan) as writer:
        for tensor in plan:
            if tensor.name in made:
                writer.write(np.ascontiguousarray(made[tensor.name], np.float32).reshape(-1).view(np.uint8))
            else:
                for piece in weights.pieces(tensor):
                    writer.write(piece)
