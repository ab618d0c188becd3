"""Which positions of which sequences a batch computes. Knows llama.cpp's batch and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Of one sequence in a batch: position of its first token, the one after its last, and how many there are."""

    first: int
    end: int
    n_tokens: int


def batch_spans(batch: Any) -> dict[int, Span]:
    """Of each sequence in a llama_batch; a token of several sequences counts for its first."""
    spans: dict[int, Span] = {}
    for i in range(batch.n_tokens):
        sequence, pos = batch.seq_id[i][0], batch.pos[i]
        span = spans.get(sequence)
        spans[sequence] = Span(pos, pos + 1, 1) if span is None else Span(span.first, pos + 1, span.n_tokens + 1)
    return spans


def is_decode(spans: Mapping[int, Span]) -> bool:
    """Whether each token is the next of a sequence of its own, as against text that is read."""
    return all(span.n_tokens == 1 for span in spans.values())
