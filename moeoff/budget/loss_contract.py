"""The quality contract: how much a model may lose, and which precision was measured on this very model to lose no more.

A section of the profile holds everything that was tried, with the bound of its loss; opening a model with a bound takes, within it, what is
expected to read the fewest bytes in the memory there is. Measured by `moeoff.calibrate.precision_search` and `rerouting_search`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from ..errors import OptionError
from ..gguf.model_index import ModelIndex
from ..npz import Layout, WrongArrays, require_arrays
from ..policies.precision import Precision
from ..sidecar.file import ORIGINAL, ExpertSource
from ..sidecar.profile import Profile
from .memory_plan import expected_bytes

__all__ = ["Candidate", "LossContract", "SelectedPrecision"]

SECTION = "precision"
USUAL_SHARE = 0.5  # of the experts, that a run takes for resident which must be the same in any memory
VERSION = 2  # of the section; 1 had intervals in the place of bounds
_NEGLIGIBLE_READS = 0.01  # of a token's experts: who reads less is as good as resident, and the least lossy of those is taken


@dataclass(frozen=True)
class Candidate:
    """One precision and what it was measured to cost.

    Attributes:
        tier: of the sidecar, the low precision; measured behind a cache without one, the one that all experts are in.
        t1, t2, share: `Precision.t1`, `t2`, `prefill_low_fraction`.
        decode: measured token by token after a prompt; else in batches, where t1 and t2 do nothing.
        loss: relative increase of perplexity over the lossless model, as measured; upper_loss: that is not exceeded, with 95 % confidence in all that
            a search tries together.
        kl: mean KL(lossless || this) in nats.
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
    loss: float
    upper_loss: float
    kl: float
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
        return self.tier != ORIGINAL and self.t1 == self.t2 if self.resident else not self.decode and self.share == 1

    @property
    def rule(self) -> tuple[str, float, float, float, float, float]:
        """The decisions that were tried, whatever was resident."""
        return self.tier, self.t1, self.t2, self.share, self.reroute, self.reroute_margin

    @property
    def precision(self) -> Precision:
        """The precision to open the model with, in addition to the tier that all experts are in."""
        if self.resident:
            low = self.tier if self.t1 < self.t2 else None
            return Precision(self.t1, self.t2, tier=low, reroute=self.reroute, reroute_margin=self.reroute_margin, resident=self.resident)
        return Precision() if self.whole else Precision(self.t1, self.t2, self.share, self.tier)

    def expected_bytes(self, resident: float) -> float:
        """Bytes that a token reads, 1 for all its experts, if memory held this share of them in their own precision; more fit in the tier."""
        return expected_bytes(self.cost, resident / self.size if self.whole else resident)


@dataclass(frozen=True)
class SelectedPrecision:
    """A bound that was asked for, what keeps it, and what that was measured to lose.

    tier: every expert is in this tier of the sidecar; ORIGINAL: `precision` says which are served by less.
    """

    max_loss: float
    precision: Precision
    tier: str
    estimated_loss: float


