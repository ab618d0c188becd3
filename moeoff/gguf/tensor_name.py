"""Names of a model's tensors, as llama.cpp gives them: "blk.LAYER.REST", where REST says whether it holds routed experts.

Knows names only. The native side has a parser of its own for routed experts (moeoff-buffer-type.cpp); a test holds them together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ModelError

__all__ = [
    "EMBEDDING",
    "EMBEDDING_PATTERN",
    "EXPERT_PATTERN",
    "MATRICES",
    "OUTPUT",
    "SINGLE_EXPERT",
    "TensorRole",
    "is_expert",
    "parse_block_name",
    "parse_tensor_name",
]

MATRICES = ("gate_up", "up", "gate", "down")  # in the order the graph computes them, as `native.MATRICES`
# for Python's re and for llama.cpp's std::regex: no named groups. arctic's ffn_norm_exps is no expert
EXPERT_PATTERN = r"^blk\.([0-9]+)\.ffn_(gate_up|up|gate|down)_(ch)?exps\.weight$"
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"  # a model without the second uses the first for both
EMBEDDING_PATTERN = r"^token_embd\.weight$"
_EXPERTS = re.compile(EXPERT_PATTERN)
SINGLE_EXPERT = re.compile(r"^(blk\.[0-9]+\.ffn_(?:gate|up|down))\.([0-9]+)\.weight$")  # of files until April 2024
_BLOCK = re.compile(r"^blk\.([0-9]+)\.(.+)$")


@dataclass(frozen=True, order=True)
class TensorRole:
    """Where a tensor of routed experts belongs.

    Attributes:
        layer: counted from 0.
        chunk: one of the layer's chunk experts (grovemoe), which have a gate of their own.
        matrix: index into MATRICES.
    """

    layer: int
    chunk: bool
    matrix: int

    @property
    def matrix_name(self) -> str:
        return MATRICES[self.matrix]


def is_expert(name: str) -> bool:
    """Whether the tensor holds routed experts."""
    return _EXPERTS.match(name) is not None


def parse_tensor_name(name: str) -> TensorRole:
    """The role of a tensor of routed experts. Raises ModelError for the name of any other tensor."""
    match = _EXPERTS.match(name)
    if not match:
        raise ModelError(f"{name}: not a name that llama.cpp gives to routed experts, as blk.0.ffn_up_exps.weight")
    return TensorRole(int(match[1]), match[3] is not None, MATRICES.index(match[2]))


def parse_block_name(name: str) -> tuple[int, str] | None:
    """Layer and rest of a tensor that belongs to one: (3, "attn_q.weight") of "blk.3.attn_q.weight"."""
    match = _BLOCK.match(name)
    return (int(match[1]), match[2]) if match else None
