"""Classic policies: LRU, LFU with and without decay, ARC's lists, and Belady's."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from ..routing.event import GateEvent
from .base import Policy, chosen
from .strategy import register


@register
class LRU(Policy):
    """A table of zeros: ties evict the least recently used. It needs no driver."""

    name, summary, static = "lru", "keeps the most recently used experts", True


@register
class LFU(Policy):
    """Access counts. `sequence` resets them with a text (HOBBIT §3.4: +4.5 %)."""

    name, summary = "lfu", "keeps the experts this text has used most often"
    defaults = {"sequence": True}

    def update(self, event: GateEvent) -> None:
        experts, count = chosen(event)
        self.priorities[event.gate][experts] += count

    def reset_sequence(self) -> None:
        if self.options["sequence"]:
            self.priorities[:] = 0


_LARGEST = 1e18  # of a float32 with room to add


@register
class Decay(Policy):
    """Exponentially decayed counts, with the decay rate `rate` per token.

    The increment grows, so that the counts need not shrink.
    """

    name, summary = "decay", "counts uses, older ones for less"
    defaults = {"rate": 0.02}

    def start(self) -> None:
        self._step = 1.0
        self._growth = 1 / (1 - self.options["rate"])

    def update(self, event: GateEvent) -> None:
        experts, count = chosen(event)
        self.priorities[event.gate][experts] += count * self._step
        if event.gate == self.shape.n_gates - 1:
            # a long prompt decays like as many tokens, within the range of floats
            self._step *= min(self._growth ** len(event.ids), 1e6)
            if self._step > _LARGEST:
                self.priorities /= self._step
                self._step = 1.0


class ARC:
    """The lists of an adaptive replacement cache (Megiddo and Modha 2003, figure 4),
    oldest first.

    Attributes:
        t1, t2: Resident entries, recently used once, and more often.
        b1, b2: Ghosts evicted from t1 and from t2.
        target: Target size of t1.
    """

    def __init__(self) -> None:
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()
        self.target = 0.0

    def resize(self, size: int) -> Iterator[int]:
        """Shrink the lists, those used once first. Yield entries leaving t1 and t2."""
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        while len(t1) + len(t2) > size:
            yield (t1 or t2).popitem(last=False)[0]
        while b1 and len(t1) + len(b1) > size:
            b1.popitem(last=False)
        while b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * size:
            b2.popitem(last=False)
        self.target = min(self.target, size)

    def eviction_order(self) -> list[int]:
        """Return entries as evicted: first the list above its target, oldest first."""
        return [*self.t1, *self.t2] if len(self.t1) > self.target else [*self.t2, *self.t1]

    def use(self, key: int, size: int) -> Iterator[int]:
        """Access an entry in a cache of this size. Yield those leaving t1 and t2."""
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if size == 0:
            yield key
            return
        if key in t1:
            del t1[key]
            t2[key] = None
            return
        if key in t2:
            t2.move_to_end(key)
            return
        if key in b1:
            self.target = min(size, self.target + max(1, len(b2) / len(b1)))
            yield from self._replace(False, size)
            del b1[key]
            t2[key] = None
            return
        if key in b2:
            self.target = max(0, self.target - max(1, len(b1) / len(b2)))
            yield from self._replace(True, size)
            del b2[key]
            t2[key] = None
            return
        if len(t1) + len(b1) == size:
            if len(t1) < size:
                b1.popitem(last=False)
                yield from self._replace(False, size)
            else:
                yield t1.popitem(last=False)[0]
        else:
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if total >= size:
                if total == 2 * size:
                    b2.popitem(last=False)
                yield from self._replace(False, size)
        t1[key] = None

    def _replace(self, in_b2: bool, size: int) -> Iterator[int]:
        t1, t2 = self.t1, self.t2
        if len(t1) + len(t2) < size:
            return
        if t1 and (len(t1) > self.target or (in_b2 and len(t1) == self.target) or not t2):
            evicted, ghosts = t1.popitem(last=False)[0], self.b1
        else:
            evicted, ghosts = t2.popitem(last=False)[0], self.b2
        ghosts[evicted] = None
        yield evicted


@register
class Belady(Policy):
    """Belady's optimum: evict the expert whose next access is farthest, in traces only.

    Priority = -(index of the event of the next access).
    """

    name, summary, offline = "belady", "the optimum, which knows the future", True

    def prepare(self, events: Iterable[GateEvent]) -> None:
        self._next: list[list[deque[int]]] = [
            [deque() for _ in range(self.shape.n_experts)] for _ in range(self.shape.n_gates)
        ]
        n = 0
        for n, event in enumerate(events, 1):
            for expert in set(event.ids.ravel().tolist()):
                self._next[event.gate][expert].append(n)
        self._never = -float(n + 1)  # exact in a float32 up to 16 million events
        for gate, queues in enumerate(self._next):
            self.priorities[gate] = [-q[0] if q else self._never for q in queues]

    def update(self, event: GateEvent) -> None:
        row, queues = self.priorities[event.gate], self._next[event.gate]
        for expert in np.unique(event.ids).tolist():
            queue = queues[expert]
            queue.popleft()
            row[expert] = -queue[0] if queue else self._never
