"""Fits the learned score on traces of one model; needs scikit-learn."""

from __future__ import annotations

import numpy as np

from ..errors import OptionError
from .score import FLOOR, PROB_RATES, STATE_RATE, USE_RATES

DISCOUNT = 0.85  # of a use one token further away
RANK = 48
ALPHA = 300.0


def running_mean(x: np.ndarray, rate: float, first) -> np.ndarray:
    """m[t] = m[t-1] + rate (x[t] - m[t-1]) along the first axis, from m[-1] = first."""
    out, mean = np.empty_like(x), np.broadcast_to(np.asarray(first, x.dtype), x.shape[1:])
    for t in range(len(x)):
        mean = mean + rate * (x[t] - mean)
        out[t] = mean
    return out


def future_use(uses: np.ndarray, discount: float) -> np.ndarray:
    """y[t] = (1 - discount) sum over k >= 1 of discount^(k-1) uses[t+k]."""
    out, later = np.empty_like(uses), np.zeros_like(uses[0])
    for t in range(len(uses) - 1, -1, -1):
        out[t] = later
        later = uses[t] * (1 - discount) + later * discount
    return out


def dense(trace) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and uses of a token-by-token trace, [n_tokens, n_gates, n_experts] each."""
    n, e = trace.model.n_gates, trace.model.n_experts
    if any(len(x.ids) != 1 or x.probs is None for x in trace.events):
        raise OptionError("the score is fitted on traces decoded token by token, with router probabilities")
    t = len(trace.events) // n
    probs = np.stack([x.probs[0] for x in trace.events[: t * n]]).reshape(t, n, e)
    uses = np.zeros((t, n, e), np.float32)
    np.put_along_axis(uses, np.stack([x.ids[0] for x in trace.events[: t * n]]).reshape(t, n, -1), 1, axis=2)
    return probs, uses


def fit_score(trace, discount: float = DISCOUNT, rank: int = RANK, alpha: float = ALPHA) -> dict[str, np.ndarray]:
    """Arrays for `Score(weights=...)`: project [n, rank, 2E], back [n, E, rank], mean [n, 2E], bias [n, E], coef [n, 6].

    Stage one is a reduced-rank ridge regression of every expert's future use on all layers' states; stage two, for each layer,
    a ridge regression on its result and the expert's own running means.
    """
    try:
        from sklearn.linear_model import Ridge
    except ImportError:
        raise OptionError("fitting needs scikit-learn: pip install 'moeoff[fit]'") from None
    probs, uses = dense(trace)
    t, n, e = probs.shape
    log = np.log(probs + FLOOR)
    state = np.concatenate([log, running_mean(log, STATE_RATE, log.mean(axis=0))], axis=2)  # [t, n, 2E]
    flat, y = state.reshape(t, -1), future_use(uses, discount)
    full = Ridge(alpha=alpha).fit(flat, y.reshape(t, -1))
    centre = flat.mean(axis=0)
    predicted = (flat - centre) @ full.coef_.T
    _, vectors = np.linalg.eigh(predicted.T @ predicted)
    vectors = vectors[:, -rank:].astype(np.float32)  # [n E, rank]
    project = (vectors.T @ full.coef_).reshape(-1, n, 2 * e).transpose(1, 0, 2)
    mean, back, bias = centre.reshape(n, 2 * e), vectors.reshape(n, e, -1), y.mean(axis=0)
    # what the policy sees at gate g: layers up to g at this token, the others at the one before
    parts = np.einsum("tgx,grx->tgr", state - mean, project, optimize=True)
    before = np.concatenate([np.zeros_like(parts[:1]), parts[:-1]])
    coef = np.empty((n, 1 + len(PROB_RATES) + len(USE_RATES)))
    offset = np.empty(n)
    own = [running_mean(probs, r, 1 / e) for r in PROB_RATES] + [running_mean(uses, r, trace.model.n_used / e) for r in USE_RATES]
    for g in range(n):
        seen = parts[:, : g + 1].sum(axis=1) + before[:, g + 1 :].sum(axis=1)
        expected = seen @ back[g].T + bias[g]
        x = np.stack([expected, *(f[:, g] for f in own)], axis=-1).reshape(t * e, -1)
        ridge = Ridge(alpha=1.0).fit(x, y[:, g].ravel())
        coef[g], offset[g] = ridge.coef_, ridge.intercept_
    # the first coefficient goes into the matrices
    back, bias = back * coef[:, :1, None], bias * coef[:, :1] + offset[:, None]
    arrays = {"project": project, "back": back, "mean": mean, "bias": bias, "coef": coef}
    return {name: array.astype(np.float16 if name in ("project", "back") else np.float32) for name, array in arrays.items()}
