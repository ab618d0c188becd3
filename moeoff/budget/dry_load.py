"""Planning of a model's memory from its headers and vocabulary, before it is loaded.

Weights, slices and slots are exact. llama.cpp itself plans caches and buffers without
allocating them, so plans are right for all architectures and options.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelError, MoeoffError, OptionError
from ..gguf.model_index import EMBEDDING, EXPERT_PATTERN, ModelIndex, parse_tensor_name
from ..gguf.preflight import preflight
from ..gguf.quantize import type_name
from ..llamacpp import native
from ..llamacpp.compute_thread import uninterrupted
from ..llamacpp.devices import buffer_types
from ..llamacpp.llama import LoadError, PatchedLlama, api, nextn_params, set_log
from ..llamacpp.native import (
    ROW_CACHE_BYTES,
    ROW_READ_BYTES,
    TensorOverrides,
    cpu_buffer_type,
    memory_of_context,
)
from ..system.memory import rss, trim
from .plan import ALLOCATED, MemoryPlan, as_rounded, planned_process

# llama.cpp keeps 50 bytes per position even of a planned context; longer contexts are
# extrapolated from two shorter ones, as all sizes are constant or linear
LONGEST = 1 << 18

_SAMPLER_BYTES = 12  # per token of the vocabulary
_TEMPLATE_BYTES = 5 << 20  # of an ordinary conversation
_DEFAULT_N_VOCAB = 1 << 18  # if unknown

# nothing to map, no weights to adapt; NUMA can be set up once per process
_PLANNED = {"use_mmap": False, "verbose": False, "lora_path": None, "numa": False}

Overrides = Sequence[tuple[str, int]]  # argument of `TensorOverrides`


class _PlannedLlama(PatchedLlama):
    """A model in memory without its weights."""

    _no_alloc = True
    _one_output = True

    def __init__(
        self,
        overrides: Overrides = (),
        n_sequences: int = 1,
        nextn: bool = False,
        unified: bool = True,
        offloads: bool = False,
    ):
        self.offloads = offloads
        self._n_sequences, self._loads_nextn, self._unified = n_sequences, nextn, unified
        self._overrides = TensorOverrides([(EXPERT_PATTERN, cpu_buffer_type()), *overrides])

    def sizes_with(self, **params: Any) -> MemoryPlan:
        """Return the sizes of another context with these llama_context_params."""
        ctx = self.new_context(**params)
        try:
            return context_sizes(ctx)
        finally:
            api.llama_free(ctx)

    def state_of_sequence(self) -> int:
        """Return the bytes each sequence adds to a context of any length."""
        one, two = (self.sizes_with(n_seq_max=n, n_outputs_max=n).state for n in (1, 2))
        return max(two - one, 0)

    def nextn_sizes(self) -> MemoryPlan:
        """Return the sizes of the context for drafts with next-token layers."""
        return replace(
            self.sizes_with(**nextn_params(self.context_handle, self._n_sequences)), weights=0
        )


def memory_sizes(llm: PatchedLlama) -> MemoryPlan:
    """Return the bytes llama.cpp allocated, or would allocate for a planned model."""
    # llama_cpp keeps fewer logits than the context reports
    return replace(context_sizes(llm.context_handle), outputs=llm.output_bytes)


def context_sizes(ctx: int) -> MemoryPlan:
    """Return a llama_context's sizes. Raise MoeoffError if its graph is too large."""
    sizes = memory_of_context(ctx)
    if sizes is None:
        raise MoeoffError("no memory for the graph of the largest batch")
    return MemoryPlan(**dict(zip(ALLOCATED, sizes, strict=True)))


def with_drafts(allocated: MemoryPlan, ctx_draft: int | None) -> MemoryPlan:
    """Add the buffers of a draft context, whose weights and state are resident."""
    if not ctx_draft:
        return allocated
    return _sum(allocated, replace(context_sizes(ctx_draft), weights=0, state=0))


def _sum(plan: MemoryPlan, other: MemoryPlan) -> MemoryPlan:
    return replace(plan, **{name: getattr(plan, name) + getattr(other, name) for name in ALLOCATED})


