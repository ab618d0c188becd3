"""Matrix products on threads that must not disturb llama.cpp's."""

from __future__ import annotations

import numpy as np


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w.T of [n, d] and [m, d], on the calling thread alone.

    BLAS would wake threads of its own, even for a vector, and take the cores from the threads that compute the next layer:
    86 instead of 110 tok/s in a prompt on 2 cores. Dot products of single rows are below its threshold.
    """
    out: np.ndarray = np.vecdot(x[:, None], w)
    return out
