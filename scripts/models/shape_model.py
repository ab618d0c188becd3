"""Write a GGUF with the shape of a published MoE model and random weights, as fast as
the disk takes it.

Hyperparameters, tensor names, types and sizes are the published model's; so are memory,
reads and the work of a token. What it writes is noise, but with routing like a trained
model's that answers; `scripts/research/routing.py shapes` measures how well. The
tokenizer is the demo model's, with unused tokens up to the shape's vocabulary.

Types are those that llama.cpp's quantizer gives: "Q4_K_M" and "Q4_0" with its
exceptions, "MXFP4" with Q8_0 for everything that is no expert. A row that is no
multiple of 256 gets the quantizer's fallback (Q5_0 for Q4_K, and so on).

How the routing comes about, and which number in `Scales` turns which screw:

- The residual stream begins as the token's embedding, drawn at random. So a token's
  experts depend on the token.
- The first n_embd / 32 channels hold a constant, as "massive activations" do in trained
  models. Queries and keys are one fixed vector read from it, turned by RoPE, plus a
  little of the rest: attention falls with the distance D as D ** -`recency`, and is a
  running mean of the recent past. Values do not read the constant. So attention adds a
  part that drifts slowly, which makes neighbouring tokens share experts.
- Experts are random functions of the stream; they add what is new in each layer.
  Attention and feed-forward add `attention` and `feed_forward` times the stream's size,
  so that gate inputs of neighbouring layers have about the same cosine everywhere; what
  comes before the second gate adds `first` times, since the first layers of trained
  models are hard to predict.
- A router's rows are random directions, other ones in every layer: logits of deviation
  `logits`. Of their variance `skew` ** 2 is a constant of each expert (read from the
  constant channels, or the router's bias where the architecture has one): popularity.

A model that answers keeps to half of its experts, whatever it says:

- A token has a stress, in a channel of its own. The second layer with experts attends
  to the tokens of the largest stress (`keenness`: its logit for a stress of 1) and
  writes what they say into the topic's channels, which nothing else changes. Answers
  are made of tokens without stress: so a text's topic is its prompt's, and a question
  with a larger stress changes it. Of a router's variance `topic` ** 2 is the topic's.
- The layer after it adds `context` times the stream's size from the tokens just before:
  tokens that follow each other share experts.
- What a token can be followed by is written in its code, in channels that only the
  output reads: an answer goes through the vocabulary, and context decides between two
  ways. So greedy answers do not repeat a few tokens. Where the output is the embedding
  (`tied`), attention moves the code.

Hyper-connections (qwen4exp) are nearly one residual stream: all streams begin as the
embedding, a mixer's gates let half of each through, which its norm doubles, and what is
injected into each is the same; both waver by a few per cent, by the token. Rows for
n-grams add a tenth of the stream's size, all rows at random. The indexer compares
random directions. Those of glm5-next are mixed evenly, and waver as much.

Without RoPE (glm5-next) attention has no recency but in the delta networks; latent
attention compares random directions, and in the topic's layer stresses.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import click
import numpy as np

from model_writer import ModelWriter, quantize_chunks
from moeoff.cli.options import command
from moeoff.errors import OptionError
from moeoff.gguf.file import ModelFile, Tensor, unpack
from moeoff.gguf.model_index import parse_block_name
from moeoff.gguf.quantize import (
    dequantize,
    fits,
    needs_imatrix,
    quantize,
    row_bytes,
    type_from_name,
    type_name,
)
from moeoff.system.console import progress_bar
from moeoff.system.files import demo_model

# --- shapes ---

# of rows that are no multiple of 256
_FALLBACK = {
    "Q2_0": "Q4_0",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
} | dict.fromkeys(
    ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"
)
# matrices that are not quantized
_KEPT = {
    "ffn_gate_inp": "F32",
    "ssm_conv1d": "F32",
    "ple_conv1d": "F16",
    "indexer": "BF16",
} | dict.fromkeys(
    (
        "ssm_conv1d_q",
        "ssm_conv1d_k",
        "ssm_conv1d_v",
        "hc_attn_fn",
        "hc_ffn_fn",
        "indexer_compressor_gate",
        "indexer_compressor_ape",
    ),
    "F32",
)
_KEPT_KIMI = {"attn_q_a": "Q8_0", "attn_q_b": "Q8_0"} | dict.fromkeys(
    (
        "attn_kv_a_mqa",
        "attn_k_b",
        "attn_v_b",
        "ssm_beta",
        "ssm_f_a",
        "ssm_f_b",
        "ssm_g_a",
        "ssm_g_b",
    ),
    "BF16",
)
_EIGHT = {"attn_k": "Q8_0", "attn_v": "Q8_0", "attn_output": "Q5_K"}  # of models with eight experts
_GLM5 = {  # of glm5-next: keys as its converter writes them, values of GLM-5.3-Flash
    "attention.indexer.head_count": 32, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048, "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True, "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20, "hyper_connection.epsilon": 1e-6,
    "kda.gate_lower_bound": -5.0,
}  # fmt: skip
# LLAMA_EXPERT_GATING_FUNC_TYPE_*
_GATING = {"softmax": 1, "sigmoid": 2, "softmax of the selected": 3}


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: the rank, the sizes of a head's parts, and the rank
    of queries; 0: they have none.
    """

    kv_rank: int
    nope: int
    value: int
    q_rank: int = 0


@dataclass(frozen=True)
class Yarn:
    """RoPE scaling as a file has it; log_mul 0: no key of that name."""

    factor: float
    n_ctx_orig: int
    log_mul: float = 0.0


@dataclass(frozen=True)
class Wide:
    """Every how many layers attention sees the whole context, with other heads; its
    values are its keys. n_rot: of a head, in pairs half a head apart.
    """

    every: int
    n_head_kv: int
    head: int
    n_rot: int
    rope_base: float


@dataclass(frozen=True)
class Delta:
    """Gated delta networks: in all layers but each `every`-th, whose attention has a
    gate for its output. Heads of values and keys, a head's values, taps of the
    convolution.
    """

    every: int
    n_value: int
    n_key: int
    head: int
    conv: int

    @property
    def n_mixed(self) -> int:
        return (2 * self.n_key + self.n_value) * self.head


