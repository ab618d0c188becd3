"""What a token chose when it was computed before: where a model makes drafts, the next
batch's tokens are known while the disk has nothing to read.

Routers choose by the token more than by what stands before it, in the first layers
nearly by it alone (OpenMoE, context-independent specialization): there the same token
chooses nearly the same experts again.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from ..routing.event import GateEvent, Observer
from .buffer import ExpertBuffer
from .prefetcher import MIN_USEFUL_SHARE, whole_experts

MOST_TOKENS = 4096  # of a vocabulary, those that were computed last
_RATE = 0.1  # of a draft, in the running means
_FORGET = 0.97  # what an event's counts keep
_PRIOR = 8.0  # experts that the assumption "half is useful" weighs as much as


class TokenExperts(Observer):
    """Remembers what tokens choose, and prefetches it where they are expected.

    For each token as much is read as the disk can while the one behind it is guessed.
    Gates where less than half of what was expected, and absent, is then selected are
    left out.

    Args:
        buffer: started.
        n_gates: that a token passes, from the first; what comes behind them belongs to
            next-token layers.
        n_used: experts for each token.
    """

    def __init__(self, buffer: ExpertBuffer, n_gates: int, n_used: int):
        self._buffer, self._n_used, n_experts = buffer, n_used, buffer.priorities.shape[1]
        self._whole = whole_experts(buffer)[:n_gates]
        self._experts = np.full((MOST_TOKENS, n_gates, n_used), -1, np.int16)
        self._rows: dict[int, int] = {}  # of each token
        self._tokens = [-1] * MOST_TOKENS  # of each row
        self._next = 0  # row
        # when each began, and its tokens' rows
        self._batches: deque[tuple[int, np.ndarray]] = deque()
        self._first = self._n = 0  # of its tokens, those of the events that come
        self._expected = np.zeros((n_gates, n_experts), bool)  # absent when they were expected
        self._n_expected, self._n_useful = np.zeros(n_gates), np.zeros(n_gates)
        # when a draft began, and how many tokens it has so far
        self._drafted, self._n_drafted = 0, 0
        self._draft_ns = self._slice_ns = 0.0  # of a token and a slice, in the mean
        self._seen = (0, 0)  # disk_busy_ns, reads

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        now = time.monotonic_ns()
        if self._n_drafted and decode:  # else an answer ended behind a draft
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
        if gate == 0:  # of the next micro-batch
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
        """The next batch will have it, if only as a draft. From the thread that
        computes, before the token behind it is guessed.
        """
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
