"""Arena sizes that keep the process within its budget.

The plan assumes the largest batch and a full KV cache; short prompts touch a few MB of
these buffers. Experts borrow the untouched rest until a larger batch or a longer
conversation needs it.
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

# batches in a row that must be small, because a long prompt ends with a short piece
_PATIENCE = 4
_WORTH = 4 * MIB  # less is not worth new plans and evictions


class BorrowedBuffers:
    """The part of the compute buffer and work area that experts use.

    Both buffers are sized for the largest batch. A larger batch raises `bound`, several
    small ones lower it.

    Args:
        sizes: Function of (n_tokens, release) that returns the bytes of compute buffer
            and work area for batches up to n_tokens, or None if unknown. release=True
            gives the rest of the compute buffer back to the system.
        largest: Micro-batch in tokens.

    Attributes:
        bound: Largest batch, in tokens, that needs no call of `grow_bound`.
    """

    def __init__(self, sizes: Callable[[int, bool], tuple[int, int] | None], largest: int):
        self._sizes, self.largest, self.bound = sizes, largest, largest
        self._known = {largest: sizes(largest, False)}
        # largest bound of a computed batch, because a work area never shrinks
        self._worked = 0
        self._recent: list[int] = []

    def _needs(self, bound: int) -> tuple[int, int]:
        """Return the cached sizes: llama.cpp cannot plan while a batch is computed."""
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
        """Bytes that are not borrowed and may be untouched."""
        return sum(self._needs(self.bound))

    def grow_bound(self, n_tokens: int) -> bool:
        """Raise the bound for a batch, to a power of two. Return True if it changed."""
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
        """Lower the bound to recent batches if worthwhile. Return True if changed.

        Args:
            idle: True to use the lowest bound, while nothing is computed.
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
        if self._sizes(bound, True) is None:  # touched memory stays
            self._known[bound] = self._known[self.largest]
            return False
        self.bound = bound
        return True


class BorrowedCache:
    """The unused cells of the KV cache, which experts use.

    Args:
        unused: Function of (n_tokens, release) that returns the bytes left untouched by
            a batch of n_tokens. release=True gives them back to the system.

    Attributes:
        borrowed: Bytes that experts use.
        untouched: Other bytes that the next tokens touch.
    """

    def __init__(self, unused: Callable[[int, bool], int]):
        self._unused = unused
        self.borrowed = unused(0, True)
        self.untouched = 0
        self._left = 0  # tokens until the next check
        self._moving = False  # the next batch may touch all of it

    def reclaim(self, n_tokens: int) -> bool:
        """Take cells back for a batch. Return True if `borrowed` changed."""
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
        """Take back all cells for a write anywhere. Return True if any were lent."""
        before, self.borrowed, self.untouched, self._left, self._moving = (
            self.borrowed,
            0,
            0,
            0,
            True,
        )
        return before > 0


