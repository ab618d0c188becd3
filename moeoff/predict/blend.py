"""moeoff's own predictor: the input of the layer before, the token and the path at once, weighed by layer."""

from __future__ import annotations

import numpy as np

from ..gate_event import GateEvent
from .base import DEFAULT_FIT, FitOptions, Prediction, Predictor, Progress
from .learned import Learned
from .path import ActivationPath
from .recording import Recording
from .tokens import PreviousToken, TokenTable

FLOOR = 1e-4  # under logarithms
HELD = 0.2  # share of the sequences on which sources that learned from the others are weighed


class _NextLayer(Learned):
    """Trained for the next layer alone: the blend asks for no other."""

    strides = (1,)


SOURCES: tuple[type[Predictor], ...] = (_NextLayer, TokenTable, ActivationPath, PreviousToken)


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
