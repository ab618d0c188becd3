"""The memory that a model will take, told before it is loaded: nothing but its headers and its vocabulary is read.

Weights, slices and slots are exact. Caches and buffers are what llama.cpp itself plans, without allocating any: so one answer holds for all
architectures, cache types, sliding windows, recurrent states, batch sizes and layers on a GPU.
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
from ..llamacpp.native import ROW_CACHE_BYTES, ROW_READ_BYTES, TensorOverrides, cpu_buffer_type, memory_of_context
from ..system.memory import rss, slot_bytes, trim
from .plan import ALLOCATED, MemoryPlan, as_rounded, planned_process

# llama.cpp keeps a record of 50 bytes for each position of a context, also of one that is only planned: what a longer one
# takes is told from two of these lengths, because everything grows with the length or not at all
LONGEST = 1 << 18

_SAMPLER_BYTES = 12  # for each token of the vocabulary
_TEMPLATE_BYTES = 5 << 20  # with an ordinary conversation
_MANY = 1 << 18  # tokens of a vocabulary that is not known

# there are no weights for a LoRA to change, and NUMA is set up once in a process
_PLANNED = {"use_mmap": False, "verbose": False, "lora_path": None, "numa": False}

Overrides = Sequence[tuple[str, int]]  # of `TensorOverrides`


class _PlannedLlama(PatchedLlama):
    """A model of which nothing is in memory but its vocabulary."""

    _no_alloc = True
    _one_output = True

    def __init__(self, overrides: Overrides = (), n_sequences: int = 1, nextn: bool = False, unified: bool = True, offloads: bool = False):
        self.offloads = offloads
        self._n_sequences, self._loads_nextn, self._unified = n_sequences, nextn, unified
        self._overrides = TensorOverrides([(EXPERT_PATTERN, cpu_buffer_type()), *overrides])

    def sizes_with(self, **params: Any) -> MemoryPlan:
        """Sizes of another context of the model, with these of llama_context_params."""
        ctx = self.new_context(**params)
        try:
            return context_sizes(ctx)
        finally:
            api.llama_free(ctx)

    def state_of_sequence(self) -> int:
        """Bytes that each sequence has of its own in the context, however short it is: what two have more than one."""
        one, two = (self.sizes_with(n_seq_max=n, n_outputs_max=n).state for n in (1, 2))
        return max(two - one, 0)

    def nextn_sizes(self) -> MemoryPlan:
        """Sizes of the second context, which makes drafts with the next-token layers; it has no weights."""
        return replace(self.sizes_with(**nextn_params(self.context_handle, self._n_sequences)), weights=0)


def memory_sizes(llm: PatchedLlama) -> MemoryPlan:
    """The bytes that llama.cpp has allocated for a model that is loaded, or would allocate for one that is planned."""
    return replace(context_sizes(llm.context_handle), outputs=llm.output_bytes)  # llama_cpp knows better what it keeps of the logits


def context_sizes(ctx: int) -> MemoryPlan:
    """The same of a llama_context. Raises `MoeoffError` if there is no memory for the graph of its largest batch."""
    sizes = memory_of_context(ctx)
    if sizes is None:
        raise MoeoffError("no memory for the graph of the largest batch")
    return MemoryPlan(**dict(zip(ALLOCATED, sizes, strict=True)))


def with_drafts(allocated: MemoryPlan, ctx_draft: int | None) -> MemoryPlan:
    """`allocated`, and what a context that makes drafts may touch yet: its weights and state are resident already."""
    if not ctx_draft:
        return allocated
    drafts = context_sizes(ctx_draft)
    return replace(allocated, **{name: getattr(allocated, name) + getattr(drafts, name) for name in ("compute", "work", "outputs")})


def dry_load(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any] | None = None, overrides: Overrides = (), *,
             n_sequences: int = 1, extras: int = 0, nextn: bool = False, unified: bool = True) -> MemoryPlan:  # fmt: skip
    """Plans the memory of a model at a context of n_ctx tokens, in this process as it is.

    Args:
        keywords: of llama_cpp.Llama; by default those of the command line.
        overrides: where tensors go that are no routed experts.
        n_sequences: that share the context.
        extras: bytes of prompts outside the context, samplers, and other files that will be loaded.
        nextn: drafts are made with the model's next-token layers, in a context of their own.
        unified: the sequences share all of the context, and have not a part of it each.

    Raises:
        OptionError: a context that llama.cpp cannot count.
        ModelError: llama.cpp cannot load the model.
    """
    if not 0 < n_ctx <= MAX_CTX:
        raise OptionError(f"a context of {n_ctx} tokens is impossible: it lies between 1 and {MAX_CTX}")
    model_index = model_index if nextn else model_index.without_nextn()
    preflight(model_index)
    keywords = {"flash_attn": True} if keywords is None else keywords
    planned = dry_load_whole(model_index, n_ctx, keywords, overrides, n_sequences, nextn, unified, offloads=True)
    slots = [(slot_bytes(*(span.slice_bytes for span in spans)), spans[0].shape[2]) for spans in model_index.gates]
    embedding = model_index.dense.get(EMBEDDING)
    on_disk = {name: span.nbytes for name, span in model_index.row_tables.items() if not any(re.search(pattern, name) for pattern, _ in overrides)}
    return replace(
        planned,
        n_ctx=as_rounded(n_ctx),
        # experts and tables were planned in ordinary memory, because the expert buffer has tensors only while a model is really loaded
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
    """Return the bytes of the samplers of n answers at a time, and of the program that runs chat templates."""
    embedding = model_index.dense.get(EMBEDDING)
    return _TEMPLATE_BYTES + _SAMPLER_BYTES * n * (embedding.shape[1] if embedding else _MANY)


@uninterrupted
def dry_load_whole(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any], overrides: Overrides = (), n_sequences: int = 1,
                   nextn: bool = False, unified: bool = True, *, offloads: bool = False) -> MemoryPlan:  # fmt: skip
    """The bytes that llama.cpp would allocate for a model that is in memory as a whole; it need not have experts.

    Args:
        offloads: Its graphs are as with experts in an expert buffer.
    """

    def sizes_at(n: int) -> MemoryPlan:
        with planned_model(model_index, n, keywords, _PlannedLlama(overrides, n_sequences, nextn, unified, offloads)) as llm:
            sizes = memory_sizes(llm)
            if not (nextn and model_index.n_nextn):
                return sizes
            drafts = llm.nextn_sizes()
            return MemoryPlan(**{name: getattr(sizes, name) + getattr(drafts, name) for name in ALLOCATED})

    if n_ctx <= LONGEST:
        return sizes_at(n_ctx)
    half, whole = sizes_at(LONGEST // 2), sizes_at(LONGEST)
    times = (n_ctx - LONGEST) / (LONGEST // 2)
    return MemoryPlan(**{name: int(getattr(whole, name) + times * (getattr(whole, name) - getattr(half, name))) for name in ALLOCATED})


@uninterrupted
def sequence_state(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any]) -> int:
    """Bytes that each of several sequences has of its own in a context: recurrent state, or a sliding window that is kept alone. 0: they share all of it."""
    model_index = model_index.without_nextn()
    with planned_model(model_index, min(n_ctx, LONGEST), keywords) as llm:
        return llm.state_of_sequence()


@uninterrupted
def embedding_width(model_index: ModelIndex) -> int:
    """Numbers that the model takes in the place of a token's embedding."""
    with planned_model(model_index, 32, {}) as llm:
        return int(api.llama_model_n_embd_inp(llm.model_handle))


