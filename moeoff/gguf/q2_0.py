"""Q2_0 with searched scales: what stands in for 2-bit types whose blocks do not fit a row.

ggml's own quantizer takes the largest value of a block as its scale, uses three of the four codes, ignores the importance
matrix, and is off by 72 % of the weights' root mean square. The format can do with half of that.
"""

from __future__ import annotations

import numpy as np

__all__ = ["quantize_q2_0"]

_BLOCK = 64  # values: -1, 0, 1 or 2 times a scale that may be negative; stored as F16 scale, then 4 codes a byte, first lowest
_SCALES = np.array([f * sign for f in (0.3, 0.36, 0.43, 0.51, 0.61, 0.73, 0.9) for sign in (1, -1)], np.float32)  # of the block's largest value
_CHUNK = 1 << 12  # blocks at once: what is computed of them stays in a core's cache


def quantize_q2_0(rows: np.ndarray, imatrix: np.ndarray | None = None) -> np.ndarray:
    """f32 [n_rows, n_cols], n_cols a multiple of 64 -> uint8 [n_rows, n_cols / 64 * 18], as ggml reads Q2_0.

    imatrix: f32 [n_cols], the importance of each column. For each block the codes of several scales are tried, each with the
    scale that is best for them (least squares), and the one with the least weighted error is taken.
    """
    n_rows, n_cols = rows.shape
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, _BLOCK)
    weights = None if imatrix is None else np.broadcast_to(imatrix.astype(np.float32), rows.shape).reshape(-1, _BLOCK)
    out = np.empty((len(blocks), 2 + _BLOCK // 4), np.uint8)
    for at in range(0, len(blocks), _CHUNK):
        part = slice(at, at + _CHUNK)
        out[part] = _quantize(blocks[part], None if weights is None else weights[part])
    return out.reshape(n_rows, n_cols // _BLOCK * out.shape[1])


def _quantize(x: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    largest = np.abs(x).max(axis=1)
    unit = x / np.where(largest == 0, np.float32(1), largest)[:, None]  # squares neither overflow nor vanish
    weighted = unit if weights is None else unit * weights
    best, scale = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)
    for candidate in _SCALES:
        codes = _codes(unit * (1 / candidate))
        along = np.einsum("ij,ij->i", weighted, codes)
        length = np.einsum("ij,ij->i", codes, codes) if weights is None else np.einsum("ij,ij,ij->i", weights, codes, codes)
        fitted = along / np.maximum(length, np.finfo(np.float32).tiny)
        better = along * fitted > best  # the block's error is its own square less this
        best[better], scale[better] = (along * fitted)[better], fitted[better]
    limit = np.finfo(np.float16).max
    scale = np.clip(scale * largest, -limit, limit).astype(np.float16)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale == 0, np.float32(0), 1 / scale.astype(np.float32))
        codes = (_codes(x * inverse[:, None]) + 1).astype(np.uint8).reshape(len(x), -1, 4)
    packed = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    return np.concatenate([scale[:, None].view(np.uint8), packed], axis=1)


def _codes(values: np.ndarray) -> np.ndarray:
    """The nearest of -1 to 2 for each, in place."""
    return np.clip(np.rint(values, out=values), -1, 2, out=values)
