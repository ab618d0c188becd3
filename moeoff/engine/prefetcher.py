"""Prefetching: protect predicted experts from eviction, and read them between gates.

It runs on the driver thread. Prefetches queue after all demand reads, and the native
buffer cancels those of experts that the router does not select (ProMoE §5, early
preemption). For decoded tokens `GatePredictor` predicts natively; the read limits are
set here, once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..llamacpp import native
from ..policies import Prediction, Predictor
from ..policies.base import n_low
from ..policies.hobbit import predicted_versions
from ..precision import LOSSLESS, Precision
from ..routing.event import GateEvent, Observer
from .buffer import ExpertBuffer
from .comparison import ABTest
from .gate_predictor import GatePredictor

# share of a gate's experts; smaller batches leave the next gate to the predictor
_MOST_EXPERTS_SHARE = 0.75
_KEEP = 0.5  # decay of counts per batch


class PromptPrefetcher:
    """A prefetcher of the next gate's experts in a prompt.

    Hundreds of tokens select nearly every expert, so all are queued, the most popular
    of earlier batches first. The gate cancels the rest.

    Args:
        buffer: Started buffer.
        precision: Precision whose share of the least popular experts is read in low
            precision (Fate §4.5).
    """

    def __init__(self, buffer: ExpertBuffer, precision: Precision):
        self._buffer, self.precision = buffer, precision
        self._n_experts = [0] * buffer.priorities.shape[0]
        self._n_slices = [0] * len(self._n_experts)
        for tensor in buffer.tensors:
            self._n_experts[tensor.gate] = max(self._n_experts[tensor.gate], tensor.ne[2])
            self._n_slices[tensor.gate] += tensor.ne[2]
        self._uses = [np.zeros(n, np.float32) for n in self._n_experts]
        self._slices_per_byte = sum(self._n_slices) / buffer.arena_full

    def observe(
        self, event: GateEvent, first: Sequence[int] = (), versions: np.ndarray | None = None
    ) -> bool:
        """Queue the next gate. Return False if this gate selected too few experts.

        Args:
            first: Experts the predictor expects at the next gate, most popular first
                (Fate §4.3). Remaining experts follow.
            versions: As in `read`.
        """
        uses, n = self._uses[event.gate], self._n_experts[event.gate]
        count = np.bincount(event.ids.ravel(), minlength=n)
        uses *= _KEEP
        uses += count
        if np.count_nonzero(count) < _MOST_EXPERTS_SHARE * n:
            return False
        if event.gate + 1 < len(self._uses):
            self._read(event.gate + 1, self._n_slices[event.gate], first, versions)
        return True

    def begin(self, n_tokens: int, n_used: int) -> bool:
        """Queue the first gate before a batch. Return False if it is too small."""
        if 1 - (1 - n_used / self._n_experts[0]) ** n_tokens < _MOST_EXPERTS_SHARE:
            return False
        self._read(0, 0)
        return True

    def _read(
        self,
        gate: int,
        n_computing: int,
        first: Sequence[int] = (),
        versions: np.ndarray | None = None,
    ) -> None:
        """Queue the experts that fit beside the current gate's slices."""
        room = int(self._buffer.stats().cache_bytes * self._slices_per_byte) - n_computing
        self.read(
            gate,
            list(dict.fromkeys([*first, *np.argsort(-self._uses[gate], kind="stable").tolist()])),
            max(room, 0),
            versions,
        )

    def read(
        self, gate: int, order: list[int], limit: int = -1, versions: np.ndarray | None = None
    ) -> int:
        """Queue at most `limit` slices, most popular experts first; -1: no limit.

        Args:
            versions: [n_experts] predicted versions (HOBBIT §3.3); None: high, and low
                for the last experts.

        Returns:
            Number of slices queued.
        """
        if versions is None:
            n_high = len(order) - n_low(len(order), self.precision.prefill_low_fraction)
            high, low = order[:n_high], order[n_high:]
        else:
            high, low = (
                [e for e in order if versions[e] == version]
                for version in (native.HIGH, native.LOW)
            )
        queued = self._buffer.prefetch(gate, high, limit=limit)
        if low:
            queued += self._buffer.prefetch(
                gate, low, low=True, limit=limit if limit < 0 else limit - queued
            )
        return queued


