"""Prefetching: predicted experts are protected from eviction, and read as far as the time between two gates allows.

Runs on the driver thread; owns no memory and no policy. A prefetch queues behind all demand. Where the router does not select
its expert, the native buffer cancels it, before or between its chunks (ProMoE §5, early preemption).
"""

from __future__ import annotations

import numpy as np

from .. import native
from ..budget.precision import LOSSLESS, Precision
from ..cache.importance import unimportance
from ..gate_event import GateEvent
from ..predict import Prediction, Predictor
from .ab_test import ABTest
from .expert_buffer import ExpertBuffer
from .prediction_meter import PredictionMeter
from .read_ahead import ReadAhead
from .usefulness import Usefulness

_RATE = 0.4  # of a token, in the running means
SAMPLE = 64  # tokens of a batch that are predicted for: experts that fewer than one in so many selects are left to demand
_LEAST_BUSY = 0.01  # of the time, in which the disk reads: below it prediction has no measurable effect


class Prefetcher:
    """Args:
    buffer: started.
    predictor: its `observe` is called for the events that are predicted from.
    n_used: experts for each token.
    n_lanes: I/O workers of the buffer.
    fallback: takes the predictor's place if it reads gate inputs and events have none.
    share: of all experts, how many candidates a gate has at least (Fate §4.2: 0.25); at least n_used.
    ab_tested: in decode, prefetching that does not shorten tokens is switched off (`ABTest`, one for each number of sequences), and
        what is seldom useful is not read (`Usefulness`).
    precision: if the router selected as predicted: experts that would be served in low precision are read in it, skipped ones not at all.
    fills_devices: a prefetch also writes what host memory has into slots of a device, so that it pays without reads, too.
    """

    def __init__(self, buffer: ExpertBuffer, predictor: Predictor, n_used: int, n_lanes: int,
                 fallback: Predictor | None = None, *, share: float = 0.0, ab_tested: bool = True,
                 precision: Precision = LOSSLESS, fills_devices: bool = False):  # fmt: skip
        self._buffer, self.predictor, self._fallback, self._precision = buffer, predictor, fallback, precision
        self._as_weighed = not precision.lossless and not precision.mispredicted_low  # else what is predicted is read in high precision
        self._fills_devices = fills_devices
        self._n_gates, n_experts = buffer.priorities.shape
        self._n_used, self._n_lanes = n_used, n_lanes
        self._n_candidates = min(max(n_used, round(share * n_experts)), n_experts)
        self._n_experts = n_experts
        self._n_matrices = int(max(np.bincount([t.gate for t in buffer.tensors])))
        self._most = float(n_used * self._n_matrices)  # slices that one gate can select
        self.ab_test = ABTest() if ab_tested else None
        self._ab_tests = {} if self.ab_test is None else {1: self.ab_test}  # by number of sequences: their times cannot be compared
        self._n_sequences = 1
        self._usefulness = Usefulness(self._n_gates, n_experts, self._n_candidates) if ab_tested else None
        # the papers' own presets are measured as their papers do; what is A/B-tested has its gain
        self.meter = None if ab_tested else PredictionMeter(buffer.tensors, self._n_gates)
        self._read_ahead = ReadAhead(buffer, precision)
        self._popular: dict[int, list[int]] = {}  # of a prompt's batch, by gate: the experts that are foreseen
        self._matrices = np.zeros((self._n_gates, 1), np.uint8)  # of each gate, as bits
        for t in buffer.tensors:
            self._matrices[t.gate] |= 1 << t.matrix
        self._token_t = self._n_rows = 0
        self._token_ns = 0.0
        self._missed = 0  # slices that this token's gates found absent
        self._misses = self._most / 2  # the same for each gate
        self._busy: float | None = None  # ns of a token, all I/O workers
        self._credit = self._earned = 0.0  # slices; what a gate adds to them
        self._seen = (0, 0)  # io_worker_busy_ns, reads

    @property
    def on(self) -> bool:
        return self.ab_test is None or self.ab_test.on

    @property
    def gain(self) -> float | None:
        """Speed with prefetching relative to without, minus 1, when it was last compared."""
        return self.ab_test.gain if self.ab_test is not None else None

    @property
    def _predicts(self) -> bool:
        """Whether this token's gates are predicted."""
        return self.on and (self._precision.mispredicted_low or self._fills_devices or self._busy is None or self._busy >= _LEAST_BUSY * self._token_ns)

    def observe(self, event: GateEvent) -> None:
        """After a router has selected."""
        if event.gate_input is None and self._fallback is not None:
            self.predictor, self._fallback = self._fallback, None
        if not event.decode:
            self._token_t = 0
            # the papers' presets foresee the batch's own popularity; without a prediction that of earlier ones has to do
            found = self.predictor.observe(event.sample(SAMPLE)) if self.meter is not None else None
            for p in found or []:
                self._popular[p.gate] = _by_popularity(p.scores, self._n_used)
            if not self._read_ahead.observe(event, self._popular.pop(event.gate + 1, [])):
                self._act(self.predictor.observe(event.sample(SAMPLE)) if found is None else found, False)
            return
        usefulness = self._usefulness if self._predicts else None
        if usefulness is not None:
            usefulness.selected(event.gate, event.ids.ravel())
        if self.meter is not None:
            self.meter.selected(event)
        if event.gate == 0:
            self._next_token(event)
        self._missed += event.n_miss
        self._credit = min(self._credit + self._earned, self._most)
        if self._predicts:
            self._act(self.predictor.observe(event.sample(SAMPLE)), True)

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        """Before a batch, while no layer computes.

        Args:
            tokens: [n_tokens].
            decode: each is the next of a text of its own.
        """
        if not decode and self._read_ahead.begin(len(tokens), self._n_used):
            return
        if self._predicts or not decode:
            self._act(self.predictor.begin(tokens), decode, stops=decode)

    def _next_token(self, event: GateEvent) -> None:
        """The first gate of a token: what the one before has taken, and what the disk can read beside demand."""
        now, n_rows = event.t_ns, len(event.ids)
        n_sequences = 1 if event.sequences is None else len(set(event.sequences.tolist()))
        stats = self._buffer.stats()
        busy, reads = stats.io_worker_busy_ns - self._seen[0], stats.reads - self._seen[1]
        self._seen = (stats.io_worker_busy_ns, stats.reads)
        if self._usefulness is not None and self._predicts:
            self._usefulness.next_token(self._buffer.residency() == self._matrices)
        if self._token_t and n_rows == self._n_rows and n_sequences == self._n_sequences:
            ns = now - self._token_t
            if self.ab_test is not None:
                self.ab_test.token(ns)
            self._token_ns += _RATE * (ns - self._token_ns) if self._token_ns else ns
            self._misses += _RATE * (self._missed / self._n_gates - self._misses)
            busy_now = busy / self._n_lanes
            self._busy = busy_now if self._busy is None else self._busy + _RATE * (busy_now - self._busy)
            # n = T / t_expert (Fate §4.3) in slices: T is the part of the gap in which demand leaves the workers idle, and adds up
            if reads > 0:
                t_slice = busy / reads / self._n_lanes
                self._earned = max(self._token_ns / self._n_gates / t_slice - self._misses, 0.0) if t_slice else 0.0
        if n_rows != self._n_rows:
            self._most = float(min(n_rows * self._n_used, self._n_experts) * self._n_matrices)
        if n_sequences != self._n_sequences and self.ab_test is not None:
            self.ab_test = self._ab_tests.setdefault(n_sequences, ABTest())
        self._token_t, self._n_rows, self._n_sequences, self._missed = now, n_rows, n_sequences, 0

    def _act(self, predictions: list[Prediction], decode: bool, stops: bool = True) -> None:
        """stops: where something of a gate is absent, later ones are left alone (HOBBIT §3.3); not before a prompt, whose layers all have to be read."""
        for n, p in enumerate(predictions, 1):
            if not decode:
                if self._read_union(p) and stops:
                    return
                continue
            top = p.scores.argsort(axis=1)[:, : -self._n_candidates - 1 : -1]
            best, places = _merged(top)
            if self.meter is not None:
                self.meter.predicted(p.gate, _merged(top[:, : self._n_used])[0])
            n_paying = len(best)
            if self._usefulness is not None:
                self._usefulness.predicted(p.gate, best, places)
                n_paying = self._usefulness.n_paying(p.gate)
                if places is not None:
                    n_paying = int(np.searchsorted(places, n_paying))
            queued = self._read(p, top, best, n_paying, int(self._credit))
            self._credit -= queued
            if queued or (n < len(predictions) and self._lacks(p, top, best)):
                return  # something is absent, read or not: look no further ahead (HOBBIT §3.3)

    def _lacks(self, p: Prediction, top: np.ndarray, best: np.ndarray) -> bool:
        """Whether a candidate is not in memory in the version that would serve it, or a better one."""
        whole, absent = self._matrices[p.gate], best[self._buffer.residency()[p.gate, best] != self._matrices[p.gate]]
        if not self._as_weighed or not len(absent):
            return len(absent) > 0
        versions = self._would_serve(p, top)[absent]
        if (versions == native.HIGH).any():
            return True
        low = absent[versions == native.LOW]
        return len(low) > 0 and bool((self._buffer.residency(low=True)[p.gate, low] != whole).any())

    def _would_serve(self, p: Prediction, top: np.ndarray) -> np.ndarray:
        return self._versions(self.predictor.router.gated(p.scores) if p.logits else p.scores, top)

    def _read(self, p: Prediction, top: np.ndarray, best: np.ndarray, n_paying: int, limit: int) -> int:
        """Protects the candidates that are resident, and queues up to `limit` slices of the first `n_paying`; returns how many.

        Args:
            top: [n_tokens, n] candidates of each token.
            best: all of them.
        """
        gate, prefetch = p.gate, self._buffer.prefetch
        if not self._as_weighed:
            return prefetch(gate, best.tolist(), n_paying, limit=limit)
        versions = self._would_serve(p, top)[best]
        pays = np.arange(len(best)) < n_paying
        high = (versions == native.HIGH) & pays
        queued = prefetch(gate, [*best[high].tolist(), *best[~high].tolist()], int(high.sum()), limit=limit)  # others that are resident will serve
        if low := best[(versions == native.LOW) & pays].tolist():
            queued += prefetch(gate, low, low=True, limit=limit - queued)
        return queued

    def _versions(self, scores: np.ndarray, top: np.ndarray) -> np.ndarray:
        """Versions that would serve the candidates if their scores [n_tokens, n_experts] were gate weights (HOBBIT §3.3): as in the native
        rule, the best that any token wants. [n_experts] of native.HIGH, LOW, SKIP."""
        weights = np.take_along_axis(scores, top, axis=1)
        s = np.minimum(unimportance(weights, min(self._n_used, self._n_candidates)), 1)
        wanted = np.where(s <= self._precision.t1, native.HIGH, np.where(s <= self._precision.t2, native.LOW, native.SKIP))
        wanted[weights[:, -1] < 0] = native.HIGH  # no weights
        versions = np.full(scores.shape[1], native.SKIP)
        np.minimum.at(versions, top, wanted)
        return versions

    def _read_union(self, p: Prediction) -> int:
        """A batch: all experts that some token is likely to select, those of the most tokens first (Fate §4.3); returns how many slices were absent."""
        return self._read_ahead.read(p.gate, _by_popularity(p.scores, self._n_used))

    def reset_sequence(self, sequence: int = 0) -> None:
        """This sequence begins a new text."""
        self.predictor.reset_sequence(sequence)
        self._token_t = 0


def _by_popularity(scores: np.ndarray, n_used: int) -> list[int]:
    """Of scores [n_tokens, n_experts] the experts that some token is likely to select, those of the most tokens first."""
    n_experts = scores.shape[1]
    chosen = np.argpartition(scores, -n_used, axis=1)[:, -n_used:] if n_used < n_experts else np.arange(n_experts)
    count = np.bincount(chosen.ravel(), minlength=n_experts)
    order = np.argsort(-count, kind="stable")
    out: list[int] = order[count[order] > 0].tolist()
    return out


def _merged(top: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Of candidates [n_tokens, n], best first, each expert once, those in the first places before those in the second; and their places.
    None: one token's, in order."""
    if len(top) == 1:
        return top[0], None
    best = top.T.ravel()
    _, first = np.unique(best, return_index=True)
    first.sort()
    return best[first], first // len(top)
