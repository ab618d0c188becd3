"""How much precision may be given up, and where: the numbers behind the expert buffer's rules.

Knows nothing of what they cost in quality: that is measured for each model, and is the caller's decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import OptionError

LOW_SHARE = 0.05  # of the experts' memory, for low versions: measured by the research scripts


@dataclass(frozen=True)
class Precision:
    """Which experts may be served in low precision, or not at all. The default is lossless.

    A resident expert is always served in its own precision. What else happens to one that is chosen and not resident:

    Attributes:
        t1, t2: for tokens that are decoded, each by itself (HOBBIT §3.2). An expert's unimportance s is the sum of the larger gate weights of the same
            token, all scaled to 1 (equation 2): s <= t1 is read in high precision, t1 < s <= t2 in low, s > t2 is skipped. The
            first expert is always read in high precision.
        weigh_prompts: t1 and t2 hold for a prompt's tokens, too: an expert is read as the token wants it to which it matters most.
        tau: for tokens that are decoded, in the place of t1 and t2: an expert whose weight, the factor of its output, lies below it and that is not
            on its way either is left out; the other weights stay as they are. docs/guides/precision.md has the rule. 0: none is left out.
        prefill_low_fraction: for a prompt's batch (Fate §4.5). Of the experts chosen, this share is read in low precision: those
            that the fewest tokens chose, rounded down. Nothing is skipped.
        mispredicted_low: for tokens that are decoded, instead of t1 and t2: an expert that is neither resident nor asked for by a prefetch is
            served low, whatever its weight; what was predicted is read as it is (Fate §5.3).
        resident: of a deterministic run, the share of each layer's experts that its decisions take for resident: those that a
            simulated cache would hold, whatever is in memory. 0: none.
        tier: of the sidecar, the low precision; needed if anything is read in it.
        low_share: of the experts' memory, kept for low versions.

    Raises:
        OptionError: out of range, or low precision without a tier.
    """

    t1: float = 1.0
    t2: float = 1.0
    prefill_low_fraction: float = 0.0
    tier: str | None = None
    low_share: float = LOW_SHARE
    resident: float = 0.0
    mispredicted_low: bool = False
    tau: float = 0.0
    weigh_prompts: bool = False

    def __post_init__(self) -> None:
        numbers = (self.t1, self.t2, self.prefill_low_fraction, self.low_share, self.resident, self.tau)
        if not all(math.isfinite(x) for x in numbers):
            raise OptionError(f"precision: thresholds and shares are numbers: {self}")
        if not 0 <= self.t1 <= self.t2 <= 1:
            raise OptionError(f"0 <= `t1` <= `t2` <= 1 must hold, not `t1` {self.t1} and `t2` {self.t2}")
        if not 0 <= self.prefill_low_fraction <= 1:
            raise OptionError(f"`prefill_low_fraction`: lies between 0 and 1, not {self.prefill_low_fraction}")
        if not 0 <= self.resident <= 1:
            raise OptionError(f"precision: the share of a simulated cache lies between 0 and 1, not {self.resident}")
        if not 0 < self.low_share < 1:
            raise OptionError(f"precision: the low versions' share of the memory lies between 0 and 1, not {self.low_share}")
        if self.mispredicted_low and self.t1 < 1:
            raise OptionError("`mispredicted_low` has no use for `t1` and `t2`: give one or the other")
        if self.weigh_prompts and (self.t1 >= 1 or self.prefill_low_fraction > 0):
            raise OptionError("`weigh_prompts` weighs by `t1` and `t2`, in the place of `prefill_low_fraction`", hint={"t1": ...})
        if self.tau < 0 or (self.tau > 0 and (self.t1 < 1 or self.mispredicted_low)):
            raise OptionError("`tau` is a weight of at least 0, and excludes `t1`, `t2` and `mispredicted_low`")
        if self.uses_low and not self.tier:
            raise OptionError("low precision needs a tier of the sidecar that is read, as Q2_K", hint={"low_tier": ...})

    @property
    def uses_low(self) -> bool:
        """Something may be served by low versions."""
        return self.t1 < self.t2 or self.prefill_low_fraction > 0 or self.mispredicted_low

    @property
    def lossless(self) -> bool:
        """Every token gets the experts of its router, in their own precision."""
        return self.t1 >= 1 and self.tau <= 0 and self.prefill_low_fraction <= 0 and not self.mispredicted_low


LOSSLESS = Precision()