class PredictionMeter:
    """A meter of GoodPred = accuracy x fetch rate (ProMoE §4.1) for decoded tokens.

    Reads that end after their router has selected are late, and so are device experts
    without a slot.

    Args:
        tensors: Tensors of the buffer.
        n_gates: Rows of the priority table.
    """

    def __init__(self, tensors: Sequence[Any], n_gates: int):
        self._gate_of = [int(t.gate) for t in tensors]
        self._n_matrices = np.bincount(self._gate_of, minlength=n_gates).tolist()
        self._predicted: list[frozenset[int] | None] = [None] * n_gates
        # time and predicted experts of the last two tokens, newest first
        self._selected: list[list[tuple[int, frozenset[int]]]] = [[] for _ in range(n_gates)]
        self.reset()

    def reset(self) -> None:
        """Reset the counters; pending predictions stay."""
        self._n_selected = self._n_right = 0  # experts
        self._right_slices = self._late_slices = 0

    def predicted(self, gate: int, best: np.ndarray) -> None:
        """Record the experts [n] predicted for this gate, as many as it selects."""
        self._predicted[gate] = frozenset(best.tolist())

    def selected(self, event: GateEvent) -> None:
        """Record a router's selection."""
        gate, ids = event.gate, frozenset(event.ids.ravel().tolist())
        right = ids & (self._predicted[gate] or frozenset())
        uploaded = (
            frozenset(() if event.uploaded is None else event.ids[event.uploaded].tolist()) & right
        )
        self._predicted[gate] = None
        # an upload waits for its expert's reads: they count once
        self._selected[gate] = [(event.t_ns, right - uploaded), *self._selected[gate][:1]]
        self._n_selected += len(ids)
        self._n_right += len(right)
        self._right_slices += len(right) * self._n_matrices[gate]
        self._late_slices += len(uploaded) * self._n_matrices[gate]

    def read(self, reads: np.ndarray) -> None:
        """Record finished reads of `READ_DTYPE`, at most a token late."""
        if not len(reads):
            return
        for tensor, expert, t_done, result in zip(
            *(reads[name].tolist() for name in ("tensor", "expert", "t_done", "result"))
        ):
            right = next(
                (right for t_ns, right in self._selected[self._gate_of[tensor]] if t_ns < t_done),
                (),
            )
            if result == 0 and expert in right:
                self._late_slices += 1

    @property
    def accuracy(self) -> float | None:
        """Share of the selected experts that were predicted; 0 without predictions."""
        return self._n_right / self._n_selected if self._n_selected else None

    @property
    def fetch_rate(self) -> float | None:
        """Share of the slices, predicted and selected, in place at their selection."""
        return max(1 - self._late_slices / self._right_slices, 0.0) if self._right_slices else None

    @property
    def good_pred(self) -> float | None:
        """Share of the selected experts that were predicted and in place in time."""
        return (
            self.accuracy * self.fetch_rate
            if self.accuracy is not None and self.fetch_rate is not None
            else None
        )


# least useful share: even at the last rank read, at most half the reads are useless
MIN_USEFUL_SHARE = 0.5
_USEFULNESS_RATE = 0.03  # weight of a token in running sums
# weight, in observations, of the priors "half is useful" and, for a gate, "as in all
# gates"
_PRIOR = 4.0
_NO_EXPERTS = np.zeros(0, np.int32)


