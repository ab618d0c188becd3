"""`moeoff calibrate --max-loss`: search how many experts can be skipped within a loss.

The search varies τ, the weight below which an absent expert is skipped
(`Precision.tau`). It simulates a cache (`Precision.resident`) with a
share of each layer's experts: tokens are decided as in decoding, but computed in
batches.

With nothing resident, a few τ show how the divergence grows (`DivergenceModel`). For
each share the search starts at a τ expected well within the bound, and raises it until
the upper bound of the loss exceeds the limit. Such a sequence needs no correction for
its length, only for the number of sequences (`upper_loss`). The divergence, with its
small error, sets the steps; only the loss ends the search.

Residency-dependent rules feed back, because routed experts stay in memory, and given
texts do not show that. So the boldest rules then write text freely, which the lossless
model scores. If a rule certainly exceeds the bound on that, the largest τ of each share
is dropped.

`minutes` is a deadline: parts read fewer windows and try fewer τ, and finished
measurements count. Less own text than OWN_TOKENS must keep the bound by its mean;
without two texts nothing may be skipped.

Every tier of a sidecar is measured for all experts, and τ again in the smallest tier
that keeps the bound.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..budget.loss_contract import DEFAULT_RESIDENT, SECTION, Candidate, LossContract
from ..engine.llama import Llama
from ..errors import OptionError
from ..experts.profile import Profile, profile_output
from ..experts.sidecar import ORIGINAL, ExpertSource, Sidecar, hash64, relative_bytes
from ..gguf.model_index import ModelIndex
from ..precision import Precision
from ..system.files import require_new
from ..system.memory import Budget, rss
from .job import default_texts
from .perplexity import Reference, Window, evaluate, n_scored, open_model, read_windows
from .recorded_routing import RecordedRouting
from .statistics import Distance, Estimate, Scores, log_probs, one_sided, spread, upper_loss

RESIDENT_SHARES = (0.1, 0.25, 0.5, 0.75)  # simulated resident shares
STEP = 1.12  # least ratio of consecutive τ
# share of the limit's divergence that the first τ of a share aims at
START = 0.7
# quantiles of the weights: the τ tried with nothing resident on a few windows
QUANTILES = (0.15, 0.4, 0.65)
SAMPLE_WINDOWS = 4  # windows for estimates without an interval
OPENING = 32  # given tokens of own text
OWN_TOKENS = 8192  # tokens of own text, time permitting
MOST_OWN_TOKENS = 4 * OWN_TOKENS
SEARCHING = 0.75  # share of the time for the search; the rest is for own text
PASSES = 2.5  # planned passes over all windows per share
MIN_WINDOWS = 8
CTX = 512
PROMPT_TOKENS = 64  # prompt tokens of a window, the memory of a simulated cache
_NOTHING = 1e-9  # resident share of an empty simulated cache
_SPREAD = 1.3  # spread of windows' means, in errors of independent tokens


@dataclass(frozen=True)
class MeasuredCandidate(Candidate):
    """A candidate of a contract with the intervals of its measurement."""

    distance: Distance = field(kw_only=True)


@dataclass(frozen=True)
class SearchResult:
    """A search's profile `path`, its bound `max_loss`, and the `measured` candidates
    with intervals.
    """

    path: str
    contract: LossContract
    max_loss: float
    measured: tuple[MeasuredCandidate, ...]


class OutOfTimeError(Exception):
    """The deadline of a search passed in the middle of a measurement."""


def write_freely(
    llm: Llama, window: Sequence[int], seed: int = 0, progress: Callable[[int], None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Continue the opening of a window to its length, token by token.

    Args:
        progress: Callback with the number of tokens before each one.

    Returns:
        Tokens [n_ctx] int32 with the opening; and the writer's log-probabilities [n_ctx
        - OPENING] float64 of those written.
    """
    rng = np.random.default_rng(seed)
    text = np.array(window, np.int32)
    log_p = np.empty(len(text) - OPENING)
    llm.clear_context()
    llm.decode_batch(text[:OPENING].tolist(), 0, OPENING - 1)
    for i in range(OPENING, len(text)):
        if progress:
            progress(i)
        row = log_probs(llm.batch_logits(1))[0].astype(np.float64)
        likely = np.exp(row)
        text[i] = rng.choice(len(row), p=likely / likely.sum())
        log_p[i - OPENING] = row[text[i]]
        llm.decode_batch([int(text[i])], i, i)
    llm.clear_context()
    return text, log_p


