"""`GateEvent`: the routing decisions of one gate for one batch of tokens, and `Observer`: whoever sees them while a model runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(eq=False, slots=True)
class GateEvent:
    """A router's selection for one batch, in one layer. Read it, do not write it: one object goes to all that see the event.

    A gate is a row of the priority table; gates are numbered in the order in which the graph runs them. n_used is the number
    of experts that serve one token, n_experts the number there are.

    Attributes:
        gate: row of the priority table, from 0.
        ids: [n_tokens, n_used] integers (int32 from a model or a trace), the experts of each token.
        weights: [n_tokens, n_used] float32, what the graph multiplies each expert's output with.
        probs: [n_rows, n_experts] float32, the router's probabilities of all experts; None where they were not computed.
        gate_input: [n_rows, n_embd] float32, what the router read; None if not asked for, or of architectures in which some gates
            have none to tell (grovemoe, smallthinker).
        versions: [n_tokens, n_used] uint8, what serves each: 0 high precision, 1 low, 2 skipped; None: all high.
        on_device: [n_tokens, n_used] bool, whether a GPU computes with it, from its own memory; None: with none.
        uploaded: [n_tokens, n_used] bool, whether a GPU computes with it and did not have it when the
            router selected; None: with none.
        layer: of the model; -1 where it is not known.
        n_hit, n_miss: slices of the selected experts (one for each matrix) that were resident, and that were not, at selection.
        seq: number of the event in its expert buffer, from 1; 0 if it comes from none.
        t_ns: nanoseconds of CLOCK_MONOTONIC at selection.
        logits: [n_rows, n_experts] float32, what the router computed before its gating function; None if not asked for, or where
            the architecture chooses by something else.
        row_step: gate_input, logits and probs are those of every row_step-th token, from the first: of a large batch not all are
            told unless a part needs them.
        decode: the tokens are decoded: one of a sequence, one each of several, or a draft that is verified. False: they are text
            that is read. Always told; None, when one is made, takes a single token for decoded and several for text.
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
        """[n] the selected experts, each once, in the order in which the native store reads them: those of the most tokens first (Fate §4.3),
        among equals as the tokens name them."""
        if len(self.ids) == 1:
            return np.asarray(self.ids[0])
        distinct, first, count = np.unique(self.ids, return_index=True, return_counts=True)
        return np.asarray(distinct[np.lexsort((first, -count))])

    def sample(self, n: int) -> GateEvent:
        """Itself, or a copy with at most n of its tokens, evenly spread, for each of which there are all rows: its row_step is 1."""
        k = -(-len(self.ids) // (n * self.row_step))
        step = k * self.row_step
        if step == 1:
            return self
        every = dict.fromkeys(("ids", "weights", "versions", "on_device", "uploaded"), step)
        every |= dict.fromkeys(("probs", "gate_input", "logits"), k)
        told = {name: array[::n] for name, n in every.items() if (array := getattr(self, name)) is not None}
        return replace(self, **told, row_step=1)


class Observer:
    """Sees the gate events of a running model. A subclass overrides what it needs; what it raises is raised by the next decode.

    Attributes:
        wants_decode: Whether it needs every event of decoded tokens. Where no observer does, most are not delivered while
            few experts are missing.
    """

    wants_decode = True

    def observe(self, event: GateEvent) -> None:
        """After a router has selected, on the driver thread, while the layer computes."""

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        """Before a batch, while nothing computes; events of earlier batches may still be waiting.

        Args:
            tokens: [n_tokens] of the batch.
            decode: each is the next of a text; else they are text that is read.
        """

    def new_sequence(self) -> None:
        """The next events are the first of a text, and no other text goes on. All events before have been observed."""

    def close(self) -> None:
        """After the last event, while the expert buffer still runs."""
