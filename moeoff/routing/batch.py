"""The contents of a llama_batch: which positions of which sequences it computes, and whether they are decoded or read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


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


def batch_spans(batch: Any) -> dict[int, Span]:
    """The span of each sequence in a llama_batch; a token of several sequences counts for its first."""
    n = batch.n_tokens
    return spans_of((batch.seq_id[i][0] for i in range(n)), batch.pos[:n])


def is_decode(spans: Mapping[int, Span]) -> bool:
    """True if all that a batch computes is decoded, as against text that is read."""
    return all(span.decode for span in spans.values())
