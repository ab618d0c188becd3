"""Inspection of a GGUF: its contents, the memory it takes, and how fast it may run with more memory. Loads nothing."""

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
from .dry_load import SliceKind, answer_bytes, dry_load, slice_kinds, token_bytes, usual_ctx
from .micro_batch import LEAST, SIZES, SMALLEST, USUAL, choose_within
from .plan import CELLS, RESERVE, MemoryPlan, expected_bytes

_UNMAPPED = 14 * MIB  # that a run has less than planned, once it has unmapped libraries
PROBE_SECONDS = 2.0
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
_FILLED = 128  # tokens of the context, of a short question and its answer: what is behind them is lent to the experts
_BESIDE = 1.1  # times the products alone take: what is between them; threads that sleep and wake, driver and reads while experts come and go
_HIDDEN = 0.5  # of the time that reading takes, at most: it passes while other experts are computed
_HIDES = 0.7  # of the time that computing takes, at most: reading waits for what the gates choose


@dataclass(frozen=True)
class MemoryOption:
    """A memory budget, and what it gives.

    Attributes:
        resident_share: of the experts' bytes, while tokens are decoded in a short conversation.
        tps: tokens per second, see `speed`; None if it was not probed, or too little to run.
        full_resident_share, full_tps: the same at the end of a full context.
        fits: whether the model runs in it at all.
        asked: it is the budget that was asked about.
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
    """Memory of a device, other than the CPU, that llama.cpp can compute on: bytes, free as its driver tells."""

    name: str
    description: str
    free: int
    total: int


@dataclass(frozen=True)
class Report:
    """The fields of --json. Sizes in bytes, rates per second.

    dense_bytes are the weights outside the experts in the file, row_table_bytes those of them that stay on disk, and host_weight_bytes those
    that come into memory and not onto a GPU, the token embedding among them if it does. From there to arena_floor_bytes: what a process
    takes, item by item; floor_bytes is the sum. compute_seconds are a token's without attention, attention_seconds those of attention to a full context.
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
    """Tokens per second, if each reads so many bytes: reading is hidden behind computing in part.

    The parts are those of docs/results: time.md, and real-sizes.md for larger models, from which a test takes that they tell what was measured there.
    """
    if not nbytes:
        return 1 / compute_seconds
    reading = nbytes / bytes_per_second
    return 1 / (_BESIDE * compute_seconds + reading - min(_HIDDEN * reading, _HIDES * compute_seconds))


def residence(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any]) -> tuple[MemoryPlan, Callable[[int, bool], float]]:
    """Plan a model with its smallest micro-batch, unless another one was chosen, and tell how many of its experts are in memory while tokens are decoded.

    `moeoff run` chooses its micro-batch, and lends experts what batches of one token leave untouched of the
    buffers, and a short conversation of the KV cache.

    Args:
        n_ctx: Tokens of the context.
        keywords: Arguments of llama_cpp.Llama with which the model would be opened.

    Returns:
        The plan; and a function of a budget, and of whether the context is full, so that nothing of it is
        lent, that returns the share of the experts.
    """
    extras = answer_bytes(model_index, 1)
    is_chosen, usual = bool(keywords.get("n_batch") or keywords.get("n_ubatch")), min(USUAL, n_ctx)

    def planned_at(n_ctx: int, **batches: int) -> MemoryPlan:
        return dry_load(model_index, n_ctx, {**keywords, **batches}, extras=extras)

    @functools.cache
    def planned(n_tokens: int) -> MemoryPlan:
        if n_tokens == SIZES[0] and not is_chosen:
            return smallest
        return replace(planned_at(n_ctx, n_batch=n_tokens, n_ubatch=n_tokens), process=smallest.process)  # planning takes memory itself

    smallest = planned_at(n_ctx, **({} if is_chosen else SMALLEST))
    unused, half = n_ctx - _FILLED - CELLS, n_ctx // 2
    state = 0  # of the KV cache behind the first tokens: what grows with the context, for the rest of it
    if unused > 0:
        state = max(smallest.state - planned_at(half, **({} if is_chosen else SMALLEST)).state, 0) * unused // (n_ctx - half)

    def share(budget: int, is_full: bool) -> float:
        if budget < smallest.floor:
            return 0.0
        plan = smallest
        if not is_chosen:
            n_tokens = usual if planned(usual).floor <= budget else min(SIZES[0], usual)
            plan = planned(choose_within(planned, model_index, n_tokens, budget, keywords, None, measures=False).n_tokens)
        room = budget - plan.fixed + _UNMAPPED
        if not (keywords.get("n_gpu_layers") and devices()):  # what a device computes with is not lent
            room += max(plan.compute - planned(LEAST).compute, 0) + max(plan.work - planned(LEAST).work, 0) + (0 if is_full else state)
            room += RESERVE // 2  # what single tokens leave of it (`ArenaSizer.fit_budget`)
        return min(1.0, max(room, plan.arena_floor) / plan.arena_full) if plan.arena_full else 1.0

    return smallest, share


