"""Which of the chosen experts matter: HOBBIT's unimportance score (§3.2)."""

import numpy as np

T1, T2 = 0.6, 0.9  # HOBBIT's thresholds on Mixtral
LOW_COST = 0.25  # B_l / B_h: an int4 version beside float16 (§3.4)


def unimportance(weights: np.ndarray) -> np.ndarray:
    """Sum of the larger gate weights of the same token, the token's weights scaled to 1. [n_tokens, n_used] in and out."""
    order = np.argsort(-weights, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1)
    total = ranked.sum(axis=1, keepdims=True)
    before = (np.cumsum(ranked, axis=1) - ranked) / np.where(total > 0, total, 1)
    out = np.empty_like(before)
    np.put_along_axis(out, order, before, axis=1)
    return out


def miss_cost(weights: np.ndarray, t1: float = T1, t2: float = T2, low: float = LOW_COST) -> np.ndarray:
    """What a miss of each chosen expert costs: 1 for the high precision, `low` for the low one, 0 if it would be skipped."""
    s = unimportance(weights)
    return np.where(s <= t1, 1.0, np.where(s <= t2, low, 0.0))
