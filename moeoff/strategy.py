"""Strategies by name: what stays in memory, and when experts are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import OptionError


@dataclass(frozen=True)
class Strategy:
    """Attributes:
    keep: slices stay after their use until others need the room; the priorities say which go first.
    eager: the gate asks for the slices of all matrices at once.
    """

    name: str
    summary: str
    keep: bool
    eager: bool


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        # all priorities equal: native evicts the least recently used
        Strategy("lru", "keeps the most recently used experts", keep=True, eager=True),
        # the papers' baseline: every use reads, one matrix after the other
        Strategy("on-demand", "keeps nothing, reads every expert when it computes", keep=False, eager=False),
    )
}


def get_strategy(name: str) -> Strategy:
    try:
        return STRATEGIES[name]
    except KeyError:
        raise OptionError(f"unknown strategy {name!r}; there are: {', '.join(STRATEGIES)}") from None
