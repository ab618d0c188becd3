"""What a model will take in memory, told from its headers: nothing is loaded.

Weights, slices and slots are exact. The KV cache is exact where every layer has ordinary or latent attention; models with
recurrent layers, indexers or shared caches get an estimate. Compute buffers are always an estimate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..errors import OptionError
from ..gguf.layout import Layout
from ..gguf.quantize import type_name
from ..gguf.tensor_name import parse_block_name, parse_tensor_name
from ..memory import rss, slot_bytes
from .memory_plan import RESERVE, Needs, Plan

DEFAULT_CTX = 4096  # tokens, where the user names none and the model was trained for as many
MAX_CTX = (1 << 31) - 1  # llama.cpp counts positions in 32 bits
_UBATCH = 512  # llama.cpp's default: tokens that are computed at once
_LIBRARIES = 16 << 20  # llama.cpp and numpy take this much more once a model is loaded
_PROCESS = 64 << 20  # the usual size of a process without the model
_CTX_STEP = 256  # llama.cpp rounds the context up to this
_F16, _F32 = 2, 4

# tensors of layers whose cache is not simply the keys and values of every position
_ODD = ("ssm_", "shortconv", "indexer", "nextn", "attn_compressor")


@dataclass(frozen=True)
class SliceKind:
    """Slices that look alike: `count` of them, each one matrix of one expert in `nbytes` bytes."""

    matrix: str
    type: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Footprint:
    """Bytes, at a context of `n_ctx` tokens.

    Attributes:
        dense: weights outside the experts, without an embedding whose rows are read from disk.
        kv: KV cache and recurrent state, with `kv_exact` false where it is an estimate.
        compute: buffers of the graph, an estimate.
        process: Python and the libraries, as resident in this process now.
        arena_floor, arena_full: the smallest arena for experts, and the one that holds all of them.
        token_bytes: slices that one token uses.
    """

    n_ctx: int
    dense: int
    kv: int
    kv_exact: bool
    compute: int
    process: int
    arena_floor: int
    arena_full: int
    token_bytes: int

    @classmethod
    def of(cls, layout: Layout, n_ctx: int) -> Footprint:
        """Raises `OptionError` for a context that llama.cpp cannot count."""
        if not 0 < n_ctx <= MAX_CTX:
            raise OptionError(f"a context of {n_ctx} tokens is impossible: it lies between 1 and {MAX_CTX}")
        kinds = slice_kinds(layout)
        kv, exact = kv_bytes(layout, n_ctx)
        return cls(
            n_ctx=n_ctx,
            dense=layout.dense_bytes - layout.embedding_bytes,
            kv=kv,
            kv_exact=exact,
            compute=compute_bytes(layout, n_ctx),
            process=rss(),
            arena_floor=2 * max((slot_bytes(kind.nbytes) for kind in kinds), default=0),
            arena_full=sum(slot_bytes(kind.nbytes) * kind.count for kind in kinds),
            token_bytes=sum(span.nbytes // max(span.shape[2], 1) * min(layout.n_expert_used, span.shape[2]) for span in layout.experts.values()),
        )

    @property
    def fixed(self) -> int:
        """Everything but the experts."""
        return self.process + self.dense + self.kv + self.compute + RESERVE

    @property
    def floor(self) -> int:
        """The smallest budget that should do."""
        return self.fixed + self.arena_floor

    def resident_share(self, budget: int) -> float:
        """Share of the experts that stay in memory within a budget; 0 below the floor."""
        if budget < self.floor:
            return 0.0
        return min(1.0, (budget - self.fixed) / self.arena_full) if self.arena_full else 1.0


def expected_bytes(nbytes: float, resident: float) -> float:
    """Bytes that a token reads of `nbytes` that it uses, if this share of the experts is resident: tokens come back to their experts,
    and misses (1 - resident) squared, as the reference model has them under LRU."""
    return nbytes * max(1.0 - resident, 0.0) ** 2


def usual_share(layout: Layout, n_ctx: int, budget: int | None, arena: int | None) -> float:
    """Share of the experts that stay in memory within a budget of the process, or within an arena, in a process of the usual size: the
    same for the same bound, so that what is decided by it can be repeated."""
    size = replace(Footprint.of(layout, n_ctx), process=_PROCESS)
    return size.resident_share(budget) if budget is not None else min(1.0, (arena or 0) / size.arena_full)


def require_room(layout: Layout, n_ctx: int, budget: int) -> None:
    """Before anything is loaded: llama.cpp would first clear the whole KV cache, and be killed for it.

    Counts what is sure alone, so that nothing is refused that would fit; `Plan.divide` has the last word once the model is loaded.

    Raises:
        BudgetError: weights, KV cache and the experts' floor exceed the budget; says what would fit.
        OptionError: a context that llama.cpp cannot count.
    """
    size = Footprint.of(layout, n_ctx)
    kv = size.kv if size.kv_exact else size.kv // 4
    if budget - Needs(size.process, size.dense, kv, 0, n_ctx).total < size.arena_floor:
        # what is named as enough must be: with the estimates, and what the libraries will still allocate
        likely = Needs(size.process + _LIBRARIES, size.dense, size.kv, size.compute, n_ctx)
        Plan.divide(budget, likely, size.arena_floor, size.arena_full)


def slice_kinds(layout: Layout) -> list[SliceKind]:
    """The sizes slices come in, most frequent first."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for span in layout.experts.values():
        role, n_expert = parse_tensor_name(span.name), max(span.shape[2], 1)
        counts[role.matrix_name + (" (chexps)" if role.chunk else ""), span.type, span.nbytes // n_expert] += n_expert
    return [SliceKind(matrix, type_name(kind), nbytes, n) for (matrix, kind, nbytes), n in counts.most_common()]


def _per_layer(value: object, layer: int, default: int) -> int:
    """A hyperparameter that is one number or one for each layer."""
    if isinstance(value, tuple):
        value = value[layer] if layer < len(value) else None
    return value if type(value) is int and value >= 0 else default


def kv_bytes(layout: Layout, n_ctx: int) -> tuple[int, bool]:
    """Bytes of KV cache and recurrent state at a context, and whether that is exact.

    Attention, summed over its layers: n_ctx * n_head_kv * (key_length + value_length) * 2 bytes (F16), without the values where
    attention is latent (MLA); indexers: n_ctx * key_length * 2. Recurrent layers: (conv_kernel - 1) * (inner + 2 * groups * state) + inner * state floats.
    """
    h = layout.hparams
    blocks: dict[int, set[str]] = {}
    for name in layout.dense:
        if block := parse_block_name(name):
            layer, rest = block
            blocks.setdefault(layer, set()).add(rest.split(".")[0])
    n_embd = _per_layer(h.get("embedding_length"), 0, 0)
    latent = bool(h.get("attention.key_length_mla")) and bool(h.get("attention.value_length_mla"))
    exact = h.get("attention.causal") is not False and not h.get("attention.shared_kv_layers")
    cells = -(-n_ctx // _CTX_STEP) * _CTX_STEP
    total = 0
    for layer, names in blocks.items():
        exact = exact and not any(name.startswith(_ODD) for name in names)
        recurrent = any(name.startswith(("ssm_", "shortconv")) for name in names)
        if recurrent:
            inner, state = _per_layer(h.get("ssm.inner_size"), layer, 0), _per_layer(h.get("ssm.state_size"), layer, 0)
            conv = max(_per_layer(h.get("ssm.conv_kernel"), layer, 0) - 1, 0)
            total += _F32 * (conv * (inner + 2 * _per_layer(h.get("ssm.group_count"), layer, 0) * state) + inner * state)
        # linear attention also calls its projection attn_qkv
        if "attn_k" in names or (not recurrent and names & {"attn_qkv", "attn_kv", "attn_kv_a_mqa"}):
            n_head = _per_layer(h.get("attention.head_count"), layer, 0)
            width = n_embd // n_head if n_head else 0
            keys = _per_layer(h.get("attention.key_length"), layer, width)
            values = 0 if latent else _per_layer(h.get("attention.value_length"), layer, width)
            total += cells * _per_layer(h.get("attention.head_count_kv"), layer, n_head) * (keys + values) * _F16
        if "indexer" in names:
            total += cells * _per_layer(h.get("attention.indexer.key_length"), layer, 0) * _F16
    return total, exact


def compute_bytes(layout: Layout, n_ctx: int) -> int:
    """An estimate of llama.cpp's compute buffer with flash attention: one expert layer's activations and one token's
    logits, with the attention mask; a quarter more for what lies beside them."""
    h = layout.hparams
    n_tokens = min(_UBATCH, n_ctx)
    n_embd = _per_layer(h.get("embedding_length"), 0, 0)
    embedding = layout.dense.get("token_embd.weight")
    n_vocab = embedding.shape[1] if embedding else 0
    n_ff = max((span.shape[1] for span in layout.experts.values() if parse_tensor_name(span.name).matrix_name != "down"), default=0)
    mask = n_tokens * n_ctx * _F16
    layer = n_tokens * layout.n_expert_used * (n_embd + 2 * n_ff) * _F32
    return int(1.25 * (mask + n_tokens * 2 * n_embd * _F32 + max(n_vocab * _F32, layer)))
