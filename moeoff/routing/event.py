"""`GateEvent`, the routing of a batch by one gate, and `Observer`, its receiver."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(eq=False, slots=True)
class GateEvent:
    """A router's selection for a batch, shared by all observers: do not modify it.

    Attributes:
        gate: Row of the priority table; gates are in the order of the graph.
        ids: [n_tokens, n_used] integers (int32 from models and traces), routed experts.
        weights: [n_tokens, n_used] float32, gate weights.
        probs: [n_rows, n_experts] float32, router probabilities, or None.
        gate_input: [n_rows, n_embd] float32, None unless requested or if the
            architecture has gates without one (grovemoe, smallthinker).
        versions: [n_tokens, n_used] uint8, 0 high, 1 low, 2 skipped; None: all high.
        layer: Layer of the model, -1 if unknown.
        n_hit: Number of slices of routed experts that were resident at selection.
        n_miss: Number of their slices that were not.
        seq: Number of the event in its expert buffer, from 1; 0 without a buffer.
        t_ns: CLOCK_MONOTONIC at selection in nanoseconds.
        logits: [n_rows, n_experts] float32 before the gating function, None unless
            requested or if the architecture selects by other values.
        row_step: gate_input, logits and probs have a row for every row_step-th token.
        decode: True if tokens are decoded (or drafts), by default if there is one.
        on_device: [n_tokens, n_used] bool, computed by a GPU from its memory, or None.
        uploaded: [n_tokens, n_used] bool, computed by a GPU that did not have the
            expert at selection, or None.
    """

    gate: int
    ids: np.ndarray
    weights: np.ndarray
    probs: np.ndarray | None = None
    gate_input: np.ndarray | None = None
    versions: np.ndarray | None = None
    layer: int = -1
    n_hit: int = 0
    n_miss: int = 0
    seq: int = 0
    t_ns: int = 0
    logits: np.ndarray | None = None
    row_step: int = 1
    decode: bool | None = None
    on_device: np.ndarray | None = None
    uploaded: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.decode is None:
            self.decode = len(self.ids) == 1

    def demand(self) -> np.ndarray:
        """Return the distinct experts [n] in the order of reading.

        Experts of the most tokens come first (Fate §4.3), then the first in `ids`.
        """
        if len(self.ids) == 1:
            return np.asarray(self.ids[0])
        distinct, first, count = np.unique(self.ids, return_index=True, return_counts=True)
        return np.asarray(distinct[np.lexsort((first, -count))])

    def sample(self, n: int) -> GateEvent:
        """Return the event or a copy of up to n evenly spread tokens, row_step 1."""
        k = -(-len(self.ids) // (n * self.row_step))
        step = k * self.row_step
        if step == 1:
            return self
        steps = dict.fromkeys(("ids", "weights", "versions", "on_device", "uploaded"), step)
        steps |= dict.fromkeys(("probs", "gate_input", "logits"), k)
        arrays = {name: getattr(self, name) for name in steps}
        sampled = {name: a[:: steps[name]] for name, a in arrays.items() if a is not None}
        return replace(self, **sampled, row_step=1)


class Observer:
    """A receiver of a running model's gate events. The next decode raises errors.

    Attributes:
        wants_decode: True to receive every event of decoded tokens. If no observer
            wants them, most are not delivered while few experts are missing.
    """

    wants_decode = True

    def observe(self, event: GateEvent) -> None:
        """Process a selection, on the driver thread, while the layer computes."""

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        """Prepare for a batch before it computes; earlier events may still be queued.

        Args:
            tokens: [n_tokens] token ids.
            decode: True if each token continues a text, False for a prompt.
        """

    def new_sequence(self) -> None:
        """Start a new text, after all events of the texts before were observed."""

    def close(self) -> None:
        """Finish after the last event, while the expert buffer still runs."""