@contextlib.contextmanager
def planned_model(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any], llm: _PlannedLlama | None = None) -> Iterator[_PlannedLlama]:
    """A model and its context without their memory: nothing can be computed, but graphs can be planned."""
    llm = llm or _PlannedLlama()
    set_log(False)
    native.plan_offloaded(llm.offloads)
    try:
        llm.load(model_index.files[0], **{**keywords, **_PLANNED, "n_ctx": n_ctx})
        yield llm
    except LoadError as error:  # and no other ValueError, as OptionError is one
        raise ModelError(f"{model_index.files[0]}: llama.cpp cannot load it: {error}") from error
    finally:
        native.plan_offloaded(False)
        if llm.loaded:
            llm.close()
        trim()  # the vocabulary's memory would count against the budget


DEFAULT_CTX = 4096  # tokens, where the user names none and the model was trained for as many
MAX_CTX = (1 << 31) - 1  # llama.cpp counts positions in 32 bits


@dataclass(frozen=True)
class SliceKind:
    """Slices that look alike: `count` of them, each one matrix of one expert in `nbytes` bytes."""

    matrix: str
    type: str
    nbytes: int
    count: int


def usual_ctx(model_index: ModelIndex, n_ctx: int | None = None) -> int:
    """Tokens of the context: as the user says, where 0 is as many as the model was trained with; else as many, at most `DEFAULT_CTX`."""
    trained = model_index.n_ctx_train or DEFAULT_CTX
    return min(DEFAULT_CTX, trained) if n_ctx is None else n_ctx or trained


def context_for(model_index: ModelIndex, n_tokens: int) -> int:
    """Tokens of the context where so many are measured: the usual ones, or as many as hold them."""
    return max(usual_ctx(model_index), as_rounded(n_tokens))


def slice_kinds(model_index: ModelIndex) -> list[SliceKind]:
    """The sizes slices come in, most frequent first."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for span in model_index.experts.values():
        role = parse_tensor_name(span.name)
        counts[role.matrix_name + (" (chexps)" if role.chunk else ""), span.type, span.slice_bytes] += max(span.shape[2], 1)
    return [SliceKind(matrix, type_name(kind), nbytes, n) for (matrix, kind, nbytes), n in counts.most_common()]


def token_bytes(model_index: ModelIndex) -> int:
    """Bytes of the slices that one token uses."""
    return sum(span.slice_bytes * min(model_index.n_expert_used, span.shape[2]) for span in model_index.experts.values())


def tensor_buffers(text: str | None, model_index: ModelIndex) -> list[tuple[str, int]]:
    """(pattern, ggml_backend_buffer_type_t) of each "PATTERN=BUFFER", separated by commas.

    Raises:
        OptionError: no such buffer, no regular expression, one that is found in no tensor's name, or in that of routed experts:
            those have a buffer of their own.
    """
    if not text:
        return []
    places = []
    types = buffer_types()
    for part in text.split(","):
        pattern, _, buffer = part.rpartition("=")
        if not pattern or buffer not in types:
            raise OptionError(f"`override_tensor`: PATTERN=BUFFER with a buffer out of {', '.join(types)}, not {part!r}")
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise OptionError(f"`override_tensor`: {pattern!r} is no regular expression: {error}") from None
        expert = next(filter(search, model_index.experts), None)
        if expert is not None:
            raise OptionError(f"`override_tensor`: {pattern!r} is found in {expert!r}: routed experts lie in moeoff's expert buffer and nowhere else")
        if not any(map(search, model_index.dense)):
            raise OptionError(f"`override_tensor`: {pattern!r} is found in the name of no tensor outside the experts")
        places.append((pattern, types[buffer]))
    return places
