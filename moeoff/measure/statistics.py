"""Statistics of predictions: perplexity, and the distance from the lossless model's. Numbers in, numbers out; knows no model.

Confidence intervals are of 95 %, by Student's t over the means of windows: tokens of one window depend on each other,
windows hardly do. What is compared is compared token by token on the same text, so that the text's own difficulty cancels.
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
    """[n, n_vocab] float32 logits to natural logarithms of probabilities. As in llama-perplexity the sum is a double."""
    shifted: np.ndarray = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats: [n, n_vocab] log-probabilities, as `log_probs` gives them, to [n] float64. p must be finite."""
    kl: np.ndarray = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
    return kl


def spread(items: Sequence[T]) -> list[T]:
    """In an order whose first ones lie all over them."""
    golden = (5**0.5 - 1) / 2  # the parts behind the point of its multiples fill an interval evenly
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * golden % 1)]


def student(n: int) -> float:
    """Half the width, in standard errors, of the 95 % interval of a mean of n values, n > 1."""
    return float(stdtrit(n - 1, 0.975))


def one_sided(n: int, at_once: int = 1) -> float:
    """How far the bound that a mean of n values does not exceed, with 95 % confidence, lies above it, in standard errors; at_once as for `upper_loss`."""
    return float(stdtrit(n - 1, 1 - 0.05 / at_once))


@dataclass(frozen=True)
class Estimate:
    """A measured value and its 95 % confidence interval; low and high are None where one window cannot tell."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def mean(cls, values: np.ndarray) -> Estimate:
        """The mean of [n_windows, n_scored] values; windows are the sample."""
        means = values.mean(axis=1)
        centre = float(means.mean())
        if len(means) < 2:
            return cls(centre, None, None)
        half = student(len(means)) * float(means.std(ddof=1)) / math.sqrt(len(means))
        return cls(centre, centre - half, centre + half)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Through an increasing function."""
        low, high = (None if bound is None else function(bound) for bound in (self.low, self.high))
        return Estimate(function(self.value), low, high)


@dataclass(frozen=True)
class Scores:
    """A model's prediction for each scored token, [n_windows, n_scored] each.

    Attributes:
        nll: -ln of the probability of the token that came, float64.
        reference_nll, kl, same_top: compared with the lossless model: its nll, KL(lossless || this) in nats, and whether both find
            the same token the likeliest. None where there was none to compare with.
        bytes_read: of experts, for all of it.
    """

    nll: np.ndarray
    reference_nll: np.ndarray | None = None
    kl: np.ndarray | None = None
    same_top: np.ndarray | None = None
    bytes_read: int = 0

    def quality(self, windows: slice = slice(None)) -> Quality:
        """Summed up over some of the windows, by default all."""
        nll = self.nll[windows]
        perplexity = math.exp(nll.mean())
        error = perplexity * float(nll.std()) / math.sqrt(nll.size - 1)
        if self.reference_nll is None or self.kl is None or self.same_top is None:
            return Quality(len(nll), nll.size, perplexity, error)
        loss = Estimate.mean(nll - self.reference_nll[windows]).map(math.expm1)
        kl, top1 = Estimate.mean(self.kl[windows]), Estimate.mean(self.same_top[windows]).map(lambda share: min(max(share, 0.0), 1.0))
        return Quality(len(nll), nll.size, perplexity, error, loss, kl, top1)


class Distance(NamedTuple):
    """How far from the lossless model, see `Quality`."""

    loss: Estimate
    kl: Estimate
    top1: Estimate


@dataclass(frozen=True)
class Quality:
    """Quality on a text.

    Attributes:
        n_windows, n_tokens: of the text; tokens are those that were scored.
        perplexity, perplexity_error: as llama-perplexity states them: the error is the standard error over tokens.
        loss: relative increase of perplexity over the lossless model, 0.01 is 1 %.
        kl: mean KL(lossless || this) in nats.
        top1: share of tokens where both find the same token the likeliest.

    loss, kl and top1 are None where there was nothing to compare with.
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
        """From the lossless model. Raises `ValueError` if it was not compared with that."""
        if self.loss is None or self.kl is None or self.top1 is None:
            raise ValueError("this quality was not compared with the lossless model's")
        return Distance(self.loss, self.kl, self.top1)


def upper_loss(loss: Estimate, n_windows: int, at_once: int = 1) -> float:
    """The loss that is not exceeded, with 95 % confidence (one-sided). Infinite if one window cannot tell.

    Args:
        at_once: so many such bounds hold together with that confidence (Bonferroni). A sequence of ever bolder tries that ends at the first
            whose bound is too high counts as one: the next is looked at only where all before it hold.
    """
    if loss.high is None:
        return math.inf
    centre, half = math.log1p(loss.value), math.log1p(loss.high) - math.log1p(loss.value)
    return math.expm1(centre + half * one_sided(n_windows, at_once) / student(n_windows))


def interval(estimate: Estimate, form: str) -> str:
    """ "+0.51% (+0.32% to +0.70%)" """
    text = form.format(estimate.value)
    return text if estimate.low is None else f"{text} ({form.format(estimate.low)} to {form.format(estimate.high)})"