class PrefetchPrecision:
    """Precision of predictions of absent experts, by gate and rank.

    Predictions are mostly right, but less so for experts that a good cache lacks.

    Args:
        n_gates, n_experts: Shape of the priority table.
        n_places: Candidates per prediction.

    Attributes:
        max_rank: [n_gates] last rank at which absent experts are read.
    """

    def __init__(self, n_gates: int, n_experts: int, n_places: int):
        self._resident = np.ones((n_gates, n_experts), bool)
        self._ids: list[np.ndarray] = [_NO_EXPERTS] * n_gates  # of this token
        self._best: list[np.ndarray] = [_NO_EXPERTS] * n_gates
        self._places: list[np.ndarray] = [_NO_EXPERTS] * n_gates
        self._all_places = np.arange(n_places)
        self._gates = np.arange(n_gates)
        self._absent, self._useful = np.zeros(n_places), np.zeros(n_places)
        self._expected_of, self._useful_of = np.zeros(n_gates), np.zeros(n_gates)
        self.max_rank = [n_places] * n_gates

    def predicted(self, gate: int, best: np.ndarray, places: np.ndarray | None = None) -> None:
        """Record a gate's distinct candidates [n] and their ranks; None: in order."""
        self._best[gate] = best
        self._places[gate] = self._all_places if places is None else places

    def selected(self, gate: int, ids: np.ndarray) -> None:
        """Record a gate's selection [n] for a token, or for one of each sequence."""
        self._ids[gate] = ids  # nothing else, as this runs for every gate

    def next_token(self, resident: np.ndarray, selected: np.ndarray | None = None) -> None:
        """Count the predictions of the last token, at its successor's first gate.

        Args:
            resident: [n_gates, n_experts] bool, residency by which the next predictions
                count.
            selected: [n_gates, n_experts] bool selections; None: those of `selected`.
        """
        n_places, n_gates = len(self._absent), len(self._gates)
        if selected is None:
            selected = np.zeros_like(self._resident)
            selected[self._gate_of(self._ids), np.concatenate(self._ids)] = True
        gates, best, places = (
            self._gate_of(self._best),
            np.concatenate(self._best),
            np.concatenate(self._places),
        )
        absent = ~self._resident[gates, best]
        gates, best, places = gates[absent], best[absent], places[absent]
        useful = selected[gates, best]
        for sums, new in (
            (self._absent, np.bincount(places, minlength=n_places)),
            (self._useful, np.bincount(places[useful], minlength=n_places)),
            (self._useful_of, np.bincount(gates[useful], minlength=n_gates)),
        ):
            sums *= 1 - _USEFULNESS_RATE
            sums += new
        share = (self._useful + _PRIOR / 2) / (self._absent + _PRIOR)
        self._expected_of *= 1 - _USEFULNESS_RATE
        self._expected_of += np.bincount(gates, share[places], n_gates)
        in_gate = (self._useful_of + _PRIOR) / (self._expected_of + _PRIOR)
        pays = in_gate[:, None] * share >= MIN_USEFUL_SHARE
        self.max_rank = np.logical_and.accumulate(pays, axis=1).sum(axis=1).tolist()
        self._ids, self._best, self._places = ([_NO_EXPERTS] * n_gates for _ in range(3))
        self._resident[:] = resident

    def _gate_of(self, of_each: list[np.ndarray]) -> np.ndarray:
        return np.repeat(self._gates, [len(part) for part in of_each])


_SAME = 1e-3  # largest relative difference of sums by rounding
_SUM_RATE = 0.1  # weight of an event in running means


class WeightEstimate:
    """Estimated gate weights of predicted experts, learned from selected ones.

    If a gate's weights have a constant sum, scores are normalized over the selected
    experts. Otherwise one factor for all tokens corrects the mean sum.

    Args:
        n_gates: Rows of the priority table.
        n_used: Experts per token.
    """

    def __init__(self, n_gates: int, n_used: int):
        self._n_used = n_used
        # running means per token; 0: no data
        self._sums, self._predicted = np.zeros(n_gates), np.zeros(n_gates)
        self._varies = [False] * n_gates

    def selected(self, gate: int, weights: np.ndarray) -> None:
        """Record a gate's weights [n_tokens, n_used]."""
        sums, before = weights.sum(axis=1), self._sums[gate]
        mean = float(sums.mean())
        before = before or mean
        self._varies[gate] |= bool((np.abs(sums - before) > _SAME * before).any())
        self._sums[gate] = before + _SUM_RATE * (mean - before)

    def of(self, gate: int, scores: np.ndarray) -> np.ndarray:
        """Return weights for scores [n_tokens, n], best first; 0 without data."""
        sums: np.ndarray = scores[:, : self._n_used].sum(axis=1, keepdims=True)
        mean, before = float(sums.mean()), self._predicted[gate]
        self._predicted[gate] = before + _SUM_RATE * (mean - before) if before else mean
        weights: np.ndarray = scores * (
            self._sums[gate]
            / np.maximum(self._predicted[gate] if self._varies[gate] else sums, 1e-30)
        )
        return weights