def dry_load(
    model_index: ModelIndex,
    n_ctx: int,
    keywords: Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    n_sequences: int = 1,
    extras: int = 0,
    nextn: bool = False,
    unified: bool = True,
) -> MemoryPlan:
    """Plan a model's memory at a context of n_ctx tokens, in this process.

    Args:
        keywords: Arguments of llama_cpp.Llama. Default: those of the command line.
        overrides: Buffers of tensors other than routed experts.
        extras: Bytes of other files, samplers and prompts outside the context.
        nextn: True to make drafts with next-token layers, in a context of their own.
        unified: True if sequences share the context, False if each has its part.

    Raises:
        OptionError: The context length is out of range.
        ModelError: llama.cpp cannot load the model.
    """
    if not 0 < n_ctx <= MAX_CTX:
        raise OptionError(f"`n_ctx`: expected 1 to {MAX_CTX} tokens, got {n_ctx}")
    model_index = model_index if nextn else model_index.without_nextn()
    preflight(model_index)
    keywords = {"flash_attn": True} if keywords is None else keywords
    planned = dry_load_whole(
        model_index, n_ctx, keywords, overrides, n_sequences, nextn, unified, offloads=True
    )
    slots = model_index.gate_slots
    embedding = model_index.dense.get(EMBEDDING)
    on_disk = {
        name: span.nbytes
        for name, span in model_index.row_tables.items()
        if not any(re.search(pattern, name) for pattern, _ in overrides)
    }
    return replace(
        planned,
        n_ctx=as_rounded(n_ctx),
        # dry loads put experts and tables into ordinary memory
        weights=max(planned.weights - model_index.expert_bytes - sum(on_disk.values()), 0),
        embedding=embedding.nbytes if embedding and EMBEDDING not in on_disk else 0,
        on_disk=sum(on_disk.values()),
        row_cache=ROW_CACHE_BYTES * len(on_disk),
        work=planned.work + (ROW_READ_BYTES if on_disk else 0),
        process=planned_process(rss()),
        extras=extras,
        arena_floor=2 * max((nbytes for nbytes, _ in slots), default=0),
        arena_full=sum(nbytes * n for nbytes, n in slots),
    )


def answer_bytes(model_index: ModelIndex, n: int) -> int:
    """Return the bytes of n samplers and of the chat template's interpreter."""
    embedding = model_index.dense.get(EMBEDDING)
    n_vocab = embedding.shape[1] if embedding else _DEFAULT_N_VOCAB
    return _TEMPLATE_BYTES + _SAMPLER_BYTES * n * n_vocab


