"""`moeoff convert`: repack a model's experts into a sidecar.

A job reads one slice of the source in pieces and writes it in every tier to its planned
offsets. Jobs are independent, so they run on any number of threads, and pieces bound
their memory. The file is written under a temporary name and renamed once it is synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO

import numpy as np
from gguf import Keys

from ..errors import Cancelled, ModelError, OptionError, WriteError
from ..gguf.file import Tensor
from ..gguf.imatrix import Imatrix
from ..gguf.model_index import ModelBytes, ModelIndex, TensorSpan
from ..gguf.quantize import dequantize, is_written, needs_imatrix, quantize, row_bytes, type_name
from ..gguf.writer import Value, header_bytes
from ..system.files import StrPath, publish, read_file, require_new
from ..system.machine import n_cores
from ..system.memory import available, format_size
from ..system.signals import handling
from .sidecar import (
    ALIGNMENT,
    AUTO,
    FORMAT_VERSION,
    Hasher,
    hash64,
    hash_range,
    seal,
    sidecar_path,
    slice_name,
    source_sample,
)
from .tiers import Tier, read_plan

_PIECE_VALUES = 1 << 20  # values converted at once by a thread, 4 MiB as floats
_PIECE_BYTES = 4 << 20  # bytes copied at once
_BATCH = 1024  # jobs submitted at once, each of which takes memory

_Hashes = tuple[int, ...]  # of a source slice and its targets
_Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion, or the plan of one.

    Attributes:
        tiers: Bytes of each tier by name.
        n_experts: Number of experts over all layers.
        fallbacks: One line for each type that could not hold a row.
    """

    path: str
    tiers: dict[str, int]
    n_bytes: int
    n_experts: int
    seconds: float
    fallbacks: tuple[str, ...]


def convert(
    model: StrPath,
    *,
    output: StrPath | None = None,
    tiers: str | None = None,
    imatrix: StrPath | None = None,
    bits: StrPath | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: _Progress = None,
) -> Conversion:
    """Repack a model's routed experts into a sidecar. The model is not changed.

    Args:
        model: Path of a GGUF with routed experts, of the first part if it is split.
        output: Path of the sidecar. Default: MODEL.experts.gguf, which runs find.
        tiers: Names separated by commas: original, auto, or ggml types. Default: auto,
            or only the plan's tier with `bits`.
        imatrix: Path of an importance matrix for quantized tiers.
        bits: Path of a plan of each expert's type, for one more tier called "bits"
            (`moeoff.experts.tiers.read_plan`).
        threads: Number of threads. Default: all cores of this process.
        dry_run: Plan the sidecar, write nothing.
        force: Replace an existing sidecar.
        resume: Continue an interrupted conversion; keep partial files on interrupts.
        progress: Callback with bytes of experts read so far and in total.

    Raises:
        ModelError: The model or importance matrix is damaged or cannot be converted.
        OptionError: A tier, plan or type is invalid, the sidecar exists, or no space.
        WriteError: Writing failed. Errors and Ctrl-C leave no files without `resume`.
    """
    model_index = ModelIndex.read(model)
    model_index.require_experts()
    made = Tier.parse(tiers) if tiers else [] if bits else [Tier(AUTO)]
    if bits:
        made.append(read_plan(bits, model_index.experts))
    builder = _Builder(model_index, made, Imatrix.read(imatrix) if imatrix else None)
    out = os.fspath(output) if output else sidecar_path(model)
    require_new(out, [*model_index.files, imatrix, bits], "`output`")
    threads = threads or n_cores()
    if threads < 1:
        raise OptionError(f"`threads`: expected at least 1, got {threads}")
    started = time.monotonic()
    if not dry_run:
        with handling(signal.SIGTERM, signal.default_int_handler):  # clean up as for Ctrl-C
            builder.write(out, threads, force, resume, progress)
    tier_bytes = {
        tier.name: sum(builder.tensors[job.targets[i]].n_bytes for job in builder.jobs)
        for i, tier in enumerate(made)
    }
    n_experts = sum(max(span.shape[2] for span in spans) for spans in model_index.gates)
    lines = [
        f"{type} cannot hold rows of {n_cols}: {other} instead, in {count} slices"
        for (type, other, n_cols), count in builder.fallbacks.items()
    ]
    return Conversion(
        out, tier_bytes, builder.n_bytes, n_experts, time.monotonic() - started, tuple(lines)
    )


