"""Which of the chosen experts matter: HOBBIT's unimportance score (§3.2)."""

import numpy as np

T1, T2 = 0.6, 0.9  # HOBBIT's thresholds on Mixtral
LOW_COST = 0.25  # B_l / B_h: an int4 version beside float16 (§3.4)


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


def miss_cost(weights: np.ndarray, t1: float = T1, t2: float = T2, low: float = LOW_COST) -> np.ndarray:
    """What a miss of each chosen expert costs: 1 for the high precision, `low` for the low one, 0 if it would be skipped."""
    s = unimportance(weights)
    return np.where(s <= t1, 1.0, np.where(s <= t2, low, 0.0))
