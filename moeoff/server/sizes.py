"""A server's default context length, slots, prompt cache and checkpoints within the
budget.

The prompt cache and checkpoints take memory from experts: computing a prompt again
reads nearly every expert, and costs more than some misses in every answer. They take at
most an eighth, because most servers have fewer conversations than slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..budget.plan import MemoryPlan
from ..options import ServerOptions
from ..system.memory import MIB

PARALLEL = 4  # default slots
_STEP = 256  # llama.cpp rounds contexts to multiples of it, in tokens
_USEFUL = 1024  # tokens of a slot's context below which fewer slots are better
_SHARE = 8  # divisor of the experts' memory: the most for prompts and checkpoints
_CHECKPOINTS = 8  # most checkpoints of a slot: of the last turns and parts of long prompts


@dataclass(frozen=True)
class ContextSize:
    """A context length and its number of slots.

    Attributes:
        n_ctx: Tokens of all slots.
        remark: Sentence for the user, if that is less than the default.
    """

    n_ctx: int
    n_parallel: int
    remark: str | None = None


def choose_sizes(
    planned: Callable[[int, int], MemoryPlan], usual: int, n_parallel: int | None, budget: int
) -> ContextSize:
    """Choose the default context length, or one for half of the memory left.

    Args:
        planned: Function that plans memory for a context length and a number of slots.
        usual: Default context length of a slot in tokens.
        n_parallel: Requested slots, or None.
        budget: Memory budget of the process in bytes.
    """
    planned = functools.cache(planned)  # each call opens the model
    n, least = n_parallel or PARALLEL, min(_STEP, usual)
    n_ctx = most = usual * n
    while True:  # until the choice fits its own plan: compute buffers depend on the context
        plan, half = planned(n_ctx, n), planned(max(n_ctx // 2, 1), n)
        room = budget - (plan.fixed - plan.state)
        token = max((plan.state - half.state) / max(n_ctx - n_ctx // 2, 1), 1e-9)
        # independent of the context: recurrent, or windows
        own = max(plan.state - n_ctx * token, 0)
        fits = int((room / 2 - own) / token) // _STEP * _STEP
        if n_parallel is None and n > 1 and fits < min(_USEFUL, usual) * n:
            n = max(min(fits // min(_USEFUL, usual), n - 1), 1)
            n_ctx = min(max(fits, least), usual * n)
            continue
        if fits >= n_ctx or n_ctx <= least:
            break
        n_ctx = max(fits, least)
    if n_ctx == most:
        return ContextSize(n_ctx, n)
    slots = f"{n} slots" if n > 1 else "1 slot"
    remark = (
        f"context of {n_ctx} tokens for {slots}: more takes half of the experts' memory; set -c"
        " and -np"
    )
    return ContextSize(n_ctx, n, remark)


@dataclass(frozen=True)
class PromptMemory:
    """Memory limits of the prompt cache and of checkpoints.

    Attributes:
        cache_ram: Prompt cache in bytes.
        reason: Reason for its size.
        checkpoint: Bytes of a checkpoint.
    """

    cache_ram: int = 0
    reason: str = ""
    n_checkpoints: int = 0
    checkpoint: int = 0
    n_slots: int = 1

    @property
    def checkpoints(self) -> int:
        """Bytes of all checkpoints, reserved at the start."""
        return self.n_checkpoints * self.checkpoint * self.n_slots

    @classmethod
    def of(
        cls, planned: MemoryPlan, room: int, sequence: int, n_slots: int, options: ServerOptions
    ) -> PromptMemory:
        """Take the limits from options, or else from the memory that is left.

        Args:
            planned: Memory plan without prompt cache and checkpoints.
            room: Bytes for experts, prompt cache and checkpoints.
            sequence: Bytes of a slot's state of fixed size: recurrent, or a sliding
                window's.
        """
        spare = max(room - planned.arena_full, room // _SHARE, 0)
        own, n_checkpoints = sequence * n_slots, options.ctx_checkpoints
        if n_checkpoints is None:
            n_checkpoints = min(_CHECKPOINTS, spare // own) if own else 0
        cache_ram, reason = options.cache_ram, "as given"
        if cache_ram is None:
            whole, left = max(planned.state, own), max(spare - n_checkpoints * own, 0)
            cache_ram = min(whole, left) // MIB * MIB
            reason = "the size of the context"
            if whole > left:
                reason = (
                    f"1/{_SHARE} of the experts' memory, or what experts cannot use, without"
                    " checkpoints"
                )
        elif cache_ram < 0:
            cache_ram = max(room - planned.arena_floor - n_checkpoints * own, 0)
            reason = "as given: all but the experts' minimum"
        return cls(cache_ram, reason, n_checkpoints, sequence, n_slots)
