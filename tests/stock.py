"""Stock llama.cpp from the same library: no override, plain kernels. What every lossless run is compared with."""

import llama_cpp
import numpy as np


class Stock(llama_cpp.Llama):
    """llama_cpp.Llama with use_extra_bufts=False, which its constructor does not offer."""

    def __init__(self, path, **kwargs):
        super().__init__(path, **{"use_mmap": False, "verbose": False, "n_threads": 2, "n_threads_batch": 2} | kwargs)

    @property
    def model_params(self):
        return self._params

    @model_params.setter
    def model_params(self, params):
        params.use_extra_bufts = False
        self._params = params


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
