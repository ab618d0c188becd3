"""The driver: gate events in, priorities out, on the native driver thread. Compute never waits for it.

Owns a policy, a prefetcher and a trace, each may be missing. Knows nothing of text but which sequences begin, and which a batch holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..cache import Policy
from ..cache.grouped import GroupedPolicy
from ..gate_event import GateEvent
from ..predict.router import Router
from ..simulate.trace import Model, TraceWriter
from .batch_rows import BatchRows, OneSequence
from .batch_spans import Span
from .expert_buffer import ExpertBuffer
from .prefetcher import Prefetcher
from .replay import Replay

_RESIZED = 0.01  # of the arena: a change that the policy is told of


class Driver:
    """Delivers each gate event to `policy` and `trace`, and publishes what the policy wrote.

    Args:
        buffer: started, and with gate inputs and logits if parts need them.
        policy: writes into `buffer.priorities`.
        trace: gets every event.
        router: gives GateEvent.probs of the logits.
        prefetcher: sees every event first.
        replay: the recorded run whose decisions are taken again; a run that departs from it raises at the next decode.
        model: says how many experts an arena holds, where it may be resized.
        hold: policy updates wait for `release()`, so that what is evicted does not depend on the threads' timing (tests).
    """

    def __init__(self, buffer: ExpertBuffer, policy: Policy | None = None, trace: TraceWriter | None = None, router: Router | None = None,
                 prefetcher: Prefetcher | None = None, replay: Replay | None = None, hold: bool = False, model: Model | None = None):  # fmt: skip
        self._buffer, self.policy, self.trace, self._router, self.prefetcher = buffer, policy, trace, router, prefetcher
        self._replay, self._hold = replay, hold
        self._held: list[GateEvent] = []
        self._model = model
        self._arena = self._arena_bytes() if model is not None else 0  # as the policy knows it
        self._ends: dict[int, int] = {}  # of each sequence, the first position at which it may go on
        self._one: dict[int, OneSequence] = {}
        self._rows: BatchRows | OneSequence | None = None  # of the batch that computes; None: all are of sequence 0, or it is not known
        self._lock = threading.Lock()
        self.listener: Callable[[GateEvent], None] | None = None  # a user's own callback
        self.as_traced = False  # the policy gets numbers as a trace keeps them, to compare with a replay
        self._updated = None if policy is None or policy.static else policy  # the policy, if events change its table
        self._wants_probs = trace is not None
        if self._updated is not None and self._updated.wants_probs:
            if isinstance(self._updated, GroupedPolicy) and router is not None:
                self._updated.gated = router.gated
            else:
                self._wants_probs = True
        self.needed = any(part is not None for part in (self._updated, trace, prefetcher, replay))
        self._logs = trace is not None or (prefetcher is not None and prefetcher.meter is not None)
        if self._logs:
            buffer.log_reads()
        if self.needed:
            buffer.set_gate_callback(self.deliver)

    def deliver(self, event: GateEvent) -> None:
        """The gate callback."""
        if self._rows is not None:
            event.sequences = self._rows.of(event)
        if self.prefetcher is not None:
            self.prefetcher.observe(event)  # first: the I/O workers may be idle
        if self._replay is not None:
            self._replay.follow(event)
        if self.listener is not None:
            self.listener(event)
        if self.trace is None and self._updated is None:
            self._take_reads(event)
            return
        if (self._wants_probs or self.as_traced) and event.logits is not None and self._router is not None:
            event.probs = self._router.gated(event.logits)
        if self.trace is not None:
            self.trace.write(event)
        self._take_reads(event)
        if self._updated is None:
            return
        if self.as_traced:
            event = replace(event, weights=_halved(event.weights), probs=None if event.probs is None else _halved(event.probs))
        with self._lock:
            if self._hold:
                self._held.append(event)
                return
            changed = self._updated.update(event) is not False
        if changed:
            self._buffer.publish()

    def _take_reads(self, event: GateEvent | None = None) -> None:
        """What has been read, for the trace after each event, else once a token."""
        if not self._logs or (self.trace is None and event is not None and event.gate):
            return
        reads = self._buffer.take_reads()
        if self.trace is not None:
            self.trace.write_reads(reads)
        if self.prefetcher is not None and self.prefetcher.meter is not None:
            self.prefetcher.meter.read(reads)

    def release(self) -> None:
        """Waits for the events so far and applies what was held."""
        self._buffer.drain()
        with self._lock:
            held, self._held = self._held, []
            if self._updated is not None:
                for event in held:
                    self._updated.update(event)
        if held:
            self._buffer.publish()

    def begin(self, tokens: np.ndarray, spans: Mapping[int, Span], decode: bool, rows: BatchRows | None = None) -> None:
        """Before a decode.

        Args:
            tokens: [n_tokens] of the batch.
            spans: of the batch (`moeoff.engine.batch_spans`).
            decode: its tokens are decoded, not read.
            rows: which is of which sequence, where there are several; None: not known.
        """
        if not self.needed:
            return
        self._follow_arena()
        self._set_rows(spans, rows)
        if begun := self._begun(spans):
            self.new_sequence(*begun)
        if self.prefetcher is not None and (self.prefetcher.predictor.wants_tokens or not decode):
            self._buffer.drain()
            self.prefetcher.begin(tokens, decode)

    def _set_rows(self, spans: Mapping[int, Span], several: BatchRows | None) -> None:
        rows: BatchRows | OneSequence | None = several
        if len(spans) == 1:
            (sequence,) = spans
            rows = self._one.setdefault(sequence, OneSequence(sequence)) if sequence else None
        if rows is not self._rows:
            self._buffer.drain()  # what waits is of the batches before
            self._rows = rows

    def _begun(self, spans: Mapping[int, Span]) -> list[int]:
        """The sequences that begin a text: new ones, and those that go back behind what they had computed.

        So what follows a conversation's beginning, if that is still in the context, is a text of its own unless it goes on at its end.
        A draft of which not all is accepted goes back, too, but never behind its first token.
        """
        begun = [sequence for sequence, span in spans.items() if span.first == 0 or span.first < self._ends.get(sequence, 0)]
        self._ends |= {sequence: span.first + 1 if span.decode else span.end for sequence, span in spans.items()}
        return begun

    def _follow_arena(self) -> None:
        """Tells the policy when the arena has been resized."""
        if self.policy is None or self._model is None:
            return
        arena = self._arena_bytes()
        if abs(arena - self._arena) > _RESIZED * self._arena:
            self._buffer.drain()
            with self._lock:
                self.policy.resize(self._model.shape(arena).capacity)
            self._buffer.publish()
            self._arena = arena

    def _arena_bytes(self) -> int:
        """For high versions."""
        stats = self._buffer.stats()
        return int(stats.arena_bytes - stats.low_arena_bytes)

    def new_sequence(self, *sequences: int) -> None:
        """Between decodes: the next events of these are the first of a text. Waits for the events before."""
        if not self.needed:
            return
        self._buffer.drain()
        if self._hold:
            self.release()
        for sequence in sequences:
            if self.trace is not None:
                self.trace.new_sequence(sequence)
            if self.prefetcher is not None:
                self.prefetcher.reset_sequence(sequence)
            if self.policy is not None:
                with self._lock:
                    self.policy.reset_sequence(sequence)
        self._buffer.publish()

    def close(self, note: dict[str, Any] | None = None) -> None:
        """Delivers what is left and closes the trace. Before the buffer closes."""
        if self.needed and self._buffer.running:
            self._buffer.drain()
            self._buffer.set_gate_callback(None)
            self._take_reads()
            if self._logs:
                self._buffer.log_reads(False)
        if self.trace is not None:
            try:
                if note:
                    self.trace.note(note)
            finally:
                self.trace.close()


def _halved(x: np.ndarray) -> np.ndarray:
    """As a trace keeps it: rounded to float16."""
    return x.astype(np.float16).astype(np.float32)
