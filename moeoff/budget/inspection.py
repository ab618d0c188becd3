"""Inspection of a GGUF: contents, memory, and expected speed by memory budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..gguf.model_index import ModelIndex, parse_tensor_name
from ..llamacpp.devices import devices
from ..system.disk import DiskRate, probe
from ..system.machine import n_cores
from ..system.memory import MIB, available
from .compute_probe import attention_seconds, token_seconds
from .dry_load import SliceKind, answer_bytes, default_ctx, dry_load, slice_kinds, token_bytes
from .micro_batch import DEFAULT_UBATCH, LEAST, SIZES, SMALLEST, choose_within
from .plan import CELLS, RESERVE, MemoryPlan, expected_bytes

_UNMAPPED = 14 * MIB  # unmapped libraries of a run, which plans include
INSPECT_SECONDS = 2.0
TABLE_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
_FILLED = 128  # tokens of a short conversation; the rest of the context is lent to experts
_OVERHEAD = 1.1  # of products: other operations, waking threads, driver, reads
_HIDDEN = 0.5  # maximum share of reading hidden behind other experts' computation
_HIDES = 0.7  # maximum share of computing that hides reads, which wait for gates


@dataclass(frozen=True)
class MemoryOption:
    """A memory budget and its expected speed.

    Attributes:
        resident_share: Share of expert bytes in memory in a short conversation.
        tps: Tokens per second (see `speed`), None if not measured or over budget.
        full_resident_share: `resident_share` at the end of a full context.
        full_tps: `tps` at the end of a full context.
    """

    memory_bytes: int
    resident_share: float
    tps: float | None
    full_resident_share: float
    full_tps: float | None
    fits: bool = True
    asked: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device llama.cpp can compute on, in bytes; `free` is the driver's."""

    name: str
    description: str
    free: int
    total: int


@dataclass(frozen=True)
class Report:
    """The fields of --json, sizes in bytes.

    Attributes:
        dense_bytes: Weights outside the experts.
        row_table_bytes: Dense weights that stay on disk.
        host_weight_bytes: Dense weights in memory and not on a GPU. This field and
            those up to `arena_floor_bytes` are parts of `floor_bytes`.
        compute_seconds: A token's computing time without attention.
        attention_seconds: A token's attention time at a full context.
    """

    files: tuple[str, ...]
    architecture: str
    n_layer: int
    n_moe_layer: int
    n_expert: int
    n_expert_used: int
    n_expert_shared: int
    n_ctx_train: int
    dense_bytes: int
    row_table_bytes: int
    embedding_bytes: int
    expert_bytes: int
    token_bytes: int
    slices: tuple[SliceKind, ...]
    ctx_size: int
    host_weight_bytes: int
    row_cache_bytes: int
    extra_bytes: int
    kv_bytes: int
    compute_bytes: int
    work_bytes: int
    output_bytes: int
    process_bytes: int
    reserve_bytes: int
    arena_floor_bytes: int
    arena_full_bytes: int
    floor_bytes: int
    available_bytes: int
    disk: DiskRate | None
    compute_seconds: float | None
    attention_seconds: float | None
    budgets: tuple[MemoryOption, ...]
    devices: tuple[DeviceMemory, ...]


def speed(nbytes: float, bytes_per_second: float, compute_seconds: float) -> float:
    """Return tokens per second for bytes read per token, partly hidden by computing.

    The constants are from docs/results (time.md, real-sizes.md), which a test compares.
    """
    if not nbytes:
        return 1 / compute_seconds
    reading = nbytes / bytes_per_second
    hidden = min(_HIDDEN * reading, _HIDES * compute_seconds)
    return 1 / (_OVERHEAD * compute_seconds + reading - hidden)


def residence(
    model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any]
) -> tuple[MemoryPlan, Callable[[int, bool], float]]:
    """Plan a model with its chosen or smallest micro-batch, and its experts in memory.

    `moeoff run` chooses its micro-batch, and lends experts the buffers that single
    tokens leave unused and the KV cache that a short conversation leaves unused.

    Returns:
        The plan, and a function (budget, whether the context is full) -> share of
        experts in memory while decoding.
    """
    extras = answer_bytes(model_index, 1)
    is_chosen, usual = (
        bool(keywords.get("n_batch") or keywords.get("n_ubatch")),
        min(DEFAULT_UBATCH, n_ctx),
    )

    def planned_at(n_ctx: int, **batches: int) -> MemoryPlan:
        return dry_load(model_index, n_ctx, {**keywords, **batches}, extras=extras)

    @functools.cache
    def planned(n_tokens: int) -> MemoryPlan:
        if n_tokens == SIZES[0] and not is_chosen:
            return smallest
        plan = planned_at(n_ctx, n_batch=n_tokens, n_ubatch=n_tokens)
        return replace(plan, process=smallest.process)  # planning itself increases the process

    batches = {} if is_chosen else SMALLEST
    smallest = planned_at(n_ctx, **batches)
    unused, half = n_ctx - _FILLED - CELLS, n_ctx // 2
    state = 0  # bytes of the unused part of the KV cache
    if unused > 0:
        growth = max(smallest.state - planned_at(half, **batches).state, 0)
        state = growth * unused // (n_ctx - half)

    def share(budget: int, is_full: bool) -> float:
        if budget < smallest.floor:
            return 0.0
        plan = smallest
        if not is_chosen:
            n_tokens = usual if planned(usual).floor <= budget else min(SIZES[0], usual)
            plan = planned(
                choose_within(
                    planned, model_index, n_tokens, budget, keywords, None, measures=False
                ).n_tokens
            )
        room = budget - plan.fixed + _UNMAPPED
        if not (keywords.get("n_gpu_layers") and devices()):  # devices lend nothing
            room += (
                max(plan.compute - planned(LEAST).compute, 0)
                + max(plan.work - planned(LEAST).work, 0)
                + (0 if is_full else state)
            )
            room += RESERVE // 2  # unused by single tokens, see `ArenaSizer.fit_budget`
        return min(1.0, max(room, plan.arena_floor) / plan.arena_full) if plan.arena_full else 1.0

    return smallest, share


