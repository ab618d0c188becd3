"""The quality contract: how much a model may lose, and which precision was measured on this very model to lose no more.

A section of the profile holds everything that was tried, with the bound of its loss; opening a model with a bound takes, within it, what is
expected to read the fewest bytes in the memory there is. Measured by `moeoff.measure.precision_search`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from ..errors import OptionError
from ..experts.profile import Profile
from ..experts.sidecar import ORIGINAL, ExpertSource
from ..gguf.model_index import ModelIndex
from ..precision import Precision
from ..system.arrays import Layout, WrongArrays, require_arrays
from .plan import expected_bytes

SECTION = "precision"
USUAL_SHARE = 0.5  # of the experts, that a run takes for resident which must be the same in any memory
VERSION = 3  # of the section; until 2 it held thresholds on sums of weights
_NEGLIGIBLE_READS = 0.01  # of a token's experts: who reads less is as good as resident, and the least lossy of those is taken


@dataclass(frozen=True)
class Candidate:
    """One precision and what it was measured to cost: a τ behind a simulated cache, or a tier in the place of all experts, or both.

    Attributes:
        tier: of the sidecar, that all experts are in; ORIGINAL: in the model's own.
        tau: `Precision.tau`; 0: nothing is left out.
        resident: share of the experts that the simulated cache held; 0: no matter how many.
        loss: relative increase of perplexity over the lossless model, as measured; upper_loss: that is not exceeded, with 95 % confidence in the whole search.
        kl: mean KL(lossless || this) in nats.
        cost: bytes to be read, 1 for lossless with as many resident.
        skipped: share of what the gates chose that was left out.
        size: bytes of all experts, 1 in the model's own precision.
    """

    tier: str
    tau: float
    resident: float
    loss: float
    upper_loss: float
    kl: float
    cost: float
    skipped: float = 0.0
    size: float = 1.0

    @property
    def precision(self) -> Precision:
        """The precision to open the model with, in addition to the tier that all experts are in."""
        return Precision(tau=self.tau, resident=self.resident) if self.tau else Precision()

    def expected_bytes(self, resident: float) -> float:
        """Bytes that a token reads, 1 for all its experts, if memory held this share of them in their own precision; more fit in the tier."""
        return expected_bytes(self.cost, min(resident / self.size, 1.0))


@dataclass(frozen=True)
class SelectedPrecision:
    """A bound that was asked for, what keeps it, and what that was measured to lose.

    tier: every expert is in this tier of the sidecar; ORIGINAL: in the model's own.
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
        """The candidate that reads the fewest bytes within the bound; None: lossless. What was measured with fewer experts resident loses less with more.

        Args:
            resident: share of the experts that memory holds in their own precision.
            among: which candidates may be taken; None: all.
        """

        def order(c: Candidate | None) -> tuple[float, float]:
            if c is None:
                return max(expected_bytes(1.0, resident), _NEGLIGIBLE_READS), 0.0
            return max(c.expected_bytes(resident), _NEGLIGIBLE_READS), c.kl

        usable = [c for c in self.candidates if c.upper_loss <= max_loss and c.resident <= resident / c.size and (among is None or among(c))]
        boldest = {c.tier: c for c in sorted(usable, key=lambda c: c.tau)}  # costs of different shares cannot be compared
        return min([None, *boldest.values(), *(c for c in usable if not c.tau)], key=order)

    def select(self, max_loss: float, resident: float = 0.0, among: Callable[[Candidate], bool] | None = None) -> SelectedPrecision:
        """`choose`, as a model is opened with it."""
        chosen = self.choose(max_loss, resident, among)
        if chosen is None:
            return SelectedPrecision(max_loss, Precision(), ORIGINAL, 0.0)
        return SelectedPrecision(max_loss, chosen.precision, chosen.tier, max(chosen.loss, 0.0))

    def to_section(self) -> dict[str, np.ndarray]:
        """Arrays for `Profile.write`."""
        rows = {name: np.array([getattr(c, name) for c in self.candidates]) for name in _FIELDS}
        hashes = {name: np.uint64(getattr(self, name)) for name in ("sidecar", "text")}
        return rows | {name: np.array(getattr(self, name)) for name in _FACTS} | hashes | {"version": np.array(VERSION)}

    @classmethod
    def from_section(cls, s: dict[str, np.ndarray]) -> LossContract:
        """Raises `LookupError` for a section of an earlier moeoff, `WrongArrays` for one that is damaged."""
        if "version" not in s or s["version"].shape or s["version"].dtype.kind not in "iu" or int(s["version"]) != VERSION:
            raise LookupError("version")
        require_arrays(s, _LAYOUT)
        if s.get("tier", s["tau"]).dtype.kind != "U" or s["tier"].shape != s["tau"].shape or np.isnan(s["upper_loss"].astype(float)).any():
            raise WrongArrays("'tier' or 'upper_loss' is no list of names, or of bounds")
        rows = [{name: s[name][i].item() for name in _FIELDS} for i in range(len(s["tau"]))]
        return cls(candidates=tuple(Candidate(**row) for row in rows), **{name: int(s[name]) for name in _FACTS})

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
            difference = f"with another sidecar than {source.sidecar.path}" if source.sidecar else f"with a sidecar, and {model_index.files[0]} has none now"
            raise OptionError(f"{profile.path}: was measured {difference}: {again}")
        return contract


_FIELDS = tuple(field.name for field in fields(Candidate))
_FACTS = ("sidecar", "text", "n_windows", "n_tokens", "ctx")  # of the contract
_LAYOUT: dict[str, Layout] = {
    **{name: ("i", ()) for name in _FACTS},
    **{name: ("fi", ("tried",), 0, 1) for name in ("resident", "skipped")},
    **{name: ("fi", ("tried",)) for name in ("loss", "kl")},
    **{name: ("fi", ("tried",), 0, 1e6) for name in ("tau", "cost")},
    "size": ("fi", ("tried",), 1e-6, 1e6),
}
