"""`moeoff calibrate --max-loss`: finds what may be left out of a model within a bound of loss, which depends on what is in memory.

One number is searched: τ, the weight below which an expert that is not in memory is left out (`Precision.tau`). It is measured behind a simulated cache
(`Precision.resident`) that holds a share of each layer's experts: each token is decided as if it were decoded alone behind the ones before it, as an
answer is computed, but batches compute many of them at once.

With nothing resident, a few τ show how the divergence grows; with a share s resident it is about (1 - s)² of that. So for each share the search begins at a τ
whose loss should be well within the bound, raises it as long as the upper bound of the loss keeps the limit, and ends at the first that does not.
Such a sequence needs no correction for its length, only for the number of sequences (`upper_loss`). How far it goes at a time depends on the divergence, whose
error is small, and not on the loss, which alone decides where it ends (`Ladder`).

A rule that looks at what is resident feeds on itself, so what was found then writes text freely (`moeoff.calibrate.own_text`): if it certainly loses more than the
bound on that, the largest τ of each share is given up.

All of it fits into a time: as many windows as leave enough for the own text, and no second τ of a share when that is spent. Everything measured is kept for a
search that is interrupted: what is announced and what is found depend on the windows, whose number is kept, too.

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

from ..budget.loss_contract import SECTION, USUAL_SHARE, Candidate, LossContract
from ..engine.llama import Llama
from ..errors import OptionError
from ..files import require_new
from ..gguf.model_index import ModelIndex
from ..memory import parse_size, rss
from ..precision import Precision
from ..sidecar.file import ORIGINAL, ExpertSource, hash64, relative_bytes
from ..sidecar.profile import Profile, profile_output
from .checkpoint import Checkpoint
from .choices import Choices
from .own_text import OPENING, score, write_freely
from .perplexity import Reference, Window, evaluate, interruptible, n_scored, open_model, read_windows
from .record import CalibrationEstimate
from .statistics import Distance, Estimate, Scores, one_sided, upper_loss
from .writer import texts_or_written

__all__ = ["MeasuredCandidate", "RuleEvaluator", "SearchResult", "search_precision"]

SHARES = (0.1, 0.25, 0.5, 0.75)  # of the experts that are simulated to be resident
STEP = 1.12  # from one τ to the next, at least
START = 0.7  # of the divergence that should take the upper bound to the limit, what is expected at the first τ of a share
QUANTILES = (0.15, 0.4, 0.65)  # of the weights: the τ that are tried with nothing resident
OWN_TOKENS = 8192  # at least, that what was found writes, and at most
MOST_OWN_TOKENS = 4 * OWN_TOKENS
DEFAULT_MINUTES = 15
WRITING = 0.2  # of the time, for writing text and reading it once, where none is given
_SLACK = 1.25  # an estimate of a few steps is no closer than that
MIN_WINDOWS = 8
CTX = 512
PROMPT = 64  # tokens of a window that are read: as long as a simulated cache remembers
_SAMPLE = 4  # windows that are enough for what needs no interval
_NOTHING = 1e-9  # resident: a cache is simulated, and holds nothing
_SPREAD = 1.3  # of windows' means, in errors of as many tokens that do not depend on each other
_EXPECTED_STEPS = 2.5  # of a share's sequence, for the estimate of time
_STARTED = "started"
_FIRST_TOKENS = 16  # to see how fast writing is
_WEIGHTS = 1 << 20  # kept of the reference's, at most


@dataclass(frozen=True)
class MeasuredCandidate(Candidate):
    """A candidate of a contract with the intervals of its measurement.

    Attributes:
        low: share of what the gates chose that was served in low precision; nothing that is searched is.
    """

    distance: Distance = field(kw_only=True)
    low: float = field(kw_only=True)

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
        n_prompt: tokens of each window that are its prompt, as `evaluate` has it.
        choices: of the lossless model on the same windows; None: `reference` makes them.

    Attributes:
        seconds: that a pass over all windows took, the last one; 0: there was none.
        scores: of what was measured last.
    """

    scores: Scores

    def __init__(self, llm: Llama, windows: Sequence[Window], tier: str = ORIGINAL, size: float = 1.0, at_once: int = 1, low_size: float = 0.0,
                 progress: Callable[[str, int, int], None] | None = None, n_prompt: int | None = None, choices: Choices | None = None):  # fmt: skip
        self._llm, self.windows, self._tier, self._size, self._at_once, self._low_size = llm, windows, tier, size, at_once, low_size
        self._tell = progress or (lambda what, done, total: None)
        self.n_prompt, self.choices, self.seconds = n_prompt, choices, 0.0
        self._lossless: dict[float, int] = {}  # misses, by what is resident

    @property
    def at_once(self) -> int:
        return self._at_once

    @property
    def sample(self) -> range:
        """Of the windows, a few from all of the text."""
        return range(0, len(self.windows), -(-len(self.windows) // _SAMPLE))

    def reference(self) -> Reference:
        """The lossless model's, in the batches that rules are measured in."""
        self._llm.engine.quality.use(Precision())
        n = self._n_tokens(self.windows)
        n_experts: dict[int, int] = {}
        for tensor in self._llm.engine.buffer.tensors:
            n_experts[tensor.gate] = max(n_experts.get(tensor.gate, 0), tensor.ne[2])
        self.choices, self._lossless = Choices([n_experts[gate] for gate in sorted(n_experts)], _WEIGHTS), {}
        began = time.monotonic()
        self._llm.set_gate_callback(self.choices.observe)
        try:
            found = Reference.record(self._llm, self.windows, "simulated", lambda done: self._tell("lossless", done, n), self.n_prompt)
            self._llm.engine.buffer.drain()
        finally:
            self._llm.set_gate_callback(None)
        self.seconds = time.monotonic() - began
        return found

    def divergence(self, reference: Reference, tau: float) -> float:
        """Mean KL(lossless || this) of the sample with nothing resident."""
        sample = [self.windows[i] for i in self.sample]
        self._llm.engine.quality.use(Precision(tau=tau, resident=_NOTHING))
        n = self._n_tokens(sample)

        def tell(done: int) -> None:
            self._tell(f"nothing resident: τ {tau:.3g}", done, n)

        found = evaluate(self._llm, sample, reference.part(self.sample), mode="simulated", progress=tell, n_prompt=self.n_prompt)
        return found.quality().distance.kl.value

    def measure(self, reference: Reference, precision: Precision) -> MeasuredCandidate:
        """One rule with its share of the experts resident; a lossless one: the tier in the place of all experts."""
        resident = 0.0 if precision.lossless else precision.resident
        self._llm.engine.quality.use(precision)
        self._llm.reset_stats()
        name = f"{resident:.0%} resident: τ {precision.tau:.3g}" if precision.tau else f"all in {self._tier}" if precision.lossless else str(precision)
        n, began = self._n_tokens(self.windows), time.monotonic()
        self.scores = evaluate(self._llm, self.windows, reference, mode="simulated", progress=lambda done: self._tell(name, done, n), n_prompt=self.n_prompt)
        self.seconds = time.monotonic() - began
        stats = self._llm.stats()
        uses = max(self._lossless_choices.uses, 1)
        low = stats.served_low if precision.uses_low else 0
        read = self._size * stats.simulated_misses + self._low_size * low
        lossless = self._lossless_misses(resident) if resident else 0
        found = self.scores.quality().distance
        return MeasuredCandidate(
            tier=self._tier, tau=precision.tau, resident=resident, loss=found.loss.value, upper_loss=upper_loss(found.loss, len(self.windows), self._at_once),
            kl=found.kl.value, cost=read / lossless if lossless else self._size, skipped=stats.skipped / uses, size=self._size,
            distance=found, low=low / uses,
        )  # fmt: skip

    def own_text(self, c: Candidate, opening: int, seed: int) -> np.ndarray:
        """[n_tokens] float64, of a text that a rule has written behind the opening of a window: by how much the log-probability of each of its tokens is
        higher than with the same experts and nothing left out."""
        self._llm.engine.quality.use(c.precision)
        written = write_freely(self._llm, [self.windows[opening % len(self.windows)]], seed)
        self._llm.engine.quality.use(Precision())
        own: np.ndarray = written.log_p[0] - score(self._llm, written)[0]
        return own

    def own_text_loss(self, c: Candidate, least: int, most: int, until: float = math.inf, once: Once = lambda name, make: make()) -> Estimate:
        """Loss of a rule on texts that it has written itself, against the same experts with nothing left out.

        Args:
            least, most: texts, each as long as a window.
            until: of `time.monotonic`, when no further one is begun.
            once: gives what an interrupted search has kept under a name, or makes it.
        """
        n_ctx = len(self.windows[0].tokens)
        lost: list[np.ndarray] = []
        step = max(len(self.windows) // least, 1)
        while len(lost) < least or (len(lost) < most and time.monotonic() < until):
            i = len(lost)
            lost.append(once(f"own-{c.resident:g}-{c.tau:.6g}-{i}", lambda i=i: {"lost": self.own_text(c, i * step, i)})["lost"])  # type: ignore[misc]
            self._tell(f"own text: τ {c.tau:.3g}", len(lost) * n_ctx, max(least, len(lost)) * n_ctx)
        return Estimate.mean(np.stack(lost)).map(math.expm1)

    def time(self) -> tuple[float, float]:
        """Seconds of a window that is read, and of a text of its own that a rule writes and the lossless model reads, about."""
        n_ctx = len(self.windows[0].tokens)
        seconds = []
        for window in self.windows[:2]:  # what the first one waits for comes from the disk once
            began = time.monotonic()
            evaluate(self._llm, [window], mode="simulated", n_prompt=self.n_prompt)
            seconds.append(time.monotonic() - began)
        tokens = list(self.windows[0].tokens)
        self._llm.clear_context()
        self._llm.decode_batch(tokens[:OPENING], 0, OPENING - 1)
        began = time.monotonic()
        for at in range(OPENING, min(OPENING + _FIRST_TOKENS, n_ctx)):
            self._llm.decode_batch([tokens[at]], at, at)
        each = (time.monotonic() - began) / _FIRST_TOKENS
        self._llm.clear_context()
        return seconds[-1], each * (n_ctx - OPENING) + seconds[-1]

    def _lossless_misses(self, resident: float) -> int:
        if resident not in self._lossless:
            self._lossless[resident] = self._lossless_choices.misses(resident)
        return self._lossless[resident]

    @property
    def _lossless_choices(self) -> Choices:
        if self.choices is None:
            raise ValueError("nothing was measured of the lossless model: reference() comes first")
        return self.choices

    @staticmethod
    def _n_tokens(windows: Sequence[Window]) -> int:
        return len(windows) * len(windows[0].tokens)


Points = Sequence[tuple[float, float]]


def first_tau(measured: Points, divergence: float) -> float:
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


class Ladder:
    """Which τ to measure next behind a share of the experts, from how the divergence grows, and never from the loss that is measured.

    Loss is about the divergence KL, and the error of a mean of n tokens' losses at least sqrt(2 KL / n): so its upper bound is about KL + b sqrt(KL). The first τ
    is one where the divergence should be a part of that which takes this bound to the limit; what is measured there corrects both the divergence and b.

    Args:
        measured: τ and KL with nothing resident.
        limit: logarithm of 1 + the bound of loss.
        n_windows, n_tokens: of each so many are scored.
        at_once: see `upper_loss`.
    """

    def __init__(self, measured: Points, limit: float, n_windows: int, n_tokens: int, at_once: int):
        self._measured, self._limit = [(tau, kl) for tau, kl in measured if kl > 0], limit
        self._b = _SPREAD * one_sided(n_windows, at_once) * math.sqrt(2 / (n_windows * n_tokens))
        self._factor = 1.0  # of (1 - s)^2

    def start(self, share: float) -> float:
        """The first τ behind a share, expected to be well within the bound."""
        most = ((math.sqrt(self._b**2 + 4 * self._limit) - self._b) / 2) ** 2
        return first_tau(self._measured, START * most / (self._factor * (1 - share) ** 2))

    def seen(self, c: Candidate) -> None:
        """What was measured of one τ behind a share."""
        there = first_tau([(kl, tau) for tau, kl in self._measured], c.tau)  # the line the other way: its divergence with nothing resident
        if c.kl <= 0 or there <= 0:
            return
        self._factor = c.kl / there / (1 - c.resident) ** 2
        if math.isfinite(c.upper_loss):
            self._b = max((math.log1p(c.upper_loss) - math.log1p(c.loss)) / math.sqrt(c.kl), 0.0)

    def next(self, c: Candidate) -> float:
        """The τ behind one that has kept the bound: a step further, or more where much room is left."""
        return max(c.tau * STEP, self.start(c.resident))


Once = Callable[[str, Callable[[], dict[str, np.ndarray]]], dict[str, np.ndarray]]


def search_tau(
    evaluator: RuleEvaluator, reference: Reference, max_loss: float, until: float = math.inf, once: Once = lambda name, make: make()
) -> list[list[MeasuredCandidate]]:
    """What was measured, behind each share of the experts, in turn: each has its first τ before any has its second.

    Args:
        until: of `time.monotonic`, when to end; the first of each share are measured all the same.
        once: gives what an interrupted search has kept under a name, or makes it.
    """
    weights = evaluator.choices.weights if evaluator.choices is not None else np.zeros(0, np.float32)
    most = float(weights.max(initial=0.0))
    taus = sorted({float(tau) for tau in np.quantile(weights, QUANTILES) if tau > 0}) if len(weights) else []
    points = once("nothing", lambda: {"tau": np.array(taus), "kl": np.array([evaluator.divergence(reference, tau) for tau in taus])})
    scored = n_scored(len(evaluator.windows[0].tokens), evaluator.n_prompt)
    ladder = Ladder(list(zip(points["tau"].tolist(), points["kl"].tolist())), math.log1p(max_loss), len(evaluator.windows), scored, evaluator.at_once)
    found: list[list[MeasuredCandidate]] = [[] for _ in SHARES]
    going = set(SHARES)
    while going:
        least = 0.0  # what held with fewer resident holds
        for share, of_share in zip(SHARES, found):
            if share in going:
                if of_share and time.monotonic() + evaluator.seconds > until:
                    return found
                tau = ladder.next(of_share[-1]) if of_share else max(ladder.start(share), least)
                if not 0 < tau <= most * STEP:
                    going.discard(share)
                    continue
                measure = functools.partial(evaluator.measure, reference, Precision(tau=tau, resident=share))
                of_share.append(_restored(once(f"{share:g}-{tau:.6g}", lambda measure=measure: _arrays(measure()))))  # type: ignore[misc]
                ladder.seen(of_share[-1])
                if of_share[-1].upper_loss > max_loss:
                    going.discard(share)
            least = max([least, *(c.tau for c in of_share if c.upper_loss <= max_loss)])
    return found


def keep_on_own_text(
    evaluator: RuleEvaluator, found: Sequence[Sequence[MeasuredCandidate]], max_loss: float, until: float = math.inf, each: float = 0.0,
    once: Once = lambda name, make: make(),
) -> list[MeasuredCandidate]:  # fmt: skip
    """Those that do not certainly lose more than the bound on text that one of them writes.

    If that one does, the largest τ of each share goes, and with it what would lose too much if loss on own text grew as the divergence does; the boldest
    that is left writes again, if there is time.

    Args:
        until: of `time.monotonic`, when to end; the first writes at least OWN_TOKENS all the same.
        each: seconds that a text takes.
    """
    kept = [list(of_share) for of_share in found]
    n_each = len(evaluator.windows[0].tokens) - OPENING
    least, most = (max(-(-n // n_each), 2) for n in (OWN_TOKENS, MOST_OWN_TOKENS))
    first = True
    while boldest := [held[-1] for of_share in kept if (held := [c for c in of_share if c.upper_loss <= max_loss])]:
        c = next((c for c in boldest if c.resident == USUAL_SHARE), boldest[-1])
        if not first and time.monotonic() + least * each > until:
            break
        first = False
        own = evaluator.own_text_loss(c, least, most, until - each, once)
        if own.low is None or own.low <= max_loss:
            break
        least_of = {c.resident: c.tau for c in boldest}
        grown = math.log1p(own.value) / max(c.kl, 1e-12)
        kept = [[c for c in of_share if c.tau < least_of.get(c.resident, math.inf) and c.kl * grown <= math.log1p(max_loss)] for of_share in kept]
    return list(itertools.chain(*kept))


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
        minutes: that all of it may take, about: of text that is written as of the windows fewer tokens where more would take longer, but as many as an interval
            needs; of own text more than OWN_TOKENS where time is left. Too few for that are refused before it is measured.
        output: the profile; by default where opening the model finds it.
        announce: is told what writing the text and measuring will take, before each starts; an interrupted search has what it wrote and measured when
            it is called again.
        warn: told in a sentence of what an interrupted search left and is damaged.
        **options: of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: no such tier, too little text, too few minutes.
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
    checkpoint = Checkpoint(
        "loss", model_index, given, warn, tokens=tokens, minutes=minutes, max_loss=max_loss, sidecar=sidecar.identity if sidecar else 0, tiers=tiers
    )
    end = time.monotonic() + 60 * minutes
    found: list[MeasuredCandidate] = []
    windows: Sequence[Window] = ()
    n_prompt = min(PROMPT, ctx // 2)

    @contextlib.contextmanager
    def opened(name: str, files: Sequence[str | os.PathLike[str]], choices: Choices | None) -> Iterator[tuple[RuleEvaluator, Callable[..., Any]]]:
        nonlocal windows
        with open_model(model, ctx, tier=name, **options) as llm, interruptible(llm) as call:
            windows = windows or read_windows(llm, files, ctx, max(tokens // (ctx * len(files)), 1))
            if len(windows) < MIN_WINDOWS:
                short = f"the texts make {len(windows)} windows of {ctx} tokens"
                raise OptionError(f"{short}, and at least {MIN_WINDOWS} are needed for an interval: more text is needed", hint={"text": ..., "tokens": ...})
            yield RuleEvaluator(llm, windows, name, sizes.get(name, 1.0), at_once, progress=progress, n_prompt=n_prompt, choices=choices), call

    def kept(base: str) -> Once:
        prefix = f"{base}-{_hash_of(windows):x}"
        return lambda name, make: checkpoint.once(f"{prefix}-{name}", make)

    def announce_writing(estimate: CalibrationEstimate) -> None:
        if estimate.seconds > _SLACK * WRITING * 60 * minutes and not estimate.resumed:
            raise OptionError(
                f"writing the fewest tokens that give an interval takes about {estimate.seconds / 60:.1f} minutes, more than {WRITING:.0%} of `minutes`",
                hint={"minutes": math.ceil(estimate.seconds / 60 / WRITING), "text": ...},
            )
        if announce:
            announce(estimate)

    enough = 21 * ctx // 20  # of what is written, for a window
    writing: dict[str, Any] = {"seconds": WRITING * 60 * minutes, "least": min(MIN_WINDOWS * enough, 21 * tokens // 20)}
    if math.isfinite(minutes):
        writing["after"] = lambda _llm, _n_tokens: (1 - WRITING) * 60 * minutes
    with (
        texts_or_written(model, text, 21 * tokens // 20, checkpoint, progress=progress, announce=announce_writing, **writing, **given) as files,
        contextlib.ExitStack() as stack,
    ):
        with opened(ORIGINAL, files, None) as (evaluator, call):
            resumed, plan_name = checkpoint.has(_STARTED), f"plan-{_hash_of(windows):x}"
            n_searches = 2 if tiers else 1
            plan = checkpoint.load(plan_name)
            if plan is None:
                a_window, a_text = call(evaluator.time)
                own = n_searches * OWN_TOKENS / (ctx - OPENING) * a_text
                before = n_searches * len(QUANTILES) * _SAMPLE * a_window + own
                fixed = 1 + len(tiers)
                passes = fixed + n_searches * len(SHARES) * _EXPECTED_STEPS
                left = end - time.monotonic()
                least = before + (fixed + n_searches * len(SHARES)) * MIN_WINDOWS * a_window
                if least > left:
                    enough_minutes = math.ceil((60 * minutes - left + least) / 60 / (1 if text else 1 - WRITING))
                    raise OptionError(
                        f"the fewest tokens that give an interval take about {least / 60:.1f} minutes, and {left / 60:.1f} of `minutes` are left",
                        hint={"minutes": enough_minutes},
                    )
                n = max(int(min((left - before) / (passes * a_window), len(windows))), MIN_WINDOWS)
                plan = {"n": np.array(n), "a_text": np.array(a_text), "own": np.array(own / n_searches), "seconds": np.array(before + passes * n * a_window)}
                checkpoint.save(plan_name, plan)  # the same windows when it goes on
            n, a_text, own, seconds = int(plan["n"]), float(plan["a_text"]), float(plan["own"]), float(plan["seconds"])
            windows = evaluator.windows = [windows[i * len(windows) // n] for i in range(n)]
            if announce:
                announce(CalibrationEstimate(len(windows) * ctx, seconds, 0, resumed=resumed))
            checkpoint.save(_STARTED, {})
            reference = stack.enter_context(call(evaluator.reference))
            choices, base = evaluator.choices, kept(ORIGINAL)
            until = time.monotonic() + (end - time.monotonic()) / n_searches
            rungs = call(search_tau, evaluator, reference, max_loss, until - own, base)
            found += call(keep_on_own_text, evaluator, rungs, max_loss, until, a_text, base)
        best: str | None = None
        for name in sorted(tiers, key=lambda name: sizes[name]):
            with opened(name, files, choices) as (evaluator, call):
                base = kept(name)
                found.append(_restored(base("all", lambda: _arrays(call(evaluator.measure, reference, Precision())))))  # noqa: B023  it is called here
                if best is None and found[-1].upper_loss <= max_loss:
                    best = name
                    rungs = call(search_tau, evaluator, reference, max_loss, end - own, base)
                    found += call(keep_on_own_text, evaluator, rungs, max_loss, end, a_text, base)
    identity = sidecar.identity if sidecar else 0
    contract = LossContract(identity, _hash_of(windows), len(windows), len(windows) * n_scored(ctx, n_prompt), ctx, tuple(c.without_intervals() for c in found))
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
