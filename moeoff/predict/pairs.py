"""EdgeMoE's dictionary for models whose table of all triples would not fit: the counts of what was seen, and nothing else (§3.3.2).

What a pair of experts in the last two layers was followed by, exactly; a pair that never occurred takes no room.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .base import FitOptions, Progress
from .recording import Recording

PRIOR = 8.0  # observations that the back-off to one layer weighs as much as
TRIPLES = 64 << 20  # bytes of a table of all triples; a larger one becomes counts
LIMIT = 256 << 20  # bytes of counts; of a model with more, the last pairs of a layer back off to one layer


class PairCounts:
    """P(x | a in the last layer, b in the one before) of a profile's section "pairs".

    Args:
        arrays: pair_seen [n_gates, E, E] how often a pair occurred; pair_start [n_gates, E * E + 1] where the experts that followed it
            begin, among those of its gate; pair_base [n_gates] where these begin; pair_expert, pair_count [n] who followed, and how often.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._seen, self._start, self._base = arrays["pair_seen"], arrays["pair_start"], arrays["pair_base"]
        self._expert, self._count = arrays["pair_expert"], arrays["pair_count"]

    def joint(self, gate: int, last: np.ndarray, before: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """[n_tokens, k, k, E] float32: the probabilities for each pair of one expert of each layer.

        Args:
            last, before: [n_tokens, k].
            ratio: [n_tokens, k, E] P(x | last), which rare pairs back off to.
        """
        e = ratio.shape[2]
        a, b = np.broadcast_arrays(last[:, :, None], before[:, None, :])
        out = np.repeat((PRIOR * ratio)[:, :, None], before.shape[1], axis=2)
        pair = (a.astype(np.int64) * e + b).ravel()
        first = self._start[gate][pair].astype(np.int64)
        n = self._start[gate][pair + 1].astype(np.int64) - first
        if n.any():
            row = np.repeat(np.arange(len(pair)), n)
            at = np.arange(len(row)) - np.repeat(np.cumsum(n) - n, n) + np.repeat(first, n) + self._base[gate]
            out.reshape(len(pair), e)[row, self._expert[at]] += self._count[at]  # each expert of a pair is there once
        out /= (self._seen[gate][a, b] + PRIOR)[..., None]
        return out


def fit(recording: Recording, options: FitOptions, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
    """The section "pairs"; None where the table of all triples is small enough to be kept whole."""
    used, starts = recording.used(), recording.starts
    _, n, e = used.shape
    if 2 * n * e**3 <= TRIPLES:
        return None
    small = np.uint8 if e <= 256 else np.uint16
    room = LIMIT // (n * (small().itemsize + 2))  # triples of a gate
    seen, start, base = np.zeros((n, e, e), np.uint32), np.zeros((n, e * e + 1), np.uint32), np.zeros(n, np.int64)
    experts: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for gate in range(n):
        last, before, y = earlier(used, starts, gate, 1), earlier(used, starts, gate, 2), used[:, gate].astype(np.float32)
        n_triples = 0
        base[gate] = sum(len(part) for part in experts)
        for a in range(e):
            rows = np.flatnonzero(last[:, a])
            b = before[rows].astype(np.float32)
            count = (b.T @ y[rows]).astype(np.int64)
            if n_triples + np.count_nonzero(count) > room:
                count[:] = 0
            else:
                seen[gate, a] = b.sum(axis=0)
            where = np.nonzero(count)
            experts.append(where[1].astype(small))
            counts.append(np.minimum(count[where], 65535).astype(np.uint16))
            start[gate, a * e + 1 : (a + 1) * e + 1] = n_triples + np.cumsum(np.count_nonzero(count, axis=1))
            n_triples += len(where[0])
        if progress:
            progress(gate + 1, n)
    return {
        "pair_seen": seen, "pair_start": start, "pair_base": base,
        "pair_expert": np.concatenate(experts), "pair_count": np.concatenate(counts),
    }  # fmt: skip


def earlier(used: np.ndarray, starts: np.ndarray, gate: int, steps: int) -> np.ndarray:
    """[n_tokens, E] bool: the experts `steps` gates before, of the token before if need be; none before a text."""
    at = gate - steps
    if at >= 0:
        return used[:, at]
    out = np.zeros_like(used[:, 0])
    out[1:] = used[:-1, at % used.shape[1]]
    out[starts] = False
    return out
