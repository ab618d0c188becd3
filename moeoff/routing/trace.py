"""Traces: gate events of runs in a file that can be replayed.

    magic "MOEOFFTR", u32 version, u32 length, JSON header, then (RECORD, payload) ...

docs/reference/trace.md describes the payloads. Truncated records and wrong checksums
end a trace. Writers append to traces of the same model. No token is stored.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, cast

import numpy as np

from ..errors import OptionError, WriteError
from ..system.files import Closing, StrPath, open_file
from ..system.memory import available, format_size, slot_bytes
from .event import GateEvent

MAGIC, VERSION = b"MOEOFFTR", 7
# kind, flags, gate, n_used, n_tokens, n_hit, n_miss, CLOCK_MONOTONIC ns, payload bytes,
# crc32 of the payload
RECORD = struct.Struct("<BBHHIIIqII")
_LONGEST_HEADER, _LONGEST_RECORD = 16 << 20, 256 << 20  # bytes
_EXPANDED = 3  # bytes in memory per byte of file
GATE, SESSION, READS = 1, 2, 3
NEW_SEQUENCE, PROBS, DECISIONS, OTHER_KIND, DEVICE = 1, 2, 4, 8, 16  # flags of gate events

# Finished reads: queue time, wait and duration; level, result and version as
# `native.Read`
READ = np.dtype(
    {
        "names": "t_queued wait_us read_us nbytes tensor expert level result version".split(),
        "formats": "<i8 <u4 <u4 <u4 <u2 <u2 u1 u1 u1".split(),
    }
)
PREFETCH_LEVEL, GATE_LEVEL, DEMAND_LEVEL = 0, 1, 2


@dataclass(frozen=True)
class TensorInfo:
    """An expert tensor, in the expert buffer's order; nbytes is that of a slice."""

    gate: int
    layer: int
    matrix: int
    n_experts: int
    nbytes: int


