"""Strategies and the one registry: cache policies, predictors and presets by name.

A strategy is a composition: a cache policy and a predictor, "POLICY+PREDICTOR". The papers' systems and moeoff's own are presets, names for
such compositions; a policy's name alone is the policy without a predictor, unless there is a preset of that name.
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
        keep: experts stay after their use until others need the room; the priorities are the eviction order.
        eager: the slices of all matrices are requested when the router has selected, not by each matrix's op.
        policy: writes the priorities; None: least recently used goes first.
        predictor: None: nothing is prefetched.
        options: of the predictor.
        share: of all experts, how many are candidates for a prefetch at least.
        bounded: while tokens are decoded, no more is queued ahead than fits between two gates, Fate's n = T / t_expert (§4.3); False: all that is predicted.
        fill: the buffer begins with the experts that calibration text used most, where a profile says which.
        ab_tested: prefetching is switched off where token times with it are longer than without.
        vram_mode: how a device computes with experts, if there is one and nothing else is asked for (`moeoff.options.Config`).
        precision: of misses, if no other is asked for. Lossless but for the presets whose summary says otherwise.
        tier: of a sidecar, that all experts are in if no other is asked for; None: the model's own.
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
        """With a predictor that looks this many layers ahead (ProMoE §4.4).

        Raises:
            OptionError: its predictor has no stride, or not this one.
        """
        if self.predictor is None or "stride" not in self.predictor.defaults:
            raise OptionError(f"strategy {self.name!r} has no stride to choose: promoe and POLICY+learned have")
        self.predictor.check(options := self.options | {"stride": stride})
        return replace(self, options=options)


POLICIES: dict[str, type[Policy]] = {}
PREDICTORS: dict[str, type[Predictor]] = {}
PRESETS: dict[str, Strategy] = {}


def register(part: Part, replace: bool = False) -> Part:
    """Makes a part known by its `name`: a subclass of `moeoff.policies.Policy` or of `moeoff.policies.Predictor` (then it works as a
    decorator), or a `moeoff.policies.Strategy`, which becomes a preset.

    A policy is known to `--strategy` and to `replay.simulate`, a predictor to POLICY+PREDICTOR, a preset to `--strategy`; what any of them
    learns, `moeoff calibrate` fits.

    Args:
        replace: another part of the same kind may have the name.

    Raises:
        OptionError: none of the three, or no name, or the name is taken.
    """
    known: Any
    if isinstance(part, Strategy):
        known = PRESETS
    elif isinstance(part, type) and issubclass(part, Policy):
        known = POLICIES
    elif isinstance(part, type) and issubclass(part, Predictor):
        known = PREDICTORS
    else:
        raise OptionError(f"{part!r} is no subclass of moeoff.policies.Policy or of moeoff.policies.Predictor, and no moeoff.policies.Strategy")
    if not part.name or part.name == "none" or (part.name in known and not replace):
        raise OptionError(f"{part!r} needs a `name` that is not taken: {part.name!r}")
    known[part.name] = part
    return part


def policy_names(live: bool = False) -> list[str]:
    """All cache policies; `live` leaves out those that know the future."""
    return [name for name, policy in POLICIES.items() if not (live and policy.offline)]


def get_policy(name: str) -> type[Policy]:
    """The cache policy of that name. Raises OptionError if there is none."""
    if name not in POLICIES:
        raise OptionError(f"unknown policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name]


def policy_of(name: str) -> type[Policy]:
    """The cache policy of that name, or of the strategy that has it. Raises OptionError if there is neither."""
    return get_policy(name) if name in POLICIES else get_strategy(name).policy or get_policy("lru")


def get_predictor(name: str) -> type[Predictor]:
    """The predictor of that name. Raises OptionError if there is none."""
    if name not in PREDICTORS:
        raise OptionError(f"unknown predictor {name!r}; there are: {', '.join(PREDICTORS)}")
    return PREDICTORS[name]


def strategy_names() -> list[str]:
    """Presets, `auto` before the others, and policies that can run alone, a user's registered ones included."""
    return [*sorted(PRESETS, key=lambda name: name != "auto"), *(name for name in policy_names(live=True) if name not in PRESETS)]


def get_strategy(name: str | Strategy) -> Strategy:
    """A composition of one's own as it is; or by name: a preset, a policy, or "POLICY+PREDICTOR" (either may be "none": LRU without Python, and no predictor).

    Raises:
        OptionError: there is no such strategy, or it needs to know the future.
    """
    if isinstance(name, Strategy):
        return name
    if name in PRESETS:
        return PRESETS[name]
    policy_name, plus, predictor_name = name.partition("+")
    if not plus and policy_name not in POLICIES:
        raise OptionError(f"unknown strategy {name!r}; there are: {', '.join(strategy_names())}, and POLICY+PREDICTOR")
    policy = get_policy("lru" if policy_name == "none" else policy_name)
    if policy.offline:
        raise OptionError(f"strategy {name!r} needs to know the future: only `moeoff simulate` can run it")
    if predictor_name in ("", "none"):
        return Strategy(name, policy.summary, policy=policy)
    predictor = get_predictor(predictor_name)
    return Strategy(name, f"{policy.summary}; {predictor.summary}", policy=policy, predictor=predictor, ab_tested=True)


def fits() -> dict[str, Section]:
    """Sections of a profile that the registered policies and predictors learn, by name. Parts may share one.

    Raises:
        OptionError: Two parts learn a section in different ways.
    """
    out: dict[str, Section] = {}
    for part in (*POLICIES.values(), *PREDICTORS.values()):
        for section in part.sections:
            if out.setdefault(section.name, section) is not section:
                raise OptionError(f"{part.name} fits section {section.name!r} of a profile in a way of its own: it needs another name")
    return out
