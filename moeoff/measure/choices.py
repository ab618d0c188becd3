"""What gates chose for every token of some windows of text, and what a simulated cache misses of it where nothing is left out.

The choices of a lossless pass are the same behind every cache, so that one pass tells the misses behind all of them, on the very tokens that rules are
measured on.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_int32

import numpy as np

from ..llamacpp.native import simulated_misses
from ..routing.event import GateEvent

_WEIGHTS = 1 << 20  # that are kept, at most


class Choices:
    """Gate events in the order of the text; a window begins where a prompt follows decoded tokens.

    Args:
        n_experts: of each gate.

    Attributes:
        uses: experts that decoded tokens chose.
    """

    def __init__(self, n_experts: Sequence[int]):
        self._n_experts, self._room = list(n_experts), _WEIGHTS
        # of each gate and window, by batch: ids [n_tokens, n_used] int32, and whether the tokens are decoded
        self._windows: list[list[list[tuple[np.ndarray, bool]]]] = [[] for _ in self._n_experts]
        self._weights: list[np.ndarray] = []
        self._decoded, self.uses = True, 0

    def observe(self, event: GateEvent) -> None:
        decoded = bool(event.decode)
        if event.gate == 0:
            if self._decoded and not decoded:
                for of_gate in self._windows:
                    of_gate.append([])
            self._decoded = decoded
        self._windows[event.gate][-1].append((event.ids.copy(), decoded))
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
        missed = 0
        for n_experts, windows in zip(self._n_experts, self._windows):
            for window in windows:
                if window:
                    ids = np.concatenate([part for part, _ in window])
                    decoded = np.repeat([is_decoded for _, is_decoded in window], [len(part) for part, _ in window])
                    missed += simulated_misses(share, n_experts, ids.ctypes.data_as(POINTER(c_int32)), decoded.ctypes.data_as(POINTER(c_bool)), *ids.shape)
        return missed
