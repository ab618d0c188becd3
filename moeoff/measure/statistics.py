"""Statistics of predictions: perplexity, and the distance from the lossless model.

Confidence intervals are 95 %, by Student's t over windows, which hardly depend on each
other as tokens do. Models are compared token by token, which cancels the difficulty of
the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import stdtrit

T = TypeVar("T")


def log_probs(logits: np.ndarray) -> np.ndarray:
    """Convert logits [n, n_vocab] float32 to log-probabilities, with a float64 sum."""
    shifted: np.ndarray = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )
    return shifted


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return KL(p || q) in nats, [n], of log-probabilities [n, n_vocab], p finite."""
    kl: np.ndarray = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
    return kl


def spread(items: Sequence[T]) -> list[T]:
    """Reorder items so that any prefix is spread evenly (golden-ratio order)."""
    golden = (5**0.5 - 1) / 2
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * golden % 1)]


def student(n: int) -> float:
    """Return half the 95 % interval of a mean of n > 1 values, in standard errors."""
    return float(stdtrit(n - 1, 0.975))


def one_sided(n: int, at_once: int = 1) -> float:
    """Return the one-sided 95 % bound in standard errors, see `upper_loss`."""
    return float(stdtrit(n - 1, 1 - 0.05 / at_once))


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval, which a single window lacks."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def mean(cls, values: np.ndarray) -> Estimate:
        """Estimate the mean of [n_windows, n_scored] from the windows' means."""
        means = values.mean(axis=1)
        centre = float(means.mean())
        if len(means) < 2:
            return cls(centre, None, None)
        half = student(len(means)) * float(means.std(ddof=1)) / math.sqrt(len(means))
        return cls(centre, centre - half, centre + half)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Apply an increasing function to the value and the interval."""
        low, high = (None if bound is None else function(bound) for bound in (self.low, self.high))
        return Estimate(function(self.value), low, high)


@dataclass(frozen=True)
class Scores:
    """A model's predictions of the scored tokens, [n_windows, n_scored].

    Attributes:
        nll: -ln of the actual token's probability, float64.
        reference_nll: nll of the lossless model. None without a reference, as kl and
            same_top.
        kl: KL(lossless || this) in nats.
        same_top: True where both have the same likeliest token.
    """

    nll: np.ndarray
    reference_nll: np.ndarray | None = None
    kl: np.ndarray | None = None
    same_top: np.ndarray | None = None
    bytes_read: int = 0

    def quality(self, windows: slice = slice(None)) -> QualityMetrics:
        """Summarize windows, by default all."""
        nll = self.nll[windows]
        perplexity = math.exp(nll.mean())
        error = perplexity * float(nll.std()) / math.sqrt(nll.size - 1)
        if self.reference_nll is None or self.kl is None or self.same_top is None:
            return QualityMetrics(len(nll), nll.size, perplexity, error)
        loss = Estimate.mean(nll - self.reference_nll[windows]).map(math.expm1)
        kl, top1 = (
            Estimate.mean(self.kl[windows]),
            Estimate.mean(self.same_top[windows]).map(lambda share: min(max(share, 0.0), 1.0)),
        )
        return QualityMetrics(len(nll), nll.size, perplexity, error, loss, kl, top1)


class Distance(NamedTuple):
    """Fields of `QualityMetrics`."""

    loss: Estimate
    kl: Estimate
    top1: Estimate


@dataclass(frozen=True)
class QualityMetrics:
    """A model's quality on a text. loss, kl and top1 are None without a reference.

    Attributes:
        n_tokens: Number of scored tokens.
        perplexity_error: Standard error of perplexity over tokens.
        loss: Relative increase of perplexity over the lossless model. 0.01 is 1 %.
        kl: Mean KL(lossless || this) in nats.
        top1: Share of tokens for which both have the same likeliest token.
    """

    n_windows: int
    n_tokens: int
    perplexity: float
    perplexity_error: float
    loss: Estimate | None = None
    kl: Estimate | None = None
    top1: Estimate | None = None

    @property
    def distance(self) -> Distance:
        """Distance from the lossless model. Raise `ValueError` without a reference."""
        if self.loss is None or self.kl is None or self.top1 is None:
            raise ValueError("expected a quality that was compared with the lossless model")
        return Distance(self.loss, self.kl, self.top1)


def upper_loss(loss: Estimate, n_windows: int, at_once: int = 1) -> float:
    """Return the one-sided 95 % bound of a loss, infinite for a single window.

    Args:
        at_once: Number of simultaneous bounds (Bonferroni). A sequence that ends at the
            first bound that is too high counts as one.
    """
    if loss.high is None:
        return math.inf
    centre, half = math.log1p(loss.value), math.log1p(loss.high) - math.log1p(loss.value)
    return math.expm1(centre + half * one_sided(n_windows, at_once) / student(n_windows))


def interval(estimate: Estimate, form: str) -> str:
    """Format an estimate: "+0.51% (+0.32% to +0.70%)"."""
    text = form.format(estimate.value)
    return (
        text
        if estimate.low is None
        else f"{text} ({form.format(estimate.low)} to {form.format(estimate.high)})"
    )
