"""Strategies by name: what stays in memory, and when experts are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from .cache import get_policy, names
from .errors import OptionError


@dataclass(frozen=True)
class Strategy:
    """Attributes:
    keep: slices stay after their use until others need the room; the priorities say which go first.
    eager: the gate asks for the slices of all matrices at once.
    policy: name of the cache policy that writes the priorities (`moeoff.cache`), or None.
    """

    name: str
    summary: str
    keep: bool = True
    eager: bool = True
    policy: str | None = None


# the papers' baseline: every use reads, one matrix after the other
ON_DEMAND = Strategy("on-demand", "keeps nothing, reads every expert when it computes", keep=False, eager=False)


def strategy_names() -> list[str]:
    """All that `get_strategy` knows, a user's registered policies included."""
    first, *rest = names(live=True)
    return [first, ON_DEMAND.name, *rest]


def get_strategy(name: str) -> Strategy:
    """Raises:
    OptionError: there is no such strategy, or it needs to know the future.
    """
    if name == ON_DEMAND.name:
        return ON_DEMAND
    if name not in names():
        raise OptionError(f"unknown strategy {name!r}; there are: {', '.join(strategy_names())}")
    policy = get_policy(name)
    if policy.offline:
        raise OptionError(f"strategy {name!r} needs to know the future: only `moeoff simulate` can run it")
    return Strategy(name, policy.summary, policy=name)