def examine(
    model: str,
    *,
    ctx_size: int | None = None,
    memory: int | None = None,
    probe_disk: bool = True,
    seconds: float = INSPECT_SECONDS,
    keywords: Mapping[str, Any] | None = None,
) -> Report:
    """Return everything `moeoff inspect` shows.

    Args:
        ctx_size: Context length in tokens.
        memory: Additional budget in bytes.
        probe_disk: True to measure rates of disk and computing.
        seconds: Time to measure the disk; computing takes about as long.
        keywords: Arguments of llama_cpp.Llama. Default: those of the command line.

    Raises:
        ModelError: The file is missing, damaged, without experts, or not loadable.
        OptionError: The context length is out of range.
    """
    keywords = {"flash_attn": True} if keywords is None else keywords
    model_index = ModelIndex.read(model)
    model_index.require_text()
    kinds = slice_kinds(model_index)
    plan, resident_share = residence(model_index, default_ctx(model_index, ctx_size), keywords)
    per_token, disk, compute, attention = token_bytes(model_index), None, None, None
    if probe_disk:
        file = next(iter(model_index.experts.values())).file
        disk = probe(model_index.files[file], max(kind.nbytes for kind in kinds), seconds)
        n_threads = keywords.get("n_threads") or n_cores()
        compute = token_seconds(model_index, n_threads, seconds / 2)
        attention = attention_seconds(model_index, plan.n_ctx, keywords, n_threads, seconds / 4)

    def tps(share: float, computing: float | None) -> float | None:
        read = expected_bytes(
            per_token, share, model_index.n_expert / max(model_index.n_expert_used, 1)
        )
        return speed(read, disk.bytes_per_second, computing) if disk and computing else None

    budgets = [plan.floor] + [
        math.ceil(plan.fixed + share * plan.arena_full) for share in TABLE_SHARES
    ]
    rows: list[MemoryOption] = []
    for bound in sorted(
        {-(-bound // MIB) * MIB for bound in budgets if bound >= plan.floor}
        | ({memory} if memory else set())
    ):
        share, full, fits = (
            resident_share(bound, False),
            resident_share(bound, True),
            bound >= plan.floor,
        )
        if rows and rows[-1].full_resident_share == 1 and bound != memory:
            continue  # already all in memory
        short_tps = tps(share, compute) if fits else None
        full_tps = tps(full, compute + attention) if fits and compute and attention else None
        rows.append(
            MemoryOption(
                bound, round(share, 4), short_tps, round(full, 4), full_tps, fits, bound == memory
            )
        )
    shared = model_index.hparams.get("expert_shared_count")
    return Report(
        files=model_index.files,
        architecture=model_index.architecture,
        n_layer=model_index.n_layer,
        n_moe_layer=len({parse_tensor_name(name).layer for name in model_index.experts}),
        n_expert=model_index.n_expert,
        n_expert_used=model_index.n_expert_used,
        # some architectures have one shared expert and no key for it
        n_expert_shared=shared
        if type(shared) is int
        else int(any("_shexp" in name for name in model_index.dense)),
        n_ctx_train=model_index.n_ctx_train,
        dense_bytes=model_index.dense_bytes,
        row_table_bytes=plan.on_disk,
        embedding_bytes=plan.embedding,
        expert_bytes=model_index.expert_bytes,
        token_bytes=per_token,
        slices=tuple(kinds),
        ctx_size=plan.n_ctx,
        host_weight_bytes=plan.weights,
        row_cache_bytes=plan.row_cache,
        extra_bytes=plan.extras,
        kv_bytes=plan.state,
        compute_bytes=plan.compute,
        work_bytes=plan.work,
        output_bytes=plan.outputs,
        process_bytes=plan.process,
        reserve_bytes=RESERVE,
        arena_floor_bytes=plan.arena_floor,
        arena_full_bytes=plan.arena_full,
        floor_bytes=plan.floor,
        available_bytes=available(),
        disk=disk,
        compute_seconds=compute,
        attention_seconds=attention,
        budgets=tuple(rows),
        devices=tuple(
            DeviceMemory(device.name, device.description, *device.memory) for device in devices()
        ),
    )