@dataclass(frozen=True)
class TraceHeader:
    """A trace's header, sufficient to rebuild the expert buffer."""

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
        """Matrices per expert, [n_gates]."""
        return [len(tensors) for tensors in self._gates]

    @cached_property
    def expert_bytes(self) -> list[int]:
        """Bytes per expert, [n_gates]."""
        return [sum(t.nbytes for t in tensors) for tensors in self._gates]

    @cached_property
    def expert_slots(self) -> list[int]:
        """Arena bytes per expert, [n_gates]."""
        return [slot_bytes(*(t.nbytes for t in tensors)) for tensors in self._gates]

    @cached_property
    def _gates(self) -> list[list[TensorInfo]]:
        gates: list[list[TensorInfo]] = [[] for _ in range(self.n_gates)]
        for tensor in self.tensors:
            gates[tensor.gate].append(tensor)
        return gates

    @property
    def arena_floor(self) -> int:
        """Minimum bytes of an arena."""
        return 2 * max(self.expert_slots)

    @property
    def full_bytes(self) -> int:
        """Bytes of an arena that holds all experts."""
        return sum(
            nbytes * max((t.n_experts for t in tensors), default=0)
            for nbytes, tensors in zip(self.expert_slots, self._gates)
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> TraceHeader:
        """Parse a header. Raise ValueError, KeyError or TypeError if it is damaged."""
        fields = json.loads(text)
        header = cls(
            str(fields["name"]), fields["n_used"], tuple(TensorInfo(**t) for t in fields["tensors"])
        )
        limits = {
            "gate": 1 << 12,
            "layer": 1 << 12,
            "matrix": 8,
            "n_experts": 1 << 16,
            "nbytes": 1 << 48,
        }
        if (
            not header.tensors
            or type(header.n_used) is not int
            or not 0 < header.n_used <= header.n_experts
        ):
            raise ValueError("no tensors, or a wrong n_used")
        if any(
            type(n := getattr(tensor, name)) is not int or not 0 <= n <= limit
            for tensor in header.tensors
            for name, limit in limits.items()
        ):
            raise ValueError("a tensor out of range")
        return header

    @classmethod
    def of(cls, buffer: Any, name: str, n_used: int) -> TraceHeader:
        """Return the header for an attached `moeoff.engine.buffer.ExpertBuffer`."""
        return cls(
            name,
            n_used,
            tuple(TensorInfo(t.gate, t.layer, t.matrix, t.ne[2], t.nbytes) for t in buffer.tensors),
        )


class TraceWriter(Closing):
    """A writer that appends to a trace, at most one per file. A context manager.

    Args:
        session: Conditions of the run (arena, strategy), written first.

    Raises:
        OptionError: The file is not a trace of this model.
        WriteError: Writing failed; later calls raise it as well.
    """

    def __init__(self, path: StrPath, model: TraceHeader, session: dict[str, Any] | None = None):
        self._n_experts = model.n_experts
        self._is_start = True
        self._last_read = 0
        self._path = os.fspath(path)
        end = 0
        if os.path.exists(path) and os.path.getsize(path):
            with _opened(path) as (old, file):
                if old != model:
                    raise OptionError(
                        f"{path}: is a trace of another model ({old.name}); give another file"
                    )
                end = file.tell()
                for _ in _records(file):
                    end = file.tell()
        with self._writing():
            self._file: BinaryIO = open(path, "r+b" if end else "wb")
            if end:
                self._file.truncate(end)  # drop the partial record of a killed run
                self._file.seek(end)
            else:
                header = model.to_json().encode()
                self._file.write(MAGIC + struct.pack("<II", VERSION, len(header)) + header)
        self.note(session or {})

    def new_sequence(self) -> None:
        """Mark the next event as the first of a text."""
        self._is_start = True

    def write(self, event: GateEvent) -> None:
        """Append an event with float16 weights and probs, without input and layer."""
        n_tokens, n_used = event.ids.shape
        flags = NEW_SEQUENCE * self._is_start | OTHER_KIND * (event.decode != (n_tokens == 1))
        parts = [event.ids.astype("<u2"), event.weights.astype("<f2")]
        for flag, array in ((DECISIONS, event.versions), (DEVICE, event.on_device)):
            if array is not None and array.any():
                flags |= flag
                parts.append(array.astype("u1"))
        if event.probs is not None:
            flags |= PROBS
            parts.append(
                np.pad(event.probs, ((0, 0), (0, self._n_experts - event.probs.shape[1]))).astype(
                    "<f2"
                )
            )
        self._is_start = False
        payload = b"".join(part.tobytes() for part in parts)
        self._write(
            GATE,
            payload,
            flags,
            event.gate,
            n_used,
            n_tokens,
            event.n_hit,
            event.n_miss,
            event.t_ns,
        )

    def write_reads(self, reads: np.ndarray) -> None:
        """Append reads of `ExpertBuffer.take_reads()`."""
        if not len(reads):
            return
        lost = int(reads["seq"][-1]) - self._last_read - len(reads)
        self._last_read = int(reads["seq"][-1])
        out = np.empty(len(reads), READ)
        for name in ("t_queued", "nbytes", "tensor", "expert", "level", "result", "version"):
            out[name] = reads[name]
        out["wait_us"] = (reads["t_start"] - reads["t_queued"]) // 1000
        out["read_us"] = (reads["t_done"] - reads["t_start"]) // 1000
        self._write(
            READS, out.tobytes(), n_tokens=len(reads), n_miss=lost, t_ns=int(reads["t_done"][-1])
        )

    def note(self, fields: dict[str, Any]) -> None:
        """Write a JSON object, such as the counters of a run."""
        self._write(SESSION, json.dumps(fields).encode())

    def _write(
        self,
        kind: int,
        payload: bytes,
        flags: int = 0,
        gate: int = 0,
        n_used: int = 0,
        n_tokens: int = 0,
        n_hit: int = 0,
        n_miss: int = 0,
        t_ns: int = 0,
    ) -> None:
        with self._writing():
            self._file.write(
                RECORD.pack(
                    kind,
                    flags,
                    gate,
                    n_used,
                    n_tokens,
                    n_hit,
                    n_miss,
                    t_ns,
                    len(payload),
                    zlib.crc32(payload),
                )
                + payload
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                f"{self._path}: cannot be written: {error.strerror or error}"
            ) from None

    def flush(self) -> None:
        with self._writing():
            self._file.flush()

    def close(self) -> None:
        with self._writing():
            self._file.close()


@dataclass
class Trace:
    """A trace in memory.

    Attributes:
        events: Gate events with float32 weights and probs, without gate inputs.
        starts: [n_events] bool, True for the first event of a text or run.
        reads: [n_reads] of `READ`, all finished reads; empty for slices of a trace.
        reads_lost: Number of reads that did not fit into the log.
    """

    model: TraceHeader
    events: list[GateEvent]
    starts: np.ndarray
    notes: list[dict[str, Any]] = field(default_factory=list)
    reads: np.ndarray = field(default_factory=lambda: np.empty(0, READ))
    reads_lost: int = 0
    # cache of the simulator across replays
    miss_costs: tuple[object, np.ndarray] | None = field(default=None, init=False, repr=False)

    @classmethod
    def read(cls, path: StrPath) -> Trace:
        """Read a trace up to the first damaged record.

        Raise OptionError if the file is no trace of this version or too large.
        """
        events: list[GateEvent] = []
        starts, notes, reads, lost = [], [], [np.empty(0, READ)], 0
        with _opened(path) as (model, file):
            nbytes, most = _EXPANDED * os.fstat(file.fileno()).st_size, available()
            if nbytes > most:
                need = f"needs about {format_size(nbytes)} of memory, {format_size(most)} are free"
                raise OptionError(f"{os.fspath(path)}: {need}")
            layers = {t.gate: t.layer for t in model.tensors}
            with contextlib.suppress(ValueError, RecursionError):  # ends at a damaged record
                for fields, payload in _records(file):
                    kind, flags, _, _, n_tokens, _, n_miss, _ = fields
                    if kind == SESSION:
                        notes.append(json.loads(payload))
                    elif kind == READS:
                        reads.append(np.frombuffer(payload, READ, n_tokens))
                        lost += n_miss
                    else:
                        events.append(_event(fields, payload, model, layers))
                        starts.append(bool(flags & NEW_SEQUENCE))
        return cls(model, events, np.array(starts, bool), notes, np.concatenate(reads), lost)

    @classmethod
    def join(cls, traces: list[Trace]) -> Trace:
        """Concatenate traces as one run. Raise OptionError if models differ."""
        first = traces[0]
        for other in traces[1:]:
            if other.model != first.model:
                raise OptionError(
                    f"the traces are of different models: {first.model.name}, {other.model.name}"
                )
        starts, reads = (
            np.concatenate(arrays)
            for arrays in ([t.starts for t in traces], [t.reads for t in traces])
        )
        events, notes = [e for t in traces for e in t.events], [n for t in traces for n in t.notes]
        return cls(first.model, events, starts, notes, reads, sum(t.reads_lost for t in traces))

    def slice(self, start: int, stop: int) -> Trace:
        """Return events [start, stop) without reads."""
        return Trace(self.model, self.events[start:stop], self.starts[start:stop], self.notes)

    def decoded(self) -> Trace:
        """Return the events of decoded tokens as runs of their own, without reads."""
        decode = np.array([bool(e.decode) for e in self.events], bool)
        starts = np.diff(np.cumsum(self.starts)[decode], prepend=0) > 0
        events = [e for e in self.events if e.decode]
        return Trace(self.model, events, starts, self.notes)

    @property
    def n_tokens(self) -> int:
        return sum(len(e.ids) for e in self.events if e.gate == 0)

    def decisions(self) -> bytes:
        """Return the versions of all events for `ExpertBuffer.force`."""
        return b"".join(
            bytes(e.ids.size) if e.versions is None else e.versions.tobytes() for e in self.events
        )

    def counts(self) -> np.ndarray:
        """Return each expert's number of tokens: [n_gates, n_experts] int64."""
        out = np.zeros((self.model.n_gates, self.model.n_experts), np.int64)
        for event in self.events:
            np.add.at(out[event.gate], event.ids.ravel(), 1)
        return out


@contextlib.contextmanager
def _opened(path: StrPath) -> Iterator[tuple[TraceHeader, BinaryIO]]:
    """Open a trace after its header, or raise OptionError."""
    name = os.fspath(path)
    try:
        with open_file(path) as raw, io.BufferedReader(cast(io.RawIOBase, raw)) as file:
            head = file.read(16)
            if head[:8] != MAGIC or len(head) < 16:
                raise OptionError(f"{name}: is not a trace of moeoff")
            version, length = struct.unpack_from("<II", head, 8)
            if version != VERSION:
                raise OptionError(f"{name}: expected trace version {VERSION}, got {version}")
            try:
                header = TraceHeader.from_json(file.read(min(length, _LONGEST_HEADER)))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise OptionError(f"{name}: the trace's header is damaged") from None
            yield header, file
    except OSError as error:
        raise OptionError(f"{name}: cannot be read: {error.strerror or error}") from None


def _records(file: BinaryIO) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield fields and payload of each whole record."""
    end = os.fstat(file.fileno()).st_size
    while len(head := file.read(RECORD.size)) == RECORD.size:
        *fields, size, crc = RECORD.unpack(head)
        if (
            size > min(_LONGEST_RECORD, end - file.tell())
            or zlib.crc32(payload := file.read(size)) != crc
        ):
            return
        yield tuple(fields), payload


def _event(
    fields: tuple[int, ...], payload: bytes, model: TraceHeader, layers: dict[int, int]
) -> GateEvent:
    """Parse an event. Raise ValueError if it is damaged."""
    _, flags, gate, n_used, n_tokens, n_hit, n_miss, t_ns = fields
    data, shape = io.BytesIO(payload), (n_tokens, n_used)

    def array(stored: str, dtype: type) -> np.ndarray:
        return (
            np.frombuffer(data.read(np.dtype(stored).itemsize * n_tokens * n_used), stored)
            .reshape(shape)
            .astype(dtype)
        )

    ids, weights = array("<u2", np.int32), array("<f2", np.float32)
    if gate >= model.n_gates or ids.max(initial=0) >= model.n_experts:
        raise ValueError("no such gate or expert")
    versions = array("u1", np.uint8) if flags & DECISIONS else None
    on_device = array("u1", np.bool_) if flags & DEVICE else None
    probs = (
        np.frombuffer(data.read(), "<f2").reshape(n_tokens, -1).astype(np.float32)
        if flags & PROBS
        else None
    )
    decode = (n_tokens == 1) != bool(flags & OTHER_KIND)
    return GateEvent(
        gate,
        ids,
        weights,
        probs,
        None,
        versions,
        layers.get(gate, -1),
        n_hit,
        n_miss,
        0,
        t_ns,
        decode=decode,
        on_device=on_device,
    )