@dataclass(frozen=True)
class LossContract:
    """Everything that was measured of one model with one sidecar.

    Attributes:
        sidecar: its identity; 0: there was none.
        text: hash of the windows' tokens.
        n_windows, n_tokens, ctx: of the text; tokens are those that were scored.
        candidates: all that were measured.
    """

    sidecar: int
    text: int
    n_windows: int
    n_tokens: int
    ctx: int
    candidates: tuple[Candidate, ...]

    def choose(self, max_loss: float, resident: float = 0.0, among: Callable[[Candidate], bool] | None = None) -> Candidate | None:
        """The candidate that reads the fewest bytes within the bound, in batches, too; None: lossless.

        Args:
            resident: share of the experts that memory holds in their own precision.
            among: which candidates may be taken; None: all.
        """
        within = [c for c in self.candidates if c.upper_loss <= max_loss]
        in_batches = {(c.tier, c.share) for c in within if not c.decode}
        usable = [c for c in within if not c.resident and (c.whole or (c.decode and (c.share == 0 or (c.tier, c.share) in in_batches)))]
        usable += self._simulated(max_loss, resident)

        def order(c: Candidate | None) -> tuple[float, float, float]:
            if c is None:
                return max(expected_bytes(1.0, resident), _NEGLIGIBLE_READS), 0.0, -math.inf
            return max(c.expected_bytes(resident), _NEGLIGIBLE_READS), c.kl, -c.share

        return min([None, *(c for c in usable if among is None or among(c))], key=order)

    def _simulated(self, max_loss: float, resident: float) -> list[Candidate]:
        """For each rule that was measured behind a cache, the nearest measurement below this share of resident experts, with the worst loss
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
            if below is not None and all(c.upper_loss <= max_loss for c in (below, above) if c):  # with everything resident nothing is lost
                worst = max((c for c in (below, above) if c), key=lambda c: c.loss)
                found.append(replace(below, loss=worst.loss))
        return found

    def select(self, max_loss: float, resident: float = 0.0, among: Callable[[Candidate], bool] | None = None) -> SelectedPrecision:
        """`choose`, as a model is opened with it."""
        found = self.choose(max_loss, resident, among)
        if found is None:
            return SelectedPrecision(max_loss, Precision(), ORIGINAL, 0.0)
        if found.whole:
            return SelectedPrecision(max_loss, found.precision, found.tier, max(found.loss, 0.0))
        batches = [c.loss for c in self.candidates if found.share and not c.decode and (c.tier, c.share) == (found.tier, found.share)]
        return SelectedPrecision(max_loss, found.precision, ORIGINAL, max(found.loss, *batches, 0.0))

    def to_section(self) -> dict[str, np.ndarray]:
        """Arrays for `Profile.write`."""
        rows = {name: np.array([getattr(c, name) for c in self.candidates]) for name in _FIELDS}
        facts = {name: np.array(getattr(self, name)) for name in ("n_windows", "n_tokens", "ctx")}
        return rows | facts | {"version": np.array(VERSION), "sidecar": np.uint64(self.sidecar), "text": np.uint64(self.text)}

    @classmethod
    def from_section(cls, s: dict[str, np.ndarray]) -> LossContract:
        """Raises `LookupError` for a section of an earlier moeoff, `WrongArrays` for one that is damaged."""
        if "version" not in s or s["version"].shape or s["version"].dtype.kind not in "iu" or int(s["version"]) != VERSION:
            raise LookupError("version")
        require_arrays(s, {name: ("i", ()) for name in ("sidecar", "text", "n_windows", "n_tokens", "ctx")})
        require_arrays(s, _LAYOUT)
        if s.get("tier", s["t1"]).dtype.kind != "U" or s["tier"].shape != s["t1"].shape or np.isnan(s["upper_loss"].astype(float)).any():
            raise WrongArrays("'tier' or 'upper_loss' is no list of names, or of bounds")
        rows = [{name: s[name][i].item() for name in _FIELDS} for i in range(len(s["t1"]))]
        facts = {name: int(s[name]) for name in ("sidecar", "text", "n_windows", "n_tokens", "ctx")}
        return cls(candidates=tuple(Candidate(**row) for row in rows), **facts)

    @classmethod
    def find(cls, model_index: ModelIndex, profile: Profile | None, source: ExpertSource, max_loss: float) -> LossContract:
        """A model's, of its profile.

        Raises:
            OptionError: there is no profile, or it has no contract, or one with another sidecar.
        """
        again = f"moeoff calibrate -m {model_index.files[0]} --max-loss {100 * max_loss:g}%"
        section = profile.section(SECTION) if profile else None
        if profile is None or section is None:
            raise OptionError(f"a bound of loss needs a measurement of this very model, and there is none: {again}")
        try:
            contract = cls.from_section(section)
        except LookupError:
            raise OptionError(f"{profile.path}: was measured by an earlier moeoff: {again}") from None
        except WrongArrays as error:
            raise OptionError(f"{profile.path}: what was measured is damaged ({error}): {again}") from None
        if contract.sidecar and (source.sidecar is None or source.sidecar.identity != contract.sidecar):
            found = f"with another sidecar than {source.sidecar.path}" if source.sidecar else f"with a sidecar, and {model_index.files[0]} has none now"
            raise OptionError(f"{profile.path}: was measured {found}: {again}")
        return contract


_FIELDS = tuple(field.name for field in fields(Candidate))
_SHARES = ("t1", "t2", "share", "low", "skipped", "reroute", "reroute_margin", "resident", "rerouted")
_LAYOUT: dict[str, Layout] = {
    **{name: ("fi", ("tried",), 0, 1) for name in _SHARES},
    **{name: ("fi", ("tried",)) for name in ("loss", "kl")},
    **{name: ("fi", ("tried",), 0, 1e6) for name in ("cost", "size")},
    "decode": ("b", ("tried",)),
}
