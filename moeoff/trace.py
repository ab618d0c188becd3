"""Traces: the gate events of runs, in a file that can be replayed.

    magic "MOEOFFTR", u32 version, u32 length, JSON header, then records:
    RECORD (little endian) and its payload; docs/reference/trace.md has the fields of each kind

A reader sees whole records only: a tail that is cut, or whose checksum is wrong, ends the trace. A file that exists is continued if its
header describes the same model. No text or token is stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from .errors import OptionError, WriteError
from .files import open_file
from .gate_event import GateEvent
from .memory import available, format_size, slot_bytes

MAGIC, VERSION = b"MOEOFFTR", 7
# kind, flags, gate, n_used, n_tokens, n_hit, n_miss, CLOCK_MONOTONIC ns, payload bytes, crc32 of the payload
RECORD = struct.Struct("<BBHHIIIqII")
_LONGEST_HEADER, _LONGEST_RECORD = 16 << 20, 256 << 20  # bytes; a record is one gate's events of one batch, or some reads
_EXPANDED = 3  # bytes of memory for each of a file
GATE, SESSION, READS = 1, 2, 3
NEW_SEQUENCE, PROBS, DECISIONS, OTHER_KIND, DEVICE = 1, 2, 4, 32, 128  # flags of gate events


# finished reads; docs/reference/trace.md has the fields
_FIELDS = "t_queued:<i8 wait_us:<u4 read_us:<u4 nbytes:<u4 tensor:<u2 expert:<u2 level:u1 result:u1"
_STORED = np.dtype([tuple(field.split(":")) for field in _FIELDS.split()])
# when it was queued, how long it waited for an I/O thread and how long it took; level, result and version as `native.Read`
READ = np.dtype([*_STORED.descr, ("version", "u1")])
PREFETCH_LEVEL, GATE_LEVEL, DEMAND_LEVEL = 0, 1, 2
WITH_VERSIONS = 1  # flag of a record: the version of each follows the reads


@dataclass(frozen=True)
class TensorInfo:
    """One experts' tensor, in the order of the native buffer. nbytes is one expert's slice."""

    gate: int
    layer: int
    matrix: int
    n_experts: int
    nbytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes that the slice takes of its slot in the arena."""
        return slot_bytes(self.nbytes)


@dataclass(frozen=True)
class TraceHeader:
    """Header of a trace: enough to rebuild the buffer. n_experts is the widest gate's."""

    name: str
    n_used: int
    tensors: tuple[TensorInfo, ...]

    @property
    def n_gates(self) -> int:
        return 1 + max(t.gate for t in self.tensors)

    @property
    def n_experts(self) -> int:
        return max(t.n_experts for t in self.tensors)

    @cached_property
    def n_matrices(self) -> list[int]:
        """[n_gates]: of an expert."""
        return [sum(t.gate == gate for t in self.tensors) for gate in range(self.n_gates)]

    @cached_property
    def expert_bytes(self) -> list[int]:
        """[n_gates]: of one expert, all matrices together."""
        return [sum(t.nbytes for t in self.tensors if t.gate == gate) for gate in range(self.n_gates)]

    @cached_property
    def expert_slots(self) -> list[int]:
        """[n_gates]: bytes that an expert takes in the arena."""
        return [sum(t.slot_bytes for t in self.tensors if t.gate == gate) for gate in range(self.n_gates)]

    @property
    def arena_floor(self) -> int:
        """The smallest arena that can make progress."""
        return 2 * max(self.expert_slots)

    @property
    def full_bytes(self) -> int:
        """The arena that holds every expert."""
        return sum(t.slot_bytes * t.n_experts for t in self.tensors)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> TraceHeader:
        """Raises ValueError, KeyError or TypeError for one that is damaged."""
        fields = json.loads(text)
        header = cls(str(fields["name"]), fields["n_used"], tuple(TensorInfo(**t) for t in fields["tensors"]))
        limits = {"gate": 1 << 12, "layer": 1 << 12, "matrix": 8, "n_experts": 1 << 16, "nbytes": 1 << 48}
        if not header.tensors or type(header.n_used) is not int or not 0 < header.n_used <= header.n_experts:
            raise ValueError("no tensors, or no use of them")
        if any(type(n := getattr(tensor, name)) is not int or not 0 <= n <= limit for tensor in header.tensors for name, limit in limits.items()):
            raise ValueError("a tensor that no model has")
        return header

    @classmethod
    def of(cls, buffer: Any, name: str, n_used: int) -> TraceHeader:
        """The header of runs with an attached `moeoff.engine.expert_buffer.ExpertBuffer`."""
        return cls(name, n_used, tuple(TensorInfo(t.gate, t.layer, t.matrix, t.ne[2], t.nbytes) for t in buffer.tensors))


