"""MUL_MAT_ID on experts in memory and on the same experts in an expert buffer, one ggml
graph each.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from helpers.ggml_api import F32, I32, SUCCESS, Backend, Context, cpu_buffer_type, read, write
from moeoff.engine.buffer import ExpertBuffer
from moeoff.llamacpp import native
from moeoff.system.memory import slot_bytes

N_COLS, N_ROWS, N_EXPERT, N_USED = 512, 48, 8, 3
NONE = -1


class BufferTensor:
    """One tensor of experts in an expert buffer, its slices scattered over a file.

    Args:
        slices: the bytes of each expert, None for "none".
        types: of each expert; the tensor is declared with the first.
        n_slots: the arena in slots of the largest slice.
    """

    def __init__(
        self,
        path: Path,
        slices: list,
        types: list[int],
        n_slots: float = 3,
        shape=(N_COLS, N_ROWS),
        **options,
    ):
        self.path = path
        self.shape = shape
        self.slot = max(slot_bytes(s.nbytes) for s in slices if s is not None)
        self.sources = []
        with open(path, "wb") as file:
            for i, data in enumerate(slices):
                if data is None:
                    self.sources.append(native.Source(-1, NONE, 0, 0))
                    continue
                # a multiple of 32, never of a page; what lies between is no weight
                file.write(b"\xff" * (32 * (2 * i + 1)))
                file.write(b"\xff" * (-file.tell() % 32))
                self.sources.append(native.Source(0, types[i], file.tell(), data.nbytes))
                file.write(data.tobytes())
        self.buffer = ExpertBuffer(**options)
        self._context = Context()
        self.tensor = self._context.tensor(
            types[0], *shape, len(slices), name="blk.0.ffn_up_exps.weight"
        )
        with self.buffer.loading():
            self._context.allocate(native.buffer_type())
        assert native.n_tensors(self.buffer.handle) == 1
        assert native.add_file(self.buffer.handle, str(path).encode()) == 0
        self.buffer.set_sources(0, self.sources)
        assert self.buffer.arena_floor == 2 * self.slot
        assert self.buffer.arena_full == sum(slot_bytes(s.nbytes) for s in slices if s is not None)
        self.buffer.start(int(n_slots * self.slot))

    def __enter__(self) -> BufferTensor:
        return self

    def __exit__(self, *_exc) -> None:
        stats = self.buffer.stats()
        assert stats.arena_committed <= stats.cache_bytes
        self.buffer.close()
        self._context.close()


class CpuTensor:
    """The same experts in a CPU buffer."""

    def __init__(self, data: np.ndarray, type: int, shape=(N_COLS, N_ROWS)):
        self.shape = shape
        self._context = Context()
        self.tensor = self._context.tensor(type, *shape, len(data))
        self._context.allocate(cpu_buffer_type())
        write(self.tensor, data)

    def __enter__(self) -> CpuTensor:
        return self

    def __exit__(self, *_exc) -> None:
        self._context.close()


class Op:
    """MUL_MAT_ID of one or more tensors of experts with the same rows and ids.

    Args:
        n_rows_in: rows of the right operand for each token: 1, or one for each of the
            token's experts.
        padded_ids: ids are a view of the first columns of [n_tokens, n_expert], as a
            top-k of argsort gives them.
        padded_rows: the right operand is a view of the second half of rows twice as
            long.
    """

    def __init__(
        self,
        *experts: CpuTensor | BufferTensor,
        n_tokens: int,
        n_rows_in: int = 1,
        padded_ids: bool = False,
        padded_rows: bool = False,
        n_used: int = N_USED,
    ):
        n_cols, n_rows = experts[0].shape
        self.out_shape = (n_tokens, n_used, n_rows)
        self.rows_shape = (n_tokens, n_rows_in, 2 * n_cols if padded_rows else n_cols)
        self.ids_shape = (n_tokens, N_EXPERT if padded_ids else n_used)
        self.n_used = n_used
        self._context = Context(4 + len(experts), len(experts))
        self._rows = self._context.tensor(F32, *self.rows_shape[::-1])
        self.id_tensor = self._context.tensor(I32, *self.ids_shape[::-1])
        ids = (
            self._context.view_2d(self.id_tensor, n_used, n_tokens, 4 * N_EXPERT)
            if padded_ids
            else self.id_tensor
        )
        rows = self._rows
        if padded_rows:
            rows = self._context.view_3d(
                rows, n_cols, n_rows_in, n_tokens, 8 * n_cols, 8 * n_cols * n_rows_in, 4 * n_cols
            )
        self._outputs = [self._context.mul_mat_id(e.tensor, rows, ids) for e in experts]
        self._graphs = [self._context.graph(out) for out in self._outputs]
        self._context.allocate(cpu_buffer_type())

    def __enter__(self) -> Op:
        return self

    def __exit__(self, *_exc) -> None:
        self._context.close()

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """New random rows, and new experts: each token's are distinct, and some are
        chosen much more often.
        """
        write(self._rows, rng.standard_normal(self.rows_shape, np.float32) * np.float32(3))
        popularity = rng.exponential(1.5, N_EXPERT)
        scores = rng.gumbel(size=(self.ids_shape[0], N_EXPERT)) + popularity
        ids = np.argsort(-scores, axis=1)[:, : self.ids_shape[1]].astype(np.int32)
        write(self.id_tensor, ids)
        return ids[:, : self.n_used]

    def give(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """These rows and experts instead of random ones."""
        write(self._rows, rows)
        write(self.id_tensor, ids)

    def compute(
        self, backend: Backend, i: int, n_threads: int = 2, status: int = SUCCESS
    ) -> np.ndarray:
        """uint32 bits [n_tokens, n_used, n_rows] of the i-th tensor's result."""
        # a NaN where nothing is written
        write(self._outputs[i], np.full(self.out_shape, 0x7FBADBAD, np.uint32))
        assert backend.compute(self._graphs[i], n_threads) == status
        return read(self._outputs[i], self.out_shape)

    def assert_equal(self, backend: Backend, rng: np.random.Generator, n_threads: int = 2) -> None:
        """All tensors give the same for new random rows and experts."""
        self.choose(rng)
        expected = self.compute(backend, 0, n_threads)
        assert not np.isnan(expected.view(np.float32)).any()
        for i in range(1, len(self._graphs)):
            np.testing.assert_array_equal(self.compute(backend, i, n_threads), expected)
