"""GET_ROWS by itself: the same rows of a file from a map of it, by ggml, and from a
table that stays on disk.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from helpers.ggml_api import F32, I32, SUCCESS, Backend, Context, cpu_buffer_type, read, write
from moeoff.engine.buffer import ExpertBuffer
from moeoff.gguf.quantize import row_bytes
from moeoff.llamacpp import native

MAPPED, ON_DISK = range(2)


class Rows:
    """Lookups of n_tokens rows of a table, a graph each: a context manager.

    Args:
        path: of the file, in which the table begins at offset.
        type: of ggml.
        shape: rows, and numbers of each.
        direct_io: reads go around the page cache.
    """

    def __init__(
        self,
        path: Path,
        type: int,
        shape: tuple[int, int],
        n_tokens: int,
        offset: int = 0,
        direct_io: bool = True,
    ):
        self.path, self.row_bytes, self.buffer = (
            path,
            row_bytes(type, shape[1]),
            ExpertBuffer(direct_io=direct_io),
        )
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # as llama.cpp advises it of tables that it reads by row
        self._map.madvise(mmap.MADV_RANDOM)
        self._weights, self._reserved, self._ops = Context(), Context(), Context(8, 4)
        mapped = self._weights.tensor(type, *reversed(shape))
        self._weights.place(mapped, np.frombuffer(self._map, np.uint8), offset)
        self._reserved.tensor(F32, 32, 4, name="other.weight")
        on_disk = self._reserved.tensor(type, *reversed(shape), name="table.weight")
        with self.buffer.loading():
            self._reserved.allocate(native.buffer_type())
        assert native.add_file(self.buffer.handle, os.fsencode(path)) == 0
        assert (
            native.set_row_table_source(
                self.buffer.handle, 1, native.Source(0, type, offset, shape[0] * self.row_bytes, 0)
            )
            == 0
        )
        self._shape = (n_tokens, shape[1])
        self._ids = self._ops.tensor(I32, n_tokens)
        self._outputs = [self._ops.get_rows(tensor, self._ids) for tensor in (mapped, on_disk)]
        self._casts = [
            self._ops.cast(
                self._ops.view_2d(tensor, shape[1], 1, self.row_bytes, 3 * self.row_bytes), F32
            )
            for tensor in (mapped, on_disk)
        ]
        self._graphs = [self._ops.graph(out) for out in (*self._outputs, *self._casts)]
        self._ops.allocate(cpu_buffer_type())

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_exc) -> None:
        self.buffer.close()
        for context in (self._ops, self._reserved, self._weights):
            context.close()

    def prepare(self, ids: np.ndarray) -> None:
        write(self._ids, ids.astype(np.int32))
        for out in self._outputs:
            # a NaN where nothing is written
            write(out, np.full(self._shape, 0x7FBADBAD, np.uint32))

    def compute(
        self, backend: Backend, way: int, n_threads: int = 2, status: int = SUCCESS
    ) -> None:
        assert self.status(backend, way, n_threads) == status

    def status(self, backend: Backend, way: int, n_threads: int = 2) -> int:
        """Runs a graph; returns its ggml_status."""
        return backend.compute(self._graphs[way], n_threads)

    def result(self, way: int) -> np.ndarray:
        return read(self._outputs[way], self._shape)

    def cast_third(self, backend: Backend, way: int, n_threads: int) -> np.ndarray:
        assert backend.compute(self._graphs[2 + way], n_threads) == SUCCESS
        return read(self._casts[way], self._shape[1:])

    def leave_page_cache(self) -> None:
        """The file's pages, as far as nobody else has them mapped."""
        self._map.madvise(mmap.MADV_DONTNEED)
        with open(self.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
