"""What a predictor is: gate events in, scores of the experts of coming gates out.

A predictor knows nothing of files, buffers or what is done with its scores. Where it needs a calibration, it gets the arrays
of its section of a profile; without them it learns while it runs, or predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.importance import LOW_COST
from ..errors import OptionError
from ..gate_event import GateEvent
from .recording import Recording
from .router import Router

Progress = Callable[[int, int], None]  # steps done, and all


@dataclass(frozen=True)
class FitOptions:
    """What every fit is given beside the recording; each takes what it needs.

    Attributes:
        seed: of whatever is random in the fit; the same seed gives the same arrays.
        hidden: units in the hidden layer of a network.
        low_cost: bytes of a low version as a share of the model's own, HOBBIT's B_l/B_h (§3.4).

    Raises:
        OptionError: out of range.
    """

    seed: int = 0
    hidden: int = 128
    low_cost: float = LOW_COST

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 32:
            raise OptionError(f"the seed of a fit lies between 0 and {(1 << 32) - 1}, not {self.seed}")
        if self.hidden < 1:
            raise OptionError(f"a network has at least one hidden unit, not {self.hidden}")


DEFAULT_FIT = FitOptions()


@dataclass(frozen=True)
class Prediction:
    """What one coming gate may choose.

    Attributes:
        gate: row of the priority table: a later gate of the same batch, or an earlier one of the next token.
        scores: [n_tokens, n_experts] float32, higher is likelier; comparable within a row only. One row where the prediction
            is for the next token of a sequence, or one for each of several. Valid until the predictor's next call.
        logits: the scores are a router's logits, not weights.
    """

    gate: int
    scores: np.ndarray
    logits: bool = False


class Predictor:
    """Base of all predictors: override `observe`, or `begin`, and `reset_sequence` if text matters.

    Args:
        router: of the model.
        arrays: the predictor's section of a profile, or None.
        options: the predictor's own; each defaults to its entry in `defaults`.

    Raises:
        OptionError: an unknown option.
    """

    name = ""
    summary = ""
    wants_gate_input = False  # reads GateEvent.gate_input
    wants_tokens = False  # begin() must be called with the tokens of each batch
    profile_section: str | None = None
    more_sections: tuple[str, ...] = ()  # of a profile, that only the strategy's own predictor is given, not one that stands in for it
    needs_profile = False  # predicts nothing without one
    defaults: dict[str, Any] = {}

    def __init__(self, router: Router, arrays: Mapping[str, np.ndarray] | None = None, **options: Any):
        self.check(options)
        self.router, self.arrays = router, arrays
        self.options = self.defaults | options
        self.start()

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raises OptionError for an option that is unknown or, where a predictor says so, out of range."""
        unknown = sorted(set(options) - set(cls.defaults))
        if unknown:
            raise OptionError(f"{cls.name}: unknown option {unknown[0]!r}; there are: {', '.join(cls.defaults) or 'none'}")

    def start(self) -> None:
        """Sets up state; `router`, `arrays` and `options` are there."""

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        """Before a batch: its tokens [n_tokens]."""
        return []

    def observe(self, event: GateEvent) -> list[Prediction]:
        """After a router has selected."""
        return []

    def reset_sequence(self, sequence: int = 0) -> None:
        """This sequence begins a new text. Others may go on (`GateEvent.sequences`)."""

    @classmethod
    def fit(cls, recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
        """The arrays of `profile_section`, from one pass over text; None if there is nothing to learn from it. `moeoff calibrate` calls it."""
        return None


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """[n_tokens, k] the k likeliest experts of each row [n_tokens, n_experts], in no order."""
    if k >= scores.shape[1]:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.argpartition(scores, -k, axis=1)[:, -k:]


def widened(scores: np.ndarray, percentile: float = 75) -> np.ndarray:
    """[n_tokens, m] the experts at or above this percentile of each row, best first (Fate §4.2: 75, the upper quarter)."""
    m = max(round(scores.shape[1] * (1 - percentile / 100)), 1)
    best = top_k(scores, m)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
    return np.take_along_axis(best, order, axis=1)
