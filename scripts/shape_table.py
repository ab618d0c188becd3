"""Shapes of published MoE models: hyperparameters, tensors with their types, and metadata, as llama.cpp loads them.

Knows no weights: scripts/shape_model.py fills them in. The types are those that llama.cpp's quantizer gives: "Q4_K_M" and "Q4_0"
with its exceptions, "MXFP4" with Q8_0 for everything that is no expert. A row that is no multiple of 256 gets the quantizer's
fallback (Q5_0 for Q4_K, and so on).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeoff.errors import OptionError
from moeoff.gguf.file import Tensor, pack
from moeoff.gguf.quantize import fits, type_from_name

__all__ = ["SHAPES", "Mla", "Shape", "Yarn", "metadata", "tensors"]

_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_GATING = {"softmax": 1, "sigmoid": 2, "softmax of the selected": 3}  # LLAMA_EXPERT_GATING_FUNC_TYPE_*


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: ranks, and the sizes of a head's parts. q_rank 0: queries are not compressed."""

    q_rank: int
    kv_rank: int
    nope: int
    value: int


@dataclass(frozen=True)
class Yarn:
    """RoPE scaling as a file has it; log_mul 0: no key of that name."""

    factor: float
    n_ctx_orig: int
    log_mul: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's shape. Lengths in values; n_rot 0: the whole head is rotated.

    ff is one expert's hidden size, ff_dense that of a layer without experts, of which there are n_dense at the start.
    qk_norm is "head" (a norm for each head), "row" (one for all heads) or "".
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
    n_group: int = 0
    n_group_used: int = 0
    qk_norm: str = ""
    qkv_bias: bool = False
    mla: Mla | None = None
    yarn: Yarn | None = None
    sliding_window: int = 0
    expert_type: str | None = None

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

    def cut(self, *, layers: int | None = None, shrink: int = 1, expert_type: str | None = None) -> Shape:
        """The shape with fewer layers, with all widths divided, with experts of another type.

        Number and choice of experts stay; the vocabulary of a shape that is shrunk is the tokenizer's (n_vocab 0).

        Raises:
            OptionError: fewer layers than it takes to have one with experts, or a shrink below 1.
        """
        shape = replace(self, expert_type=expert_type and expert_type.upper())
        if shrink < 1:
            raise OptionError(f"shrink: expected at least 1, found {shrink}")
        if shrink > 1:
            mla = self.mla and replace(self.mla, q_rank=_narrow(self.mla.q_rank, shrink), kv_rank=_narrow(self.mla.kv_rank, shrink))
            kv = max(1, self.n_head_kv // shrink)
            widths = {key: _narrow(getattr(self, key), shrink) for key in ("n_embd", "ff", "ff_dense")}
            shape = replace(shape, n_vocab=0, n_head_kv=kv, n_head=kv * (self.n_head // self.n_head_kv), mla=mla, **widths)
        if layers is not None:
            if not self.n_dense < layers <= self.n_layer:
                raise OptionError(f"{self.name} can have {self.n_dense + 1} to {self.n_layer} layers, found {layers}")
            shape = replace(shape, n_layer=layers)
        return shape


def _narrow(width: int, by: int) -> int:
    """About width / by, in multiples of 256; of what was none, 32 more, so that it is none either."""
    return width and max(round(width / by / 256), 1) * 256 + (32 if width % 256 else 0)


def _type(shape: Shape, part: str, layer: int, row: int) -> int:
    """The type of a matrix. part: its name without layer and ".weight"."""
    more = layer < shape.n_layer // 8 or layer >= 7 * shape.n_layer // 8 or (layer - shape.n_layer // 8) % 3 == 2
    name = shape.recipe
    if part.endswith("_exps") and shape.expert_type:
        name = shape.expert_type
    elif shape.recipe == "MXFP4":
        name = "MXFP4" if part.endswith("_exps") else "Q8_0"
    elif part == "output":
        name = "Q6_K"
    elif part == "attn_k_b":
        name = "Q8_0"
    elif shape.recipe == "Q4_K_M":
        name = "Q4_K"
        if shape.n_expert == 8 and part in ("attn_k", "attn_v", "attn_output"):
            name = "Q5_K" if part == "attn_output" else "Q8_0"
        elif more and (part == "attn_v" or part.startswith("ffn_down")):
            name = "Q6_K"
    if not fits(type_from_name(name), row):
        name = _FALLBACK.get(name, name)
    return type_from_name(name)


def tensors(shape: Shape) -> list[Tensor]:
    """All tensors in the order of a published file: embedding and output, then layer by layer."""
    n_embd = shape.n_embd
    out = [
        Tensor("token_embd.weight", (shape.n_vocab, n_embd), _type(shape, "token_embd", -1, n_embd)),
        Tensor("output_norm.weight", (n_embd,), 0),
        Tensor("output.weight", (shape.n_vocab, n_embd), _type(shape, "output", -1, n_embd)),
    ]
    for layer in range(shape.n_layer):
        for name, dims in [*_attention(shape), *_feed_forward(shape, layer)]:
            part, dot, kind = name.partition(".")
            matrix = len(dims) > 1 and dot and kind == "weight" and part != "ffn_gate_inp"
            out.append(Tensor(f"blk.{layer}.{name}", dims, _type(shape, part, layer, dims[-1]) if matrix else 0))
    return out


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, rows_q, rows_kv = shape.n_embd, shape.n_head * shape.qk_head, shape.n_head_kv * shape.head
    yield "attn_norm.weight", (n_embd,)
    if shape.mla:
        mla = shape.mla
        if mla.q_rank:
            yield "attn_q_a.weight", (mla.q_rank, n_embd)
            yield "attn_q_a_norm.weight", (mla.q_rank,)
            yield "attn_q_b.weight", (rows_q, mla.q_rank)
        else:
            yield "attn_q.weight", (rows_q, n_embd)
        yield "attn_kv_a_mqa.weight", (mla.kv_rank + shape.rot, n_embd)
        yield "attn_kv_a_norm.weight", (mla.kv_rank,)
        yield "attn_k_b.weight", (shape.n_head, mla.kv_rank, mla.nope)
        yield "attn_v_b.weight", (shape.n_head, mla.value, mla.kv_rank)
    else:
        for part, rows in (("q", rows_q), ("k", rows_kv), ("v", rows_kv)):
            yield f"attn_{part}.weight", (rows, n_embd)
            if shape.qkv_bias:
                yield f"attn_{part}.bias", (rows,)
        if shape.qk_norm:
            for part, rows in (("q", rows_q), ("k", rows_kv)):
                yield f"attn_{part}_norm.weight", (rows if shape.qk_norm == "row" else shape.head,)
    yield "attn_output.weight", (n_embd, shape.n_head * shape.v_head)
    if shape.arch == "gpt-oss":
        yield "attn_output.bias", (n_embd,)
        yield "attn_sinks.weight", (shape.n_head,)


def _feed_forward(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd, ff, n_expert = shape.n_embd, shape.ff, shape.n_expert
    yield ("post_attention_norm.weight" if shape.arch in ("gpt-oss", "glm4moe") else "ffn_norm.weight"), (n_embd,)
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
        yield "ffn_gate_shexp.weight", (rows, n_embd)
        yield "ffn_up_shexp.weight", (rows, n_embd)
        yield "ffn_down_shexp.weight", (n_embd, rows)


def metadata(shape: Shape) -> dict[str, bytes]:
    """The file's keys but for the tokenizer's."""
    values: dict[str, int | float | bool | str] = {
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
    if shape.arch in ("deepseek2", "glm4moe"):
        values |= {
            "leading_dense_block_count": shape.n_dense,
            "expert_shared_count": shape.n_shared,
            "expert_gating_func": _GATING[shape.gating],
            "expert_weights_norm": shape.norm_weights,
            "expert_weights_scale": shape.weights_scale,
        }
    if shape.n_group:
        values |= {"expert_group_count": shape.n_group, "expert_group_used_count": shape.n_group_used}
    if shape.mla:
        values |= {"attention.kv_lora_rank": shape.mla.kv_rank, "attention.q_lora_rank": shape.mla.q_rank}
        values |= {"attention.key_length_mla": shape.qk_head, "attention.value_length_mla": shape.mla.value}
    if shape.sliding_window:
        values["attention.sliding_window"] = shape.sliding_window
    if shape.yarn:
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": shape.yarn.factor}
        values["rope.scaling.original_context_length"] = shape.yarn.n_ctx_orig
        if shape.yarn.log_mul:
            values["rope.scaling.yarn_log_multiplier"] = shape.yarn.log_mul
    head = {"general.architecture": shape.arch, "general.name": f"{shape.name}, random weights"}
    return {key: pack(value) for key, value in head.items()} | {f"{shape.arch}.{key}": pack(value) for key, value in values.items()}


_GPT_OSS = Shape(
    name="gpt-oss-20b", arch="gpt-oss", recipe="MXFP4", n_layer=24, n_ctx=131072, n_embd=2880, n_vocab=201088, n_head=64, n_head_kv=8, head=64,
    n_expert=32, n_used=4, ff=2880, rope_base=150000.0, eps=1e-5, gating="softmax of the selected", qkv_bias=True, yarn=Yarn(32.0, 4096),
    sliding_window=128,
)  # fmt: skip
_ALL = (
    Shape(
        name="qwen3-30b-a3b", arch="qwen3moe", recipe="Q4_K_M", n_layer=48, n_ctx=40960, n_embd=2048, n_vocab=151936, n_head=32, n_head_kv=4, head=128,
        n_expert=128, n_used=8, ff=768, ff_dense=6144, rope_base=1e6, eps=1e-6, qk_norm="head",
    ),
    _GPT_OSS,
    replace(_GPT_OSS, name="gpt-oss-120b", n_layer=36, n_expert=128),
    Shape(
        name="mixtral-8x7b", arch="llama", recipe="Q4_K_M", n_layer=32, n_ctx=32768, n_embd=4096, n_vocab=32000, n_head=32, n_head_kv=8, head=128,
        n_expert=8, n_used=2, ff=14336, rope_base=1e6, eps=1e-5,
    ),
    Shape(
        name="deepseek-v2-lite", arch="deepseek2", recipe="Q4_K_M", n_layer=27, n_ctx=163840, n_embd=2048, n_vocab=102400, n_head=16, n_head_kv=16,
        head=192, n_rot=64, mla=Mla(0, 512, 128, 128), n_expert=64, n_used=6, ff=1408, ff_dense=10944, n_dense=1, n_shared=2, norm_weights=False,
        rope_base=10000.0, eps=1e-6, yarn=Yarn(40.0, 4096, 0.0707),
    ),
    Shape(
        name="deepseek-v3", arch="deepseek2", recipe="Q4_K_M", n_layer=61, n_ctx=163840, n_embd=7168, n_vocab=129280, n_head=128, n_head_kv=128,
        head=192, n_rot=64, mla=Mla(1536, 512, 128, 128), n_expert=256, n_used=8, ff=2048, ff_dense=18432, n_dense=3, n_shared=1, gating="sigmoid",
        weights_scale=2.5, selection_bias=True, n_group=8, n_group_used=4, rope_base=10000.0, eps=1e-6, yarn=Yarn(40.0, 4096, 0.1),
    ),
    Shape(
        name="glm-4.5-air", arch="glm4moe", recipe="Q4_0", n_layer=46, n_ctx=131072, n_embd=4096, n_vocab=151552, n_head=96, n_head_kv=8, head=128,
        n_rot=64, n_expert=128, n_used=8, ff=1408, ff_dense=10944, n_dense=1, n_shared=1, gating="sigmoid", selection_bias=True, qkv_bias=True,
        rope_base=1e6, eps=1e-5,
    ),
    Shape(
        name="olmoe-1b-7b", arch="olmoe", recipe="Q4_K_M", n_layer=16, n_ctx=4096, n_embd=2048, n_vocab=50304, n_head=16, n_head_kv=16, head=128,
        n_expert=64, n_used=8, ff=1024, rope_base=10000.0, eps=1e-5, qk_norm="row", norm_weights=False,
    ),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}