def examine(
    model: str,
    *,
    ctx_size: int | None = None,
    memory: int | None = None,
    probe_disk: bool = True,
    seconds: float = PROBE_SECONDS,
    keywords: Mapping[str, Any] | None = None,
) -> Report:
    """Everything `moeoff inspect` says.

    Args:
        memory: a budget in bytes to answer for.
        probe_disk: measures the disk's rate, and that of computing.
        seconds: of reading; those of computing are about as many.
        keywords: of llama_cpp.Llama, with which the model would be opened; by default those of the command line.

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts, or llama.cpp cannot load it.
        OptionError: the context is impossible.
    """
    keywords = {"flash_attn": True} if keywords is None else keywords
    model_index = ModelIndex.read(model)
    model_index.require_text()
    kinds = slice_kinds(model_index)
    plan, resident_share = residence(model_index, usual_ctx(model_index, ctx_size), keywords)
    per_token, disk, compute, attention = token_bytes(model_index), None, None, None
    if probe_disk:
        file = next(iter(model_index.experts.values())).file
        disk = probe(model_index.files[file], max(kind.nbytes for kind in kinds), seconds)
        n_threads = keywords.get("n_threads") or n_cores()
        compute = token_seconds(model_index, n_threads, seconds / 2)
        attention = attention_seconds(model_index, plan.n_ctx, keywords, n_threads, seconds / 4)

    def tps(share: float, computing: float | None) -> float | None:
        read = expected_bytes(per_token, share, model_index.n_expert / max(model_index.n_expert_used, 1))
        return speed(read, disk.bytes_per_second, computing) if disk and computing else None

    budgets = [plan.floor] + [math.ceil(plan.fixed + share * plan.arena_full) for share in SHARES]
    rows: list[MemoryOption] = []
    for bound in sorted({-(-bound // MIB) * MIB for bound in budgets if bound >= plan.floor} | ({memory} if memory else set())):
        share, full, fits = resident_share(bound, False), resident_share(bound, True), bound >= plan.floor
        if rows and rows[-1].full_resident_share == 1 and bound != memory:
            continue  # more gives no more
        short_tps = tps(share, compute) if fits else None
        full_tps = tps(full, compute + attention) if fits and compute and attention else None
        rows.append(MemoryOption(bound, round(share, 4), short_tps, round(full, 4), full_tps, fits, bound == memory))
    shared = model_index.hparams.get("expert_shared_count")
    return Report(
        files=model_index.files,
        architecture=model_index.architecture,
        n_layer=model_index.n_layer,
        n_moe_layer=len({parse_tensor_name(name).layer for name in model_index.experts}),
        n_expert=model_index.n_expert,
        n_expert_used=model_index.n_expert_used,
        # some architectures have one shared expert, and no number for it
        n_expert_shared=shared if type(shared) is int else int(any("_shexp" in name for name in model_index.dense)),
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
        devices=tuple(DeviceMemory(device.name, device.description, *device.memory) for device in devices()),
    )
