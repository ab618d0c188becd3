"""Baselines of the papers' comparison, which the package does not have: policies,
predictors and presets of no use but to be compared with.

Importing this module registers them.
"""

from __future__ import annotations

import numpy as np

from moeoff.policies import FitOptions, Policy, Prediction, Predictor, Strategy, register
from moeoff.policies.base import DEFAULT_FIT, Progress, Section, chosen
from moeoff.policies.classic import LFU
from moeoff.policies.edgemoe import ActivationPath, FrequencyOverDistance, token_shares
from moeoff.policies.fate import ShallowFavoringARC
from moeoff.routing.event import GateEvent
from moeoff.routing.recording import Recording

# --- cache policies ---


@register
class Random(Policy):
    """Evicts at random: HOBBIT's baseline."""

    name, summary = "random", "evicts at random"

    def start(self) -> None:
        self._rng = np.random.default_rng(0)

    def update(self, event: GateEvent) -> None:
        self.priorities[event.gate] = self._rng.random(self.shape.n_experts)


@register
class Static(Policy):
    """Keeps the most popular experts of a calibration run.

    Options:
        counts: [n_gates, n_experts] uses on other text. Without it the policy counts
            the first `learn` tokens and then stops.
    """

    name, summary = "static", "keeps the experts that were popular before"
    defaults = {"counts": None, "learn": 512}
    sections = FrequencyOverDistance.sections

    def start(self) -> None:
        counts = self.options["counts"]
        self._left = self.options["learn"] if counts is None else 0
        if counts is not None:
            self.priorities[:] = np.asarray(counts, np.float32)

    def update(self, event: GateEvent) -> None:
        if self._left > 0:
            experts, count = chosen(event)
            self.priorities[event.gate][experts] += count
            if event.gate == self.shape.n_gates - 1:
                self._left -= len(event.ids)


@register
class LFUOfAllTexts(LFU):
    """LFU that never forgets."""

    name, summary = "lfu-model", "keeps the experts that all texts have used most often"
    defaults = {"sequence": False}


@register
class EvenARC(ShallowFavoringARC):
    """ARC with the same room for every layer, whatever was calibrated."""

    name, summary = (
        "arc-even",
        "recency and frequency balanced in each layer, as many experts in each",
    )
    defaults = {"shallow": 0}
    sections = ()


@register
class PrintedEdgeMoE(FrequencyOverDistance):
    """EdgeMoE's eviction score with the distance as the paper prints it."""

    name, summary = (
        "edgemoe-printed",
        "keeps what is used often and in layers that have just run: the paper's printed formula",
    )
    distance_sign = -1


# --- predictors ---

LIMIT = 64 << 20  # bytes of the token table; the most frequent tokens are kept


@register
class TokenTable(Predictor):
    """ProMoE §4.2's token-based baseline: for all layers at once, what each token chose
    in other text.

    Exact where the token alone decides (`Router.tables`). Without a profile it knows
    only those gates.
    """

    name, summary, wants_tokens = (
        "token-table",
        "what this token chose in other text, for all layers at once",
        True,
    )

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

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray]:
        """Fit the arrays to a `Recording`.

        Returns:
            tokens [n] int32 ascending; shares [n, n_gates, E] float16; popularity
            [n_gates, E] for other tokens.
        """
        tokens, shares, popularity = token_shares(
            recording.tokens, recording.used(), LIMIT, progress
        )
        return {"tokens": tokens, "shares": shares, "popularity": popularity}

    sections = (Section("tokens", fit),)


@register
class PreviousToken(Predictor):
    """The choice of the same layer for the token before; older tokens rank what it did
    not choose.

    Options:
        decay: weight of a choice one token older, below one half.
    """

    name, summary = "previous-token", "what the same layer chose for the token before"
    defaults = {"decay": 0.5}

    def start(self) -> None:
        self._scores = np.zeros((self.router.n_gates, self.router.n_experts), np.float32)

    def reset_sequence(self) -> None:
        self._scores[:] = 0

    def observe(self, event: GateEvent) -> list[Prediction]:
        target, decay = (event.gate + 1) % self.router.n_gates, self.options["decay"]
        for experts in event.ids[-8:]:
            self._scores[event.gate] *= decay
            self._scores[event.gate][experts] += 1 - decay
        return [
            Prediction(
                target,
                np.broadcast_to(
                    self._scores[target], (len(event.ids) if target else 1, self._scores.shape[1])
                ),
            )
        ]


@register
class EAP(ActivationPath):
    """Fate's baseline (§5): the expert activation path one layer back."""

    name, summary = "eap", "what followed the experts of the last layer in other text"
    sections = ActivationPath.sections[:1]


class Oracle(Predictor):
    """Always right, of the layers that the predictor looks at in whose place it stands:
    tells what is due to a prediction from what is due to the time for it. Knows `text`,
    which is decoded from its beginning, and so it is not registered.

    Options:
        stride, p: as of `Learned` and `StackedGate`.
    """

    name, summary, wants_tokens = (
        "oracle",
        "what the coming layers will choose (simulated only)",
        True,
    )
    defaults = {"stride": 1, "p": 1}
    text: Recording | None = None

    def start(self) -> None:
        self._at = -1

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        self._at += len(tokens)
        return []

    def observe(self, event: GateEvent) -> list[Prediction]:
        first = event.gate + self.options["stride"]
        gates = (
            range(first, min(first + self.options["p"], self.router.n_gates))
            if self.text is not None
            else ()
        )
        scores = np.zeros((len(gates), 1, self.router.n_experts), np.float32)
        for gate, row in zip(gates, scores):
            row[0, self.text.ids[self._at, gate]] = self.text.weights[self._at, gate]
        return [Prediction(gate, row) for gate, row in zip(gates, scores)]


# --- presets ---

register(
    Strategy(
        "on-demand",
        "keeps nothing, reads every expert when it computes: the papers' baseline",
        keep=False,
        eager=False,
    )
)
register(
    Strategy(
        "eap",
        "Fate's baseline: its cache, and the expert activation path of one layer",
        policy=ShallowFavoringARC,
        predictor=EAP,
        bounded=False,
    )
)
