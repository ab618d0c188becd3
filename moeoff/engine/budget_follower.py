"""`BudgetFollower`: a budget that nobody stated gives memory back while other programs
need it.

The rule of the start holds all the time: the process takes at most 80 % of what it
could have, so a fifth of that stays free, and the cache's own growth cannot bring about
what it would then yield to.
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

_TICKS = 0.1, 0.5  # seconds between looks, at least and at most
_FASTEST = 4e9  # bytes a second that other programs take, by which the next look is chosen
# share of what the process could have, above which a budget is lowered: half of the
# fifth is gone
_CROWDED = 0.9
# share of the time in which programs wait for memory, above which a budget is lowered
_STALLED = 0.1
_STEP = 4  # then a quarter of what can be given back goes, each half second
_CALM = 30.0  # seconds without either, after which a budget grows again
_LONGEST_CALM = 600.0  # seconds, where growth brings the waiting back
_GROWTH, _GROWS = 32, 1.0  # a thirty-second of the budget each second


class BudgetFollower:
    """A thread that moves the budget of a model with what other programs need.

    Args:
        sizer: Of the model's arenas. It may be dropped before `close()`.
        pressure: None: reads go through the page cache, and would cause it themselves.
        on_remark: Called on the thread with a sentence for people, once when memory is
            given back and once when the budget is what it was.

    Attributes:
        most: Budget at the start, in bytes.
        n_cuts: How often it had to be lowered; what follows before it is whole again
            counts once.
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
        """End the thread. May be called twice, and from the thread itself."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread not in (None, threading.current_thread()) and not sys.is_finalizing():
            thread.join()

    def _run(self) -> None:
        seconds: float | None = _TICKS[0]
        while seconds is not None and not self._closing.wait(seconds):
            seconds = self._look()

    def _look(self) -> float | None:
        """Return the seconds until the next look; None: there will be nothing to see."""
        sizer = self._sizer()
        if sizer is None:
            return None
        try:
            stalled = 0.0 if self._pressure is None else self._pressure.share()
            return self.step(sizer, time.monotonic(), available(), stalled)
        except MoeoffError:  # the system no longer says how much memory is free
            return None

    def step(self, sizer: ArenaSizer, now: float, could_have: int, stalled: float) -> float:
        """Move the budget once, and return the seconds until the next look.

        Args:
            now: Seconds of a clock.
            could_have: Bytes that the process has, and that it could still get.
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
