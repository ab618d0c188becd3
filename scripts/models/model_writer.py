"""Writing models: a GGUF file whose tensors arrive as a stream, and rows that are
quantized while others are made.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from moeoff.errors import ModelError
from moeoff.gguf.file import DEFAULT_ALIGNMENT, Tensor
from moeoff.gguf.quantize import quantize
from moeoff.gguf.writer import Value, header_bytes
from moeoff.system.files import atomic_file


class ModelWriter(contextlib.AbstractContextManager):
    """Writes a GGUF file whose tensors arrive as a stream, in the order of `tensors`,
    each in pieces of any size.

    A context manager: the file appears under its name when the block ends and every
    tensor is complete.

    Args:
        metadata: as `header_bytes` takes it.

    Raises:
        ModelError: at the start for a tensor whose row length does not fit its type, at
            the end for missing data.
        WriteError: the file exists (unless overwrite), or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, Value],
        tensors: Sequence[Tensor],
        alignment: int = DEFAULT_ALIGNMENT,
        overwrite: bool = False,
    ) -> None:
        self._path, self._alignment = path, alignment
        self._header = header_bytes(metadata, tensors, alignment)
        self._left = [(tensor.name, tensor.n_bytes) for tensor in reversed(tensors)]
        self._expected, self._name = 0, ""  # bytes that the current tensor still needs
        self._atomic = atomic_file(path, overwrite=overwrite)

    def __enter__(self) -> ModelWriter:
        self._file = self._atomic.__enter__()
        self._file.write(self._header)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool | None:
        if kind is None and (self._expected or self._left):
            missing = ModelError(
                f"{self._path}: incomplete: {len(self._left) + bool(self._expected)} tensors miss"
                " data"
            )
            self._atomic.__exit__(ModelError, missing, None)
            raise missing
        return self._atomic.__exit__(kind, *error)

    def write(self, data: np.ndarray) -> None:
        """Append bytes (uint8, contiguous) to the current tensor, or to the next one if
        that is complete.
        """
        if self._expected == 0:
            if not self._left:
                raise ModelError(f"{self._path}: more data than tensors")
            self._name, self._expected = self._left.pop()
        if data.nbytes > self._expected:
            raise ModelError(
                f"{self._path}: tensor {self._name} expects {self._expected} more bytes, got"
                f" {data.nbytes}"
            )
        self._file.write(data.data)
        self._expected -= data.nbytes
        if self._expected == 0:
            self._file.write(bytes(-self._file.tell() % self._alignment))


def write_arrays(
    path: str | os.PathLike[str], metadata: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes a GGUF file of float32 tensors; one that is there is replaced."""
    with ModelWriter(
        path,
        metadata,
        [Tensor(name, array.shape, 0) for name, array in arrays.items()],
        overwrite=True,
    ) as writer:
        for array in arrays.values():
            writer.write(np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8))


def quantize_chunks(
    chunks: Iterable[Callable[[], np.ndarray]],
    type: int,
    imatrix: np.ndarray | None = None,
    threads: int = 2,
) -> Iterator[np.ndarray]:
    """Quantize runs of rows, each made by a call, on `threads` threads; yield the
    results of `quantize` in the order given.

    The calls run on the worker threads too, so that reading or computing rows overlaps
    with quantizing. At most 2 * threads chunks exist at any time: that bounds the
    memory. An exception of a call is raised here, at its turn.
    """
    pending: deque[Future[np.ndarray]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for make in chunks:
                if len(pending) == 2 * threads:
                    yield pending.popleft().result()
                pending.append(pool.submit(lambda made: quantize(made(), type, imatrix), make))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