def _exclusive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of `ArenaSizer` hold its lock."""

    @functools.wraps(method)
    def call(self: ArenaSizer, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class ArenaSizer:
    """The sizes of a buffer's arenas by a memory plan. Thread-safe.

    Args:
        buffer: Attached buffer that is not started.
        plan: Memory plan of the loaded model.
        budget: Budget of the process, or of the experts.
        low_share: Share of the experts' memory for low versions.
        borrowed: Memory of llama.cpp that experts may borrow, or empty.

    Attributes:
        plan: Memory plan for the largest batch.
        most: Largest budget in bytes for `follow`; 0 before its first call.

    Raises:
        BudgetError: The budget is below the model's needs.
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
        # bytes that the process takes beyond plan and reserve; negative while batches
        # are small
        self._grown = 0
        self._extras = self.plan.extras  # without reservations
        # bytes of the process without experts once the reserved memory is resident; 0:
        # it is
        self._expected = 0
        # _short: bytes of the budget cut below the needs of the largest batch
        self.most = self._short = 0

    @property
    def arenas(self) -> tuple[int, int]:
        """Bytes for high and for low versions."""
        borrowed = sum(part.borrowed for part in self._borrowed)
        arena = self.plan.arena + borrowed - self._grown - self._short
        return self._pools.split(min(max(arena, self.plan.arena_floor), self.plan.arena_full))

    @property
    def budget(self) -> int:
        """Budget of the process in bytes; 0 if only the experts are bounded."""
        return self.plan.budget - self._short

    @property
    def least(self) -> int:
        """Bytes of the process with the smallest arenas."""
        needed = self.plan.fixed + self.plan.arena_floor
        return needed - sum(part.borrowed for part in self._borrowed) + min(self._grown, 0)

    def resize(self) -> None:
        """Apply the sizes to the arenas."""
        self._buffer.set_cache_bytes(*self.arenas)

    def _divide(self, budget: int, process: int = 0, extras: int = 0) -> None:
        """Plan a budget with additional bytes of process and extras."""
        plan = replace(
            self.plan, process=self.plan.process + process, extras=self.plan.extras + extras
        )
        # requests are answered however little other programs leave
        self.plan = plan.within(max(budget, min(plan.floor, self.most)))
        self._grown = 0
        self.resize()

    @_exclusive
    def make_room(self, nbytes: int) -> None:
        """Account for bytes allocated since the plan was made, before any batch.

        Raises:
            BudgetError: Too little is left for experts.
        """
        if self.plan.budget and nbytes > 0:
            self._divide(self.plan.budget, process=nbytes)

    @_exclusive
    def move(self, budget: int) -> None:
        """Set another budget between answers, and end `follow`.

        Raises:
            BudgetError: The budget is below the model's needs. The old one stays.
        """
        # bytes beyond the plan
        grown = max(rss() - self._buffer.stats().arena_committed + RESERVE - self.plan.fixed, 0)
        before, self.most, self._short = (self.most, self._short), 0, 0
        try:
            self._divide(budget, process=grown)
        except BudgetError:
            self.most, self._short = before
            raise

    @_exclusive
    def follow(self, budget: int) -> bool:
        """Move the budget at any time, also during a batch.

        Below the needs of the largest batch, experts stop borrowing buffers. Memory
        that cannot shrink stays.

        Args:
            budget: Bytes of the process, at most the budget of the first call.

        Returns:
            True if the arenas have changed.
        """
        self.most = self.most or self.plan.budget
        before, floor = self.arenas, self.plan.floor
        self.plan = self.plan.within(max(budget, floor))
        self._short = max(floor - max(budget, self.least), 0)
        self.resize()
        return self.arenas != before

    @_exclusive
    def reserve(self, nbytes: int, optional: bool = False) -> None:
        """Reserve bytes of the process, or release them if negative.

        Args:
            optional: True to fail rather than take memory that other programs need.

        Raises:
            BudgetError: Too little would be left for experts. Nothing has changed.
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
        """Give llama.cpp back the memory that the next batch touches.

        Args:
            moves_state: True if llama.cpp moves or loads KV cells, which may touch any.
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
        """Give back the KV cells of n_tokens that are loaded without a batch."""
        if self._borrowed and self._borrowed[1].reclaim(n_tokens):
            self.resize()

    @_exclusive
    def after(self) -> None:
        """Borrow memory that recent batches left untouched, and check the budget."""
        self._narrow(idle=False)
        self.fit_budget()

    @_exclusive
    def idle(self) -> None:
        """Borrow all memory that batches touch, until the next batch."""
        self._narrow(idle=True)
        trim()  # free the request's memory, which the C allocator would keep
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
        """Resize the arenas to the measured memory of the process."""
        if not self.plan.budget:
            return
        stats = self._buffer.stats()
        taken = rss() - stats.arena_committed
        if taken >= self._expected:
            self._expected = 0
        free = self.budget - taken - stats.cache_bytes - RESERVE // 2  # beyond half of the reserve
        moves = free < -RESERVE // 4 and stats.cache_bytes > self.plan.arena_floor
        if free > 0 and any(part.borrowed for part in self._borrowed):
            # as if no untouched memory had been touched
            free -= sum(part.untouched for part in self._borrowed)
            free -= max(self._expected - taken, 0)  # reserved, and soon resident
            moves = free > _WORTH and stats.cache_bytes < self.plan.arena_full
            # nor slots without contents, as of a warm start that a prompt has ended
            if moves:
                free -= stats.arena_committed - sum(
                    int(self._buffer.expert_bytes(low=low, resident=True).sum())
                    for low in (False, True)
                )
                moves = free > _WORTH
        if moves:
            self._grown -= free
            self.resize()
