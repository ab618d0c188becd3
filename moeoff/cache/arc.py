"""Fate's cache: shallow layers first, and ARC inside each layer (§4.4)."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..gate_event import GateEvent
from .base import Policy, Sections, Shape

_OVER = 1e6  # a layer within its quota outranks one beyond it by this much


class _Lists(NamedTuple):
    """Experts of one layer, the oldest first: used once and more often lately, and the ghosts of both."""

    t1: OrderedDict[int, None]
    t2: OrderedDict[int, None]
    b1: OrderedDict[int, None]
    b2: OrderedDict[int, None]


class ARC(Policy):
    """ARC's lists T1, T2 (resident) and B1, B2 (ghosts) for each layer, with quotas (Fate §4.4).

    The first `shallow` layers get all their experts if there is room, each deep one (cache_total - L x num_experts) /
    (num_layers - L); with less room the first L layers are served in turn. An expert that ARC would evict from its layer
    leaves T1 and T2 and ranks below all experts in them. The buffer evicts it only when it needs room, so that a layer's
    unused quota serves other layers meanwhile.
    """

    name, summary = "arc", "shallow layers first, recency and frequency balanced in each (Fate)"
    defaults = {"shallow": 3}
    profile_sections = ("gate",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {"shallow": int(profile["gate"]["shallow"][0])} if "gate" in profile else {}

    def start(self) -> None:
        n = self.shape.n_gates
        self._lists = [_Lists(OrderedDict(), OrderedDict(), OrderedDict(), OrderedDict()) for _ in range(n)]
        self._target = [0.0] * n
        self.resize(self.shape.capacity)
        self.priorities[:] = -_OVER

    def resize(self, capacity: float) -> None:
        """New quotas; lists that are longer lose their oldest, those used once first."""
        super().resize(capacity)
        self.quotas = quotas(self.shape, min(self.options["shallow"], self.shape.n_gates))
        for gate, (size, (t1, t2, b1, b2)) in enumerate(zip(self.quotas, self._lists)):
            while len(t1) + len(t2) > size:
                self.priorities[gate, (t1 or t2).popitem(last=False)[0]] = -_OVER
            while b1 and len(t1) + len(b1) > size:
                b1.popitem(last=False)
            while b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * size:
                b2.popitem(last=False)
            self._target[gate] = min(self._target[gate], size)

    def update(self, event: GateEvent) -> None:
        gate, size = event.gate, self.quotas[event.gate]
        row = self.priorities[gate]
        chosen = dict.fromkeys(event.ids.ravel().tolist())
        for expert in chosen:
            for gone in self._use(gate, expert, size):
                row[gone] = -_OVER
        t1, t2, _, _ = self._lists[gate]
        # eviction order: the list above its target before the other, and in a list the oldest first
        first, second = (t1, t2) if len(t1) > self._target[gate] else (t2, t1)
        n = self.shape.n_experts
        order = [*first, *second]
        if order:
            row[order] = np.arange(len(order), dtype=np.float32) / n

    def _use(self, gate: int, expert: int, size: int) -> Iterator[int]:
        """One access in ARC's own terms (Megiddo and Modha 2003, figure 4); yields the experts that leave T1 and T2."""
        t1, t2, b1, b2 = self._lists[gate]
        if size == 0:
            yield expert
            return
        if expert in t1:
            del t1[expert]
            t2[expert] = None
            return
        if expert in t2:
            t2.move_to_end(expert)
            return
        if expert in b1:
            self._target[gate] = min(size, self._target[gate] + max(1, len(b2) / len(b1)))
            yield from self._replace(gate, False, size)
            del b1[expert]
            t2[expert] = None
            return
        if expert in b2:
            self._target[gate] = max(0, self._target[gate] - max(1, len(b1) / len(b2)))
            yield from self._replace(gate, True, size)
            del b2[expert]
            t2[expert] = None
            return
        if len(t1) + len(b1) == size:
            if len(t1) < size:
                b1.popitem(last=False)
                yield from self._replace(gate, False, size)
            else:
                yield t1.popitem(last=False)[0]
        else:
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if total >= size:
                if total == 2 * size:
                    b2.popitem(last=False)
                yield from self._replace(gate, False, size)
        t1[expert] = None

    def _replace(self, gate: int, in_b2: bool, size: int) -> Iterator[int]:
        t1, t2, b1, b2 = self._lists[gate]
        if len(t1) + len(t2) < size:
            return
        if t1 and (len(t1) > self._target[gate] or (in_b2 and len(t1) == self._target[gate]) or not t2):
            gone, ghosts = t1.popitem(last=False)[0], b1
        else:
            gone, ghosts = t2.popitem(last=False)[0], b2
        ghosts[gone] = None
        yield gone


def quotas(shape: Shape, shallow: int) -> list[int]:
    """Experts that each layer may keep: Fate §4.4's cache_deep, and shallow layers in turn when there is less room."""
    total, out = int(shape.capacity + 1e-6), []  # a share of a whole number may lie below it
    for _ in range(shallow):
        out.append(min(shape.n_experts, total))
        total -= out[-1]
    deep = shape.n_gates - shallow
    for i in range(deep):  # evenly, the remainder to the first
        out.append(min(shape.n_experts, total // deep + (i < total % deep)))
    return out
