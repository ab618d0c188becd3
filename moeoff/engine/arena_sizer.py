"""Keeping the process under its budget: sizes the arenas of a loaded model, and moves them while it runs."""

from __future__ import annotations

from dataclasses import replace

from ..budget.memory_plan import RESERVE, Needs, Plan, Pools
from ..errors import BudgetError
from ..memory import format_size, rss
from .expert_buffer import ExpertBuffer


class ArenaSizer:
    """Args:
    buffer: attached, not started.
    budget: bytes of the whole process, or None for a bound of the experts alone:
    arena: bytes.
    low_share: of the experts' memory, for low versions.

    Attributes:
        plan: how the budget is divided now.

    Raises:
        BudgetError: below what the model needs.
    """

    def __init__(self, buffer: ExpertBuffer, budget: int | None, arena: int | None, needs: Needs, low_share: float):
        self._buffer = buffer
        self._pools = Pools(buffer.arena_floor, buffer.arena_full, buffer.low_arena_floor, buffer.low_arena_full, low_share)
        if arena is None:
            assert budget is not None  # one of the two is given
            self.plan = self._divide(budget, needs)
        elif arena < self._floor:
            raise BudgetError(f"{format_size(arena)} for experts is too small: this model needs at least {format_size(self._floor)}")
        else:
            self.plan = Plan(0, needs, min(arena, self._full), self._floor)

    @property
    def _floor(self) -> int:
        return self._pools.floor + self._pools.low_floor

    @property
    def _full(self) -> int:
        return self._pools.full + self._pools.low_full

    def _divide(self, budget: int, needs: Needs) -> Plan:
        return Plan.divide(budget, needs, self._floor, self._full)

    @property
    def arenas(self) -> tuple[int, int]:
        """Bytes for high and for low versions."""
        return self._pools.split(self.plan.arena)

    def make_room(self, nbytes: int) -> None:
        """Before anything is computed: the process has allocated so many bytes since its needs were counted.

        Raises:
            BudgetError: too little is left for experts.
        """
        if self.plan.budget and nbytes > 0:
            self.plan = self._divide(self.plan.budget, replace(self.plan.needs, python=self.plan.needs.python + nbytes))
            self._buffer.set_arena_bytes(*self.arenas)

    def move(self, budget: int) -> None:
        """Another budget, between answers: the arenas are resized at once.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
        """
        needs = self.plan.needs
        grown = max(rss() - self._buffer.stats().arena_committed + RESERVE - needs.total, 0)  # beyond what was planned
        self.plan = self._divide(budget, replace(needs, python=needs.python + grown))
        self._buffer.set_arena_bytes(*self.arenas)

    def lend(self, nbytes: int) -> None:
        """The process needs so many bytes more for a while; negative: no longer.

        Raises:
            BudgetError: too little would be left for experts; nothing has changed.
        """
        if self.plan.budget:
            needs = self.plan.needs
            self.plan = self._divide(self.plan.budget, replace(needs, kept=needs.kept + nbytes))
            self._buffer.set_arena_bytes(*self.arenas)
            self.look()

    def look(self) -> None:
        """After each decode: if the rest of the process has grown into the reserve, the arenas shrink."""
        if not self.plan.budget:
            return
        stats = self._buffer.stats()
        room = self.plan.budget - (rss() - stats.arena_committed) - RESERVE // 4
        if room < stats.arena_bytes and stats.arena_bytes > self.plan.arena_floor:
            self._buffer.set_arena_bytes(*self._pools.split(max(room - RESERVE // 4, self.plan.arena_floor)))