class TraceWriter:
    """Appends gate events to `path`; `close()` or leave the `with` block. One writer for a file at a time.

    Args:
        session: written once, the conditions under which the events happened (arena, strategy).

    Raises:
        OptionError: the file is something else, or a trace of another model.
        WriteError: it cannot be written; later calls raise it, too.
    """

    def __init__(self, path: str | os.PathLike[str], model: TraceHeader, session: dict[str, Any] | None = None):
        self._n_experts = model.n_experts
        self._begins = True  # the next event is the first of a text
        self._last_read = 0
        self._path = os.fspath(path)
        header = model.to_json().encode()
        end = 0
        if os.path.exists(path) and os.path.getsize(path):
            old, end = _scan(path)
            if old != model:
                raise OptionError(f"{path}: is a trace of another model ({old.name}); give another file")
        with self._writing():
            self._file: BinaryIO = open(path, "r+b" if end else "wb")
            if end:
                self._file.truncate(end)  # of a run that was killed
                self._file.seek(end)
            else:
                self._file.write(MAGIC + struct.pack("<II", VERSION, len(header)) + header)
        self._write(SESSION, 0, 0, 0, 0, 0, 0, 0, json.dumps(session or {}).encode())

    def new_sequence(self) -> None:
        """The next event is the first of a text."""
        self._begins = True

    def write(self, event: GateEvent) -> None:
        """Appends an event. Its weights and probabilities are rounded to float16; its gate input, layer and number are left out."""
        payload = event.ids.astype("<u2").tobytes() + event.weights.astype("<f2").tobytes()
        flags = NEW_SEQUENCE if self._begins else 0
        if event.decode != (len(event.ids) == 1):
            flags |= OTHER_KIND
        if event.versions is not None and event.versions.any():
            payload += event.versions.astype("u1").tobytes()
            flags |= DECISIONS
        if event.on_device is not None and event.on_device.any():
            payload += np.packbits(event.on_device).tobytes()
            flags |= DEVICE
        probs = event.probs
        if probs is not None:
            if probs.shape[1] < self._n_experts:
                probs = np.pad(probs, ((0, 0), (0, self._n_experts - probs.shape[1])))
            payload += probs.astype("<f2").tobytes()
            flags |= PROBS
        self._begins = False
        n_tokens, n_used = event.ids.shape
        self._write(GATE, flags, event.gate, n_used, n_tokens, event.n_hit, event.n_miss, event.t_ns, payload)

    def write_reads(self, reads: np.ndarray) -> None:
        """Appends the reads that `ExpertBuffer.take_reads()` gave."""
        if not len(reads):
            return
        lost = int(reads["seq"][-1]) - self._last_read - len(reads)
        self._last_read = int(reads["seq"][-1])
        flags, payload = _pack_reads(reads)
        self._write(READS, flags, 0, 0, len(reads), 0, lost, int(reads["t_done"][-1]), payload)

    def note(self, fields: dict[str, Any]) -> None:
        """Writes a JSON object between the events, as the counters at the end of a run."""
        self._write(SESSION, 0, 0, 0, 0, 0, 0, 0, json.dumps(fields).encode())

    def _write(self, kind: int, flags: int, gate: int, n_used: int, n_tokens: int, n_hit: int, n_miss: int, t_ns: int, payload: bytes) -> None:
        with self._writing():
            self._file.write(RECORD.pack(kind, flags, gate, n_used, n_tokens, n_hit, n_miss, t_ns, len(payload), zlib.crc32(payload)) + payload)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(f"{self._path}: cannot be written: {error.strerror or error}") from None

    def flush(self) -> None:
        with self._writing():
            self._file.flush()

    def close(self) -> None:
        with self._writing():
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


