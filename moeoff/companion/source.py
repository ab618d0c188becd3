"""Which file a run reads its experts from: the model, or a tier of its companion."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import OptionError, Remedy
from ..gguf.layout import Layout
from .file import KEEP, Companion, companion_path

__all__ = ["ExpertSource"]


@dataclass(frozen=True)
class ExpertSource:
    """Where a model's experts are read from: the companion's `tier`, or the model itself if companion is None or has no such
    tier. verify: every read is compared with its hash."""

    companion: Companion | None = None
    tier: str = KEEP
    verify: bool = False

    @property
    def repacked(self) -> Companion | None:
        """The companion, if it holds them."""
        return self.companion if self.companion is not None and self.tier in self.companion.tiers else None

    def low(self, tier: str) -> ExpertSource:
        """Where the low versions are, if these are the high ones.

        Raises:
            OptionError: there is no companion, or it has no such tier, or the high versions are read from it.
        """
        if self.companion is None:
            raise OptionError(f"low precision ({tier}) needs a companion of the model", Remedy.MAKE_COMPANION)
        name = self.companion.tier(tier)
        if name is None or name in (self.tier, KEEP):
            others = ", ".join(t for t in self.companion.tiers if t not in (self.tier, KEEP)) or "none"
            raise OptionError(f"{self.companion.path}: no tier {tier} below {self.tier}; there are: {others}")
        return ExpertSource(self.companion, name, self.verify)

    @classmethod
    def make(cls, layout: Layout, experts: Companion | str | os.PathLike[str] | bool = "auto", tier: str | None = None, verify: bool = False) -> ExpertSource:
        """Finds the companion and checks that it is this model's.

        Args:
            experts: it, or its path; "auto" for the one beside the model, if there is one; False for none.
            tier: one of the companion's. By default "keep", the model's own precision, from whichever file has it.

        Raises:
            ModelError: the companion is missing, damaged, or of another model.
            OptionError: it has no such tier; or something is asked that needs a companion, and there is none.
        """
        automatic = experts is True or experts == "auto"
        beside = companion_path(layout.files[0])
        found = experts if not automatic else beside if os.path.exists(beside) else None
        if isinstance(found, bool) or not found:
            if tier not in (None, KEEP) or verify:
                what = "verify_reads" if verify else f"tier {tier}"
                raise OptionError(f"{what} needs a companion of {layout.files[0]}", Remedy.MAKE_COMPANION)
            return cls()
        companion = found if isinstance(found, Companion) else Companion(found)
        companion.check_belongs(layout)
        if tier is None and not automatic and KEEP not in companion.tiers:
            raise OptionError(f"{companion.path}: holds lower precision only", Remedy.CHOOSE_TIER, tier=companion.tiers[0])
        name = KEEP if tier is None or tier.lower() == KEEP else companion.tier(tier)
        if name is None:
            raise OptionError(f"{companion.path}: no tier {tier}; there are {', '.join(dict.fromkeys([*companion.tiers, KEEP]))}")
        return cls(companion, name, verify)


def relative_bytes(layout: Layout, companion: Companion, tier: str) -> float:
    """Bytes of the experts in a tier, for each byte of the model's own."""
    name = companion.tier(tier) or tier
    return sum(s.nbytes for span in layout.experts.values() for s in companion.sources(span, name)) / layout.expert_bytes


def low_cost(layout: Layout) -> float | None:
    """`relative_bytes` of the smallest tier of the companion beside a model; None without one.

    Raises:
        ModelError: the companion is damaged, or of another model.
    """
    path = companion_path(layout.files[0])
    if not os.path.exists(path):
        return None
    companion = Companion(path)
    companion.check_belongs(layout)
    return min((relative_bytes(layout, companion, tier) for tier in companion.tiers if tier != KEEP), default=None)