@uninterrupted
def dry_load_whole(
    model_index: ModelIndex,
    n_ctx: int,
    keywords: Mapping[str, Any],
    overrides: Overrides = (),
    n_sequences: int = 1,
    nextn: bool = False,
    unified: bool = True,
    *,
    offloads: bool = False,
) -> MemoryPlan:
    """Return the bytes llama.cpp would allocate for a model entirely in memory.

    Args:
        offloads: True to plan graphs as with experts in an expert buffer.
    """

    def sizes_at(n: int) -> MemoryPlan:
        with planned_model(
            model_index,
            n,
            keywords,
            _PlannedLlama(overrides, n_sequences, nextn, unified, offloads),
        ) as llm:
            sizes = memory_sizes(llm)
            return _sum(sizes, llm.nextn_sizes()) if nextn and model_index.n_nextn else sizes

    if n_ctx <= LONGEST:
        return sizes_at(n_ctx)
    half, whole = sizes_at(LONGEST // 2), sizes_at(LONGEST)
    times = (n_ctx - LONGEST) / (LONGEST // 2)
    return MemoryPlan(
        **{
            name: int(getattr(whole, name) + times * (getattr(whole, name) - getattr(half, name)))
            for name in ALLOCATED
        }
    )


@uninterrupted
def sequence_state(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any]) -> int:
    """Return the bytes of each sequence's own state (recurrent, sliding window)."""
    model_index = model_index.without_nextn()
    with planned_model(model_index, min(n_ctx, LONGEST), keywords) as llm:
        return llm.state_of_sequence()


@uninterrupted
def embedding_width(model_index: ModelIndex) -> int:
    """Return the length of the model's input embeddings."""
    with planned_model(model_index, 32, {}) as llm:
        return int(api.llama_model_n_embd_inp(llm.model_handle))


@contextlib.contextmanager
def planned_model(
    model_index: ModelIndex,
    n_ctx: int,
    keywords: Mapping[str, Any],
    llm: _PlannedLlama | None = None,
) -> Iterator[_PlannedLlama]:
    """Open a model and context without allocating memory, to plan graphs."""
    llm = llm or _PlannedLlama()
    set_log(False)
    native.plan_offloaded(llm.offloads)
    try:
        llm.load(model_index.files[0], **{**keywords, **_PLANNED, "n_ctx": n_ctx})
        yield llm
    except LoadError as error:  # not every ValueError, which OptionError is
        raise ModelError(f"{model_index.files[0]}: llama.cpp cannot load it: {error}") from error
    finally:
        native.plan_offloaded(False)
        if llm.loaded:
            llm.close()
        trim()  # free the vocabulary, which would count against the budget


DEFAULT_CTX = 4096  # tokens
MAX_CTX = (1 << 31) - 1  # llama.cpp counts positions in 32 bits


@dataclass(frozen=True)
class SliceKind:
    """Equal slices: `count` of one matrix, of `nbytes` each."""

    matrix: str
    type: str
    nbytes: int
    count: int


def default_ctx(model_index: ModelIndex, n_ctx: int | None = None) -> int:
    """Return the context length in tokens for a requested one; 0 is the model's.

    Default: the model's, at most `DEFAULT_CTX`.
    """
    trained = model_index.n_ctx_train or DEFAULT_CTX
    return min(DEFAULT_CTX, trained) if n_ctx is None else n_ctx or trained


def context_for(model_index: ModelIndex, n_tokens: int) -> int:
    """Return a context length for measurements of n_tokens tokens."""
    return max(default_ctx(model_index), as_rounded(n_tokens))


def slice_kinds(model_index: ModelIndex) -> list[SliceKind]:
    """Return the kinds of slices, the most frequent first."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for span in model_index.experts.values():
        role = parse_tensor_name(span.name)
        counts[
            role.matrix_name + (" (chexps)" if role.chunk else ""), span.type, span.slice_bytes
        ] += max(span.shape[2], 1)
    return [
        SliceKind(matrix, type_name(kind), nbytes, n)
        for (matrix, kind, nbytes), n in counts.most_common()
    ]


def token_bytes(model_index: ModelIndex) -> int:
    """Return the bytes of slices a token uses."""
    return sum(
        span.slice_bytes * min(model_index.n_expert_used, span.shape[2])
        for span in model_index.experts.values()
    )


def tensor_buffers(text: str | None, model_index: ModelIndex) -> list[tuple[str, int]]:
    """Parse "PATTERN=BUFFER,..." into pairs (pattern, ggml_backend_buffer_type_t).

    Raises:
        OptionError: A buffer or pattern is invalid, or a pattern matches no tensor or
            routed experts, which have a buffer of their own.
    """
    if not text:
        return []
    places = []
    types = buffer_types()
    for part in text.split(","):
        pattern, _, buffer = part.rpartition("=")
        if not pattern or buffer not in types:
            expected = f"expected PATTERN=BUFFER with a buffer of {', '.join(types)}"
            raise OptionError(f"`override_tensor`: {expected}, got {part!r}")
        try:
            search = re.compile(pattern).search
        except re.error as error:
            why = f"{pattern!r} is no regular expression: {error}"
            raise OptionError(f"`override_tensor`: {why}") from None
        expert = next(filter(search, model_index.experts), None)
        if expert is not None:
            why = f"{pattern!r} matches {expert!r}, but routed experts stay in the expert buffer"
            raise OptionError(f"`override_tensor`: {why}")
        if not any(map(search, model_index.dense)):
            why = f"{pattern!r} matches no tensor outside the experts"
            raise OptionError(f"`override_tensor`: {why}")
        places.append((pattern, types[buffer]))
    return places
