"""A default budget that yields memory to other programs.

The process takes at most 80 % of the attainable memory, as at the start. The free fifth
keeps the cache's own growth from triggering a cut.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable

from ..errors import MoeoffError
from ..system.memory import DEFAULT_SHARE, available
from ..system.pressure import Pressure
from .arena_sizer import ArenaSizer

_TICKS = 0.1, 0.5  # least and most seconds between looks
_FASTEST = 4e9  # fastest growth of other programs in bytes per second
# share of the attainable memory above which a budget is lowered: half of the reserved
# fifth is gone
_CROWDED = 0.9
# share of the time stalled on memory above which a budget is lowered
_STALLED = 0.1
_STEP = 4  # each half second a quarter of the reducible memory is given back
_CALM = 30.0  # seconds without pressure until a budget grows again
_LONGEST_CALM = 600.0  # seconds, if growth causes pressure again
_GROWTH, _GROWS = 32, 1.0  # 1/32 of the budget each second


class BudgetFollower:
    """A thread that lowers and restores a model's budget.

    Args:
        sizer: Sizer of the model's arenas. It may be freed before `close()`.
        pressure: Source of memory pressure. None if reads use the page cache, which
            causes pressure itself.
        on_remark: Callback on the thread with a sentence when memory is given back and
            when the budget is restored.

    Attributes:
        most: Budget at the start in bytes.
        n_cuts: Number of cuts, where those before a full recovery count once.
    """

    def __init__(
        self,
        sizer: ArenaSizer,
        pressure: Pressure | None,
        on_remark: Callable[[str], None] | None = None,
    ):
        self._sizer, self._pressure = weakref.ref(sizer), pressure
        self._on_remark = on_remark or (lambda _text: None)
        self.most, self.n_cuts, self._has_cut = sizer.plan.budget, 0, False
        self._calm, self._calm_at, self._grown_at = _CALM, 0.0, 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, also after `close()`."""
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, name="moeoff-budget", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May be called twice, and on the thread itself."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread not in (None, threading.current_thread()) and not sys.is_finalizing():
            thread.join()

    def _run(self) -> None:
        seconds: float | None = _TICKS[0]
        while seconds is not None and not self._closing.wait(seconds):
            seconds = self._look()

    def _look(self) -> float | None:
        """Return the seconds until the next look, or None to end."""
        sizer = self._sizer()
        if sizer is None:
            return None
        try:
            stalled = 0.0 if self._pressure is None else self._pressure.share()
            return self.step(sizer, time.monotonic(), available(), stalled)
        except MoeoffError:  # free memory is unknown
            return None

    def step(self, sizer: ArenaSizer, now: float, could_have: int, stalled: float) -> float:
        """Move the budget once. Return the seconds until the next look.

        Args:
            now: Clock in seconds.
            could_have: Bytes that the process has or could get.
            stalled: Share of the time in which programs wait for memory.
        """
        useful = min(self.most, sizer.plan.fixed + sizer.plan.arena_full)
        budget = min(sizer.budget, useful)
        share = int(could_have * DEFAULT_SHARE)
        if budget > could_have * _CROWDED:
            self._lower(sizer, share, now)
        elif stalled > _STALLED:
            # a cache that has just grown may be the reason
            again = now - self._grown_at < _CALM
            self._calm = min(2 * self._calm, _LONGEST_CALM) if again else _CALM
            self._lower(sizer, budget - max(budget - sizer.least, 0) // _STEP, now)
        elif sizer.budget < self.most and now >= max(self._calm_at, self._grown_at + _GROWS):
            larger = min(budget + useful // _GROWTH, share)
            if budget < larger < useful:
                sizer.follow(larger)
                self._grown_at = now
            elif larger >= useful:
                sizer.follow(self.most)
                self._grown_at, self._has_cut = now, False
                self._on_remark("memory is free again: experts have all of theirs back")
        left = could_have * _CROWDED - min(sizer.budget, useful)
        return min(max(left / _FASTEST, _TICKS[0]), _TICKS[1])

    def _lower(self, sizer: ArenaSizer, budget: int, now: float) -> None:
        self._calm_at = now + self._calm
        if sizer.follow(budget) and not self._has_cut:
            self.n_cuts, self._has_cut = self.n_cuts + 1, True
            remark = "experts give some back (with --memory they keep it)"
            self._on_remark(f"other programs need memory: {remark}")
