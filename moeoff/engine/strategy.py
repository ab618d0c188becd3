"""Strategies by name: which experts stay in memory, which are predicted next, and when they are requested.

A strategy is a composition: a cache policy (`moeoff.cache`) and a predictor (`moeoff.predict`), "POLICY+PREDICTOR". The
papers' systems and moeoff's own are names for such compositions; a policy's name alone is the policy without a predictor, unless
it is one of those.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .. import predict
from ..budget.precision import LOSSLESS, Precision
from ..cache import Policy, get_policy, names
from ..cache import register as register_policy
from ..errors import OptionError

Part = TypeVar("Part", bound=type)


@dataclass(frozen=True)
class Strategy:
    """Attributes:
    keep: slices stay after their use until others need the room; the priorities are the eviction order.
    eager: the slices of all matrices are requested when the router has selected, not by each matrix's op.
    serial: a matrix op reads all its slices before it computes with any.
    policy: name of the cache policy that writes the priorities (`moeoff.cache`), or None.
    predictor: name of the predictor (`moeoff.predict`), or None.
    options: of the predictor.
    share: of all experts, how many are candidates for a prefetch at least.
    fill: the buffer begins with the experts that calibration text used most, where a profile says which.
    ab_tested: prefetching is switched off where token times with it are longer than without.
    vram_mode: how a device computes with experts, if there is one and nothing else is asked for (`moeoff.engine.config.Config`).
    precision: of misses, if no other is asked for. Lossless but for the presets whose summary says otherwise.
    """

    name: str
    summary: str
    keep: bool = True
    eager: bool = True
    serial: bool = False
    policy: str | None = None
    predictor: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 0.0
    ab_tested: bool = False
    fill: bool = False
    vram_mode: str = "auto"
    precision: Precision = LOSSLESS

    def ahead(self, stride: int) -> Strategy:
        """With a predictor that looks this many layers ahead (ProMoE §4.4).

        Raises:
            OptionError: its predictor has no stride, or not this one.
        """
        if self.predictor is None or "stride" not in (kind := predict.get_predictor(self.predictor)).defaults:
            raise OptionError(f"strategy {self.name!r} has no stride to choose: promoe and POLICY+learned have")
        kind.check(options := self.options | {"stride": stride})
        return replace(self, options=options)


PRESETS = {
    s.name: s
    for s in (
        Strategy(
            "auto", "the best measured parts: score with the cross-layer gate, prefetching where it pays", policy="score", predictor="gate", ab_tested=True
        ),
        Strategy("on-demand", "keeps nothing, reads every expert when it computes: the papers' baseline", keep=False, eager=False, serial=True),
        Strategy("fate", "Fate: shallow-favoring ARC, cross-layer gate widened to a quarter", policy="arc", predictor="gate", share=0.25, vram_mode="centric"),
        Strategy("edgemoe", "EdgeMoE: frequency over distance, activation path", policy="edgemoe", predictor="activation-path", fill=True),
        Strategy("hobbit", "HOBBIT: weighted cache, three layers' gates stacked", policy="hobbit", predictor="stacked", vram_mode="centric"),
        Strategy(
            "hobbit-jetson",
            "HOBBIT from flash, lossy: misses of less weight in two bits, of little weight skipped (a companion with Q2_K)",
            policy="hobbit",
            predictor="stacked",
            precision=Precision(t1=0.6, t2=0.9, tier="Q2_K"),
        ),
        Strategy(
            "promoe",
            "ProMoE: LRU in each layer, learned predictor two layers ahead",
            policy="lru-layer",
            predictor="learned",
            options={"stride": 2},
            vram_mode="centric",
        ),
        Strategy("eap", "Fate's baseline: its cache, and the expert activation path of one layer", policy="arc", predictor="eap"),
    )
}


def register(part: Part, replace: bool = False) -> Part:
    """Makes a part of strategies known by its `name`: a subclass of `moeoff.cache.Policy` or of `moeoff.predict.Predictor`. Works as a decorator.

    A policy is known to `--strategy` and to `moeoff.simulate`, a predictor to POLICY+PREDICTOR and to `moeoff calibrate`.

    Raises:
        OptionError: neither, or no name, or the name is taken (unless `replace`).
    """
    if isinstance(part, type) and issubclass(part, Policy):
        register_policy(part, replace)
    elif isinstance(part, type) and issubclass(part, predict.Predictor):
        predict.register(part, replace)
    else:
        raise OptionError(f"{part!r} is a subclass neither of moeoff.cache.Policy nor of moeoff.predict.Predictor")
    return part


def strategy_names() -> list[str]:
    """Presets and policies that can run alone, a user's registered ones included."""
    return [*PRESETS, *(n for n in names(live=True) if n not in PRESETS)]


def get_strategy(name: str | Strategy) -> Strategy:
    """A composition of one's own as it is; or by name: a preset, a policy, or "POLICY+PREDICTOR" (either may be "none": LRU without Python, and no predictor).

    Raises:
        OptionError: there is no such strategy, or it needs to know the future.
    """
    if isinstance(name, Strategy):
        return name
    if name in PRESETS:
        return PRESETS[name]
    policy_name, plus, predictor = name.partition("+")
    if not plus and policy_name not in names():
        raise OptionError(f"unknown strategy {name!r}; there are: {', '.join(strategy_names())}, and POLICY+PREDICTOR")
    if policy_name == "none":
        policy_name = "lru"
    policy = get_policy(policy_name)
    if policy.offline:
        raise OptionError(f"strategy {name!r} needs to know the future: only `moeoff simulate` can run it")
    if predictor in ("", "none"):
        return Strategy(name, policy.summary, policy=policy_name)
    return Strategy(name, f"{policy.summary}; {predict.get_predictor(predictor).summary}", policy=policy_name, predictor=predictor, ab_tested=True)
