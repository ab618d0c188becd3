"""Small files that go with a model: a projector for pictures and a LoRA adapter, both
of random numbers, and a control vector.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from model_writer import write_arrays
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.writer import Value

_PATCH, _WIDTH, _FF, _LAYERS = 8, 32, 64, 2  # of the projector; llava's leaves the last layer out
_SIDE = 64
N_PATCHES = (_SIDE // _PATCH) ** 2


def write_projector(path: str | os.PathLike[str], n_embd: int, side: int = _SIDE) -> None:
    """llava's: of a picture, which becomes one of side x side pixels, n_embd numbers
    for each 8 x 8.
    """
    numbers = {"embedding_length": _WIDTH, "attention.head_count": 2, "feed_forward_length": _FF, "block_count": _LAYERS, "projection_dim": n_embd,
               "image_size": side, "patch_size": _PATCH, "attention.layer_norm_epsilon": 1e-5}  # fmt: skip
    half = np.full(3, 0.5, np.float32)
    metadata: dict[str, Value] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
    }
    metadata |= {
        f"clip.vision.{key}": value
        for key, value in (numbers | {"image_mean": half, "image_std": half}).items()
    }
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (_WIDTH, 3, _PATCH, _PATCH),
        "v.position_embd.weight": ((side // _PATCH) ** 2, _WIDTH),
    }
    for layer in range(_LAYERS):
        shapes |= {
            f"v.blk.{layer}.{part}.weight": (_WIDTH, _WIDTH)
            for part in ("attn_q", "attn_k", "attn_v", "attn_out")
        }
        shapes |= {
            f"v.blk.{layer}.{part}": (_WIDTH,)
            for part in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias")
        }
        shapes |= {
            f"v.blk.{layer}.ffn_up.weight": (_FF, _WIDTH),
            f"v.blk.{layer}.ffn_down.weight": (_WIDTH, _FF),
        }
    shapes |= {
        "mm.0.weight": (n_embd, _WIDTH),
        "mm.0.bias": (n_embd,),
        "mm.2.weight": (n_embd, n_embd),
        "mm.2.bias": (n_embd,),
    }
    rng = np.random.default_rng(0)
    write_arrays(
        path,
        metadata,
        {
            name: rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            for name, shape in shapes.items()
        },
    )


def write_expert_adapter(
    model: str, path: Path, rank: int = 4, scale: float = 0.1, seed: int = 0
) -> str:
    """A LoRA adapter of all matrices of a model's experts, with random numbers."""
    rng, model_index, arrays = np.random.default_rng(seed), ModelIndex.read(model), {}
    for name, span in model_index.experts.items():
        n_in, n_out, n_experts = span.shape[:3]
        arrays[f"{name}.lora_a"] = rng.normal(0, scale, (n_experts, rank, n_in))
        arrays[f"{name}.lora_b"] = rng.normal(0, scale, (n_experts, n_out, rank))
    metadata = {
        "general.architecture": model_index.architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
    }
    write_arrays(path, metadata, arrays)
    return str(path)


def write_control_vector(
    path: str | os.PathLike[str], architecture: str, direction: np.ndarray
) -> None:
    """Write a control vector of the first layer alone."""
    write_arrays(
        path,
        {"general.architecture": "controlvector", "controlvector.model_hint": architecture},
        {"direction.1": direction},
    )
