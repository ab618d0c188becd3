"""The micro-batch: how many tokens of a prompt are computed at once, chosen by what prompts of the model take on this machine.

Each micro-batch reads every expert that it needs once: larger ones read less, but their compute buffers take memory from the experts.
Chosen once, when a model is opened, because results depend on it in their last bits. The rates it is chosen by are measured while prompts
run, and remembered in the user's cache folder.
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
from ..system.memory import format_size, slot_bytes
from ..system.user_cache import CacheEntry
from .compute_probe import token_seconds
from .plan import MemoryPlan

USUAL = 512  # llama.cpp's default, and what is taken where nothing has been measured
LEAST = 8  # tokens: the smallest batches whose buffers are told apart
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
SMALLEST = {"n_batch": SIZES[0], "n_ubatch": SIZES[0]}  # of llama_cpp.Llama: a model's smallest budget is what these leave its experts their floor of
PROMPT = 4096  # tokens of the prompt that a choice is made for, if the context holds as many
_LARGEST_SHARE = 0.125  # of what weights and state leave, that compute buffers may take
_LARGEST_LENT = 1 / 3  # the same where they are the experts' between prompts
_WORTH = 0.97  # a larger piece is taken if it reads at most so much of the bytes
_MARGIN = 1.5  # times the reckoned reading is to be hidden behind computing: both rates vary
_MUCH = 4 << 30  # bytes of a prompt, from which on rates are measured before the first one
_PROBE_SECONDS = 0.25
_PROBE_TOKENS = 32  # of an expert, as of a prompt's pieces some have


@dataclass(frozen=True)
class PromptRates:
    """Rates of prompts on this machine.

    Attributes:
        token_seconds: of computing one token of the first `PROMPT` of a context, without waiting for experts.
        bytes_per_second: of the I/O threads' reads.
    """

    token_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not all(0 < rate < math.inf for rate in astuple(self)):
            raise ValueError(f"rates of {astuple(self)}")


@dataclass(frozen=True)
class MicroBatch:
    """A number of tokens, and why it was chosen."""

    n_tokens: int
    reason: str


def choose(
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
        n_ctx: tokens of the context.
        room: bytes of the budget that weights and state leave for experts and compute buffers.
        expert_bytes: of all experts.
        compute_bytes: of the buffers for so many tokens.
        rates: of an earlier prompt; None: nothing has been measured.
        expert_floor: bytes of the room that experts have at least.
        layer_bytes: of the experts of the largest layer. More than `USUAL` tokens are computed in
            parts, each of which uses most of a layer: it stays in memory.
        largest_share: of the room, that the buffers of more than `USUAL` tokens may take.
    """

    def leaves_room(n: int) -> bool:
        if n <= USUAL:
            return compute_bytes(n) <= min(_LARGEST_SHARE * room, room - expert_floor)
        return compute_bytes(n) <= min(largest_share * room, room - max(expert_floor, layer_bytes))

    sizes = [n for n in SIZES if n < n_ctx] + [n_ctx] if n_ctx < SIZES[-1] else list(SIZES)
    usual = max((n for n in sizes if n <= USUAL and leaves_room(n)), default=sizes[0])
    if rates is None:
        if usual < min(USUAL, n_ctx):
            return MicroBatch(usual, f"the largest whose buffers ({format_size(compute_bytes(usual))}) leave the experts most of the memory")
        return MicroBatch(usual, "the usual one; nothing has been measured yet")
    n_prompt = min(PROMPT, n_ctx)

    computing = n_prompt * rates.token_seconds

    def reading(n: int) -> float:
        missed = max(expert_bytes - max(room - compute_bytes(n), 0), 0)
        return -(-n_prompt // n) * missed / rates.bytes_per_second

    best = usual
    for n in sizes:
        hidden = computing >= _MARGIN * reading(best)
        if n > best and not hidden and leaves_room(n) and reading(n) < _WORTH * reading(best):
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
    """`choose`, by a plan for a micro-batch of n_tokens, which a budget of the process has room for.

    Args:
        planned_at: the plan for a micro-batch; asked for `n_tokens`, the usual ones or else the
            smallest, and for a larger one where that may be chosen.
        keywords: of llama_cpp.Llama, with which the model is opened.
        tier: of its experts; None: the model's own precision.
        measures: rates that no prompt has told yet, where a prompt would read much.
    """
    planned = planned_at(n_tokens)
    room = budget - (planned.fixed - planned.computing)
    rates = recall_rates(model_index, keywords, tier)
    missed = planned.arena_full - max(room - planned.computing, 0)
    if rates is None and measures and missed * min(PROMPT, planned.n_ctx) // USUAL > _MUCH:
        rates = _measured_rates(model_index, keywords.get("n_threads") or n_cores())
        remember_rates(model_index, keywords, tier, rates)

    def compute_bytes(n: int) -> int:
        if n <= n_tokens:
            return planned.computing * n // n_tokens
        return planned_at(n).computing

    return choose(
        planned.n_ctx,
        room,
        planned.arena_full,
        compute_bytes,
        rates,
        planned.arena_floor,
        max(slot_bytes(*(span.slice_bytes for span in spans)) * spans[0].shape[2] for spans in model_index.gates),
        _LARGEST_SHARE if keywords.get("n_gpu_layers") else _LARGEST_LENT,
    )


def _measured_rates(model_index: ModelIndex, n_threads: int) -> PromptRates:
    largest = max(model_index.experts.values(), key=lambda span: span.slice_bytes)
    disk = probe(model_index.files[largest.file], largest.slice_bytes, _PROBE_SECONDS)
    seconds = token_seconds(model_index, n_threads, _PROBE_SECONDS, _PROBE_TOKENS)
    return PromptRates(seconds, disk.bytes_per_second)


_CHANGED = 1.5  # times what was measured before; nearer to it the old one stays, so that the choice does too


def recall_rates(model_index: ModelIndex, keywords: Mapping[str, Any], tier: str | None) -> PromptRates | None:
    """The rates of this model's earlier prompts.

    Args:
        keywords: of llama_cpp.Llama, with which it is opened.
        tier: of its experts; None: the model's own precision.
    """
    return _entry(model_index, keywords, tier).load(PromptRates)


def remember_rates(model_index: ModelIndex, keywords: Mapping[str, Any], tier: str | None, rates: PromptRates) -> None:
    """For `recall_rates`, unless they are much as before."""
    entry = _entry(model_index, keywords, tier)
    before = entry.load(PromptRates)
    if before is None or not all(1 / _CHANGED < new / old < _CHANGED for new, old in zip(astuple(rates), astuple(before), strict=True)):
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
