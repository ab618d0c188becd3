"""HOBBIT's weighted sum of LRU, LFU, LHU and layer distance (§3.4, equation 3)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..gate_event import GateEvent
from .base import Sections, used, with_row
from .grouped import GroupedPolicy
from .importance import T1, unimportance


class Hobbit(GroupedPolicy):
    """p = w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l_t - l_i + l_n) mod l_n) / l_n) (HOBBIT §3.4), reset with each text.

    R is the token of the last use, F the uses in this text, H those in high precision (unimportance <= T1, §3.2), T the
    tokens so far, l_i the layer that is evicting. The table holds p times T, which orders the same and leaves all rows but
    the event's alone where w_fld is 0. With low_cost = B_l/B_h, what a low-precision miss costs beside a high one (§3.4's
    penalty), w_lfu and w_lhu share their sum so that w_lfu F + w_lhu H is what the misses of these uses would have cost. The
    default weights are those that `moeoff.calibrate.fit_hobbit` fits for the demo model. sequence=False never resets.

    Of several sequences, which the paper does not have, F and H are the sums, R is the latest use and T counts the tokens of all;
    one that begins a text takes its uses with it.
    """

    name, summary = "hobbit", "weighs recency, frequency, precision and layer distance"
    defaults = {"lru": 0.0784, "lfu": 0.1765, "lhu": 0.7059, "fld": 0.0392, "t1": T1, "low_cost": None, "sequence": True}
    profile_sections = ("hobbit",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {name: float(weight) for name, weight in profile.get("hobbit", {}).items()}

    @classmethod
    def precision_options(cls, t1: float, low_cost: float) -> dict[str, Any]:
        return {"t1": t1, "low_cost": low_cost}

    def start(self) -> None:
        super().start()
        o, n = self.options, self.shape.n_gates
        if o["low_cost"] is not None:  # H + low_cost (F - H)
            both = o["lfu"] + o["lhu"]
            o = self.options = o | {"lfu": both * o["low_cost"], "lhu": both * (1 - o["low_cost"])}
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
            ids, weights = (np.concatenate(arrays) for arrays in ([e.ids for e in events], [e.weights for e in events]))
            self._count(gates[:, None], ids, o["lfu"] + o["lhu"] * (unimportance(weights) <= o["t1"]))
        else:
            for gate, event in enumerate(events, first):
                experts, count = used(event)
                high = np.bincount(event.ids[unimportance(event.weights) <= o["t1"]], minlength=self.shape.n_experts)
                self._count(gate, experts, o["lfu"] * count + o["lhu"] * high[experts])
        if o["fld"]:
            np.multiply(self._fld[(first + len(events)) % self.shape.n_gates], self._tokens, out=self._scratch)
            np.add(self._all, self._scratch, out=self.priorities)
        else:
            self.priorities[gates] = self._all[gates]

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
            np.add.at(self._own[:, 0, event.gate], at, o["lfu"] + o["lhu"] * (unimportance(event.weights) <= o["t1"]))
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
