"""Logits of a run, and whether two are the same."""

import numpy as np


def greedy_logits(llm, tokens: list[int], n_steps: int) -> np.ndarray:
    """[len(tokens) + n_steps, n_vocab] float32 of a prefill and greedy steps; needs logits_all."""
    llm.reset()
    llm.eval(tokens)
    rows = [llm.scores[: len(tokens)].copy()]
    for _ in range(n_steps):
        llm.eval([int(rows[-1][-1].argmax())])
        rows.append(llm.scores[llm.n_tokens - 1 : llm.n_tokens].copy())
    return np.concatenate(rows)


def assert_bit_equal(a: np.ndarray, b: np.ndarray) -> None:
    different = a.view(np.uint32) != b.view(np.uint32)
    assert not different.any(), f"{different.sum()} of {different.size} differ, by {np.abs(a - b).max()} at most"
