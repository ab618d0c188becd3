"""Builds a sidecar: plans which slice goes where, and streams them there.

A job is one slice of the source: read once, in pieces, and written in every tier to the place that was planned for it. Jobs
share nothing, so they run on any number of threads, and memory is bounded by pieces, whatever the model. The file grows under
a temporary name and gets its own when everything is on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from io import FileIO

import numpy as np
from gguf import Keys

from ..errors import Cancelled, ModelError, OptionError, WriteError
from ..files import publish, read_file
from ..gguf.file import Tensor
from ..gguf.imatrix import Imatrix
from ..gguf.model_index import ModelBytes, ModelIndex, TensorSpan, parse_tensor_name
from ..gguf.quantize import dequantize, is_written, needs_imatrix, quantize, row_bytes, type_name
from ..gguf.writer import Value, header_bytes
from ..memory import available, format_size
from .file import ALIGNMENT, FORMAT_VERSION, Hasher, hash64, hash_range, seal, slice_name, source_sample
from .tiers import Tier

__all__ = ["SidecarBuilder", "Job"]

_PIECE_VALUES = 1 << 20  # converted at once: 4 MiB of floats on each thread
_PIECE_BYTES = 4 << 20  # copied at once


@dataclass(frozen=True)
class Job:
    """A slice of the source, `nbytes` at `offset` of file `span.file`, and the tensors it becomes, one for each tier."""

    span: TensorSpan
    expert: int
    offset: int
    nbytes: int
    targets: tuple[int, ...]  # indices of tensors


class SidecarBuilder:
    """A planned sidecar of a model.

    Args:
        model_index: of the model.
        tiers: at least one.
        imatrix: weights columns where a tier is quantized.

    Raises:
        ModelError: no routed experts, or of a type that cannot be converted.
        OptionError: a type that needs an importance matrix, without one.
    """

    def __init__(self, model_index: ModelIndex, tiers: list[Tier], imatrix: Imatrix | None = None):
        model_index.require_experts()
        if not tiers:
            raise OptionError("no tier to make", hint={"tiers": ..., "bits": ...})
        self.model_index, self.tiers, self.imatrix = model_index, tiers, imatrix
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []  # in the file
        self.jobs: list[Job] = []
        self.fallbacks: dict[tuple[str, str, int], int] = {}  # (type wanted, type taken, row length): slices
        self.stand_ins: set[int] = set()  # tensors whose type is not the one wanted: where ggml's Q2_0 would be a surprise
        groups: dict[tuple[int, bool], list[TensorSpan]] = {}
        for span in sorted(model_index.experts.values(), key=lambda span: parse_tensor_name(span.name)):
            where = parse_tensor_name(span.name)
            groups.setdefault((where.layer, where.chunk), []).append(span)
        for spans in groups.values():
            self._plan_group(spans)
        at = len(self.header([0] * len(self.tensors), [0] * len(self.jobs)))
        for tensor in self.tensors:
            self.offsets.append(at)
            at += tensor.n_bytes + -tensor.n_bytes % ALIGNMENT
        self.total_bytes = at

    def _plan_group(self, spans: list[TensorSpan]) -> None:
        """The experts of one gate: by tier, then by expert, with an expert's matrices side by side."""
        targets: dict[tuple[str, int], list[int]] = {}
        for tier in self.tiers:
            for expert in range(max(span.shape[2] for span in spans)):
                for span in (span for span in spans if expert < span.shape[2]):
                    wanted, type = tier.wanted(span, expert), tier.type(span, expert)
                    self._check(span, type)
                    if type != wanted:
                        self.stand_ins.add(len(self.tensors))
                        key = (type_name(wanted), type_name(type), span.shape[0])
                        self.fallbacks[key] = self.fallbacks.get(key, 0) + 1
                    targets.setdefault((span.name, expert), []).append(len(self.tensors))
                    self.tensors.append(Tensor(slice_name(span.name, expert, tier.name), (span.shape[1], span.shape[0]), type))
        for expert in range(max(span.shape[2] for span in spans)):
            for span in (span for span in spans if expert < span.shape[2]):
                nbytes = span.nbytes // span.shape[2]
                self.jobs.append(Job(span, expert, span.offset + expert * nbytes, nbytes, tuple(targets[span.name, expert])))

    def _check(self, span: TensorSpan, type: int) -> None:
        if type == span.type:
            return
        if not is_written(type):
            raise OptionError(f"experts cannot be stored as {type_name(type)}: ggml does not quantize to it")
        if needs_imatrix(type) and (self.imatrix is None or span.name not in self.imatrix.values):
            raise OptionError(f"{type_name(type)} needs an importance matrix with {span.name}, or another type", hint={"imatrix": ...})

    # --- the header ---

    def header(self, hashes: list[int], source_hashes: list[int]) -> bytes:
        """Everything before the slices; its size does not depend on the hashes."""
        imatrix = os.path.basename(self.imatrix.path) if self.imatrix else ""
        searched = "; Q2_0 with searched scales" if any(type_name(self.tensors[i].type) == "Q2_0" for i in self.stand_ins) else ""
        metadata: dict[str, Value] = {
            Keys.General.ARCHITECTURE: "moeoff-experts",
            Keys.General.ALIGNMENT: ALIGNMENT,
            "moeoff.format_version": FORMAT_VERSION,
            "moeoff.sidecar.tiers": [tier.name for tier in self.tiers],
            "moeoff.quantized": "ggml_quantize_chunk" + (f" with {imatrix}" if imatrix else "") + searched,
            "moeoff.source.name": os.path.basename(self.model_index.files[0]),
            "moeoff.source.size": np.uint64(self.model_index.expert_bytes),
            "moeoff.source.hash": np.uint64(hash64(np.array(source_hashes, "<u8").tobytes())),
            "moeoff.source.sample": np.uint64(self.sample),
            "moeoff.source.hashes": np.array(source_hashes, np.uint64),  # in the order of the first tier's tensors
            "moeoff.hashes": np.array(hashes, np.uint64),
            "moeoff.header_hash": np.uint64(0),
        }
        return seal(header_bytes(metadata, self.tensors, ALIGNMENT))

    @cached_property
    def sample(self) -> int:
        return source_sample(self.model_index)

    @property
    def read_bytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)

    def tier_bytes(self) -> dict[str, int]:
        out = {tier.name: 0 for tier in self.tiers}
        for job in self.jobs:
            for tier, index in zip(self.tiers, job.targets):
                out[tier.name] += self.tensors[index].n_bytes
        return out

    # --- the work ---

    def write(self, out: str, *, threads: int, force: bool = False, resume: bool = False, progress: Callable[[int], None] | None = None) -> None:
        """Makes the sidecar.

        Args:
            out: its path.
            force: replaces what is there.
            resume: what an interruption leaves is kept, and taken up again.
            progress: told the bytes of source that are done.

        Raises:
            ModelError: the source cannot be read, or has values that cannot be quantized.
            OptionError: `out` exists, or there is no room for it.
            WriteError: `out` cannot be written.
        """
        if not force and os.path.lexists(out):
            raise OptionError(f"{out} exists", hint={"force": True, "output": ...})
        if os.path.exists(out) and any(os.path.samefile(out, path) for path in self.model_index.files):
            raise OptionError(f"{out} is the model itself", hint={"output": ...})
        if os.path.exists(out) and not os.path.isfile(out):  # it would be replaced: a device, for the whole machine
            raise OptionError(f"{out}: is no file, which a sidecar has to be", hint={"output": ...})
        if not os.path.isdir(os.path.dirname(os.path.abspath(out))):
            raise OptionError(f"{out}: there is no such folder")
        try:
            self._write_new(out, threads, resume, progress)
        except OSError as error:
            raise WriteError(f"{out}: cannot be written: {error.strerror}") from None

    def _write_new(self, out: str, threads: int, resume: bool, progress: Callable[[int], None] | None) -> None:
        part = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.part")
        with PartialFile(part, keep=resume) as file:
            done = file.resume(self.fingerprint, len(self.tiers), self._ranges, threads) if resume else {}
            left = self.total_bytes - os.fstat(file.fd).st_blocks * 512
            free = shutil.disk_usage(os.path.dirname(os.path.abspath(out))).free
            if left > free:
                raise OptionError(
                    f"{out}: needs {format_size(left)}, and there are {format_size(free)} free: make room, or write elsewhere", hint={"output": ...}
                )
            os.ftruncate(file.fd, self.total_bytes)
            if resume:
                file.begin_journal(self.fingerprint, done)
            self._run(file, done, threads, progress)
            self.model_index.check_unchanged()
            hashes = [0] * len(self.tensors)
            for index, (_, *values) in done.items():
                for target, value in zip(self.jobs[index].targets, values):
                    hashes[target] = value
            _write(file.fd, self.header(hashes, [done[i][0] for i in range(len(self.jobs))]), 0)
            file.publish(out)

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """Offsets and bytes of what a job writes."""
        return [(self.offsets[i], self.tensors[i].n_bytes) for i in self.jobs[index].targets]

    def _run(self, file: PartialFile, done: dict[int, tuple[int, ...]], threads: int, progress: Callable[[int], None] | None) -> None:
        stop = threading.Event()
        n_bytes = sum(self.jobs[index].nbytes for index in done)
        if progress:
            progress(n_bytes)
        with ModelBytes(self.model_index.files) as sources, ThreadPoolExecutor(threads) as pool:
            try:
                todo = iter([index for index in range(len(self.jobs)) if index not in done])
                running: dict[Future[tuple[int, ...]], int] = {}
                while True:
                    while len(running) < 2 * threads and (index := next(todo, None)) is not None:
                        running[pool.submit(self._do, index, sources, file.fd, stop)] = index
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        index = running.pop(future)
                        done[index] = future.result()
                        file.note(index, done[index])
                        n_bytes += self.jobs[index].nbytes
                    if progress:
                        progress(n_bytes)
            finally:
                stop.set()

    def _do(self, index: int, sources: ModelBytes, out: int, stop: threading.Event) -> tuple[int, ...]:
        """Hashes of the source's slice and of each target."""
        job = self.jobs[index]
        span = job.span
        n_rows, n_cols = span.shape[1], span.shape[0]
        source_row = row_bytes(span.type, n_cols)
        tensors = [self.tensors[i] for i in job.targets]
        weights = self.imatrix.columns(span.name, job.expert, span.shape[2], n_cols) if self.imatrix else None
        copies = all(tensor.type == span.type for tensor in tensors)
        step = max(1, _PIECE_BYTES // source_row if copies else _PIECE_VALUES // n_cols)
        source = Hasher()
        hashers = [source if tensor.type == span.type else Hasher() for tensor in tensors]
        for row in range(0, n_rows, step):
            if stop.is_set():
                raise Cancelled("the conversion was stopped")
            rows = min(step, n_rows - row)
            data = np.frombuffer(sources.read(span.file, job.offset + row * source_row, rows * source_row, span.name), np.uint8)
            source.update(data)
            values = None
            for tensor, target, hasher in zip(tensors, job.targets, hashers):
                piece = data
                if tensor.type != span.type:
                    if values is None:
                        values = dequantize(data, span.type, (rows, n_cols))
                    try:
                        piece = quantize(values, tensor.type, self.weights(weights, tensor.type, n_cols), search=target in self.stand_ins)
                    except ModelError as error:
                        raise ModelError(f"{self.model_index.files[span.file]}: expert {job.expert} of {span.name}: {error}") from None
                    hasher.update(piece)
                _write(out, piece, self.offsets[target] + row * row_bytes(tensor.type, n_cols))
        return tuple(hasher.value() for hasher in [source, *hashers])

    @staticmethod
    def weights(weights: np.ndarray | None, type: int, n_cols: int) -> np.ndarray | None:
        """An expert that was never chosen while the matrix was measured has none; all alike is what some types need then."""
        return np.ones(n_cols, np.float32) if weights is None and needs_imatrix(type) else weights

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that are equal for an interrupted conversion that may be taken up again."""
        digest = hashlib.sha256(self.header([0] * len(self.tensors), [0] * len(self.jobs)))
        if self.imatrix:
            for name, values in self.imatrix.values.items():
                digest.update(name.encode() + values.tobytes())
        return digest.digest()


def _write(fd: int, data: bytes | np.ndarray, offset: int) -> None:
    view = memoryview(data).cast("B")  # type: ignore[arg-type]
    while len(view):
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


class PartialFile:
    """The unfinished file, under a temporary name until it is complete, and, where it may be resumed, a journal of what is in it.

    The journal may be ahead of the disk after a crash: what it claims is hashed again before it is believed.
    """

    def __init__(self, path: str, keep: bool):
        self.path, self._journal_path, self._keep = path, path + ".journal", keep
        self._journal: FileIO | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartialFile:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._stack.callback(os.close, self.fd)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self.fd), os.stat(self.path)):
                raise FileNotFoundError  # another one has just finished: what was opened is its sidecar now
            if not self._keep:
                os.ftruncate(self.fd, 0)
        except (BlockingIOError, FileNotFoundError):
            self._stack.close()
            raise OptionError(f"{self.path}: another conversion is writing this sidecar") from None
        except OSError:
            self._stack.close()
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if kind is not None and not (self._keep and os.path.exists(self._journal_path)):
            self._remove()
        if self._journal:
            self._journal.close()
        self._stack.close()

    def _remove(self) -> None:
        for path in (self.path, self._journal_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def publish(self, out: str) -> None:
        publish(self.fd, self.path, out)
        self._remove()

    def begin_journal(self, fingerprint: bytes, done: dict[int, tuple[int, ...]]) -> None:
        self._journal = open(self._journal_path, "wb", buffering=0)
        self._journal.write(fingerprint)
        for index, values in done.items():
            self.note(index, values)

    def note(self, index: int, values: tuple[int, ...]) -> None:
        if self._journal:
            self._journal.write(struct.pack(f"<I{len(values)}Q", index, *values))

    def resume(self, fingerprint: bytes, n_tiers: int, ranges: Callable[[int], list[tuple[int, int]]], threads: int) -> dict[int, tuple[int, ...]]:
        """Jobs that an earlier attempt at the same work finished.

        Args:
            fingerprint: 32 bytes that are equal for the same work only.
            ranges: offsets and bytes of what a job writes, one for each tier; raises IndexError for a job that there is not.

        Returns:
            By job: the hash of its source, then of each tier.
        """
        try:
            data = read_file(self._journal_path, available() // 8)
        except OSError:  # there is none, or none of ours: all is done again
            return {}
        if data[:32] != fingerprint:
            return {}
        record = struct.Struct(f"<I{1 + n_tiers}Q")
        claimed: dict[int, tuple[int, ...]] = {}
        for at in range(32, len(data) - record.size + 1, record.size):
            index, *values = record.unpack_from(data, at)
            claimed[index] = tuple(values)

        def holds(item: tuple[int, tuple[int, ...]]) -> bool:
            try:
                places = ranges(item[0])
            except IndexError:
                return False
            return all(hash_range(self.fd, offset, nbytes) == value for (offset, nbytes), value in zip(places, item[1][1:]))

        with ThreadPoolExecutor(threads) as pool:
            return {index: values for (index, values), good in zip(claimed.items(), pool.map(holds, claimed.items())) if good}
