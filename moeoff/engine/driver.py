"""The driver: gate events in, priorities out, on the native driver thread.

Compute waits for it only at the start of a text, and before tokens whose predictor
reads tokens (`Prefetcher.begin`). Observers see every event in order: prefetcher,
replay, trace and meter, cache policy, then added ones such as a user's callback.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..errors import OptionError
from ..experts.profile import Profile
from ..gguf.model_index import ModelIndex
from ..policies import CacheShape, Policy, Predictor, Strategy, get_predictor
from ..policies.base import Section
from ..precision import LOSSLESS, Precision
from ..routing.batch import Span
from ..routing.event import GateEvent, Observer
from ..routing.router import Router
from ..routing.trace import Trace, TraceHeader, TraceWriter
from .buffer import ExpertBuffer
from .prefetcher import PredictionMeter, Prefetcher

_RESIZED = 0.01  # least relative change of the arena that resizes the policy
_WITHOUT_INPUT = "activation-path"  # for architectures without gate inputs


class Replay(Observer):
    """A recorded run's decisions, which a started buffer repeats.

    Raises:
        OptionError: The file is no trace, is of another model, or needs low versions
            without an arena for them.
    """

    def __init__(self, path: str | os.PathLike[str], buffer: ExpertBuffer, model: TraceHeader):
        trace = Trace.read(path)
        if trace.model != model:
            raise OptionError(f"{path}: is a trace of another model ({trace.model.name})")
        self._path, self._events, self._at = path, trace.events, 0
        buffer.force(trace.decisions())

    def observe(self, event: GateEvent) -> None:
        """Raise `OptionError` if the event differs from the recorded one, if any."""
        if self._at < len(self._events):
            recorded = self._events[self._at]
            self._at += 1
            if event.gate != recorded.gate or not np.array_equal(event.ids, recorded.ids):
                raise OptionError(
                    f"{self._path}: another run: at event {self._at} it chose other experts (the"
                    " prompts, seeds and batch sizes must be the same)"
                )


class Callback(Observer):
    """A user's function, called for every event."""

    def __init__(self, function: Callable[[GateEvent], None]):
        self._function = function

    def observe(self, event: GateEvent) -> None:
        self._function(event)


class Probabilities(Observer):
    """An observer that adds the router's probabilities to events with logits.

    Args:
        of_decode: True to include events of decoded tokens.
    """

    def __init__(self, router: Router, of_decode: bool):
        self._router, self.wants_decode = router, of_decode

    def observe(self, event: GateEvent) -> None:
        if event.logits is not None and (self.wants_decode or not event.decode):
            event.probs = self._router.gated(event.logits)


class _Records(Observer):
    """An observer that writes events and reads to a trace, and passes reads to the
    meter.

    It runs after each event for a trace, otherwise once per token.
    """

    def __init__(
        self, buffer: ExpertBuffer, trace: TraceWriter | None, meter: PredictionMeter | None
    ):
        self._buffer, self._trace, self._meter = buffer, trace, meter
        buffer.log_reads()

    def observe(self, event: GateEvent) -> None:
        if self._trace is not None:
            self._trace.write(event)
        elif event.gate:
            return
        self._take_reads()

    def _take_reads(self) -> None:
        reads = self._buffer.take_reads()
        if self._trace is not None:
            self._trace.write_reads(reads)
        if self._meter is not None:
            self._meter.read(reads)

    def new_sequence(self) -> None:
        if self._trace is not None:
            self._trace.new_sequence()

    def close(self) -> None:
        self._take_reads()
        self._buffer.log_reads(False)


