"""Random weights as quantized blocks, faster than a disk can write them.

Normal floats are quantized once for each type; every slice is another stretch of that pool, and another standard deviation is
another scale in the same blocks. So neither floats nor quantizer stand between a model of 60 GB and its disk, and yet no two
slices of a type are the same, as long as there are not more of them than the pool has blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moeoff.errors import OptionError
from moeoff.gguf.quantize import dequantize, fits, needs_imatrix, quantize_chunks, row_bytes, type_name

__all__ = ["Pools"]

_MXFP4 = "MXFP4"
# Where a block has its float16 scales; all of a block's values are proportional to them.
_SCALES = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
_ROW = 256  # values: one block of every K-quant
_STEP = 2654435761  # odd, so that multiples of it meet every block before they meet one twice


@dataclass
class _Pool:
    """blocks uint8 [n_blocks, bytes of a block]; std of its values; which slice comes next."""

    blocks: np.ndarray
    std: float
    slices: int = 0


@dataclass
class Pools:
    """Pools of random blocks by type. n_values: of a pool, a power of two. The same seed gives the same bytes."""

    seed: int
    n_values: int
    _made: dict[tuple[int, int], _Pool] = field(default_factory=dict)

    def slices(self, type: int, n_bytes: int, n_slices: int, std: float) -> Iterator[np.ndarray]:
        """n_slices times n_bytes of blocks of a type, as uint8 pieces in order; their values have mean 0 and this deviation.

        MXFP4 knows powers of two alone as scales: there the pool is quantized anew for quarters of them, and the deviation is met
        within 10 %. A piece is a view that the next call of `slices` changes: write it first.

        Raises:
            OptionError: a type whose scales this module does not know.
        """
        mxfp4 = type_name(type) == _MXFP4
        quarters = round(4 * np.log2(std)) if mxfp4 else 0
        pool = self._pool(type, quarters % 4)
        blocks = _scaled_mxfp4(pool, quarters // 4) if mxfp4 else _scaled(pool, type, std)
        flat, width = blocks.reshape(-1), blocks.shape[1]
        for _ in range(n_slices):
            at = pool.slices * _STEP % len(blocks) * width
            pool.slices += 1
            left = n_bytes
            while left:
                piece = flat[at : at + left]
                yield piece
                left, at = left - len(piece), 0

    def _pool(self, type: int, quarter: int) -> _Pool:
        if (type, quarter) not in self._made:
            if type_name(type) not in (*_SCALES, _MXFP4):
                raise OptionError(f"random blocks of {type_name(type)} are not made; there are {', '.join(sorted((*_SCALES, _MXFP4)))}")
            generator = np.random.Generator(np.random.SFC64([self.seed, type]))
            spread = np.float32(2 ** (quarter / 4))
            chunk = min(self.n_values, 1 << 20)
            floats = [generator.standard_normal((chunk // _ROW, _ROW), np.float32) * spread for _ in range(self.n_values // chunk)]
            imatrix = np.ones(_ROW, np.float32) if needs_imatrix(type) else None
            rows = np.concatenate(list(quantize_chunks([lambda f=f: f for f in floats], type, imatrix)))
            sample = rows[:4096]
            std = float(dequantize(sample, type, (len(sample), _ROW)).std())
            block = next(row_bytes(type, n) for n in (1, 32, 64, _ROW) if fits(type, n))
            self._made[type, quarter] = _Pool(rows.reshape(-1, block), std)
        return self._made[type, quarter]


def _scaled(pool: _Pool, type: int, std: float) -> np.ndarray:
    out = pool.blocks.copy()
    for at in _SCALES[type_name(type)]:
        scales = out[:, at : at + 2].copy().view(np.float16).astype(np.float32) * np.float32(std / pool.std)
        out[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return out


def _scaled_mxfp4(pool: _Pool, doublings: int) -> np.ndarray:
    out = pool.blocks.copy()
    out[:, 0] = np.clip(out[:, 0].astype(np.int32) + doublings, 1, 254)
    return out
