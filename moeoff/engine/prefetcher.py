"""Prefetching: predicted experts are protected from eviction, and read as far as the time between two gates allows.

Runs on the driver thread; owns no memory and no policy. A prefetch queues behind all demand. Where the router does not select
its expert, the native buffer cancels it, before or between its chunks (ProMoE §5, early preemption).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import native
from ..budget.precision import LOSSLESS, Precision
from ..gate_event import GateEvent
from ..predict import Prediction, Predictor
from .ab_test import PrefetchABTest
from .expert_buffer import ExpertBuffer

_RATE = 0.05  # of the running means
_SAMPLE = 64  # tokens of a batch that are predicted for: experts that fewer than one in so many selects are left to demand
_FEW_MISSES = 0.01  # slices per gate, below which prediction has no measurable effect


class Prefetcher:
    """Args:
    buffer: started.
    predictor: its `observe` is called for every event.
    n_used: experts for each token.
    n_lanes: I/O workers of the buffer.
    fallback: takes the predictor's place if it reads gate inputs and events have none.
    share: of all experts, how many candidates a gate has at least (Fate §4.2: 0.25); at least n_used.
    ab_tested: prefetching that lengthens tokens is switched off (`PrefetchABTest`).
    precision: if the router selected as predicted: experts that would be served in low precision are read in it, skipped ones not at all.
    """

    def __init__(self, buffer: ExpertBuffer, predictor: Predictor, n_used: int, n_lanes: int,
                 fallback: Predictor | None = None, *, share: float = 0.0, ab_tested: bool = True,
                 precision: Precision = LOSSLESS):  # fmt: skip
        self._buffer, self.predictor, self._fallback, self._precision = buffer, predictor, fallback, precision
        n_experts = buffer.priorities.shape[1]
        self._n_used, self._n_lanes = n_used, n_lanes
        self._n_candidates = min(max(n_used, round(share * n_experts)), n_experts)
        self._most = float(n_used * max(np.bincount([t.gate for t in buffer.tensors])))  # slices of one gate
        self.ab_test = PrefetchABTest() if ab_tested else None
        self._last_t = self._token_t = 0
        self._gap = 0.0  # ns from gate to gate
        self._misses = self._most / 2  # slices that a gate finds absent
        self._t_slice = 0.0  # ns, all I/O workers busy
        self._credit = 0.0  # slices
        self._seen = (0, 0)  # io_worker_busy_ns, reads

    @property
    def on(self) -> bool:
        return self.ab_test is None or self.ab_test.on

    @property
    def gain(self) -> float | None:
        """Speed with prefetching relative to without, minus 1, when it was last compared."""
        return self.ab_test.gain if self.ab_test is not None else None

    def observe(self, event: GateEvent) -> None:
        """After a router has selected."""
        if event.gate_input is None and self._fallback is not None:
            self.predictor, self._fallback = self._fallback, None
        single = len(event.ids) == 1
        if single:
            self._measure(event)
        else:
            self._last_t = self._token_t = 0
        if single and self._misses < _FEW_MISSES or not self.on:
            return
        self._act(self.predictor.observe(event if single else _sample(event)), single)

    def begin(self, tokens: np.ndarray) -> None:
        """Before a batch, while no layer computes."""
        if self.on:
            self._act(self.predictor.begin(tokens), len(tokens) == 1)

    def _measure(self, event: GateEvent) -> None:
        now = event.t_ns
        if self._last_t:
            self._gap += _RATE * (now - self._last_t - self._gap) if self._gap else now - self._last_t
        self._last_t = now
        self._misses += _RATE * (event.n_miss - self._misses)
        if event.gate == 0:
            if self._token_t and self.ab_test is not None:
                self.ab_test.token(now - self._token_t)
            self._token_t = now
            stats = self._buffer.stats()
            busy, reads = stats.io_worker_busy_ns - self._seen[0], stats.reads - self._seen[1]
            if reads > 0:
                self._t_slice = busy / reads / self._n_lanes
            self._seen = (stats.io_worker_busy_ns, stats.reads)
        # n = T / t_expert (Fate §4.3) in slices: T is the part of the gap in which demand leaves the workers idle, and adds up
        if self._t_slice:
            self._credit = min(self._credit + max(self._gap / self._t_slice - self._misses, 0.0), self._most)

    def _act(self, predictions: list[Prediction], single: bool) -> None:
        for p in predictions:
            if not single:
                self._read_union(p)
                continue
            best = p.scores[0].argsort()[: -self._n_candidates - 1 : -1]
            queued = self._read(p, best, int(self._credit))
            self._credit -= queued
            if queued:
                return  # something was absent: look no further ahead (HOBBIT §3.3)

    def _read(self, p: Prediction, best: np.ndarray, limit: int) -> int:
        """Protects the candidates and queues up to `limit` slices of them; returns how many."""
        gate = p.gate
        if self._precision.lossless:
            return self._buffer.prefetch(gate, best.tolist(), limit=limit)
        scores = self.predictor.router.gated(p.scores[0]) if p.logits else p.scores[0]
        versions = self._versions(scores[best])
        queued = self._buffer.prefetch(gate, best[versions == native.HIGH].tolist(), limit=limit)
        self._buffer.prefetch(gate, best[versions != native.HIGH].tolist(), limit=0)  # those that are resident will serve
        if low := best[versions == native.LOW].tolist():
            queued += self._buffer.prefetch(gate, low, low=True, limit=limit - queued)
        return queued

    def _versions(self, scores: np.ndarray) -> np.ndarray:
        """Versions that would serve these candidates, the likeliest first, if their scores were gate weights (HOBBIT §3.3). [n] of native.HIGH, LOW, SKIP."""
        total = scores[: self._n_used].sum()
        if total <= 0 or scores[-1] < 0:
            return np.full(len(scores), native.HIGH)
        s = np.minimum((np.cumsum(scores) - scores) / total, 1)
        s[0] = 0
        return np.where(s <= self._precision.t1, native.HIGH, np.where(s <= self._precision.t2, native.LOW, native.SKIP))

    def _read_union(self, p: Prediction) -> None:
        """A batch: all experts that some token is likely to select, those of the most tokens first (Fate §4.3)."""
        chosen = np.argpartition(p.scores, -self._n_used, axis=1)[:, -self._n_used :] if self._n_used < p.scores.shape[1] else np.arange(p.scores.shape[1])
        count = np.bincount(chosen.ravel(), minlength=p.scores.shape[1])
        order = np.argsort(-count, kind="stable")
        order = order[count[order] > 0].tolist()
        n_high = len(order) - int(self._precision.prefill_low_share * len(order))
        self._buffer.prefetch(p.gate, order[:n_high])
        if n_high < len(order):
            self._buffer.prefetch(p.gate, order[n_high:], low=True)

    def reset_sequence(self) -> None:
        """A new text begins."""
        self.predictor.reset_sequence()
        self._last_t = self._token_t = 0


def _sample(event: GateEvent) -> GateEvent:
    """Some tokens of a large batch, evenly spread: with more of them the union hardly grows, and prediction competes for the cores."""
    step = -(-len(event.ids) // _SAMPLE)
    inputs = None if event.gate_input is None else event.gate_input[::step]
    return replace(event, ids=event.ids[::step], weights=event.weights[::step], gate_input=inputs)
