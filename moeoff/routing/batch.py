"""The sequences and positions in a llama_batch, and whether they are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A sequence's part of a batch.

    Attributes:
        first: Position of the first token.
        end: Position after the last token.
        decode: True if the tokens are decoded, False if they are a prompt.
    """

    first: int
    end: int
    n_tokens: int
    decode: bool


def spans_of(
    sequences: Iterable[int], positions: Iterable[int], is_prompt: Sequence[int] | None = None
) -> dict[int, Span]:
    """Return the span of each sequence.

    Args:
        is_prompt: True for each token of a prompt. None: single tokens are decoded.
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
    """Return the span of each sequence; tokens of several count for the first one."""
    n = batch.n_tokens
    return spans_of((batch.seq_id[i][0] for i in range(n)), batch.pos[:n])


def is_decode(spans: Mapping[int, Span]) -> bool:
    """Return True if the whole batch is decoded."""
    return all(span.decode for span in spans.values())
