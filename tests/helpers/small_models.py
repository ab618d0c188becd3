"""Small random models for what no published file is small enough: a projector for pictures, and a model with a next-token (MTP) layer."""

from __future__ import annotations

import os
from dataclasses import replace

import gguf
import numpy as np

from moeoff.gguf.file import ModelFile, ModelWriter, Tensor, pack
from moeoff.gguf.quantize import type_from_name
from moeoff.paths import demo_model
from shape_model import _tokenizer
from shape_table import SHAPES, metadata, tensors
from shape_weights import Scales, Weights

__all__ = ["write_nextn_model", "write_projector"]

_SIZE, _PATCH, _WIDTH, _FF, _LAYERS = 64, 8, 32, 64, 2  # of the projector; llava's leaves the last layer out


def write_projector(path: str | os.PathLike[str], n_embd: int, seed: int = 0, size: int = _SIZE) -> None:
    """llava's: pictures of size x size in patches of 8 x 8, one token of n_embd numbers for each."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    numbers = {"embedding_length": _WIDTH, "attention.head_count": 2, "feed_forward_length": _FF, "block_count": _LAYERS, "projection_dim": n_embd,
               "image_size": size, "patch_size": _PATCH}  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) < 4 else np.prod(shape[1:]))
        writer.add_tensor(name, (values + (name.endswith(("ln1.weight", "ln2.weight")))).astype(np.float32))

    add("v.patch_embd.weight", _WIDTH, 3, _PATCH, _PATCH)
    add("v.position_embd.weight", (size // _PATCH) ** 2, _WIDTH)
    for layer in range(_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"v.blk.{layer}.{part}.weight", _WIDTH, _WIDTH)
        for part in ("ln1", "ln2"):
            add(f"v.blk.{layer}.{part}.weight", _WIDTH)
            add(f"v.blk.{layer}.{part}.bias", _WIDTH)
        add(f"v.blk.{layer}.ffn_up.weight", _FF, _WIDTH)
        add(f"v.blk.{layer}.ffn_down.weight", _WIDTH, _FF)
    add("mm.0.weight", n_embd, _WIDTH)
    add("mm.0.bias", n_embd)
    add("mm.2.weight", n_embd, n_embd)
    add("mm.2.bias", n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_nextn_model(path: str | os.PathLike[str], seed: int = 0) -> None:
    """GLM-4.5's architecture: a dense layer, two with experts, and a next-token layer with experts.

    The text is nearly a walk through a random order of the vocabulary, because the output's rows are the embeddings' in another order; and so
    the next-token layer, which sees the token before, guesses it right often, and not always.
    """
    tokens, vocabulary = _tokenizer(0)
    shape = replace(SHAPES["glm-4.5-air"].cut(layers=4, shrink=16), n_expert=32, n_used=4, n_vocab=len(tokens), expert_type="Q8_0")
    last, n_embd = shape.n_layer - 1, shape.n_embd
    with ModelFile(demo_model()) as demo:
        weights = Weights(shape, Scales(), seed, len(tokens))
        del demo
    plan = [replace(t, type=0) if t.name in ("token_embd.weight", "output.weight") else t for t in tensors(shape)]
    plan += [Tensor(f"blk.{last}.nextn.{name}", dims, 0) for name, dims in (("eh_proj.weight", (n_embd, 2 * n_embd)), ("enorm.weight", (n_embd,)), ("hnorm.weight", (n_embd,)), ("shared_head_norm.weight", (n_embd,)))]
    rng = np.random.default_rng(seed)
    embedding = np.concatenate(list(weights.pieces(plan[0]))).view(np.float32).reshape(len(tokens), n_embd)
    made = {
        "token_embd.weight": embedding,
        "output.weight": embedding[rng.permutation(len(tokens))],
        f"blk.{last}.nextn.eh_proj.weight": np.concatenate([np.eye(n_embd), rng.standard_normal((n_embd, n_embd)) * 0.02], axis=1),
        **{f"blk.{last}.nextn.{name}.weight": np.ones(n_embd) for name in ("enorm", "hnorm", "shared_head_norm")},
    }
    keys = metadata(shape) | {"glm4moe.nextn_predict_layers": pack(1)} | vocabulary
    with ModelWriter(path, keys, plan) as writer:
        for tensor in plan:
            pieces = [made[tensor.name].astype(np.float32).reshape(-1).view(np.uint8)] if tensor.name in made else weights.pieces(tensor)
            for piece in pieces:
                writer.write(np.ascontiguousarray(piece))
