"""The quality contract: how much a model may lose, and which precision was measured on this very model to lose no more.

A section of the profile holds everything that was tried, with its confidence intervals; opening a model with a bound
takes what is expected to read the fewest bytes in the memory there is, among what is within the bound. What looks at what is resident
was measured with several shares of it: it may be taken if it keeps the bound at the nearest ones below and above. Knows nothing of
how it was measured (`moeoff.calibrate.precision_search`, `moeoff.calibrate.rerouting_search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..companion.file import KEEP
from ..companion.profile import Profile
from ..companion.source import ExpertSource
from ..errors import OptionError, Remedy
from ..gguf.layout import Layout
from .footprint import expected_bytes
from .precision import Precision
from .statistics import Estimate, student

__all__ = ["Candidate", "LossContract", "SelectedPrecision", "parse_loss", "upper_loss"]

SECTION = "precision"
USUAL_SHARE = 0.5  # of the experts, that a run takes for resident which must be the same in any memory
AT_ONCE = 84  # candidates, at most, that a search tries
_NOTHING = 0.01  # of a token's experts: who reads less is as good as resident, and the least lossy of those is taken


def parse_loss(text: str | float) -> float:
    """A relative increase of perplexity: 0.01 of "1%", "0.01" or 0.01.

    Raises:
        OptionError: not a share above 0 and below 1.
    """
    try:
        loss = float(text[:-1]) / 100 if isinstance(text, str) and text.strip().endswith("%") else float(text)
    except ValueError:
        loss = 0.0
    if not 0 < loss < 1:
        raise OptionError(f"not a loss: {text!r}; write for example 1%: the increase of perplexity that is allowed")
    return loss


def upper_loss(loss: Estimate, n_windows: int) -> float:
    """The loss that is not exceeded, with 95 % confidence in `AT_ONCE` candidates at once: a search that tries many and keeps the best
    must not be flattered by chance. Infinite if one window cannot tell."""
    if loss.high is None:
        return math.inf
    centre, half = math.log1p(loss.value), math.log1p(loss.high) - math.log1p(loss.value)
    return math.expm1(centre + half * student(n_windows, AT_ONCE) / student(n_windows))


@dataclass(frozen=True)
class Candidate:
    """One precision and what it was measured to cost.

    Attributes:
        tier: of the companion, the low precision; measured behind a cache without one, the one that all experts are in.
        t1, t2, share: `Precision.t1`, `t2`, `prefill_low_share`.
        decode: measured token by token after a prompt; else in batches, where t1 and t2 do nothing.
        loss, kl, top1: as in `Quality`.
        cost: bytes to be read, 1 for lossless with as much resident.
        low, skipped: share of what the gates chose that was served in low precision, and not at all.
        reroute, reroute_margin: of `Precision`.
        resident: share of the experts that a simulated cache held; 0: each expert was taken for a miss, the most that thresholds can give up.
        rerouted: share of what the gates chose that gave its place to another.
        size: bytes of all experts, 1 in the model's own precision; another only if all of them are in the tier.
    """

    tier: str
    t1: float
    t2: float
    share: float
    decode: bool
    loss: Estimate
    kl: Estimate
    top1: Estimate
    cost: float
    low: float
    skipped: float
    reroute: float = 0.0
    reroute_margin: float = 1.0
    resident: float = 0.0
    rerouted: float = 0.0
    size: float = 1.0

    @property
    def whole(self) -> bool:
        """All experts in the tier: in batches all of them low, which is the same computation one by one."""
        return self.tier != KEEP and self.t1 == self.t2 if self.resident else not self.decode and self.share == 1

    @property
    def rule(self) -> tuple[str, float, float, float, float, float]:
        """What was tried, whatever was resident."""
        return self.tier, self.t1, self.t2, self.share, self.reroute, self.reroute_margin

    @property
    def precision(self) -> Precision:
        """Beside the tier that all experts are in."""
        if self.resident:
            low = self.tier if self.t1 < self.t2 else None
            return Precision(self.t1, self.t2, tier=low, reroute=self.reroute, reroute_margin=self.reroute_margin, resident=self.resident)
        return Precision() if self.whole else Precision(self.t1, self.t2, self.share, self.tier)

    def expected_bytes(self, resident: float) -> float:
        """What a token reads, 1 for all its experts, if memory held this share of them in their own precision; more fit in the tier."""
        return expected_bytes(self.cost, resident / self.size if self.whole else resident)


@dataclass(frozen=True)
class SelectedPrecision:
    """A bound that was asked for, what keeps it, and what that was measured to lose.

    tier: every expert is in this tier of the companion; KEEP: `precision` says which are served by less.
    """

    max_loss: float
    precision: Precision
    tier: str
    estimated_loss: float


@dataclass(frozen=True)
class LossContract:
    """What was measured of one model with one companion.

    Attributes:
        companion: its identity; 0: there was none.
        text: hash of the windows' tokens.
        n_windows, n_tokens, ctx: of the text; tokens are those that were scored.
        candidates: all that were measured.
    """

    companion: int
    text: int
    n_windows: int
    n_tokens: int
    ctx: int
    candidates: tuple[Candidate, ...]

    def upper(self, c: Candidate) -> float:
        """The loss that is not exceeded, see `upper_loss`."""
        return upper_loss(c.loss, self.n_windows)

    def choose(self, max_loss: float, resident: float = 0.0, among: Callable[[Candidate], bool] | None = None) -> Candidate | None:
        """What reads the fewest bytes within the bound, in batches, too; None: lossless.

        Args:
            resident: share of the experts that memory holds in their own precision.
            among: which candidates may be taken; None: all.
        """
        within = [c for c in self.candidates if self.upper(c) <= max_loss]
        in_batches = {(c.tier, c.share) for c in within if not c.decode}
        usable = [c for c in within if not c.resident and (c.whole or (c.decode and (c.share == 0 or (c.tier, c.share) in in_batches)))]
        usable += self._simulated(max_loss, resident)

        def order(c: Candidate | None) -> tuple[float, float, float]:
            if c is None:
                return max(expected_bytes(1.0, resident), _NOTHING), 0.0, -math.inf
            return max(c.expected_bytes(resident), _NOTHING), c.kl.value, -c.share

        return min([None, *(c for c in usable if among is None or among(c))], key=order)

    def _simulated(self, max_loss: float, resident: float) -> list[Candidate]:
        """Of each rule that was measured behind a cache, the nearest measurement below this share of resident experts, with the worst loss
        there and above. None of those that lose too much at either, or that were not measured so low."""
        rules: dict[tuple[str, float, float, float, float, float], list[Candidate]] = {}
        for c in self.candidates:
            if c.resident:
                rules.setdefault(c.rule, []).append(c)
        found = []
        for measured in rules.values():
            share = min(resident / measured[0].size, 1.0)
            below = max((c for c in measured if c.resident <= share), key=lambda c: c.resident, default=None)
            above = min((c for c in measured if c.resident >= share), key=lambda c: c.resident, default=None)
            if below is not None and all(self.upper(c) <= max_loss for c in (below, above) if c):  # with everything resident nothing is lost
                worst = max((c for c in (below, above) if c), key=lambda c: c.loss.value)
                found.append(replace(below, loss=worst.loss))
        return found

    def select(self, max_loss: float, resident: float = 0.0, among: Callable[[Candidate], bool] | None = None) -> SelectedPrecision:
        """`choose`, as a model is opened with it."""
        found = self.choose(max_loss, resident, among)
        if found is None:
            return SelectedPrecision(max_loss, Precision(), KEEP, 0.0)
        if found.whole:
            return SelectedPrecision(max_loss, found.precision, found.tier, max(found.loss.value, 0.0))
        batches = [c.loss.value for c in self.candidates if found.share and not c.decode and (c.tier, c.share) == (found.tier, found.share)]
        return SelectedPrecision(max_loss, found.precision, KEEP, max(found.loss.value, *batches, 0.0))

    def to_section(self) -> dict[str, np.ndarray]:
        """Arrays for `Profile.write`."""
        rows = {name: np.array([getattr(c, name) for c in self.candidates]) for name in _SCALARS}
        rows |= {name: np.array([[e.value, e.low, e.high] for e in (getattr(c, name) for c in self.candidates)]) for name in _ESTIMATES}
        facts = {name: np.array(getattr(self, name)) for name in ("n_windows", "n_tokens", "ctx")}
        return rows | facts | {"companion": np.uint64(self.companion), "text": np.uint64(self.text)}

    @classmethod
    def from_section(cls, s: dict[str, np.ndarray]) -> LossContract:
        """Raises `LookupError` for a section of an earlier moeoff."""
        rows = [{name: s[name][i].item() for name in _SCALARS} | {name: Estimate(*s[name][i].tolist()) for name in _ESTIMATES} for i in range(len(s["t1"]))]
        facts = {name: int(s[name]) for name in ("companion", "text", "n_windows", "n_tokens", "ctx")}
        return cls(candidates=tuple(Candidate(**row) for row in rows), **facts)

    @classmethod
    def find(cls, layout: Layout, profile: Profile | None, source: ExpertSource, max_loss: float) -> LossContract:
        """A model's, of its profile.

        Raises:
            OptionError: there is no profile, or it has no contract, or one with another companion.
        """
        facts = {"model": layout.files[0], "max_loss": max_loss}
        section = profile.section(SECTION) if profile else None
        if profile is None or section is None:
            raise OptionError("a bound of loss needs a measurement of this very model, and there is none", Remedy.MEASURE_LOSS, **facts)
        try:
            contract = cls.from_section(section)
        except LookupError:
            raise OptionError(f"{profile.path}: was measured by an earlier moeoff", Remedy.MEASURE_LOSS, **facts) from None
        if contract.companion and (source.companion is None or source.companion.identity != contract.companion):
            found = f"with another companion than {source.companion.path}" if source.companion else f"with a companion, and {facts['model']} has none now"
            raise OptionError(f"{profile.path}: was measured {found}", Remedy.MEASURE_LOSS, **facts)
        return contract


_SCALARS = ("tier", "t1", "t2", "share", "decode", "cost", "low", "skipped", "reroute", "reroute_margin", "resident", "rerouted", "size")
_ESTIMATES = ("loss", "kl", "top1")
