"""How useful a prefetch is: how often an expert that was predicted, and absent, is then selected, by its place in the prediction.

What is read for nothing costs the disk as much as what is used, and the experts that a good cache lacks are those that are
hard to foresee: of all predictions most are right, of those about absent experts fewer. Knows nothing of scores, slices or time.
"""

from __future__ import annotations

import numpy as np

PAYS = 0.5  # least share that must be useful: no more is read for nothing than for use, even at the last place that is read
_RATE = 0.03  # of a token, in the running sums
_PRIOR = 4.0  # observations that the assumption "half is useful", and for a gate "as in all gates", weigh as much as
_NOTHING = np.zeros(0, np.int32)


class Usefulness:
    """Args:
    n_gates, n_experts: of the priority table.
    n_places: candidates of a prediction.
    """

    def __init__(self, n_gates: int, n_experts: int, n_places: int):
        self._resident = np.ones((n_gates, n_experts), bool)
        self._ids: list[np.ndarray] = [_NOTHING] * n_gates  # this token's
        self._best: list[np.ndarray] = [_NOTHING] * n_gates
        self._places: list[np.ndarray] = [_NOTHING] * n_gates
        self._all_places = np.arange(n_places)
        self._gates = np.arange(n_gates)
        self._absent, self._useful = np.zeros(n_places), np.zeros(n_places)
        self._expected_of, self._useful_of = np.zeros(n_gates), np.zeros(n_gates)
        self._n_paying = [n_places] * n_gates

    def n_paying(self, gate: int) -> int:
        """Up to which place the likeliest candidates of a gate are read if they are absent."""
        return self._n_paying[gate]

    def predicted(self, gate: int, best: np.ndarray, places: np.ndarray | None = None) -> None:
        """The candidates [n] of a gate for its next token, each once, and the place of each; None: the likeliest first."""
        self._best[gate] = best
        self._places[gate] = self._all_places if places is None else places

    def selected(self, gate: int, ids: np.ndarray) -> None:
        """What a gate has selected for a token [n], or for one each of several sequences: of use is what any of them selects."""
        self._ids[gate] = ids  # that is all: this runs for each gate

    def next_token(self, resident: np.ndarray) -> None:
        """The first gate has selected: counts what was predicted for it and, in the token before, for the others.

        Args:
            resident: [n_gates, n_experts] bool, what is in memory now; the next predictions are judged by it.
        """
        n_places, n_gates = len(self._absent), len(self._gates)
        selected = np.zeros_like(self._resident)
        selected[self._gate_of(self._ids), np.concatenate(self._ids)] = True
        gates, best, places = self._gate_of(self._best), np.concatenate(self._best), np.concatenate(self._places)
        absent = ~self._resident[gates, best]
        gates, best, places = gates[absent], best[absent], places[absent]
        useful = selected[gates, best]
        for sums, new in (
            (self._absent, np.bincount(places, minlength=n_places)),
            (self._useful, np.bincount(places[useful], minlength=n_places)),
            (self._useful_of, np.bincount(gates[useful], minlength=n_gates)),
        ):
            sums *= 1 - _RATE
            sums += new
        share = (self._useful + _PRIOR / 2) / (self._absent + _PRIOR)
        self._expected_of *= 1 - _RATE
        self._expected_of += np.bincount(gates, share[places], n_gates)
        in_gate = (self._useful_of + _PRIOR) / (self._expected_of + _PRIOR)
        pays = in_gate[:, None] * share >= PAYS
        self._n_paying = np.logical_and.accumulate(pays, axis=1).sum(axis=1).tolist()
        self._ids, self._best, self._places = ([_NOTHING] * n_gates for _ in range(3))
        self._resident[:] = resident

    def _gate_of(self, of_each: list[np.ndarray]) -> np.ndarray:
        return np.repeat(self._gates, [len(part) for part in of_each])
