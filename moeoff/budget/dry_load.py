"""What llama.cpp will allocate for a model, as it says itself: it loads the headers, plans every buffer and allocates none.

So one answer holds for all architectures, cache types, sliding windows, recurrent states, batch sizes and layers on a GPU.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..binding import PatchedLlama, set_log
from ..errors import ModelError, MoeoffError
from ..gguf.layout import Layout
from ..gguf.preflight import preflight
from ..gguf.tensor_name import EMBEDDING, EXPERT_PATTERN
from ..memory import trim
from ..native import context_memory, cpu_buffer_type, tensor_overrides

__all__ = ["MemorySizes", "TensorOverrides", "dry_load", "embedding_on_disk", "memory_sizes"]

# llama.cpp keeps a record of 50 bytes for each position of a context, also of one that is only planned: what a longer one
# takes is told from two of these lengths, because everything grows with the length or not at all
_LONGEST = 1 << 18

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


class _PlannedLlama(PatchedLlama):
    """A model of which nothing is in memory but its vocabulary."""

    _no_alloc = True
    _one_output = True

    def __init__(self, overrides: TensorOverrides, n_sequences: int = 1):
        self._n_sequences = n_sequences
        self._overrides = tensor_overrides([(EXPERT_PATTERN, cpu_buffer_type()), *overrides])


def memory_sizes(llm: PatchedLlama) -> MemorySizes:
    """Of a model that is loaded, or planned."""
    out = (ctypes.c_uint64 * 5)()
    if context_memory(llm.context_handle, out) != 0:
        raise MoeoffError("no memory for the graph of the largest batch")
    weights, state, compute, work, _ = out  # llama_cpp knows better what it keeps of the logits
    return MemorySizes(weights, state, compute, work, llm.output_bytes)


def embedding_on_disk(layout: Layout, overrides: TensorOverrides) -> int:
    """Bytes of the token embedding whose rows are read from disk: none where the overrides say where it goes."""
    return 0 if any(re.search(pattern, EMBEDDING) for pattern, _ in overrides) else layout.embedding_bytes


def dry_load(layout: Layout, n_ctx: int, keywords: Mapping[str, Any], overrides: TensorOverrides = (), n_sequences: int = 1) -> MemorySizes:
    """What a model takes with these options, at a context of n_ctx tokens.

    Args:
        keywords: of llama_cpp.Llama.
        overrides: where tensors go that are no routed experts.
        n_sequences: that share the context.

    Raises:
        ModelError: llama.cpp cannot load it.
    """
    preflight(layout)
    if n_ctx <= _LONGEST:
        return _dry_load(layout, n_ctx, keywords, overrides, n_sequences)
    half, whole = (_dry_load(layout, n, keywords, overrides, n_sequences) for n in (_LONGEST // 2, _LONGEST))
    times = (n_ctx - _LONGEST) / (_LONGEST // 2)
    return MemorySizes(*(int(getattr(whole, name) + times * (getattr(whole, name) - getattr(half, name))) for name in MemorySizes.__dataclass_fields__))


def _dry_load(layout: Layout, n_ctx: int, keywords: Mapping[str, Any], overrides: TensorOverrides, n_sequences: int) -> MemorySizes:
    set_log(False)
    llm = _PlannedLlama(overrides, n_sequences)
    try:
        llm.load(layout.files[0], **{**keywords, **_PLANNED, "n_ctx": n_ctx})
        sizes = memory_sizes(llm)
    except ValueError as error:
        raise ModelError(f"{layout.files[0]}: llama.cpp cannot load it: {error}") from error
    finally:
        if llm.loaded:
            llm.close()
        trim()  # the vocabulary's memory would count against the budget
    # experts and embedding were planned in ordinary memory, because the expert buffer has tensors only while a model is really loaded
    weights = max(sizes.weights - layout.expert_bytes - embedding_on_disk(layout, overrides), 0)
    return MemorySizes(weights, sizes.state, sizes.compute, sizes.work, sizes.outputs)