_RATE = 0.4  # weight of a token in running means
# most tokens of a batch to predict for: rarer experts are left to demand
SAMPLE = 64
# share of the time the disk reads, below which prediction has no measurable effect
_LEAST_BUSY = 0.01
# tokens without prediction or Python calls; more would delay the return to prefetching
_MOST_QUIET = 16


class Prefetcher(Observer):
    """A prefetcher that protects and reads predicted experts within the disk's idle
    time.

    Args:
        buffer: Started buffer.
        predictor: Predictor whose `observe` takes events.
        n_used: Experts per token.
        fallback: Predictor for events without the gate inputs that the first one needs.
        share: Least candidates per gate as a share of all experts (Fate §4.2: 0.25); at
            least n_used.
        bounded: As in `Strategy`, for decoding.
        ab_tested: True to disable prefetching in decoding where it does not pay (an
            `ABTest` per batch size), and to skip rarely useful reads
            (`PrefetchPrecision`).
        precision: Precision in use, by which predicted experts are read in low
            precision or skipped. `use` changes it.
        fills_devices: True if prefetches upload to device slots, which pays without
            reads.
    """

    def __init__(
        self,
        buffer: ExpertBuffer,
        predictor: Predictor,
        n_used: int,
        fallback: Predictor | None = None,
        *,
        share: float = 0.0,
        bounded: bool = True,
        ab_tested: bool = True,
        precision: Precision = LOSSLESS,
        fills_devices: bool = False,
    ):
        self._buffer, self.predictor, self._fallback = buffer, predictor, fallback
        self._fills_devices, self._bounded = fills_devices, bounded
        self._n_gates, n_experts = buffer.priorities.shape
        self._n_used = n_used
        self._n_candidates = min(max(n_used, round(share * n_experts)), n_experts)
        self._n_experts = n_experts
        self._native: GatePredictor | None = None
        self._is_alone = self._is_quiet = False
        self._n_together = 1
        self._n_matrices = int(max(np.bincount([t.gate for t in buffer.tensors])))
        self._most = float(n_used * self._n_matrices)  # most slices of a gate
        self.ab_test = ABTest() if ab_tested else None
        # by tokens decoded together, because their times are not comparable
        self._ab_tests = {} if self.ab_test is None else {1: self.ab_test}
        self._prefetch_precision = (
            PrefetchPrecision(self._n_gates, n_experts, self._n_candidates) if ab_tested else None
        )
        # the papers' presets are measured as published; A/B tests measure a gain
        # themselves
        self.meter = None if ab_tested else PredictionMeter(buffer.tensors, self._n_gates)
        self._prompt_prefetcher = PromptPrefetcher(buffer, precision)
        self._weights = WeightEstimate(self._n_gates, min(n_used, self._n_candidates))
        self._set_precision(precision)
        # predicted experts of a prompt's batch and their versions, by gate
        self._popular: dict[int, tuple[list[int], np.ndarray | None]] = {}
        self._whole = whole_experts(buffer)
        self._token_t, self._n_rows = 0, 1
        self._token_ns = 0.0
        self._missed = 0  # absent slices of this token
        self._misses = self._most / 2  # mean per gate
        self._busy: float | None = None  # disk time per token in ns
        self._credit = self._earned = 0.0  # in slices: saved, and added per gate
        self._gap_slices = 0.0  # slices read between two gates
        self._seen = (0, 0)  # disk_busy_ns, reads

    def use(self, precision: Precision) -> None:
        """Change the precision between batches, and restart the A/B tests."""
        if precision == self.precision:
            return
        self._buffer.drain()  # of previous batches
        self._set_precision(precision)
        if self.ab_test is not None:
            self.ab_test = ABTest()
            self._ab_tests = {self._n_rows: self.ab_test}
            self._token_t = 0
        self._tell_native()

    def _set_precision(self, precision: Precision) -> None:
        self.precision = self._prompt_prefetcher.precision = precision
        # otherwise predicted experts are read in high precision
        self._as_weighed = not precision.lossless and not precision.mispredicted_low

    def go_native(self, n_together: int) -> GatePredictor | None:
        """Return the predictor for the native driver thread, None if impossible.

        Args:
            n_together: Events of a token that other observers may take together.
        """
        if (
            self._prefetch_precision is not None
            and self._bounded
            and (routers := self.predictor.native()) is not None
        ):
            self._native = GatePredictor(routers, self._n_experts, self._n_candidates, SAMPLE)
            self._n_together = n_together
            self._tell_native()
        return self._native

    def _tell_native(self) -> None:
        if self._native is None:
            return
        # weighing versions needs the scores, which are computed in Python
        settings, weighed = self._native.settings, self._as_weighed
        settings.is_on, settings.n_together = (
            self._predicts and not weighed,
            1 if weighed else self._n_together,
        )
        settings.earned, settings.most = self._earned, self._most
        self._is_quiet = self._is_alone and self._fallback is None and not weighed
        settings.n_quiet = self._n_quiet if self._is_quiet else 0

    @property
    def is_alone(self) -> bool:
        """True if no other observer needs every decode event. Set it between events."""
        return self._is_alone

    @is_alone.setter
    def is_alone(self, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._tell_native()

    @property
    def _n_quiet(self) -> int:
        """Tokens until the next decision."""
        if self._predicts:
            return 1
        if self.ab_test is None or self.ab_test.on:  # the disk is idle
            return _MOST_QUIET
        return min(max(self.ab_test.left, 1), _MOST_QUIET)

    @property
    def on(self) -> bool:
        return self.ab_test is None or self.ab_test.on

    @property
    def gain(self) -> float | None:
        """Last measured speed-up by prefetching minus 1."""
        return self.ab_test.gain if self.ab_test is not None else None

    @property
    def _predicts(self) -> bool:
        """True if this token's gates are predicted."""
        return self.on and (
            self.precision.mispredicted_low
            or self._fills_devices
            or self._busy is None
            or self._busy >= _LEAST_BUSY * self._token_ns
        )

    def observe(self, event: GateEvent) -> None:
        """Predict and prefetch after a router's selection."""
        if event.gate_input is None and self._fallback is not None:
            self.predictor, self._fallback = self._fallback, None
            if self._native is not None:
                self._native.stop()
                self._native = None
        elif event.gate == self._n_gates - 1:
            self._fallback = None  # gates have inputs; only quiet events lack them
        tau = self.precision.tau
        if tau:
            self._weights.selected(event.gate, event.weights[:SAMPLE])
        if not event.decode:
            self._token_t = 0
            # the papers' presets predict the batch's popularity; otherwise use earlier
            # batches'
            predictions = (
                self.predictor.observe(event.sample(SAMPLE)) if self.meter is not None else None
            )
            for p in predictions or []:
                self._popular[p.gate] = _by_popularity(p.scores, self._n_used), self._of_prompt(p)
            if not self._prompt_prefetcher.observe(
                event, *self._popular.pop(event.gate + 1, ([], None))
            ):
                self._act(
                    self.predictor.observe(event.sample(SAMPLE))
                    if predictions is None
                    else predictions,
                    False,
                )
            return
        prefetch_precision = self._prefetch_precision if self._predicts else None
        if prefetch_precision is not None and not self._is_quiet:
            # reads of skipped experts are useless
            prefetch_precision.selected(
                event.gate, event.ids[event.weights >= tau] if tau else event.ids.ravel()
            )
        if self.meter is not None:
            self.meter.selected(event)
        if event.gate == 0:
            self._next_token(event)
        if self._native is not None and not self._as_weighed:
            return
        self._missed += event.n_miss
        self._credit = min(self._credit + self._earned, self._most)
        if self._predicts:
            self._act(self.predictor.observe(event.sample(SAMPLE)), True)

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        if decode and not self.predictor.wants_tokens:
            return
        self._buffer.drain()
        if not decode and self._prompt_prefetcher.begin(len(tokens), self._n_used):
            return
        if self._predicts or not decode:
            self._act(self.predictor.begin(tokens), decode, stops=decode)

    def _next_token(self, event: GateEvent) -> None:
        """Measure the last token and the disk's idle time, at a token's first gate."""
        now, n_rows, n_tokens = event.t_ns, len(event.ids), 1
        if self._native is not None:
            n_tokens, missed = self._native.take_counts()
            self._missed = self._missed if self._as_weighed else missed
        stats = self._buffer.stats()
        busy, reads = stats.disk_busy_ns - self._seen[0], stats.reads - self._seen[1]
        self._seen = (stats.disk_busy_ns, stats.reads)
        if self._prefetch_precision is not None and self._predicts:
            for prediction in () if self._native is None else self._native.predictions():
                self._prefetch_precision.predicted(*prediction)
            selected = (
                self._native.selected if self._native is not None and self._is_quiet else None
            )
            self._prefetch_precision.next_token(self._buffer.residency() == self._whole, selected)
            if self._native is not None:
                self._native.max_rank[:] = self._prefetch_precision.max_rank
        if self._token_t and n_rows == self._n_rows:
            ns, rate = (now - self._token_t) // n_tokens, 1 - (1 - _RATE) ** n_tokens
            if self.ab_test is not None:
                for _ in range(n_tokens):
                    self.ab_test.token(ns)
            self._token_ns += rate * (ns - self._token_ns) if self._token_ns else ns
            self._misses += rate * (self._missed / n_tokens / self._n_gates - self._misses)
            busy_ns = busy / n_tokens
            self._busy = (
                busy_ns if self._busy is None else self._busy + rate * (busy_ns - self._busy)
            )
            # n = T / t_expert (Fate §4.3) in slices: T is the idle time of the disk in
            # the gap, accumulated
            if reads > 0:
                t_slice = busy / reads
                self._gap_slices = self._token_ns / self._n_gates / t_slice if t_slice else 0.0
                self._earned = max(self._gap_slices - self._misses, 0.0)
        if n_rows != self._n_rows:
            self._most = float(min(n_rows * self._n_used, self._n_experts) * self._n_matrices)
            if self.ab_test is not None:
                self.ab_test = self._ab_tests.setdefault(n_rows, ABTest())
        self._token_t, self._n_rows, self._missed = now, n_rows, 0
        self._tell_native()

    def _act(self, predictions: list[Prediction], decode: bool, stops: bool = True) -> None:
        """Apply a prediction. Return after the first gate with absent experts if
        `stops` (HOBBIT §3.3); prompts read all layers.
        """
        for n, p in enumerate(predictions, 1):
            if not decode:
                # all experts that some token is likely to select, most popular first
                # (Fate §4.3)
                if (
                    self._prompt_prefetcher.read(
                        p.gate, _by_popularity(p.scores, self._n_used), versions=self._of_prompt(p)
                    )
                    and stops
                ):
                    return
                continue
            top = p.scores.argsort(axis=1)[:, : -self._n_candidates - 1 : -1]
            best, places = _merged(top)
            if self.meter is not None:
                self.meter.predicted(p.gate, _merged(top[:, : self._n_used])[0])
            max_rank = len(best)
            versions = self._would_serve(p, top) if self._as_weighed else None
            if self._prefetch_precision is not None:
                max_rank = self._prefetch_precision.max_rank[p.gate]
                if places is not None:
                    max_rank = int(np.searchsorted(places, max_rank))
                if versions is None or not self.precision.tau:
                    self._prefetch_precision.predicted(p.gate, best, places)
                else:
                    high = versions[best] == native.HIGH
                    self._prefetch_precision.predicted(
                        p.gate,
                        best[high],
                        (np.arange(len(best)) if places is None else places)[high],
                    )
            # no limit until the router has selected (EdgeMoE §3.3.2): later reads would
            # evict others for nothing
            limit = self._credit if self._bounded else max(np.ceil(self._gap_slices), self._most)
            queued = self._read(p.gate, versions, best, max_rank, int(limit))
            self._credit -= queued
            if queued or (n < len(predictions) and self._lacks(p.gate, versions, best)):
                return  # absent experts, read or not, end the lookahead (HOBBIT §3.3)

    def _lacks(self, gate: int, versions: np.ndarray | None, best: np.ndarray) -> bool:
        """Return True if a candidate is not in place in its version or better."""
        if versions is None:
            return self._buffer.lacks(gate, best)
        high, low = (best[versions[best] == version] for version in (native.HIGH, native.LOW))
        return self._buffer.lacks(gate, high) or (
            len(low) > 0 and self._buffer.lacks(gate, low, low=True)
        )

    def _would_serve(self, p: Prediction, top: np.ndarray) -> np.ndarray:
        """Return the candidates' [n_experts] versions, taking scores for gate weights.

        Candidates are [n_tokens, n], best first.
        """
        scores = self.predictor.router.gated(p.scores) if p.logits else p.scores
        if not self.precision.tau:
            return predicted_versions(
                scores, top, min(self._n_used, self._n_candidates), self.precision
            )
        weights = np.take_along_axis(scores, top, axis=1)
        # scores are not weights
        served = (self._weights.of(p.gate, weights) >= self.precision.tau) | (weights[:, -1:] < 0)
        out = np.full(scores.shape[1], native.SKIP)
        out[top[served]] = native.HIGH
        return out

    def _read(
        self, gate: int, versions: np.ndarray | None, best: np.ndarray, max_rank: int, limit: int
    ) -> int:
        """Protect resident candidates, and queue up to `limit` slices of the first
        `max_rank`.

        Args:
            versions: [n_experts] predicted versions; None: all high.
            best: Candidates.

        Returns:
            Number of slices queued.
        """
        prefetch = self._buffer.prefetch
        if versions is None:
            order = best.tolist()
            # read one matrix of each expert before the second ones, for as many as a
            # token needs
            each = max_rank if self._bounded else min(self._n_used, max_rank)
            queued = prefetch(gate, order, each, limit=limit)
            while (max_rank := max_rank - each) > 0 and (queued < limit or self._fills_devices):
                order = [*order[each:], *order[:each]]
                # experts that are no longer read may be uploaded
                each = min(each, max_rank) if queued < limit else max_rank
                queued += prefetch(gate, order, each, limit=limit - queued)
            return queued
        versions = versions[best]
        pays = np.arange(len(best)) < max_rank
        high = (versions == native.HIGH) & pays
        # other resident experts will serve
        queued = prefetch(
            gate, [*best[high].tolist(), *best[~high].tolist()], int(high.sum()), limit=limit
        )
        if low := best[(versions == native.LOW) & pays].tolist():
            queued += prefetch(gate, low, low=True, limit=limit - queued)
        return queued

    def _of_prompt(self, p: Prediction) -> np.ndarray | None:
        """Return the predicted versions of a prompt's batch, None if not weighed."""
        if not self.precision.weigh_prompts:
            return None
        return self._would_serve(p, p.scores.argsort(axis=1)[:, : -self._n_candidates - 1 : -1])

    def new_sequence(self) -> None:
        self.predictor.reset_sequence()
        self._token_t = 0


def whole_experts(buffer: ExpertBuffer) -> np.ndarray:
    """Return complete experts' `ExpertBuffer.residency` bits, [n_gates, 1] uint8."""
    out = np.zeros((buffer.priorities.shape[0], 1), np.uint8)
    for t in buffer.tensors:
        out[t.gate] |= 1 << t.matrix
    return out


def _by_popularity(scores: np.ndarray, n_used: int) -> list[int]:
    """Return the experts likely to be selected by any token, most popular first.

    Scores are [n_tokens, n_experts].
    """
    n_experts = scores.shape[1]
    chosen = (
        np.argpartition(scores, -n_used, axis=1)[:, -n_used:]
        if n_used < n_experts
        else np.arange(n_experts)
    )
    count = np.bincount(chosen.ravel(), minlength=n_experts)
    order = np.argsort(-count, kind="stable")
    out: list[int] = order[count[order] > 0].tolist()
    return out


def _merged(top: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return distinct candidates of [n_tokens, n], by best rank, and their ranks.

    Ranks are None for a single token, which is in order.
    """
    if len(top) == 1:
        return top[0], None
    best = top.T.ravel()
    _, first = np.unique(best, return_index=True)
    first.sort()
    return best[first], first // len(top)
