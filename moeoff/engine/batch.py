"""The contents of a llama_batch: positions of which sequences it computes, and the sequence of each row of its gate events.

llama.cpp computes a batch in micro-batches, each gate once in every one, and in its last layer only the tokens whose outputs are
wanted. Where the order of the rows is not certain, nothing is said of them: a row never counts for another sequence than its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..binding import api
from ..gate_event import GateEvent


class Span(NamedTuple):
    """One sequence's part of a batch: position of its first token, the one after its last, how many there are, and whether they are decoded, not read."""

    first: int
    end: int
    n_tokens: int
    decode: bool


def spans_of(sequences: Iterable[int], positions: Iterable[int], is_prompt: Sequence[int] | None = None) -> dict[int, Span]:
    """The span of each sequence.

    Args:
        sequences, positions: of each token.
        is_prompt: likewise; None: a sequence's only token is decoded, and several are read.
    """
    spans: dict[int, Span] = {}
    for i, (sequence, position) in enumerate(zip(sequences, positions)):
        span = spans.get(sequence)
        if span is None:
            spans[sequence] = Span(position, position + 1, 1, is_prompt is None or not is_prompt[i])
        else:
            decode = is_prompt is not None and span.decode and not is_prompt[i]
            spans[sequence] = Span(span.first, position + 1, span.n_tokens + 1, decode)
    return spans


def batch_sequences(batch: Any) -> list[int]:
    """The sequence of each token in a llama_batch; one of several sequences counts for its first."""
    return [batch.seq_id[i][0] for i in range(batch.n_tokens)]


def batch_spans(batch: Any) -> dict[int, Span]:
    """The span of each sequence in a llama_batch."""
    return spans_of(batch_sequences(batch), batch.pos[: batch.n_tokens])


def is_decode(spans: Mapping[int, Span]) -> bool:
    """True if all that a batch computes is decoded, as against text that is read."""
    return all(span.decode for span in spans.values())


NO, YES, MAYBE = 0, 1, 2  # whether a token's output is wanted


class OneSequence:
    """Rows of batches that hold one sequence: whatever a gate sees is of it."""

    def __init__(self, sequence: int):
        self._rows = np.full(1, sequence, np.int32)

    def of(self, event: GateEvent) -> np.ndarray:
        """[n_tokens]."""
        if len(self._rows) != len(event.ids):
            self._rows = np.full(len(event.ids), self._rows[0], np.int32)
        return self._rows


class BatchRows:
    """Rows of one batch, whose tokens are computed in its order.

    Args:
        sequences: [n_tokens] int32.
        outputs: [n_tokens] of NO, YES, MAYBE.
        n_ubatch: tokens of a micro-batch.
    """

    def __init__(self, sequences: np.ndarray, outputs: np.ndarray, n_ubatch: int):
        self._sequences, self._outputs, self._n_ubatch = sequences, outputs, n_ubatch
        self._end, self._seq = 0, -1
        self._gate = 1 << 30  # that saw the micro-batch last: the next event begins the first one
        self._lost = False

    def of(self, event: GateEvent) -> np.ndarray | None:
        """[n_tokens] of the next event; None: not known."""
        if self._lost:
            return None
        n = len(event.ids)
        missed = self._seq >= 0 and event.seq != self._seq + 1  # events are dropped where the driver is too slow
        self._seq = event.seq
        if event.gate <= self._gate:
            first, self._end = self._end, min(self._end + self._n_ubatch, len(self._sequences))
            self._all, outputs = self._sequences[first : self._end], self._outputs[first : self._end]
            self._sure, self._most = self._all[outputs == YES], self._all[outputs != NO]
            missed = missed or n != len(self._all)  # a context with its own way to split the batch, or another one
        self._gate, self._lost = event.gate, missed
        if missed:
            return None
        # as many rows mean the same rows: each of the three has the others' order
        return next((rows for rows in (self._all, self._sure, self._most) if len(rows) == n), None)


@dataclass(frozen=True)
class UbatchOrder:
    """How a context computes a batch.

    Attributes:
        n_ubatch: tokens of a micro-batch.
        in_order: as the batch has them, whatever sequences they are of. Else those of several sequences are put together anew, and
            only a batch with one token each of ascending sequences keeps its order.
    """

    n_ubatch: int
    in_order: bool

    @classmethod
    def of(cls, ctx: int) -> UbatchOrder:
        """A llama_context's; its order is kept with one cache for all sequences and no state of each (llama_memory_i::init_batch)."""
        model = api.llama_get_model(ctx)
        states = api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model)
        return cls(api.llama_n_ubatch(ctx), not states and api.llama_n_ctx_seq(ctx) == api.llama_n_ctx(ctx))

    def rows(self, sequences: np.ndarray, outputs: np.ndarray) -> BatchRows | None:
        """The rows of a batch of several sequences; None: their order is not known."""
        if not self.in_order and (np.diff(sequences) <= 0).any():
            return None
        return BatchRows(sequences, outputs, self.n_ubatch)
