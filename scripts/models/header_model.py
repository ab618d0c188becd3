"""Writes a GGUF with the header of a published model and holes for its weights: `moeoff inspect --probe off` then says what the model takes, without its download.

Names, shapes and types of all tensors are those of a file that llama.cpp's quantizer makes of the published weights as Q4_K_M, or with experts of another type.
On disk the file takes the room of its header. It loads, but all that it computes with is zeros. Only text: no projector, no next-token layers.
The models are those of shape_model.py, and one that is not made with weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np

import shape_model
from moeoff.cli.options import command
from moeoff.gguf.file import DEFAULT_ALIGNMENT, Tensor
from moeoff.gguf.quantize import fits, type_from_name
from moeoff.gguf.writer import Value, header_bytes
from moeoff.system.files import atomic_file
from shape_model import FALLBACK, SHAPES, Delta, delta_metadata, delta_tensors, tokenizer

_FALLBACK = FALLBACK | dict.fromkeys(("Q2_K", "Q3_K", "IQ1_S"), "IQ4_NL")  # of rows that are no multiple of 256


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Of qwen4exp: residual streams, mixed in `rank` dimensions; heads that choose blocks of positions; and rows for the n-grams before a token."""

    n_streams: int = 4
    rank: int = 320
    index_heads: int = 4
    index_head: int = 128
    index_top: int = 2048
    index_block: int = 4
    ngram: int = 3
    ngram_heads: int = 8  # for each length from 2 to ngram
    ngram_rows: int = 20_000_096  # of each head
    ngram_layer: int = 1
    ngram_conv: int = 4


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Three layers with gated delta networks, then one with attention, and experts in all. Lengths in values; ff of an expert, and of the shared one."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_expert: int
    n_used: int
    ff: int
    delta: Delta
    n_head_kv: int = 2
    head: int = 256
    n_rot: int = 64
    n_ctx: int = 262144
    n_vocab: int = 248320
    streams: Streams = Streams()


MODELS = {
    "qwen3.8-flash-next": Hybrid(arch="qwen4exp", n_layer=48, n_embd=2560, n_head=24, n_expert=512, n_used=10, ff=640, delta=Delta(4, 48, 16, 128, 4)),
}


def metadata(name: str, m: Hybrid) -> dict[str, Value]:
    """The file's keys but for the tokenizer's."""
    s = m.streams
    n_heads = (s.ngram - 1) * s.ngram_heads
    values: dict[str, Value] = {
        "block_count": m.n_layer,
        "context_length": m.n_ctx,
        "embedding_length": m.n_embd,
        "attention.head_count": m.n_head,
        "attention.head_count_kv": m.n_head_kv,
        "attention.key_length": m.head,
        "attention.value_length": m.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": m.n_rot,
        "rope.freq_base": 1e7,
        "expert_count": m.n_expert,
        "expert_used_count": m.n_used,
        "expert_feed_forward_length": m.ff,
        "expert_shared_feed_forward_length": m.ff,
        **delta_metadata(m.delta),
        "hyper_connection.count": s.n_streams,
        "hyper_connection.low_rank": s.rank,
        "attention.indexer.head_count": s.index_heads,
        "attention.indexer.key_length": s.index_head,
        "attention.indexer.top_k": s.index_top,
        "attention.compress_ratios": np.array([s.index_block * _has_attention(layer) for layer in range(m.n_layer)], np.int32),
        "ple.layers": np.array([s.ngram_layer], np.int32),
        "ple.ngram_size": s.ngram,
        "ple.heads_per_ngram": s.ngram_heads,
        "ple.conv_kernel": s.ngram_conv,
        "ple.eos_token_id": 0,
        "ple.layer_multipliers": np.arange(1, 2 * s.ngram, 2, dtype=np.uint64),
        "ple.head_offsets": np.arange(n_heads, dtype=np.uint64) * np.uint64(s.ngram_rows),
        "ple.head_vocab_sizes": np.full(n_heads, s.ngram_rows, np.uint64),
        "embedding_length_per_layer_input": m.n_embd // n_heads,
    }
    return {"general.architecture": m.arch, "general.name": f"{name}, without weights"} | {f"{m.arch}.{key}": value for key, value in values.items()}


def _has_attention(layer: int) -> bool:
    return layer % 4 == 3


