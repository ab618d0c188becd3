"""Ours: a learned score of how soon and how often an expert will be used again.

Target: sum over future tokens of discount^k x used. Two linear stages, fitted on traces by `moeoff.cache.learn`:
all layers' router probabilities (now, and a running mean) go through a narrow bottleneck to what every expert can expect; that,
and the expert's own running means of probabilities and uses at several rates, give the score. A linear term in the distance of
the layer breaks near ties. Only the event's row is computed; the distance is added to all.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import numpy as np

from .base import Event, Policy, Shape, used

FLOOR = 1e-4  # under the logarithm
STATE_RATE = 0.15  # of the running mean of log probabilities that the bottleneck sees
PROB_RATES = (0.1, 0.02)
USE_RATES = (0.3, 0.05, 0.01)
RATES = np.array([*PROB_RATES, *USE_RATES], np.float32)[:, None]
# without weights fitted to the model: chosen by hand after the demo model's second stage, not fitted
GENERIC = (0.0, 0.5, 0.9, 0.1, 0.25, 0.15)


class Score(Policy):
    """Options:
    weights: path of an .npz by `moeoff.cache.learn`. None: those that moeoff has for this model (by its file's name), or else
        generic coefficients without the bottleneck; "generic" asks for these.
    position: weight of the layer's distance, 0 to leave it out.
    """

    name, summary, wants_probs = "score", "keeps the highest learned score of reuse", True
    defaults = {"weights": None, "position": 0.03}

    def start(self) -> None:
        n, e = self.shape.n_gates, self.shape.n_experts
        w = load_weights(self.shape, self.options["weights"])
        self._coef = w["coef"] if w else np.tile(np.array(GENERIC, np.float32), (n, 1))
        self._bottleneck = w
        self._means = np.full((n, len(RATES), e), 1 / e, np.float32)
        self._means[:, len(PROB_RATES) :] *= self.shape.n_used
        if w:
            self._project, self._back, self._mean, self._bias = w["project"], w["back"], w["mean"], w["bias"]
            self._state = self._mean.reshape(n, 2, e).copy()
            self._parts = np.zeros((n, self._project.shape[1]), np.float32)
            self._sum = np.zeros(self._project.shape[1], np.float32)
        i = np.arange(n)
        distance = (i[None] - i[:, None]) % n
        distance[distance == 0] = n
        self._near = (-self.options["position"] * distance / n).astype(np.float32)[:, :, None]  # [layer that evicts, layer]
        self._scores = np.zeros_like(self.priorities)
        self._keep = 1 - RATES

    def update(self, event: Event) -> None:
        gate, n_tokens = event.gate, len(event.ids)
        experts, count = used(event)
        if event.probs is not None:
            probs = event.probs[0] if n_tokens == 1 else event.probs.mean(axis=0)
        else:  # nobody computed them: the chosen experts' weights
            probs = np.zeros(self.shape.n_experts, np.float32)
            np.add.at(probs, event.ids.ravel(), event.weights.ravel() / n_tokens)
        means = self._means[gate]
        if n_tokens == 1:
            keep, rates = self._keep, RATES
        else:
            keep = self._keep**n_tokens
            rates, count = 1 - keep, count / n_tokens
        means *= keep
        means[:2] += rates[:2] * probs
        means[2:, experts] += rates[2:] * count
        coef = self._coef[gate]
        row = np.dot(coef[1:], means, out=self._scores[gate])
        if self._bottleneck:
            state = self._state[gate]
            np.log(probs + FLOOR, out=state[0])
            state[1] += STATE_RATE * (state[0] - state[1])
            part = self._project[gate] @ (state.ravel() - self._mean[gate])
            self._sum += part
            self._sum -= self._parts[gate]
            self._parts[gate] = part
            row += self._back[gate] @ self._sum
            row += self._bias[gate]
        np.add(self._scores, self._near[(gate + 1) % self.shape.n_gates], out=self.priorities)


def load_weights(shape: Shape, path: str | None) -> dict[str, np.ndarray] | None:
    """Weights for a model of this shape, ready for `Score`, or None if there are none."""
    if path == "generic":
        return None
    if path is None:
        bundled = resources.files("moeoff") / "data" / f"score-{Path(shape.model).name.split('-q')[0]}.npz"
        if not shape.model or not bundled.is_file():
            return None
        path = str(bundled)
    arrays = _read(str(path))
    return arrays if arrays["bias"].shape == (shape.n_gates, shape.n_experts) else None


@functools.lru_cache(maxsize=4)
def _read(path: str) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: np.ascontiguousarray(file[name], np.float32) for name in ("project", "back", "mean", "bias", "coef")}
