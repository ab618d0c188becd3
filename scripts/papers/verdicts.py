"""Verdicts on a paper's claim from a measurement, by rule: reproduced, direction, level,
opposite or not testable here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moeoff.measure.statistics import Estimate

REPRODUCED, DIRECTION, LEVEL, OPPOSITE, NOT_TESTABLE = (
    "reproduced",
    "direction",
    "level",
    "opposite",
    "not testable here",
)
RULES = {
    REPRODUCED: "the claim's gain, or a hit rate's or accuracy's misses, to within a third",
    DIRECTION: (
        "a gain, though smaller or larger by more than a third: the 95 % interval lies above none"
    ),
    LEVEL: (
        "the interval holds no gain, or what there is makes less than a tenth of the claim's,"
        " or 1 %"
    ),
    OPPOSITE: "a loss where the paper has a gain",
    NOT_TESTABLE: "why stands beside it, or the simulated machine cannot reach the claim",
}
SPLIT = "sign depends on the share"
CLOSE, NOTHING, LEAST = 1 / 3, 0.1, 0.01  # of the claim's gain; of what is compared
MIN_ROUNDS = 5


def verdict(
    claim: float | tuple[float, float] | None,
    ours: Estimate,
    floor: float = 1.0,
    *,
    perfect: float | None = None,
    reachable: float | None = None,
) -> str:
    """Return the verdict on a claim.

    Args:
        claim: the paper's value, or the ends of its range; None: it has a direction and
            no number.
        ours: what was measured. Without an interval, as of one deterministic replay,
            the value stands for both its ends.
        floor: what would be no gain: 1 of a ratio, chance of an accuracy. A claim below
            it is one of a reduction.
        perfect: Value of a hit rate, accuracy or correlation without any miss. If
            given, the misses decide what is close.
        reachable: Ratio of a faster contender that never waits. A higher claim is not
            testable.
    """
    lowest = claim[0] if isinstance(claim, tuple) else claim
    if lowest is not None and reachable is not None and reachable < lowest:
        return NOT_TESTABLE
    low, high = (ours.value if bound is None else bound for bound in (ours.low, ours.high))
    theirs = (
        min(max(ours.value, claim[0]), claim[1])
        if isinstance(claim, tuple)
        else floor + 1
        if claim is None
        else claim
    ) - floor
    gain = (ours.value - floor) / theirs
    least = max(LEAST * max(abs(floor), LEAST) / abs(theirs), NOTHING if claim is not None else 0)
    if low <= floor <= high or abs(gain) < least:
        return LEVEL
    if gain < 0:
        return OPPOSITE
    if perfect is not None:
        gain = (perfect - ours.value) / (perfect - floor - theirs)
    return REPRODUCED if claim is not None and abs(gain - 1) <= CLOSE else DIRECTION


def weakest(verdicts: Sequence[str]) -> str:
    """Return the verdict of several claims in one row: the weakest of those that are
    testable.
    """
    return max(verdicts, key=(NOT_TESTABLE, REPRODUCED, DIRECTION, LEVEL, OPPOSITE).index)


def counted(cell: str) -> str:
    """The verdict as which a row counts whose shares or claims have one each: the
    weakest, or `SPLIT` where some gain and some lose.
    """
    if cell in RULES:
        return cell
    of_each = [
        part.partition(" with ")[0].partition(" (")[0]
        for part in cell.replace(", ", "; ").split("; ")
    ]
    return (
        SPLIT
        if OPPOSITE in of_each and {REPRODUCED, DIRECTION} & set(of_each)
        else weakest(of_each)
    )


def ratio(ours: Sequence[float], base: Sequence[float]) -> Estimate:
    """The geometric mean of the rounds' ratios, with an interval if there are enough of
    them.
    """
    logs = np.log(np.asarray(ours, float) / np.asarray(base, float))
    if len(logs) < MIN_ROUNDS:
        return Estimate(math.exp(logs.mean()), None, None)
    return Estimate.mean(logs[:, None]).map(math.exp)


def of_values(values: Sequence[float]) -> Estimate:
    """The mean of one value for each layer or text, with its interval."""
    return Estimate.mean(np.asarray(values, float)[:, None])


def text(estimate: Estimate, form: str = "{:.2f}") -> str:
    """The value, and its interval if it has one."""
    if estimate.low is None or estimate.high is None:
        return form.format(estimate.value)
    return (
        f"{form.format(estimate.value)} ({form.format(estimate.low)} to"
        f" {form.format(estimate.high)})"
    )
