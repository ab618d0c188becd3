"""moeoff's own policy: a learned score of how soon an expert will be used again.

Target: discount^(tokens until the next access). `fit_score` fits two linear stages: a
low-rank map of all layers' router probabilities (current and running mean) to each
expert's expectation; then a regression on it and the expert's running means of
probabilities and accesses. A linear term in the layer's distance breaks near ties. Each
of several discounts has its coefficients: larger buffers look further ahead.

A gate updates its own row, and up to `REFRESH` rows before it by what the low-rank map
has learned since. The arithmetic is native (moeoff-score); for decoded tokens it runs
without Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError
from ..routing.event import GateEvent
from ..routing.recording import Recording
from ..routing.trace import Trace
from ..system.arrays import read_npz, require_arrays
from .base import DEFAULT_FIT, CacheShape, FitOptions, Policy, Progress, Section, chosen
from .fate import CrossLayerGate
from .strategy import Strategy, register

MAX_BYTES = 256 << 20  # limit of the shipped weights' file
ARRAY_NAMES = ("project", "back", "mean", "bias", "coef", "position", "share")
LOG_FLOOR = 1e-4  # least argument of the logarithm
STATE_RATE = 0.15  # rate of the bottleneck's running mean
PROB_RATES = (0.1, 0.02)
USE_RATES = (0.3, 0.05, 0.01)
REFRESH = 12_000  # multiplications per event
# generic coefficients, chosen by hand after the demo model's second stage
GENERIC = (0.5, 0.9, 0.1, 0.25, 0.15)


@register
class Score(Policy):
    """A policy with priority = the estimated discount^(tokens until the next access).

    Options:
        weights: Arrays of `fit_score`. None: those shipped for this model's file name,
            or generic coefficients; "generic": these.

    Raises:
        OptionError: The weights have another shape.
    """

    name, summary, wants_probs = "score", "keeps the highest learned score of reuse", True
    defaults = {"weights": None}
    compared = True

    @classmethod
    def profile_options(cls, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {"weights": arrays}

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray] | None:
        """Return `fit_score`'s arrays of the tokens that fit memory, or None if there
        are too few, or no probabilities.
        """
        n, e = recording.model.n_gates, recording.model.n_experts
        tokens = MAX_FIT_EVENTS // n
        if options.room is not None:
            tokens = min(
                tokens, max(options.room - FIXED_BYTES, 0) // (n * (EVENT_BYTES + VALUE_BYTES * e))
            )
        if recording.probs is None or tokens < MIN_TOKENS:
            return None
        return fit_score(recording.trace(tokens), progress=progress)

    sections = (Section("score", fit),)

    def start(self) -> None:
        from ..llamacpp import native  # other uses do not load llama.cpp

        n, e = self.shape.n_gates, self.shape.n_experts
        self._weights = w = load_weights(self.shape, self.options["weights"])
        rates, rank = (*PROB_RATES, *USE_RATES), w["origin"].size if w else 0
        self._now = np.zeros((2, e), np.float32)  # probabilities and uses
        means = np.full((n, len(rates), e), 1 / e, np.float32)
        means[:, len(PROB_RATES) :] *= self.shape.n_used
        # nearness is the time, in tokens, until a layer runs: only rows of finished
        # layers change, and the buffer sorts no others
        tables = {
            "means": means,
            "rates": rates,
            "due": np.arange(n) / n,
            "scores": np.zeros((n, e)),
            "scratch": np.zeros(3 * e + rank),
            "priorities": self.priorities,
        }
        if w:
            parts = np.einsum("gxr,gx->gr", w["project"], w["mean"])
            tables |= {
                "project": w["project"],
                "origin": w["origin"],
                "parts": parts,
                "sum": np.zeros(rank),
                "own": np.zeros((n, e)),
                "state": w["mean"].copy(),
            }
        self._native = native.Score(
            floor=LOG_FLOOR,
            state_rate=STATE_RATE,
            n_gates=n,
            n_experts=e,
            rank=rank,
            n_prob_rates=len(PROB_RATES),
            n_rates=len(rates),
            n_refresh=max(REFRESH // max(e * rank, 1), 1),
            last=-1,
            n_pass=1,
        )
        self._tables: dict[str, np.ndarray] = {}
        self._set(**tables)
        self._take, self._now_at = native.score_take, [row.ctypes.data for row in self._now]
        self.resize(self.shape.capacity)

    def native(self) -> Any:
        return self._native

    def _set(self, **tables: Any) -> None:
        """Make the native score's tables, which live as long as this object."""
        for name, table in tables.items():
            self._tables[name] = array = np.ascontiguousarray(table, np.float32)
            setattr(self._native, name, array.ctypes.data_as(type(getattr(self._native, name))))

    def resize(self, capacity: float) -> None:
        """Use the coefficients of the new capacity's horizon."""
        super().resize(capacity)
        n, e, w = self.shape.n_gates, self.shape.n_experts, self._weights
        if w:
            h = min(int(np.searchsorted(w["share"], capacity / (n * e))), len(w["share"]) - 1)
            self._set(coef=w["coef"][h], back=w["back"][h], bias=w["bias"][h])
            self._native.position = w["position"][h]
        else:
            self._set(coef=np.tile(GENERIC, (n, 1)))
            self._native.position = 0.03
        np.subtract(
            self._tables["scores"],
            self._native.position * self._tables["due"][:, None],
            out=self.priorities,
        )

    def update(self, event: GateEvent) -> bool:
        n_tokens, (probs, uses) = len(event.ids), self._now
        uses[:] = probs[:] = 0  # also for experts a gate lacks
        experts, count = chosen(event)
        uses[experts] = count / n_tokens
        if event.probs is not None:
            probs[: event.probs.shape[1]] = (
                event.probs[0] if len(event.probs) == 1 else event.probs.mean(axis=0)
            )
        else:  # weights of selected experts instead
            np.add.at(probs, event.ids.ravel(), event.weights.ravel() / n_tokens)
        self._take(self._native, event.gate, n_tokens, event.decode, *self._now_at)
        return True