@dataclass(frozen=True)
class Streams:
    """Hyper-connections: residual streams, mixed in `rank` dimensions. With them come
    an indexer in each layer with attention, whose heads choose blocks of positions, and
    a table of rows for the n-grams before a token: of each head so many, of heads so
    many for each length from 2 to `ngram`.
    """

    n: int = 4
    rank: int = 320
    index_heads: int = 4
    index_head: int = 128
    index_top: int = 2048
    index_block: int = 4
    ngram: int = 3
    ngram_heads: int = 8
    ngram_rows: int = 20_000_096
    ngram_layer: int = 1
    ngram_conv: int = 4

    @property
    def n_ngram_heads(self) -> int:
        return (self.ngram - 1) * self.ngram_heads


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's shape. Lengths in values; n_rot 0: the whole head is rotated, and a
    head of 0 not at all.

    ff is one expert's hidden size, ff_dense that of a layer without experts, of which
    there are n_dense at the start. qk_norm: a norm for each head. tied: the output
    matrix is the embedding.
    """

    name: str
    arch: str
    recipe: str
    n_layer: int
    n_ctx: int
    n_embd: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head: int
    n_expert: int
    n_used: int
    ff: int
    rope_base: float
    eps: float
    n_rot: int = 0
    ff_dense: int = 0
    n_dense: int = 0
    n_shared: int = 0
    gating: str = "softmax"
    norm_weights: bool = True
    weights_scale: float = 1.0
    selection_bias: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    mla: Mla | None = None
    yarn: Yarn | None = None
    sliding_window: int = 0
    tied: bool = False
    wide: Wide | None = None
    delta: Delta | None = None
    streams: Streams | None = None
    expert_type: str | None = None

    @property
    def glm5(self) -> bool:
        return self.arch == "glm5-next"

    def is_wide(self, layer: int) -> bool:
        return self.wide is not None and layer % self.wide.every == self.wide.every - 1

    def is_delta(self, layer: int) -> bool:
        return self.delta is not None and layer % self.delta.every != self.delta.every - 1

    def heads(self, layer: int) -> tuple[int, int, int]:
        """Heads of keys, values of a head, and how many of these turn."""
        if self.wide is not None and self.is_wide(layer):
            return self.wide.n_head_kv, self.wide.head, self.wide.n_rot
        return self.n_head_kv, self.head, self.rot

    @property
    def rot(self) -> int:
        return self.n_rot or self.head

    @property
    def qk_head(self) -> int:
        """Values of a head that queries and keys are compared by."""
        return self.mla.nope + self.rot if self.mla else self.head

    @property
    def v_head(self) -> int:
        return self.mla.value if self.mla else self.head

    def cut(
        self,
        *,
        layers: int | None = None,
        shrink: int = 1,
        hidden: int | None = None,
        expert_type: str | None = None,
    ) -> Shape:
        """The shape with fewer layers, with all widths divided, with as many hidden
        values in each expert, with experts of another type.

        Number and choice of experts stay; the vocabulary of a shape that is shrunk is
        the tokenizer's (n_vocab 0). A table for n-grams is shortened as the experts
        are: by layers and hidden values left out, and by the square of the shrink.

        Raises:
            OptionError: fewer layers than it takes to have one with experts, a shrink
                below 1, or hidden values that are no multiple of 32.
        """
        shape = replace(self, expert_type=expert_type and expert_type.upper())
        if shrink < 1:
            raise OptionError(f"shrink: expected at least 1, found {shrink}")
        if shrink > 1:
            mla = self.mla and replace(
                self.mla,
                kv_rank=_narrow(self.mla.kv_rank, shrink),
                q_rank=_narrow(self.mla.q_rank, shrink),
            )
            kv = max(1, self.n_head_kv // shrink)
            delta = self.delta and replace(
                self.delta,
                n_value=max(1, self.delta.n_value // shrink),
                n_key=max(1, self.delta.n_key // shrink),
            )
            widths = {
                key: _narrow(getattr(self, key), shrink) for key in ("n_embd", "ff", "ff_dense")
            }
            wide = self.wide and replace(self.wide, n_head_kv=max(1, self.wide.n_head_kv // shrink))
            shape = replace(
                shape,
                n_vocab=0,
                n_head_kv=kv,
                n_head=kv * (self.n_head // self.n_head_kv),
                mla=mla,
                wide=wide,
                delta=delta,
                **widths,
            )
        if hidden is not None:
            if hidden < 1 or hidden % 32:
                raise OptionError(f"hidden: expected a multiple of 32, found {hidden}")
            shape = replace(shape, ff=hidden)
        if layers is not None:
            fewest = self.streams.ngram_layer + 1 if self.streams else self.n_dense + 1
            if not fewest <= layers <= self.n_layer:
                raise OptionError(
                    f"{self.name} can have {fewest} to {self.n_layer} layers, found {layers}"
                )
            shape = replace(shape, n_layer=layers)
        if self.streams:
            rows = (
                self.streams.ngram_rows
                * shape.n_layer
                * (hidden or self.ff)
                // (self.n_layer * self.ff * shrink**2)
            )
            shape = replace(shape, streams=replace(self.streams, ngram_rows=rows))
        return shape


def _narrow(width: int, by: int) -> int:
    """About width / by, in multiples of 256; of what was none, 32 more, so that it is
    none either.
    """
    return width and max(round(width / by / 256), 1) * 256 + (32 if width % 256 else 0)


def _type(shape: Shape, part: str, layer: int, row: int) -> int:
    """The type of a matrix. part: its name without layer and ".weight"."""
    n = shape.n_layer + shape.glm5  # with the MTP layer, which the quantizer counts
    more = layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
    name, kept = shape.recipe, _KEPT | (_KEPT_KIMI if shape.glm5 else {})
    if part in kept:
        name = kept[part]
    elif part.endswith("_exps") and shape.expert_type:
        name = shape.expert_type
    elif shape.recipe == "MXFP4":
        name = "MXFP4" if part.endswith("_exps") else "Q8_0"
    elif part == "output" or (part == "token_embd" and shape.tied):
        name = "Q6_K"
    elif part == "attn_k_b":
        name = "Q8_0"
    elif shape.recipe == "Q4_K_M":
        name = "Q5_K" if part == "attn_qkv" else "Q4_K"
        if shape.arch == "gemma4":
            name = _gemma_type(shape, part, layer, more)
        elif shape.n_expert == 8 and part in _EIGHT:
            name = _EIGHT[part]
        elif more and (part == "attn_v" or part.startswith("ffn_down")):
            name = "Q6_K"
    if not fits(type_from_name(name), row):
        name = _FALLBACK.get(name, name)
    return type_from_name(name if fits(type_from_name(name), row) else "F16")


def _gemma_type(shape: Shape, part: str, layer: int, more: bool) -> str:
    """As the published file's sizes have it, layer by layer: its experts count twice as
    many layers, since each has another ffn_down beside them.
    """
    if part == "ffn_down_exps":
        n = 2 * shape.n_layer
        more = layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
    if part in ("attn_k", "attn_v"):
        return "Q8_0"
    if part == "attn_output":
        return "Q5_K"
    return "Q6_K" if more and (part == "attn_q" or part.startswith("ffn_down")) else "Q4_K"


def tensors(shape: Shape) -> list[Tensor]:
    """All tensors in the order of a published file: embedding and output, then layer by
    layer.
    """
    out = []

    def add(name: str, dims: tuple[int, ...], layer: int = -1) -> None:
        matrix = len(dims) > 1 and name.endswith(".weight")
        out.append(
            Tensor(
                f"blk.{layer}.{name}" if layer >= 0 else name,
                dims,
                _type(shape, name.partition(".")[0], layer, dims[-1]) if matrix else 0,
            )
        )

    n_embd, streams = shape.n_embd, shape.streams
    add("token_embd.weight", (shape.n_vocab, n_embd))
    if not streams:
        add("output_norm.weight", (n_embd,))
    if not shape.tied:
        add("output.weight", (shape.n_vocab, n_embd))
    if streams:
        add(
            "per_layer_token_embd.weight",
            (streams.n_ngram_heads * streams.ngram_rows, n_embd // streams.n_ngram_heads),
        )
        for name, dims in _mixer(shape, "output_hc"):
            add(name, dims)
    if any(map(shape.is_wide, range(shape.n_layer))):
        add("rope_freqs.weight", (shape.wide.head // 2,))
    for layer in range(shape.n_layer):
        for name, dims in [*_attention(shape, layer), *_feed_forward(shape, layer)]:
            add(name, dims, layer)
    return out


def _mixer(shape: Shape, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that make one stream of several, instead of a norm; before a
    layer's attention and experts also those that add the result to each stream.
    """
    width = shape.streams.n * shape.n_embd
    yield f"{name}_norm.weight", (width,)
    yield f"{name}_down.weight", (shape.streams.rank, width)
    yield f"{name}_up.weight", (width, shape.streams.rank)
    if name != "output_hc":
        yield f"{name}_inject.weight", (shape.streams.n, width)


