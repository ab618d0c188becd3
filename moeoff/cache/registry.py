"""Policies by name."""

from __future__ import annotations

from ..errors import OptionError
from .arc import ARC
from .base import Policy, Shape
from .belady import Belady
from .decay import Decay
from .edgemoe import EdgeMoE
from .hobbit import Hobbit
from .lfu import LFU
from .lru import LRU
from .score import Score
from .static import Static

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (LRU, LFU, Static, Decay, ARC, EdgeMoE, Hobbit, Score, Belady)}
# a name for a policy with other options than its defaults
VARIANTS: dict[str, tuple[str, dict]] = {
    "lfu-model": ("lfu", {"sequence": False}),
    "arc-even": ("arc", {"shallow": 0}),
    "edgemoe-printed": ("edgemoe", {"printed": True}),
}


def register(policy: type[Policy], replace: bool = False) -> type[Policy]:
    """Makes a user's policy known by its `name`, to `--strategy` and to `simulate`. Works as a decorator.

    Raises:
        OptionError: no name, not a policy, or the name is taken.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise OptionError(f"{policy!r} is not a subclass of moeoff.cache.Policy")
    taken = policy.name in VARIANTS or policy.name == "on-demand" or (policy.name in POLICIES and not replace)
    if not policy.name or taken:
        raise OptionError(f"{policy.__name__} needs a `name` that is not taken: {policy.name!r}")
    POLICIES[policy.name] = policy
    return policy


def names(live: bool = False) -> list[str]:
    """All names; `live` leaves out the policies that know the future."""
    return [n for n in [*POLICIES, *VARIANTS] if not (live and get_policy(n).offline)]


def get_policy(name: str) -> type[Policy]:
    """The class behind a name or a variant's.

    Raises:
        OptionError: there is none.
    """
    base = VARIANTS[name][0] if name in VARIANTS else name
    if base not in POLICIES:
        raise OptionError(f"unknown strategy {name!r}; there are: {', '.join([*POLICIES, *VARIANTS])}")
    return POLICIES[base]


def create(name: str, shape: Shape, table=None, seed: int = 0, **options) -> Policy:
    """A new policy of that name; `options` beat a variant's."""
    return get_policy(name)(shape, table, seed, **(VARIANTS.get(name, ("", {}))[1] | options))
