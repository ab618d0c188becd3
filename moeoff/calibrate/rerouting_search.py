"""`moeoff calibrate --max-loss`: how much rerouting, low precision on a miss and skipping a model bears, which depends on what is in memory.

Measured behind a simulated cache (`Precision.resident`) that holds a share of each layer's experts: each token is decided as if it
were decoded alone behind the ones before it, as an answer is computed, but batches compute many of them at once. Half of the experts
are simulated first: rerouting alone by bisection; then less of it together with more skipping, as long as the bound holds, and likewise with
more misses that are served by a low tier, if there is one. Of what holds there, what reads least is looked for with the other shares, and the
most careful of these rules is measured with all of them: a budget may use a rule that keeps the bound at the nearest shares below and above.

Rerouting feeds on itself, so the best rule then writes text freely (`moeoff.calibrate.rerouting_search`): if it loses more than the bound on its own
text, it is given up with all that gives up as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..budget.loss_contract import USUAL_SHARE, Candidate
from ..engine.llama import Llama
from ..gate_event import GateEvent
from ..policies.precision import Precision
from .perplexity import Reference, Window, evaluate
from .statistics import Distance, Estimate, log_probs, upper_loss

__all__ = ["FreeText", "LOWS", "REROUTES", "ReroutingEvaluator", "SHARES", "SKIPS", "lost", "score", "search_rerouting", "write_freely"]

REROUTES = (0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
SKIPS = (0.9, 0.8, 0.7, 0.6, 0.5)  # Precision.t2, and t1: only what is not skipped is read
LOWS = (0.9, 0.7, 0.5, 0.3, 0.1)  # Precision.t1, where the rest is served low
SHARES = (0.1, 0.25, 0.5, 0.75)  # of the experts that are simulated to be resident
_LESS = 2  # steps of rerouting that are given up for more of the other
_TRIES = 4  # rules that are measured with the other shares, until one holds there
_NEXT_TO_NOTHING = 1e-9  # rerouting that makes a cache be simulated, and changes nothing
_SAMPLE = 8  # windows that tell how much the lossless model would read
_FREE_TOKENS = 2048  # that a rule writes


@dataclass(frozen=True)
class MeasuredCandidate(Candidate):
    """A candidate of a contract with the intervals of its measurement."""

    distance: Distance = field(kw_only=True)

    @classmethod
    def of(cls, distance: Distance, n_windows: int, **facts: Any) -> MeasuredCandidate:
        return cls(loss=distance.loss.value, upper_loss=upper_loss(distance.loss, n_windows), kl=distance.kl.value, distance=distance, **facts)

    def without_intervals(self) -> Candidate:
        return Candidate(**{f.name: getattr(self, f.name) for f in fields(Candidate)})


class ReroutingEvaluator:
    """Measures rules on windows of text.

    Args:
        llm: deterministic, opened by `open_model` with a precision that reroutes.
        tier: that all its experts are in.
        size: of the experts, in bytes for each byte of the model's own.
        low: the tier that the model was opened to serve misses by, and its size; None: it has none.
        progress: told what is being done, how much of it is done and how much there is.
    """

    def __init__(
        self, llm: Llama, windows: Sequence[Window], tier: str, size: float, low: tuple[str, float] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ):  # fmt: skip
        self._llm, self.windows, self._tier, self._size, self.low = llm, windows, tier, size, low
        self._tell = progress or (lambda what, done, total: None)
        self._lossless: dict[float, float] = {}  # misses of a token, by what is resident

    def reference(self) -> Reference:
        """The lossless model's, in the batches that rules are measured in."""
        self._llm.engine.quality.use(Precision())
        n = self._n_tokens(self.windows)
        return Reference.record(self._llm, self.windows, "simulated", lambda done: self._tell("lossless, as answers are computed", done, n))

    def measure(self, reference: Reference, reroute: float, t1: float, t2: float, resident: float) -> MeasuredCandidate:
        """One rule with this share of the experts resident."""
        lossless = self._lossless_misses(resident)
        low, low_size = self.low if self.low and t1 < t2 else (None, 0.0)
        precision = Precision(t1, t2, tier=low, reroute=reroute, resident=resident)
        self._llm.engine.quality.use(precision)
        self._llm.reset_stats()
        name = f"{resident:.0%} resident: rerouting {reroute:g}, T1 {t1:g}, T2 {t2:g}"
        n = self._n_tokens(self.windows)
        scores = evaluate(self._llm, self.windows, reference, mode="simulated", progress=lambda done: self._tell(name, done, n))
        stats = self._llm.stats()
        uses = max(stats.expert_uses // 2, 1)  # the other half is the prompt's
        read = self._size * stats.simulated_misses + low_size * stats.served_low
        return MeasuredCandidate.of(
            scores.quality().distance, len(self.windows), tier=low or self._tier, t1=t1, t2=t2, share=0.0, decode=True,
            cost=read / n / lossless if lossless else self._size, low=stats.served_low / uses, skipped=stats.skipped / uses, reroute=reroute,
            reroute_margin=precision.reroute_margin, resident=resident, rerouted=stats.rerouted / uses, size=self._size,
        )  # fmt: skip

    def drift(self, c: Candidate) -> Estimate:
        """Loss of a rule on text that it has written itself, against the same experts without rerouting."""
        n_texts = max(_FREE_TOKENS // len(self.windows[0].tokens), 2)
        openings = self.windows[:: max(len(self.windows) // n_texts, 1)][:n_texts]
        name, n = f"free text: rerouting {c.reroute:g}, T1 {c.t1:g}, T2 {c.t2:g}", self._n_tokens(openings)
        self._llm.engine.quality.use(c.precision)
        written = write_freely(self._llm, openings, progress=lambda done: self._tell(name, done, n))
        self._llm.engine.quality.use(Precision())
        return lost(written, score(self._llm, written))

    def _lossless_misses(self, resident: float) -> float:
        if resident not in self._lossless:
            sample = self.windows[:: -(-len(self.windows) // _SAMPLE)]  # of every text
            self._llm.engine.quality.use(Precision(reroute=_NEXT_TO_NOTHING, resident=resident))
            self._llm.reset_stats()
            evaluate(self._llm, sample, mode="simulated")
            self._lossless[resident] = self._llm.stats().simulated_misses / self._n_tokens(sample)
        return self._lossless[resident]

    @staticmethod
    def _n_tokens(windows: Sequence[Window]) -> int:
        return len(windows) * len(windows[0].tokens)


def search_rerouting(evaluator: ReroutingEvaluator, reference: Reference, max_loss: float) -> list[MeasuredCandidate]:
    """Rules that were tried, wherever they were measured; none that was measured to lose more than the bound in free text, nor what gives up
    as much. (That text is too short for an upper bound.)"""
    found: list[MeasuredCandidate] = []

    def holds(c: Candidate) -> bool:
        return c.upper_loss <= max_loss

    def measure(reroute: int, t1: float = 1.0, t2: float = 1.0) -> bool:
        found.append(evaluator.measure(reference, REROUTES[reroute] if reroute >= 0 else 0.0, t1, t2, USUAL_SHARE))
        return holds(found[-1])

    def gives_up_no_more(c: Candidate, other: Candidate) -> bool:
        return c.reroute <= other.reroute and c.t1 >= other.t1 and c.t2 >= other.t2

    good, bad = -1, len(REROUTES)  # REROUTES[good] keeps the bound, REROUTES[bad] does not
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if measure(middle) else (good, middle)
    for steps in ([(t, t) for t in SKIPS], [(t, 1.0) for t in LOWS] if evaluator.low else []):
        reroute = good
        for t1, t2 in steps:
            while not measure(reroute, t1, t2) and reroute > max(good - _LESS, -1):
                reroute -= 1
            if not holds(found[-1]):
                break
    best = sorted(filter(holds, found), key=lambda c: c.cost)
    while best and evaluator.drift(best[0]).value > max_loss:
        wild = best[0]
        found = [c for c in found if not gives_up_no_more(wild, c)]
        best = [c for c in best if c in found]
    if best:  # it has written, and these give up less
        best = [c for c in best if gives_up_no_more(c, best[0])]
        found = [c for c in found if c in best or not holds(c)]
    held: list[MeasuredCandidate] = []
    others = [share for share in SHARES if share != USUAL_SHARE]
    for share in others:
        for c in best[:_TRIES]:
            found.append(evaluator.measure(reference, c.reroute, c.t1, c.t2, share))
            if holds(found[-1]):
                held.append(c)
                break
    if held:  # a budget between two shares with different rules can use neither: the most careful of them everywhere
        careful = max(held, key=best.index)
        measured = {c.resident for c in found if c.rule == careful.rule}
        found += [evaluator.measure(reference, careful.reroute, careful.t1, careful.t2, share) for share in others if share not in measured]
    return found


OPENING = 32  # tokens that are given
_NGRAM = 4


@dataclass(frozen=True)
class FreeText:
    """Texts that one model wrote.

    Attributes:
        tokens: [n_texts, n_ctx] int32, the opening included.
        log_p: [n_texts, n_ctx - OPENING] float64, of each token that was written, by its writer.
        entropy: of the experts used, in bits, mean over layers.
        rerouted: share of the experts in the place of others.
    """

    tokens: np.ndarray
    log_p: np.ndarray
    entropy: float
    rerouted: float

    @property
    def repeated(self) -> float:
        """Share of the written 4-grams that the same text had before."""
        seen = total = 0
        for text in self.tokens.tolist():
            grams = [tuple(text[i : i + _NGRAM]) for i in range(OPENING, len(text) - _NGRAM + 1)]
            seen, total = seen + len(grams) - len(set(grams)), total + len(grams)
        return seen / max(total, 1)


def write_freely(llm: Llama, windows: Sequence[Window], seed: int = 0, progress: Callable[[int], None] | None = None) -> FreeText:
    """A text behind the opening of each window, as long as the window, computed token by token with the model's present precision."""
    n_ctx, rng = len(windows[0].tokens), np.random.default_rng(seed)
    tokens = np.array([window.tokens for window in windows], np.int32)
    log_p = np.empty((len(windows), n_ctx - OPENING))
    uses = np.zeros(llm.engine.buffer.priorities.shape, np.int64)

    def count(event: GateEvent) -> None:
        if event.decode:
            np.add.at(uses[event.gate], event.ids.ravel(), 1)

    before = llm.stats()
    llm.set_gate_callback(count)
    try:
        for index, text in enumerate(tokens):
            llm.clear_context()
            llm.decode_batch(text[:OPENING].tolist(), 0, OPENING - 1)
            for at in range(OPENING, n_ctx):
                row = log_probs(llm.batch_logits(1))[0].astype(np.float64)
                likely = np.exp(row)
                text[at] = rng.choice(len(row), p=likely / likely.sum())
                log_p[index, at - OPENING] = row[text[at]]
                llm.decode_batch([int(text[at])], at, at)
            if progress:
                progress((index + 1) * n_ctx)
        llm.engine.buffer.drain()
    finally:
        llm.set_gate_callback(None)
    llm.clear_context()
    after = llm.stats()
    entropy = float(np.mean([-(p * np.log2(p)).sum() for p in (row[row > 0] / row.sum() for row in uses)]))
    return FreeText(tokens, log_p, entropy, (after.rerouted - before.rerouted) / max(after.expert_uses - before.expert_uses, 1))


def score(llm: Llama, texts: FreeText) -> np.ndarray:
    """[n_texts, n_ctx - OPENING] float64: what this model thinks of each token that was written; whole texts at once."""
    out = np.empty_like(texts.log_p)
    for index, text in enumerate(texts.tokens):
        llm.clear_context()
        llm.decode_batch(text[:-1].tolist(), 0, OPENING - 1)
        logp = log_probs(llm.batch_logits(len(text) - OPENING))
        out[index] = logp[np.arange(len(logp)), text[OPENING:]]
    llm.clear_context()
    return out


def lost(texts: FreeText, by_lossless: np.ndarray) -> Estimate:
    """Loss of a model on its own text.

    Args:
        by_lossless: what `score` gives with the lossless model.
    """
    return Estimate.mean(texts.log_p - by_lossless).map(math.expm1)
