"""The rule by which a resident expert takes the place of a chosen one that is not (docs/guides/precision.md), as the native buffer has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..gate_event import GateEvent


@dataclass(frozen=True)
class Rerouting:
    """The rule, and how it reads a trace.

    Attributes:
        share: what being resident adds to a score, as a share of the range of the token's scores (λ).
        margin: how far below the last of the router's choice an expert may lie, as the same share.
        n_candidates: experts with the highest scores among which it chooses; 0: twice as many as serve a token.
        n_kept: of the router's choice, those of the highest scores that stay.
        by_logits: the router chooses by its logits: those of a trace's probabilities are their logarithms, up to a constant that does
            not matter.
    """

    share: float
    margin: float = 1.0
    n_candidates: int = 0
    n_kept: int = 1
    by_logits: bool = False

    def choose(self, scores: np.ndarray, ids: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """[n_used] experts of one token.

        Args:
            scores: [n_experts] float32; what is not finite cannot be chosen.
            ids: [n_used], the router's choice, best first.
            resident: [n_experts] bool.
        """
        out = np.array(ids)
        absent = [k for k in range(self.n_kept, len(ids)) if not resident[ids[k]]]
        possible = np.isfinite(scores)
        if self.share <= 0 or not absent or not possible.any():
            return out
        width = scores[possible].max() - scores[possible].min()
        lowest = scores[ids].min()
        possible[ids] = False
        others = np.flatnonzero(possible)
        others = others[np.argsort(-scores[others], kind="stable")][: max((self.n_candidates or 2 * len(ids)) - len(ids), 0)]
        absent.sort(key=lambda k: (scores[ids[k]], -k))
        bonus, floor = np.float32(self.share) * width, lowest - np.float32(self.margin) * width
        for e in others:
            if not absent or scores[e] < floor or not scores[e] + bonus > scores[out[absent[0]]]:
                break
            if resident[e]:
                out[absent.pop(0)] = e
        return out

    def apply(self, event: GateEvent, resident: np.ndarray) -> GateEvent:
        """A recorded event as this rule would have had it, with these experts in memory; weights keep their sum.

        A prompt's, or one whose trace has no probabilities, stays what the router chose.
        """
        chosen = event.ids if event.router_ids is None else event.router_ids
        if not event.decode or event.probs is None or event.row_step != 1:
            return event if chosen is event.ids else replace(event, ids=chosen, router_ids=None)
        with np.errstate(divide="ignore"):
            scores = np.log(event.probs) if self.by_logits else event.probs
        ids = np.stack([self.choose(row, choice, resident) for row, choice in zip(scores, chosen, strict=True)])
        if np.array_equal(ids, event.ids):
            return event
        weights = np.take_along_axis(event.probs, ids, axis=1)
        weights = weights * (event.weights.sum(axis=1, keepdims=True) / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny))
        return replace(event, ids=ids.astype(np.int32), weights=weights.astype(np.float32), router_ids=None if np.array_equal(ids, chosen) else chosen)
