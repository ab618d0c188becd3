"""Logits of a run, whether two are the same, and stock llama.cpp, which says what they
should be.
"""

import contextlib

import llama_cpp
import numpy as np

from moeoff.llamacpp.llama import StockLlama


def greedy_logits(llm, tokens: list[int], n_steps: int) -> np.ndarray:
    """[len(tokens) + n_steps, n_vocab] float32 of a prefill and greedy steps; needs
    logits_all.
    """
    llm.reset()
    llm.eval(tokens)
    rows = [llm.scores[: len(tokens)].copy()]
    for _ in range(n_steps):
        llm.eval([int(rows[-1][-1].argmax())])
        rows.append(llm.scores[llm.n_tokens - 1 : llm.n_tokens].copy())
    return np.concatenate(rows)


def stock_logits(model: str, tokens: list[int], n_steps: int, n_ctx: int) -> np.ndarray:
    """`greedy_logits` of a model that stock llama.cpp has in memory."""
    with contextlib.closing(Stock(model, n_ctx=n_ctx, logits_all=True)) as llm:
        return greedy_logits(llm, tokens, n_steps)


def assert_bit_equal(a: np.ndarray, b: np.ndarray) -> None:
    different = a.view(np.uint32) != b.view(np.uint32)
    assert not different.any(), (
        f"{different.sum()} of {different.size} differ, by {np.abs(a - b).max()} at most"
    )


def decode_in(ctx, tokens: list[int], first: int, n_vocab: int) -> np.ndarray:
    """Logits [len(tokens), n_vocab] of one batch in a context of llama.cpp's."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, first + i, 1, True
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(ctx, batch) == 0
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), (len(tokens), n_vocab)).copy()
    llama_cpp.llama_batch_free(batch)
    return logits


class Stock(StockLlama):
    """Plain kernels and flash attention by default, as moeoff: repacked kernels round
    differently from those that experts are computed with.
    """

    def __init__(self, path: str, use_extra_bufts: bool = False, **kwargs):
        super().__init__(
            path,
            use_extra_bufts=use_extra_bufts,
            **{
                "use_mmap": False,
                "verbose": False,
                "flash_attn": True,
                "n_threads": 2,
                "n_threads_batch": 2,
            }
            | kwargs,
        )
