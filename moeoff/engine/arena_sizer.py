"""Keeping the process under its budget: sizes the arenas of a loaded model, and moves
them while it runs.

Buffers are planned for the largest batch, and the KV cache for the longest
conversation; a chat of short prompts touches a few MB of them. What the batches of now
leave untouched the experts borrow, until a larger one comes, or the conversation gets
there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..budget.micro_batch import LEAST
from ..budget.plan import CELLS, RESERVE, MemoryPlan
from ..errors import BudgetError
from ..system.memory import MIB, Budget, format_size, rss, trim
from .buffer import ExpertBuffer

# batches in a row that must be small: a prompt of several pieces ends with a short one
_PATIENCE = 4
_WORTH = 4 * MIB  # less is not worth new plans and evictions


class BorrowedBuffers:
    """What experts have of the compute buffer and the work area, which are as large as
    the largest batch needs. Its state is `bound`: a larger batch raises it
    (`grow_bound`), small ones in a row lower it (`shrink_bound`).

    Args:
        sizes: bytes of compute buffer and work area for batches of at most n tokens,
            and if asked, the compute buffer's other bytes given back to the system;
            None: that cannot be said, or done.
        largest: tokens that are computed at once.

    Attributes:
        largest: as given.
        bound: tokens of the batches that may come without a call of `grow_bound`.
    """

    def __init__(self, sizes: Callable[[int, bool], tuple[int, int] | None], largest: int):
        self._sizes, self.largest, self.bound = sizes, largest, largest
        self._known = {largest: sizes(largest, False)}
        # the largest bound of a batch that was computed: a work area is kept as large
        # as it was
        self._worked = 0
        self._recent: list[int] = []

    def _needs(self, bound: int) -> tuple[int, int]:
        """Of a bound that a batch has had: others may ask while one is computed, and
        llama.cpp plans in what it computes with.
        """
        return self._known[bound] or self._known[self.largest] or (0, 0)

    def _at(self, bound: int) -> int:
        (compute, work), (all_compute, all_work) = self._needs(bound), self._needs(self.largest)
        return max(all_compute - compute, 0) + max(
            all_work - max(work, self._needs(self._worked or bound)[1]), 0
        )

    @property
    def borrowed(self) -> int:
        """Bytes that no batch within the bound touches."""
        return self._at(self.bound)

    @property
    def untouched(self) -> int:
        """Bytes that are not borrowed, and that no batch may have touched yet."""
        return sum(self._needs(self.bound))

    def grow_bound(self, n_tokens: int) -> bool:
        """Before a batch: raises the bound, to a power of two, if this one is larger;
        whether it did.
        """
        bound = min(max(LEAST, 1 << (n_tokens - 1).bit_length()), self.largest)
        if bound not in self._known:
            self._known[bound] = self._sizes(bound, False)
        self._recent = [*self._recent[1 - _PATIENCE :], bound]
        self._worked = max(self._worked, bound)
        if bound <= self.bound:
            return False
        self.bound = bound
        return True

    def shrink_bound(self, idle: bool = False) -> bool:
        """After a batch: lowers the bound to what the last ones needed, if that is
        worth it; whether it did.

        Args:
            idle: nothing computes: to the least.
        """
        bound = min(LEAST, self.largest) if idle else max(self._recent)
        if idle and bound not in self._known:
            self._known[bound] = self._sizes(bound, False)
        if (
            (len(self._recent) < _PATIENCE and not idle)
            or bound >= self.bound
            or self._at(bound) - self._at(self.bound) < _WORTH
        ):
            return False
        if self._sizes(bound, True) is None:  # what was touched stays
            self._known[bound] = self._known[self.largest]
            return False
        self.bound = bound
        return True


class BorrowedCache:
    """What experts have of the KV cache: the cells that no conversation has come to.
    Its state is `borrowed`: a conversation that grows takes some of it back
    (`reclaim`), one that has become shorter leaves more, and what may write anywhere
    takes all (`return_all`).

    Args:
        unused: bytes of the KV cache that stay untouched if the next batch has n
            tokens, and if asked, given back to the system.

    Attributes:
        borrowed: bytes.
        untouched: bytes that are not, and that the next tokens touch.
    """

    def __init__(self, unused: Callable[[int, bool], int]):
        self._unused = unused
        self.borrowed = unused(0, True)
        self.untouched = 0
        self._left = 0  # tokens that may come before the cache is looked at again
        self._moving = False  # the next batch may touch all of it

    def reclaim(self, n_tokens: int) -> bool:
        """Before a batch; whether anything has changed."""
        self._left -= n_tokens
        if self._moving or self._left >= 0:
            self._moving = False
            return False
        reach, before = n_tokens + CELLS, self.borrowed
        unused = self._unused(reach, False)
        self.borrowed = (
            self._unused(reach, True) if unused >= before + _WORTH else min(unused, before)
        )
        self._left, self.untouched = CELLS, self._unused(0, False) - unused
        return self.borrowed != before

    def return_all(self) -> bool:
        """Before something that may write to all of it, at once or with the next batch;
        whether there was anything.
        """
        before, self.borrowed, self.untouched, self._left, self._moving = (
            self.borrowed,
            0,
            0,
            0,
            True,
        )
        return before > 0


def _exclusive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of `ArenaSizer` that no other thread's may come between."""

    @functools.wraps(method)
    def call(self: ArenaSizer, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class ArenaSizer:
    """Sizes a buffer's arenas by a memory plan, which it keeps up to date. Threads may
    share one.

    Args:
        buffer: attached, not started.
        plan: of the loaded model.
        budget: of the whole process, or of the experts alone.
        low_share: of the experts' memory, for low versions.
        borrowed: what experts have of llama.cpp's memory; empty: nothing.

    Attributes:
        plan: how memory is divided when the largest batch is computed.
        most: Budget in bytes that `follow` may come back to; 0 before its first call.

    Raises:
        BudgetError: below what the model needs.
    """

    def __init__(
        self,
        buffer: ExpertBuffer,
        plan: MemoryPlan,
        budget: Budget,
        low_share: float,
        borrowed: tuple[()] | tuple[BorrowedBuffers, BorrowedCache] = (),
    ):
        self._lock = threading.RLock()
        self._buffer = buffer
        self._pools = buffer.pools(low_share)
        plan = replace(
            plan,
            arena_floor=self._pools.floor + self._pools.low_floor,
            arena_full=self._pools.full + self._pools.low_full,
        )
        if budget.process is not None:
            self.plan = plan.within(budget.process)
        elif (arena := budget.left(plan.fixed)) >= plan.arena_floor:
            self.plan = replace(plan, arena=min(arena, plan.arena_full))
        else:
            raise BudgetError(
                f"{format_size(arena)} for experts is too small: this model needs at least"
                f" {format_size(plan.arena_floor)}",
                hint={"expert_memory": plan.arena_floor},
            )
        self._borrowed = borrowed if self.plan.budget else ()
        # bytes that the process takes beyond plan and reserve; below 0: that it leaves
        # of them while batches are small
        self._grown = 0
        self._extras = self.plan.extras  # with nothing reserved
        # bytes that all but the experts will take when what is reserved is resident; 0:
        # it is
        self._expected = 0
        # _short: bytes of the plan's budget that the process leaves, though the largest
        # batch needs them
        self.most = self._short = 0

    @property
    def arenas(self) -> tuple[int, int]:
        """Bytes for high and for low versions."""
        borrowed = sum(part.borrowed for part in self._borrowed)
        arena = self.plan.arena + borrowed - self._grown - self._short
        return self._pools.split(min(max(arena, self.plan.arena_floor), self.plan.arena_full))

    @property
    def budget(self) -> int:
        """Bytes that the process may take; 0: only the experts are bounded."""
        return self.plan.budget - self._short

    @property
    def least(self) -> int:
        """Bytes that the process takes while experts have the least."""
        needed = self.plan.fixed + self.plan.arena_floor
        return needed - sum(part.borrowed for part in self._borrowed) + min(self._grown, 0)

    def resize(self) -> None:
        """To what the arenas should have."""
        self._buffer.set_cache_bytes(*self.arenas)

    def _divide(self, budget: int, process: int = 0, extras: int = 0) -> None:
        """Divides a budget where the process takes so many bytes more."""
        plan = replace(
            self.plan, process=self.plan.process + process, extras=self.plan.extras + extras
        )
        # requests are answered however little other programs leave
        self.plan = plan.within(max(budget, min(plan.floor, self.most)))
        self._grown = 0
        self.resize()

    @_exclusive
    def make_room(self, nbytes: int) -> None:
        """Before anything is computed: the process has allocated so many bytes since
        the plan was made.

        Raises:
            BudgetError: too little is left for experts.
        """
        if self.plan.budget and nbytes > 0:
            self._divide(self.plan.budget, process=nbytes)

    @_exclusive
    def move(self, budget: int) -> None:
        """Another budget, between answers: the arenas are resized at once, and `follow`
        is over.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
        """
        # beyond what was planned
        grown = max(rss() - self._buffer.stats().arena_committed + RESERVE - self.plan.fixed, 0)
        before, self.most, self._short = (self.most, self._short), 0, 0
        try:
            self._divide(budget, process=grown)
        except BudgetError:
            self.most, self._short = before
            raise

    @_exclusive
    def follow(self, budget: int) -> bool:
        """Moves the budget at any time, also while a batch is computed.

        Below what the largest batch would need, experts no longer have what smaller
        ones leave of its buffers; what cannot become smaller stays.

        Args:
            budget: Bytes of the process, at most those of the first call's budget.

        Returns:
            True if the arenas have other sizes now.
        """
        self.most = self.most or self.plan.budget
        before, floor = self.arenas, self.plan.floor
        self.plan = self.plan.within(max(budget, floor))
        self._short = max(floor - max(budget, self.least), 0)
        self.resize()
        return self.arenas != before

    @_exclusive
    def reserve(self, nbytes: int, optional: bool = False) -> None:
        """The process needs so many bytes more for a while; negative: no longer.

        Args:
            optional: They are refused rather than taken from what other programs need.

        Raises:
            BudgetError: too little would be left for experts; nothing has changed.
        """
        if not self.plan.budget:
            return
        if optional and nbytes > 0 and self.most:
            replace(self.plan, extras=self.plan.extras + nbytes).within(self.budget)
        self._divide(self.plan.budget, extras=nbytes)
        taken = rss() - self._buffer.stats().arena_committed
        self._expected = (
            max(self._expected, taken) + nbytes if self.plan.extras > self._extras else 0
        )
        self.fit_budget()

    @_exclusive
    def before(self, n_tokens: int, moves_state: bool = False) -> None:
        """Before a batch is computed: experts give back what it will touch.

        Args:
            moves_state: llama.cpp moves what is in the KV cache, or reads it from
                elsewhere, as a batch of its own and in any cell.
        """
        if not self._borrowed:
            return
        buffers, cache = self._borrowed
        changes = cache.return_all() if moves_state else cache.reclaim(n_tokens)
        if buffers.grow_bound(buffers.largest if moves_state else n_tokens) or moves_state:
            self._grown, changes = max(self._grown, 0), True
        if changes:
            self.resize()

    @_exclusive
    def fill(self, n_tokens: int) -> None:
        """Before states of so many tokens come into the KV cache, not by a batch:
        experts give back the cells that they take.
        """
        if self._borrowed and self._borrowed[1].reclaim(n_tokens):
            self.resize()

    @_exclusive
    def after(self) -> None:
        """After it: experts borrow what such batches leave untouched, and the budget is
        looked at.
        """
        self._narrow(idle=False)
        self.fit_budget()

    @_exclusive
    def idle(self) -> None:
        """While nothing computes: experts borrow all that batches touch, until the next
        one comes.
        """
        self._narrow(idle=True)
        trim()  # what a request took is free, and the C allocator would keep it from the experts
        self.fit_budget()

    def _narrow(self, idle: bool) -> None:
        if (
            self._borrowed
            and self.plan.arena < self.plan.arena_full
            and self._borrowed[0].shrink_bound(idle)
        ):
            self.resize()

    @_exclusive
    def fit_budget(self) -> None:
        """If the rest of the process has grown into the reserve, the arenas shrink;
        where small batches leave more than half of it, they grow, if they may.
        """
        if not self.plan.budget:
            return
        stats = self._buffer.stats()
        taken = rss() - stats.arena_committed
        if taken >= self._expected:
            self._expected = 0
        free = self.budget - taken - stats.cache_bytes - RESERVE // 2  # beyond half of the reserve
        moves = free < -RESERVE // 4 and stats.cache_bytes > self.plan.arena_floor
        if free > 0 and any(part.borrowed for part in self._borrowed):
            # as if none of it had been touched
            free -= sum(part.untouched for part in self._borrowed)
            free -= max(self._expected - taken, 0)  # reserved, and soon resident
            moves = free > _WORTH and stats.cache_bytes < self.plan.arena_full
            # nor slots that nothing has been read into, as of a warm start that a
            # prompt has ended
            if moves:
                free -= stats.arena_committed - sum(
                    int(self._buffer.expert_bytes(low=low, resident=True).sum())
                    for low in (False, True)
                )
                moves = free > _WORTH
        if moves:
            self._grown -= free
            self.resize()