@dataclass
class Trace:
    """A trace in memory.

    Attributes:
        model: its header.
        events: in order; weights and probs are float32, and there are no gate inputs.
        starts: [n_events] bool, the first event of a text (of a run, too).
        notes: the sessions' JSON objects.
        reads: [n_reads] of `READ`, every read that ended in the recorded runs; a slice of a trace has none.
        reads_lost: reads that the log had no room for.
    """

    model: TraceHeader
    events: list[GateEvent]
    starts: np.ndarray
    notes: list[dict[str, Any]] = field(default_factory=list)
    reads: np.ndarray = field(default_factory=lambda: np.empty(0, READ))
    reads_lost: int = 0
    miss_costs: tuple[object, np.ndarray] | None = field(default=None, init=False, repr=False)  # the simulator's, kept from one replay to the next

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads as much as is whole.

        Raises:
            OptionError: no trace, one of another version, or one that would not fit into memory.
        """
        with contextlib.closing(_Content(path)) as data:
            return cls._of(data)

    @classmethod
    def _of(cls, data: _Content) -> Trace:
        model = data.header()
        data.require_memory()
        layers = {t.gate: t.layer for t in model.tensors}
        events: list[GateEvent] = []
        starts, notes, reads, lost = [], [], [np.empty(0, READ)], 0
        with contextlib.suppress(ValueError, RecursionError):  # a record that cannot be ends the trace, as one that was cut does
            for fields, payload, _ in data.records():
                kind, flags, gate, n_used, n_tokens, n_hit, n_miss, t_ns = fields
                if kind == SESSION:
                    notes.append(json.loads(bytes(payload)))
                    continue
                if kind == READS:
                    reads.append(_unpack_reads(flags, payload, n_tokens))
                    lost += n_miss
                    continue
                n = n_tokens * n_used
                ids = np.frombuffer(payload, "<u2", n).reshape(n_tokens, n_used).astype(np.int32)
                if gate >= model.n_gates or ids.max(initial=0) >= model.n_experts:
                    raise ValueError("no such gate or expert")
                weights = np.frombuffer(payload, "<f2", n, 2 * n).reshape(n_tokens, n_used).astype(np.float32)
                at = 4 * n
                versions = None
                if flags & DECISIONS:
                    versions, at = np.frombuffer(payload, "u1", n, at).reshape(n_tokens, n_used).copy(), at + n
                on_device = None
                if flags & DEVICE:
                    bits = np.frombuffer(payload, "u1", -(-n // 8), at)
                    on_device, at = np.unpackbits(bits, count=n).reshape(n_tokens, n_used).astype(bool), at + len(bits)
                probs = np.frombuffer(payload, "<f2", -1, at).reshape(n_tokens, -1).astype(np.float32) if flags & PROBS else None
                decode = (n_tokens == 1) != bool(flags & OTHER_KIND)
                event = GateEvent(gate, ids, weights, probs, None, versions, layers.get(gate, -1), n_hit, n_miss, 0, t_ns,
                                  decode=decode, on_device=on_device)  # fmt: skip
                events.append(event)
                starts.append(bool(flags & NEW_SEQUENCE))
        return cls(model, events, np.array(starts, bool), notes, np.concatenate(reads), lost)

    @classmethod
    def join(cls, traces: list[Trace]) -> Trace:
        """One after the other, as one run would see them.

        Raises:
            OptionError: they are of different models.
        """
        first = traces[0]
        for other in traces[1:]:
            if other.model != first.model:
                raise OptionError(f"the traces are of different models: {first.model.name}, {other.model.name}")
        starts, reads = (np.concatenate(arrays) for arrays in ([t.starts for t in traces], [t.reads for t in traces]))
        events, notes = [e for t in traces for e in t.events], [n for t in traces for n in t.notes]
        return cls(first.model, events, starts, notes, reads, sum(t.reads_lost for t in traces))

    def slice(self, start: int, stop: int) -> Trace:
        """Events [start, stop), without reads."""
        return Trace(self.model, self.events[start:stop], self.starts[start:stop], self.notes)

    @property
    def n_tokens(self) -> int:
        return sum(len(e.ids) for e in self.events if e.gate == 0)

    def decisions(self) -> bytes:
        """The versions that served every event, for `ExpertBuffer.force`."""
        return b"".join(bytes(e.ids.size) if e.versions is None else e.versions.tobytes() for e in self.events)

    def counts(self) -> np.ndarray:
        """[n_gates, n_experts] int64: how many tokens used each expert."""
        out = np.zeros((self.model.n_gates, self.model.n_experts), np.int64)
        for event in self.events:
            np.add.at(out[event.gate], event.ids.ravel(), 1)
        return out


class _Content:
    """What is in a file, read record by record. Raises `OptionError` for one that cannot be read."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        try:
            raw = open_file(path)
        except OSError as error:
            raise OptionError(f"{self._path}: cannot be read: {error.strerror}") from None
        self._file = open(os.dup(raw.fileno()), "rb")  # noqa: SIM115  # with a buffer, until `close`
        raw.close()
        self._size = os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    @property
    def position(self) -> int:
        return self._file.tell()

    def _read(self, n: int) -> bytes:
        try:
            return self._file.read(min(n, max(self._size - self._file.tell(), 0)))
        except OSError as error:
            raise OptionError(f"{self._path}: cannot be read: {error.strerror}") from None

    def header(self) -> TraceHeader:
        head = self._read(16)
        if head[:8] != MAGIC or len(head) < 16:
            raise OptionError(f"{self._path}: is not a trace of moeoff")
        version, length = struct.unpack_from("<II", head, 8)
        if version != VERSION:
            raise OptionError(f"{self._path}: is a trace of version {version}, this moeoff reads version {VERSION}")
        try:
            if length > _LONGEST_HEADER:
                raise ValueError
            return TraceHeader.from_json(self._read(length))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OptionError(f"{self._path}: the trace's header is damaged") from None

    def require_memory(self) -> None:
        """For all events at once. Raises `OptionError` if there is too little."""
        if _EXPANDED * self._size > (most := available()):
            raise OptionError(
                f"{self._path}: {format_size(self._size)} of trace need about {format_size(_EXPANDED * self._size)}, {format_size(most)} are free"
            )

    def records(self) -> Iterator[tuple[tuple[int, ...], memoryview, int]]:
        """Fields, payload and end of each whole record, behind the header."""
        while len(head := self._read(RECORD.size)) == RECORD.size:
            *fields, size, crc = RECORD.unpack(head)
            payload = self._read(size if size <= _LONGEST_RECORD else 0)
            if len(payload) < size or zlib.crc32(payload) != crc:
                return
            yield tuple(fields), memoryview(payload), self.position


