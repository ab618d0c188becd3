"""`moeoff calibrate --max-loss`: finds what may be left out of a model within a bound of loss, which depends on what is in memory.

One number is searched: τ, the weight below which an expert that is not in memory is left out (`Precision.tau`). It is measured behind a simulated cache
(`Precision.resident`) that holds a share of each layer's experts: each token is decided as if it were decoded alone behind the ones before it, as an
answer is computed, but batches compute many of them at once.

With nothing resident, a few τ show how the divergence grows; with a share s resident it is about (1 - s)² of that. So for each share the search begins at a τ
whose loss should be well within the bound, raises it by a step as long as the upper bound of the loss keeps the limit, and ends at the first that does not.
Such a sequence needs no correction for its length, only for the number of sequences (`upper_loss`).

A rule that looks at what is resident feeds on itself, so what was found then writes text freely (`moeoff.calibrate.own_text`): if it certainly loses more than the
bound on that, the largest τ of each share is given up.

Every tier of a sidecar is measured in the place of all experts, too, and τ again in the smallest of those that keep the bound.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .. import __version__
from ..budget.loss_contract import SECTION, USUAL_SHARE, Candidate, LossContract
from ..engine.llama import Llama
from ..errors import OptionError
from ..files import require_new
from ..gate_event import GateEvent
from ..gguf.model_index import ModelIndex
from ..memory import parse_size, rss
from ..policies.precision import Precision
from ..sidecar.file import ORIGINAL, ExpertSource, hash64, relative_bytes
from ..sidecar.profile import Profile, profile_output
from .checkpoint import Checkpoint
from .own_text import OPENING, lost, score, write_freely
from .perplexity import Reference, Window, evaluate, interruptible, n_scored, open_model, read_windows
from .record import CalibrationEstimate
from .statistics import Distance, Estimate, Scores, upper_loss
from .writer import texts_or_written

__all__ = ["MeasuredCandidate", "RuleEvaluator", "SearchResult", "search_precision"]

SHARES = (0.1, 0.25, 0.5, 0.75)  # of the experts that are simulated to be resident
STEP = 1.12  # from one τ to the next
START = 0.4  # of the bound, the loss that is expected at the first τ of a share
QUANTILES = (0.1, 0.25, 0.45, 0.65)  # of the weights: the τ that are tried with nothing resident
OWN_TOKENS = 8192  # at least, that what was found writes
MIN_WINDOWS = 8
CTX = 512
_SAMPLE = 8  # windows that are enough for what needs no interval
_NOTHING = 1e-9  # resident: a cache is simulated, and holds nothing
_EXPECTED_STEPS = 4  # of a share's sequence, for the estimate of time; the lossless misses are one more
_STARTED = "started"
_FIRST_TOKENS = 16  # to see how fast writing is
_WEIGHTS = 1 << 20  # kept of the reference's, at most


@dataclass(frozen=True)
class MeasuredCandidate(Candidate):
    """A candidate of a contract with the intervals of its measurement.

    Attributes:
        low, rerouted: shares of what the gates chose that was served in low precision, and that gave its place to another; nothing that is searched does that.
    """

    distance: Distance = field(kw_only=True)
    low: float = field(kw_only=True)
    rerouted: float = field(kw_only=True)

    def without_intervals(self) -> Candidate:
        return Candidate(**{f.name: getattr(self, f.name) for f in fields(Candidate)})


@dataclass(frozen=True)
class SearchResult:
    """path: of the profile; max_loss: the bound that was searched for; measured: the contract's candidates with their intervals."""

    path: str
    contract: LossContract
    max_loss: float
    measured: tuple[MeasuredCandidate, ...]