register(
    Strategy(
        "auto",
        "the best measured parts: score with the cross-layer gate, prefetching where it pays",
        policy=Score,
        predictor=CrossLayerGate,
        ab_tested=True,
    )
)


def load_weights(
    shape: CacheShape, source: str | Mapping[str, np.ndarray] | None
) -> dict[str, np.ndarray] | None:
    """Return `Score`'s weights for a model of this shape, or None."""
    if source == "generic":
        return None
    if source is not None and not isinstance(source, Mapping):
        raise OptionError(
            f"the score's weights are arrays, as fit_score returns them, or generic, not {source!r}"
        )
    arrays = source
    if arrays is None:
        file = (
            resources.files("moeoff")
            / "data"
            / f"score-{Path(shape.model).name.split('-q')[0]}.npz"
        )
        if not shape.model or not file.is_file():
            return None
        arrays = read_npz(str(file), MAX_BYTES)
    n, e, trained = (
        shape.n_gates,
        shape.n_experts,
        np.shape(arrays["bias"] if "bias" in arrays else ())[1:],
    )
    if trained != (n, e) and source is None:  # another model with the same name
        return None
    if trained != (n, e) and len(trained) == 2:
        raise OptionError(
            f"the score's weights are for {trained} gates and experts, the model has {n, e}"
        )
    require_arrays(
        arrays,
        {
            "project": ("f", (n, "rank", 2 * e)),
            "back": ("f", ("horizons", n, e, "rank")),
            "mean": ("f", (n, 2 * e)),
            "bias": ("f", ("horizons", n, e)),
            "coef": ("f", ("horizons", n, len(PROB_RATES) + len(USE_RATES))),
            "position": ("f", ("horizons",)),
            "share": ("f", ("horizons",)),
        },
    )
    weights = {name: np.asarray(arrays[name], np.float32) for name in ARRAY_NAMES}
    weights["origin"] = np.einsum("grx,gx->r", weights["project"], weights["mean"])
    # in the order of multiplication
    weights |= {
        name: np.ascontiguousarray(weights[name].swapaxes(-1, -2)) for name in ("project", "back")
    }
    return weights


# --- the fit ---

# horizons: a larger buffer evicts later accesses. (discount per token, weight of the
# layer's distance, largest share of experts in memory), ascending
HORIZONS = ((0.75, 0.10, 0.35), (0.85, 0.05, 0.65), (0.93, 0.03, 1.0))
RANK = 48
# numbers; OpenBLAS would take more threads for a larger one, from those that compute
MAX_MATRIX = 9216
ALPHAS = (300.0, 1000.0, 3000.0, 10000.0, 30000.0)
BLOCK = 256  # tokens; every fifth block is held out to choose alpha
MAX_VALUES = 16 << 20
MAX_FEATURES = 1024
MIN_TOKENS = 64
MAX_FIT_EVENTS = 200_000  # limit for a recording
# memory as measured: bytes per event, per probability while fitting (24), and constant
EVENT_BYTES, VALUE_BYTES, FIXED_BYTES = 500, 32, 72 << 20


