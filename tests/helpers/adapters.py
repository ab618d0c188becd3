"""LoRA adapters of experts, with random numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from moeoff.gguf.layout import Layout


def write_expert_adapter(model: str, path: Path, rank: int = 4, scale: float = 0.1, seed: int = 0) -> str:
    """An adapter of all matrices of a model's experts."""
    rng = np.random.default_rng(seed)
    layout = Layout.read(model)
    writer = gguf.GGUFWriter(str(path), layout.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, span in layout.experts.items():
        n_in, n_out, n_experts = span.shape[:3]
        writer.add_tensor(f"{name}.lora_a", rng.normal(0, scale, (n_experts, rank, n_in)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", rng.normal(0, scale, (n_experts, n_out, rank)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
