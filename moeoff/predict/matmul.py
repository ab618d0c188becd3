"""Matrix products on threads that must not disturb llama.cpp's."""

from __future__ import annotations

import numpy as np

from .. import native
from ..gguf.quantize import fits, quantize, type_from_name


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x @ w.T of [n, d] and [m, d], on the calling thread alone.

    BLAS would wake threads of its own, even for a vector, and take the cores from the threads that compute the next layer:
    86 instead of 110 tok/s in a prompt on 2 cores. Dot products of single rows are below its threshold.
    """
    out: np.ndarray = np.vecdot(x[:, None], w)
    return out


class Rows:
    """A matrix that is multiplied for every token, as Q8_0: what such a product takes is the time to read the matrix, and a
    prediction needs no more than the order of the results. Rows that are no whole blocks of 32 stay float32.

    Args:
        weight: [m, d] float.
    """

    def __init__(self, weight: np.ndarray):
        self.n_rows, self.n_cols = weight.shape
        name = "Q8_0" if fits(type_from_name("Q8_0"), self.n_cols) else "F32"
        self._type = type_from_name(name)
        self._rows = quantize(weight, self._type)
        self._address = self._rows.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def product(self, x: np.ndarray) -> np.ndarray:
        """x @ weight.T: [n, m] float32 of [n, d], on the calling thread alone (see `matmul`)."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self.n_rows), np.float32)
        if native.row_products(self._type, self._address, self.n_rows, self.n_cols, x.ctypes.data, len(x), out.ctypes.data) != 0:
            raise MemoryError("no memory for one row of a router")
        return out
