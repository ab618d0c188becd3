"""Strategies, and the registry of cache policies, predictors and presets.

A strategy is a cache policy with a predictor, "POLICY+PREDICTOR". Presets, e.g. the
papers' systems, name combinations. A policy's name is also a strategy without a
predictor, unless it names a preset.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..errors import OptionError
from ..precision import LOSSLESS, Precision
from .base import Policy, Predictor, Section

Part = TypeVar("Part", bound="type[Policy] | type[Predictor] | Strategy")


@dataclass(frozen=True)
class Strategy:
    """A cache policy, a predictor, and how their experts are read.

    Attributes:
        keep: True to cache experts after use. Priorities are the eviction order.
        eager: True to request all matrices at the router's selection, not at each op.
        policy: Policy that writes the priorities. None: LRU.
        predictor: Predictor for prefetching, or None.
        share: Least share of all experts that are prefetch candidates.
        bounded: True to queue in decode what fits between two gates, Fate's n = T /
            t_expert (§4.3). False: all predicted experts that can be read before the
            router selects, and in any case as many as a token uses.
        fill: True to start with the profile's most used experts.
        ab_tested: True to stop prefetching if it makes tokens slower.
        vram_mode: Default of the option `vram_mode`.
        precision: Default precision of misses, lossless unless the summary names a
            loss.
        tier: Default tier of a sidecar. None: the model's own.
    """

    name: str
    summary: str
    keep: bool = True
    eager: bool = True
    policy: type[Policy] | None = None
    predictor: type[Predictor] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 0.0
    bounded: bool = True
    ab_tested: bool = False
    fill: bool = False
    vram_mode: str = "auto"
    precision: Precision = LOSSLESS
    tier: str | None = None

    def with_stride(self, stride: int) -> Strategy:
        """Return a copy whose predictor looks `stride` layers ahead (ProMoE §4.4).

        Raises:
            OptionError: The predictor does not support this stride.
        """
        if self.predictor is None or "stride" not in self.predictor.defaults:
            raise OptionError(f"strategy {self.name!r} has no stride as promoe and POLICY+learned")
        self.predictor.check(options := self.options | {"stride": stride})
        return replace(self, options=options)


POLICIES: dict[str, type[Policy]] = {}
PREDICTORS: dict[str, type[Predictor]] = {}
PRESETS: dict[str, Strategy] = {}


def register(part: Part, replace: bool = False) -> Part:
    """Register a policy, predictor or preset by its `name`. Usable as a class
    decorator.

    `--strategy`, `replay.simulate` and `moeoff calibrate` then know the part.

    Args:
        part: Subclass of `moeoff.policies.Policy` or `Predictor`, or a `Strategy`.
        replace: True to replace a part of the same kind and name.

    Raises:
        OptionError: `part` is none of these, has no name, or its name is taken.
    """
    known: Any
    if isinstance(part, Strategy):
        known = PRESETS
    elif isinstance(part, type) and issubclass(part, Policy):
        known = POLICIES
    elif isinstance(part, type) and issubclass(part, Predictor):
        known = PREDICTORS
    else:
        raise OptionError(
            f"expected a subclass of Policy or Predictor, or a Strategy, got {part!r}"
        )
    if not part.name or part.name == "none" or (part.name in known and not replace):
        raise OptionError(f"{part!r}: expected a `name` that is not taken, got {part.name!r}")
    known[part.name] = part
    return part


def policy_names(live: bool = False) -> list[str]:
    """Return all cache policies, or with `live` those that do not need the future."""
    return [name for name, policy in POLICIES.items() if not (live and policy.offline)]


def get_policy(name: str) -> type[Policy]:
    """Return a cache policy. Raise `OptionError` if it is unknown."""
    if name not in POLICIES:
        raise OptionError(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}")
    return POLICIES[name]


def policy_of(name: str) -> type[Policy]:
    """Return the cache policy of a policy or strategy by name, or raise."""
    return get_policy(name) if name in POLICIES else get_strategy(name).policy or get_policy("lru")


def get_predictor(name: str) -> type[Predictor]:
    """Return a predictor. Raise `OptionError` if it is unknown."""
    if name not in PREDICTORS:
        raise OptionError(f"unknown predictor {name!r}, expected one of {', '.join(PREDICTORS)}")
    return PREDICTORS[name]


def strategy_names() -> list[str]:
    """Return presets, `auto` first, and live policies, including registered ones."""
    return [
        *sorted(PRESETS, key=lambda name: name != "auto"),
        *(name for name in policy_names(live=True) if name not in PRESETS),
    ]


def get_strategy(name: str | Strategy) -> Strategy:
    """Return a strategy by name, or a `Strategy` as it is.

    Args:
        name: Preset, policy, or "POLICY+PREDICTOR". "none" means LRU, or no predictor.

    Raises:
        OptionError: The strategy is unknown or needs the future.
    """
    if isinstance(name, Strategy):
        return name
    if name in PRESETS:
        return PRESETS[name]
    policy_name, plus, predictor_name = name.partition("+")
    if not plus and policy_name not in POLICIES:
        raise OptionError(
            f"unknown strategy {name!r}, expected one of {', '.join(strategy_names())}, or"
            " POLICY+PREDICTOR"
        )
    policy = get_policy("lru" if policy_name == "none" else policy_name)
    if policy.offline:
        raise OptionError(f"strategy {name!r} needs the future: only `moeoff simulate` can run it")
    if predictor_name in ("", "none"):
        return Strategy(name, policy.summary, policy=policy)
    predictor = get_predictor(predictor_name)
    return Strategy(
        name,
        f"{policy.summary}; {predictor.summary}",
        policy=policy,
        predictor=predictor,
        ab_tested=True,
    )


def profile_sections() -> dict[str, Section]:
    """Return the profile sections of all registered policies and predictors, by name.

    Raises:
        OptionError: Two parts fit a section of the same name in different ways.
    """
    out: dict[str, Section] = {}
    for part in (*POLICIES.values(), *PREDICTORS.values()):
        for section in part.sections:
            if out.setdefault(section.name, section) is not section:
                raise OptionError(
                    f"{part.name}: profile section {section.name!r} has another fit, rename it"
                )
    return out
