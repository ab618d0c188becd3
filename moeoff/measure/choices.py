"""What gates chose for every token of some windows of text, and what a simulated cache misses of it where nothing is left out.

The choices of a lossless pass are the same behind every cache, so that one pass tells the misses behind all of them, on the very tokens that rules are
measured on. The cache is that of core/moeoff-version-selector.h, in numpy: all gates of all windows step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..routing.event import GateEvent

_KEPT_BY_TOKEN = np.float32(0.98)  # of a count
_LARGEST_UNIT = np.float32(1e18)
_WEIGHTS = 1 << 20  # that are kept, at most


@dataclass
class _Window:
    """Choices of one gate: ids [n_tokens, n_used] int32 of each batch, and whether its tokens are decoded."""

    ids: list[np.ndarray]
    decoded: list[bool]


class Choices:
    """Gate events in the order of the text; a window begins where a prompt follows decoded tokens.

    Args:
        n_experts: of each gate.

    Attributes:
        uses: experts that decoded tokens chose.
    """

    def __init__(self, n_experts: Sequence[int]):
        self._n_experts, self._room = list(n_experts), _WEIGHTS
        self._windows: list[list[_Window]] = [[] for _ in self._n_experts]
        self._weights: list[np.ndarray] = []
        self._decoded, self.uses = True, 0

    def observe(self, event: GateEvent) -> None:
        decoded = bool(event.decode)
        if event.gate == 0:
            if self._decoded and not decoded:
                for of_gate in self._windows:
                    of_gate.append(_Window([], []))
            self._decoded = decoded
        window = self._windows[event.gate][-1]
        window.ids.append(event.ids.copy())
        window.decoded.append(decoded)
        self.uses += event.ids.size if decoded else 0
        if decoded and self._room > 0:
            self._weights.append(event.weights.ravel()[: self._room].copy())
            self._room -= len(self._weights[-1])

    @property
    def weights(self) -> np.ndarray:
        """[n] float32, of experts that decoded tokens chose."""
        return np.concatenate(self._weights) if self._weights else np.zeros(0, np.float32)

    def misses(self, share: float) -> int:
        """Experts that decoded tokens would have had to read behind a cache that holds this share of each gate's, empty at the beginning of each window."""
        alike: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}  # by the batches' tokens: the last gate has none of those whose logits nobody wants
        decoded: dict[tuple[int, ...], np.ndarray] = {}
        for gate, windows in enumerate(self._windows):
            for window in windows:
                if not window.ids:
                    continue
                ids = np.concatenate(window.ids)
                is_decoded = np.repeat(window.decoded, [len(part) for part in window.ids])
                key = (*ids.shape, int(is_decoded.sum()))
                alike.setdefault(key, []).append((self._n_experts[gate], ids))
                decoded[key] = is_decoded
        return sum(_misses(np.stack([ids for _, ids in rows], 1), decoded[key], np.array([n for n, _ in rows]), share) for key, rows in alike.items())


def _misses(ids: np.ndarray, decoded: np.ndarray, n_experts: np.ndarray, share: float) -> int:
    """Of caches side by side.

    Args:
        ids: [n_tokens, n_caches, n_used].
        decoded: [n_tokens] bool, which count.
        n_experts: [n_caches].
    """
    n_tokens, n_caches, n_used = ids.shape
    rows = np.arange(n_caches)
    count = np.zeros((n_caches, int(n_experts.max())), np.float32)
    inside = np.zeros(count.shape, bool)
    n_in = np.zeros(n_caches, np.int64)
    room = np.floor(np.float32(share) * n_experts.astype(np.float32) + np.float32(0.5)).astype(np.int64)
    unit, missed = np.float32(1), 0
    for t in range(n_tokens):
        chosen = ids[t]
        if decoded[t]:
            missed += int(np.count_nonzero(~inside[rows[:, None], chosen]))
        count[rows[:, None], chosen] += unit
        for k in range(n_used):
            absent = rows[~inside[rows, chosen[:, k]]]
            full = n_in[absent] >= room[absent]
            free, absent = absent[~full], absent[full]
            inside[free, chosen[free, k]] = True
            n_in[free] += 1
            if not absent.size:
                continue
            rank = np.where(inside[absent], count[absent], np.inf)
            np.put_along_axis(rank, chosen[absent], np.inf, axis=1)  # what the token uses stays
            victim = rank.argmin(axis=1)
            gives = np.isfinite(rank[np.arange(len(absent)), victim])
            absent, victim = absent[gives], victim[gives]
            inside[absent, victim] = False
            inside[absent, chosen[absent, k]] = True
        unit = np.float32(unit / _KEPT_BY_TOKEN)
        if unit > _LARGEST_UNIT:
            count /= unit
            unit = np.float32(1)
    return missed
