"""Baselines of the papers' comparison, which the package does not have: policies, predictors and presets of no use but to be compared with.

Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moeoff.gate_event import GateEvent
from moeoff.policies import FitOptions, Policy, Prediction, Predictor, Strategy, register
from moeoff.policies.base import DEFAULT_FIT, Progress, Sections, chosen
from moeoff.policies.classic import LFU
from moeoff.policies.edgemoe import ActivationPath, FrequencyOverDistance, token_shares
from moeoff.policies.fate import ShallowFavoringARC
from moeoff.policies.promoe import Learned
from moeoff.policies.recording import Recording

# --- cache policies ---


@register
class Random(Policy):
    """Evicts at random: HOBBIT's baseline."""

    name, summary = "random", "evicts at random"

    def update(self, event: GateEvent) -> None:
        self.priorities[event.gate] = self.rng.random(self.shape.n_experts)


@register
class Static(Policy):
    """Keeps the most popular experts of a calibration run.

    Options:
        counts: [n_gates, n_experts] uses on other text. Without it the policy counts the first `learn` tokens and then stops.
    """

    name, summary = "static", "keeps the experts that were popular before"
    defaults = {"counts": None, "learn": 512}
    profile_sections = ("popularity",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {"counts": profile["popularity"]["counts"]} if "popularity" in profile else {}

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

    name, summary = "arc-even", "recency and frequency balanced in each layer, as many experts in each"
    defaults = {"shallow": 0}

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {}


@register
class PrintedEdgeMoE(FrequencyOverDistance):
    """EdgeMoE's eviction score with the distance as the paper prints it."""

    name, summary = "edgemoe-printed", "keeps what is used often and in layers that have just run: the paper's printed formula"
    distance_sign = -1


# --- predictors ---

LIMIT = 64 << 20  # bytes of the token table; the most frequent tokens are kept


@register
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
        tokens, shares, popularity = token_shares(recording.tokens, recording.used(), LIMIT, progress)
        return {"tokens": tokens, "shares": shares, "popularity": popularity}


@register
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
        for experts in ids[-8:]:
            scores[gate] *= decay
            scores[gate][experts] += 1 - decay
        return scores


@register
class EAP(ActivationPath):
    """Fate's baseline (§5): the expert activation path one layer back."""

    name, summary = "eap", "what followed the experts of the last layer in other text"
    more_sections = {}

    def start(self) -> None:
        if self.arrays is not None:
            self.arrays = {name: self.arrays[name] for name in ("popularity", "one")} | {"skip": np.zeros_like(self.arrays["one"])}
        super().start()


class Oracle(Predictor):
    """Always right, of the next layer: tells what is due to a prediction from what is due to the time for it. Knows `text`, which is decoded from its
    beginning, and so it is registered for those runs alone."""

    name, summary, wants_tokens = "oracle", "what the next layer will choose (simulated only)", True
    text: Recording | None = None

    def start(self) -> None:
        self._at = -1

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        self._at += len(tokens)
        return []

    def observe(self, event: GateEvent) -> list[Prediction]:
        if self.text is None or event.gate + 1 >= self.router.n_gates:
            return []
        scores = np.zeros((1, self.router.n_experts), np.float32)
        scores[0, self.text.ids[self._at, event.gate + 1]] = self.text.weights[self._at, event.gate + 1]
        return [Prediction(event.gate + 1, scores)]


FLOOR = 1e-4  # under logarithms
HELD = 0.2  # share of the sequences on which sources that learned from the others are weighed


class _NextLayer(Learned):
    """Trained for the next layer alone: the blend asks for no other."""

    strides = (1,)


SOURCES: tuple[type[Predictor], ...] = (_NextLayer, TokenTable, ActivationPath, PreviousToken)


@register
class Blend(Predictor):
    """A logistic regression on the logarithms of four predictors' scores, one for each layer. Needs a profile.

    In the first layers the token predicts best, and the input of the layer before little; in later layers it is the reverse.
    """

    name, summary = "blend", "learned, token table, path and previous token, weighed by layer"
    wants_gate_input = True
    wants_tokens = True
    profile_section = "blend"
    needs_profile = True

    def start(self) -> None:
        self._parts: list[Predictor] = []
        self._waiting: list[dict[int, np.ndarray]] = []  # of each part: gate -> scores
        arrays = self.arrays
        if arrays is None:
            return
        for source in SOURCES:
            prefix = f"{source.profile_section}_"
            own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            self._parts.append(source(self.router, own or None))
        self._weights = arrays["weights"].astype(np.float32)
        self.reset_sequence()

    def reset_sequence(self, sequence: int = 0) -> None:
        self._waiting = [{} for _ in self._parts]  # the others', too: their rows would be in other places
        for part in self._parts:
            part.reset_sequence(sequence)

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        if not self._parts:
            return []
        self._waiting[1] = {p.gate: p.scores for p in self._parts[1].begin(tokens)}
        return [Prediction(0, self._mixed(0, len(tokens)))]

    def observe(self, event: GateEvent) -> list[Prediction]:
        for part, waiting in zip(self._parts, self._waiting):
            for p in part.observe(event):
                waiting[p.gate] = p.scores
        target = event.gate + 1
        if not self._parts or target >= self.router.n_gates or event.gate_input is None:
            return []
        return [Prediction(target, self._mixed(target, len(event.ids)))]

    def _mixed(self, gate: int, n: int) -> np.ndarray:
        """The weighted scores of the sources for a gate; those of another batch's size are left out."""
        out = np.zeros((n, self.router.n_experts), np.float32)
        for weight, waiting in zip(self._weights[gate], self._waiting):
            scores = waiting.get(gate)
            if scores is not None and len(scores) in (1, n) and weight:
                out += weight * np.log(np.maximum(scores, FLOOR))
        out -= out.max(axis=1, keepdims=True)
        return np.exp(out, out=out)

    @classmethod
    def fit(cls, recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
        """From a `Recording` with gate inputs; None if it has none. The weights are fitted on a fifth of the sequences, with
        sources that have seen the others; then the sources learn from all.

        Returns:
            weights [n_gates, 4], and what the sources themselves learned, their names prefixed by their section's.
        """
        from sklearn.linear_model import LogisticRegression

        if recording.inputs is None:
            return None
        train, held = recording.split(HELD)
        n_gates = recording.router.n_gates
        weights = np.zeros((n_gates, len(SOURCES)), np.float32)
        learned = [_learn(source, recording.take(train), options) for source in SOURCES]
        some = recording.take(held)
        used = some.used()[some.kept]  # where every source had its say
        predicted = [_replay(source(recording.router, arrays or None), some)[some.kept] for source, arrays in zip(SOURCES, learned)]
        for gate in range(n_gates):
            columns, there = [], []
            for i, scores in enumerate(predicted):
                if scores[:, gate].any():
                    x = np.log(np.maximum(scores[:, gate], FLOOR))
                    columns.append((x - x.mean(axis=1, keepdims=True)).ravel())
                    there.append(i)
            y = used[:, gate].ravel()
            if there and y.any() and not y.all():
                weights[gate, there] = LogisticRegression(C=1.0).fit(np.stack(columns, axis=1), y).coef_[0]
            if progress:
                progress(gate + 1, n_gates)
        arrays = {"weights": np.maximum(weights, 0)}
        for source in SOURCES:
            arrays |= {f"{source.profile_section}_{name}": array for name, array in (_learn(source, recording, options) or {}).items()}
        return arrays


def _learn(source: type[Predictor], recording: Recording, options: FitOptions) -> dict[str, np.ndarray] | None:
    return source.fit(recording, options) if source.profile_section else None


def _replay(predictor: Predictor, recording: Recording) -> np.ndarray:
    """[n_tokens, n_gates, E] float32: its scores for each gate when decoding token by token, 0 where it predicts nothing."""
    out = np.zeros((*recording.ids.shape[:2], recording.router.n_experts), np.float32)
    for t in range(recording.n_tokens):
        if recording.starts[t]:
            predictor.reset_sequence()
        for p in predictor.begin(recording.tokens[t : t + 1]):
            out[t, p.gate] = p.scores[0]
        for event in recording.events(t, t + 1):
            for p in predictor.observe(event):
                later = t + (p.gate <= event.gate)
                if later < recording.n_tokens and not (later > t and recording.starts[later]):
                    out[later, p.gate] = p.scores[0]
    return out


# --- presets ---

register(Strategy("on-demand", "keeps nothing, reads every expert when it computes: the papers' baseline", keep=False, eager=False))
register(Strategy("eap", "Fate's baseline: its cache, and the expert activation path of one layer", policy="arc", predictor="eap"))
