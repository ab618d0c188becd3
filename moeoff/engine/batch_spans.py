"""Which positions of which sequences a batch computes. Knows llama.cpp's batch and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Of one sequence in a batch: position of its first token, the one after its last, how many there are, and whether they are decoded, not read."""

    first: int
    end: int
    n_tokens: int
    decode: bool


def spans_of(sequences: Iterable[int], positions: Iterable[int], is_prompt: Sequence[int] | None = None) -> dict[int, Span]:
    """Of each sequence.

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
    """Of each token in a llama_batch; one of several sequences counts for its first."""
    return [batch.seq_id[i][0] for i in range(batch.n_tokens)]


def batch_spans(batch: Any) -> dict[int, Span]:
    """Of each sequence in a llama_batch."""
    return spans_of(batch_sequences(batch), batch.pos[: batch.n_tokens])


def is_decode(spans: Mapping[int, Span]) -> bool:
    """Whether all that a batch computes is decoded, as against text that is read."""
    return all(span.decode for span in spans.values())