class PolicyUpdates(Observer):
    """An observer that updates a cache policy and publishes its priorities.

    Args:
        model: Model whose capacity the policy follows if the arena may be resized.
        elsewhere: Number of experts in device memory, ranked with the arena's.
        of_decode: False if the native thread updates it for decoded tokens.
    """

    def __init__(
        self,
        policy: Policy,
        buffer: ExpertBuffer,
        model: TraceHeader | None = None,
        of_decode: bool = True,
        elsewhere: int = 0,
    ):
        self.policy, self._buffer, self._model = policy, buffer, model
        self.wants_decode, self._elsewhere = of_decode, elsewhere
        self._arena = self._cache_bytes() if model is not None else 0  # bytes the policy assumes

    def observe(self, event: GateEvent) -> None:
        if (self.wants_decode or not event.decode) and self.policy.update(event) is not False:
            self._buffer.publish()

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        if self._model is None:
            return
        arena = self._cache_bytes()
        if abs(arena - self._arena) > _RESIZED * self._arena:
            self._buffer.drain()
            self.policy.resize(_shape(self._model, arena, self._elsewhere).capacity)
            self._buffer.publish()
            self._arena = arena

    def new_sequence(self) -> None:
        self.policy.reset_sequence()
        self._buffer.publish()

    def _cache_bytes(self) -> int:
        """Return the arena's bytes for high versions."""
        stats = self._buffer.stats()
        return int(stats.cache_bytes - stats.low_cache_bytes)


