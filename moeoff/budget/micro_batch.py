"""The micro-batch: number of a prompt's tokens to compute at once.

Each micro-batch reads all its experts once: large ones read less, but their buffers
take memory from experts. The size is chosen when a model is opened, as results depend
on it in their last bits, by rates that earlier prompts measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from ..experts.sidecar import ORIGINAL
from ..gguf.model_index import ModelIndex
from ..system.disk import probe
from ..system.machine import machine_name, n_cores
from ..system.memory import format_size
from ..system.user_cache import CacheEntry
from .compute_probe import token_seconds
from .plan import MemoryPlan

DEFAULT_UBATCH = 512  # llama.cpp's default
LEAST = 8  # tokens; smaller batches have the same buffers
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
SMALLEST = {"n_batch": SIZES[0], "n_ubatch": SIZES[0]}  # arguments for a minimum budget
PROMPT = 4096  # maximum tokens of the prompt to choose for
_LARGEST_SHARE = 0.125  # of memory without weights and state, for compute buffers
_LARGEST_LENT = 1 / 3  # the same if experts borrow the buffers between prompts
_MAX_READS = 0.97  # maximum share of bytes a larger micro-batch may read
_MARGIN = 1.5  # computing must exceed reading by this factor, as both rates vary
_PROBE_BYTES = 4 << 30  # bytes of a prompt's reads from which rates are measured first
_PROBE_SECONDS = 0.25
_PROBE_TOKENS = 32  # of an expert, as in a micro-batch
_CHANGED = 1.5  # smaller changes of a rate are ignored, to keep the choice


@dataclass(frozen=True)
class PromptRates:
    """Rates of prompts on this machine.

    Attributes:
        token_seconds: Computing time of a token of the first `PROMPT`, without stalls.
    """

    token_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not all(0 < rate < math.inf for rate in astuple(self)):
            raise ValueError(f"expected positive rates, got {astuple(self)}")


@dataclass(frozen=True)
class MicroBatch:
    """A number of tokens and the reason of its choice."""

    n_tokens: int
    reason: str


def choose_micro_batch(
    n_ctx: int,
    room: int,
    expert_bytes: int,
    compute_bytes: Callable[[int], int],
    rates: PromptRates | None,
    expert_floor: int = 0,
    layer_bytes: int = 0,
    largest_share: float = _LARGEST_SHARE,
) -> MicroBatch:
    """Choose the micro-batch that a memory budget allows and that takes the least time.

    Args:
        room: Bytes of the budget for experts and compute buffers.
        compute_bytes: Bytes of the buffers by number of tokens.
        rates: Rates of an earlier prompt, None if not measured.
        layer_bytes: Bytes of the largest layer's experts, which must fit for more than
            `DEFAULT_UBATCH` tokens: these are computed in parts that use most of a
            layer.
        largest_share: Maximum share of `room` for buffers of more than `DEFAULT_UBATCH`
            tokens.
    """

    def leaves_room(n: int) -> bool:
        if n <= DEFAULT_UBATCH:
            return compute_bytes(n) <= min(_LARGEST_SHARE * room, room - expert_floor)
        return compute_bytes(n) <= min(largest_share * room, room - max(expert_floor, layer_bytes))

    sizes = sorted({min(n, n_ctx) for n in SIZES})
    usual = max((n for n in sizes if n <= DEFAULT_UBATCH and leaves_room(n)), default=sizes[0])
    if rates is None:
        if usual < min(DEFAULT_UBATCH, n_ctx):
            buffers = format_size(compute_bytes(usual))
            why = f"the largest whose buffers ({buffers}) leave experts most of the memory"
            return MicroBatch(usual, why)
        return MicroBatch(usual, "the default, as nothing has been measured yet")
    n_prompt = min(PROMPT, n_ctx)

    computing = n_prompt * rates.token_seconds

    def reading(n: int) -> float:
        missed = max(expert_bytes - max(room - compute_bytes(n), 0), 0)
        return -(-n_prompt // n) * missed / rates.bytes_per_second

    best = usual
    for n in sizes:
        hidden = computing >= _MARGIN * reading(best)
        if n > best and not hidden and leaves_room(n) and reading(n) < _MAX_READS * reading(best):
            best = n
    text, before = (f"{max(computing, reading(n)):.1f} s" for n in (best, usual))
    text = f"{n_prompt} tokens take {text}"
    if best != usual:
        text += f", in pieces of {usual} {before}"
    return MicroBatch(best, text)


def choose_within(
    planned_at: Callable[[int], MemoryPlan],
    model_index: ModelIndex,
    n_tokens: int,
    budget: int,
    keywords: Mapping[str, Any],
    tier: str | None,
    *,
    measures: bool = True,
) -> MicroBatch:
    """Choose by a plan for n_tokens, which fits into the budget of the process.

    Args:
        planned_at: Plan by micro-batch, called for n_tokens (`DEFAULT_UBATCH` or the
            smallest) and for larger candidates.
        tier: Tier of the experts, None for the model's precision.
        measures: True to measure missing rates if prompts read much.
    """
    planned = planned_at(n_tokens)
    room = budget - (planned.fixed - planned.computing)
    rates = recall_rates(model_index, keywords, tier)
    missed = planned.arena_full - max(room - planned.computing, 0)
    if (
        rates is None
        and measures
        and missed * min(PROMPT, planned.n_ctx) // DEFAULT_UBATCH > _PROBE_BYTES
    ):
        rates = _measured_rates(model_index, keywords.get("n_threads") or n_cores())
        remember_rates(model_index, keywords, tier, rates)

    def compute_bytes(n: int) -> int:
        if n <= n_tokens:
            return planned.computing * n // n_tokens
        return planned_at(n).computing

    return choose_micro_batch(
        planned.n_ctx,
        room,
        planned.arena_full,
        compute_bytes,
        rates,
        planned.arena_floor,
        max(nbytes * n for nbytes, n in model_index.gate_slots),
        _LARGEST_SHARE if keywords.get("n_gpu_layers") else _LARGEST_LENT,
    )


def _measured_rates(model_index: ModelIndex, n_threads: int) -> PromptRates:
    largest = max(model_index.experts.values(), key=lambda span: span.slice_bytes)
    disk = probe(model_index.files[largest.file], largest.slice_bytes, _PROBE_SECONDS)
    seconds = token_seconds(model_index, n_threads, _PROBE_SECONDS, _PROBE_TOKENS)
    return PromptRates(seconds, disk.bytes_per_second)


def recall_rates(
    model_index: ModelIndex, keywords: Mapping[str, Any], tier: str | None
) -> PromptRates | None:
    """Return the rates of this model's earlier prompts.

    Args:
        tier: Tier of the experts, None for the model's precision.
    """
    return _entry(model_index, keywords, tier).load(PromptRates)


def remember_rates(
    model_index: ModelIndex, keywords: Mapping[str, Any], tier: str | None, rates: PromptRates
) -> None:
    """Store rates for `recall_rates` unless they are similar to the stored ones."""
    entry = _entry(model_index, keywords, tier)
    before = entry.load(PromptRates)
    if before is None or not all(
        1 / _CHANGED < new / old < _CHANGED
        for new, old in zip(astuple(rates), astuple(before), strict=True)
    ):
        entry.save(rates)


def _entry(model_index: ModelIndex, keywords: Mapping[str, Any], tier: str | None) -> CacheEntry:
    return CacheEntry(
        "rates.json",
        machine=machine_name(),
        model=model_index.identity,
        tier=(tier or ORIGINAL).lower(),
        threads=keywords.get("n_threads") or n_cores(),
        gpu_layers=keywords.get("n_gpu_layers") or 0,
    )
