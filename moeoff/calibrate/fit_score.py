"""Fits the learned score on a trace of one model.

Everything is linear and solved in closed form. Memory and time stay bounded whatever the model: at most `MAX_VALUES` router
probabilities are looked at, each layer's state is compressed until all of them are `MAX_FEATURES` wide, and targets are made one
layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache.score import FLOOR, PROB_RATES, STATE_RATE, USE_RATES
from ..errors import OptionError
from ..predict.base import FitOptions, Progress
from ..predict.recording import Recording
from ..simulate.trace import Trace

# horizons: a bigger buffer evicts what is needed later. (discount of a use one token further away, weight of the layer's
# distance, up to which share of the experts in memory)
HORIZONS = ((0.75, 0.10, 0.35), (0.85, 0.05, 0.65), (0.93, 0.03, 1.0))
RANK = 48
MAX_MATRIX = 9216  # numbers; OpenBLAS would take more threads for a larger one, from those that compute
ALPHAS = (300.0, 1000.0, 3000.0, 10000.0, 30000.0)
BLOCK = 256  # tokens; every fifth block decides between the alphas
MAX_VALUES = 16 << 20
MAX_FEATURES = 1024
MIN_TOKENS = 64
MAX_EVENTS = 200_000  # of a recording


def fit(recording: Recording, options: FitOptions, progress: Progress | None = None) -> dict[str, np.ndarray] | None:
    """The section "score" of a profile; None if the recording has no probabilities."""
    if recording.probs is None:
        return None
    return fit_score(recording.trace(MAX_EVENTS // recording.model.n_gates), progress=progress)


def running_mean(x: np.ndarray, rate: float, first: np.ndarray | float) -> np.ndarray:
    """m[t] = m[t-1] + rate (x[t] - m[t-1]) along the first axis, from m[-1] = first."""
    out, mean = np.empty_like(x), np.array(np.broadcast_to(np.asarray(first, x.dtype), x.shape[1:]))
    for t in range(len(x)):
        mean += rate * (x[t] - mean)
        out[t] = mean
    return out


def next_use(uses: np.ndarray, discount: float) -> np.ndarray:
    """y[t] = discount^(k-1), k >= 1 the tokens until the next use; 0 if there is none. [n_tokens, n_experts] in and out."""
    out, later = np.empty_like(uses), np.zeros_like(uses[0])
    for t in range(len(uses) - 1, -1, -1):
        out[t] = later
        later = np.maximum(uses[t], later * discount)
    return out


def dense(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and uses of a token-by-token trace, [n_gates, n_tokens, n_experts] each; blocks all over it if it is long.

    Raises:
        OptionError: a trace of batches, without probabilities, or too short.
    """
    n, e = trace.model.n_gates, trace.model.n_experts
    tokens = len(trace.events) // n
    if tokens < MIN_TOKENS:
        raise OptionError(f"the score is fitted on at least {MIN_TOKENS} tokens, the trace has {tokens}")
    blocks: Sequence[int] = range(0, tokens, BLOCK)
    most = max(MAX_VALUES // (n * e * BLOCK), 1)
    if len(blocks) > most:
        blocks = [blocks[i * len(blocks) // most] for i in range(most)]
    events = [x for b in blocks for x in trace.events[b * n : min(b + BLOCK, tokens) * n]]
    if any(len(x.ids) != 1 or x.probs is None or x.gate != i % n for i, x in enumerate(events)):
        raise OptionError("the score is fitted on traces decoded token by token, with router probabilities")
    probs = np.stack([x.probs[0] for x in events if x.probs is not None]).reshape(-1, n, e).transpose(1, 0, 2)
    uses = np.zeros(probs.shape, np.float32)
    np.put_along_axis(uses, np.stack([x.ids[0] for x in events]).reshape(probs.shape[1], n, -1).transpose(1, 0, 2).astype(np.int64), 1, axis=2)
    return np.ascontiguousarray(probs), uses


def fit_score(
    trace: Trace, rank: int | None = None, horizons: Sequence[tuple[float, float, float]] = HORIZONS, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Arrays for `Score(weights=...)`, or for an .npz of `np.savez`.

    Args:
        trace: decoded token by token, of text like that to come; its kinds of text in turn rather than one after the other.
        rank: width of the bottleneck; by default `RANK`, less if there are more than 96 experts.
        horizons: of `HORIZONS`' form, the shares ascending.
        progress: called with the layers of the second stage that are done, and all.

    Returns:
        project [n, rank, 2E], mean [n, 2E]: of the bottleneck; for each horizon back [H, n, E, rank], bias [H, n, E] and
        coef [H, n, 5], position [H] and share [H].

    Raises:
        OptionError: a trace of batches, without probabilities, or too short.

    Stage one is a reduced-rank ridge regression of how soon each expert will be used, at all horizons, on all layers' states.
    Stage two, for each layer and horizon, is a ridge regression on its result and the expert's own running means.
    """
    probs, uses = dense(trace)
    n, t, e = probs.shape
    discounts = [h[0] for h in horizons]
    rank = rank or max(min(RANK, MAX_MATRIX // (2 * e)), 8)
    state = np.empty((n, t, 2 * e), np.float32)
    for g in range(n):
        state[g, :, :e] = np.log(probs[g] + FLOOR)
        state[g, :, e:] = running_mean(state[g, :, :e], STATE_RATE, state[g, :, :e].mean(axis=0))
    mean = state.mean(axis=1)
    state -= mean[:, None]
    features, bases = _compress(state)
    project, back, centre = _bottleneck(features, uses, discounts, min(rank, features.shape[1]))
    width = bases.shape[2]
    project = np.stack([bases[g] @ project[g * width : (g + 1) * width] for g in range(n)])  # [n, 2E, rank]
    # what the policy sees at gate g: layers up to g at this token, the others at the one before
    parts = np.einsum("gtx,gxr->gtr", state, project, optimize=True)
    del state, features
    before = np.concatenate([np.zeros_like(parts[:, :1]), parts[:, :-1]], axis=1)
    n_own = len(PROB_RATES) + len(USE_RATES)
    coef, bias = np.empty((len(discounts), n, n_own)), np.empty((len(discounts), n, e))
    for g in range(n):
        seen = parts[: g + 1].sum(axis=0) + before[g + 1 :].sum(axis=0)
        own = [running_mean(probs[g], r, 1 / e) for r in PROB_RATES] + [running_mean(uses[g], r, trace.model.n_used / e) for r in USE_RATES]
        for h, discount in enumerate(discounts):
            expected = seen @ back[h, g].T + centre[h, g]
            x = np.stack([expected, *own], axis=-1).reshape(t * e, -1)
            scale, *coef[h, g], offset = _ridge(x, next_use(uses[g], discount).ravel())
            back[h, g] *= scale  # the first coefficient goes into the matrices
            bias[h, g] = scale * centre[h, g] + offset
        if progress:
            progress(g + 1, n)
    arrays = {"project": project.transpose(0, 2, 1), "back": back, "mean": mean, "bias": bias, "coef": coef}
    arrays |= {"position": np.array([h[1] for h in horizons]), "share": np.array([h[2] for h in horizons])}
    return {name: array.astype(np.float16 if name in ("project", "back") else np.float32) for name, array in arrays.items()}


def _compress(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States [n, t, 2E] as [t, n * width] features, and the bases [n, 2E, width]: principal components if there are too many."""
    n, t, x = state.shape
    width = min(x, max(MAX_FEATURES // n, 4))
    bases = np.empty((n, x, width), np.float32)
    features = np.empty((t, n, width), np.float32)
    for g in range(n):
        bases[g] = np.eye(x) if width == x else np.linalg.eigh(state[g].T @ state[g])[1][:, -width:]
        features[:, g] = state[g] @ bases[g]
    return features.reshape(t, -1), bases


def _bottleneck(features: np.ndarray, uses: np.ndarray, discounts: Sequence[float], rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reduced-rank ridge regression: project [n_features, rank], back [H, n, E, rank], mean target [H, n, E]."""
    n, t, e = uses.shape
    held = np.arange(t) // BLOCK % 5 == 4 if t >= 5 * BLOCK else np.arange(t) % 5 == 4
    grams = [features[rows].T @ features[rows] for rows in (~held, held)]
    moments = np.empty((2, features.shape[1], len(discounts) * n * e), np.float32)
    centre = np.empty((len(discounts), n, e), np.float32)
    for h, discount in enumerate(discounts):
        for g in range(n):
            y = next_use(uses[g], discount)
            centre[h, g] = y.mean(axis=0)
            y -= centre[h, g]
            at = slice((h * n + g) * e, (h * n + g + 1) * e)
            for i, rows in enumerate((~held, held)):
                moments[i, :, at] = features[rows].T @ y[rows]
    # the squared error on what was held out, up to a constant, from sums over all outputs in the basis of the eigenvectors
    values, vectors = np.linalg.eigh(grams[0])
    turned = vectors.T @ moments[0]
    quadratic = (turned @ turned.T) * (vectors.T @ grams[1] @ vectors)
    linear = np.einsum("fo,fo->f", turned, vectors.T @ moments[1])
    shrunk = [1 / (values + alpha) for alpha in ALPHAS]
    alpha = ALPHAS[int(np.argmin([d @ quadratic @ d - 2 * linear @ d for d in shrunk]))]
    values, vectors = np.linalg.eigh(grams[0] + grams[1])
    w = (vectors.T @ (moments[0] + moments[1])) / (np.maximum(values, 0)[:, None] + alpha)  # in the vectors' basis
    fitted = np.sqrt(np.maximum(values, 0))[:, None] * w
    size, left = np.linalg.eigh(fitted @ fitted.T)
    right = fitted.T @ left[:, -rank:] / np.sqrt(np.maximum(size[-rank:], 1e-12))  # [H n E, rank], orthonormal
    return (vectors @ (w @ right)).astype(np.float32), right.astype(np.float32).reshape(len(discounts), n, e, rank), centre


def _ridge(x: np.ndarray, y: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Coefficients and the intercept, last."""
    mean, target = x.mean(axis=0, dtype=np.float64), y.mean(dtype=np.float64)
    x = x - mean.astype(np.float32)
    coef = np.linalg.solve(x.T @ x + alpha * np.eye(x.shape[1]), x.T @ (y - np.float32(target)))
    return np.append(coef, target - mean @ coef)
