"""Prefetching by token: with drafts, the next batch's tokens are known while the disk
is idle.

In the first layers, routing depends mostly on the token itself (OpenMoE,
context-independent specialization).
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from ..routing.event import GateEvent, Observer
from .buffer import ExpertBuffer
from .prefetcher import MIN_USEFUL_SHARE, whole_experts

MOST_TOKENS = 4096  # most recent tokens
_RATE = 0.1  # weight of a draft in running means
_FORGET = 0.97  # decay per event
_PRIOR = 8.0  # weight, in experts, of the prior "half is useful"


class TokenExperts(Observer):
    """The experts that tokens were routed to, prefetched for expected tokens.

    Reads are limited to the time of drafting a token. Gates where less than half of the
    absent experts prefetched are selected are left out.

    Args:
        buffer: Started buffer.
        n_gates: First gates, without those of next-token layers.
        n_used: Experts per token.
    """

    def __init__(self, buffer: ExpertBuffer, n_gates: int, n_used: int):
        self._buffer, self._n_used, n_experts = buffer, n_used, buffer.priorities.shape[1]
        self._whole = whole_experts(buffer)[:n_gates]
        self._experts = np.full((MOST_TOKENS, n_gates, n_used), -1, np.int16)
        self._rows: dict[int, int] = {}  # by token
        self._tokens = [-1] * MOST_TOKENS  # by row
        self._next = 0  # next row
        # start time and tokens of the last batches
        self._batches: deque[tuple[int, np.ndarray]] = deque()
        self._first = self._n = 0  # token range of the coming events
        self._expected = np.zeros((n_gates, n_experts), bool)  # absent when predicted
        self._n_expected, self._n_useful = np.zeros(n_gates), np.zeros(n_gates)
        # start time and length of the current draft
        self._drafted, self._n_drafted = 0, 0
        self._draft_ns = self._slice_ns = 0.0  # mean time of a token and of a slice
        self._seen = (0, 0)  # disk_busy_ns, reads

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        now = time.monotonic_ns()
        if self._n_drafted and decode:  # otherwise the answer ended after a draft
            self._draft_ns = _mean(self._draft_ns, (now - self._drafted) / self._n_drafted)
        self._n_drafted = 0
        self._batches.append((now, np.array([self._row(token) for token in tokens.tolist()])))

    def _row(self, token: int) -> int:
        row = self._rows.get(token)
        if row is None:
            row = self._rows[token] = self._next
            self._rows.pop(self._tokens[row], None)
            self._tokens[row], self._next = token, (self._next + 1) % MOST_TOKENS
            self._experts[row] = -1
        return row

    def observe(self, event: GateEvent) -> None:
        gate = event.gate
        if gate >= len(self._whole):
            return
        while len(self._batches) > 1 and self._batches[1][0] <= event.t_ns:
            self._batches.popleft()
            self._first = self._n = 0
        if gate == 0:  # a new micro-batch
            self._first, self._n = self._first + self._n, len(event.ids)
        rows = self._batches[0][1][self._first :][: self._n] if self._batches else np.empty(0, int)
        if len(rows) != len(event.ids):  # events were dropped
            return
        expected = self._expected[gate]
        if event.decode and expected.any():
            self._n_expected[gate] = _FORGET * self._n_expected[gate] + expected.sum()
            self._n_useful[gate] = (
                _FORGET * self._n_useful[gate] + expected[np.unique(event.ids)].sum()
            )
        expected[:] = False
        self._experts[rows, gate, : event.ids.shape[1]] = event.ids[:, : self._n_used]

    def expect(self, token: int) -> None:
        """Prefetch for a drafted token of the next batch, before drafting the next."""
        now = time.monotonic_ns()
        if not self._n_drafted:
            self._drafted = now
            stats = self._buffer.stats()
            busy, reads = stats.disk_busy_ns - self._seen[0], stats.reads - self._seen[1]
            self._seen = stats.disk_busy_ns, stats.reads
            if reads > 0:
                self._slice_ns = _mean(self._slice_ns, busy / reads)
        self._n_drafted += 1
        row = self._rows.get(token)
        if row is None or not self._slice_ns:
            return
        left = int(self._draft_ns / self._slice_ns)
        chosen = np.zeros_like(self._expected)
        gates, places = np.nonzero(self._experts[row] >= 0)
        chosen[gates, self._experts[row, gates, places]] = True
        self._expected |= chosen & (self._buffer.residency()[: len(chosen)] != self._whole)
        pays = self._n_useful + _PRIOR / 2 >= MIN_USEFUL_SHARE * (self._n_expected + _PRIOR)
        for gate in np.unique(gates[pays[gates]]).tolist():
            if left > 0:
                left -= self._buffer.prefetch(
                    gate, np.flatnonzero(chosen[gate]).tolist(), limit=left
                )


def _mean(mean: float, new: float) -> float:
    return mean + _RATE * (new - mean) if mean else new
