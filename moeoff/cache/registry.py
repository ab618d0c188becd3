"""Policies by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..registry import Registry
from .arc import ARC
from .base import Policy, Sections, Shape
from .belady import Belady
from .decay import Decay
from .edgemoe import EdgeMoE
from .hobbit import Hobbit
from .lfu import LFU
from .lru import LRU
from .lru_layer import LayerLRU
from .score import Score
from .static import Static

# a name for a policy with other options than its defaults
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfu-model": ("lfu", {"sequence": False}),
    "arc-even": ("arc", {"shallow": 0}),
    "edgemoe-printed": ("edgemoe", {"printed": True}),
}
# two names of strategies that have no policy of their own
_registry = Registry(
    Policy, "policy", (LRU, LayerLRU, LFU, Static, Decay, ARC, EdgeMoE, Hobbit, Score, Belady), variants=VARIANTS, reserved=("on-demand", "none")
)
POLICIES = _registry.classes


def register(policy: type[Policy], replace: bool = False) -> type[Policy]:
    """Makes a user's policy known by its `name`, to `--strategy` and to `simulate`. Works as a decorator.

    Raises:
        OptionError: no name, not a policy, or the name is taken.
    """
    return _registry.register(policy, replace)


def names(live: bool = False) -> list[str]:
    """All names; `live` leaves out the policies that know the future."""
    return [name for name in _registry.names() if not (live and get_policy(name).offline)]


def get_policy(name: str) -> type[Policy]:
    """The class behind a name or a variant's.

    Raises:
        OptionError: there is none.
    """
    return _registry.get(name)


def create(name: str, shape: Shape, table: np.ndarray | None = None, seed: int = 0, *, profile: Sections | None = None, **options: Any) -> Policy:
    """A new policy of that name. `options` beat a variant's, and both what the `profile_sections` of a profile give."""
    return get_policy(name).from_profile(profile or {}, shape, table, seed, **(_registry.options(name) | options))
