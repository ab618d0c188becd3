"""How many tokens a server's conversations get, and how many answers are written at a time, where nobody said: what the budget allows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..budget.plan import MemoryPlan

PARALLEL = 4  # answers at a time, where there is memory for their context
_STEP = 256  # tokens that llama.cpp rounds contexts to
_USEFUL = 1024  # tokens of one answer's part, below which fewer answers at a time are better


@dataclass(frozen=True)
class ContextSize:
    """
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
    n_ctx = wanted = usual * n
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
    if n_ctx == wanted:
        return ContextSize(n_ctx, n)
    answers = f"{n} answers" if n > 1 else "1 answer"
    return ContextSize(
        n_ctx, n, f"the context has {n_ctx} tokens, for {answers} at a time: more would take over half of what the budget leaves; -c and -np say otherwise"
    )
