"""Loss on own text: a model writes freely under a rule, and the lossless model says how likely it finds what was written.

What is in memory is chosen, and what is chosen stays in memory: a rule that looks at what is resident feeds on itself, which text of others does not show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engine.llama import Llama
from .statistics import log_probs

OPENING = 32  # tokens that are given


def write_freely(llm: Llama, window: Sequence[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A text behind the opening of a window, as long as the window, computed token by token with the model's present precision.

    Returns:
        its tokens [n_ctx] int32, the opening included; and [n_ctx - OPENING] float64 log-probabilities of those that were written, by their writer.
    """
    rng = np.random.default_rng(seed)
    text = np.array(window, np.int32)
    log_p = np.empty(len(text) - OPENING)
    llm.clear_context()
    llm.decode_batch(text[:OPENING].tolist(), 0, OPENING - 1)
    for i in range(OPENING, len(text)):
        row = log_probs(llm.batch_logits(1))[0].astype(np.float64)
        likely = np.exp(row)
        text[i] = rng.choice(len(row), p=likely / likely.sum())
        log_p[i - OPENING] = row[text[i]]
        llm.decode_batch([int(text[i])], i, i)
    llm.clear_context()
    return text, log_p


def score(llm: Llama, text: np.ndarray) -> np.ndarray:
    """[n_ctx - OPENING] float64: what this model thinks of each token that was written; the whole text at once."""
    llm.clear_context()
    llm.decode_batch(text[:-1].tolist(), 0, OPENING - 1)
    logp = log_probs(llm.batch_logits(len(text) - OPENING)).astype(np.float64)
    llm.clear_context()
    out: np.ndarray = logp[np.arange(len(logp)), text[OPENING:]]
    return out