def _ngrams(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.streams.n * shape.n_embd
    yield "ple_key.weight", (width, shape.n_embd)
    yield "ple_value.weight", (shape.n_embd, shape.n_embd)
    for part in ("key", "query", "conv"):
        yield f"ple_norm_{part}.weight", (width,)
    yield "ple_conv1d.weight", (width, shape.streams.ngram_conv)


def _attention(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, rows_q = shape.n_embd, shape.n_head * shape.qk_head
    n_head_kv, head, _ = shape.heads(layer)
    rows_kv = n_head_kv * head
    if shape.wide is not None:
        rows_q = shape.n_head * head
    if shape.streams:
        yield from _mixer(shape, "hc_attn")
        if layer == shape.streams.ngram_layer:
            yield from _ngrams(shape)
    else:
        yield "attn_norm.weight", (n_embd,)
    if shape.glm5:
        yield from _hyper(shape, "hc_attn")
        yield from _glm5_attention(shape, layer)
        return
    if shape.is_delta(layer):
        yield from _delta(shape.delta, n_embd)
        return
    if shape.mla:
        mla = shape.mla
        yield "attn_q.weight", (rows_q, n_embd)
        yield "attn_kv_a_mqa.weight", (mla.kv_rank + shape.rot, n_embd)
        yield "attn_kv_a_norm.weight", (mla.kv_rank,)
        yield "attn_k_b.weight", (shape.n_head, mla.kv_rank, mla.nope)
        yield "attn_v_b.weight", (shape.n_head, mla.value, mla.kv_rank)
    else:
        for part, rows in (("q", rows_q), ("k", rows_kv), ("v", rows_kv)):
            if part == "v" and shape.is_wide(layer):
                continue
            # with the gate
            yield f"attn_{part}.weight", (2 * rows if part == "q" and shape.delta else rows, n_embd)
            if shape.qkv_bias:
                yield f"attn_{part}.bias", (rows,)
        if shape.qk_norm:
            yield "attn_q_norm.weight", (head,)
            yield "attn_k_norm.weight", (head,)
    yield (
        "attn_output.weight",
        (n_embd, rows_q if shape.wide is not None else shape.n_head * shape.v_head),
    )
    if shape.arch == "gpt-oss":
        yield "attn_output.bias", (n_embd,)
        yield "attn_sinks.weight", (shape.n_head,)
    if (streams := shape.streams) is not None:
        for part, heads in (("q", streams.index_heads), ("k", 1)):
            yield f"indexer.{part}_proj.weight", (heads * streams.index_head, n_embd)
            yield f"indexer.{part}_norm.weight", (streams.index_head,)


def _hyper(shape: Shape, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that weigh glm5-next's streams before a layer's attention or
    experts, and mix them afterwards.
    """
    n = _GLM5["hyper_connection.count"]
    yield from (
        (f"{name}_fn.weight", ((2 + n) * n, n * shape.n_embd)),
        (f"{name}_base.weight", ((2 + n) * n,)),
        (f"{name}_scale.weight", (3,)),
    )


def _glm5_attention(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kimi's delta networks, or latent attention without RoPE, whose indexer chooses
    pools of positions.
    """
    n_embd, n_head, mla, head = shape.n_embd, shape.n_head, shape.mla, shape.delta.head
    heads, width, pool = (
        _GLM5[f"attention.indexer.{key}"] for key in ("head_count", "key_length", "kpool")
    )
    if shape.is_delta(layer):
        n = n_head * head
        for part in "qkv":
            yield from (
                (f"attn_{part}.weight", (n, n_embd)),
                (f"ssm_conv1d_{part}.weight", (n, 1, shape.delta.conv)),
            )
        for part in "fg":  # what is forgotten, and the gate
            yield from (
                (f"ssm_{part}_a.weight", (head, n_embd)),
                (f"ssm_{part}_b.weight", (n, head)),
            )
        parts = {
            "ssm_beta.weight": (n_head, n_embd),
            "ssm_a": (n_head,),
            "ssm_dt.bias": (n,),
            "ssm_norm.weight": (head,),
            "attn_output.weight": (n_embd, n),
        }
    else:
        parts = {
            "attn_q_a.weight": (mla.q_rank, n_embd), "attn_q_a_norm.weight": (mla.q_rank,), "attn_q_b.weight": (n_head * mla.nope, mla.q_rank),
            "attn_kv_a_mqa.weight": (mla.kv_rank, n_embd), "attn_kv_a_norm.weight": (mla.kv_rank,), "attn_k_b.weight": (n_head, mla.kv_rank, mla.nope),
            "attn_v_b.weight": (n_head, mla.value, mla.kv_rank), "attn_output.weight": (n_embd, n_head * mla.value), "indexer.k_norm.weight": (width,),
            "indexer.k_norm.bias": (width,), "indexer.proj.weight": (heads, n_embd), "indexer.attn_k.weight": (width, n_embd),
            "indexer.attn_q_b.weight": (heads * width, mla.q_rank), "indexer_compressor_gate.weight": (width, n_embd),
            "indexer_compressor_ape.weight": (pool, width),
        }  # fmt: skip
    yield from parts.items()


def _delta(delta: Delta, n_embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a layer's tensors."""
    n_values = delta.n_value * delta.head
    yield "attn_qkv.weight", (delta.n_mixed, n_embd)
    yield "attn_gate.weight", (n_values, n_embd)
    yield "ssm_conv1d.weight", (delta.n_mixed, delta.conv)
    yield "ssm_dt.bias", (delta.n_value,)
    yield "ssm_a", (delta.n_value,)
    yield "ssm_beta.weight", (delta.n_value, n_embd)
    yield "ssm_alpha.weight", (delta.n_value, n_embd)
    yield "ssm_norm.weight", (delta.head,)
    yield "ssm_out.weight", (n_embd, n_values)


def _feed_forward(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, ff, n_expert = shape.n_embd, shape.ff, shape.n_expert
    if shape.arch == "gemma4":
        yield from _gemma_feed_forward(shape)
        return
    if shape.streams:
        yield from _mixer(shape, "hc_ffn")
    else:
        yield (
            (
                "post_attention_norm.weight"
                if shape.arch in ("gpt-oss", "glm4moe", "qwen35moe")
                else "ffn_norm.weight"
            ),
            (n_embd,),
        )
    if shape.glm5:
        yield from _hyper(shape, "hc_ffn")
    if layer < shape.n_dense:
        yield "ffn_gate.weight", (shape.ff_dense, n_embd)
        yield "ffn_up.weight", (shape.ff_dense, n_embd)
        yield "ffn_down.weight", (n_embd, shape.ff_dense)
        return
    biases = shape.arch == "gpt-oss"
    yield "ffn_gate_inp.weight", (n_expert, n_embd)
    if biases:
        yield "ffn_gate_inp.bias", (n_expert,)
    if shape.selection_bias:
        yield "exp_probs_b.bias", (n_expert,)
    for part, dims in (("gate", (ff, n_embd)), ("up", (ff, n_embd)), ("down", (n_embd, ff))):
        yield f"ffn_{part}_exps.weight", (n_expert, *dims)
        if biases:
            yield f"ffn_{part}_exps.bias", (n_expert, dims[0])
    if shape.n_shared:
        rows = shape.n_shared * ff
        if _gated(shape) < 1:
            yield "ffn_gate_inp_shexp.weight", (n_embd,)
        yield "ffn_gate_shexp.weight", (rows, n_embd)
        yield "ffn_up_shexp.weight", (rows, n_embd)
        yield "ffn_down_shexp.weight", (n_embd, rows)


def _gemma_feed_forward(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, ff, n_expert = shape.n_embd, shape.ff, shape.n_expert
    for name in (
        "post_attention_norm",
        "ffn_norm",
        "post_ffw_norm",
        "pre_ffw_norm_2",
        "post_ffw_norm_1",
        "post_ffw_norm_2",
    ):
        yield f"{name}.weight", (n_embd,)
    yield "layer_output_scale.weight", (1,)
    for part, dims in (
        ("gate", (shape.ff_dense, n_embd)),
        ("up", (shape.ff_dense, n_embd)),
        ("down", (n_embd, shape.ff_dense)),
    ):
        yield f"ffn_{part}.weight", dims
    yield "ffn_gate_inp.weight", (n_expert, n_embd)
    yield "ffn_gate_inp.scale", (n_embd,)
    yield "ffn_gate_up_exps.weight", (n_expert, 2 * ff, n_embd)
    yield "ffn_down_exps.weight", (n_expert, n_embd, ff)
    yield "ffn_down_exps.scale", (n_expert,)


def metadata(shape: Shape) -> dict[str, int | float | bool | str | np.ndarray]:
    """The file's keys but for the tokenizer's."""
    values: dict[str, int | float | bool | str | np.ndarray] = {
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.ff_dense or shape.ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": 1 if shape.mla else shape.n_head_kv,
        "attention.key_length": shape.mla.kv_rank + shape.rot if shape.mla else shape.head,
        "attention.value_length": shape.mla.kv_rank if shape.mla else shape.head,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.rot,
        "rope.freq_base": shape.rope_base,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used,
        "expert_feed_forward_length": shape.ff,
    }
    if shape.arch in ("deepseek2", "glm4moe", "glm5-next"):
        values |= {
            "leading_dense_block_count": shape.n_dense,
            "expert_shared_count": shape.n_shared,
            "expert_gating_func": _GATING[shape.gating],
            "expert_weights_norm": shape.norm_weights,
            "expert_weights_scale": shape.weights_scale,
        }
    if (delta := shape.delta) is not None and shape.glm5:
        values |= _GLM5 | {
            f"swiglu_clamp_{part}": np.full(shape.n_layer, 10, np.float32)
            for part in ("exp", "shexp")
        }
        values |= {"ssm.conv_kernel": delta.conv, "kda.head_dim": delta.head}
        values["attention.head_count_kv"] = np.array(
            [0 if shape.is_delta(layer) else 1 for layer in range(shape.n_layer)], np.int32
        )
    elif delta is not None:
        values |= {
            "expert_shared_feed_forward_length": shape.n_shared * shape.ff,
            "full_attention_interval": delta.every,
            "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
            "ssm.conv_kernel": delta.conv,
            "ssm.inner_size": delta.n_value * delta.head,
            "ssm.state_size": delta.head,
            "ssm.time_step_rank": delta.n_value,
            "ssm.group_count": delta.n_key,
        }
    if shape.streams:
        values |= _streams_metadata(shape, shape.streams)
    if shape.mla:
        values |= {
            "attention.kv_lora_rank": shape.mla.kv_rank,
            "attention.q_lora_rank": shape.mla.q_rank,
        }
        values |= {
            "attention.key_length_mla": shape.qk_head,
            "attention.value_length_mla": shape.mla.value,
        }
    if shape.sliding_window:
        values["attention.sliding_window"] = shape.sliding_window
    if shape.wide is not None:
        layers = range(shape.n_layer)
        values |= {
            "attention.head_count_kv": np.array(
                [shape.heads(layer)[0] for layer in layers], np.int32
            ),
            "attention.sliding_window_pattern": np.array(
                [not shape.is_wide(layer) for layer in layers]
            ),
            "attention.key_length": shape.wide.head,
            "attention.value_length": shape.wide.head,
            "attention.key_length_swa": shape.head,
            "attention.value_length_swa": shape.head,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope.freq_base": shape.wide.rope_base,
            "rope.freq_base_swa": shape.rope_base,
            "rope.dimension_count": shape.wide.head,
            "rope.dimension_count_swa": shape.rot,
            "final_logit_softcapping": 30.0,
        }
    if shape.yarn:
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": shape.yarn.factor}
        values["rope.scaling.original_context_length"] = shape.yarn.n_ctx_orig
        if shape.yarn.log_mul:
            values["rope.scaling.yarn_log_multiplier"] = shape.yarn.log_mul
    head = {"general.architecture": shape.arch, "general.name": f"{shape.name}, random weights"}
    return head | {f"{shape.arch}.{key}": value for key, value in values.items()}


def _streams_metadata(shape: Shape, streams: Streams) -> dict[str, int | np.ndarray]:
    heads = np.arange(streams.n_ngram_heads, dtype=np.uint64)
    return {
        "hyper_connection.count": streams.n,
        "hyper_connection.low_rank": streams.rank,
        "attention.indexer.head_count": streams.index_heads,
        "attention.indexer.key_length": streams.index_head,
        "attention.indexer.top_k": streams.index_top,
        "attention.compress_ratios": np.array(
            [0 if shape.is_delta(layer) else streams.index_block for layer in range(shape.n_layer)],
            np.int32,
        ),
        "ple.layers": np.array([streams.ngram_layer], np.int32),
        "ple.ngram_size": streams.ngram,
        "ple.heads_per_ngram": streams.ngram_heads,
        "ple.conv_kernel": streams.ngram_conv,
        "ple.eos_token_id": 0,
        # odd numbers of 45 bits, as the published ones; and no two heads of a length
        # divide by the same, so that they read different rows
        "ple.layer_multipliers": np.array(
            [(i * _STEP << 13) % 2**45 | 1 for i in range(1, streams.ngram + 1)], np.uint64
        ),
        "ple.head_offsets": heads * np.uint64(streams.ngram_rows),
        "ple.head_vocab_sizes": np.uint64(streams.ngram_rows) - heads,
        "embedding_length_per_layer_input": shape.n_embd // streams.n_ngram_heads,
    }


_GPT_OSS = Shape(
    name="gpt-oss-20b", arch="gpt-oss", recipe="MXFP4", n_layer=24, n_ctx=131072, n_embd=2880, n_vocab=201088, n_head=64, n_head_kv=8, head=64,
    n_expert=32, n_used=4, ff=2880, rope_base=150000.0, eps=1e-5, gating="softmax of the selected", qkv_bias=True, yarn=Yarn(32.0, 4096),
    sliding_window=128,
)  # fmt: skip
_ALL = (
    Shape(
        name="qwen3-30b-a3b", arch="qwen3moe", recipe="Q4_K_M", n_layer=48, n_ctx=40960, n_embd=2048, n_vocab=151936, n_head=32, n_head_kv=4, head=128,
        n_expert=128, n_used=8, ff=768, ff_dense=6144, rope_base=1e6, eps=1e-6, qk_norm=True,
    ),
    Shape(
        name="qwen3.6-35b-a3b", arch="qwen35moe", recipe="Q4_K_M", n_layer=40, n_ctx=262144, n_embd=2048, n_vocab=248320, n_head=16, n_head_kv=2, head=256,
        n_rot=64, n_expert=256, n_used=8, ff=512, n_shared=1, rope_base=1e7, eps=1e-6, qk_norm=True, delta=Delta(4, 32, 16, 128, 4),
    ),
    Shape(
        name="qwen3.8-flash-next", arch="qwen4exp", recipe="Q4_K_M", n_layer=48, n_ctx=262144, n_embd=2560, n_vocab=248320, n_head=24, n_head_kv=2, head=256,
        n_rot=64, n_expert=512, n_used=10, ff=640, n_shared=1, rope_base=1e7, eps=1e-6, qk_norm=True, delta=Delta(4, 48, 16, 128, 4), streams=Streams(),
    ),
    Shape(
        name="mixtral-8x7b", arch="llama", recipe="Q4_K_M", n_layer=32, n_ctx=32768, n_embd=4096, n_vocab=32000, n_head=32, n_head_kv=8, head=128,
        n_expert=8, n_used=2, ff=14336, rope_base=1e6, eps=1e-5,
    ),
    _GPT_OSS,
    replace(_GPT_OSS, name="gpt-oss-120b", n_layer=36, n_expert=128),
    Shape(
        name="gemma-4-26b-a4b", arch="gemma4", recipe="Q4_K_M", n_layer=30, n_ctx=262144, n_embd=2816, n_vocab=262144, n_head=16, n_head_kv=8, head=256,
        n_expert=128, n_used=8, ff=704, ff_dense=2112, rope_base=10000.0, eps=1e-6, qk_norm=True, tied=True, sliding_window=1024,
        wide=Wide(6, 2, 512, 128, 1e6),
    ),
    Shape(
        name="deepseek-v2-lite", arch="deepseek2", recipe="Q4_K_M", n_layer=27, n_ctx=163840, n_embd=2048, n_vocab=102400, n_head=16, n_head_kv=16,
        head=192, n_rot=64, mla=Mla(512, 128, 128), n_expert=64, n_used=6, ff=1408, ff_dense=10944, n_dense=1, n_shared=2, norm_weights=False,
        rope_base=10000.0, eps=1e-6, yarn=Yarn(40.0, 4096, 0.0707),
    ),
    Shape(
        name="glm-4.5-air", arch="glm4moe", recipe="Q4_0", n_layer=46, n_ctx=131072, n_embd=4096, n_vocab=151552, n_head=96, n_head_kv=8, head=128,
        n_rot=64, n_expert=128, n_used=8, ff=1408, ff_dense=10944, n_dense=1, n_shared=1, gating="sigmoid", selection_bias=True, qkv_bias=True,
        rope_base=1e6, eps=1e-5,
    ),
    # zai-org/GLM-5.3-Flash: what vLLM's and other model classes for its config.json
    # take as default; nothing reads rope_base
    Shape(
        name="glm-5.3-flash", arch="glm5-next", recipe="Q4_K_M", n_layer=45, n_ctx=1048576, n_embd=4096, n_vocab=154880, n_head=64, n_head_kv=64, head=0,
        mla=Mla(512, 256, 256, 1536), n_expert=288, n_used=8, ff=2048, ff_dense=12288, n_dense=3, n_shared=1, gating="sigmoid", weights_scale=2.5,
        selection_bias=True, rope_base=10000.0, eps=1e-5, delta=Delta(4, 64, 64, 128, 4),
    ),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}


# --- weights ---

_UNUSED = 5  # LLAMA_TOKEN_TYPE_UNUSED
_CONSTANT = 4.0  # of the constant channels, in units of the embedding's deviation
_SEEN = 0.25  # the constant, as the router and the experts see it
_CONTENT = 0.3  # of queries and keys, against the fixed vector
_VOCABULARY = 2048  # of answers
_WAYS = 2  # tokens that an answer may go on with, after each
_SURE = 30.0  # their logits
_DOUBT = 1.0  # deviation of the model's output beside them
_MOVED = 2.0  # of the code that attention moves, in units of the embedding's deviation
_STEADY = 3.0  # of what does not compare in topic keys, against a token of stress 1
_HEADSTART = 16.0  # logit of the tokenizer's tokens against unused ones
_SMALL = 0.2  # values of delta networks, so that SiLU is nearly linear
_FORGETS = 0.05  # ssm_a: they keep 97 % from one token to the next
_FORGETS_KIMI = -5.0  # the bias that keeps as much where it is five times a sigmoid
_N_CONTROL = 3  # of the demo model's tokens, the first
_WAVERS = 0.1  # of hyper-connections' gates, before the sigmoid, and of what is injected against 1
_NGRAMS = 0.1  # what their rows add, against the stream
_SHARED = 0.4  # of the variance that a feed-forward network with shared experts adds, what they add
_MXFP4 = "MXFP4"
# Where a block has its float16 scales; all of a block's values are proportional to
# them.
_SCALES = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
_ROW = 256  # values: one block of every K-quant
_STRUCTURED = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_q_a",
    "attn_kv_a_mqa",
    "attn_qkv",
    "attn_gate",
    "ssm_beta",
    "ssm_alpha",
    "ffn_gate_inp",
)
_STEP = 2654435761  # odd, so that multiples of it meet every block before they meet one twice


def shape_model(
    shape: Shape,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda n, total: None,
) -> None:
    """Write a model of this shape to `out`; the same seed gives the same file.
    progress(done, total) is called with bytes written.

    Raises OptionError for a type of experts of which no random blocks are made,
    WriteError if `out` exists (unless overwrite).
    """
    tokens, vocabulary = tokenizer(shape.n_vocab)
    shape = replace(shape, n_vocab=len(tokens))
    plan = tensors(shape)
    with ModelFile(demo_model()) as demo:
        n_tokens = len(unpack(demo.metadata["tokenizer.ggml.tokens"]))
    weights = Weights(shape, scales_of(shape), seed, n_tokens)
    n, total = 0, sum(tensor.n_bytes for tensor in plan)
    with ModelWriter(out, metadata(shape) | vocabulary, plan, overwrite=overwrite) as writer:
        for tensor in plan:
            for piece in weights.pieces(tensor):
                if len(piece):
                    writer.write(piece)
                n += len(piece)
                progress(n, total)


def tokenizer(n_vocab: int) -> tuple[list[str], dict[str, bytes]]:
    """The demo model's tokens with unused ones up to n_vocab, and the keys of the
    tokenizer.
    """
    with ModelFile(demo_model()) as demo:
        keys = {key: raw for key, raw in demo.metadata.items() if key.startswith("tokenizer.")}
    tokens = list(unpack(keys["tokenizer.ggml.tokens"]))
    unused = range(len(tokens), n_vocab)
    tokens += [f"[unused {i}]" for i in unused]
    types = keys["tokenizer.ggml.token_type"]
    keys["tokenizer.ggml.tokens"] = tokens
    keys["tokenizer.ggml.token_type"] = (
        types[:8]
        + struct.pack("<Q", len(tokens))
        + types[16:]
        + struct.pack("<i", _UNUSED) * len(unused)
    )
    return tokens, keys


# --- weights with structure ---


@dataclass(frozen=True)
class Scales:
    """The parameters of routing, as the text above explains.

    mean_size: Size of attention's mean relative to a single value, an estimate.
    topic_size: The same for the attention that makes the topic.
    """

    recency: float = 1.5
    logits: float = 1.5
    skew: float = 0.3
    topic: float = 0.7
    context: float = 1.0
    attention: float = 0.12
    feed_forward: float = 0.07
    first: float = 1.0
    keenness: float = 10.0
    mean_size: float = 0.5
    topic_size: float = 0.85


ANSWER = {
    "qwen3-30b-a3b": Scales(recency=1.2, logits=0.97, skew=0.33, topic=0.7345, context=1.15),
    "gemma-4-26b-a4b": Scales(recency=1.35, logits=1.07, topic=0.695, context=1.1),
    "gpt-oss-120b": Scales(logits=0.9, topic=0.65, context=0.5),
    "qwen3.6-35b-a3b": Scales(
        recency=1.2, logits=0.9, skew=0.33, topic=0.6, context=1.3, attention=0.17, feed_forward=0.1
    ),
    "qwen3.8-flash-next": Scales(
        recency=1.2,
        logits=0.9,
        skew=0.33,
        topic=0.75,
        context=1.3,
        attention=0.16,
        feed_forward=0.095,
    ),
}
# of shapes without a published trace, the one whose scales they have
NEAREST = {"gpt-oss-20b": "gpt-oss-120b", "glm-5.3-flash": "qwen3.6-35b-a3b"} | dict.fromkeys(
    ("deepseek-v2-lite", "glm-4.5-air", "mixtral-8x7b"), "qwen3-30b-a3b"
)


def scales_of(shape: Shape) -> Scales:
    """Those whose answers have the statistics of a published model's."""
    return ANSWER[NEAREST.get(shape.name, shape.name)]


def _silu(x):
    return x / (1 + np.exp(-x))


def _gated(shape: Shape) -> float:
    """Return the factor of attention, and of the shared expert, by a gate that reads
    nothing.
    """
    return 0.5 if shape.delta and not shape.glm5 else 1.0


class Weights:
    """Makes a shape's tensors. n_tokens: of the tokenizer; the rows of unused tokens
    are zero, since they are never read.
    """

    def __init__(self, shape: Shape, scales: Scales, seed: int, n_tokens: int):
        self._shape, self._scales, self._seed, self._n_tokens = shape, scales, seed, n_tokens
        self._n_constant = max(round(shape.n_embd / 1024), 1) * 32
        self._n_topic = self._n_constant
        self._topic = slice(self._n_constant, self._n_constant + self._n_topic)  # channels
        self._stress = self._topic.stop  # the channel
        self._topic_layer = shape.delta.every - 1 if shape.delta else shape.n_dense + 1
        self._context_layer = self._topic_layer + 1
        # channels
        self._code = slice(self._topic.stop + 1, self._topic.stop + 1 + min(shape.n_embd // 4, 256))
        # channels
        self._next = slice(
            self._code.stop,
            2 * self._code.stop - self._code.start if shape.tied else self._code.stop,
        )
        self._next_layer = self._context_layer if shape.tied else None
        self._n_special = self._next.stop
        self._n_content = shape.n_embd - self._n_special
        # a block for every slice to begin at, and as much of a slice without repetition
        # as is quick to make
        n_values = max(
            256 * 3 * shape.n_layer * shape.n_expert, min(shape.ff * shape.n_embd, 1 << 24), 1 << 20
        )
        self._pools = Pools(seed, 1 << (n_values - 1).bit_length())
        self._sizes = self._stream_sizes()
        self._hidden, self._weight_norm = self._expert_sizes()

    def pieces(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """A tensor's bytes, uint8; a piece is valid until the next is asked for."""
        layer, name = parse_block_name(tensor.name) or (-1, tensor.name)
        part, _, kind = name.partition(".")
        rng = self._rng(name, layer)
        if len(tensor.shape) == 1 or kind in ("bias", "scale"):
            values = self._vector(part, kind, layer, tensor.shape, rng)
            yield values.astype(np.float32).reshape(-1).view(np.uint8)
        elif part in ("token_embd", "output"):
            rows = self._embedding(rng) if part == "token_embd" else self._output(rng)
            if self._shape.tied:
                rows *= np.float32(self._shape.n_embd**-0.5)  # llama.cpp takes it as many times
            yield quantize(rows, tensor.type).reshape(-1)
            yield np.zeros(
                tensor.n_bytes // tensor.shape[0] * (tensor.shape[0] - len(rows)), np.uint8
            )
        elif "conv1d" in part:  # the last tap alone
            taps = np.eye(1, tensor.shape[-1], tensor.shape[-1] - 1, np.float32) * np.float32(
                _NGRAMS if part == "ple_conv1d" else 1
            )
            yield quantize(taps.repeat(tensor.shape[0], 0), tensor.type).reshape(-1)
        elif part in _STRUCTURED or (
            self._shape.glm5 and layer == self._topic_layer and part in ("attn_q_b", "attn_k_b")
        ):
            for rows, times in self._matrix(part, layer, rng):
                yield np.tile(quantize(rows, tensor.type).reshape(-1), times)
        elif (
            part == "attn_output" and layer >= 0 and layer in (self._topic_layer, self._next_layer)
        ):
            for rows in self._special_output(layer, tensor.shape[1], rng):
                yield quantize(rows, tensor.type).reshape(-1)
        elif type_name(tensor.type) in ("F32", "BF16"):
            size = math.prod(tensor.shape[:-1]), tensor.shape[-1]
            rows = (
                self._reading(size[0], rng)
                if size[1] == self._shape.n_embd
                else rng.standard_normal(size, np.float32) * np.float32(size[1] ** -0.5)
            )
            # values are what does not compare, which the norm has made smaller
            if part == "attn_v_b" and layer == self._topic_layer:
                n = self._shape.mla.nope // 2
                rows *= np.float32(math.sqrt((size[1] + 4 * n) / (size[1] - n)))
                rows[:, :n] = 0
            yield quantize(rows, tensor.type).reshape(-1)
        else:
            n_slices = tensor.shape[0] if len(tensor.shape) == 3 else 1
            n_bytes = tensor.n_bytes // n_slices
            pieces = self._pools.slices(
                tensor.type, n_bytes, n_slices, self._deviation(part, layer)
            )
            if part in (
                "attn_output",
                "ssm_out",
                "ple_value",
                "ffn_down",
                "ffn_down_shexp",
                "ffn_down_exps",
            ):
                row = n_bytes // self._shape.n_embd
                pieces = _without(pieces, n_bytes, self._n_constant * row, self._n_special * row)
            yield from pieces

    def _rng(self, name: str, layer: int) -> np.random.Generator:
        return np.random.Generator(
            np.random.SFC64([self._seed, zlib.crc32(name.encode()), layer + 1])
        )

    # --- sizes ---

    def _stream_sizes(self) -> list[tuple[float, float]]:
        """Return the residual stream's deviation before attention and before
        feed-forward of each layer, and at the end.
        """
        sizes, size = [], 1.0
        for layer in range(self._shape.n_layer + 1):
            middle = size * math.hypot(1, self._attention(layer))
            sizes.append((size, middle))
            size = middle * math.hypot(1, self._update(layer))
        return sizes

    def _attention(self, layer: int) -> float:
        """Return the size of attention's output relative to the stream."""
        return self._scales.context if layer == self._context_layer else self._scales.attention

    def _content(self, layer: int) -> float:
        """Return the size of queries and keys relative to the fixed vector.

        It makes a token attend to itself, and less to those before it.
        """
        return 0.0 if layer in (self._topic_layer, self._context_layer) else _CONTENT

    def _update(self, layer: int) -> float:
        """Return the size of a feed-forward network's output relative to the stream."""
        return self._scales.first if layer == self._shape.n_dense else self._scales.feed_forward

    def _expert_sizes(self) -> tuple[float, float]:
        """Root mean squares, drawn at random: of a hidden unit, and the root of the
        summed squares of a token's expert weights.
        """
        shape, rng = self._shape, self._rng("sizes", -1)
        gate, up = rng.standard_normal((2, 100_000))
        hidden = (
            gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            if shape.arch == "gpt-oss"
            else _silu(gate) * up
        )
        logits = rng.standard_normal((4096, shape.n_expert)) * self._scales.logits
        probs = (
            1 / (1 + np.exp(-logits))
            if shape.gating == "sigmoid"
            else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        )
        weights = np.sort(probs, axis=1)[:, -shape.n_used :]
        if shape.norm_weights or shape.gating == "softmax of the selected":
            weights = weights / weights.sum(1, keepdims=True)
        return float(np.sqrt((hidden**2).mean())), shape.weights_scale * float(
            np.sqrt((weights**2).sum(1).mean())
        )

    def _deviation(self, part: str, layer: int) -> float:
        """Return the deviation of the values of a matrix without structure."""
        shape = self._shape
        size, middle = self._sizes[layer]
        if part in ("attn_k_b", "attn_v_b"):
            return shape.mla.kv_rank**-0.5
        if part == "ssm_out" or (shape.glm5 and part == "attn_output" and shape.is_delta(layer)):
            # of values that a norm has brought to 1: sigmoid of a random one, SiLU of 1
            gate = 0.54 if shape.glm5 else _silu(1.0)
            return (
                self._attention(layer)
                * size
                / (gate * math.sqrt(shape.delta.n_value * shape.delta.head))
            )
        if part == "attn_output":
            return (
                self._attention(layer)
                * size
                / (self._scales.mean_size * _gated(shape) * math.sqrt(shape.n_head * shape.v_head))
            )
        # a mixer's input has a deviation of 2, SiLU of its middle one of 0.6, the table
        # of 1
        if (streams := shape.streams) is not None:
            wide = (streams.n * shape.n_embd) ** -0.5
            sizes = {
                "down": streams.n / 2 * wide,
                "up": _WAVERS / (0.6 * math.sqrt(streams.rank)),
                "inject": _WAVERS * streams.n * wide,
            }
            if "hc_" in part:
                return sizes[part.rpartition("_")[2]]
            if part == "per_layer_token_embd":
                return 1.0
            if part == "ple_value":
                return 2 * _NGRAMS * size * shape.n_embd**-0.5
        if not part.startswith("ffn_down"):
            return self._n_content**-0.5
        out = self._update(layer) * middle / self._hidden
        if part == "ffn_down":
            return out / math.sqrt(shape.ff_dense)
        if part == "ffn_down_shexp":
            return out * math.sqrt(_SHARED / (shape.n_shared * shape.ff)) / _gated(shape)
        return (
            out * math.sqrt((1 - _SHARED if shape.n_shared else 1) / shape.ff) / self._weight_norm
        )

    def _nearness(self, layer: int) -> float:
        """A token's logit for itself."""
        return self._scales.recency * math.log(self._shape.rope_base)

    def _key_size(self, layer: int) -> float:
        """Return the size of each value of the fixed vector that gives a token the
        logit for itself that `recency` asks for.
        """
        shape = self._shape
        turns = shape.rot
        gain = 1.0
        if shape.wide:  # where llama.cpp does not divide by the root of a head's length
            turns = shape.heads(layer)[2]
            gain = math.sqrt(shape.qk_head)
        if shape.yarn:  # llama.cpp makes attention sharper for stretched contexts
            gain = (
                1 + (shape.yarn.log_mul if shape.mla else 0.1) * math.log(shape.yarn.factor)
            ) ** 2
        if layer == self._topic_layer:  # half of the values compare
            norm = math.hypot(1, _STEADY) if shape.qk_norm else 2
            return math.sqrt(
                self._scales.keenness * norm * math.sqrt(shape.qk_head) / (turns * gain)
            )
        return math.sqrt(self._nearness(layer) * math.sqrt(shape.qk_head) / (turns * gain))

    # --- vectors ---

    def _vector(
        self, part: str, kind: str, layer: int, dims: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray:
        noise = rng.standard_normal(dims)
        size, middle = self._sizes[layer]
        if (
            self._shape.wide is not None
            and (values := self._wide_vector(part, kind, layer, dims, noise)) is not None
        ):
            return values
        if kind == "bias":
            if part == "ffn_gate_inp":
                return self._scales.skew * self._scales.logits * noise
            if part == "ssm_dt" and self._shape.glm5:
                return _FORGETS_KIMI + 0.05 * noise
            factors = {
                "exp_probs_b": 0.02,
                "attn_output": 0.02 * size,
                "ffn_down_exps": 0.1 * self._update(layer) * middle,
            }
            values = factors.get(part, 0.05) * noise
            if part in ("attn_output", "ffn_down_exps"):
                values[..., self._n_constant : self._n_special] = 0
            return values
        if part == "attn_sinks":
            if layer == self._topic_layer:
                return np.full(dims, -2 * self._scales.keenness)
            return self._nearness(layer) - 1 + 0.5 * noise
        if part in ("attn_q_norm", "attn_k_norm"):
            return np.full(dims, self._key_size(layer) * math.hypot(1, self._content(layer)))
        norm = part.replace("hc_", "")
        if norm in ("attn_norm", "output_norm"):
            return self._norm(size, 1.0, noise)
        if norm in ("ffn_norm", "post_attention_norm"):
            return self._norm(middle, _SEEN, noise)
        if part == "ssm_a":
            return np.full(dims, -1 if self._shape.glm5 else -_FORGETS)
        if part.startswith("hc_") and part.endswith(("_base", "_scale")):
            return np.full(dims, 0 if part.endswith("_base") else _WAVERS)
        return np.zeros(dims) if part == "ffn_gate_inp_shexp" else np.ones(dims)

    def _wide_vector(
        self, part: str, kind: str, layer: int, dims: tuple[int, ...], noise: np.ndarray
    ) -> np.ndarray | None:
        """Vectors of gemma4, where norms follow attention and feed-forward networks,
        too.
        """
        size, middle = self._sizes[layer]
        if part == "rope_freqs":  # what does not turn has a frequency of about 0
            return np.where(np.arange(dims[0]) < self._shape.wide.n_rot // 2, 1.0, 1e30)
        if kind == "scale" and part == "ffn_gate_inp":
            return self._norm(middle, _SEEN, noise) * math.sqrt(self._shape.n_embd)
        if part == "pre_ffw_norm_2":
            return self._norm(middle, _SEEN, noise)
        if part in ("post_ffw_norm_1", "post_ffw_norm_2"):
            return np.full(dims, math.sqrt(_SHARED if part.endswith("1") else 1 - _SHARED))
        if part in ("post_attention_norm", "post_ffw_norm"):
            adds = (
                self._attention(layer) * size
                if part == "post_attention_norm"
                else self._update(layer) * middle
            )
            values = np.full(dims, adds)
            values[self._n_constant : self._n_special] = 0
            if part == "post_attention_norm" and layer == self._topic_layer:
                # there is nothing else in it
                values[self._topic] = math.sqrt(self._n_topic / self._shape.n_embd)
            if part == "post_attention_norm" and layer == self._next_layer:
                values[self._next] = _MOVED
            return values
        if part == "output_norm":
            # the rows of the output are those of the embedding: what each of its parts
            # says is decided here
            says = np.zeros(dims)
            says[: self._n_constant] = _HEADSTART / (self._n_constant * _CONSTANT)
            says[self._next] = 1
            says[self._n_special :] = _DOUBT / 4 * self._n_content**-0.5
            return self._norm(size, 1.0, np.zeros(dims)) * says * math.sqrt(self._shape.n_embd)
        return None

    def _norm(self, size: float, constant: float, noise: np.ndarray) -> np.ndarray:
        """Weights that give a stream of this size a deviation of 1, and the constant
        channels this value.
        """
        root = math.sqrt(size**2 + _CONSTANT**2 * self._n_constant / self._shape.n_embd)
        # of each residual stream
        weights = root / size * (1 + 0.05 * noise.reshape(-1, self._shape.n_embd))
        weights[:, : self._n_constant] = root / _CONSTANT * constant
        weights[:, self._n_constant : self._n_special] = root
        return 2 * weights if self._shape.streams else weights

    # --- matrices with structure: rows float32, and how often they follow each other
    # ---

    def _reading(self, n_rows: int, rng: np.random.Generator, size: float = 1.0) -> np.ndarray:
        """Rows that read the stream but for its constant, with results of deviation
        `size`.
        """
        rows = rng.standard_normal((n_rows, self._shape.n_embd), np.float32) * np.float32(
            size * self._n_content**-0.5
        )
        rows[:, : self._n_special] = 0
        return rows

    def _keys(self, layer: int, n_rows: int, size: float, queries: bool = False) -> np.ndarray:
        """Rows that make the fixed vector, its last `rot` values in each head of
        qk_head rotated ones, and a little of the content.
        """
        rng = self._rng("keys", layer)
        if layer == self._topic_layer:
            return self._topic_keys(rng, n_rows, size, queries)
        rows = self._reading(n_rows, rng, self._content(layer) * size)
        fixed = rng.choice(np.array([-size, size]), n_rows)
        fixed[~self._turns(layer, n_rows)] = 0
        rows[:, : self._n_constant] = (fixed / self._n_constant)[:, None]
        return rows

    def _turns(self, layer: int, n_rows: int) -> np.ndarray:
        """[n_rows] bool: the values of heads that RoPE turns."""
        if self._shape.mla:
            return np.ones(n_rows, bool)
        _, head, rot = self._shape.heads(layer)
        at = np.arange(n_rows) % head
        return at % (head // 2) < rot // 2 if self._shape.is_wide(layer) else at < rot

    def _topic_keys(
        self, rng: np.random.Generator, n_rows: int, size: float, queries: bool
    ) -> np.ndarray:
        """Rows of queries that are a fixed vector in one half of the values, and of
        keys that are it times the stress of the token; in the other half keys are a
        larger fixed vector, so that a norm of the whole leaves differences of stress.
        """
        rows = np.zeros((n_rows, self._shape.n_embd), np.float32)
        fixed = rng.choice(np.array([-size, size]), n_rows) * self._turns(self._topic_layer, n_rows)
        # the same for both values that RoPE turns together
        compares = np.arange(n_rows) // 2 % 2 == 0
        if queries:
            rows[:, : self._n_constant] = (fixed * compares / self._n_constant)[:, None]
        else:
            rows[:, self._stress] = fixed * compares
            rows[:, : self._n_constant] = (fixed * ~compares * _STEADY / self._n_constant)[:, None]
        return rows

    def _matrix(
        self, part: str, layer: int, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, int]]:
        shape = self._shape
        if part == "ffn_gate_inp":
            yield self._router(rng), 1
        elif shape.is_delta(layer):
            yield self._delta(part, layer, rng), 1
        elif part == "attn_v":
            rows = self._reading(shape.n_head_kv * shape.head, rng)
            if layer == self._next_layer:  # the first head takes the code along
                rows[: shape.head] = 0
                rows[
                    np.arange(self._code.stop - self._code.start),
                    np.arange(self._code.start, self._code.stop),
                ] = 1
            yield rows, 1
        elif shape.glm5:
            yield self._unturned(part, layer, rng), shape.n_head if part.endswith("_b") else 1
        elif shape.mla:
            yield from self._latent(part, layer, rng)
        else:
            n_head_kv, head, _ = shape.heads(layer)
            keys = self._keys(
                layer,
                n_head_kv * head,
                1.0 if shape.qk_norm else self._key_size(layer),
                part == "attn_q",
            )
            if part == "attn_k":
                yield keys, 1
            else:
                for rows in np.split(keys, n_head_kv):
                    gate = np.zeros_like(rows[: head if shape.delta else 0])
                    yield np.concatenate([rows, gate]), shape.n_head // n_head_kv

    def _delta(self, part: str, layer: int, rng: np.random.Generator) -> np.ndarray:
        """The matrices of a delta network that is a running mean of the recent past:
        queries and keys are one fixed vector, and of what a head says for it each token
        takes a part of its own, by the head a fifth to a half.
        """
        shape, delta = self._shape, self._shape.delta
        if part in ("attn_q", "attn_k"):
            return self._keys(layer, delta.n_key * delta.head, 1.0)
        if part == "attn_v":
            return self._reading(delta.n_value * delta.head, rng, _SMALL)
        if part == "attn_qkv":
            keys = self._reading(delta.n_key * delta.head, rng, self._content(layer))
            fixed = rng.choice(np.array([-1, 1], np.float32), len(keys))
            keys[:, : self._n_constant] = (fixed / self._n_constant)[:, None]
            return np.concatenate(
                [keys, keys, self._reading(delta.n_value * delta.head, rng, _SMALL)]
            )
        rows = np.zeros(
            (delta.n_value * (delta.head if part == "attn_gate" else 1), shape.n_embd), np.float32
        )
        if part != "ssm_alpha":
            values = np.ones(len(rows)) if part == "attn_gate" else np.linspace(-1.4, 0, len(rows))
            rows[:, : self._n_constant] = (values / self._n_constant)[:, None]
        return rows

    def _latent(
        self, part: str, layer: int, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, int]]:
        """The matrices of latent attention; a head's rotated part is its end, and all
        heads share the rotated key.
        """
        shape, mla, size = self._shape, self._shape.mla, self._key_size(layer)
        if part == "attn_kv_a_mqa":
            yield (
                np.concatenate(
                    [self._reading(mla.kv_rank, rng), self._keys(layer, shape.rot, size)]
                ),
                1,
            )
        else:
            yield (
                np.concatenate(
                    [
                        self._reading(mla.nope, rng, _CONTENT),
                        self._keys(layer, shape.rot, size, queries=True),
                    ]
                ),
                shape.n_head,
            )

    def _unturned(self, part: str, layer: int, rng: np.random.Generator) -> np.ndarray:
        """A matrix of latent attention without RoPE; b: of one head. Where the topic is
        made, half of a head and as much of the latent are the topic's keys.
        """
        mla = self._shape.mla
        n = mla.nope // 2
        if part == "attn_k_b":
            return np.eye(mla.kv_rank, mla.nope, dtype=np.float32)
        if part == "attn_q_b":  # the norms of queries and latent take a root of two
            return (
                np.eye(mla.nope, mla.q_rank, dtype=np.float32)
                * (np.arange(mla.q_rank) < n)
                * (2 * self._scales.keenness * math.sqrt(2 * mla.nope) / n)
            )
        rows = self._reading(mla.q_rank if part == "attn_q_a" else mla.kv_rank, rng)
        if layer == self._topic_layer:
            rows[:n] = self._topic_keys(self._rng("keys", layer), n, 1.0, part == "attn_q_a")
        return rows

    def _special_output(
        self, layer: int, n_in: int, rng: np.random.Generator
    ) -> Iterator[np.ndarray]:
        """The output matrix of the attention that writes the topic, or what comes next;
        pieces of rows.
        """
        n_embd = self._shape.n_embd
        deviation = np.zeros((n_embd, 1), np.float32)
        if layer == self._topic_layer:
            deviation[self._topic] = n_in**-0.5 / (self._scales.topic_size * _gated(self._shape))
        else:
            deviation[:] = self._deviation("attn_output", layer)
            deviation[self._n_constant : self._n_special] = 0
        for place in np.array_split(np.arange(n_embd), max(n_embd * n_in >> 23, 1)):
            rows = rng.standard_normal((len(place), n_in), np.float32) * deviation[place]
            if layer == self._next_layer:
                of_next = (place >= self._next.start) & (place < self._next.stop)
                rows[of_next, place[of_next] - self._next.start] = deviation[0] * math.sqrt(n_in)
            yield rows

    def _router(self, rng: np.random.Generator) -> np.ndarray:
        shape, scales = self._shape, self._scales
        rows = self._reading(
            shape.n_expert, rng, scales.logits * math.sqrt(1 - scales.skew**2 - scales.topic**2)
        )
        of_topic = scales.topic * scales.logits * self._n_topic**-0.5
        rows[:, self._topic] = rng.standard_normal(
            (shape.n_expert, self._n_topic), np.float32
        ) * np.float32(of_topic)
        if shape.arch != "gpt-oss":  # which has a bias for it
            popularity = rng.standard_normal(shape.n_expert) * scales.skew * scales.logits
            rows[:, : self._n_constant] = (popularity / (_SEEN * self._n_constant))[:, None]
        return rows

    def _embedding(self, rng: np.random.Generator) -> np.ndarray:
        rows = rng.standard_normal((self._n_tokens, self._shape.n_embd), np.float32)
        rows[:, : self._n_constant] = _CONSTANT
        rows[:, self._topic] = 0
        rows[:, self._stress] = self._stresses()
        rows[:, self._code] = self._codes()
        if self._shape.tied:
            # what has just been said has its own code against it
            rows[:, self._next] = (self._walk() - self._codes()) * (
                _SURE / (_MOVED * (self._code.stop - self._code.start))
            )
        return rows

    def _stresses(self) -> np.ndarray:
        return self._rng("stress", -1).standard_normal(self._n_tokens)

    def _light(self) -> np.ndarray:
        """The tokens of answers: frequent ones without stress."""
        return (np.flatnonzero(self._stresses()[_N_CONTROL:] <= 0) + _N_CONTROL)[:_VOCABULARY]

    def _codes(self) -> np.ndarray:
        return self._rng("codes", -1).choice(
            np.array([-1, 1], np.float32), (self._n_tokens, self._code.stop - self._code.start)
        )

    def _walk(self) -> np.ndarray:
        """Rows that read the code of the tokens that an answer may come from to each
        token.
        """
        rng, codes = self._rng("walk", -1), self._codes()
        light = self._light()
        heavy, out = np.setdiff1d(np.arange(self._n_tokens), light), np.zeros_like(codes)
        for _ in range(_WAYS):
            order = rng.permutation(light)
            out[order] += codes[np.roll(order, 1)]  # one circle of all of them
            np.add.at(out, rng.choice(light, len(heavy)), codes[heavy])
        return out

    def _output(self, rng: np.random.Generator) -> np.ndarray:
        rows = self._reading(self._n_tokens, rng, _DOUBT)
        offset = np.full(self._n_tokens, _HEADSTART)
        offset[:_N_CONTROL] = -_HEADSTART  # an answer never ends by itself
        rows[:, self._code] = self._walk()
        rows[:, self._code] *= _SURE / (self._code.stop - self._code.start)
        rows[:, : self._n_constant] = (offset / self._n_constant)[:, None]
        return rows


# --- random weights as quantized blocks, faster than a disk can write them ---

# Normal floats are quantized once for each type; every slice is another stretch of that
# pool, and another standard deviation is another scale in the same blocks. So neither
# floats nor quantizer stand between a model of 60 GB and its disk, and yet no two
# slices of a type are the same, as long as there are not more of them than the pool has
# blocks.


@dataclass
class _Pool:
    """blocks uint8 [n_blocks, bytes of a block]; std of its values; which slice comes
    next.
    """

    blocks: np.ndarray
    std: float
    slices: int = 0


@dataclass
class Pools:
    """Pools of random blocks by type. n_values: of a pool, a power of two. The same
    seed gives the same bytes.
    """

    seed: int
    n_values: int
    _made: dict[tuple[int, int], _Pool] = field(default_factory=dict)

    def slices(self, type: int, n_bytes: int, n_slices: int, std: float) -> Iterator[np.ndarray]:
        """n_slices times n_bytes of blocks of a type, as uint8 pieces in order; their
        values have mean 0 and this deviation.

        MXFP4 knows powers of two alone as scales: there the pool is quantized anew for
        quarters of them, and the deviation is met within 10 %. A piece is a view that
        the next call of `slices` changes: write it first.

        Raises:
            OptionError: a type whose scales this module does not know.
        """
        mxfp4 = type_name(type) == _MXFP4
        quarters = round(4 * np.log2(std)) if mxfp4 else 0
        pool = self._pool(type, quarters % 4)
        blocks = _scaled_mxfp4(pool, quarters // 4) if mxfp4 else _scaled(pool, type, std)
        flat, width = blocks.reshape(-1), blocks.shape[1]
        for _ in range(n_slices):
            at = pool.slices * _STEP % len(blocks) * width
            pool.slices += 1
            left = n_bytes
            while left:
                piece = flat[at : at + left]
                yield piece
                left, at = left - len(piece), 0

    def _pool(self, type: int, quarter: int) -> _Pool:
        if (type, quarter) not in self._made:
            if type_name(type) not in (*_SCALES, _MXFP4):
                raise OptionError(
                    f"random blocks of {type_name(type)} are not made; there are"
                    f" {', '.join(sorted((*_SCALES, _MXFP4)))}"
                )
            generator = np.random.Generator(np.random.SFC64([self.seed, type]))
            spread = np.float32(2 ** (quarter / 4))
            chunk = min(self.n_values, 1 << 20)
            floats = [
                generator.standard_normal((chunk // _ROW, _ROW), np.float32) * spread
                for _ in range(self.n_values // chunk)
            ]
            imatrix = np.ones(_ROW, np.float32) if needs_imatrix(type) else None
            rows = np.concatenate(
                list(quantize_chunks([lambda f=f: f for f in floats], type, imatrix))
            )
            sample = rows[:4096]
            std = float(dequantize(sample, type, (len(sample), _ROW)).std())
            block = next(row_bytes(type, n) for n in (1, 32, 64, _ROW) if fits(type, n))
            self._made[type, quarter] = _Pool(rows.reshape(-1, block), std)
        return self._made[type, quarter]


def _without(
    pieces: Iterator[np.ndarray], n_bytes: int, start: int, stop: int
) -> Iterator[np.ndarray]:
    """Slices of n_bytes, in pieces, with zeros from start to stop of each."""
    zeros = np.zeros(stop - start, np.uint8)
    at = 0
    for piece in pieces:
        end = at + len(piece)
        yield piece[: max(start - at, 0)]
        yield zeros[max(at - start, 0) : max(end - start, 0)]
        yield piece[max(stop - at, 0) :]
        at = end % n_bytes


def _scaled(pool: _Pool, type: int, std: float) -> np.ndarray:
    out = pool.blocks.copy()
    for at in _SCALES[type_name(type)]:
        scales = out[:, at : at + 2].copy().view(np.float16).astype(np.float32) * np.float32(
            std / pool.std
        )
        out[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return out


def _scaled_mxfp4(pool: _Pool, doublings: int) -> np.ndarray:
    out = pool.blocks.copy()
    out[:, 0] = np.clip(out[:, 0].astype(np.int32) + doublings, 1, 254)
    return out


@command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.option("-o", "--out", metavar="OUT.gguf", required=True)
@click.option(
    "--layers",
    type=int,
    metavar="N",
    help="The first N layers alone, and as much of a table for n-grams.",
)
@click.option(
    "--experts-type",
    metavar="TYPE",
    help="ggml type of the routed experts. Default: the published file's.",
)
@click.option(
    "--hidden",
    type=int,
    metavar="N",
    help="Experts of N hidden values: for measuring the routing, which stays, quickly.",
)
@click.option("--shrink", default=1, metavar="K", help="Divide all widths by K: for tests.")
@click.option("--seed", default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace OUT.gguf if it exists.")
def main(
    shape: str,
    out: str,
    layers: int | None,
    experts_type: str | None,
    hidden: int | None,
    shrink: int,
    seed: int,
    overwrite: bool,
) -> None:
    """Writes a model with the shape of a published one and random weights."""
    cut = SHAPES[shape].cut(layers=layers, shrink=shrink, hidden=hidden, expert_type=experts_type)
    with progress_bar("bytes") as update:
        shape_model(
            cut, out, seed=seed, overwrite=overwrite, progress=functools.partial(update, "writing")
        )


if __name__ == "__main__":
    main()