def tensors(m: Hybrid, experts_type: str) -> list[Tensor]:
    """All tensors, in the order of a published file."""
    out = []
    for name, shape in _shapes(m):
        part = name.split(".")[-2] if name.endswith(".weight") else name
        kind = experts_type if part.endswith("_exps") else {"output": "Q6_K", "attn_qkv": "Q5_K", "attn_v": "Q6_K"}.get(part, "Q4_K")
        if len(shape) == 1 or part in ("ffn_gate_inp", "ssm_conv1d", "ple_conv1d") or "norm" in part:
            kind = "F32"
        elif not fits(type_from_name(kind), shape[-1]):
            kind = _FALLBACK[kind]
        out.append(Tensor(name, shape, type_from_name(kind)))
    return out


def _shapes(m: Hybrid) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, and shapes with the length of a row last."""
    yield "token_embd.weight", (m.n_vocab, m.n_embd)
    yield "output.weight", (m.n_vocab, m.n_embd)
    s = m.streams
    n_heads = (s.ngram - 1) * s.ngram_heads
    yield "per_layer_token_embd.weight", (n_heads * s.ngram_rows, m.n_embd // n_heads)
    yield from _mixer("output_hc", m, s)
    for layer in range(m.n_layer):
        for name, shape in _layer(m, layer):
            yield f"blk.{layer}.{name}", shape


def _mixer(name: str, m: Hybrid, s: Streams) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = s.n_streams * m.n_embd
    yield f"{name}_norm.weight", (s.n_streams, m.n_embd)
    yield f"{name}_down.weight", (s.rank, width)
    yield f"{name}_up.weight", (width, s.rank)


def _layer(m: Hybrid, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    s = m.streams
    width = s.n_streams * m.n_embd
    for part in ("hc_attn", "hc_ffn"):
        yield from _mixer(part, m, s)
        yield f"{part}_inject.weight", (s.n_streams, width)
    if layer == s.ngram_layer:
        yield "ple_key.weight", (width, m.n_embd)
        yield "ple_value.weight", (m.n_embd, m.n_embd)
        for part in ("key", "query", "conv"):
            yield f"ple_norm_{part}.weight", (s.n_streams, m.n_embd)
        yield "ple_conv1d.weight", (width, s.ngram_conv)
    if _has_attention(layer):
        yield "attn_q.weight", (2 * m.n_head * m.head, m.n_embd)  # with a gate for the output
        yield "attn_k.weight", (m.n_head_kv * m.head, m.n_embd)
        yield "attn_v.weight", (m.n_head_kv * m.head, m.n_embd)
        yield "attn_output.weight", (m.n_embd, m.n_head * m.head)
        yield "attn_q_norm.weight", (m.head,)
        yield "attn_k_norm.weight", (m.head,)
        yield "indexer.q_proj.weight", (s.index_heads * s.index_head, m.n_embd)
        yield "indexer.k_proj.weight", (s.index_head, m.n_embd)
        yield "indexer.q_norm.weight", (s.index_head,)
        yield "indexer.k_norm.weight", (s.index_head,)
    else:
        yield from delta_tensors(m.delta, m.n_embd)
    yield "ffn_gate_inp.weight", (m.n_expert, m.n_embd)
    yield "ffn_gate_inp_shexp.weight", (m.n_embd,)
    for part, shape in (("gate", (m.ff, m.n_embd)), ("up", (m.ff, m.n_embd)), ("down", (m.n_embd, m.ff))):
        yield f"ffn_{part}_exps.weight", (m.n_expert, *shape)
        yield f"ffn_{part}_shexp.weight", shape


def header_model(name: str, out: str, experts_type: str | None = None, *, overwrite: bool = False) -> None:
    """Writes the file. Raises `WriteError` if it exists (unless overwrite)."""
    if name in SHAPES:
        shape = SHAPES[name].cut(expert_type=experts_type)
        keys, plan, n_vocab = shape_model.metadata(shape), shape_model.tensors(shape), shape.n_vocab
    else:
        m = MODELS[name]
        keys, plan, n_vocab = metadata(name, m), tensors(m, experts_type or "Q4_K"), m.n_vocab
    header = header_bytes(keys | tokenizer(n_vocab)[1], plan, DEFAULT_ALIGNMENT)
    with atomic_file(out, overwrite=overwrite) as file:
        file.write(header)
        file.truncate(len(header) + sum(-(-tensor.n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT for tensor in plan))


@command()
@click.argument("name", type=click.Choice([*SHAPES, *MODELS]))
@click.option("-o", "--out", metavar="OUT.gguf", required=True)
@click.option("--experts-type", metavar="TYPE", help="ggml type of the routed experts. Default: the published file's.")
@click.option("--overwrite", is_flag=True, help="Replace OUT.gguf if it exists.")
def main(name: str, out: str, experts_type: str | None, overwrite: bool) -> None:
    """Writes the header of a published model, and holes for its weights."""
    header_model(name, out, experts_type, overwrite=overwrite)


if __name__ == "__main__":
    main()
