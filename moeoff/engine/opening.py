"""`plan`: memory, micro-batch and profile of a model, before it is loaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..budget.draft_model import uses_nextn
from ..budget.dry_load import answer_bytes, dry_load, tensor_buffers
from ..budget.loss_contract import SECTION as CONTRACT_SECTION
from ..budget.micro_batch import DEFAULT_UBATCH, SMALLEST, MicroBatch, choose_within
from ..budget.plan import RESERVE, MemoryPlan, require_header_room
from ..errors import BudgetError, MoeoffError, OptionError
from ..experts.profile import Profile
from ..gguf.model_index import ModelIndex, loaded_whole
from ..llamacpp import native
from ..llamacpp.compute_thread import require_computable
from ..options import Config
from ..system.memory import Budget
from .driver import sections


@dataclass(frozen=True)
class Opening:
    """The choices made before a model is loaded.

    Attributes:
        config: User's configuration.
        model_index: Index of the model.
        budget: Budget of the process, or of the experts.
        memory: Memory plan of llama.cpp.
        keywords: Keywords of llama_cpp.Llama.
        tensor_buffers: Overrides for tensors other than experts.
        extras: Bytes of cached prompts, samplers and chat templates.
        micro_batch: Micro-batch in tokens, and the reason.
        profile: Sections of the calibration that the strategy may use.
    """

    config: Config
    model_index: ModelIndex
    budget: Budget
    memory: MemoryPlan
    keywords: Mapping[str, Any]
    tensor_buffers: list[tuple[str, int]]
    extras: int
    micro_batch: MicroBatch
    profile: Profile | None

    @property
    def nextn(self) -> bool:
        """True if next-token layers are loaded, to make drafts."""
        return uses_nextn(self.config.spec_type)

    @property
    def may_hold_everything(self) -> bool:
        """True if all experts may fit, so that no strategy is needed."""
        memory = self.memory
        return self.budget.left(memory.fixed - memory.computing - memory.state) >= memory.arena_full


def plan(
    config: Config,
    model_index: ModelIndex | None = None,
    budget: Budget | None = None,
    *,
    n_sequences: int = 1,
    unified: bool = True,
    extras: int | None = None,
    loaded: int = 0,
    more: Callable[[MemoryPlan], int] = lambda _memory: 0,
) -> Opening:
    """Choose what a model is opened with.

    Args:
        config: User's configuration.
        model_index: Index of the model, if its header has been read.
        budget: Budget, if already chosen.
        n_sequences: Sequences that share the context.
        unified: True if each sequence may use all of the context, not a part.
        extras: Bytes of samplers and chat templates; None: of one answer at a time.
        loaded: Bytes of other files to load with the model.
        more: Function of the memory plan that returns additional bytes.

    Raises:
        ModelError: The file is missing, damaged, or has no routed experts.
        BudgetError: The budget is below the model's needs; its hint has a sufficient
            one.
        OptionError: A value is invalid for this model.
    """
    require_computable()
    model_index = model_index or ModelIndex.read(config.model_path)
    model_index.require_experts()
    budget = budget or Budget.of(config.memory, config.expert_memory)
    config.check_model(model_index)
    if config.attention == "f32" and native.attention_kernels() != 1:
        raise OptionError("`attention` f32: there is no such kernel for this processor")
    buffers, keywords = tensor_buffers(config.override_tensor, model_index), config.keywords
    require_header_room(model_index.files[0], model_index.header_memory, budget.most)
    if adapter := config.llama_cpp.get("lora_path"):
        loaded += sum(loaded_whole(adapter))
    extras = answer_bytes(model_index, 1) if extras is None else extras

    def planned(n_ctx: int, keywords: Mapping[str, Any]) -> MemoryPlan:
        return dry_load(
            model_index,
            n_ctx,
            keywords,
            buffers,
            n_sequences=n_sequences,
            extras=extras + loaded,
            nextn=uses_nextn(config.spec_type),
            unified=unified,
        )

    n_ctx = (512 if config.n_ctx is None else config.n_ctx) or model_index.n_ctx_train or 512
    memory = planned(n_ctx, keywords)
    is_fixed = (
        config.n_batch or config.n_ubatch or config.deterministic or config.replay is not None
    )
    if budget.process is not None and not is_fixed and memory.floor > budget.most:
        keywords |= SMALLEST
        memory = planned(n_ctx, keywords)
    extras += more(memory)
    memory = replace(memory, extras=extras + loaded)

    def planned_again(n_ctx: int, **others: Any) -> MemoryPlan:
        return replace(planned(n_ctx, keywords | others), process=memory.process)

    try:
        memory.within(budget.most, planned_again)
    except BudgetError as error:
        with contextlib.suppress(MoeoffError):  # not for every model
            if not config.flash_attn and planned_again(n_ctx, flash_attn=True).floor <= budget.most:
                error.hint["flash_attn"] = True
        raise

    n_planned = min(keywords.get("n_ubatch", DEFAULT_UBATCH), DEFAULT_UBATCH, memory.n_ctx)

    @functools.cache
    def planned_for(n_tokens: int) -> MemoryPlan:
        if n_tokens == n_planned:
            return memory
        return planned_again(memory.n_ctx, n_batch=n_tokens, n_ubatch=n_tokens)

    micro_batch = _micro_batch(config, model_index, budget, n_planned, planned_for, keywords)
    if not (config.n_batch or config.n_ubatch) and micro_batch.n_tokens != n_planned:
        memory = planned_for(micro_batch.n_tokens)
        keywords |= {"n_batch": micro_batch.n_tokens, "n_ubatch": micro_batch.n_tokens}
    return Opening(
        config,
        model_index,
        budget,
        memory,
        keywords,
        buffers,
        extras,
        micro_batch,
        _profile(config, model_index, budget, memory),
    )


def _micro_batch(
    config: Config,
    model_index: ModelIndex,
    budget: Budget,
    n_planned: int,
    planned_for: Callable[[int], MemoryPlan],
    keywords: Mapping[str, Any],
) -> MicroBatch:
    """Return the user's micro-batch, or else the fastest that memory allows."""
    n_ctx = planned_for(n_planned).n_ctx
    if config.n_batch or config.n_ubatch:
        given = min(
            keywords.get("n_ubatch", DEFAULT_UBATCH), keywords.get("n_batch", DEFAULT_UBATCH), n_ctx
        )
        return MicroBatch(given, "as given")
    if budget.process is None:
        return MicroBatch(n_planned, "the usual one: only the experts' memory is bounded")
    if config.repeatable:
        same = "the usual one: the run must be the same at every budget and on every machine"
        small = "the smallest one: there is no room for the buffers of the usual one"
        return MicroBatch(n_planned, same if n_planned == min(DEFAULT_UBATCH, n_ctx) else small)
    return choose_within(planned_for, model_index, n_planned, budget.process, keywords, config.tier)


def _profile(
    config: Config, model_index: ModelIndex, budget: Budget, memory: MemoryPlan
) -> Profile | None:
    # calibration covers no gates of next-token layers, which only drafts load
    names = {CONTRACT_SECTION} | (
        set() if uses_nextn(config.spec_type) else sections(config.strategy)
    )
    # twice: converting the arrays takes their size again; at the floor a part of the
    # reserve
    room = max(budget.most - memory.floor, RESERVE // 8) // 2
    if config.profile == "auto":
        return Profile.find(model_index, names, room)
    return Profile.read(config.profile, model_index, names, room) if config.profile else None
