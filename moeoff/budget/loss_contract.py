"""The loss contract: precisions measured on this model to keep a bound of loss.

A section of the profile holds all measured candidates. Of those within the bound, a
model is opened with the one that reads the fewest bytes in the available memory.
`moeoff.measure.precision_search` measures them.
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
DEFAULT_RESIDENT = 0.5  # of experts taken as resident if a run must not depend on memory
CONTRACT_VERSION = 3  # of the section; up to 2 with thresholds on sums of weights
_NEGLIGIBLE_READS = 0.01  # share of a token's experts; below it the least lossy is best


@dataclass(frozen=True)
class Candidate:
    """A measured precision: τ with a simulated cache, a tier for all experts, or both.

    Attributes:
        tier: Tier of all experts; ORIGINAL: the model's precision.
        tau: `Precision.tau`, 0 to skip none.
        resident: Share of experts in the simulated cache, 0 if irrelevant.
        loss: Measured relative increase of perplexity.
        upper_loss: Upper bound of `loss` at 95 % confidence in the whole search.
        kl: Mean KL(lossless || this) in nats.
        cost: Bytes read, relative to lossless with the same resident share.
        skipped: Share of routed experts that was skipped.
        size: Bytes of all experts relative to the model's own.
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
        """The precision in addition to the tier."""
        return Precision(tau=self.tau, resident=self.resident) if self.tau else Precision()

    def expected_bytes(self, resident: float) -> float:
        """Return a token's bytes, relative to all its experts.

        Args:
            resident: Share of experts that memory would hold in the model's precision.
        """
        return expected_bytes(self.cost, min(resident / self.size, 1.0))


@dataclass(frozen=True)
class SelectedPrecision:
    """A precision and a tier of all experts, selected for a bound of loss."""

    max_loss: float
    precision: Precision
    tier: str
    estimated_loss: float


@dataclass(frozen=True)
class LossContract:
    """All measurements of a model with one sidecar.

    Attributes:
        sidecar: Identity of the sidecar, 0 without one.
        text: Hash of the windows' tokens.
        n_tokens: Number of scored tokens.
        ctx: Context length in tokens.
    """

    sidecar: int
    text: int
    n_windows: int
    n_tokens: int
    ctx: int
    candidates: tuple[Candidate, ...]

    def choose(
        self,
        max_loss: float,
        resident: float = 0.0,
        among: Callable[[Candidate], bool] | None = None,
    ) -> Candidate | None:
        """Return the candidate within the bound with the fewest reads; None: lossless.

        Candidates measured with fewer resident experts lose less with more.

        Args:
            resident: Share of experts that memory holds in the model's precision.
            among: Predicate of allowed candidates.
        """

        def order(c: Candidate | None) -> tuple[float, float]:
            nbytes = c.expected_bytes(resident) if c else expected_bytes(1.0, resident)
            return max(nbytes, _NEGLIGIBLE_READS), c.kl if c else 0.0

        usable = [
            c
            for c in self.candidates
            if c.upper_loss <= max_loss
            and c.resident <= resident / c.size
            and (among is None or among(c))
        ]
        boldest = {c.tier: c for c in sorted(usable, key=lambda c: c.tau)}  # costs are per share
        return min([None, *boldest.values(), *(c for c in usable if not c.tau)], key=order)

    def select(
        self,
        max_loss: float,
        resident: float = 0.0,
        among: Callable[[Candidate], bool] | None = None,
    ) -> SelectedPrecision:
        """Return the choice of `choose` to open a model with."""
        chosen = self.choose(max_loss, resident, among)
        if chosen is None:
            return SelectedPrecision(max_loss, Precision(), ORIGINAL, 0.0)
        return SelectedPrecision(max_loss, chosen.precision, chosen.tier, max(chosen.loss, 0.0))

    def to_section(self) -> dict[str, np.ndarray]:
        """Return arrays for `Profile.write`."""
        rows = {name: np.array([getattr(c, name) for c in self.candidates]) for name in _FIELDS}
        hashes = {name: np.uint64(getattr(self, name)) for name in ("sidecar", "text")}
        return (
            rows
            | {name: np.array(getattr(self, name)) for name in _FACTS}
            | hashes
            | {"version": np.array(CONTRACT_VERSION)}
        )

    @classmethod
    def from_section(cls, s: dict[str, np.ndarray]) -> LossContract:
        """Parse arrays. Raise LookupError for old versions, WrongArrays if damaged."""
        if (
            "version" not in s
            or s["version"].shape
            or s["version"].dtype.kind not in "iu"
            or int(s["version"]) != CONTRACT_VERSION
        ):
            raise LookupError("version")
        require_arrays(s, _LAYOUT)
        if (
            s.get("tier", s["tau"]).dtype.kind != "U"
            or s["tier"].shape != s["tau"].shape
            or np.isnan(s["upper_loss"].astype(float)).any()
        ):
            raise WrongArrays("expected names in 'tier' and numbers in 'upper_loss'")
        rows = [{name: s[name][i].item() for name in _FIELDS} for i in range(len(s["tau"]))]
        return cls(
            candidates=tuple(Candidate(**row) for row in rows),
            **{name: int(s[name]) for name in _FACTS},
        )

    @classmethod
    def find(
        cls, model_index: ModelIndex, profile: Profile | None, source: ExpertSource, max_loss: float
    ) -> LossContract:
        """Return the contract in a profile.

        Raises:
            OptionError: There is no contract, or one for another sidecar.
        """
        again = f"moeoff calibrate -m {model_index.files[0]} --max-loss {100 * max_loss:g}%"
        section = profile.section(SECTION) if profile else None
        if profile is None or section is None:
            raise OptionError(f"`max_loss` needs a measurement of this very model: {again}")
        try:
            contract = cls.from_section(section)
        except LookupError:
            raise OptionError(
                f"{profile.path}: was measured by an earlier moeoff: {again}"
            ) from None
        except WrongArrays as error:
            why = f"the measurement is damaged ({error})"
            raise OptionError(f"{profile.path}: {why}: {again}") from None
        if contract.sidecar and (
            source.sidecar is None or source.sidecar.identity != contract.sidecar
        ):
            difference = f"with a sidecar, and {model_index.files[0]} has none now"
            if source.sidecar:
                difference = f"with another sidecar than {source.sidecar.path}"
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
