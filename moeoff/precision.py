"""`Precision`: rules for lower precision, and the lossy options that set each of them.

Their loss depends on the model and is measured elsewhere (`moeoff.measure`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .errors import OptionError
from .option import number, option_field, read, table_of

LOWEST, INT4 = "lowest", "int4"  # names for the tier of fewest bits and that of about four
LOW_SHARE = 0.05  # of the experts' memory; measured by scripts/research
_OPENS = "run serve eval"
_GROUP = "Lossy rules without a bound"
_THRESHOLD: dict[str, Any] = {"parse": number(), "group": _GROUP, "commands": f"{_OPENS} simulate"}
_RULE: dict[str, Any] = {"group": _GROUP, "commands": _OPENS}


@dataclass(frozen=True)
class Precision:
    """Which experts may be served in low precision or skipped. The default is lossless.

    Resident experts are always served in the model's precision. Rules for others:

    Attributes:
        t1: Threshold for low precision in decoding (HOBBIT §3.2). Unimportance s is the
            sum of the token's larger gate weights, scaled to 1 (equation 2): high
            precision if s <= t1, low if t1 < s <= t2, skipped if s > t2. The first
            expert is high.
        t2: Threshold for skipping.
        weigh_prompts: True to apply t1 and t2 to prompts, by each expert's main token.
        tau: Minimum gate weight in decoding, instead of t1 and t2: lighter experts that
            are not being read are skipped without rescaling the other weights
            (docs/guides/precision.md). 0: none.
        prefill_low_fraction: Share of a prompt batch's experts, those of the fewest
            tokens, rounded down, to read in low precision (Fate §4.5).
        mispredicted_low: True to serve experts that no prefetch requested low in
            decoding, instead of t1 and t2 (Fate §5.3).
        resident: Share of each layer's experts that a deterministic run takes as
            resident, by a simulated cache; 0: none.
        low_tier: Tier of the sidecar for low precision, required if anything is low.
        low_share: Share of the experts' memory for low versions.

    Raises:
        OptionError: A value is out of range, or low precision has no tier.
    """

    t1: float = option_field(
        "--t1",
        metavar="S",
        default=1.0,
        help="Read uncached experts whose unimportance is above S in low precision (HOBBIT's T1).",
        **_THRESHOLD,
    )
    t2: float = option_field(
        "--t2",
        metavar="S",
        default=1.0,
        help="Skip uncached experts whose unimportance is above S (HOBBIT's T2).",
        **_THRESHOLD,
    )
    prefill_low_fraction: float = option_field(
        "--prefill-low-fraction",
        metavar="P",
        default=0.0,
        **_THRESHOLD,
        help="Read this share of a prompt's experts, the least used, in low precision (Fate's p).",
    )
    low_tier: str | None = option_field(
        "--low-tier",
        metavar="NAME",
        help="The low precision: a tier of the sidecar, e.g. Q2_K, or int4 or lowest.",
        **_RULE,
    )
    low_share: float = LOW_SHARE
    resident: float = 0.0
    mispredicted_low: bool = option_field(
        "--mispredicted-low",
        default=False,
        **_RULE,
        help="Read only mispredicted experts in low precision (Fate §5.3).",
    )
    tau: float = option_field(
        "--tau",
        metavar="W",
        default=0.0,
        help=(
            "Skip uncached experts whose gate weight is below W (--max-loss sets it by"
            " measurement)."
        ),
        **_THRESHOLD,
    )
    weigh_prompts: bool = option_field(
        "--weigh-prompts",
        default=False,
        **_RULE,
        help=(
            "Apply --t1 and --t2 to prompts, too: each expert by the token that needs it most"
            " (HOBBIT §3.2)."
        ),
    )

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Precision | None:
        """Remove this class's options from others; None if none was given.

        Raises:
            OptionError: A value is out of range, or the tier is missing or unused.
        """
        thresholds = read(
            cls, {name: options.pop(name) for name in table_of(Precision) if name in options}
        )
        if not any(value is not False for value in thresholds.values()):
            return None
        precision = cls(**{"t1": min(thresholds.get("t2", 1.0), 1.0)} | thresholds)
        if precision.low_tier and not precision.uses_low:
            rules = "`t1`, `t2`, `prefill_low_fraction` or `mispredicted_low`"
            raise OptionError(f"`low_tier` needs {rules}, and none of them is given")
        return precision

    def __post_init__(self) -> None:
        for name in ("prefill_low_fraction", "low_share", "resident"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise OptionError(f"`{name}`: expected 0 to 1, got {share}")
        if not 0 <= self.t1 <= self.t2 <= 1:
            got = f"got `t1` {self.t1} and `t2` {self.t2}"
            raise OptionError(f"expected 0 <= `t1` <= `t2` <= 1, {got}")
        if self.mispredicted_low and self.t1 < 1:
            raise OptionError("`mispredicted_low` excludes `t1` and `t2`")
        if self.weigh_prompts and (self.t1 >= 1 or self.prefill_low_fraction > 0):
            why = "`weigh_prompts` needs `t1` or `t2`, and excludes `prefill_low_fraction`"
            raise OptionError(why, hint={"t1": ...})
        if not 0 <= self.tau < math.inf or (self.tau and (self.t1 < 1 or self.mispredicted_low)):
            why = "`tau` is a weight of at least 0, and excludes `t1`, `t2` and `mispredicted_low`"
            raise OptionError(why)
        if self.uses_low and not self.low_tier:
            why = "low precision needs a tier of the sidecar such as Q2_K"
            raise OptionError(why, hint={"low_tier": ...})

    @property
    def uses_low(self) -> bool:
        """True if anything may be served in low precision."""
        return self.t1 < self.t2 or self.prefill_low_fraction > 0 or self.mispredicted_low

    @property
    def lossless(self) -> bool:
        """True if every token gets its router's experts in the model's precision."""
        return self.t1 >= 1 and not (self.tau or self.prefill_low_fraction or self.mispredicted_low)


LOSSLESS = Precision()
