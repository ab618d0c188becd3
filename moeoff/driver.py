"""The driver: gate events in, priorities out, on the native driver thread. Compute never waits for it.

Owns a policy and a trace, either may be missing. Knows nothing of text: it is told when a sequence begins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np

from .buffer import ExpertBuffer, GateEvent
from .cache import Event, Policy, create, get_policy
from .layout import Layout
from .predict import create as create_predictor
from .predict import get_predictor
from .prefetch import BOOST, Prefetcher
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
        prefetcher: its boosts are added to what the policy wrote, which has a table of its own then.
        hold: policy updates wait for `release()`, so that what is evicted does not depend on the threads' timing (tests).
    """

    def __init__(self, buffer: ExpertBuffer, policy: Policy | None = None, trace: TraceWriter | None = None, router: Router | None = None,
                 prefetcher: Prefetcher | None = None, hold: bool = False):  # fmt: skip
        self._buffer, self.policy, self.trace, self._router, self.prefetcher = buffer, policy, trace, router, prefetcher
        self._hold = hold
        self._held: list[Event] = []
        self._lock = threading.Lock()
        self.listener: Callable[[GateEvent], None] | None = None  # a user's own callback
        self.as_traced = False  # the policy gets numbers as a trace keeps them, to compare with a replay
        self._updates = policy is not None and not policy.static
        self._table = buffer.priorities
        self.needed = trace is not None or self._updates or prefetcher is not None
        if trace is not None:
            buffer.log_reads()
        if self.needed:
            buffer.set_gate_callback(self.deliver)

    def deliver(self, event: GateEvent) -> None:
        """The gate callback."""
        boosted = self.prefetcher is not None and self.prefetcher.observe(event)  # first: the lanes may be idle
        if self.listener is not None:
            self.listener(event)
        if self.trace is None and not self._updates:
            if boosted:
                self._publish()
            return
        probs = self._probs(event)
        if self.trace is not None:
            self.trace.write(event, probs)
            self.trace.write_reads(self._buffer.take_reads())
        if self._updates:
            weights = event.weights
            if self.as_traced:
                weights = weights.astype(np.float16).astype(np.float32)
                probs = None if probs is None else probs.astype(np.float16).astype(np.float32)
            seen = Event(event.gate, event.ids, weights, probs, event.gate_input)
            with self._lock:
                if self._hold:
                    self._held.append(seen)
                    return
                self.policy.update(seen)
        self._publish()

    def _publish(self) -> None:
        """The policy's table is the native one, unless predictions are to be added to it."""
        if self.prefetcher is not None:
            if self.policy is not None:
                np.copyto(self._table, self.policy.priorities)
            else:
                self._table[:] = 0
            for gate, experts in self.prefetcher.boosts.items():
                self._table[gate, experts] += BOOST
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
            self._publish()

    def new_sequence(self) -> None:
        """Between decodes: the next event is the first of a text. Waits for the events before it."""
        if not self.needed:
            return
        self._buffer.drain()
        if self._hold:
            self.release()
        if self.trace is not None:
            self.trace.new_sequence()
        if self.prefetcher is not None:
            self.prefetcher.reset_sequence()
        if self.policy is not None:
            with self._lock:
                self.policy.reset_sequence()
        self._publish()

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
    return (
        trace is not None
        or (strategy.policy is not None and get_policy(strategy.policy).wants_probs)
        or (strategy.predictor is not None and get_predictor(strategy.predictor).wants_gate_input)
    )


def attach_driver(buffer: ExpertBuffer, strategy: Strategy, layout: Layout, trace: str | os.PathLike | None = None, *, n_lanes: int = 4,
                  hold: bool = False, **options) -> Driver | None:  # fmt: skip
    """The driver of a started buffer, or None if native needs nobody.

    Args:
        options: of the policy.

    Raises:
        OptionError: the trace file is something else, or an option that the policy does not know.
    """
    arena = buffer.stats().arena_bytes
    everything = arena >= buffer.arena_full  # nothing is ever evicted or expected
    if trace is None and (everything or (strategy.predictor is None and (strategy.policy is None or get_policy(strategy.policy).static and not options))):
        return None
    model = Model.of(buffer, os.path.basename(layout.files[0]), max(layout.n_expert_used, 1))
    router = prefetcher = policy = None
    if strategy.predictor is not None or wants_gate_input(strategy, trace):
        layers = {t.gate: t.layer for t in model.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)], model.n_experts)
    if strategy.predictor is not None and not everything:
        predictor = create_predictor(strategy.predictor, router, None, **strategy.options)
        prefetcher = Prefetcher(buffer, predictor, model.n_used, n_lanes, share=strategy.share, judged=strategy.judged)
    if strategy.policy is not None:
        policy = create(strategy.policy, model.shape(arena), None if prefetcher else buffer.priorities, **options)
    writer = TraceWriter(trace, model, {"strategy": strategy.name, "arena_bytes": arena}) if trace is not None else None
    return Driver(buffer, policy, writer, router, prefetcher, hold)
