"""What one gate of a model did for one batch of tokens: what cache policies, predictors, traces and users' callbacks get."""

from __future__ import annotations

from dataclasses import dataclass

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
        probs: [n_tokens, n_experts] float32, the router's probabilities of all experts; None where they were not computed.
        gate_input: [n_tokens, n_embd] float32, what the router read; None if not asked for, or where the architecture's router
            reads something else.
        versions: [n_tokens, n_used] uint8, what serves each: 0 high precision, 1 low, 2 skipped; None: all high.
        layer: of the model; -1 where it is not known.
        n_hit, n_miss: slices of the selected experts (one for each matrix) that were resident, and that were not, at selection.
        seq: number of the event in its expert buffer, from 1; 0 if it comes from none.
        t_ns: nanoseconds of CLOCK_MONOTONIC at selection.
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


def is_decode(event: GateEvent) -> bool:
    """Whether each token of the batch continues a text of its own, as against a prompt."""
    return len(event.ids) == 1