@dataclass(frozen=True)
class _Job:
    """A slice of the source and the tensors it becomes, one for each tier."""

    span: TensorSpan
    expert: int
    targets: tuple[int, ...]  # indices of tensors


class _Builder:
    """A planned sidecar.

    Raises:
        OptionError: ggml cannot write a type, or an importance matrix is missing.
    """

    def __init__(self, model_index: ModelIndex, tiers: list[Tier], imatrix: Imatrix | None):
        self.model_index, self._tiers, self._imatrix, self._sample = (
            model_index,
            tiers,
            imatrix,
            source_sample(model_index),
        )
        self.tensors: list[Tensor] = []
        self.jobs: list[_Job] = []
        # slices by (requested type, type, row length)
        self.fallbacks = Counter[tuple[str, str, int]]()
        for spans in model_index.gates:  # all of a tier, then by expert: matrices are adjacent
            slices = [
                (span, expert)
                for expert in range(max(span.shape[2] for span in spans))
                for span in spans
                if expert < span.shape[2]
            ]
            targets = [[self._add(tier, span, expert) for span, expert in slices] for tier in tiers]
            for (span, expert), *of_tiers in zip(slices, *targets):
                self.jobs.append(_Job(span, expert, tuple(of_tiers)))
        self._offsets: list[int] = []
        self.n_bytes = len(self._header([0] * len(self.tensors), [0] * len(self.jobs)))
        for tensor in self.tensors:
            self._offsets.append(self.n_bytes)
            self.n_bytes += tensor.n_bytes + -tensor.n_bytes % ALIGNMENT

    def _add(self, tier: Tier, span: TensorSpan, expert: int) -> int:
        requested, type = tier.requested(span, expert), tier.type(span, expert)
        if type != span.type:
            if not is_written(type):
                raise OptionError(
                    f"experts cannot be stored as {type_name(type)}: ggml does not quantize to it"
                )
            if needs_imatrix(type) and (
                self._imatrix is None or span.name not in self._imatrix.values
            ):
                raise OptionError(
                    f"{type_name(type)} needs an importance matrix with {span.name}, or another"
                    " type",
                    hint={"imatrix": ...},
                )
        if type != requested:
            self.fallbacks[type_name(requested), type_name(type), span.shape[0]] += 1
        self.tensors.append(
            Tensor(slice_name(span.name, expert, tier.name), (span.shape[1], span.shape[0]), type)
        )
        return len(self.tensors) - 1

    def _header(self, hashes: list[int], source_hashes: list[int]) -> bytes:
        """Return all bytes before the slices, of a size independent of hashes."""
        imatrix = os.path.basename(self._imatrix.path) if self._imatrix else ""
        metadata: dict[str, Value] = {
            Keys.General.ARCHITECTURE: "moeoff-experts",
            Keys.General.ALIGNMENT: ALIGNMENT,
            "moeoff.format_version": FORMAT_VERSION,
            "moeoff.sidecar.tiers": [tier.name for tier in self._tiers],
            "moeoff.quantized": "ggml_quantize_chunk" + (f" with {imatrix}" if imatrix else ""),
            "moeoff.source.name": os.path.basename(self.model_index.files[0]),
            "moeoff.source.size": np.uint64(self.model_index.expert_bytes),
            "moeoff.source.hash": np.uint64(hash64(np.array(source_hashes, "<u8").tobytes())),
            "moeoff.source.sample": np.uint64(self._sample),
            "moeoff.source.hashes": np.array(source_hashes, np.uint64),  # order of the first tier
            "moeoff.hashes": np.array(hashes, np.uint64),
            "moeoff.header_hash": np.uint64(0),
        }
        return seal(header_bytes(metadata, self.tensors, ALIGNMENT))

    def write(self, out: str, threads: int, force: bool, resume: bool, progress: _Progress) -> None:
        if not force and os.path.lexists(out):
            raise OptionError(f"{out} exists", hint={"force": True, "output": ...})
        if os.path.exists(out) and not os.path.isfile(out):  # never replace a device
            raise OptionError(f"{out}: is no regular file", hint={"output": ...})
        folder, name = os.path.split(os.path.abspath(out))
        try:
            with _PartialFile(os.path.join(folder, f".{name}.part"), resume) as file:
                entries = (
                    file.resume(self._fingerprint, len(self._tiers), self._ranges, threads)
                    if resume
                    else {}
                )
                missing, free = (
                    self.n_bytes - os.fstat(file.fd).st_blocks * 512,
                    shutil.disk_usage(folder).free,
                )
                if missing > free:
                    needs = f"needs {format_size(missing)}, but {format_size(free)} are free"
                    raise OptionError(f"{out}: {needs}: make room", hint={"output": ...})
                os.ftruncate(file.fd, self.n_bytes)
                if resume:
                    file.begin_journal(self._fingerprint, entries)
                self._run(file, entries, threads, progress)
                self.model_index.check_unchanged()
                hashes = {
                    target: value
                    for index, (_, *values) in entries.items()
                    for target, value in zip(self.jobs[index].targets, values)
                }
                header = self._header(
                    [hashes[i] for i in range(len(self.tensors))],
                    [entries[i][0] for i in range(len(self.jobs))],
                )
                _write(file.fd, header, 0)
                file.publish(out)
        except OSError as error:
            raise WriteError(f"{out}: cannot be written: {error.strerror}") from None

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """Return offset and size of each slice a job writes, in bytes."""
        return [(self._offsets[i], self.tensors[i].n_bytes) for i in self.jobs[index].targets]

    def _run(
        self,
        file: _PartialFile,
        entries: dict[int, _Hashes],
        threads: int,
        progress: _Progress,
    ) -> None:
        """Run the jobs missing in `entries`; add hashes of their source and targets."""
        stop = threading.Event()
        n_bytes, total = (
            sum(self.jobs[index].span.slice_bytes for index in entries),
            sum(job.span.slice_bytes for job in self.jobs),
        )
        if progress:
            progress(n_bytes, total)
        with ModelBytes(self.model_index.files) as sources, ThreadPoolExecutor(threads) as pool:
            try:
                todo = [index for index in range(len(self.jobs)) if index not in entries]
                for start in range(0, len(todo), _BATCH):
                    batch = todo[start : start + _BATCH]
                    results = pool.map(lambda index: self._do(index, sources, file.fd, stop), batch)
                    for index, hashes in zip(batch, results):
                        entries[index] = hashes
                        file.note(index, hashes)
                        n_bytes += self.jobs[index].span.slice_bytes
                        if progress:
                            progress(n_bytes, total)
            finally:
                stop.set()

    def _do(self, index: int, sources: ModelBytes, out: int, stop: threading.Event) -> _Hashes:
        """Run a job. Return the hashes of its source and of each target."""
        job = self.jobs[index]
        span, begin = job.span, job.span.offset + job.expert * job.span.slice_bytes
        n_rows, n_cols = span.shape[1], span.shape[0]
        source_row = row_bytes(span.type, n_cols)
        tensors = [self.tensors[i] for i in job.targets]
        weights = (
            self._imatrix.columns(span.name, job.expert, span.shape[2], n_cols)
            if self._imatrix
            else None
        )
        copies = all(tensor.type == span.type for tensor in tensors)
        step = max(1, _PIECE_BYTES // source_row if copies else _PIECE_VALUES // n_cols)
        source = Hasher()
        hashers = [source if tensor.type == span.type else Hasher() for tensor in tensors]
        for row in range(0, n_rows, step):
            if stop.is_set():
                raise Cancelled("the conversion was stopped")
            rows = min(step, n_rows - row)
            data = np.frombuffer(
                sources.read(span.file, begin + row * source_row, rows * source_row, span.name),
                np.uint8,
            )
            source.update(data)
            values = None
            for tensor, target, hasher in zip(tensors, job.targets, hashers):
                piece = data
                if tensor.type != span.type:
                    if values is None:
                        values = dequantize(data, span.type, (rows, n_cols))
                    try:
                        # An expert that was never routed has no weights; some types
                        # need any.
                        columns = (
                            np.ones(n_cols, np.float32)
                            if weights is None and needs_imatrix(tensor.type)
                            else weights
                        )
                        piece = quantize(values, tensor.type, columns)
                    except ModelError as error:
                        raise ModelError(
                            f"{self.model_index.files[span.file]}: expert {job.expert} of"
                            f" {span.name}: {error}"
                        ) from None
                    hasher.update(piece)
                _write(out, piece, self._offsets[target] + row * row_bytes(tensor.type, n_cols))
        return tuple(hasher.value() for hasher in [source, *hashers])

    @property
    def _fingerprint(self) -> bytes:
        """Hash of everything a conversion depends on: 32 bytes."""
        digest = hashlib.sha256(self._header([0] * len(self.tensors), [0] * len(self.jobs)))
        if self._imatrix:
            for name, values in self._imatrix.values.items():
                digest.update(name.encode() + values.tobytes())
        return digest.digest()


def _write(fd: int, data: bytes | np.ndarray, offset: int) -> None:
    view = memoryview(data).cast("B")  # type: ignore[arg-type]
    while len(view):
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


class _PartialFile:
    """A sidecar under its temporary name, and a journal of finished jobs for `resume`.

    The journal may be ahead of the disk after a crash, so its entries are verified.
    """

    def __init__(self, path: str, keep: bool):
        self.path, self._journal_path, self._keep = path, path + ".journal", keep
        self._journal: FileIO | None = None

    def __enter__(self) -> _PartialFile:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self.fd), os.stat(self.path)):
                raise FileNotFoundError  # a conversion has just renamed the opened file
            if not self._keep:
                os.ftruncate(self.fd, 0)
        except (BlockingIOError, FileNotFoundError):
            os.close(self.fd)
            raise OptionError(f"{self.path}: another conversion is writing this sidecar") from None
        except OSError:
            os.close(self.fd)
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if kind is not None and not (self._keep and os.path.exists(self._journal_path)):
            self._remove()
        if self._journal:
            self._journal.close()
        os.close(self.fd)

    def _remove(self) -> None:
        for path in (self.path, self._journal_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def publish(self, out: str) -> None:
        publish(self.fd, self.path, out)
        self._remove()

    def begin_journal(self, fingerprint: bytes, entries: dict[int, _Hashes]) -> None:
        self._journal = open(self._journal_path, "wb", buffering=0)
        self._journal.write(fingerprint)
        for index, values in entries.items():
            self.note(index, values)

    def note(self, index: int, values: _Hashes) -> None:
        if self._journal:
            self._journal.write(struct.pack(f"<I{len(values)}Q", index, *values))

    def resume(
        self,
        fingerprint: bytes,
        n_tiers: int,
        ranges: Callable[[int], list[tuple[int, int]]],
        threads: int,
    ) -> dict[int, _Hashes]:
        """Return the jobs that an interrupted attempt at the same conversion finished.

        Args:
            ranges: Function from a job to offset and bytes of each of its targets;
                raises IndexError for unknown jobs.
        """
        try:
            data = read_file(self._journal_path, available() // 8)
        except OSError:  # no journal, or one of another user
            return {}
        if data[:32] != fingerprint:
            return {}
        record = struct.Struct(f"<I{1 + n_tiers}Q")
        end = len(data) - (len(data) - 32) % record.size
        claimed = {index: tuple(hashes) for index, *hashes in record.iter_unpack(data[32:end])}

        def holds(item: tuple[int, _Hashes]) -> bool:
            index, (_, *values) = item
            try:
                return all(
                    hash_range(files, 0, *place, self.path) == value
                    for place, value in zip(ranges(index), values)
                )
            except (IndexError, ModelError):  # unknown job, or beyond the file's end
                return False

        with ModelBytes((self.path,)) as files, ThreadPoolExecutor(threads) as pool:
            return {
                index: values
                for (index, values), good in zip(claimed.items(), pool.map(holds, claimed.items()))
                if good
            }
