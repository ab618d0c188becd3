"""moeoff's own policy: a learned score of how soon an expert will be used again.

Target: discount^(tokens until the next use). Two linear stages, fitted on traces by `moeoff.calibrate.fit_score`: all layers' router
probabilities (now, and a running mean) go through a narrow bottleneck to what every expert can expect; that, and the expert's own
running means of probabilities and uses at several rates, give the score. A linear term in the distance of the layer breaks
near ties. There is one set of coefficients for each of several discounts: the larger the buffer, the further it looks.

An event changes its own row. What the bottleneck knows since is added to as many of the rows before it as `REFRESH` allows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError
from ..gate_event import GateEvent
from .base import Policy, Sections, Shape, used

NAMES = ("project", "back", "mean", "bias", "coef", "position", "share")
FLOOR = 1e-4  # under the logarithm
STATE_RATE = 0.15  # of the running mean of log probabilities that the bottleneck sees
PROB_RATES = (0.1, 0.02)
USE_RATES = (0.3, 0.05, 0.01)
REFRESH = 12_000  # multiplications for each event
# without weights fitted to the model: chosen by hand after the demo model's second stage, not fitted
GENERIC = (0.5, 0.9, 0.1, 0.25, 0.15)


class Score(Policy):
    """Priority = the estimated discount^(tokens until the next use).

    Options:
        weights: what `moeoff.calibrate.fit_score.fit_score` returns, or the path of an .npz with it. None: those that moeoff has for
            this model (by its file's name), or else generic coefficients without the bottleneck; "generic" takes these.
        position: weight of the layer's distance, 0 to leave it out; None for that of the weights.

    Raises:
        OptionError: weights of another shape.
    """

    name, summary, wants_probs = "score", "keeps the highest learned score of reuse", True
    defaults = {"weights": None, "position": None}
    profile_sections = ("score",)

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        return {"weights": profile["score"]} if "score" in profile else {}

    def start(self) -> None:
        n, e = self.shape.n_gates, self.shape.n_experts
        w = load_weights(self.shape, self.options["weights"])
        position = self.options["position"]
        if w:
            share = self.shape.capacity / (n * e)
            h = min(int(np.searchsorted(w["share"], share)), len(w["share"]) - 1)
            self._coef, self._back, self._bias = w["coef"][h], w["back"][h], w["bias"][h]
            position = w["position"][h] if position is None else position
        else:
            self._coef = np.tile(np.array(GENERIC, np.float32), (n, 1))
        self._keep, self._mix = mixing(1)
        self._now = np.zeros((2, e), np.float32)  # probabilities and uses
        self._bottleneck = w is not None
        self._means = np.full((n, len(self._keep), e), 1 / e, np.float32)
        self._means[:, len(PROB_RATES) :] *= self.shape.n_used
        if w:
            self._project = w["project"]
            self._state = w["mean"].reshape(n, 2, e).copy()
            self._parts = np.einsum("grx,gx->gr", self._project, w["mean"])
            self._origin = self._parts.sum(axis=0)
            self._sum = np.zeros(self._project.shape[1], np.float32)
            self._own = np.zeros((n, e), np.float32)
            self._n_refresh = max(REFRESH // self._back[0].size, 1)
        # [layer that evicts, layer]: when the layer runs next, counted from this token's first; the evicting one has chosen already
        i = np.arange(n)
        runs = i[None] + n * (i[None] <= i[:, None])
        self._near = (-(0.03 if position is None else position) * runs / n).astype(np.float32)[:, :, None]
        self._next = -1
        self._scores = np.zeros_like(self.priorities)

    def update(self, event: GateEvent) -> None:
        gate, n_tokens = event.gate, len(event.ids)
        experts, count = used(event)
        if event.probs is not None:
            probs = event.probs[0] if n_tokens == 1 else event.probs.mean(axis=0)
        else:  # without them, the selected experts' weights
            probs = np.zeros(self.shape.n_experts, np.float32)
            np.add.at(probs, event.ids.ravel(), event.weights.ravel() / n_tokens)
        keep, mix = (self._keep, self._mix) if n_tokens == 1 else mixing(n_tokens)
        self._now[0] = probs
        self._now[1] = 0
        self._now[1][experts] = count / n_tokens
        means = self._means[gate]
        means *= keep
        means += mix @ self._now
        row = np.dot(self._coef[gate], means, out=self._own[gate] if self._bottleneck else self._scores[gate])
        rows = slice(gate, gate + 1)
        if self._bottleneck:
            state = self._state[gate]
            np.log(probs + FLOOR, out=state[0])
            state[1] += STATE_RATE * (state[0] - state[1])
            part = self._project[gate] @ state.ravel()
            self._sum += part - self._parts[gate]
            self._parts[gate] = part
            if gate == 0:  # rounding must not add up for ever
                np.sum(self._parts, axis=0, out=self._sum)
                self._sum -= self._origin
            row += self._bias[gate]
            rows = slice(max(gate + 1 - self._n_refresh, 0), gate + 1)
            np.add(self._back[rows] @ self._sum, self._own[rows], out=self._scores[rows])
        # from one gate to the next only the next one's place changes, apart from the rows above
        ahead = (gate + 1) % self.shape.n_gates
        near = self._near[ahead]
        if ahead == 0 or gate != self._next:
            np.add(self._scores, near, out=self.priorities)
        else:
            np.add(self._scores[rows], near[rows], out=self.priorities[rows])
            np.add(self._scores[ahead], near[ahead], out=self.priorities[ahead])
        self._next = ahead


def mixing(n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """What the running means keep after so many tokens [n, 1], and what they take of probabilities and uses [n, 2]."""
    rates = np.array([*PROB_RATES, *USE_RATES], np.float32)[:, None]
    keep = (1 - rates) ** n_tokens
    return keep, (1 - keep) * np.repeat(np.eye(2, dtype=np.float32), (len(PROB_RATES), len(USE_RATES)), axis=0)


def load_weights(shape: Shape, source: str | Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
    """Weights for a model of this shape, ready for `Score`, or None if there are none."""
    if source == "generic":
        return None
    bundled = source is None
    if bundled:
        file = resources.files("moeoff") / "data" / f"score-{Path(shape.model).name.split('-q')[0]}.npz"
        if not shape.model or not file.is_file():
            return None
        source = str(file)
    arrays = {name: np.ascontiguousarray(source[name], np.float32) for name in NAMES} if isinstance(source, Mapping) else _read(str(source))
    if arrays["bias"].shape[1:] != (shape.n_gates, shape.n_experts):
        if bundled:  # another model of that name
            return None
        raise OptionError(f"the score's weights are for {arrays['bias'].shape[1:]} gates and experts, the model has {shape.n_gates, shape.n_experts}")
    return arrays


@functools.lru_cache(maxsize=4)
def _read(path: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.ascontiguousarray(file[name], np.float32) for name in NAMES}
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"{path}: are no weights of the score: {error}") from None
