"""What llama.cpp will allocate for a model, as it says itself: it loads the headers, plans every buffer and allocates none.

So one answer holds for all architectures, cache types, sliding windows, recurrent states, batch sizes and layers on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..binding import PatchedLlama, api, guarded, set_log
from ..errors import ModelError, MoeoffError
from ..gguf.layout import Layout
from ..gguf.preflight import preflight
from ..gguf.tensor_name import EMBEDDING, EXPERT_PATTERN
from ..memory import trim
from ..native import context_memory, cpu_buffer_type, tensor_overrides

__all__ = ["MemorySizes", "TensorOverrides", "dry_load", "dry_load_whole", "embedding_on_disk", "embedding_width", "memory_sizes"]

# llama.cpp keeps a record of 50 bytes for each position of a context, also of one that is only planned: what a longer one
# takes is told from two of these lengths, because everything grows with the length or not at all
_LONGEST = 1 << 18
_MTP, _F16 = 1, 1  # LLAMA_CONTEXT_TYPE_MTP, GGML_TYPE_F16

# there are no weights for a LoRA to change, and NUMA is set up once in a process
_PLANNED = {"use_mmap": False, "verbose": False, "lora_path": None, "numa": False}

TensorOverrides = Sequence[tuple[str, int]]  # (regular expression on tensor names, ggml_backend_buffer_type_t)


@dataclass(frozen=True)
class MemorySizes:
    """Bytes in host memory; what lies on a GPU does not count.

    Attributes:
        weights: outside the routed experts, without a token embedding that stays on disk.
        state: KV cache and recurrent state.
        compute: graph buffers for the largest batch.
        work: the CPU backend's work area for it; of a planned model as ordinary experts would need it, a little more than those in
            an expert buffer.
        outputs: logits that llama.cpp and llama_cpp keep.
    """

    weights: int
    state: int
    compute: int
    work: int
    outputs: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.compute + self.work + self.outputs


class _PlannedLlama(PatchedLlama):
    """A model of which nothing is in memory but its vocabulary."""

    _no_alloc = True
    _one_output = True

    def __init__(self, overrides: TensorOverrides, n_sequences: int = 1, nextn: bool = False):
        self._n_sequences, self._nextn = n_sequences, nextn
        self._overrides = tensor_overrides([(EXPERT_PATTERN, cpu_buffer_type()), *overrides])

    def _change_model_params(self, params: Any) -> None:
        super()._change_model_params(params)
        params.load_mtp = self._nextn

    def nextn_sizes(self) -> MemorySizes:
        """Of the context that makes drafts with the next-token layers, beside its own; it has no weights."""
        params = type(self.context_params).from_buffer_copy(self.context_params)
        params.ctx_type, params.ctx_other, params.n_outputs_max = _MTP, self.context_handle, self._n_sequences
        params.type_k = params.type_v = _F16  # llama-server's default for drafts, whatever the model's own cache is
        with guarded():
            ctx = api.llama_init_from_model(self.model_handle, params)
        if not ctx:
            raise ValueError("no context can be made of its next-token layers")
        try:
            return replace(_context_sizes(ctx), weights=0)
        finally:
            api.llama_free(ctx)


def memory_sizes(llm: PatchedLlama) -> MemorySizes:
    """Of a model that is loaded, or planned."""
    return replace(_context_sizes(llm.context_handle), outputs=llm.output_bytes)  # llama_cpp knows better what it keeps of the logits


def _context_sizes(ctx: int) -> MemorySizes:
    out = (ctypes.c_uint64 * 5)()
    if context_memory(ctx, out) != 0:
        raise MoeoffError("no memory for the graph of the largest batch")
    return MemorySizes(*out)


def embedding_on_disk(layout: Layout, overrides: TensorOverrides) -> int:
    """Bytes of the token embedding whose rows are read from disk: none where the overrides say where it goes."""
    return 0 if any(re.search(pattern, EMBEDDING) for pattern, _ in overrides) else layout.embedding_bytes


def dry_load(
    layout: Layout, n_ctx: int, keywords: Mapping[str, Any], overrides: TensorOverrides = (), n_sequences: int = 1, nextn: bool = False
) -> MemorySizes:
    """What a model takes with these options, at a context of n_ctx tokens, without its experts.

    Args:
        keywords: of llama_cpp.Llama.
        overrides: where tensors go that are no routed experts.
        n_sequences: that share the context.
        nextn: drafts are made with its next-token layers, in a context of their own.

    Raises:
        ModelError: llama.cpp cannot load it.
    """
    preflight(layout)
    sizes = dry_load_whole(layout, n_ctx, keywords, overrides, n_sequences, nextn)
    # experts and embedding were planned in ordinary memory, because the expert buffer has tensors only while a model is really loaded
    on_disk = (layout if nextn else layout.without_nextn()).expert_bytes + embedding_on_disk(layout, overrides)
    return replace(sizes, weights=max(sizes.weights - on_disk, 0))


def dry_load_whole(layout: Layout, n_ctx: int, keywords: Mapping[str, Any], overrides: TensorOverrides = (), n_sequences: int = 1,
                   nextn: bool = False) -> MemorySizes:  # fmt: skip
    """`dry_load` of a model that is in memory as a whole; it need not have experts."""
    if n_ctx <= _LONGEST:
        return _dry_load(layout, n_ctx, keywords, overrides, n_sequences, nextn)
    half, whole = (_dry_load(layout, n, keywords, overrides, n_sequences, nextn) for n in (_LONGEST // 2, _LONGEST))
    times = (n_ctx - _LONGEST) / (_LONGEST // 2)
    return MemorySizes(*(int(getattr(whole, name) + times * (getattr(whole, name) - getattr(half, name))) for name in MemorySizes.__dataclass_fields__))


def embedding_width(layout: Layout) -> int:
    """Numbers that the model takes in the place of a token's embedding."""
    with _planned(layout, 32, {}, (), 1, False) as llm:
        return int(api.llama_model_n_embd_inp(llm.model_handle))


def _dry_load(layout: Layout, n_ctx: int, keywords: Mapping[str, Any], overrides: TensorOverrides, n_sequences: int, nextn: bool) -> MemorySizes:
    with _planned(layout, n_ctx, keywords, overrides, n_sequences, nextn) as llm:
        sizes = memory_sizes(llm)
        if not (nextn and layout.n_nextn):
            return sizes
        drafts = llm.nextn_sizes()
        return MemorySizes(*(getattr(sizes, name) + getattr(drafts, name) for name in MemorySizes.__dataclass_fields__))


@contextlib.contextmanager
def _planned(layout: Layout, n_ctx: int, keywords: Mapping[str, Any], overrides: TensorOverrides, n_sequences: int, nextn: bool) -> Iterator[_PlannedLlama]:
    set_log(False)
    llm = _PlannedLlama(overrides, n_sequences, nextn)
    try:
        llm.load(layout.files[0], **{**keywords, **_PLANNED, "n_ctx": n_ctx})
        yield llm
    except ValueError as error:
        raise ModelError(f"{layout.files[0]}: llama.cpp cannot load it: {error}") from error
    finally:
        if llm.loaded:
            llm.close()
        trim()  # the vocabulary's memory would count against the budget
