"""Importance matrices of llama-imatrix: a weight for each column of a tensor or expert.

Both formats are read: GGUF (NAME.in_sum2 and NAME.counts) and the older binary one.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np

from ..errors import ModelError
from ..system.files import open_file, read_file
from ..system.memory import available
from .file import ModelFile


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix.

    Attributes:
        values: float32 [n_expert or 1, n_cols] by tensor name, finite, not negative.
    """

    path: str
    values: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Imatrix:
        """Read a file of either format. Raise ModelError if that is impossible."""
        path = os.fspath(path)
        try:
            with open_file(path) as file:
                magic = file.read(4)
            values = _read_gguf(path) if magic == b"GGUF" else _read_binary(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        except (struct.error, ValueError) as error:
            raise ModelError(f"{path}: not an importance matrix, or damaged: {error}") from None
        if not values or not all(np.isfinite(v).all() and (v >= 0).all() for v in values.values()):
            raise ModelError(
                f"{path}: not an importance matrix, or damaged: no values, or some are not finite"
            )
        return cls(path, values)

    def columns(self, name: str, expert: int, n_expert: int, n_cols: int) -> np.ndarray | None:
        """Return an expert's weights, float32 [n_cols], None if it was never routed."""
        values = self.values.get(name)
        if values is None:
            return None
        values = values.reshape(-1)
        if values.size == n_expert * n_cols:
            values = values.reshape(n_expert, n_cols)[expert]
        elif values.size != n_cols:
            expected = f"expected {n_expert} x {n_cols} values for {name}, got {values.size}"
            raise ModelError(f"{self.path}: matrix of another model: {expected}")
        return values if values.any() else None


def _read_gguf(path: str) -> dict[str, np.ndarray]:
    out = {}
    with ModelFile(path) as file:
        for name in file.tensors:
            if not name.endswith(".in_sum2"):
                continue
            base = name.removesuffix(".in_sum2")
            sums, counts = (
                file.rows(name),
                file.rows(f"{base}.counts").reshape(-1, 1)
                if f"{base}.counts" in file.tensors
                else None,
            )
            if counts is None or len(counts) not in (1, len(sums)):
                raise ValueError(f"no counts for {base}")
            with np.errstate(all="ignore"):  # the caller refuses values that are not finite
                out[base] = (sums / np.maximum(counts, 1)).astype(np.float32)
    return out


def _read_binary(path: str) -> dict[str, np.ndarray]:
    """Parse int32 n and n records: int32 length, name, int32 n_calls, n_values, f32."""
    data = read_file(path, available() // 4)
    (n,), offset, out = struct.unpack_from("<i", data), 4, {}
    for _ in range(n):
        (size,) = struct.unpack_from("<i", data, offset)
        if size < 1 or offset + 4 + size > len(data):
            raise ValueError("truncated name")
        name = data[offset + 4 : offset + 4 + size].decode()
        n_calls, n_values = struct.unpack_from("<ii", data, offset + 4 + size)
        if n_values < 0:  # would move the offset backwards
            raise ValueError(f"{n_values} values")
        offset += 12 + size
        out[name] = (np.frombuffer(data, "<f4", n_values, offset) / max(n_calls, 1)).astype(
            np.float32
        )[None]
        offset += 4 * n_values
    return out
