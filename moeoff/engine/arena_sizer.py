"""Keeping the process under its budget: sizes the arenas of a loaded model, and moves them while it runs.

Buffers are planned for the largest batch, and a chat of short prompts touches a few MB of them: what the batches of now leave untouched is lent
to the experts, until a larger one comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..budget.memory_plan import RESERVE, MemoryPlan, Pools
from ..errors import BudgetError
from ..memory import MIB, format_size, rss
from .expert_buffer import ExpertBuffer

LEAST = 8  # tokens: the smallest batches that are told apart
_PATIENCE = 4  # batches in a row that must be small: a prompt of several pieces ends with a short one
_WORTH = 4 * MIB  # less is not worth new plans and evictions


class Lender:
    """Bytes of the buffers that a model's batches of now leave untouched.

    Args:
        sizes: bytes of compute buffer and work area for batches of at most n tokens, and if asked, the compute buffer's other bytes given
            back to the system; None: that cannot be said, or done.
        largest: tokens that are computed at once.

    Attributes:
        bound: tokens of the batches that may come without a call of `widen`.
    """

    def __init__(self, sizes: Callable[[int, bool], tuple[int, int] | None], largest: int):
        self._sizes, self._largest = sizes, largest
        self._known = {largest: sizes(largest, False)}
        self.bound = self._touched = largest
        self._worked = 0  # the largest bound of a batch that was computed: a work area is kept as large as it was
        self._recent: list[int] = []

    def _bound_for(self, n_tokens: int) -> int:
        """The next power of two: the sizes of a few are asked for."""
        return min(max(LEAST, 1 << (n_tokens - 1).bit_length()), self._largest)

    def _needs(self, bound: int) -> tuple[int, int]:
        if bound not in self._known:
            self._known[bound] = self._sizes(bound, False)
        return self._known[bound] or self._known[self._largest] or (0, 0)

    @property
    def lent(self) -> int:
        """Bytes that no batch within the bound touches."""
        return self._lent_at(self.bound)

    def _lent_at(self, bound: int) -> int:
        (compute, work), (all_compute, all_work) = self._needs(bound), self._needs(self._largest)
        return max(all_compute - compute, 0) + max(all_work - max(work, self._needs(self._worked or bound)[1]), 0)

    @property
    def needed(self) -> int:
        """Bytes that batches within the bound may touch."""
        return sum(self._needs(self.bound))

    def widen(self, n_tokens: int) -> bool:
        """Before a batch: raises the bound, if this one is larger; whether it did."""
        bound = self._bound_for(n_tokens)
        self._recent = [*self._recent[1 - _PATIENCE :], bound]
        self._worked = max(self._worked, bound)
        if bound <= self.bound:
            return False
        self.bound = bound
        return True

    def narrow(self) -> bool:
        """After a batch: lowers the bound to what the last ones needed, if that is worth it; whether it did."""
        bound = max(self._recent)
        if len(self._recent) < _PATIENCE or bound >= self.bound or self._lent_at(bound) - self.lent < _WORTH:
            return False
        if self._sizes(bound, True) is None:  # what was touched stays
            self._known[bound] = self._known[self._largest]
            return False
        self.bound = bound
        return True


class ArenaSizer:
    """Sizes a buffer's arenas by a memory plan, which it keeps up to date.

    Args:
        buffer: attached, not started.
        plan: of the loaded model.
        budget: bytes of the whole process, or None for a bound of the experts alone:
        arena: bytes.
        low_share: of the experts' memory, for low versions.
        lender: None: nothing is lent.

    Attributes:
        plan: how memory is divided when the largest batch is computed.

    Raises:
        BudgetError: below what the model needs.
    """

    def __init__(self, buffer: ExpertBuffer, plan: MemoryPlan, budget: int | None, arena: int | None, low_share: float, lender: Lender | None = None):
        self._buffer = buffer
        self._pools = Pools(buffer.arena_floor, buffer.arena_full, buffer.low_arena_floor, buffer.low_arena_full, low_share)
        plan = replace(plan, arena_floor=self._pools.floor + self._pools.low_floor, arena_full=self._pools.full + self._pools.low_full)
        if arena is None:
            assert budget is not None  # one of the two is given
            self.plan = plan.within(budget)
        elif arena < plan.arena_floor:
            raise BudgetError(
                f"{format_size(arena)} for experts is too small: this model needs at least {format_size(plan.arena_floor)}",
                hint={"expert_memory": plan.arena_floor},
            )
        else:
            self.plan = replace(plan, arena=min(arena, plan.arena_full))
        self._lender = lender if self.plan.budget else None
        self._grown = 0  # bytes that the process takes beyond plan and reserve; below 0: that it leaves of them while batches are small

    @property
    def arenas(self) -> tuple[int, int]:
        """Bytes for high and for low versions."""
        lent = self._lender.lent if self._lender is not None else 0
        return self._pools.split(min(max(self.plan.arena + lent - self._grown, self.plan.arena_floor), self.plan.arena_full))

    def resize(self) -> None:
        """To what the arenas should have."""
        self._buffer.set_arena_bytes(*self.arenas)

    def _divide(self, budget: int, process: int = 0, kept: int = 0) -> None:
        """Divides a budget where the process takes so many bytes more."""
        self.plan = replace(self.plan, process=self.plan.process + process, kept=self.plan.kept + kept).within(budget)
        self._grown = 0
        self.resize()

    def make_room(self, nbytes: int) -> None:
        """Before anything is computed: the process has allocated so many bytes since the plan was made.

        Raises:
            BudgetError: too little is left for experts.
        """
        if self.plan.budget and nbytes > 0:
            self._divide(self.plan.budget, process=nbytes)

    def move(self, budget: int) -> None:
        """Another budget, between answers: the arenas are resized at once.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
        """
        grown = max(rss() - self._buffer.stats().arena_committed + RESERVE - self.plan.fixed, 0)  # beyond what was planned
        self._divide(budget, process=grown)

    def reserve(self, nbytes: int) -> None:
        """The process needs so many bytes more for a while; negative: no longer.

        Raises:
            BudgetError: too little would be left for experts; nothing has changed.
        """
        if self.plan.budget:
            self._divide(self.plan.budget, kept=nbytes)
            self.fit_budget()

    def before(self, n_tokens: int) -> None:
        """Before a batch is computed: what it will touch and experts have been lent is taken back."""
        if self._lender is not None and self._lender.widen(n_tokens):
            self._grown = max(self._grown, 0)
            self.resize()

    def after(self) -> None:
        """After it: what such batches leave untouched is lent, and the budget looked at."""
        if self._lender is not None and self.plan.arena < self.plan.arena_full and self._lender.narrow():
            self.resize()
        self.fit_budget()

    def fit_budget(self) -> None:
        """If the rest of the process has grown into the reserve, the arenas shrink; where small batches leave more than half of it, they grow."""
        if not self.plan.budget:
            return
        stats = self._buffer.stats()
        free = self.plan.budget - (rss() - stats.arena_committed) - stats.arena_bytes - RESERVE // 2  # beyond half of the reserve
        moves = free < -RESERVE // 4 and stats.arena_bytes > self.plan.arena_floor
        if free > 0 and self._lender is not None and self._lender.lent:
            free -= self._lender.needed  # as if none of it had been touched
            moves = free > _WORTH and stats.arena_bytes < self.plan.arena_full
        if moves:
            self._grown -= free
            self.resize()
