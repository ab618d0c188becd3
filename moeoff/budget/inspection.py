"""Inspection of a GGUF: its contents, the memory it takes, and how fast it may run with more memory. Loads nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cpu import n_cores
from ..devices import devices
from ..gguf.model_index import ModelIndex, parse_tensor_name
from ..memory import MIB, available
from .compute_probe import token_seconds
from .disk_probe import DiskRate, probe
from .dry_load import SliceKind, dry_load, slice_kinds, token_bytes, usual_ctx
from .memory_plan import RESERVE, expected_bytes

PROBE_SECONDS = 2.0
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class MemoryOption:
    """A memory budget, and what it gives.

    Attributes:
        resident_share: of the experts' bytes.
        tps: tokens per second, see `speed`; None if it was not probed, or too little to run.
        fits: whether the model runs in it at all.
        asked: it is the budget that was asked about.
    """

    memory_bytes: int
    resident_share: float
    tps: float | None
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

    dense_bytes are the weights outside the experts in the file, embedding_disk_bytes those of them that stay on disk, and host_weight_bytes those
    that come into memory and not onto a GPU, the token embedding among them if it does. From there to arena_floor_bytes: what a process
    takes, item by item; floor_bytes is the sum.
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
    embedding_disk_bytes: int
    embedding_bytes: int
    expert_bytes: int
    token_bytes: int
    slices: tuple[SliceKind, ...]
    ctx_size: int
    host_weight_bytes: int
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
    budgets: tuple[MemoryOption, ...]
    devices: tuple[DeviceMemory, ...]


def speed(token_bytes: int, resident_share: float, bytes_per_second: float, compute_seconds: float) -> float:
    """Tokens per second: a token is computed, and waits for what it misses, which is little of what it uses where tokens come back to their experts
    (`expected_bytes`)."""
    return 1 / (compute_seconds + expected_bytes(token_bytes, resident_share) / bytes_per_second)


def examine(
    model: str, *, ctx_size: int | None = None, memory: int | None = None, probe_disk: bool = True, keywords: Mapping[str, Any] | None = None
) -> Report:
    """Everything `moeoff inspect` says.

    Args:
        memory: a budget in bytes to answer for.
        probe_disk: measures the disk's rate, and that of computing, in some seconds.
        keywords: of llama_cpp.Llama, with which the model would be opened; by default those of the command line.

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts, or llama.cpp cannot load it.
        OptionError: the context is impossible.
    """
    model_index = ModelIndex.read(model)
    model_index.require_experts()
    model_index.require_text()
    kinds = slice_kinds(model_index)
    plan = dry_load(model_index, usual_ctx(model_index, ctx_size), keywords)
    per_token, disk, compute = token_bytes(model_index), None, None
    if probe_disk:
        file = next(iter(model_index.experts.values())).file
        disk = probe(model_index.files[file], max(kind.nbytes for kind in kinds), PROBE_SECONDS)
        compute = token_seconds(model_index, (keywords or {}).get("n_threads") or n_cores())

    budgets = [plan.floor] + [math.ceil(plan.fixed + share * plan.arena_full) for share in SHARES]
    rows = []
    for bound in sorted({-(-bound // MIB) * MIB for bound in budgets if bound >= plan.floor} | ({memory} if memory else set())):
        share, fits = plan.resident_share(bound), bound >= plan.floor
        tps = speed(per_token, share, disk.bytes_per_second, compute) if disk and compute and fits else None
        rows.append(MemoryOption(bound, round(share, 4), tps, fits, bound == memory))
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
        embedding_disk_bytes=plan.on_disk,
        embedding_bytes=plan.embedding,
        expert_bytes=model_index.expert_bytes,
        token_bytes=per_token,
        slices=tuple(kinds),
        ctx_size=plan.n_ctx,
        host_weight_bytes=plan.weights,
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
        budgets=tuple(rows),
        devices=tuple(DeviceMemory(device.name, device.description, *device.memory) for device in devices()),
    )