def running_mean(x: np.ndarray, rate: float, first: np.ndarray | float) -> np.ndarray:
    """Return m[t] = m[t-1] + rate (x[t] - m[t-1]) along the first axis, from m[-1] =
    first.
    """
    out, mean = np.empty_like(x), np.array(np.broadcast_to(np.asarray(first, x.dtype), x.shape[1:]))
    for t in range(len(x)):
        mean += rate * (x[t] - mean)
        out[t] = mean
    return out


def next_use(uses: np.ndarray, discount: float) -> np.ndarray:
    """Return y[t] = discount^(k-1), with k >= 1 tokens until the next access, or 0.

    Input and output are [n_tokens, n_experts].
    """
    out, later = np.empty_like(uses), np.zeros_like(uses[0])
    for t in range(len(uses) - 1, -1, -1):
        out[t] = later
        later = np.maximum(uses[t], later * discount)
    return out


def dense(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return a decode trace's probabilities and accesses, [n_gates, n_tokens,
    n_experts] each.

    A long trace is sampled in blocks.

    Raises:
        OptionError: The trace has batches or no probabilities, or is too short.
    """
    n, e = trace.model.n_gates, trace.model.n_experts
    tokens = len(trace.events) // n
    if tokens < MIN_TOKENS:
        raise OptionError(
            f"the score is fitted on at least {MIN_TOKENS} tokens, the trace has {tokens}"
        )
    blocks: Sequence[int] = range(0, tokens, BLOCK)
    most = max(MAX_VALUES // (n * e * BLOCK), 1)
    if len(blocks) > most:
        blocks = [blocks[i * len(blocks) // most] for i in range(most)]
    events = [x for b in blocks for x in trace.events[b * n : min(b + BLOCK, tokens) * n]]
    if any(len(x.ids) != 1 or x.probs is None or x.gate != i % n for i, x in enumerate(events)):
        raise OptionError(
            "the score is fitted on traces decoded token by token, with router probabilities"
        )
    probs = (
        np.stack([x.probs[0] for x in events if x.probs is not None])
        .reshape(-1, n, e)
        .transpose(1, 0, 2)
    )
    uses = np.zeros(probs.shape, np.float32)
    np.put_along_axis(
        uses,
        np.stack([x.ids[0] for x in events])
        .reshape(probs.shape[1], n, -1)
        .transpose(1, 0, 2)
        .astype(np.int64),
        1,
        axis=2,
    )
    return np.ascontiguousarray(probs), uses


def fit_score(
    trace: Trace, rank: int | None = None, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Return arrays for `Score(weights=...)`.

    Stage one is a reduced-rank ridge regression of each expert's target at all horizons
    on all layers' states. Stage two, for each layer and horizon, is a ridge regression
    on its result and the expert's running means.

    Args:
        trace: Trace of single tokens of typical text, with kinds of text interleaved.
        rank: Rank of the bottleneck. Default: `RANK`, less with more than 96 experts.
        progress: Callback with layers of the second stage done and the total.

    Returns:
        project [n, rank, 2E], mean [n, 2E]: of the bottleneck; for each horizon back
        [H, n, E, rank], bias [H, n, E] and coef [H, n, 5], position [H] and share [H].

    Raises:
        OptionError: The trace has batches or no probabilities, or is too short.
    """
    from sklearn.linear_model import Ridge

    probs, uses = dense(trace)
    n, t, e = probs.shape
    discounts = [h[0] for h in HORIZONS]
    rank = rank or max(min(RANK, MAX_MATRIX // (2 * e)), 8)
    state = np.empty((n, t, 2 * e), np.float32)
    for g in range(n):
        state[g, :, :e] = np.log(probs[g] + LOG_FLOOR)
        state[g, :, e:] = running_mean(state[g, :, :e], STATE_RATE, state[g, :, :e].mean(axis=0))
    mean = state.mean(axis=1)
    state -= mean[:, None]
    features, bases = _compress(state)
    project, back, centre = _bottleneck(features, uses, discounts, min(rank, features.shape[1]))
    width = bases.shape[2]
    # [n, 2E, rank]
    project = np.stack([bases[g] @ project[g * width : (g + 1) * width] for g in range(n)])
    # the policy's view at gate g: earlier layers at this token, later ones at the one
    # before
    parts = np.einsum("gtx,gxr->gtr", state, project, optimize=True)
    del state, features
    before = np.concatenate([np.zeros_like(parts[:, :1]), parts[:, :-1]], axis=1)
    n_own = len(PROB_RATES) + len(USE_RATES)
    coef, bias = np.empty((len(discounts), n, n_own)), np.empty((len(discounts), n, e))
    for g in range(n):
        seen = parts[: g + 1].sum(axis=0) + before[g + 1 :].sum(axis=0)
        own = [running_mean(probs[g], r, 1 / e) for r in PROB_RATES] + [
            running_mean(uses[g], r, trace.model.n_used / e) for r in USE_RATES
        ]
        for h, discount in enumerate(discounts):
            expected = seen @ back[h, g].T + centre[h, g]
            x = np.stack([expected, *own], axis=-1).reshape(t * e, -1)
            stage = Ridge(alpha=1.0).fit(x.astype(np.float64), next_use(uses[g], discount).ravel())
            scale, *coef[h, g] = stage.coef_
            back[h, g] *= scale  # the first coefficient goes into the matrices
            bias[h, g] = scale * centre[h, g] + stage.intercept_
        if progress:
            progress(g + 1, n)
    arrays = {
        "project": project.transpose(0, 2, 1),
        "back": back,
        "mean": mean,
        "bias": bias,
        "coef": coef,
    }
    arrays |= {
        "position": np.array([h[1] for h in HORIZONS]),
        "share": np.array([h[2] for h in HORIZONS]),
    }
    return {
        name: array.astype(np.float16 if name in ("project", "back") else np.float32)
        for name, array in arrays.items()
    }


def _compress(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce states [n, t, 2E] to [t, n * width] features of principal components.

    Also return the bases [n, 2E, width].
    """
    from sklearn.decomposition import PCA

    n, t, x = state.shape
    width = min(x, t, max(MAX_FEATURES // n, 4))
    bases = np.empty((n, x, width), np.float32)
    features = np.empty((t, n, width), np.float32)
    for g in range(n):
        bases[g] = (
            np.eye(x)
            if width == x
            else PCA(width, svd_solver="covariance_eigh").fit(state[g]).components_.T
        )
        features[:, g] = state[g] @ bases[g]
    return features.reshape(t, -1), bases


def _bottleneck(
    features: np.ndarray, uses: np.ndarray, discounts: Sequence[float], rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a reduced-rank ridge regression: project [n_features, rank], back [H, n,
    E, rank], mean target [H, n, E].

    Library versions would need all targets in memory at once.
    """
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
            columns = slice((h * n + g) * e, (h * n + g + 1) * e)
            for i, rows in enumerate((~held, held)):
                moments[i, :, columns] = features[rows].T @ y[rows]
    # the held-out squared error, up to a constant, from sums over outputs in the
    # eigenbasis
    values, vectors = np.linalg.eigh(grams[0])
    turned = vectors.T @ moments[0]
    quadratic = (turned @ turned.T) * (vectors.T @ grams[1] @ vectors)
    linear = np.einsum("fo,fo->f", turned, vectors.T @ moments[1])
    shrunk = [1 / (values + alpha) for alpha in ALPHAS]
    alpha = ALPHAS[int(np.argmin([d @ quadratic @ d - 2 * linear @ d for d in shrunk]))]
    values, vectors = np.linalg.eigh(grams[0] + grams[1])
    # in the basis of the eigenvectors
    w = (vectors.T @ (moments[0] + moments[1])) / (np.maximum(values, 0)[:, None] + alpha)
    fitted = np.sqrt(np.maximum(values, 0))[:, None] * w
    size, left = np.linalg.eigh(fitted @ fitted.T)
    # [H n E, rank], orthonormal
    right = fitted.T @ left[:, -rank:] / np.sqrt(np.maximum(size[-rank:], 1e-12))
    return (
        (vectors @ (w @ right)).astype(np.float32),
        right.astype(np.float32).reshape(len(discounts), n, e, rank),
        centre,
    )