def _scan(path: str | os.PathLike[str]) -> tuple[TraceHeader, int]:
    """Header, and where the last whole record ends."""
    with contextlib.closing(_Content(path)) as data:
        model = data.header()
        end = data.position
        for *_, end in data.records():  # noqa: B007  # the last counts
            pass
        return model, end


def _pack_reads(reads: np.ndarray) -> tuple[int, bytes]:
    """Flags and payload of reads as `ExpertBuffer.take_reads()` gives them. Versions are there if some are low."""
    out = np.empty(len(reads), _STORED)
    for name in ("t_queued", "nbytes", "tensor", "expert", "level", "result"):
        out[name] = reads[name]
    out["wait_us"] = (reads["t_start"] - reads["t_queued"]) // 1000
    out["read_us"] = (reads["t_done"] - reads["t_start"]) // 1000
    if not reads["version"].any():
        return 0, out.tobytes()
    return WITH_VERSIONS, out.tobytes() + reads["version"].astype("u1").tobytes()


def _unpack_reads(flags: int, payload: memoryview, n: int) -> np.ndarray:
    """[n] of `READ`."""
    stored, out = np.frombuffer(payload, _STORED, n), np.zeros(n, READ)
    for name in _STORED.names or ():
        out[name] = stored[name]
    if flags & WITH_VERSIONS:
        out["version"] = np.frombuffer(payload, "u1", n, stored.nbytes)
    return out
