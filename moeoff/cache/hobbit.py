"""HOBBIT's weighted sum of LRU, LFU, LHU and layer distance (§3.4, equation 3)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..gate_event import GateEvent
from .base import Sections, used, with_row
from .grouped import GroupedPolicy
from .importance import T1, unimportance

HIGH = 0  # of `GateEvent.versions`


class Hobbit(GroupedPolicy):
    """p = w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l_t - l_i + l_n) mod l_n) / l_n) (HOBBIT §3.4), reset with each text.

    R is the token of the last use, F the uses in this text, H those in high precision, T the tokens so far, l_i the layer that is
    evicting. The table holds p times T, which orders the same and leaves all rows but the event's alone where w_fld is 0. What low
    misses cost beside high ones (§3.4's B_l/B_h) is in the weights: `moeoff.calibrate.fit_hobbit` fits them to a penalty with the
    model's own thresholds and sizes. The default weights are those that it fits for the demo model. sequence=False never resets.

    actual: the run is lossy, and H counts what was served in high precision (`GateEvent.versions`). In a lossless one every use is,
    and H counts those that would have to be: unimportance <= t1 (§3.2).

    Of several sequences, which the paper does not have, F and H are the sums, R is the latest use and T counts the tokens of all;
    one that begins a text takes its uses with it.
    """

    name, summary = "hobbit", "weighs recency, frequency, precision and layer distance"
    defaults = {"lru": 0.0784, "lfu": 0.1765, "lhu": 0.7059, "fld": 0.0392, "t1": T1, "actual": False, "sequence": True}
    profile_sections = ("hobbit",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {name: float(value) for name, value in profile.get("hobbit", {}).items() if name in cls.defaults}

    @classmethod
    def precision_options(cls, t1: float) -> dict[str, Any]:
        return {"t1": t1, "actual": True}

    def start(self) -> None:
        super().start()
        o, n = self.options, self.shape.n_gates
        i = np.arange(n)
        self._fld = (o["fld"] * (1 - ((i[None] - i[:, None]) % n) / n)).astype(np.float32)[:, :, None]  # [l_i, l_t]
        self._last = np.zeros_like(self.priorities)
        self._all = np.zeros_like(self.priorities)  # the three parts that do not depend on l_i
        self._scratch = np.zeros((n, 1), np.float32)
        self._own: np.ndarray | None = None  # [n_sequences, 2, gate, expert] w_lfu F + w_lhu H and R of each; None: there is sequence 0 alone
        self._tokens = 1

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        o, n_tokens = self.options, len(events[0].ids)
        if first == 0:
            self._tokens += n_tokens
        gates = np.arange(first, first + len(events))
        if o["sequence"]:
            self._count_own(events)
        if n_tokens == 1 and len({event.ids.shape[1] for event in events}) == 1:
            self._count(gates[:, None], np.concatenate([e.ids for e in events]), o["lfu"] + o["lhu"] * self._high(events))
        else:
            for gate, event in enumerate(events, first):
                experts, count = used(event)
                high = np.bincount(event.ids[self._high([event])], minlength=self.shape.n_experts)
                self._count(gate, experts, o["lfu"] * count + o["lhu"] * high[experts])
        if o["fld"]:
            np.multiply(self._fld[(first + len(events)) % self.shape.n_gates], self._tokens, out=self._scratch)
            np.add(self._all, self._scratch, out=self.priorities)
        else:
            self.priorities[gates] = self._all[gates]

    def _high(self, events: Sequence[GateEvent]) -> np.ndarray:
        """[n_tokens of all events, n_used] bool: which uses count for H."""
        if not self.options["actual"]:
            needed: np.ndarray = unimportance(np.concatenate([e.weights for e in events])) <= self.options["t1"]
            return needed
        return np.concatenate([np.ones(e.ids.shape, bool) if e.versions is None else e.versions == HIGH for e in events])

    def _count(self, gate: int | np.ndarray, experts: np.ndarray, worth: np.ndarray) -> None:
        self._all[gate, experts] += worth + self.options["lru"] * (self._tokens - self._last[gate, experts])
        self._last[gate, experts] = self._tokens

    def _count_own(self, events: Sequence[GateEvent]) -> None:
        """Before `_count`, as soon as a sequence other than 0 has been seen."""
        o = self.options
        for event in events:
            if event.sequences is None and self._own is None:
                continue
            if self._own is None:
                self._own = np.stack([self._all - o["lru"] * self._last, self._last])[None]
            sequences = np.zeros(len(event.ids), np.int32) if event.sequences is None else event.sequences
            self._own = with_row(self._own, sequences.max())
            at = sequences[:, None], event.ids
            np.add.at(self._own[:, 0, event.gate], at, o["lfu"] + o["lhu"] * self._high([event]))
            self._own[:, 1, event.gate][at] = self._tokens

    def reset_sequence(self, sequence: int = 0) -> None:
        super().reset_sequence(sequence)
        if not self.options["sequence"]:
            return
        if self._own is None and sequence:
            return  # nothing is of it
        if self._own is not None and sequence < len(self._own):
            self._own[sequence] = 0
        if self._own is not None and self._own.any():
            self._last[:] = self._own[:, 1].max(axis=0)
            np.add(self._own[:, 0].sum(axis=0), self.options["lru"] * self._last, out=self._all)
            np.add(self._all, self._scratch, out=self.priorities)
            return
        for array in (self._last, self._all, self.priorities):
            array[:] = 0
        self._tokens = 1