def score(llm: Llama, text: np.ndarray) -> np.ndarray:
    """Return this model's log-probabilities of the written tokens, [n_ctx - OPENING]
    float64, in one batch.
    """
    llm.clear_context()
    llm.decode_batch(text[:-1].tolist(), 0, OPENING - 1)
    logp = log_probs(llm.batch_logits(len(text) - OPENING)).astype(np.float64)
    llm.clear_context()
    out: np.ndarray = logp[np.arange(len(logp)), text[OPENING:]]
    return out


class RuleEvaluator:
    """Measurements of rules on windows of text with a simulated cache.

    Args:
        llm: Deterministic model from `open_model`, with a precision that has
            `resident`.
        tier: Tier of all its experts.
        size: Size of the experts relative to the model's own.
        at_once: Number of sequences of the search, see `upper_loss`.
        progress: Callback with stage, amount done and total.
        n_prompt: Prompt length of each window in tokens, as in `evaluate`.
        routing: Routing of the lossless model on the windows; None: `reference` records
            it.
        deadline: Time of `time.monotonic` at which a measurement raises
            `OutOfTimeError`.

    Attributes:
        seconds: Duration of the last pass over all windows, or 0.
        scores: Scores of the last measurement.
    """

    scores: Scores

    def __init__(
        self,
        llm: Llama,
        windows: Sequence[Window],
        tier: str = ORIGINAL,
        size: float = 1.0,
        at_once: int = 1,
        progress: Callable[[str, int, int], None] | None = None,
        n_prompt: int | None = None,
        routing: RecordedRouting | None = None,
        deadline: float = math.inf,
    ):
        self._llm, self.windows, self._tier, self._size, self.at_once = (
            llm,
            windows,
            tier,
            size,
            at_once,
        )
        self._tell = progress or (lambda what, n, total: None)
        self.n_prompt, self.routing, self.seconds = n_prompt, routing or RecordedRouting([]), 0.0
        self._deadline = deadline
        self._lossless_misses: dict[float, int] = {}  # by resident share

    def _stage(self, name: str, n_windows: int) -> Callable[[int], None]:
        def progress(n: int) -> None:
            self._tell(name, n, n_windows * len(self.windows[0].tokens))
            if time.monotonic() > self._deadline:
                raise OutOfTimeError

        return progress

    def reference(self, until: float = math.inf, least: int = 1) -> Reference:
        """Record the lossless model in the batches of later measurements.

        `windows` are then those read.

        Args:
            until: Time of `time.monotonic` after which no window is begun, beyond the
                least number.
        """
        self._llm.engine.quality.use(Precision())
        n_experts: dict[int, int] = {}
        for tensor in self._llm.engine.buffer.tensors:
            n_experts[tensor.gate] = max(n_experts.get(tensor.gate, 0), tensor.ne[2])
        self.routing, self._lossless_misses = (
            RecordedRouting([n_experts[gate] for gate in sorted(n_experts)]),
            {},
        )
        self._llm.set_gate_callback(self.routing.observe)
        try:
            progress = self._stage("lossless", len(self.windows))
            reference = Reference.record(
                self._llm, self.windows, "simulated", progress, self.n_prompt, until, least
            )
            self._llm.engine.buffer.drain()
        finally:
            self._llm.set_gate_callback(None)
        self.windows = self.windows[: len(reference.nll)]
        return reference

    def divergence(self, reference: Reference, tau: float) -> float:
        """Return mean KL(lossless || this) of the first windows, nothing resident."""
        self._llm.engine.quality.use(Precision(tau=tau, resident=_NOTHING))
        sample = self.windows[:SAMPLE_WINDOWS]
        progress = self._stage(f"nothing resident: τ {tau:.3g}", len(sample))
        scores = evaluate(
            self._llm,
            sample,
            reference,
            mode="simulated",
            progress=progress,
            n_prompt=self.n_prompt,
        )
        return scores.quality().distance.kl.value

    def measure(self, reference: Reference, precision: Precision) -> MeasuredCandidate:
        """Measure a rule with its resident share; a lossless rule is the whole tier."""
        resident = 0.0 if precision.lossless else precision.resident
        self._llm.engine.quality.use(precision)
        self._llm.reset_stats()
        name = (
            f"{resident:.0%} resident: τ {precision.tau:.3g}"
            if precision.tau
            else f"all in {self._tier}"
            if precision.lossless
            else str(precision)
        )
        began = time.monotonic()
        self.scores = evaluate(
            self._llm,
            self.windows,
            reference,
            mode="simulated",
            progress=self._stage(name, len(self.windows)),
            n_prompt=self.n_prompt,
        )
        self.seconds = time.monotonic() - began
        stats = self._llm.stats()
        if resident and resident not in self._lossless_misses:
            self._lossless_misses[resident] = self.routing.misses(resident)
        lossless = self._lossless_misses.get(resident, 0)
        distance = self.scores.quality().distance
        return MeasuredCandidate(
            tier=self._tier,
            tau=precision.tau,
            resident=resident,
            loss=distance.loss.value,
            upper_loss=upper_loss(distance.loss, len(self.windows), self.at_once),
            kl=distance.kl.value,
            cost=self._size * stats.simulated_misses / lossless if lossless else self._size,
            skipped=stats.skipped / max(self.routing.uses, 1),
            size=self._size,
            distance=distance,
        )

    def own_text(
        self, c: Candidate, opening: int, seed: int, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Return log-probabilities [n_tokens] float64 of a text that a rule has written
        after a window's opening, minus those with nothing skipped.
        """
        self._llm.engine.quality.use(c.precision)
        text, log_p = write_freely(
            self._llm, self.windows[opening % len(self.windows)].tokens, seed, progress
        )
        self._llm.engine.quality.use(Precision())
        own: np.ndarray = log_p - score(self._llm, text)
        return own

    def own_text_loss(
        self, c: Candidate, least: int, most: int, until: float = math.inf
    ) -> Estimate | None:
        """Return a rule's loss on texts it has written, relative to nothing skipped.

        With fewer than `least` texts, the estimate's low end is its mean; with fewer
        than two texts there is none.

        Args:
            least, most: Number of texts, each as long as a window.
            until: Time of `time.monotonic` after which only the first `least` texts are
                begun.
        """
        lost: list[np.ndarray] = []
        step, length = max(len(self.windows) // least, 1), len(self.windows[0].tokens)
        with contextlib.suppress(OutOfTimeError):
            while len(lost) < least or (len(lost) < most and time.monotonic() < until):
                i = len(lost)
                stage = self._stage(f"own text: τ {c.tau:.3g}", max(least, i + 1))

                def progress(
                    n: int, begin: int = i * length, stage: Callable[[int], None] = stage
                ) -> None:
                    stage(begin + n)

                lost.append(self.own_text(c, i * step, i, progress))
                progress(length)
        if len(lost) < min(least, 2):
            return None
        loss = Estimate.mean(np.stack(lost)).map(math.expm1)
        return loss if len(lost) >= least else replace(loss, low=loss.value)


class DivergenceModel:
    """A model of the divergence at τ with a resident share s, and of the loss's
    bound.

    KL = scale τ^power (1 - s)^2, and the bound is KL + b sqrt(KL): the error of a mean
    of n tokens' losses is at least sqrt(2 KL / n).

    Args:
        measured: (τ, KL) with nothing resident.
        limit: Logarithm of 1 + the bound of loss.
        n_windows, n_tokens: Number of windows, and of scored tokens in each.
        at_once: See `upper_loss`.
    """

    def __init__(
        self,
        measured: Sequence[tuple[float, float]],
        limit: float,
        n_windows: int,
        n_tokens: int,
        at_once: int,
    ):
        points = np.log([(tau, kl) for tau, kl in measured if kl > 0]).reshape(-1, 2)
        self._power, self._log_scale = math.nan, math.nan
        if len(points) > 1:
            self._power, self._log_scale = map(float, np.polyfit(points[:, 0], points[:, 1], 1))
        self._limit, self._b = (
            limit,
            _SPREAD * one_sided(n_windows, at_once) * math.sqrt(2 / (n_windows * n_tokens)),
        )

    def tau(self, share: float) -> float:
        """Return a τ expected well within the bound for a share; NaN if unknown."""
        most = ((math.sqrt(self._b**2 + 4 * self._limit) - self._b) / 2) ** 2
        return (
            math.exp(
                (math.log(START * most) - 2 * math.log1p(-share) - self._log_scale) / self._power
            )
            if self._power > 0
            else math.nan
        )

    def learn(self, c: Candidate) -> None:
        """Fit scale and b to a measurement."""
        if c.kl > 0:
            self._log_scale = (
                math.log(c.kl) - 2 * math.log1p(-c.resident) - self._power * math.log(c.tau)
            )
            if math.isfinite(c.upper_loss):
                self._b = max(
                    (math.log1p(c.upper_loss) - math.log1p(c.loss)) / math.sqrt(c.kl), 0.0
                )


def search_tau(
    evaluator: RuleEvaluator, reference: Reference, max_loss: float, until: float = math.inf
) -> list[list[MeasuredCandidate]]:
    """Return the candidates of each share, measuring the first τ of all shares first.

    Args:
        until: Time of `time.monotonic` at which to end. The first τ of each share may
            run until the evaluator's deadline.
    """
    by_share: dict[float, list[MeasuredCandidate]] = {share: [] for share in RESIDENT_SHARES}
    with contextlib.suppress(OutOfTimeError):
        _search_tau(evaluator, reference, max_loss, until, by_share)
    return list(by_share.values())


def _search_tau(
    evaluator: RuleEvaluator,
    reference: Reference,
    max_loss: float,
    until: float,
    by_share: dict[float, list[MeasuredCandidate]],
) -> None:
    """Append measurements to `by_share`."""
    weights = evaluator.routing.weights
    most = float(weights.max(initial=0.0))
    taus = (
        sorted({float(tau) for tau in np.quantile(weights, QUANTILES) if tau > 0})
        if len(weights)
        else []
    )
    points = [(tau, evaluator.divergence(reference, tau)) for tau in taus]
    scored = n_scored(len(evaluator.windows[0].tokens), evaluator.n_prompt)
    growth = DivergenceModel(
        points, math.log1p(max_loss), len(evaluator.windows), scored, evaluator.at_once
    )
    unfinished = list(RESIDENT_SHARES)
    while unfinished:
        bold_enough = 0.0  # a τ that holds with fewer resident holds
        for share, candidates in by_share.items():
            if share in unfinished:
                if candidates and time.monotonic() + evaluator.seconds > until:
                    return
                tau = max(
                    growth.tau(share), candidates[-1].tau * STEP if candidates else bold_enough
                )
                if not 0 < tau <= most * STEP:
                    unfinished.remove(share)
                    continue
                c = evaluator.measure(reference, Precision(tau=tau, resident=share))
                candidates.append(c)
                growth.learn(c)
                if c.upper_loss > max_loss:
                    unfinished.remove(share)
            bold_enough = max(
                [bold_enough, *(c.tau for c in candidates if c.upper_loss <= max_loss)]
            )


def keep_on_own_text(
    evaluator: RuleEvaluator,
    by_share: Sequence[Sequence[MeasuredCandidate]],
    max_loss: float,
    until: float = math.inf,
) -> list[MeasuredCandidate]:
    """Return the candidates that do not certainly exceed the bound on text they write.

    The boldest candidate writes. If it exceeds the bound, the largest τ of each share
    is dropped, as are others whose extrapolated loss is too high, and the next boldest
    writes if there is time.

    Args:
        until: Time of `time.monotonic` at which to end. The first writes OWN_TOKENS
            until the evaluator's deadline.

    Returns:
        Nothing if there was no time for two texts.
    """
    remaining, is_validated = [list(candidates) for candidates in by_share], False
    n_each = len(evaluator.windows[0].tokens) - OPENING
    least, most = (max(-(-n // n_each), 2) for n in (OWN_TOKENS, MOST_OWN_TOKENS))
    while boldest := [
        held[-1]
        for candidates in remaining
        if (held := [c for c in candidates if c.upper_loss <= max_loss])
    ]:
        c = next((c for c in boldest if c.resident == DEFAULT_RESIDENT), boldest[-1])
        own = evaluator.own_text_loss(c, least, most, until)
        if own is None:
            return list(itertools.chain(*remaining)) if is_validated else []
        is_validated = True
        if own.low is None or own.low <= max_loss:
            break
        limits = {c.resident: c.tau for c in boldest}
        grown = math.log1p(own.value) / max(c.kl, 1e-12)
        remaining = [
            [
                c
                for c in candidates
                if c.tau < limits.get(c.resident, math.inf) and c.kl * grown <= math.log1p(max_loss)
            ]
            for candidates in remaining
        ]
        if time.monotonic() > until:
            break
    return list(itertools.chain(*remaining))


def find_tiers(
    model_index: ModelIndex, experts: str | os.PathLike[str] | bool, tier: str | None
) -> tuple[Sidecar | None, list[str]]:
    """Return a model's sidecar and its tiers below the model's own precision, or the
    one named `tier`.

    Raises:
        OptionError: A tier is named, and there is no such tier or no sidecar.
    """
    source = ExpertSource.make(model_index, experts, tier or ORIGINAL)
    if source.sidecar is None:
        return None, []
    return source.sidecar, [
        name for name in ([source.tier] if tier else source.sidecar.tiers) if name != ORIGINAL
    ]


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
    **options: Any,
) -> SearchResult:
    """Measure what a model may skip, and its sidecar's tiers. Write the section
    "precision".

    Args:
        text: Files, by default `default_texts`, cut in windows of 512 tokens, or of the
            model's training context if shorter.
        max_loss: Bound of the search; 0.01 is 1 % of perplexity. Later runs may ask for
            other bounds among the measurements.
        tier: The only tier to try. Default: all.
        tokens: Number of tokens in all, equally from each text, for each step.
        minutes: Deadline in minutes. Less time means fewer windows, fewer τ and less
            own text.
        output: Profile path; by default where opening the model finds it.
        **options: Options of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: There is no such tier, too little text, or no time for 8 windows.
        ModelError: The model or profile is invalid.
    """
    started = time.monotonic()
    model = os.fspath(model)
    model_index = ModelIndex.read(model)
    model_index.require_text()
    sidecar, tiers = find_tiers(model_index, experts, tier)
    sizes = {name: relative_bytes(model_index, sidecar, name) for name in tiers} if sidecar else {}
    path = os.fspath(output) if output else profile_output(model_index)
    require_new(path, [*model_index.files, sidecar.path if sidecar else None, *text], "`output`")
    if os.path.exists(path):
        room = (Budget.of(options.get("memory")).most - rss()) // 2
        # fail before the work if the profile is another model's
        Profile.read(path, model_index, room=room)
    ctx = min(CTX, model_index.n_ctx_train or CTX)
    n_prompt = min(PROMPT_TOKENS, ctx // 2)
    how = {
        "experts": sidecar or False,
        "deterministic": True,
        "precision": Precision(tau=_NOTHING, resident=1.0),
    } | options
    n_searches = 2 if tiers else 1
    at_once = len(RESIDENT_SHARES) * n_searches + len(tiers)
    windows: Sequence[Window] = ()
    measured: list[MeasuredCandidate] = []

    def until(share: float) -> float:
        """Return the end of this share of the time left."""
        now = time.monotonic()
        return now + share * max(started + 60 * minutes - now, 0.0)

    @contextlib.contextmanager
    def opened(
        name: str, files: Sequence[str], routing: RecordedRouting | None
    ) -> Iterator[RuleEvaluator]:
        with open_model(model, ctx, tier=name, **how) as llm:
            few = windows or spread(
                read_windows(llm, files, ctx, max(tokens // (ctx * len(files)), 1))
            )
            if len(few) < MIN_WINDOWS:
                short = f"the texts make {len(few)} windows of {ctx} tokens"
                raise OptionError(
                    f"{short}, and at least {MIN_WINDOWS} are needed for an interval: more text is"
                    " needed",
                    hint={"text": ..., "tokens": ...},
                )
            yield RuleEvaluator(
                llm,
                few,
                name,
                sizes.get(name, 1.0),
                at_once,
                progress,
                n_prompt,
                routing,
                deadline=started + 60 * minutes,
            )

    def searched(
        evaluator: RuleEvaluator, reference: Reference, share: float
    ) -> list[MeasuredCandidate]:
        """Search τ for each share of the experts in this share of the time left."""
        end = until(share)
        by_share = search_tau(evaluator, reference, max_loss, until(SEARCHING * share))
        candidates: list[MeasuredCandidate] = keep_on_own_text(evaluator, by_share, max_loss, end)
        return candidates

    with default_texts(text) as files, contextlib.ExitStack() as stack:
        with opened(ORIGINAL, files, None) as evaluator:
            end = until(SEARCHING / (1 + len(tiers) + n_searches * len(RESIDENT_SHARES) * PASSES))
            try:
                reference = stack.enter_context(evaluator.reference(end, MIN_WINDOWS))
            except OutOfTimeError:
                raise OptionError(
                    f"{model}: no time to read {MIN_WINDOWS} windows of {ctx} tokens: give more"
                    " minutes",
                    hint={"minutes": ...},
                ) from None
            windows, routing = evaluator.windows, evaluator.routing
            measured += searched(evaluator, reference, 1 / n_searches)
        best: str | None = None
        for name in sorted(tiers, key=lambda name: sizes[name]):
            if until(1.0) <= time.monotonic():
                break
            with contextlib.suppress(OutOfTimeError), opened(name, files, routing) as evaluator:
                measured.append(evaluator.measure(reference, Precision()))
                if best is None and measured[-1].upper_loss <= max_loss:
                    best = name
                    measured += searched(evaluator, reference, 1.0)
    tokens_hash = hash64(np.array([window.tokens for window in windows], np.int32))
    n_all = len(windows) * n_scored(ctx, n_prompt)
    contract = LossContract(
        sidecar.identity if sidecar else 0, tokens_hash, len(windows), n_all, ctx, tuple(measured)
    )
    Profile.write(path, model_index, {SECTION: contract.to_section()})
    return SearchResult(path, contract, max_loss, tuple(measured))
