"""Experts of the layers before, and what usually followed them."""

from __future__ import annotations

import numpy as np

from ..gate_event import GateEvent
from .base import DEFAULT_FIT, FitOptions, Prediction, Predictor, Progress
from .pairs import PRIOR as PRIOR_TWO
from .pairs import TRIPLES, PairCounts, earlier
from .recording import Recording

FLOOR = 1e-4  # under logarithms
PRIOR_ONE = 8.0  # observations that the back-off weighs as much as
LEAST_KEPT = 4  # experts of a pair; with less room than that the two layers count as independent
SKIP_WEIGHT = 0.7  # of the layer before the last in that case, measured on the demo model


class ActivationPath(Predictor):
    """EdgeMoE §3.3: P(E_n | E_{n-1}, E_{n-2}), from statistics of other text.

    EdgeMoE's models choose one expert; with k of them the probability is the geometric mean over the k x k pairs of one
    expert of each layer. Rare pairs back off to the last layer's expert, rare experts to popularity. The dictionary is a table where it is
    small, else the counts of the pairs that were seen: the same numbers. Layers that route by the token alone are known before the batch
    (§3.1); so is the first one, as far as text has shown what its tokens choose. Without that, and in the second layer, the path
    goes back into the token before, which is there where the same sequences are decoded again. Without a profile one layer is learned
    while it runs.
    """

    name, summary = "activation-path", "what followed the experts of the last two layers in other text"
    profile_section = "path"
    more_sections: tuple[str, ...] = ("pairs", "first")
    layers = 2

    def start(self) -> None:
        n, e, arrays = self.router.n_gates, self.router.n_experts, self.arrays
        self._pairs = PairCounts(arrays) if arrays is not None and self.layers == 2 and "pair_seen" in arrays else None
        self._first = arrays if arrays is not None and self.layers == 2 and "first_tokens" in arrays else None
        self._tables = {gate: table for gate, table in enumerate(self.router.tables) if table is not None}
        self.wants_tokens = bool(self._tables) or self._first is not None
        self._skip: np.ndarray | None = None
        self._two: np.ndarray | None = None
        self._kept: tuple[np.ndarray, np.ndarray] | None = None
        self._counts: np.ndarray | None = None
        if arrays is None:
            self._counts = np.full((n, e, e), PRIOR_ONE / e, np.float32)  # [gate, expert before, expert]
            self._sums = np.full((n, e, 1), PRIOR_ONE, np.float32)
        else:
            self._one: np.ndarray = arrays["one"].astype(np.float32)
            if self.layers == 2 and "two" in arrays:
                self._two = arrays["two"]
            elif self.layers == 2 and "kept" in arrays:
                self._kept = arrays["kept"], arrays["change"]
            elif self.layers == 2:
                self._skip = arrays["skip"].astype(np.float32) * SKIP_WEIGHT
            self._log_popularity = np.log(arrays["popularity"] + FLOOR)
        self._gate = -1
        self._last: np.ndarray | None = None
        self._sequences: np.ndarray | None = None  # of the last rows

    def reset_sequence(self, sequence: int = 0) -> None:
        if sequence in ((0,) if self._sequences is None else self._sequences):
            self._last = None  # the path of all rows: the others' next token begins it anew, and from its second gate on it is whole again

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        """What the tokens alone say: all of a static layer, and what the first has chosen for them in other text."""
        tokens, out = np.asarray(tokens), []
        if 0 not in self._tables and self._first is not None:
            known = self._first["first_tokens"]
            at = np.searchsorted(known, tokens).clip(max=len(known) - 1)
            if (known[at] == tokens).all():  # of another token the path before it says more than popularity
                out.append(Prediction(0, self._first["first_shares"][at].astype(np.float32)))
        for gate, table in self._tables.items():
            scores = np.zeros((len(tokens), self.router.n_experts), np.float32)
            np.put_along_axis(scores, table[tokens], 1, axis=1)
            out.append(Prediction(gate, scores))
        return out

    def _follows(self, event: GateEvent) -> bool:
        """Whether the rows before are of the same tokens or, at the first gate, of the tokens before."""
        if self._last is None or len(self._last) != len(event.ids) or event.gate != (self._gate + 1) % self.router.n_gates:
            return False
        if event.sequences is not self._sequences:
            if event.sequences is None or self._sequences is None or not np.array_equal(event.sequences, self._sequences):
                return False
        return event.gate > 0 or event.one_each

    def observe(self, event: GateEvent) -> list[Prediction]:
        ids, n_gates = event.ids, self.router.n_gates
        before = self._last if self._follows(event) else None
        if self._counts is not None and before is not None:
            rows, columns = before[:, :, None], ids[:, None, :]
            np.add.at(self._counts[event.gate], (rows, columns), 1)
            np.add.at(self._sums[event.gate], before.ravel(), ids.shape[1])
        self._gate, self._last, self._sequences = event.gate, ids, event.sequences
        target = (event.gate + 1) % n_gates
        if target in self._tables or (target == 0 and not event.one_each):
            return []
        return [Prediction(target, self._scores(target, ids, before))]

    def _scores(self, gate: int, last: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        out: np.ndarray
        if self._counts is not None:
            out = (self._counts[gate][last] / self._sums[gate][last]).mean(axis=1)
            return out
        if self._two is not None and before is not None:
            pairs = self._two[gate][last[:, :, None], before[:, None, :]]
            out = np.exp(pairs.mean(axis=(1, 2), dtype=np.float32))
            return out
        if self._pairs is not None and before is not None:
            ratio = np.exp(self._one[gate][last] + self._log_popularity[gate])  # P(x | last), with FLOOR
            out = np.exp(np.log(self._pairs.joint(gate, last, before, ratio - FLOOR) + FLOOR).mean(axis=(1, 2)))
            return out
        if self._kept is not None and before is not None:
            experts, change = (part[gate][last[:, :, None], before[:, None, :]].reshape(len(last), -1) for part in self._kept)
            n_pairs = last.shape[1] * before.shape[1]
            out = np.zeros((len(last), self.router.n_experts), np.float32)
            np.add.at(out, (np.arange(len(last))[:, None], experts), change)
            out /= n_pairs
            out += self._log_popularity[gate] + self._one[gate][last].mean(axis=1)
            np.exp(out, out=out)
            return out
        log = self._log_popularity[gate] + self._one[gate][last].sum(axis=1)
        if self._skip is not None and before is not None:
            log += self._skip[gate][before].sum(axis=1)
        log -= log.max(axis=1, keepdims=True)
        out = np.exp(log, out=log)
        return out

    @classmethod
    def fit(cls, recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray]:
        """From a `Recording`.

        Returns:
            popularity [n_gates, E] share of tokens; one, skip [n_gates, E before, E] log of P(e | before) / P(e), of the last
            layer and of the one before; two [n_gates, E last, E before, E] log P(e | both). Where that is too large, the m experts of
            each pair for which it matters most: kept [n_gates, E, E, m] which, change [n_gates, E, E, m] log of P(e | both) / P(e | last).
        """
        used = recording.used()
        _, n, e = used.shape
        popularity = used.mean(axis=0, dtype=np.float32)
        arrays = {"popularity": popularity, "one": np.zeros((n, e, e), np.float16), "skip": np.zeros((n, e, e), np.float16)}
        triples = cls.layers == 2 and 2 * n * e**3 <= TRIPLES
        small = np.uint8 if e <= 256 else np.uint16
        n_kept = TRIPLES // (n * e * e * (2 + small().itemsize)) if cls.layers == 2 and not triples else 0
        if triples:
            arrays["two"] = np.zeros((n, e, e, e), np.float16)
        elif n_kept >= LEAST_KEPT:
            arrays |= {"kept": np.zeros((n, e, e, n_kept), small), "change": np.zeros((n, e, e, n_kept), np.float16)}
        for gate in range(n):
            last, before = earlier(used, recording.starts, gate, 1), earlier(used, recording.starts, gate, 2)
            y = used[:, gate].astype(np.float32)
            ratio = {}
            for name, x in (("one", last), ("skip", before)):
                x = x.astype(np.float32)
                ratio[name] = (x.T @ y + PRIOR_ONE * popularity[gate]) / (x.sum(axis=0)[:, None] + PRIOR_ONE)
                arrays[name][gate] = np.log(ratio[name] + FLOOR) - np.log(popularity[gate] + FLOOR)
            for a in range(e) if "two" in arrays or "kept" in arrays else ():
                rows = np.flatnonzero(last[:, a])
                b = before[rows].astype(np.float32)
                joint = (b.T @ y[rows] + PRIOR_TWO * ratio["one"][a]) / (b.sum(axis=0)[:, None] + PRIOR_TWO)
                log = np.log(joint + FLOOR)
                if "two" in arrays:
                    arrays["two"][gate, a] = log
                    continue
                change = log - np.log(ratio["one"][a] + FLOOR)
                at = np.argpartition(-np.abs(change) * joint, n_kept - 1, axis=1)[:, :n_kept]
                arrays["kept"][gate, a], arrays["change"][gate, a] = at, np.take_along_axis(change, at, axis=1)
            if progress:
                progress(gate + 1, n)
        return arrays


class EAP(ActivationPath):
    """Fate's baseline (§5): the expert activation path one layer back."""

    name, summary = "eap", "what followed the experts of the last layer in other text"
    more_sections = ()
    layers = 1
