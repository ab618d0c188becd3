"""Routing of windows of text, recorded once to count the misses of simulated caches.

A lossless pass routes the same for every cache, so one pass gives the misses of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_int32

import numpy as np

from ..llamacpp.native import simulated_misses
from ..routing.event import GateEvent

_WEIGHTS = 1 << 20  # weights kept at most


class RecordedRouting:
    """Recorded gate events. A window begins where a prompt follows decoded tokens.

    Args:
        n_experts: Number of experts of each gate.

    Attributes:
        uses: Number of experts routed for decoded tokens.
    """

    def __init__(self, n_experts: Sequence[int]):
        self._n_experts, self._room = list(n_experts), _WEIGHTS
        # by gate, window and batch: ids [n_tokens, n_used] int32, True for decoded
        # tokens
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
        """Weights of experts routed for decoded tokens, [n] float32."""
        return np.concatenate(self._weights) if self._weights else np.zeros(0, np.float32)

    def misses(self, share: float) -> int:
        """Count the misses of decoded tokens with a cache that starts empty in each
        window.

        Args:
            share: Share of each gate's experts that the cache holds.
        """
        missed = 0
        for n_experts, windows in zip(self._n_experts, self._windows):
            for window in windows:
                if window:
                    ids = np.concatenate([part for part, _ in window])
                    decoded = np.repeat(
                        [is_decoded for _, is_decoded in window], [len(part) for part, _ in window]
                    )
                    missed += simulated_misses(
                        share,
                        n_experts,
                        ids.ctypes.data_as(POINTER(c_int32)),
                        decoded.ctypes.data_as(POINTER(c_bool)),
                        *ids.shape,
                    )
        return missed
