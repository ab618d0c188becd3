"""Puts a strategy together for a started buffer: policy, predictor, trace and replay, under one driver."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from .. import predict
from ..budget.precision import LOSSLESS, Precision
from ..cache import create, get_policy
from ..companion.profile import Profile
from ..errors import OptionError, Remedy
from ..gguf.layout import Layout
from ..predict.router import Router
from ..simulate.trace import Model, TraceWriter
from .driver import Driver
from .expert_buffer import ExpertBuffer
from .prefetcher import Prefetcher
from .replay import Replay
from .strategy import Strategy

_WITHOUT_INPUT = "activation-path"  # where an architecture gives no gate input


def sections(strategy: Strategy) -> set[str]:
    """Of a profile, what a strategy may take."""
    names: set[str] = set() if strategy.policy is None else set(get_policy(strategy.policy).profile_sections)
    if strategy.fill:
        names.add("popularity")
    if strategy.predictor is not None:
        names |= set(predict.get_predictor(strategy.predictor).more_sections)
        names |= {s for n in (strategy.predictor, _WITHOUT_INPUT) if (s := predict.get_predictor(n).profile_section) is not None}
    return names


def wants_gate_input(strategy: Strategy) -> bool:
    """Whether gate events must carry the router's input."""
    return strategy.predictor is not None and predict.get_predictor(strategy.predictor).wants_gate_input


def wants_gate_logits(strategy: Strategy, trace: str | os.PathLike[str] | None) -> bool:
    """Whether gate events must carry the router's logits. A trace keeps their probabilities, so that any policy can be replayed on it."""
    return trace is not None or (strategy.policy is not None and get_policy(strategy.policy).wants_probs)


def attach_driver(buffer: ExpertBuffer, strategy: Strategy, layout: Layout, trace: str | os.PathLike[str] | None = None, *, n_lanes: int = 4,
                  profile: Profile | None = None, precision: Precision = LOSSLESS, replay: str | os.PathLike[str] | None = None, hold: bool = False, on_devices: bool = False, **options: Any) -> Driver | None:  # fmt: skip
    """The driver of a started buffer, or None if the strategy needs none.

    A policy that weighs uses by the precision they need gets its options from `precision`.

    Args:
        profile: what calibration measured of the model.
        on_devices: the policy also says which experts devices hold, and what is predicted is written there ahead.
        options: of the policy.

    Raises:
        OptionError: the trace file is something else, or an option that the policy does not know, or a predictor that needs a
            profile and has none.
    """
    stats = buffer.stats()
    arena = stats.arena_bytes - stats.low_arena_bytes
    everything = arena >= buffer.arena_full  # no slice is ever evicted, nor absent for long
    policy_name = None if everything and not on_devices and not options else strategy.policy
    if policy_name is not None and get_policy(policy_name).static and not options and strategy.predictor is None:
        policy_name = None  # the buffer's own eviction order
    predictor_name = None if everything and not precision.mispredicted_low and not on_devices else strategy.predictor  # what it does not ask for is served low
    if policy_name is None and predictor_name is None and trace is None and replay is None:
        return None
    model = Model.of(buffer, os.path.basename(layout.files[0]), max(layout.n_expert_used, 1))
    router = prefetcher = policy = writer = None
    if predictor_name is not None or wants_gate_logits(strategy, trace):
        layers = {t.gate: t.layer for t in model.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)], model.n_experts, lazy=True)
    if predictor_name is not None and router is not None:
        predictor = _predictor(predictor_name, router, profile, layout, **strategy.options)
        fallback = _predictor(_WITHOUT_INPUT, router, profile, layout, small=True) if predictor.wants_gate_input else None
        prefetcher = Prefetcher(
            buffer,
            predictor,
            model.n_used,
            n_lanes,
            fallback,
            share=strategy.share,
            ab_tested=strategy.ab_tested,
            precision=precision,
            fills_devices=on_devices,
        )
    if policy_name is not None:
        kind = get_policy(policy_name)
        if not precision.lossless:
            options = kind.precision_options(precision.t1) | options
        measured = {} if profile is None else {name: found for name in kind.profile_sections if (found := profile.section(name)) is not None}
        policy = create(policy_name, model.shape(arena), buffer.priorities, profile=measured, **options)
        buffer.publish()  # what it has written at its start: a static policy is never published again
    if trace is not None:
        session: dict[str, Any] = {"strategy": strategy.name, "arena_bytes": arena}
        if not precision.lossless:
            session |= {"precision": asdict(precision), "low_arena_bytes": stats.low_arena_bytes}
        if router is not None:
            session["routers_choose_by"] = router.chooses_by
        writer = TraceWriter(trace, model, session)
    return Driver(buffer, policy, writer, router, prefetcher, Replay(replay, buffer, model) if replay is not None else None, hold, model)


def _predictor(name: str, router: Router, profile: Profile | None, layout: Layout, small: bool = False, **options: Any) -> predict.Predictor:
    """small: without what only a strategy's own predictor is given."""
    kind = predict.get_predictor(name)
    arrays = profile.section(kind.profile_section) if profile is not None and kind.profile_section is not None else None
    if profile is not None and arrays is not None and not small:
        arrays = dict(arrays) | {name: array for more in kind.more_sections for name, array in (profile.section(more) or {}).items()}
    if kind.needs_profile and arrays is None:
        raise OptionError(f"predictor {name} needs a calibration of this model", Remedy.CALIBRATE, model=layout.files[0])
    return predict.create(name, router, arrays, **options)