class Driver:
    """The dispatcher of a started buffer's gate events to observers.

    Without observers the buffer posts no events.

    Attributes:
        observers: Observers in order, a strategy's first.
        attached: True if a strategy is attached.
        policy, prefetcher: Parts of the strategy, or None.
    """

    def __init__(self, buffer: ExpertBuffer):
        self.buffer = buffer
        self.observers: list[Observer] = []
        self.attached = False
        self.policy: Policy | None = None
        self.prefetcher: Prefetcher | None = None
        self._trace: TraceWriter | None = None
        # first position at which each sequence may continue
        self._ends: dict[int, int] = {}

    def attach(
        self,
        strategy: Strategy,
        model_index: ModelIndex,
        *,
        trace: str | os.PathLike[str] | None = None,
        profile: Profile | None = None,
        precision: Precision = LOSSLESS,
        replay: str | os.PathLike[str] | None = None,
        device_slots: Sequence[int] = (),
    ) -> None:
        """Attach a strategy before other observers, unless all experts are resident.

        Policies that weigh accesses by precision take their options from `precision`.

        Args:
            trace: Path of a file for every event.
            profile: The model's calibration.
            replay: Trace of a run to repeat; a deviation raises at the next decode.
            device_slots: Device slots of each layer, which policy and prefetches also
                serve. Capacity-dependent priorities have a separate table for them.

        Raises:
            OptionError: The trace file is something else, or a predictor lacks its
                profile.
        """
        buffer, stats = self.buffer, self.buffer.stats()
        arena = stats.cache_bytes - stats.low_cache_bytes
        on_devices, elsewhere = bool(device_slots), sum(device_slots)
        # with all experts resident nothing is evicted
        works = on_devices or arena < buffer.arena_full
        policy_class, predictor_class = (
            strategy.policy if works else None,
            strategy.predictor if works or precision.mispredicted_low else None,
        )
        if policy_class is not None and policy_class.static and strategy.predictor is None:
            policy_class = None  # the buffer's own eviction order
        if policy_class is None and predictor_class is None and trace is None and replay is None:
            return
        model = TraceHeader.of(
            buffer, os.path.basename(model_index.files[0]), max(model_index.n_expert_used, 1)
        )
        router = None
        if predictor_class is not None or wants_gate_logits(strategy, trace):
            layers = {t.gate: t.layer for t in model.tensors}
            router = Router.read(
                model_index,
                [layers[g] for g in sorted(layers)],
                buffer.gating,
                model.n_experts,
                lazy=True,
            )
        prefetcher = policy = on_device = writer = None
        if predictor_class is not None and router is not None:
            require_calibration(strategy, profile, model_index)
            predictor = _predictor(predictor_class, router, profile, **strategy.options)
            fallback = (
                _predictor(get_predictor(_WITHOUT_INPUT), router, profile, small=True)
                if predictor.wants_gate_input
                else None
            )
            prefetcher = Prefetcher(
                buffer,
                predictor,
                model.n_used,
                fallback,
                share=strategy.share,
                bounded=strategy.bounded,
                ab_tested=strategy.ab_tested,
                precision=precision,
                fills_devices=on_devices,
            )
        if policy_class is not None:
            lossy = {} if precision.lossless else {"t1": precision.t1, "actual": True}  # HOBBIT's
            options = {
                name: value for name, value in lossy.items() if name in policy_class.defaults
            }
            with _learned(profile, policy_class.sections[:1]) as arrays:
                shape = _shape(model, arena, elsewhere)
                policy = policy_class.from_profile(arrays, shape, buffer.priorities, **options)
                if on_devices and policy_class.is_sized() and policy.native() is None:
                    own, table = shape.divided(device_slots), buffer.device_priorities()
                    on_device = policy_class.from_profile(arrays, own, table, **options)
            # a static policy publishes its initial priorities only here
            buffer.publish()
        if trace is not None:
            session: dict[str, Any] = {"strategy": strategy.name, "cache_bytes": arena}
            if not precision.lossless:
                session |= {
                    "precision": asdict(precision),
                    "low_cache_bytes": stats.low_cache_bytes,
                }
            writer = TraceWriter(trace, model, session)

        # these see every event as the policy does
        ahead, each = None, writer is not None or replay is not None
        score = None if policy is None or each else policy.native()
        if prefetcher is not None and isinstance(buffer, ExpertBuffer):
            group = 1 if policy is None or each else policy.group
            ahead = prefetcher.go_native(group if score is None else model.n_gates)
        if ahead is not None and score is not None and router is not None:
            score.gating = router.gating
            ahead.take_for(score)
        of_decode = ahead is None or score is None
        # first, because the I/O threads may be idle
        parts: list[Observer] = [] if prefetcher is None else [prefetcher]
        if replay is not None:
            parts.append(Replay(replay, buffer, model))
        updates = policy is not None and not policy.static  # events do not change a static table
        if router is not None and (
            writer is not None or policy is not None and updates and policy.wants_probs
        ):
            parts.append(Probabilities(router, of_decode))
        if writer is not None or prefetcher is not None and prefetcher.meter is not None:
            parts.append(_Records(buffer, writer, None if prefetcher is None else prefetcher.meter))
        if policy is not None and updates:
            parts.append(PolicyUpdates(policy, buffer, model, of_decode, elsewhere))
            if on_device is not None:
                parts.append(PolicyUpdates(on_device, buffer))
        if parts and (ahead is not None or not self.observers):
            buffer.drain()
            buffer.set_gate_callback(self.deliver, predictor=ahead)
        self.policy, self.prefetcher, self._trace, self.attached = policy, prefetcher, writer, True
        self._set_observers([*parts, *self.observers])

    def add(self, observer: Observer) -> None:
        """Append an observer."""
        self.buffer.drain()
        if not self.observers:
            self.buffer.set_gate_callback(self.deliver)
        self._set_observers([*self.observers, observer])

    def remove(self, observer: Observer) -> None:
        """Remove an observer."""
        self.buffer.drain()
        self._set_observers([other for other in self.observers if other is not observer])
        if not self.observers:
            self.buffer.set_gate_callback(None)

    def _set_observers(self, observers: list[Observer]) -> None:
        """Replace the observers between events."""
        self.observers = observers
        if self.prefetcher is not None:
            self.prefetcher.is_alone = not any(
                other.wants_decode for other in observers if other is not self.prefetcher
            )

    def deliver(self, event: GateEvent) -> None:
        """Dispatch an event: the gate callback."""
        for observer in self.observers:
            observer.observe(event)

    def begin(self, tokens: np.ndarray, spans: Mapping[int, Span], decode: bool) -> None:
        """Prepare for a batch.

        Args:
            tokens: [n_tokens] of the batch.
            spans: Spans of the batch (`moeoff.routing.batch`).
            decode: True if the batch decodes.
        """
        if not self.observers:
            return
        if self._begins_text(spans):
            self.buffer.drain()
            for observer in self.observers:
                observer.new_sequence()
        for observer in self.observers:
            observer.begin(tokens, decode)

    def _begins_text(self, spans: Mapping[int, Span]) -> bool:
        """Return True if every sequence is new, or rewinds before its computed tokens.

        Otherwise state learned from a continued sequence is kept. A partly rejected
        draft rewinds too, but never before its first token.
        """
        begins = all(
            span.first == 0 or span.first < self._ends.get(sequence, 0)
            for sequence, span in spans.items()
        )
        self._ends |= {
            sequence: span.first + 1 if span.decode else span.end
            for sequence, span in spans.items()
        }
        return begins

    def close(self, note: dict[str, Any] | None = None) -> None:
        """Deliver remaining events and close the trace, before the buffer closes."""
        # in reverse order, each even if an earlier one fails
        with contextlib.ExitStack() as stack:
            if self._trace is not None:
                stack.callback(self._trace.close)
                stack.callback(self._trace.note, note or {})
            if self.observers and self.buffer.running:
                for observer in self.observers:
                    stack.callback(observer.close)
                self.buffer.drain()
                self.buffer.set_gate_callback(None)