class RuleEvaluator:
    """Measures rules on windows of text, behind a simulated cache.

    Args:
        llm: deterministic, opened by `open_model` with a precision that has `resident`.
        tier: that all its experts are in.
        size: of the experts, in bytes for each byte of the model's own.
        at_once: sequences that a search makes, see `upper_loss`.
        low_size: of the tier that serves low, the same; 0: the rules serve nothing low.
        progress: told what is being done, how much of it is done and how much there is.

    Attributes:
        scores: of what was measured last.
    """

    scores: Scores

    def __init__(self, llm: Llama, windows: Sequence[Window], tier: str = ORIGINAL, size: float = 1.0, at_once: int = 1, low_size: float = 0.0,
                 progress: Callable[[str, int, int], None] | None = None):  # fmt: skip
        self._llm, self.windows, self._tier, self._size, self._at_once, self._low_size = llm, windows, tier, size, at_once, low_size
        self._tell = progress or (lambda what, done, total: None)
        self._lossless: dict[float, float] = {}  # misses of a token, by what is resident

    @property
    def sample(self) -> Sequence[Window]:
        """A few windows from all of the text."""
        return self.windows[:: -(-len(self.windows) // _SAMPLE)]

    def reference(self) -> Reference:
        """The lossless model's, in the batches that rules are measured in."""
        self._llm.engine.quality.use(Precision())
        n = self._n_tokens(self.windows)
        return Reference.record(self._llm, self.windows, "simulated", lambda done: self._tell("lossless", done, n))

    def weights(self) -> np.ndarray:
        """[n] float32, weights of experts that the sample's tokens chose, in no order."""
        self._llm.engine.quality.use(Precision())
        kept: list[np.ndarray] = []

        def keep(event: GateEvent) -> None:
            if sum(map(len, kept)) < _WEIGHTS:
                kept.append(event.weights.ravel().copy())

        self._llm.set_gate_callback(keep)
        try:
            evaluate(self._llm, self.sample, mode="simulated")
            self._llm.engine.buffer.drain()
        finally:
            self._llm.set_gate_callback(None)
        return np.concatenate(kept)

    def divergence(self, reference: Reference, tau: float) -> float:
        """Mean KL(lossless || this) of the sample with nothing resident."""
        sample = self.sample
        part = reference.part(range(0, len(self.windows), -(-len(self.windows) // _SAMPLE)))
        self._llm.engine.quality.use(Precision(tau=tau, resident=_NOTHING))
        n = self._n_tokens(sample)
        found = evaluate(self._llm, sample, part, mode="simulated", progress=lambda done: self._tell(f"nothing resident: τ {tau:.3g}", done, n))
        return found.quality().distance.kl.value

    def measure(self, reference: Reference, precision: Precision) -> MeasuredCandidate:
        """One rule with its share of the experts resident; a lossless one: the tier in the place of all experts."""
        resident = 0.0 if precision.lossless else precision.resident
        lossless = self._lossless_misses(resident) if resident else 0.0
        self._llm.engine.quality.use(precision)
        self._llm.reset_stats()
        name = f"{resident:.0%} resident: τ {precision.tau:.3g}" if precision.tau else f"all in {self._tier}" if precision.lossless else str(precision)
        n = self._n_tokens(self.windows)
        self.scores = evaluate(self._llm, self.windows, reference, mode="simulated", progress=lambda done: self._tell(name, done, n))
        stats = self._llm.stats()
        uses = max(stats.expert_uses // 2, 1)  # the other half is the prompt's
        low = stats.served_low if precision.uses_low else 0
        read = self._size * stats.simulated_misses + self._low_size * low
        found = self.scores.quality().distance
        return MeasuredCandidate(
            tier=self._tier, tau=precision.tau, resident=resident, loss=found.loss.value, upper_loss=upper_loss(found.loss, len(self.windows), self._at_once),
            kl=found.kl.value, cost=read / n / lossless if lossless else self._size, skipped=stats.skipped / uses, size=self._size,
            distance=found, low=low / uses, rerouted=stats.rerouted / uses,
        )  # fmt: skip

    def own_text_loss(self, c: Candidate, n_tokens: int) -> Estimate:
        """Loss of a rule on text that it has written itself, against the same experts with nothing left out."""
        n_ctx = len(self.windows[0].tokens)
        n_texts = max(-(-n_tokens // (n_ctx - OPENING)), 2)
        openings = list(itertools.islice(itertools.cycle(self.windows[:: max(len(self.windows) // n_texts, 1)]), n_texts))
        name, n = f"own text: τ {c.tau:.3g}", n_texts * n_ctx
        self._llm.engine.quality.use(c.precision)
        written = write_freely(self._llm, openings, progress=lambda done: self._tell(name, done, n))
        self._llm.engine.quality.use(Precision())
        return lost(written, score(self._llm, written))

    def own_text_seconds(self, n_tokens: int = OWN_TOKENS) -> float:
        """That `own_text_loss` takes, about: a token at a time, and then in batches."""
        tokens = list(self.windows[0].tokens)
        self._llm.clear_context()
        self._llm.decode_batch(tokens[:OPENING], 0, OPENING - 1)
        began = time.monotonic()
        for at in range(OPENING, min(OPENING + _FIRST_TOKENS, len(tokens))):
            self._llm.decode_batch([tokens[at]], at, at)
        seconds = time.monotonic() - began
        self._llm.clear_context()
        return seconds / _FIRST_TOKENS * n_tokens

    def _lossless_misses(self, resident: float) -> float:
        if resident not in self._lossless:
            self._llm.engine.quality.use(Precision(tau=_NOTHING, resident=resident))
            self._llm.reset_stats()
            n = self._n_tokens(self.windows)  # all of them, as of a rule: texts differ in how much of them is read
            evaluate(self._llm, self.windows, mode="simulated", progress=lambda done: self._tell(f"{resident:.0%} resident: lossless", done, n))
            self._lossless[resident] = self._llm.stats().simulated_misses / n
        return self._lossless[resident]

    @staticmethod
    def _n_tokens(windows: Sequence[Window]) -> int:
        return len(windows) * len(windows[0].tokens)


def first_tau(measured: Sequence[tuple[float, float]], divergence: float) -> float:
    """The τ of this divergence with nothing resident, on the line through measured points (τ, KL) in logarithms; beyond them on that of the last two."""
    points = sorted((math.log(tau), math.log(kl)) for tau, kl in measured if kl > 0)
    rising = [points[0]] if points else []
    for point in points[1:]:
        if point[0] > rising[-1][0] and point[1] > rising[-1][1]:
            rising.append(point)
    if len(rising) < 2:
        return min((tau for tau, _ in measured), default=0.0)
    wanted = math.log(divergence)
    pair = next((pair for pair in itertools.pairwise(rising) if wanted <= pair[1][1]), (rising[-2], rising[-1]))
    (x0, y0), (x1, y1) = pair
    return math.exp(x0 + (wanted - y0) * (x1 - x0) / (y1 - y0))


def search_tau(evaluator: RuleEvaluator, reference: Reference, max_loss: float, own_tokens: int = OWN_TOKENS,
               once: Callable[[str, Callable[[], MeasuredCandidate]], MeasuredCandidate] = lambda name, make: make()) -> list[MeasuredCandidate]:  # fmt: skip
    """What was measured, behind each share of the experts. What certainly loses more than the bound on its own text is not among it.

    Args:
        once: gives what an interrupted search has measured under a name, or makes it.
    """
    weights = evaluator.weights()
    most = float(weights.max())
    taus = sorted({float(tau) for tau in np.quantile(weights, QUANTILES) if tau > 0})
    measured = [(tau, evaluator.divergence(reference, tau)) for tau in taus]
    found: list[list[MeasuredCandidate]] = []
    least = 0.0  # what held with fewer resident holds
    for share in SHARES:
        tau = max(first_tau(measured, START * math.log1p(max_loss) / (1 - share) ** 2), least)
        found.append([])
        while 0 < tau <= most * STEP:
            measure = functools.partial(evaluator.measure, reference, Precision(tau=tau, resident=share))
            found[-1].append(once(f"{share:g}-{tau:.6g}", measure))
            if found[-1][-1].upper_loss > max_loss:
                break
            least, tau = tau, tau * STEP
    while boldest := [held[-1] for of_share in found if (held := [c for c in of_share if c.upper_loss <= max_loss])]:
        own = evaluator.own_text_loss(next((c for c in boldest if c.resident == USUAL_SHARE), boldest[-1]), own_tokens)
        if own.low is None or own.low <= max_loss:
            break
        least_of = {c.resident: c.tau for c in boldest}
        found = [[c for c in of_share if c.tau < least_of.get(c.resident, math.inf)] for of_share in found]
    return list(itertools.chain(*found))


def search_precision(
    model: str | os.PathLike[str],
    text: Sequence[str | os.PathLike[str]],
    max_loss: float,
    *,
    tier: str | None = None,
    experts: str | os.PathLike[str] | bool = "auto",
    tokens: int = 16384,
    minutes: float = math.inf,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    announce: Callable[[CalibrationEstimate], None] | None = None,
    warn: Callable[[str], None] | None = None,
    **options: Any,
) -> SearchResult:
    """Measures what may be left out of a model, and its sidecar's tiers, and writes the profile's section "precision".

    Args:
        text: texts, none: the model writes some; their windows are of 512 tokens, or of the model's training context if that is shorter.
        max_loss: the bound to search for, 0.01 is 1 % of perplexity. Other bounds can be asked for later: they choose among
            what was measured.
        tier: the only one of the sidecar that is tried. Default: all of them.
        tokens: in all, as many from each text; each step computes all of them.
        minutes: fewer tokens where all would take longer than about this, half of it for those that are written, but never fewer than an interval needs.
        output: the profile; by default where opening the model finds it.
        announce: is told what writing the text and measuring will take, before each starts; an interrupted search has what it wrote and measured when
            it is called again.
        warn: told in a sentence of what an interrupted search left and is damaged.
        **options: of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: no such tier, too little text.
        ModelError: the model or profile is no good.
    """
    model = os.fspath(model)
    model_index = ModelIndex.read(model)
    model_index.require_experts()
    model_index.require_text()
    sidecar = ExpertSource.make(model_index, experts, ORIGINAL).sidecar
    if tier and not sidecar:
        raise OptionError(f"{model}: has no sidecar with lower precision, which moeoff convert makes", hint={"experts": ...})
    tiers = [name for name in sidecar.tiers if name != ORIGINAL] if sidecar else []
    sizes = {name: relative_bytes(model_index, sidecar, name) for name in tiers} if sidecar else {}
    if sidecar and tier:
        tiers = [sidecar.tier(tier) or tier]
    path = os.fspath(output) if output else profile_output(model_index)
    require_new(path, [*model_index.files, sidecar.path if sidecar else None, *text], "`output`")
    if os.path.exists(path):
        room = (parse_size(memory) - rss()) // 2 if (memory := options.get("memory")) is not None else None
        Profile.read(path, model_index, room=room)  # another model's would be refused in the end: say so before the work
    ctx = min(CTX, model_index.n_ctx_train or CTX)
    given = options
    options = {"flash_attn": True, "experts": sidecar or False, "deterministic": True, "precision": Precision(tau=_NOTHING, resident=1.0)} | options
    at_once = len(SHARES) * (2 if tiers else 1) + len(tiers)
    key = {"moeoff": __version__, "tokens": tokens, "max_loss": max_loss, "sidecar": sidecar.identity if sidecar else 0}
    checkpoint = Checkpoint(f"{model_index.identity}-loss", key, warn)
    found: list[MeasuredCandidate] = []
    windows: Sequence[Window] = ()

    @contextlib.contextmanager
    def opened(name: str, files: Sequence[str | os.PathLike[str]]) -> Iterator[tuple[RuleEvaluator, Callable[..., Any]]]:
        nonlocal windows
        with open_model(model, ctx, tier=name, **options) as llm, interruptible(llm) as call:
            windows = windows or read_windows(llm, files, ctx, max(tokens // (ctx * len(files)), 1))
            if len(windows) < MIN_WINDOWS:
                short = f"the texts make {len(windows)} windows of {ctx} tokens"
                raise OptionError(f"{short}, and at least {MIN_WINDOWS} are needed for an interval: more text is needed", hint={"text": ..., "tokens": ...})
            yield RuleEvaluator(llm, windows, name, sizes.get(name, 1.0), at_once, progress=progress), call

    def kept(base: str) -> Callable[[str, Callable[[], MeasuredCandidate]], MeasuredCandidate]:
        return lambda name, make: _restored(checkpoint.once(f"{base}-{_hash_of(windows):x}-{name}", lambda: _arrays(make())))

    with texts_or_written(model, text, 21 * tokens // 20, checkpoint, progress=progress, announce=announce, **given) as files, contextlib.ExitStack() as stack:
        with opened(ORIGINAL, files) as (evaluator, call):
            began = time.monotonic()
            call(evaluator.weights)  # the sample: how fast this is
            passes = len(SHARES) * (_EXPECTED_STEPS + 1) * (2 if tiers else 1) + len(tiers) + 2
            seconds = (time.monotonic() - began) * len(windows) / len(evaluator.sample) * passes
            if seconds > 30 * minutes:
                n = max(int(len(windows) * 30 * minutes / seconds), MIN_WINDOWS)
                seconds *= n / len(windows)
                windows = evaluator.windows = [windows[i * len(windows) // n] for i in range(n)]
            writing = call(evaluator.own_text_seconds)
            own_tokens = int(OWN_TOKENS * min(60 * minutes / (2 * writing), 1.0))
            if announce:
                announce(CalibrationEstimate(len(windows) * ctx, seconds + writing * own_tokens / OWN_TOKENS, 0, resumed=checkpoint.has(_STARTED)))
            checkpoint.save(_STARTED, {})
            reference = stack.enter_context(call(evaluator.reference))
            found += call(search_tau, evaluator, reference, max_loss, own_tokens, kept(ORIGINAL))
        best: str | None = None
        for name in sorted(tiers, key=lambda name: sizes[name]):
            with opened(name, files) as (evaluator, call):
                found.append(call(evaluator.measure, reference, Precision()))
                if best is None and found[-1].upper_loss <= max_loss:
                    best = name
                    found += call(search_tau, evaluator, reference, max_loss, own_tokens, kept(name))
    identity = sidecar.identity if sidecar else 0
    contract = LossContract(identity, _hash_of(windows), len(windows), len(windows) * n_scored(ctx), ctx, tuple(c.without_intervals() for c in found))
    Profile.write(path, model_index, {SECTION: contract.to_section()})
    checkpoint.remove()
    return SearchResult(path, contract, max_loss, tuple(found))


def _hash_of(windows: Sequence[Window]) -> int:
    return hash64(np.array([window.tokens for window in windows], np.int32))


def _arrays(c: MeasuredCandidate) -> dict[str, np.ndarray]:
    distance = {f"{name}_{end}": getattr(estimate, end) for name, estimate in c.distance._asdict().items() for end in ("value", "low", "high")}
    return {name: np.array(value) for name, value in ({f.name: getattr(c, f.name) for f in fields(c) if f.name != "distance"} | distance).items()}


def _restored(arrays: dict[str, np.ndarray]) -> MeasuredCandidate:
    values = {name: array.item() for name, array in arrays.items()}
    distance = Distance(*(Estimate(*(values.pop(f"{name}_{end}") for end in ("value", "low", "high"))) for name in Distance._fields))
    return MeasuredCandidate(**values, distance=distance)
