"""`Precision`: how much of it may be given up, and where: the numbers behind the expert buffer's rules, and the options that give them one by one.

Knows nothing of what they cost in quality: that is measured for each model, and is the caller's decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .errors import OptionError
from .option import number, option, read, table_of

LOWEST, INT4 = "lowest", "int4"  # asked for in the place of a tier's name: that of the fewest bits, and one of about four
LOW_SHARE = 0.05  # of the experts' memory, for low versions: measured by the research scripts
_OPENS = "run serve eval"
_GROUP = "Lossy rules without a bound"
_THRESHOLD: dict[str, Any] = {"parse": number(), "group": _GROUP, "commands": f"{_OPENS} simulate"}
_RULE: dict[str, Any] = {"group": _GROUP, "commands": _OPENS}


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
        low_tier: of the sidecar, the low precision; needed if anything is read in it.
        low_share: of the experts' memory, kept for low versions.

    Raises:
        OptionError: out of range, or low precision without a tier.
    """

    t1: float = option("--t1", metavar="S", default=1.0, help="Read uncached experts whose unimportance is above S in low precision (HOBBIT's T1).",
                       **_THRESHOLD)  # fmt: skip
    t2: float = option("--t2", metavar="S", default=1.0, help="Skip uncached experts whose unimportance is above S (HOBBIT's T2).", **_THRESHOLD)
    prefill_low_fraction: float = option("--prefill-low-fraction", metavar="P", default=0.0, **_THRESHOLD,
                                         help="Read this share of a prompt's experts, the least used, in low precision (Fate's p).")  # fmt: skip
    low_tier: str | None = option("--low-tier", metavar="NAME", help="The low precision: a tier of the sidecar, e.g. Q2_K, or int4 or lowest.", **_RULE)
    low_share: float = LOW_SHARE
    resident: float = 0.0
    mispredicted_low: bool = option("--mispredicted-low", default=False, **_RULE,
                                    help="Read only mispredicted experts in low precision (Fate §5.3).")  # fmt: skip
    tau: float = option("--tau", metavar="W", default=0.0, help="Skip uncached experts whose gate weight is below W (--max-loss sets it by measurement).",
                        **_THRESHOLD)  # fmt: skip
    weigh_prompts: bool = option("--weigh-prompts", default=False, **_RULE,
                                 help="Apply --t1 and --t2 to prompts, too: each expert by the token that needs it most (HOBBIT §3.2).")  # fmt: skip

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Precision | None:
        """Takes the options of this class out of others; None: none was given. No bound is promised, and `max_loss` takes none of them.

        Raises:
            OptionError: out of range, a threshold that reads low versions without a tier, or a tier that none reads.
        """
        thresholds = read(cls, {name: options.pop(name) for name in table_of(Precision) if name in options})
        if not any(value is not False for value in thresholds.values()):
            return None
        precision = cls(**{"t1": min(thresholds.get("t2", 1.0), 1.0)} | thresholds)
        if precision.low_tier and not precision.uses_low:
            raise OptionError("`low_tier` is read by `t1`, `t2`, `prefill_low_fraction` or `mispredicted_low`, and none of them is given")
        return precision

    def __post_init__(self) -> None:
        for name in ("prefill_low_fraction", "low_share", "resident"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise OptionError(f"`{name}`: lies between 0 and 1, not {share}")
        if not 0 <= self.t1 <= self.t2 <= 1:
            raise OptionError(f"0 <= `t1` <= `t2` <= 1 must hold, not `t1` {self.t1} and `t2` {self.t2}")
        if self.mispredicted_low and self.t1 < 1:
            raise OptionError("`mispredicted_low` has no use for `t1` and `t2`: give one or the other")
        if self.weigh_prompts and (self.t1 >= 1 or self.prefill_low_fraction > 0):
            raise OptionError("`weigh_prompts` weighs by `t1` and `t2`, in the place of `prefill_low_fraction`", hint={"t1": ...})
        if not 0 <= self.tau < math.inf or (self.tau and (self.t1 < 1 or self.mispredicted_low)):
            raise OptionError("`tau` is a weight of at least 0, and excludes `t1`, `t2` and `mispredicted_low`")
        if self.uses_low and not self.low_tier:
            raise OptionError("low precision needs a tier of the sidecar that is read, as Q2_K", hint={"low_tier": ...})

    @property
    def uses_low(self) -> bool:
        """Something may be served by low versions."""
        return self.t1 < self.t2 or self.prefill_low_fraction > 0 or self.mispredicted_low

    @property
    def lossless(self) -> bool:
        """Every token gets the experts of its router, in their own precision."""
        return self.t1 >= 1 and not (self.tau or self.prefill_low_fraction or self.mispredicted_low)


LOSSLESS = Precision()
