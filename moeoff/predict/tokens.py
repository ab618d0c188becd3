"""Predictions from the tokens of a batch, before it computes, and from the token before."""

from __future__ import annotations

import numpy as np

from ..gate_event import GateEvent
from .base import DEFAULT_FIT, FitOptions, Prediction, Predictor, Progress
from .recording import Recording

PRIOR = 2.0  # occurrences of a token that popularity weighs as much as
LIMIT = 64 << 20  # bytes of the table; the most frequent tokens are kept
FIRST_LIMIT = 8 << 20  # of the first layer's alone


class TokenTable(Predictor):
    """ProMoE §4.2's token-based baseline: for all layers at once, what each token chose in other text.

    Exact where the token alone decides (`Router.tables`). Without a profile it knows only those gates.
    """

    name, summary, wants_tokens = "token-table", "what this token chose in other text, for all layers at once", True
    profile_section = "tokens"

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        tokens = np.asarray(tokens)
        out, e = [], self.router.n_experts
        if self.arrays is not None:
            known = self.arrays["tokens"]
            at = np.searchsorted(known, tokens).clip(max=len(known) - 1)
            rows = self.arrays["shares"][at].astype(np.float32)
            rows[known[at] != tokens] = self.arrays["popularity"]
        for gate, table in enumerate(self.router.tables):
            if table is not None:
                scores = np.zeros((len(tokens), e), np.float32)
                np.put_along_axis(scores, table[tokens], 1, axis=1)
                out.append(Prediction(gate, scores))
            elif self.arrays is not None:
                out.append(Prediction(gate, rows[:, gate]))
        return out

    @classmethod
    def fit(cls, recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray]:
        """From a `Recording`.

        Returns:
            tokens [n] int32 ascending; shares [n, n_gates, E] float16; popularity [n_gates, E] for other tokens.
        """
        tokens, shares, popularity = _shares(recording.tokens, recording.used(), LIMIT, progress)
        return {"tokens": tokens, "shares": shares, "popularity": popularity}


def fit_first(recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray]:
    """The section "first" of a profile: what tokens choose in the first layer, which no layer comes before.

    Returns:
        first_tokens [n] int32 ascending; first_shares [n, E] float16. The most frequent tokens, as many as `FIRST_LIMIT` allows.
    """
    tokens, shares, _ = _shares(recording.tokens, recording.used()[:, :1], FIRST_LIMIT, progress)
    return {"first_tokens": tokens, "first_shares": shares[:, 0]}


def _shares(tokens: np.ndarray, used: np.ndarray, limit: int, progress: Progress | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each token chooses, of the most frequent ones, as many as fit into so many bytes: tokens [n] int32 ascending, shares [n, n_gates, E]
    float16; and popularity [n_gates, E].

    Args:
        tokens: [n_tokens] as they came.
        used: [n_tokens, n_gates, E] bool.
    """
    popularity = used.mean(axis=0, dtype=np.float32)
    order = np.argsort(tokens, kind="stable")
    distinct, first, seen = np.unique(tokens[order], return_index=True, return_counts=True)
    kept = np.sort(np.argsort(-seen, kind="stable")[: max(limit // (2 * popularity.size), 1)])
    shares = np.empty((len(kept), *popularity.shape), np.float16)
    for row, i in enumerate(kept):
        count = used[order[first[i] : first[i] + seen[i]]].sum(axis=0)
        shares[row] = (count + PRIOR * popularity) / (seen[i] + PRIOR)
        if progress:
            progress(row + 1, len(kept))
    return distinct[kept].astype(np.int32), shares, popularity


class PreviousToken(Predictor):
    """The choice of the same layer for the token before in its sequence; older tokens rank what it did not choose.

    Options:
        decay: weight of a choice one token older, below one half.
    """

    name, summary = "previous-token", "what the same layer chose for the token before"
    defaults = {"decay": 0.5}

    def start(self) -> None:
        self._scores: dict[int, np.ndarray] = {}  # of each sequence [n_gates, n_experts]

    def reset_sequence(self, sequence: int = 0) -> None:
        self._scores.pop(sequence, None)

    def observe(self, event: GateEvent) -> list[Prediction]:
        target = (event.gate + 1) % self.router.n_gates
        if event.sequences is None:
            scores = self._take(0, event.gate, event.ids)
            return [Prediction(target, np.broadcast_to(scores[target], (len(event.ids) if target else 1, scores.shape[1])))]
        rows = event.sequences.tolist()
        found = {sequence: self._take(sequence, event.gate, event.ids[event.sequences == sequence]) for sequence in dict.fromkeys(rows)}
        return [Prediction(target, np.stack([found[sequence][target] for sequence in (rows if target else found)]))]

    def _take(self, sequence: int, gate: int, ids: np.ndarray) -> np.ndarray:
        """The sequence's scores after these tokens."""
        if sequence not in self._scores:
            self._scores[sequence] = np.zeros((self.router.n_gates, self.router.n_experts), np.float32)
        scores, decay = self._scores[sequence], self.options["decay"]
        for chosen in ids[-8:]:
            scores[gate] *= decay
            scores[gate][chosen] += 1 - decay
        return scores
