"""Loss on own text: a model writes freely under a rule, and the lossless model says how likely it finds what was written.

What is in memory is chosen, and what is chosen stays in memory: a rule that looks at what is resident feeds on itself, which text of others does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.llama import Llama
from ..gate_event import GateEvent
from .perplexity import Window
from .statistics import log_probs

__all__ = ["FreeText", "OPENING", "score", "write_freely"]

OPENING = 32  # tokens that are given
_NGRAM = 4


@dataclass(frozen=True)
class FreeText:
    """Texts that one model wrote.

    Attributes:
        tokens: [n_texts, n_ctx] int32, the opening included.
        log_p: [n_texts, n_ctx - OPENING] float64, of each token that was written, by its writer.
        entropy: of the experts used, in bits, mean over layers.
    """

    tokens: np.ndarray
    log_p: np.ndarray
    entropy: float

    @property
    def repeated(self) -> float:
        """Share of the written 4-grams that the same text had before."""
        seen = total = 0
        for text in self.tokens.tolist():
            grams = [tuple(text[i : i + _NGRAM]) for i in range(OPENING, len(text) - _NGRAM + 1)]
            seen, total = seen + len(grams) - len(set(grams)), total + len(grams)
        return seen / max(total, 1)


def write_freely(llm: Llama, windows: Sequence[Window], seed: int = 0, progress: Callable[[int], None] | None = None) -> FreeText:
    """A text behind the opening of each window, as long as the window, computed token by token with the model's present precision."""
    n_ctx, rng = len(windows[0].tokens), np.random.default_rng(seed)
    tokens = np.array([window.tokens for window in windows], np.int32)
    log_p = np.empty((len(windows), n_ctx - OPENING))
    uses = np.zeros(llm.engine.buffer.priorities.shape, np.int64)

    def count(event: GateEvent) -> None:
        if event.decode:
            np.add.at(uses[event.gate], event.ids.ravel(), 1)

    llm.set_gate_callback(count)
    try:
        for index, text in enumerate(tokens):
            llm.clear_context()
            llm.decode_batch(text[:OPENING].tolist(), 0, OPENING - 1)
            for at in range(OPENING, n_ctx):
                row = log_probs(llm.batch_logits(1))[0].astype(np.float64)
                likely = np.exp(row)
                text[at] = rng.choice(len(row), p=likely / likely.sum())
                log_p[index, at - OPENING] = row[text[at]]
                llm.decode_batch([int(text[at])], at, at)
            if progress:
                progress((index + 1) * n_ctx)
        llm.engine.buffer.drain()
    finally:
        llm.set_gate_callback(None)
    llm.clear_context()
    entropy = float(np.mean([-(p * np.log2(p)).sum() for p in (row[row > 0] / row.sum() for row in uses)]))
    return FreeText(tokens, log_p, entropy)


def score(llm: Llama, texts: FreeText) -> np.ndarray:
    """[n_texts, n_ctx - OPENING] float64: what this model thinks of each token that was written; whole texts at once."""
    out = np.empty_like(texts.log_p)
    for index, text in enumerate(texts.tokens):
        llm.clear_context()
        llm.decode_batch(text[:-1].tolist(), 0, OPENING - 1)
        logp = log_probs(llm.batch_logits(len(text) - OPENING))
        out[index] = logp[np.arange(len(logp)), text[OPENING:]]
    llm.clear_context()
    return out
