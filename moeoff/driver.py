"""The driver: gate events in, priorities out, on the native driver thread. Compute never waits for it.

Owns a policy and a trace, either may be missing. Knows nothing of text: it is told when a sequence begins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from .buffer import ExpertBuffer, GateEvent
from .cache import Event, Policy, create, get_policy
from .layout import Layout
from .precision import LOSSLESS, Precision
from .replay import Replay
from .router import Router
from .strategy import Strategy
from .trace import Model, TraceWriter


class Driver:
    """Delivers each gate event to `policy` and `trace`, and publishes what the policy wrote.

    Args:
        buffer: started, and with gate inputs if there is a router.
        policy: writes into `buffer.priorities`.
        trace: gets every event.
        router: gives Event.probs of the gate input.
        replay: the recorded run whose decisions are taken again; a run that leaves it raises at the next decode.
        hold: policy updates wait for `release()`, so that what is evicted does not depend on the threads' timing (tests).
    """

    def __init__(self, buffer: ExpertBuffer, policy: Policy | None = None, trace: TraceWriter | None = None,
                 router: Router | None = None, hold: bool = False, replay: Replay | None = None):  # fmt: skip
        self._buffer, self.policy, self.trace, self._router = buffer, policy, trace, router
        self._hold = hold
        self._held: list[Event] = []
        self._lock = threading.Lock()
        self.listener: Callable[[GateEvent], None] | None = None  # a user's own callback
        self.as_traced = False  # the policy gets numbers as a trace keeps them, to compare with a replay
        self._replay = replay
        self.needed = trace is not None or replay is not None or (policy is not None and not policy.static)
        if trace is not None:
            buffer.log_reads()
        if self.needed:
            buffer.set_gate_callback(self.deliver)

    def deliver(self, event: GateEvent) -> None:
        """The gate callback."""
        if self._replay is not None:
            self._replay.follow(event)
        if self.listener is not None:
            self.listener(event)
        probs = self._probs(event)
        if self.trace is not None:
            self.trace.write(event, probs)
            self.trace.write_reads(self._buffer.take_reads())
        if self.policy is None or self.policy.static:
            return
        weights = event.weights
        if self.as_traced:
            weights = weights.astype(np.float16).astype(np.float32)
            probs = None if probs is None else probs.astype(np.float16).astype(np.float32)
        seen = Event(event.gate, event.ids, weights, probs, event.gate_input, event.versions)
        with self._lock:
            if self._hold:
                self._held.append(seen)
                return
            self.policy.update(seen)
        self._buffer.publish()

    def _probs(self, event: GateEvent) -> np.ndarray | None:
        if self._router is None or event.gate_input is None or self._router.weights[event.gate] is None:
            return None
        return self._router.probs(event.gate, event.gate_input)

    def release(self) -> None:
        """Waits for the events so far and applies what was held."""
        self._buffer.drain()
        with self._lock:
            held, self._held = self._held, []
            for event in held:
                self.policy.update(event)
        if held:
            self._buffer.publish()

    def new_sequence(self) -> None:
        """Between decodes: the next event is the first of a text. Waits for the events before it."""
        if not self.needed:
            return
        self._buffer.drain()
        if self._hold:
            self.release()
        if self.trace is not None:
            self.trace.new_sequence()
        if self.policy is not None:
            with self._lock:
                self.policy.reset_sequence()
            self._buffer.publish()

    def close(self, note: dict | None = None) -> None:
        """Delivers what is left and closes the trace. Before the buffer closes."""
        if self.needed and self._buffer.running:
            self._buffer.drain()
            self._buffer.set_gate_callback(None)
            if self.trace is not None:
                self.trace.write_reads(self._buffer.take_reads())
                self._buffer.log_reads(False)
        if self.trace is not None:
            if note:
                self.trace.note(note)
            self.trace.close()


def wants_gate_input(strategy: Strategy, trace: str | os.PathLike | None) -> bool:
    """Whether gate events must carry the router's input. A trace does, so that any policy can be replayed on it."""
    return trace is not None or (strategy.policy is not None and get_policy(strategy.policy).wants_probs)


def attach_driver(buffer: ExpertBuffer, strategy: Strategy, layout: Layout, trace: str | os.PathLike | None = None, *,
                  precision: Precision = LOSSLESS, replay: str | os.PathLike | None = None, **options) -> Driver | None:  # fmt: skip
    """The driver of a started buffer, or None if native needs nobody.

    A policy that weighs uses by the precision they need learns of `precision`.

    Raises:
        OptionError: the trace file is something else, or an option that the policy does not know.
    """
    if strategy.policy is None and trace is None and replay is None:
        return None
    if not options and trace is None and replay is None and get_policy(strategy.policy).static:
        return None
    model = Model.of(buffer, os.path.basename(layout.files[0]), max(layout.n_expert_used, 1))
    stats = buffer.stats()
    arena = stats.arena_bytes - stats.low_arena_bytes
    if strategy.policy is not None and not precision.lossless and "low_cost" in get_policy(strategy.policy).defaults:
        options = {"t1": precision.t1, "low_cost": buffer.low_arena_full / buffer.arena_full} | options
    policy = create(strategy.policy, model.shape(arena), buffer.priorities, **options) if strategy.policy else None
    router = None
    if wants_gate_input(strategy, trace):
        layers = {t.gate: t.layer for t in model.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)], model.n_experts)
    session = {"strategy": strategy.name, "arena_bytes": arena}
    if not precision.lossless:
        session |= {"precision": asdict(precision), "low_arena_bytes": stats.low_arena_bytes}
    writer = TraceWriter(trace, model, session) if trace is not None else None
    return Driver(buffer, policy, writer, router, replay=Replay(replay, buffer, model) if replay is not None else None)
