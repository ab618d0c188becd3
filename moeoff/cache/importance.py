"""Which of the chosen experts matter: HOBBIT's unimportance score (§3.2)."""

from dataclasses import dataclass

import numpy as np

from ..errors import OptionError
from ..gate_event import GateEvent

T1, T2 = 0.6, 0.9  # HOBBIT's thresholds on Mixtral
LOW_COST = 0.25  # B_l / B_h: an int4 version beside float16 (§3.4)
HIGH_SHARE, LOW_SHARE = 0.67, 0.30  # of all uses, what those thresholds leave in high and in low precision on Mixtral (figure 5b)


def unimportance(weights: np.ndarray, n_scale: int | None = None) -> np.ndarray:
    """Sum of the larger gate weights of the same token (equation 2), all scaled to 1.

    The native rule takes the same sums in the same order, so that both agree to the last bit: of equal weights the first counts
    as the larger, and where a token's weights add up to nothing all its experts are important.

    Args:
        weights: [n_tokens, n] float.
        n_scale: scale so that the n_scale largest add up to 1, for weights of more experts than are used; default: all.

    Returns:
        [n_tokens, n], 0 for the most important.
    """
    rows, order = np.arange(len(weights))[:, None], np.argsort(-weights, axis=1, kind="stable")
    upto = np.cumsum(weights[rows, order], axis=1)
    total = upto[:, -1:] if n_scale is None else upto[:, n_scale - 1 : n_scale]
    out = np.zeros_like(weights)
    out[rows, order[:, 1:]] = np.where(total > 0, upto[:, :-1] / np.where(total > 0, total, 1), 0)
    return out


def thresholds(scores: np.ndarray, high: float = HIGH_SHARE, low: float = LOW_SHARE) -> tuple[float, float]:
    """T1 and T2 for a model, from the distribution of its experts' unimportance as HOBBIT takes them from Mixtral's (§3.2, figure 5b).

    Args:
        scores: [n] of all uses.
        high, low: shares of the uses that stay in high precision and that go to low, at least; what is left is skipped.

    Returns:
        The smallest thresholds that leave these shares; T1 <= T2 <= 1.

    Raises:
        OptionError: no scores, or shares that are none.
    """
    if not len(scores) or not (0 <= high <= 1 and 0 <= low <= 1):
        raise OptionError(f"thresholds need scores and two shares between 0 and 1, not {len(scores)} scores, {high} and {low}")
    t1, t2 = np.quantile(np.minimum(scores, 1), [high, min(high + low, 1)], method="inverted_cdf")
    return float(t1), float(t2)


@dataclass(frozen=True)
class MissCost:
    """What a miss costs, in misses of a high version (HOBBIT §3.4).

    Attributes:
        t1, t2: for a token that is decoded: unimportance up to t1 is read in high precision, up to t2 in low, above it not at all.
        low: bytes of a low version as a share of the high one's, B_l/B_h.
        prompt_low: of a prompt's experts, the share that is read in low precision, the least popular first (Fate §4.5). None: a prompt's
            tokens are weighed by the thresholds, too, and an expert by its dearest token.

    Raises:
        OptionError: out of range.
    """

    t1: float = T1
    t2: float = T2
    low: float = LOW_COST
    prompt_low: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.t1 <= self.t2 <= 1 and 0 <= self.low <= 1 and 0 <= (self.prompt_low or 0) <= 1):
            raise OptionError(f"a miss costs by 0 <= t1 <= t2 <= 1 and by shares between 0 and 1, not {self}")

    def decoded(self, weights: np.ndarray) -> np.ndarray:
        """[n_tokens, n_used] of each chosen expert, by the tokens' gate weights."""
        s = unimportance(weights)
        return np.where(s <= self.t1, 1.0, np.where(s <= self.t2, self.low, 0.0))

    def of(self, event: GateEvent, n_experts: int) -> np.ndarray:
        """[n_experts] float32, of each expert that the event chose; 0 of the others."""
        out = np.zeros(n_experts, np.float32)
        if event.decode or self.prompt_low is None:
            np.maximum.at(out, event.ids.ravel(), self.decoded(event.weights).ravel())
            return out
        count = np.bincount(event.ids.ravel(), minlength=n_experts)
        chosen = np.flatnonzero(count)
        out[chosen] = 1
        out[chosen[np.argsort(count[chosen], kind="stable")][: int(self.prompt_low * len(chosen))]] = self.low
        return out


PAPERS_COST = MissCost()
