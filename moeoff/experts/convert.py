"""`moeoff convert`: a model's experts repacked into a sidecar.

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
import signal
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
from ..system.files import publish, read_file, require_new
from ..system.machine import n_cores
from ..system.memory import available, format_size
from ..system.signals import handling
from .sidecar import ALIGNMENT, AUTO, FORMAT_VERSION, Hasher, hash64, hash_range, seal, sidecar_path, slice_name, source_sample
from .tiers import Tier, read_plan

_PIECE_VALUES = 1 << 20  # converted at once: 4 MiB of floats on each thread
_PIECE_BYTES = 4 << 20  # copied at once


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion, or plan of one.

    Attributes:
        path: the sidecar.
        tiers: bytes of each, by name.
        n_bytes: of the file.
        n_experts: experts repacked, over all layers.
        seconds: it took.
        fallbacks: one line for each type that could not hold a row.
    """

    path: str
    tiers: dict[str, int]
    n_bytes: int
    n_experts: int
    seconds: float
    fallbacks: tuple[str, ...]


def convert(
    model: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    tiers: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    bits: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Repacks a model's routed experts into a sidecar; the model stays as it is.

    Args:
        model: GGUF with routed experts; of a split one the first part.
        output: the sidecar. Default: MODEL.experts.gguf, where it is found on its own.
        tiers: names joined by commas: original, auto, or ggml types. Default: auto, or nothing but the plan's with `bits`.
        imatrix: importance matrix for what is quantized.
        bits: a plan that gives each expert its type: one more tier, "bits" (`moeoff.experts.tiers.read_plan`).
        threads: default: every core this process may use.
        dry_run: plans, and writes nothing.
        force: replaces an existing sidecar.
        resume: takes up an interrupted conversion, and leaves what there is of it if interrupted.
        progress: told the bytes of experts that have been read, and how many there are.

    Raises:
        ModelError: the model or the importance matrix is missing, damaged, or cannot be converted.
        OptionError: a tier, plan or type makes no sense; the sidecar exists, or the disk is too full for it.
        WriteError: the sidecar cannot be written. Like every error and Ctrl-C it leaves no file, unless `resume`.
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
        raise OptionError(f"{threads} threads are too few")
    started = time.monotonic()
    if not dry_run:
        with handling(signal.SIGTERM, signal.default_int_handler):  # which cleans up like Ctrl-C
            builder.write(out, threads, force, resume, progress)
    tier_bytes = {tier.name: sum(builder.tensors[job.targets[i]].n_bytes for job in builder.jobs) for i, tier in enumerate(made)}
    n_experts = sum(max(span.shape[2] for span in spans) for spans in model_index.gates)
    lines = [f"{type} cannot hold rows of {n_cols}: {other} instead, in {count} slices" for (type, other, n_cols), count in builder.fallbacks.items()]
    return Conversion(out, tier_bytes, builder.n_bytes, n_experts, time.monotonic() - started, tuple(lines))


@dataclass(frozen=True)
class _Job:
    """A slice of the source and the tensors it becomes, one for each tier."""

    span: TensorSpan
    expert: int
    targets: tuple[int, ...]  # indices of tensors


class _Builder:
    """A planned sidecar of a model.

    Args:
        tiers: at least one.
        imatrix: weights columns where a tier is quantized.

    Raises:
        ModelError: of a type that cannot be converted.
        OptionError: a type that needs an importance matrix, without one.
    """

    def __init__(self, model_index: ModelIndex, tiers: list[Tier], imatrix: Imatrix | None):
        self.model_index, self._tiers, self._imatrix, self._sample = model_index, tiers, imatrix, source_sample(model_index)
        self.tensors: list[Tensor] = []
        self.jobs: list[_Job] = []
        self.fallbacks: dict[tuple[str, str, int], int] = {}  # (type asked for, type that fits, row length): slices
        for spans in model_index.gates:  # by tier, then by expert, with an expert's matrices side by side
            slices = [(span, expert) for expert in range(max(span.shape[2] for span in spans)) for span in spans if expert < span.shape[2]]
            targets = [[self._add(tier, span, expert) for span, expert in slices] for tier in tiers]
            for (span, expert), *of_tiers in zip(slices, *targets):
                self.jobs.append(_Job(span, expert, tuple(of_tiers)))
        self._offsets: list[int] = []  # of the tensors in the file
        self.n_bytes = len(self._header([0] * len(self.tensors), [0] * len(self.jobs)))
        for tensor in self.tensors:
            self._offsets.append(self.n_bytes)
            self.n_bytes += tensor.n_bytes + -tensor.n_bytes % ALIGNMENT

    def _add(self, tier: Tier, span: TensorSpan, expert: int) -> int:
        """Plans a tensor; returns its index."""
        requested, type = tier.requested(span, expert), tier.type(span, expert)
        if type != span.type:
            if not is_written(type):
                raise OptionError(f"experts cannot be stored as {type_name(type)}: ggml does not quantize to it")
            if needs_imatrix(type) and (self._imatrix is None or span.name not in self._imatrix.values):
                raise OptionError(f"{type_name(type)} needs an importance matrix with {span.name}, or another type", hint={"imatrix": ...})
        if type != requested:
            key = (type_name(requested), type_name(type), span.shape[0])
            self.fallbacks[key] = self.fallbacks.get(key, 0) + 1
        self.tensors.append(Tensor(slice_name(span.name, expert, tier.name), (span.shape[1], span.shape[0]), type))
        return len(self.tensors) - 1

    def _header(self, hashes: list[int], source_hashes: list[int]) -> bytes:
        """Everything before the slices; its size does not depend on the hashes."""
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
            "moeoff.source.hashes": np.array(source_hashes, np.uint64),  # in the order of the first tier's tensors
            "moeoff.hashes": np.array(hashes, np.uint64),
            "moeoff.header_hash": np.uint64(0),
        }
        return seal(header_bytes(metadata, self.tensors, ALIGNMENT))

    def write(self, out: str, threads: int, force: bool, resume: bool, progress: Callable[[int, int], None] | None) -> None:
        """Makes the sidecar; see `convert`."""
        if not force and os.path.lexists(out):
            raise OptionError(f"{out} exists", hint={"force": True, "output": ...})
        if os.path.exists(out) and not os.path.isfile(out):  # it would be replaced: a device, for the whole machine
            raise OptionError(f"{out}: is no file, which a sidecar has to be", hint={"output": ...})
        folder, name = os.path.split(os.path.abspath(out))
        try:
            with _PartialFile(os.path.join(folder, f".{name}.part"), resume) as file:
                entries = file.resume(self._fingerprint, len(self._tiers), self._ranges, threads) if resume else {}
                missing, free = self.n_bytes - os.fstat(file.fd).st_blocks * 512, shutil.disk_usage(folder).free
                if missing > free:
                    needs = f"needs {format_size(missing)}, and there are {format_size(free)} free"
                    raise OptionError(f"{out}: {needs}: make room, or write elsewhere", hint={"output": ...})
                os.ftruncate(file.fd, self.n_bytes)
                if resume:
                    file.begin_journal(self._fingerprint, entries)
                self._run(file, entries, threads, progress)
                self.model_index.check_unchanged()
                hashes = {target: value for index, (_, *values) in entries.items() for target, value in zip(self.jobs[index].targets, values)}
                header = self._header([hashes[i] for i in range(len(self.tensors))], [entries[i][0] for i in range(len(self.jobs))])
                _write(file.fd, header, 0)
                file.publish(out)
        except OSError as error:
            raise WriteError(f"{out}: cannot be written: {error.strerror}") from None

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """Offsets and bytes of what a job writes."""
        return [(self._offsets[i], self.tensors[i].n_bytes) for i in self.jobs[index].targets]

    def _run(self, file: _PartialFile, entries: dict[int, tuple[int, ...]], threads: int, progress: Callable[[int, int], None] | None) -> None:
        """Adds to `entries` the jobs that are not there: hashes of the source's slice and of each target."""
        stop = threading.Event()
        n_bytes, total = sum(self.jobs[index].span.slice_bytes for index in entries), sum(job.span.slice_bytes for job in self.jobs)
        if progress:
            progress(n_bytes, total)
        with ModelBytes(self.model_index.files) as sources, ThreadPoolExecutor(threads) as pool:
            try:
                todo = iter([index for index in range(len(self.jobs)) if index not in entries])
                running: dict[Future[tuple[int, ...]], int] = {}
                while True:
                    while len(running) < 2 * threads and (index := next(todo, None)) is not None:
                        running[pool.submit(self._do, index, sources, file.fd, stop)] = index
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        index = running.pop(future)
                        entries[index] = future.result()
                        file.note(index, entries[index])
                        n_bytes += self.jobs[index].span.slice_bytes
                    if progress:
                        progress(n_bytes, total)
            finally:
                stop.set()

    def _do(self, index: int, sources: ModelBytes, out: int, stop: threading.Event) -> tuple[int, ...]:
        """Hashes of the source's slice and of each target."""
        job = self.jobs[index]
        span, begin = job.span, job.span.offset + job.expert * job.span.slice_bytes
        n_rows, n_cols = span.shape[1], span.shape[0]
        source_row = row_bytes(span.type, n_cols)
        tensors = [self.tensors[i] for i in job.targets]
        weights = self._imatrix.columns(span.name, job.expert, span.shape[2], n_cols) if self._imatrix else None
        copies = all(tensor.type == span.type for tensor in tensors)
        step = max(1, _PIECE_BYTES // source_row if copies else _PIECE_VALUES // n_cols)
        source = Hasher()
        hashers = [source if tensor.type == span.type else Hasher() for tensor in tensors]
        for row in range(0, n_rows, step):
            if stop.is_set():
                raise Cancelled("the conversion was stopped")
            rows = min(step, n_rows - row)
            data = np.frombuffer(sources.read(span.file, begin + row * source_row, rows * source_row, span.name), np.uint8)
            source.update(data)
            values = None
            for tensor, target, hasher in zip(tensors, job.targets, hashers):
                piece = data
                if tensor.type != span.type:
                    if values is None:
                        values = dequantize(data, span.type, (rows, n_cols))
                    try:
                        # an expert that was never chosen while the matrix was measured has none; all alike is what some types need then
                        columns = np.ones(n_cols, np.float32) if weights is None and needs_imatrix(tensor.type) else weights
                        piece = quantize(values, tensor.type, columns)
                    except ModelError as error:
                        raise ModelError(f"{self.model_index.files[span.file]}: expert {job.expert} of {span.name}: {error}") from None
                    hasher.update(piece)
                _write(out, piece, self._offsets[target] + row * row_bytes(tensor.type, n_cols))
        return tuple(hasher.value() for hasher in [source, *hashers])

    @property
    def _fingerprint(self) -> bytes:
        """32 bytes that are equal for an interrupted conversion that may be taken up again."""
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
    """The unfinished file, under a temporary name until it is complete, and, where it may be resumed, a journal of what is in it.

    The journal may be ahead of the disk after a crash: what it claims is hashed again before it is believed.
    """

    def __init__(self, path: str, keep: bool):
        self.path, self._journal_path, self._keep = path, path + ".journal", keep
        self._journal: FileIO | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _PartialFile:
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

    def begin_journal(self, fingerprint: bytes, entries: dict[int, tuple[int, ...]]) -> None:
        self._journal = open(self._journal_path, "wb", buffering=0)
        self._journal.write(fingerprint)
        for index, values in entries.items():
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
        for offset in range(32, len(data) - record.size + 1, record.size):
            index, *values = record.unpack_from(data, offset)
            claimed[index] = tuple(values)

        def holds(item: tuple[int, tuple[int, ...]]) -> bool:
            index, (_, *values) = item
            try:
                return all(hash_range(files, 0, *place, self.path) == value for place, value in zip(ranges(index), values))
            except (IndexError, ModelError):  # no such job, or the file ends before
                return False

        with ModelBytes((self.path,)) as files, ThreadPoolExecutor(threads) as pool:
            return {index: values for (index, values), good in zip(claimed.items(), pool.map(holds, claimed.items())) if good}