def divide(strategy: Strategy, profile: Profile | None, shape: CacheShape) -> list[int]:
    """Return the experts of each layer under a strategy with memory per layer."""
    policy = strategy.policy or Policy
    with _learned(profile, policy.sections[:1]) as arrays:
        learned = {} if arrays is None else policy.profile_options(arrays)
    return policy.divide(shape, policy.defaults | learned)


def _shape(model: TraceHeader, arena: int, elsewhere: int) -> CacheShape:
    """Return the shape of host and device memory together.

    Experts on a device leave the arena first. If the arena holds every expert, only
    devices evict.
    """
    host, n_all = CacheShape.of(model, arena), CacheShape.of(model, model.full_bytes).capacity
    if not elsewhere:
        return host
    whole = host.capacity >= n_all
    return replace(
        host, capacity=float(elsewhere) if whole else min(host.capacity + elsewhere, n_all)
    )


def sections(strategy: Strategy) -> set[str]:
    """Return the profile sections that a strategy may use."""
    parts = () if strategy.policy is None else strategy.policy.sections
    if strategy.predictor is not None:
        parts += strategy.predictor.sections + get_predictor(_WITHOUT_INPUT).sections[:1]
    return {section.name for section in parts} | ({"popularity"} if strategy.fill else set())


def wants_gate_logits(strategy: Strategy, trace: str | os.PathLike[str] | None) -> bool:
    """Return True if gate events need the router's logits.

    A trace stores probabilities, so that any policy can be simulated on it.
    """
    return trace is not None or (strategy.policy is not None and strategy.policy.wants_probs)


def require_calibration(
    strategy: Strategy, profile: Profile | None, model_index: ModelIndex
) -> None:
    """Raise `OptionError` if the predictor's profile section is missing."""
    kind = strategy.predictor
    if (
        kind is not None
        and kind.needs_profile
        and (profile is None or kind.sections[0].name not in profile.sections)
    ):
        raise OptionError(
            f"predictor {kind.name} needs a calibration of this model: moeoff calibrate -m"
            f" {model_index.files[0]}"
        )


def _predictor(
    kind: type[Predictor],
    router: Router,
    profile: Profile | None,
    small: bool = False,
    **options: Any,
) -> Predictor:
    """Make a predictor. `small` takes the first profile section only."""
    with _learned(profile, kind.sections[:1] if small else kind.sections) as arrays:
        return kind(router, arrays, **options)


def _learned(
    profile: Profile | None, sections: Sequence[Section]
) -> contextlib.AbstractContextManager[dict[str, np.ndarray] | None]:
    """Yield the arrays of these sections of a profile, or None."""
    return (
        contextlib.nullcontext()
        if profile is None or not sections
        else profile.taking(*(section.name for section in sections))
    )
