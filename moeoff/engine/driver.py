"""The driver: gate events in, priorities out, on the native driver thread. Compute
waits for it where a text begins, and before each token whose predictor reads tokens
(`Prefetcher.begin`); else never.

Its observers see every event, one after the other: prefetcher, replay, trace and meter,
cache policy, as far as a strategy has them, and then whatever else was added, as a
user's callback. Knows nothing of text but where one begins.
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

_RESIZED = 0.01  # of the arena: a change that the policy is told of
_WITHOUT_INPUT = "activation-path"  # where an architecture gives no gate input


class Replay(Observer):
    """Gives a recorded run's decisions to a started buffer, and checks that the run
    follows the recorded one.

    Raises:
        OptionError: no trace, or one of another model, or it needs low versions and
            there is no arena for them.
    """

    def __init__(self, path: str | os.PathLike[str], buffer: ExpertBuffer, model: TraceHeader):
        trace = Trace.read(path)
        if trace.model != model:
            raise OptionError(f"{path}: is a trace of another model ({trace.model.name})")
        self._path, self._events, self._at = path, trace.events, 0
        buffer.force(trace.decisions())

    def observe(self, event: GateEvent) -> None:
        """Raises `OptionError` if the recorded run had another event here. After its
        end everything is allowed.
        """
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
    """Gives the events that have the router's logits its probabilities, for the
    observers behind it.

    Args:
        of_decode: Whether events of decoded tokens get them, too.
    """

    def __init__(self, router: Router, of_decode: bool):
        self._router, self.wants_decode = router, of_decode

    def observe(self, event: GateEvent) -> None:
        if event.logits is not None and (self.wants_decode or not event.decode):
            event.probs = self._router.gated(event.logits)


class _Records(Observer):
    """Writes events and finished reads into a trace, and tells the meter of the reads:
    after each event for a trace, else once a token.
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
    """Updates a cache policy by each event, and publishes the priorities that it wrote.

    Args:
        model: says how many experts an arena holds, where it may be resized.
        elsewhere: Experts in devices' memory, which the policy ranks with those of the
            arena.
        of_decode: Whether events of decoded tokens update it here; the native thread
            does it otherwise.
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
        self._arena = self._cache_bytes() if model is not None else 0  # as the policy knows it

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
        """For high versions."""
        stats = self._buffer.stats()
        return int(stats.cache_bytes - stats.low_cache_bytes)


class Driver:
    """Delivers each gate event of a started buffer to its observers, one after the
    other. Without any the buffer tells of no events.

    Attributes:
        observers: in the order in which they see an event: first those of the strategy.
        attached: a strategy's are among them.
        policy, prefetcher: of the strategy, if it has one.
    """

    def __init__(self, buffer: ExpertBuffer):
        self.buffer = buffer
        self.observers: list[Observer] = []
        self.attached = False
        self.policy: Policy | None = None
        self.prefetcher: Prefetcher | None = None
        self._trace: TraceWriter | None = None
        # of each sequence, the first position at which it may go on
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
        """The parts of a strategy, once: nothing, where all experts are resident
        anyway. They see every event before other observers.

        A policy that weighs uses by the precision they need gets its options from
        `precision`.

        Args:
            trace: a file that every event is written to.
            profile: what calibration measured of the model.
            replay: the trace of a run; one that departs from it raises at the next
                decode.
            device_slots: Experts of each layer that devices have memory for: the policy
                also says which, and what is predicted is written there ahead.
                Priorities that depend on the capacity have a table of their own for
                them.

        Raises:
            OptionError: the trace file is something else, or a predictor that needs a
                profile has none.
        """
        buffer, stats = self.buffer, self.buffer.stats()
        arena = stats.cache_bytes - stats.low_cache_bytes
        on_devices, elsewhere = bool(device_slots), sum(device_slots)
        # else no slice is ever evicted, nor absent for long
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
            # what it has written at its start: a static policy is never published again
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
        updates = policy is not None and not policy.static  # else events do not change its table
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
        """It sees the events from here on, after the others."""
        self.buffer.drain()
        if not self.observers:
            self.buffer.set_gate_callback(self.deliver)
        self._set_observers([*self.observers, observer])

    def remove(self, observer: Observer) -> None:
        """It sees no more events."""
        self.buffer.drain()
        self._set_observers([other for other in self.observers if other is not observer])
        if not self.observers:
            self.buffer.set_gate_callback(None)

    def _set_observers(self, observers: list[Observer]) -> None:
        """Between events."""
        self.observers = observers
        if self.prefetcher is not None:
            self.prefetcher.is_alone = not any(
                other.wants_decode for other in observers if other is not self.prefetcher
            )

    def deliver(self, event: GateEvent) -> None:
        """The gate callback."""
        for observer in self.observers:
            observer.observe(event)

    def begin(self, tokens: np.ndarray, spans: Mapping[int, Span], decode: bool) -> None:
        """Before a decode.

        Args:
            tokens: [n_tokens] of the batch.
            spans: of the batch (`moeoff.routing.batch`).
            decode: its tokens are decoded, not read.
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
        """True if each of the sequences begins a text: is new, or goes back behind what
        it had computed. Where another one goes on, what was learned of it stays.

        So what follows a conversation's beginning, if that is still in the context, is
        a text of its own unless it goes on at its end. A draft of which not all is
        accepted goes back, too, but never behind its first token.
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
        """Delivers what is left and closes the trace, with a note about the run at its
        end. Before the buffer closes.
        """
        # each of them whatever becomes of the ones before it, the last first
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
    """Return how many experts each layer keeps under a strategy, where each has its own
    memory.
    """
    policy = strategy.policy or Policy
    with _learned(profile, policy.sections[:1]) as arrays:
        learned = {} if arrays is None else policy.profile_options(arrays)
    return policy.divide(shape, policy.defaults | learned)


def _shape(model: TraceHeader, arena: int, elsewhere: int) -> CacheShape:
    """Return the shape of host memory and devices' memory together: what a device holds
    leaves the arena first. Where the arena holds every expert, the devices alone have
    something to evict.
    """
    host, n_all = CacheShape.of(model, arena), CacheShape.of(model, model.full_bytes).capacity
    if not elsewhere:
        return host
    whole = host.capacity >= n_all
    return replace(
        host, capacity=float(elsewhere) if whole else min(host.capacity + elsewhere, n_all)
    )


def sections(strategy: Strategy) -> set[str]:
    """Sections of a profile that a strategy may take."""
    parts = () if strategy.policy is None else strategy.policy.sections
    if strategy.predictor is not None:
        parts += strategy.predictor.sections + get_predictor(_WITHOUT_INPUT).sections[:1]
    return {section.name for section in parts} | ({"popularity"} if strategy.fill else set())


def wants_gate_logits(strategy: Strategy, trace: str | os.PathLike[str] | None) -> bool:
    """True if gate events must carry the router's logits. A trace keeps their
    probabilities, so that any policy can be replayed on it.
    """
    return trace is not None or (strategy.policy is not None and strategy.policy.wants_probs)


def require_calibration(
    strategy: Strategy, profile: Profile | None, model_index: ModelIndex
) -> None:
    """Raises `OptionError` if the strategy's predictor needs a profile's section that
    is not there.
    """
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
    """small: without what only a strategy's own predictor is given."""
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
