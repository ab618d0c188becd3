"""`moeoff calibrate --max-loss`: tries precisions on a model and writes down what each costs.

First every tier of the companion in the place of all experts, which where it loses little enough reads the least, because more of it
fits into memory; that takes batches alone. Then what lives on what is resident, behind a simulated cache
(`moeoff.calibrate.rerouting_search`): rerouting and skipping, in the model's own precision and in the smallest tier that keeps the bound; if none does,
also low precision on misses.

If asked to, or if no tier keeps the bound and nothing is to be rerouted: precisions in their worst case, the rule applied to every expert as if none were resident
(`ExpertBuffer.set_thresholds(blind=True)`). A resident expert is served in its own precision, so that any budget gives up less than what
was measured. The share of low experts in batches (Fate's p), then, behind prompts computed with that share, HOBBIT's T1 by bisection with T2 = 1, then lower T2
(skipping) as long as the bound holds. Thresholds act in decode: half of the text is computed token by token for each of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import native
from ..budget.loss_contract import SECTION, Candidate, LossContract, upper_loss
from ..budget.precision import Precision
from ..companion.file import KEEP
from ..companion.hashing import hash64
from ..companion.profile import Profile, profile_output
from ..companion.source import ExpertSource, relative_bytes
from ..engine.llama import Llama
from ..errors import OptionError, Remedy
from ..gate_event import GateEvent
from ..gguf.layout import Layout
from .perplexity import Call, Reference, Window, evaluate, interruptible, n_scored, open_model, read_windows
from .rerouting_search import ReroutingEvaluator, search_rerouting

__all__ = ["SearchResult", "PrecisionEvaluator", "search_precision"]

SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
T1S = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
T2S = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
MIN_WINDOWS = 8
CTX = 512
_REROUTES = Precision(reroute=1.0, resident=1.0)  # until rules are tried: a model that can


@dataclass(frozen=True)
class SearchResult:
    """path: of the profile; max_loss: the bound that was searched for."""

    path: str
    contract: LossContract
    max_loss: float


def search_precision(
    model: str | os.PathLike[str],
    text: Sequence[str | os.PathLike[str]],
    max_loss: float,
    *,
    tier: str | None = None,
    thresholds: bool | None = False,
    rerouting: bool = True,
    experts: str | os.PathLike[str] | bool = "auto",
    tokens: int = 16384,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> SearchResult:
    """Measures precisions of a model with its companion, and writes the profile's section "precision".

    Args:
        text: texts; their windows are of 512 tokens, or of the model's training context if that is shorter.
        max_loss: the bound to search for, 0.01 is 1 % of perplexity. Other bounds can be asked for later: they choose among
            what was measured.
        tier: low precision, of the companion. Default: all of them are tried in the place of all experts, the first with thresholds.
        thresholds: measures them in their worst case, too; None: not even if no tier keeps the bound and nothing is rerouted.
        rerouting: measures rerouting and skipping, too. Without a companion there is nothing else to measure.
        tokens: in all, as many from each text. Each candidate computes all of them, in decode half of them one by one.
        output: the profile; beside the model by default, where it is found.
        **options: of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: no such tier, nothing to measure, too little text.
        ModelError: the model or profile is no good.
    """
    model = os.fspath(model)
    layout = Layout.read(model)
    layout.require_experts()
    companion = ExpertSource.make(layout, experts, KEEP).companion
    lower = [name for name in companion.tiers if name != KEEP] if companion else []
    if not lower and (tier or not rerouting):
        raise OptionError(f"{model}: has no companion with lower precision", Remedy.MAKE_COMPANION)
    tiers = [companion.tier(tier) or tier] if companion and tier else lower
    path = os.fspath(output) if output else profile_output(layout)
    if os.path.exists(path):
        Profile.read(path, layout)  # another model's would be refused in the end: say so before the work
    ctx = min(CTX, layout.n_ctx_train or CTX)
    options = {"flash_attn": True, "experts": companion or False, "tier": KEEP, "deterministic": True} | options

    @contextlib.contextmanager
    def opened(precision: Precision, **others: Any) -> Iterator[tuple[Llama, list[Window], Call]]:
        with open_model(model, ctx, precision=precision, **(options | others)) as llm, interruptible(llm) as call:
            windows = read_windows(llm, text, ctx, max(tokens // (ctx * max(len(text), 1)), 1))
            if len(windows) < MIN_WINDOWS:
                found = f"the texts make {len(windows)} windows of {ctx} tokens"
                raise OptionError(f"{found}, and at least {MIN_WINDOWS} are needed for an interval", Remedy.MORE_TEXT)
            yield llm, windows, call

    @contextlib.contextmanager
    def evaluator_of(name: str) -> Iterator[tuple[PrecisionEvaluator, Call]]:
        assert companion is not None  # it has the tier
        with opened(Precision(tier=name)) as (llm, windows, call):
            yield PrecisionEvaluator(llm, windows, name, relative_bytes(layout, companion, name), progress), call

    search, reference = _Search(max_loss), None
    windows: Sequence[Window] = ()
    with contextlib.ExitStack() as references:
        for name in tiers:
            with evaluator_of(name) as (evaluator, call):
                reference = reference or references.enter_context(call(evaluator.reference, "prefill"))
                call(search.measure, evaluator, reference, 1.0, 1.0, 1.0, decode=False)
                windows = evaluator.windows
        whole = [c for c in search.candidates if search.holds(c, len(windows))]
        if reference and (thresholds or (thresholds is not None and not rerouting and not whole)):
            with evaluator_of(tiers[0]) as (evaluator, call):
                call(search.thresholds, evaluator, reference)
    if rerouting:
        bases = [KEEP, *(c.tier for c in sorted(whole, key=lambda c: c.cost)[:1])]
        low = tiers[0] if tiers and not whole else None
        with contextlib.ExitStack() as references:
            reference = None
            for base in bases:
                with opened(replace(_REROUTES, t1=0.0, tier=low) if low else _REROUTES, tier=base) as (llm, windows, call):
                    sizes = {name: relative_bytes(layout, companion, name) for name in tiers} if companion else {}
                    tried = ReroutingEvaluator(llm, windows, base, sizes.get(base, 1.0), (low, sizes[low]) if low else None, progress)
                    reference = reference or references.enter_context(call(tried.reference))
                    search.candidates += call(search_rerouting, tried, reference, max_loss)
    text_hash = hash64(np.array([window.tokens for window in windows], np.int32))
    identity = companion.identity if companion else 0
    contract = LossContract(identity, text_hash, len(windows), len(windows) * n_scored(ctx), ctx, tuple(search.candidates))
    Profile.write(path, layout, {SECTION: contract.to_section()})
    return SearchResult(path, contract, max_loss)


class PrecisionEvaluator:
    """Measures precisions of one model on windows of text, every expert taken for a miss.

    Args:
        llm: opened by `open_model` with a tier for low precision.
        tier: its name.
        low_bytes: of the low versions, for each byte of the high ones: `relative_bytes`.
        progress: told what is being done, how much of it is done and how much there is.
    """

    def __init__(self, llm: Llama, windows: Sequence[Window], tier: str, low_bytes: float, progress: Callable[[str, int, int], None] | None = None):
        self._llm, self.windows, self.tier, self._low_bytes = llm, windows, tier, low_bytes
        self._tell = progress or (lambda what, done, total: None)
        self._n = len(windows) * len(windows[0].tokens)
        self._counts = np.zeros(3, np.int64)  # of decode, by version

    def reference(self, mode: str) -> Reference:
        self._llm.expert_buffer.set_thresholds(blind=True)
        return Reference.record(self._llm, self.windows, mode, lambda done: self._tell(f"lossless, {mode}", done, self._n))

    def measure(self, reference: Reference, t1: float, t2: float, share: float, *, decode: bool) -> Candidate:
        """One precision, in decode behind a prompt with that share, or in batches; the reference is of the same mode."""
        llm = self._llm
        name = f"T1 {t1:g}, T2 {t2:g}, p {share:g}" if decode else f"p {share:g}"
        llm.expert_buffer.set_thresholds(t1, t2, share, blind=True)
        llm.expert_buffer.drain()
        self._counts[:] = 0
        before = llm.stats()
        llm.set_gate_callback(self._count)
        try:
            scores = evaluate(llm, self.windows, reference, mode="decode" if decode else "prefill", progress=lambda done: self._tell(name, done, self._n))
            llm.expert_buffer.drain()
        finally:
            llm.set_gate_callback(None)
        after = llm.stats()
        distance = scores.quality().distance
        if decode:
            n = max(int(self._counts.sum()), 1)
            low, skipped = self._counts[native.LOW] / n, self._counts[native.SKIP] / n
        else:
            uses = max(after.expert_uses - before.expert_uses, 1)
            low, skipped = (after.served_low - before.served_low) / uses, 0.0
        given_up = low if decode else share  # of a batch's experts, each read once
        cost = 1 - skipped - given_up * (1 - self._low_bytes)
        size = float(cost) if share == 1 and not decode else 1.0
        return Candidate(self.tier, t1, t2, share, decode, *distance, float(cost), float(low), float(skipped), size=size)

    def _count(self, event: GateEvent) -> None:
        if len(event.ids) == 1:
            if event.versions is None:
                self._counts[native.HIGH] += event.ids.size
            else:
                self._counts += np.bincount(event.versions.ravel(), minlength=3)


class _Search:
    """Among the precisions above. Nothing is measured twice."""

    def __init__(self, max_loss: float):
        self._max_loss = max_loss
        self.candidates: list[Candidate] = []

    def holds(self, c: Candidate, n_windows: int) -> bool:
        """Whether the candidate keeps the bound."""
        return upper_loss(c.loss, n_windows) <= self._max_loss

    def thresholds(self, evaluator: PrecisionEvaluator, in_batches: Reference) -> None:
        share = next((s for s in SHARES if self.measure(evaluator, in_batches, 1.0, 1.0, s, decode=False)), 0.0)
        with evaluator.reference("decode") as reference:

            def measure(t1: float, t2: float) -> bool:
                return self.measure(evaluator, reference, t1, t2, share, decode=True)

            # in decode the prompt's share adds to whatever is lost after it
            while share and not measure(1.0, 1.0):
                share = next((s for s in SHARES if s < share), 0.0)
            good, bad = len(T1S) - 1, -1  # T1S[good] keeps the bound (1.0 is lossless), T1S[bad] does not
            while good - bad > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if measure(T1S[middle], 1.0) else (good, middle)
            for t1 in T1S[good : good + 2]:
                for t2 in T2S:
                    if t2 < t1 or not measure(t1, t2):
                        break

    def measure(self, evaluator: PrecisionEvaluator, reference: Reference, t1: float, t2: float, share: float, *, decode: bool) -> bool:
        """Whether the bound holds."""
        for c in self.candidates:
            if (c.tier, c.t1, c.t2, c.share, c.decode) == (evaluator.tier, t1, t2, share, decode):
                break
        else:
            c = evaluator.measure(reference, t1, t2, share, decode=decode)
            self.candidates.append(c)
        return self.holds(c, len(evaluator.windows))
