"""Grow a small qwen2moe model to any size without changing what it computes.

The result is a function of the same kind on a wider residual stream, for tests and
measurements that need gigabytes of experts with learned routing. With W = width and F =
ff:

- The residual stream is the old one repeated W times. What writes the stream
  (embedding, attention output, down projections) is tiled W times on its output side,
  and so are norms, biases and the attention's heads; what reads it (q, k, v, router,
  gate, up, output) gets the old weights over W in each tile, plus noise that sums to
  zero over the tiles of an input.
- Hidden units of every expert, and of the shared expert, are repeated F times; the down
  projection reads old/F plus zero-sum noise.

RMSNorm, RoPE and softmax do not notice, so logits agree to float error and the routing
stays the learned one. Quantization does notice: its errors are independent from tile to
tile and average out, which would flatter low precision. Noise of sqrt(W - 1) times the
standard deviation of a tile's row (sqrt(F - 1) for down) restores the relative
quantization error of the small model; that is `noise` 1.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import numpy as np

from model_writer import ModelWriter, quantize_chunks
from moeoff.cli.options import command
from moeoff.errors import ModelError
from moeoff.gguf.file import ModelFile, Tensor, unpack
from moeoff.gguf.model_index import parse_block_name
from moeoff.gguf.quantize import type_from_name
from moeoff.system.console import progress_bar

_F32 = 0
# old rows grown at once; part of what the seed means, since every block has its own
# generator
_BLOCK_ROWS = 256


@dataclass(frozen=True)
class Growth:
    """The factors and types of a grown model.

    width, ff: factors of the residual stream and of the experts' hidden size.
    expert_type, dense_type: ggml types of the routed experts and of the other matrices.
    noise: 0 for none, 1 for the rule above. seed: of the noise; the same seed gives the
    same file.
    """

    width: int
    ff: int
    expert_type: int
    dense_type: int
    noise: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width < 1 or self.ff < 1:
            raise ModelError(f"width and ff must be at least 1, found {self.width} and {self.ff}")
        if not 0 <= self.noise < float("inf") or self.seed < 0:
            raise ModelError(
                f"noise and seed must not be negative, found {self.noise} and {self.seed}"
            )


@dataclass(frozen=True)
class _Role:
    """The growth of a tensor: tiles over its rows and over each row, whether it sums
    over a row's tiles, and its type.
    """

    row_tiles: str  # "width", "ff" or "" (not tiled)
    col_tiles: str
    reads: bool  # true: each tile gets its share of the weights; false: each tile is a copy
    kind: str  # "expert", "dense" or "plain"


_ROLES = {
    "token_embd.weight": _Role("", "width", False, "dense"),
    "output.weight": _Role("", "width", True, "dense"),
    "output_norm.weight": _Role("", "width", False, "plain"),
    "attn_norm.weight": _Role("", "width", False, "plain"),
    "ffn_norm.weight": _Role("", "width", False, "plain"),
    "attn_q.weight": _Role("width", "width", True, "dense"),
    "attn_k.weight": _Role("width", "width", True, "dense"),
    "attn_v.weight": _Role("width", "width", True, "dense"),
    "attn_q.bias": _Role("", "width", False, "plain"),
    "attn_k.bias": _Role("", "width", False, "plain"),
    "attn_v.bias": _Role("", "width", False, "plain"),
    "attn_output.weight": _Role("width", "width", True, "dense"),
    "ffn_gate_inp.weight": _Role("", "width", True, "plain"),
    "ffn_gate_inp_shexp.weight": _Role("", "width", True, "plain"),
    "ffn_gate_exps.weight": _Role("ff", "width", True, "expert"),
    "ffn_up_exps.weight": _Role("ff", "width", True, "expert"),
    "ffn_down_exps.weight": _Role("width", "ff", True, "expert"),
    "ffn_gate_shexp.weight": _Role("ff", "width", True, "dense"),
    "ffn_up_shexp.weight": _Role("ff", "width", True, "dense"),
    "ffn_down_shexp.weight": _Role("width", "ff", True, "dense"),
}
_SCALED = {
    "embedding_length": "width",
    "attention.head_count": "width",
    "attention.head_count_kv": "width",
    "feed_forward_length": "ff",
    "expert_feed_forward_length": "ff",
    "expert_shared_feed_forward_length": "ff",
}


def grow_model(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    growth: Growth,
    *,
    overwrite: bool = False,
    threads: int = 2,
    progress: Callable[[int, int], None] = lambda n, total: None,
) -> None:
    """Write the model of `source` (qwen2moe, any types) to `out`, grown; the tokenizer
    and all other metadata are kept.

    Memory stays far under 1 GiB at every size. progress(done, total) is called with
    bytes written. Raises ModelError if the source is no qwen2moe model or a row length
    does not fit its type, WriteError if `out` exists (unless overwrite).
    """
    with ModelFile(source) as model:
        plan = _plan(model, growth)
        tensors = [tensor for tensor, _ in plan]
        n, total = 0, sum(tensor.n_bytes for tensor in tensors)
        with ModelWriter(
            out, _metadata(model, growth), tensors, model.alignment, overwrite=overwrite
        ) as writer:
            for tensor, role in plan:
                for data in quantize_chunks(
                    _blocks(model, tensor.name, role, growth), tensor.type, threads=threads
                ):
                    writer.write(data)
                    n += data.nbytes
                    progress(n, total)


def _tiles(growth: Growth, name: str) -> int:
    return getattr(growth, name) if name else 1


def _plan(model: ModelFile, growth: Growth) -> list[tuple[Tensor, _Role]]:
    """The grown tensors, in file order, with their roles."""
    architecture = unpack(model.metadata["general.architecture"])
    if architecture != "qwen2moe":
        raise ModelError(f"{model.path}: expected a qwen2moe model, got {architecture}")
    types = {"expert": int(growth.expert_type), "dense": int(growth.dense_type), "plain": _F32}
    plan = []
    for tensor in model.tensors.values():
        block = parse_block_name(tensor.name)
        role = _ROLES.get(block[1] if block else tensor.name)
        if role is None:
            raise ModelError(
                f"{model.path}: cannot grow tensor {tensor.name}: its part in a qwen2moe model is"
                " unknown"
            )
        *outer, n_cols = tensor.shape
        if outer:
            outer[-1] *= _tiles(growth, role.row_tiles)
        grown = Tensor(
            tensor.name, (*outer, n_cols * _tiles(growth, role.col_tiles)), types[role.kind]
        )
        try:
            grown.n_bytes  # noqa: B018
        except ModelError as error:
            raise ModelError(
                f"{tensor.name}: {error}; choose a larger width or ff, or another type"
            ) from error
        plan.append((grown, role))
    return plan


def _metadata(model: ModelFile, growth: Growth) -> dict[str, bytes]:
    metadata = dict(model.metadata)
    for key, factor in _SCALED.items():
        key = f"qwen2moe.{key}"
        metadata[key] = int(unpack(model.metadata[key])) * _tiles(growth, factor)
    # no longer true; llama.cpp derives them from the tensors
    for key in ("general.file_type", "general.size_label"):
        metadata.pop(key, None)
    name = unpack(model.metadata["general.name"]) if "general.name" in metadata else model.path.stem
    metadata["general.name"] = f"{name}, grown {growth.width} x {growth.ff}"
    metadata["moeoff.grown"] = (
        f"width={growth.width} ff={growth.ff} noise={growth.noise:g} seed={growth.seed}"
    )
    return metadata


def _blocks(
    model: ModelFile, name: str, role: _Role, growth: Growth
) -> Iterator[Callable[[], np.ndarray]]:
    """Calls that make a tensor's rows, block by block in file order: per expert, per
    tile of its rows, per block of old rows.
    """
    shape = model.tensors[name].shape
    n_rows = shape[-2] if len(shape) > 1 else 1
    n_experts = shape[0] if len(shape) == 3 else 1
    for expert in range(n_experts):
        for tile in range(_tiles(growth, role.row_tiles)):
            for start in range(0, n_rows, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, n_rows)
                key = [growth.seed, zlib.crc32(name.encode()), expert, tile, start]
                yield (
                    lambda first=expert * n_rows + start, last=expert * n_rows + stop, key=key: (
                        _grow_rows(
                            model.rows(name, first, last),
                            _tiles(growth, role.col_tiles),
                            role.reads,
                            growth.noise,
                            key,
                        )
                    )
                )


def _grow_rows(
    rows: np.ndarray, n_tiles: int, reads: bool, noise: float, key: list[int]
) -> np.ndarray:
    """f32 [n_rows, n_cols] -> f32 [n_rows, n_tiles * n_cols], as copies or as shares
    with zero-sum noise.
    """
    if not reads or n_tiles == 1:
        return np.tile(rows, (1, n_tiles))
    n_rows, n_cols = rows.shape
    share = rows / np.float32(n_tiles)
    if noise == 0:
        return np.tile(share, (1, n_tiles))
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
    grown = rng.standard_normal((n_rows, n_tiles, n_cols), dtype=np.float32)
    grown -= grown.mean(axis=1, keepdims=True)
    # Taking the mean away leaves a variance of 1 - 1/n_tiles; with the rule's
    # sqrt(n_tiles - 1) that makes sqrt(n_tiles) in all.
    grown *= (share.std(axis=1) * np.float32(noise * n_tiles**0.5))[:, None, None]
    grown += share[:, None, :]
    return grown.reshape(n_rows, -1)


@command()
@click.argument("source", metavar="SRC.gguf")
@click.option("-o", "--out", metavar="OUT.gguf", required=True)
@click.option("--width", type=int, required=True, help="Factor of the residual stream.")
@click.option("--ff", type=int, required=True, help="Factor of the experts' hidden size.")
@click.option(
    "--expert-type", default="Q4_K", show_default=True, help="ggml type of the routed experts."
)
@click.option(
    "--dense-type", default="Q8_0", show_default=True, help="ggml type of the other matrices."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT.gguf if it exists.")
def main(
    source: str, out: str, width: int, ff: int, expert_type: str, dense_type: str, overwrite: bool
) -> None:
    """Writes a wider copy of a small qwen2moe model that computes and routes the same."""
    growth = Growth(width, ff, type_from_name(expert_type), type_from_name(dense_type))
    with progress_bar("bytes") as update:
        grow_model(
            source, out, growth, overwrite=overwrite, progress=functools.partial(update, "growing")
        )


if __name__ == "__main__":
    main()
