"""Small files that go with a model: a projector for pictures and a LoRA adapter, both of random numbers."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

from moeoff.gguf.model_index import ModelIndex

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


def write_expert_adapter(model: str, path: Path, rank: int = 4, scale: float = 0.1, seed: int = 0) -> str:
    """A LoRA adapter of all matrices of a model's experts, with random numbers."""
    rng = np.random.default_rng(seed)
    model_index = ModelIndex.read(model)
    writer = gguf.GGUFWriter(str(path), model_index.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, span in model_index.experts.items():
        n_in, n_out, n_experts = span.shape[:3]
        writer.add_tensor(f"{name}.lora_a", rng.normal(0, scale, (n_experts, rank, n_in)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", rng.normal(0, scale, (n_experts, n_out, rank)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
