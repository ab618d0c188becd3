"""moeoff's own policy: a learned score of how soon an expert will be used again.

Target: discount^(tokens until the next use). Two linear stages, fitted on traces by `moeoff.calibrate.fit_score`: all layers' router
probabilities (now, and a running mean) go through a narrow bottleneck to what every expert can expect; that, and the expert's own
running means of probabilities and uses at several rates, give the score. A linear term in the distance of the layer breaks
near ties. There is one set of coefficients for each of several discounts: the larger the buffer, the further it looks.

The gates of a group change their own rows. What the bottleneck knows since is added to as many of the rows before them as `REFRESH`
allows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError
from ..gate_event import GateEvent
from .base import Sections, Shape, used
from .grouped import GroupedPolicy

NAMES = ("project", "back", "mean", "bias", "coef", "position", "share")
FLOOR = 1e-4  # under the logarithm
STATE_RATE = 0.15  # of the running mean of log probabilities that the bottleneck sees
PROB_RATES = (0.1, 0.02)
USE_RATES = (0.3, 0.05, 0.01)
REFRESH = 12_000  # multiplications for each event
REBASE = 64  # tokens
# without weights fitted to the model: chosen by hand after the demo model's second stage, not fitted
GENERIC = (0.5, 0.9, 0.1, 0.25, 0.15)


class Score(GroupedPolicy):
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
        super().start()
        n, e = self.shape.n_gates, self.shape.n_experts
        self._weights = w = load_weights(self.shape, self.options["weights"])
        self._keep, self._mix = mixing(1)
        self._now = np.zeros((self.group, 2, e), np.float32)  # probabilities and uses
        self._means = np.full((n, len(self._keep), e), 1 / e, np.float32)
        self._means[:, len(PROB_RATES) :] *= self.shape.n_used
        if w:
            self._project = w["project"]
            self._state = w["mean"].reshape(n, 2, e).copy()
            self._parts = np.einsum("grx,gx->gr", self._project, w["mean"])
            self._origin = self._parts.sum(axis=0)
            self._sum = np.zeros(self._project.shape[1], np.float32)
            self._own = np.zeros((n, e), np.float32)
        self._scores = np.zeros_like(self.priorities)
        # Nearness as the time, in tokens, at which a layer runs next: only the rows change whose layers have run, and the buffer sorts no other
        self._due = (np.arange(n, dtype=np.float32) / n)[:, None]
        self._token, self._last = 0, -1
        self.resize(self.shape.capacity)

    def resize(self, capacity: float) -> None:
        """Takes the coefficients of the horizon that fits the new capacity."""
        super().resize(capacity)
        n, e, w = self.shape.n_gates, self.shape.n_experts, self._weights
        position = self.options["position"]
        if w:
            h = min(int(np.searchsorted(w["share"], capacity / (n * e))), len(w["share"]) - 1)
            self._coef, self._back, self._bias = w["coef"][h], w["back"][h], w["bias"][h]
            self._n_refresh = max(REFRESH // self._back[0].size, 1)
            position = w["position"][h] if position is None else position
        else:
            self._coef = np.tile(np.array(GENERIC, np.float32), (n, 1))
        self._position = 0.03 if position is None else float(position)
        np.subtract(self._scores, self._position * self._due, out=self.priorities)

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        n_tokens, now = len(events[0].ids), self._now[: len(events)]
        now[:, 1] = 0
        for (probs, uses), event in zip(now, events):
            experts, count = used(event)
            uses[experts] = count / n_tokens
            probs[:] = 0  # of experts that a gate does not have
            if event.probs is not None:
                probs[: event.probs.shape[1]] = event.probs[0] if len(event.probs) == 1 else event.probs.mean(axis=0)
            else:  # without them, the selected experts' weights
                np.add.at(probs, event.ids.ravel(), event.weights.ravel() / n_tokens)
        keep, mix = (self._keep, self._mix) if n_tokens == 1 else mixing(n_tokens)
        self._take(slice(first, first + len(events)), now, keep, mix)

    def _take(self, gates: slice, now: np.ndarray, keep: np.ndarray, mix: np.ndarray) -> None:
        """Of consecutive gates: probabilities and uses [n, 2, E], and what the running means keep and take of them."""
        means = self._means[gates]
        means *= keep
        means += mix @ now
        own = np.matmul(self._coef[gates, None], means)[:, 0]
        if self._weights is None:
            self._scores[gates], rows = own, gates
        else:
            state = self._state[gates]
            np.log(now[:, 0] + FLOOR, out=state[:, 0])
            state[:, 1] += STATE_RATE * (state[:, 0] - state[:, 1])
            parts = np.vecdot(self._project[gates], state.reshape(len(now), 1, -1))
            self._sum += (parts - self._parts[gates]).sum(axis=0)
            self._parts[gates] = parts
            if gates.start == 0:  # rounding must not add up for ever
                np.sum(self._parts, axis=0, out=self._sum)
                self._sum -= self._origin
            np.add(own, self._bias[gates], out=self._own[gates])
            rows = slice(max(gates.stop - self._n_refresh * len(now), 0), gates.stop)
            np.add(self._back[rows] @ self._sum, self._own[rows], out=self._scores[rows])
        self._rank(gates, rows)

    def _rank(self, gates: slice, rows: slice) -> None:
        """Writes the priorities of `rows`, whose scores have changed, after these gates have run: `gates` are the last of them."""
        n = self.shape.n_gates
        if gates.start <= self._last:
            self._token += 1
        self._last = gates.stop - 1
        self._due[gates, 0] = self._token + 1 + np.arange(gates.start, gates.stop) / n
        # the layer that evicts next has chosen already: what it has not chosen waits for the token after
        ahead = gates.stop % n
        self._due[ahead] = self._token + 1 + (ahead / n or 1)
        if self._token >= REBASE:  # a float32 must tell gates apart
            self._due -= self._token
            self._token, rows = 0, slice(0, n)
        np.subtract(self._scores[rows], self._position * self._due[rows], out=self.priorities[rows])
        np.subtract(self._scores[ahead], self._position * self._due[ahead], out=self.priorities[ahead])


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
