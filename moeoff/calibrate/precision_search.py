"""`moeoff calibrate --max-loss`: tries precisions on a model and writes down what each costs.

First every tier of the sidecar in the place of all experts, which where it loses little enough reads the least, because more of it
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

from .. import __version__, native
from ..budget.loss_contract import SECTION, LossContract
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
from .perplexity import Reference, Window, evaluate, interruptible, n_scored, open_model, read_windows
from .record import CalibrationEstimate
from .rerouting_search import MeasuredCandidate, ReroutingEvaluator, search_rerouting
from .writer import texts_or_written

__all__ = ["SearchResult", "PrecisionEvaluator", "search_precision"]

SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
T1S = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
T2S = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
MIN_WINDOWS = 8
CTX = 512
_REROUTES = Precision(reroute=1.0, resident=1.0)  # until rules are tried: a model that can


@dataclass(frozen=True)
class SearchResult:
    """path: of the profile; max_loss: the bound that was searched for; measured: the contract's candidates with their intervals."""

    path: str
    contract: LossContract
    max_loss: float
    measured: tuple[MeasuredCandidate, ...]


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
    announce: Callable[[CalibrationEstimate], None] | None = None,
    warn: Callable[[str], None] | None = None,
    **options: Any,
) -> SearchResult:
    """Measures precisions of a model with its sidecar, and writes the profile's section "precision".

    Args:
        text: texts, none: the model writes some; their windows are of 512 tokens, or of the model's training context if that is shorter.
        max_loss: the bound to search for, 0.01 is 1 % of perplexity. Other bounds can be asked for later: they choose among
            what was measured.
        tier: low precision, of the sidecar. Default: all of them are tried in the place of all experts, the first with thresholds.
        thresholds: measures them in their worst case, too; None: not even if no tier keeps the bound and nothing is rerouted.
        rerouting: measures rerouting and skipping, too. Without a sidecar there is nothing else to measure.
        tokens: in all, as many from each text. Each candidate computes all of them, in decode half of them one by one.
        output: the profile; by default where opening the model finds it.
        announce: is told what writing the text will take, before it starts; an interrupted search has it when it is called again.
        warn: told in a sentence of what an interrupted search left and is damaged.
        **options: of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: no such tier, nothing to measure, too little text.
        ModelError: the model or profile is no good.
    """
    model = os.fspath(model)
    model_index = ModelIndex.read(model)
    model_index.require_experts()
    model_index.require_text()
    sidecar = ExpertSource.make(model_index, experts, ORIGINAL).sidecar
    lower = [name for name in sidecar.tiers if name != ORIGINAL] if sidecar else []
    if not lower and (tier or not rerouting):
        raise OptionError(f"{model}: has no sidecar with lower precision, which moeoff convert makes", hint={"experts": ...})
    tiers = [sidecar.tier(tier) or tier] if sidecar and tier else lower
    path = os.fspath(output) if output else profile_output(model_index)
    require_new(path, [*model_index.files, sidecar.path if sidecar else None, *text], "`output`")
    if os.path.exists(path):
        room = (parse_size(memory) - rss()) // 2 if (memory := options.get("memory")) is not None else None
        Profile.read(path, model_index, room=room)  # another model's would be refused in the end: say so before the work
    ctx = min(CTX, model_index.n_ctx_train or CTX)
    given = options
    options = {"flash_attn": True, "experts": sidecar or False, "tier": ORIGINAL, "deterministic": True} | options

    @contextlib.contextmanager
    def opened(precision: Precision, **others: Any) -> Iterator[tuple[Llama, list[Window], Callable[..., Any]]]:
        with open_model(model, ctx, precision=precision, **(options | others)) as llm, interruptible(llm) as call:
            windows = read_windows(llm, files, ctx, max(tokens // (ctx * len(files)), 1))
            if len(windows) < MIN_WINDOWS:
                found = f"the texts make {len(windows)} windows of {ctx} tokens"
                raise OptionError(f"{found}, and at least {MIN_WINDOWS} are needed for an interval: more text is needed", hint={"text": ..., "tokens": ...})
            yield llm, windows, call

    @contextlib.contextmanager
    def evaluator_of(name: str) -> Iterator[tuple[PrecisionEvaluator, Callable[..., Any]]]:
        assert sidecar is not None  # it has the tier
        with opened(Precision(tier=name)) as (llm, windows, call):
            yield PrecisionEvaluator(llm, windows, name, relative_bytes(model_index, sidecar, name), progress), call

    search, reference = _Search(max_loss), None
    windows: Sequence[Window] = ()
    checkpoint = Checkpoint(f"{model_index.identity}-loss", {"moeoff": __version__, "tokens": tokens}, warn)
    with texts_or_written(model, text, 21 * tokens // 20, checkpoint, progress=progress, announce=announce, **given) as files:
        with contextlib.ExitStack() as references:
            for name in tiers:
                with evaluator_of(name) as (evaluator, call):
                    reference = reference or references.enter_context(call(evaluator.reference, "prefill"))
                    call(search.measure, evaluator, reference, 1.0, 1.0, 1.0, decode=False)
                    windows = evaluator.windows
            whole = [c for c in search.candidates if search.holds(c)]
            if reference and (thresholds or (thresholds is not None and not rerouting and not whole)):
                with evaluator_of(tiers[0]) as (evaluator, call):
                    call(search.thresholds, evaluator, reference)
        if rerouting:
            bases = [ORIGINAL, *(c.tier for c in sorted(whole, key=lambda c: c.cost)[:1])]
            low = tiers[0] if tiers and not whole else None
            with contextlib.ExitStack() as references:
                reference = None
                for base in bases:
                    with opened(replace(_REROUTES, t1=0.0, tier=low) if low else _REROUTES, tier=base) as (llm, windows, call):
                        sizes = {name: relative_bytes(model_index, sidecar, name) for name in tiers} if sidecar else {}
                        tried = ReroutingEvaluator(llm, windows, base, sizes.get(base, 1.0), (low, sizes[low]) if low else None, progress)
                        reference = reference or references.enter_context(call(tried.reference))
                        search.candidates += call(search_rerouting, tried, reference, max_loss)
    text_hash = hash64(np.array([window.tokens for window in windows], np.int32))
    identity = sidecar.identity if sidecar else 0
    contract = LossContract(identity, text_hash, len(windows), len(windows) * n_scored(ctx), ctx, tuple(c.without_intervals() for c in search.candidates))
    Profile.write(path, model_index, {SECTION: contract.to_section()})
    checkpoint.remove()
    return SearchResult(path, contract, max_loss, tuple(search.candidates))


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
        self._llm.engine.buffer.set_thresholds(blind=True)
        return Reference.record(self._llm, self.windows, mode, lambda done: self._tell(f"lossless, {mode}", done, self._n))

    def measure(self, reference: Reference, t1: float, t2: float, share: float, *, decode: bool) -> MeasuredCandidate:
        """One precision, in decode behind a prompt with that share, or in batches; the reference is of the same mode."""
        llm = self._llm
        name = f"T1 {t1:g}, T2 {t2:g}, p {share:g}" if decode else f"p {share:g}"
        llm.engine.buffer.set_thresholds(t1, t2, share, blind=True)
        llm.engine.buffer.drain()
        self._counts[:] = 0
        before = llm.stats()
        llm.set_gate_callback(self._count)
        try:
            scores = evaluate(llm, self.windows, reference, mode="decode" if decode else "prefill", progress=lambda done: self._tell(name, done, self._n))
            llm.engine.buffer.drain()
        finally:
            llm.set_gate_callback(None)
        after = llm.stats()
        if decode:
            n = max(int(self._counts.sum()), 1)
            low, skipped = self._counts[native.LOW] / n, self._counts[native.SKIP] / n
        else:
            uses = max(after.expert_uses - before.expert_uses, 1)
            low, skipped = (after.served_low - before.served_low) / uses, 0.0
        given_up = low if decode else share  # of a batch's experts, each read once
        cost = 1 - skipped - given_up * (1 - self._low_bytes)
        return MeasuredCandidate.of(
            scores.quality().distance, len(self.windows), tier=self.tier, t1=t1, t2=t2, share=share, decode=decode, cost=float(cost),
            low=float(low), skipped=float(skipped), size=float(cost) if share == 1 and not decode else 1.0,
        )  # fmt: skip

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
        self.candidates: list[MeasuredCandidate] = []

    def holds(self, c: MeasuredCandidate) -> bool:
        """The candidate keeps the bound."""
        return c.upper_loss <= self._max_loss

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
        """The bound holds."""
        tried = (evaluator.tier, t1, t2, share, decode)
        c = next((c for c in self.candidates if (c.tier, c.t1, c.t2, c.share, c.decode) == tried), None)
        if c is None:
            c = evaluator.measure(reference, t1, t2, share, decode=decode)
            self.candidates.append(c)
        return self.holds(c)
