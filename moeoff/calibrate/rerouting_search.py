"""`moeoff calibrate --max-loss`: how much rerouting, low precision on a miss and skipping a model bears, which depends on what is in memory.

Measured behind a simulated cache (`Precision.resident`) that holds a share of each layer's experts: each token is decided as if it
were decoded alone behind the ones before it, as an answer is computed, but batches compute many of them at once. Half of the experts
are simulated first: rerouting alone by bisection; then less of it together with more skipping, as long as the bound holds, and likewise with
more misses that are served by a low tier, if there is one. Of what holds there, what reads least is looked for with the other shares, and the
most careful of these rules is measured with all of them: a budget may use a rule that keeps the bound at the nearest shares below and above.

Rerouting feeds on itself, so the best rule then writes text freely (`moeoff.calibrate.drift`): if it loses more than the bound on its own
text, it is given up with all that gives up as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..budget.loss_contract import USUAL_SHARE, Candidate, upper_loss
from ..budget.precision import Precision
from ..budget.statistics import Estimate
from ..engine.llama import Llama
from .drift import lost, score, write_freely
from .perplexity import Reference, Window, evaluate

__all__ = ["LOWS", "REROUTES", "SHARES", "SKIPS", "ReroutingEvaluator", "search_rerouting"]

REROUTES = (0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
SKIPS = (0.9, 0.8, 0.7, 0.6, 0.5)  # Precision.t2, and t1: only what is not skipped is read
LOWS = (0.9, 0.7, 0.5, 0.3, 0.1)  # Precision.t1, where the rest is served low
SHARES = (0.1, 0.25, 0.5, 0.75)  # of the experts that are simulated to be resident
_LESS = 2  # steps of rerouting that are given up for more of the other
_TRIES = 4  # rules that are measured with the other shares, until one holds there
_NEXT_TO_NOTHING = 1e-9  # rerouting that makes a cache be simulated, and changes nothing
_SAMPLE = 8  # windows that tell how much the lossless model would read
_FREE_TOKENS = 2048  # that a rule writes


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
        self._llm.use_precision(Precision())
        n = self._n_tokens(self.windows)
        return Reference.record(self._llm, self.windows, "simulated", lambda done: self._tell("lossless, as answers are computed", done, n))

    def measure(self, reference: Reference, reroute: float, t1: float, t2: float, resident: float) -> Candidate:
        """One rule with this share of the experts resident."""
        lossless = self._lossless_misses(resident)
        low, low_size = self.low if self.low and t1 < t2 else (None, 0.0)
        precision = Precision(t1, t2, tier=low, reroute=reroute, resident=resident)
        self._llm.use_precision(precision)
        self._llm.reset_stats()
        name = f"{resident:.0%} resident: rerouting {reroute:g}, T1 {t1:g}, T2 {t2:g}"
        n = self._n_tokens(self.windows)
        scores = evaluate(self._llm, self.windows, reference, mode="simulated", progress=lambda done: self._tell(name, done, n))
        stats = self._llm.stats()
        uses = max(stats.expert_uses // 2, 1)  # the other half is the prompt's
        read = self._size * stats.simulated_misses + low_size * stats.served_low
        return Candidate(
            low or self._tier, t1, t2, 0.0, True, *scores.quality().distance, read / n / lossless if lossless else self._size, stats.served_low / uses,
            stats.skipped / uses, reroute, precision.reroute_margin, resident, stats.rerouted / uses, self._size,
        )  # fmt: skip

    def drift(self, c: Candidate) -> Estimate:
        """What a rule loses on text that it has written itself, beside the same experts without rerouting."""
        n_texts = max(_FREE_TOKENS // len(self.windows[0].tokens), 2)
        openings = self.windows[:: max(len(self.windows) // n_texts, 1)][:n_texts]
        name, n = f"free text: rerouting {c.reroute:g}, T1 {c.t1:g}, T2 {c.t2:g}", self._n_tokens(openings)
        self._llm.use_precision(c.precision)
        written = write_freely(self._llm, openings, progress=lambda done: self._tell(name, done, n))
        self._llm.use_precision(Precision())
        return lost(written, score(self._llm, written))

    def _lossless_misses(self, resident: float) -> float:
        if resident not in self._lossless:
            sample = self.windows[:: -(-len(self.windows) // _SAMPLE)]  # of every text
            self._llm.use_precision(Precision(reroute=_NEXT_TO_NOTHING, resident=resident))
            self._llm.reset_stats()
            evaluate(self._llm, sample, mode="simulated")
            self._lossless[resident] = self._llm.stats().simulated_misses / self._n_tokens(sample)
        return self._lossless[resident]

    @staticmethod
    def _n_tokens(windows: Sequence[Window]) -> int:
        return len(windows) * len(windows[0].tokens)


def search_rerouting(evaluator: ReroutingEvaluator, reference: Reference, max_loss: float) -> list[Candidate]:
    """Rules that were tried, wherever they were measured; none that was measured to lose more than the bound in free text, nor what gives up
    as much. (That text is too short for an upper bound.)"""
    found: list[Candidate] = []

    def holds(c: Candidate) -> bool:
        return upper_loss(c.loss, len(evaluator.windows)) <= max_loss

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
    held: list[Candidate] = []
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
