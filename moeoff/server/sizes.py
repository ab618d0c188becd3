"""What the budget allows where nobody said: tokens of a server's conversations, answers at a time, and what is remembered of conversations outside the context.

The latter are prompts that have lost their slot, and states to go back to. Both take the experts' memory, prompts when they come. A prompt that has to be computed
again reads nearly every expert, and so costs more than the misses that a few experts less cost in every answer; an eighth of the experts' memory is
the bound all the same, because most servers have fewer conversations than slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..budget.plan import MemoryPlan
from ..options import ServerOptions
from ..system.memory import MIB

PARALLEL = 4  # answers at a time, where there is memory for their context
_STEP = 256  # tokens that llama.cpp rounds contexts to
_USEFUL = 1024  # tokens of one answer's part, below which fewer answers at a time are better
_SHARE = 8  # of what experts would have, the part that prompts take at most
_CHECKPOINTS = 8  # of each answer, where they fit: of the last turns, and of a long prompt's parts


@dataclass(frozen=True)
class ContextSize:
    """A context for several answers at a time.

    Attributes:
        n_ctx: tokens in all.
        n_parallel: answers at a time.
        remark: a sentence, if that is less than usual.
    """

    n_ctx: int
    n_parallel: int
    remark: str | None = None


def choose(planned: Callable[[int, int], MemoryPlan], usual: int, n_parallel: int | None, budget: int) -> ContextSize:
    """The usual context of each answer, or one whose memory is half of what is left for it and the experts.

    Args:
        planned: memory at a context of so many tokens for so many answers.
        usual: tokens of each answer.
        n_parallel: answers at a time, if that was said.
        budget: bytes of the process.
    """
    planned = functools.cache(planned)  # each opens the model
    n, least = n_parallel or PARALLEL, min(_STEP, usual)
    n_ctx = most = usual * n
    while True:  # until what was chosen is what was planned: compute buffers depend on the context
        plan, half = planned(n_ctx, n), planned(max(n_ctx // 2, 1), n)
        room = budget - (plan.fixed - plan.state)
        token = max((plan.state - half.state) / max(n_ctx - n_ctx // 2, 1), 1e-9)
        own = max(plan.state - n_ctx * token, 0)  # whatever the context: recurrent, or a window's
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
    answers = f"{n} answers" if n > 1 else "1 answer"
    return ContextSize(
        n_ctx, n, f"the context has {n_ctx} tokens, for {answers} at a time: more would take over half of what the budget leaves; -c and -np say otherwise"
    )


@dataclass(frozen=True)
class PromptMemory:
    """Bounds of what is remembered of conversations, in bytes.

    Attributes:
        cache_ram: of prompts outside the context.
        reason: why so much.
        n_checkpoints: of each answer.
        checkpoint: of one.
        n_slots: answers at a time.
    """

    cache_ram: int = 0
    reason: str = ""
    n_checkpoints: int = 0
    checkpoint: int = 0
    n_slots: int = 1

    @property
    def checkpoints(self) -> int:
        """Bytes that are taken from the experts before anything is computed."""
        return self.n_checkpoints * self.checkpoint * self.n_slots

    @classmethod
    def of(cls, planned: MemoryPlan, room: int, sequence: int, n_slots: int, options: ServerOptions) -> PromptMemory:
        """The bounds that the options say, or else what fits.

        Args:
            planned: without any of it.
            room: bytes for experts and this.
            sequence: bytes of the state that each answer has of its own, whatever it is long: recurrent, or a sliding window's.
            n_slots: answers at a time.
        """
        spare = max(room - planned.arena_full, room // _SHARE, 0)
        own, n_checkpoints = sequence * n_slots, options.ctx_checkpoints
        if n_checkpoints is None:
            n_checkpoints = min(_CHECKPOINTS, spare // own) if own else 0
        cache_ram, reason = options.cache_ram, "as given"
        if cache_ram is None:
            whole, left = max(planned.state, own), max(spare - n_checkpoints * own, 0)
            cache_ram = min(whole, left) // MIB * MIB
            reason = "the whole context once more" if whole <= left else f"1/{_SHARE} of what experts would have, or what they cannot use, less the checkpoints"
        elif cache_ram < 0:
            cache_ram = max(room - planned.arena_floor - n_checkpoints * own, 0)
            reason = "as given: all but the least that experts need"
        return cls(cache_ram, reason, n_checkpoints, sequence, n_slots)
