"""Prefetching: what a predictor expects becomes reads, as many as fit between two gates, and protection from eviction.

Runs on the driver thread. Owns no memory and no policy; `boosts` is added to the policy's table by the driver. A prefetch
queues behind all demand, and the gate that does not choose it gives it up before or between its chunks (ProMoE's early
preemption), natively.
"""

from __future__ import annotations

import numpy as np

from . import hooks
from .buffer import ExpertBuffer, GateEvent
from .cache import Event
from .judge import Judge
from .precision import LOSSLESS, Precision
from .predict import Prediction, Predictor, top_k

BOOST = np.float32(1e6)  # of an expert that is predicted: above anything a policy writes
_RATE = 0.05  # of the running means
_LEAST_PRECISION = 0.4  # an expert is worth a read if so many of its rank were chosen
_EXPLORE = 16  # every so many reads of a rank that is not worth it one is made all the same, to notice when it is


class Prefetcher:
    """Args:
    buffer: started.
    predictor: its `observe` is called for every event.
    n_used: experts for each token.
    n_lanes: of the buffer.
    reads: False only protects.
    share: of all experts, how many candidates a gate has at least (Fate §4.2: 0.25); at least n_used.
    judged: prefetching that loses wall-clock is switched off by comparison.
    rule: reads in low precision what it would serve low if the gate chose as predicted, and nothing that it would skip.
    """

    def __init__(self, buffer: ExpertBuffer, predictor: Predictor, n_used: int, n_lanes: int, *, reads: bool = True,
                 share: float = 0.0, judged: bool = True, rule: Precision = LOSSLESS):  # fmt: skip
        self._buffer, self.predictor, self._rule = buffer, predictor, rule
        n_gates, n_experts = buffer.priorities.shape
        self._n_used, self._n_lanes, self._reads = n_used, n_lanes, reads
        self._n_candidates = min(max(n_used, round(share * n_experts)), n_experts)
        self._n_matrices = max(np.bincount([t.gate for t in buffer.tensors], minlength=1).max(), 1)
        self.judge = Judge() if judged and reads else None
        self.boosts: dict[int, np.ndarray] = {}  # gate -> experts
        self._issued: list[list[tuple[int, int]]] = [[] for _ in range(n_gates)]  # (expert, rank) read ahead for each gate
        self._precision = np.full(self._n_candidates, 0.75)  # of each rank
        self._skipped = np.zeros(self._n_candidates, int)
        self._last_t = self._token_t = self._token_misses = 0
        self._gap = 0.0  # ns from gate to gate
        self._misses = float(n_used)  # slices that a gate finds absent
        self._t_slice = 0.0  # ns, all lanes busy
        self._credit = 0.0  # slices
        self._seen = (0, 0)

    def observe(self, event: GateEvent | Event) -> bool:
        """After a gate has spoken; returns whether `boosts` has changed."""
        single = len(event.ids) == 1
        changed = self.boosts.pop(event.gate, None) is not None
        self._measure(event, single)
        if single and self._misses < 0.01 or not self._on:
            return changed  # everything is there: nothing to predict for
        predictions = self.predictor.observe(event)
        return self._act(predictions, single) or changed

    def begin(self, tokens: np.ndarray) -> bool:
        """Before a batch."""
        return self._act(self.predictor.begin(tokens), len(tokens) == 1) if self._on else False

    @property
    def _on(self) -> bool:
        return self.judge is None or self.judge.on

    def _measure(self, event, single: bool) -> None:
        gate, now = event.gate, event.t_ns
        issued, self._issued[gate] = self._issued[gate], []
        if not single:
            self._last_t = self._token_t = 0
            return
        if issued:
            chosen = event.ids[0].tolist()
            for expert, rank in issued:
                self._precision[rank] += _RATE * ((expert in chosen) - self._precision[rank])
        if self._last_t:
            self._gap += _RATE * (now - self._last_t - self._gap) if self._gap else now - self._last_t
        self._last_t = now
        self._misses += _RATE * (event.n_miss - self._misses)
        if gate == 0:
            if self._token_t and self.judge is not None:
                self.judge.token(now - self._token_t)
            self._token_t = now
            stats = self._buffer.stats()
            busy, reads = stats.lane_busy_ns - self._seen[0], stats.reads - self._seen[1]
            if reads > 0:
                self._seen = (stats.lane_busy_ns, stats.reads)
                t = busy / reads / self._n_lanes
                self._t_slice += 4 * _RATE * (t - self._t_slice) if self._t_slice else t

    def _act(self, predictions: list[Prediction], single: bool) -> bool:
        if not predictions:
            return False
        if not single:
            for p in predictions:
                self._read_union(p)
            return False
        self._allow()
        for p in predictions:
            scores = p.scores[0]
            best = top_k(p.scores, self._n_candidates)[0]
            best = best[np.argsort(-scores[best])]
            self.boosts[p.gate] = best[: self._n_used]
            if self._reads and self._credit >= 1 and not self._read(p.gate, best.tolist(), self._versions(scores[best])):
                break  # something was absent: look no further ahead (HOBBIT §3.3)
        return True

    def _allow(self) -> None:
        """n = T / t_expert (Fate §4.3) in slices: T is the part of the gap that demand leaves the lanes, and may add up."""
        if self._t_slice and self._gap:
            free = self._gap / self._t_slice - self._misses
            self._credit = min(max(self._credit, 0.0) + max(free, 0.0), float(self._n_used * self._n_matrices))

    def _versions(self, scores: np.ndarray) -> np.ndarray:
        """What the rule would say of these candidates, the likeliest first, if their scores were gate weights (HOBBIT §3.3)."""
        total = scores[: self._n_used].sum()
        if self._rule.lossless or total <= 0 or scores[-1] < 0:
            return np.full(len(scores), hooks.HIGH)
        s = np.minimum((np.cumsum(scores) - scores) / total, 1)
        s[0] = 0
        return np.where(s <= self._rule.t1, hooks.HIGH, np.where(s <= self._rule.t2, hooks.LOW, hooks.SKIP))

    def _read(self, gate: int, experts: list[int], versions: np.ndarray) -> bool:
        """Reads what is absent of the likeliest; returns whether everything was there."""
        complete = True
        for rank, (expert, version) in enumerate(zip(experts, versions, strict=True)):
            if version == hooks.SKIP:
                break
            if self._precision[rank] < _LEAST_PRECISION:
                self._skipped[rank] += 1
                if self._skipped[rank] % _EXPLORE:
                    continue
            n = self._buffer.prefetch(gate, (expert,), low=version == hooks.LOW)
            if n:
                complete = False
                self._issued[gate].append((expert, rank))
                self._credit -= n
                if self._credit < 1:
                    break
        return complete

    def _read_union(self, p: Prediction) -> None:
        """A batch: everything some token is likely to choose, the most wanted first (Fate §4.3)."""
        if not self._reads:
            return
        chosen = top_k(p.scores, self._n_used)
        count = np.bincount(chosen.ravel(), minlength=p.scores.shape[1])
        order = np.argsort(-count, kind="stable")
        order = order[count[order] > 0].tolist()
        n_high = len(order) - int(self._rule.prefill_low_share * len(order))
        self._buffer.prefetch(p.gate, order[:n_high])
        if n_high < len(order):
            self._buffer.prefetch(p.gate, order[n_high:], low=True)

    def reset_sequence(self) -> None:
        self.predictor.reset_sequence()
        self.boosts.clear()
        self._last_t = self._token_t = 0
