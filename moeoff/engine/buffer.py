"""The expert buffer of a model, which serves routed experts from disk.

It owns the native object and its ctypes callbacks. Life cycle: construct, load a model
inside `loading()`, `attach()`, `start()`, decode, `close()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..budget.plan import Pools
from ..errors import ModelError, MoeoffError, OptionError, ReadError
from ..experts.sidecar import ExpertSource
from ..gguf.file import FileState, require_unchanged
from ..gguf.model_index import EXPERT_PATTERN, ModelIndex, TensorSpan
from ..llamacpp import native
from ..llamacpp.compute_thread import require_process
from ..precision import Precision
from ..routing.event import GateEvent
from ..system.memory import slot_bytes
from .gate_predictor import GatePredictor

READ_CHUNK = 1 << 20  # a prefetch can be cancelled between pieces of this size
_PY = ctypes.pythonapi
# every other option is an unsigned number or an address
_CODES: dict[Any, str] = {ctypes.c_int32: "i", ctypes.c_int64: "q"}
_EVENT = struct.Struct(
    "=" + "".join(_CODES.get(kind, "Q") for _, kind, *_ in native.GateEvent._fields_)
)
QUEUE_BYTES = 16 << 20  # most bytes of waiting gate events
_UPLOADED = 2  # value in moeoff_gate_event.on_device
READ_DTYPE = np.dtype(native.Read)


def _copy_event(address: int) -> GateEvent:
    """Copy a struct moeoff_gate_event, whose arrays are contiguous, in one piece."""
    fields = _EVENT.unpack(ctypes.string_at(address, _EVENT.size))
    (
        seq,
        t_ns,
        gate,
        layer,
        n_tokens,
        n_used,
        n_embd,
        n_expert,
        n_rows,
        row_step,
        n_hit,
        n_miss,
        decode,
        _,
    ) = fields[:14]
    ids, _, gate_input, logits, versions, on_device = fields[14:]
    n, shape = n_tokens * n_used, (n_tokens, n_used)
    n_input, n_logits = n_rows * n_embd if gate_input else 0, n_rows * n_expert if logits else 0
    version_offset = 8 * n + 4 * (n_input + n_logits)
    device_offset = version_offset + (n if versions else 0)
    data = ctypes.string_at(ids, device_offset + (n if on_device else 0))
    places = np.frombuffer(data, np.uint8, n, device_offset).reshape(shape) if on_device else None
    return GateEvent(
        gate,
        np.frombuffer(data, np.int32, n).reshape(shape),
        np.frombuffer(data, np.float32, n, 4 * n).reshape(shape),
        None,
        (
            np.frombuffer(data, np.float32, n_input, 8 * n).reshape(n_rows, n_embd)
            if n_input
            else None
        ),
        np.frombuffer(data, np.uint8, n, version_offset).reshape(shape) if versions else None,
        layer,
        n_hit,
        n_miss,
        seq,
        t_ns,
        (
            np.frombuffer(data, np.float32, n_logits, 8 * n + 4 * n_input).reshape(n_rows, n_expert)
            if n_logits
            else None
        ),
        row_step,
        bool(decode),
        places > 0 if places is not None else None,
        places == _UPLOADED if places is not None else None,
    )


def _replaced(model_index: ModelIndex, name: str) -> ModelError:
    return ModelError(
        f"{model_index.files[0]}: {name} is not in the file as llama.cpp loaded it; was the file"
        " replaced meanwhile?"
    )


class ExpertBuffer:
    """Slices of routed experts in an arena of at most `cache_bytes`, read by I/O
    threads.

    Low versions of slices have an arena of their own; `set_precision` enables them.

    Args:
        io_threads: Number of I/O threads, at most 64. 0: as many as the disk gains
            from.
        keep: False to evict each expert after its use.
        eager: False to read slices per matrix op instead of all at the gate.
        direct_io: True to bypass the page cache where the file system can.
        gate_input: True to add the router's input to gate events.
        gate_logits: True to add the router's logits to gate events.

    Raises:
        OptionError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        io_threads: int = 0,
        keep: bool = True,
        eager: bool = True,
        direct_io: bool = True,
        gate_input: bool = False,
        gate_logits: bool = False,
    ):
        flags = {native.FLAG_KEEP: keep, native.FLAG_EAGER: eager, native.FLAG_DIRECT_IO: direct_io}
        flags |= {native.FLAG_GATE_INPUT: gate_input, native.FLAG_GATE_LOGITS: gate_logits}
        self._flags = sum(flag for flag, on in flags.items() if on)
        params = native.Params(
            flags=self._flags, n_io_threads=io_threads, cache_bytes=0, read_chunk=READ_CHUNK
        )
        self._handle: int = native.expert_buffer_init(params)
        if not self._handle:
            raise OptionError(native.last_error().decode())
        self._pid = os.getpid()
        # no effect in a forked process
        self._finalizer = weakref.finalize(self, native.expert_buffer_free, self._handle)
        # a signal handler may cancel its own thread's computation
        self._closing = threading.RLock()
        self._closed = False
        self._callback = native.GateCallback()  # referenced while native code may call it
        self._predictor: GatePredictor | None = None  # likewise
        self._exception: BaseException | None = None
        self.tensors: list[native.TensorInfo] = []
        self._slots: tuple[dict[int, np.ndarray], ...] = ({}, {})
        self.buffered = False
        self.row_table_bytes = 0  # bytes of tables on disk
        self._started = False
        # files of experts, as they were when their headers were read
        self._files: dict[str, FileState] = {}

    @property
    def handle(self) -> int:
        """The native object.

        Raises:
            MoeoffError: The buffer is closed, or belongs to the parent of this fork.
        """
        require_process(self._pid)
        if self._closed:
            raise MoeoffError("the model is closed")
        return self._handle

    @property
    def running(self) -> bool:
        """True if the buffer is started and not closed in this process."""
        return self._started and not self._closed and self._pid == os.getpid()

    def close(self) -> None:
        """Stop I/O threads and driver. Decodes fail; the model becomes unusable."""
        if self._pid != os.getpid():
            return
        with self._closing:  # not while the driver ends: its callback may read statistics
            self._closed = True
        self._finalizer()

    def set_cancelled(self, cancelled: bool) -> None:
        """Cancel running and later computations, or allow them again. Thread-safe."""
        with self._closing:
            if not self._closed and self._finalizer.alive:
                native.set_cancelled(self.handle, cancelled)

    # --- set-up ---

    @contextlib.contextmanager
    def loading(
        self, others: Sequence[tuple[str, int]] = (), row_tables: Iterable[str] = ()
    ) -> Iterator[native.TensorOverrides]:
        """Yield overrides that let this thread's models reserve their experts here.

        Args:
            others: Overrides for other tensors, as in `native.TensorOverrides`.
            row_tables: Names of further tensors to keep on disk
                (`ModelIndex.row_tables`), unless `others` has them.
        """
        self._check(native.load_begin(self.handle))
        pairs = [
            (EXPERT_PATTERN, native.buffer_type()),
            *others,
            *((f"^{re.escape(name)}$", native.buffer_type()) for name in row_tables),
        ]
        try:
            yield native.TensorOverrides(pairs)
        finally:
            native.load_end(self.handle)

    def attach(
        self,
        model_index: ModelIndex,
        source: ExpertSource = ExpertSource(),
        low: ExpertSource | None = None,
    ) -> None:
        """Set the file of the reserved slices: the model, or a tier of its sidecar.

        Args:
            low: Source of the low versions.

        Raises:
            ModelError: The tensors differ from those loaded, the sidecar lacks one, or
                a file has changed since its header was read.
        """
        states = dict(zip(model_index.files, model_index.states, strict=True))
        sidecars = [
            (c.repacked, c.verify)
            for c in (source, low)
            if c is not None and c.repacked is not None
        ]
        states |= {sidecar.path: sidecar.state for sidecar, _ in sidecars}
        # later changes are noticed by each read
        hashed = {sidecar.path for sidecar, verified in sidecars if verified}
        self._files = {path: state for path, state in states.items() if path not in hashed}
        for path, state in states.items():
            self._check(native.add_file(self.handle, os.fsencode(path)), ModelError)
            # the file has been opened for its header, the dense weights and the experts
            if not state.is_same(FileState.read(path)):
                raise ModelError(
                    f"{path}: the file was changed or replaced while it was loaded: load it again"
                )
        for index in range(native.n_tensors(self.handle)):
            info = native.TensorInfo()
            self._check(native.tensor(self.handle, index, info))
            self.tensors.append(info)
            name, n_expert = info.name.decode(), info.ne[2]
            span = model_index.experts.get(name)
            if span is None or span.nbytes != n_expert * info.nbytes:
                raise _replaced(model_index, name)
            self.set_sources(index, self._sources(list(states), span, source))
            if low is not None:
                self.set_sources(index, self._sources(list(states), span, low), low=True)
        self._attach_row_tables(model_index)
        self.buffered = bool(native.is_buffered(self.handle))

    def _attach_row_tables(self, model_index: ModelIndex) -> None:
        info = native.TensorInfo()
        for index in range(native.n_row_tables(self.handle)):
            self._check(native.row_table(self.handle, index, info))
            span = model_index.dense.get(info.name.decode())
            if span is None or span.nbytes != info.ne[1] * info.nbytes:
                raise _replaced(model_index, info.name.decode())
            self._check(
                native.set_row_table_source(
                    self.handle,
                    index,
                    native.Source(span.file, span.type, span.offset, span.nbytes, 0),
                )
            )
            self.row_table_bytes += span.nbytes

    @staticmethod
    def _sources(files: list[str], span: TensorSpan, source: ExpertSource) -> list[native.Source]:
        """Return the source of each expert of a tensor."""
        if (sidecar := source.repacked) is not None:
            file = files.index(sidecar.path)
            slices = sidecar.sources(span, source.tier)
            return [
                native.Source(file, s.type, s.offset, s.nbytes, s.hash if source.verify else 0)
                for s in slices
            ]
        known, nbytes = (
            source.sidecar.source_hashes if source.sidecar is not None and source.verify else {},
            span.slice_bytes,
        )
        return [
            native.Source(
                span.file, span.type, span.offset + e * nbytes, nbytes, known.get((span.name, e), 0)
            )
            for e in range(span.shape[2])
        ]

    def set_sources(
        self, tensor: int, sources: Sequence[native.Source], *, low: bool = False
    ) -> None:
        """Set the source and type of each expert of a tensor, or of its low version.

        Call it before `start()`. All tensors have low versions, or none.
        """
        function = native.set_low_sources if low else native.set_sources
        self._check(
            function(self.handle, tensor, (native.Source * len(sources))(*sources), len(sources))
        )
        self._slots[native.LOW if low else native.HIGH][tensor] = np.array(
            [slot_bytes(s.nbytes) if s.type >= 0 else 0 for s in sources], np.int64
        )

    def slots(self, *, low: bool = False) -> list[np.ndarray]:
        """Return the arena bytes of each expert's slice, [n_experts] int64 by tensor.

        Empty if there are no such versions.
        """
        slots = self._slots[native.LOW if low else native.HIGH]
        return [slots[tensor] for tensor in sorted(slots)]

    @property
    def arena_floor(self) -> int:
        """Bytes of the smallest arena for high versions that can make progress."""
        return int(native.arena_floor(self.handle, native.HIGH))

    @property
    def arena_full(self) -> int:
        """Bytes of the arena that holds every expert in its high version."""
        return int(native.arena_full(self.handle, native.HIGH))

    @property
    def low_arena_floor(self) -> int:
        """`arena_floor` of the low versions; 0 if there are none."""
        return int(native.arena_floor(self.handle, native.LOW))

    @property
    def low_arena_full(self) -> int:
        """`arena_full` of the low versions; 0 if there are none."""
        return int(native.arena_full(self.handle, native.LOW))

    def pools(self, low_share: float) -> Pools:
        """Return the limits of both arenas."""
        return Pools(
            self.arena_floor, self.arena_full, self.low_arena_floor, self.low_arena_full, low_share
        )

    def start(self, cache_bytes: int, low_cache_bytes: int = 0) -> None:
        self.set_cache_bytes(cache_bytes, low_cache_bytes)
        self._check(native.start(self.handle))
        self._started = True

    def set_cache_bytes(self, cache_bytes: int, low_cache_bytes: int = 0) -> None:
        """Resize both arenas between decodes. A smaller arena evicts at once."""
        self._check(native.set_cache_bytes(self.handle, cache_bytes, low_cache_bytes))

    # --- devices ---

    def set_device_slots(
        self,
        slots: Sequence[tuple[int, int, int]],
        mode: int = native.DEVICE_OFF,
        n_used: int = 1,
        n_uploads: int = 0,
        stage: tuple[int, int] = (0, 0),
    ) -> None:
        """Replace the experts' slots in device memory, between decodes.

        `native.replan` must follow.

        Args:
            slots: (ggml_backend_dev_t or 0, slots, slots for low versions) of each
                gate. Empty: none.
            mode: native.DEVICE_...
            n_used: Experts per token.
            n_uploads: Most uploads per gate event; -1: as many as end in time.
            stage: Slots of each stage, and stages per device: 0, 1 or 2.

        Raises:
            MoeoffError: A device has too little memory.
        """
        n = self.priorities.shape[0]
        handles, high, low = zip(*(list(slots) or [(0, 0, 0)] * n), strict=True)
        numbers = ctypes.c_int32 * n
        self._check(
            native.set_device_slots(
                self.handle,
                mode,
                (ctypes.c_uint64 * n)(*handles),
                numbers(*high),
                numbers(*low),
                n,
                n_used,
                n_uploads,
                *stage,
            )
        )

    def set_device_mode(self, mode: int) -> None:
        """Set how devices compute with their slots, between decodes.

        `native.DEVICE_OFF` disables the devices. The slots keep their experts.

        Raises:
            MoeoffError: There are no slots.
        """
        self._check(native.set_device_mode(self.handle, mode))

    def device_slot_bytes(
        self, device: int, gate: int, n_slots: int, n_used: int, *, low: bool = False
    ) -> int:
        """Return the bytes of a gate's slots on a device (ggml_backend_dev_t).

        0 if the device cannot compute with these experts.
        """
        return int(
            native.device_slot_bytes(
                self.handle, device, gate, native.LOW if low else native.HIGH, n_slots, n_used
            )
        )

    def device_stage_bytes(
        self, device: int, gates: Sequence[int], n_slots: int, n_used: int
    ) -> int:
        """Return the bytes of these gates' stage on a device (ggml_backend_dev_t)."""
        return int(
            native.device_stage_bytes(
                self.handle,
                device,
                (ctypes.c_int32 * len(gates))(*gates),
                len(gates),
                n_slots,
                n_used,
            )
        )

    def clear(self) -> None:
        """Evict every expert."""
        native.clear(self.handle)

    # --- policy ---

    @property
    def gating(self) -> int:
        """The routers' llama_expert_gating_func_type; 0 before a context is made."""
        return int(native.gating(self.handle))

    @property
    def priorities(self) -> np.ndarray:
        """Priority table, [n_gates, n_experts] float32; the lowest is evicted first.

        Call `publish()` after writing. The view is invalid after `close()`.
        """
        n_gates, n_experts = ctypes.c_int32(), ctypes.c_int32()
        table = native.priorities(self.handle, n_gates, n_experts)
        return np.ctypeslib.as_array(table, (n_gates.value, n_experts.value))

    def device_priorities(self) -> np.ndarray:
        """Return a table like `priorities` for devices' slots alone.

        It takes effect at the next `publish()`, until the slots are replaced.

        Raises:
            MoeoffError: Out of memory.
        """
        table = native.device_priorities(self.handle)
        if not table:
            raise MoeoffError(native.last_error().decode())
        return np.ctypeslib.as_array(table, self.priorities.shape)

    def publish(self) -> None:
        native.publish(self.handle)

    def prefetch(
        self,
        gate: int,
        experts: Sequence[int],
        n_read: int | None = None,
        *,
        low: bool = False,
        limit: int = -1,
    ) -> int:
        """Keep the resident experts, and queue reads of the first `n_read` absent ones.

        Demand reads come first. The gate cancels reads of experts or versions that it
        does not select.

        Args:
            low: True for low versions.
            n_read: Number of experts to read; None: all.
            limit: Most slices to queue; -1: no limit.

        Returns:
            Number of slices queued.
        """
        n = len(experts)
        array = (ctypes.c_int32 * n)(*experts)
        version = native.LOW if low else native.HIGH
        return self._check(
            native.prefetch(
                self.handle,
                gate,
                array,
                n,
                n if n_read is None else n_read,
                native.ALL_MATRICES,
                version,
                limit,
            ),
            OptionError,
        )

    def preload(self, gate: int, experts: Sequence[int], *, low: bool = False) -> int:
        """Queue reads as `prefetch` does, for a warm start.

        They are cancelled at the next gate event, and not counted as prefetches.
        """
        array = (ctypes.c_int32 * len(experts))(*experts)
        version = native.LOW if low else native.HIGH
        return self._check(
            native.preload(self.handle, gate, array, len(experts), native.ALL_MATRICES, version),
            OptionError,
        )

    def lacks(self, gate: int, experts: np.ndarray, *, low: bool = False) -> bool:
        """Return True if an expert [n] is not where it is computed.

        That is a device's slot if the layer has any, otherwise memory.

        Args:
            low: True to accept low precision or better.
        """
        array, version = np.ascontiguousarray(experts, np.int32), native.LOW if low else native.HIGH
        pointer = array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        return bool(native.lacks(self.handle, gate, pointer, len(array), version))

    def residency(self, *, low: bool = False) -> np.ndarray:
        """Return [n_gates, n_experts] uint8, with bit i set if the slice of
        `moeoff.gguf.model_index.MATRICES[i]` is resident.
        """
        out = np.zeros(self.priorities.shape, np.uint8)
        self._check(
            native.residency(
                self.handle,
                native.LOW if low else native.HIGH,
                out.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
            )
        )
        return out

    def expert_bytes(self, *, low: bool = False, resident: bool = False) -> np.ndarray:
        """Return the arena bytes of each expert, [n_gates, n_experts] int64.

        All slices count, or the resident ones; 0 without such versions.
        """
        matrices = (
            self.residency(low=low)
            if resident
            else np.full(self.priorities.shape, native.ALL_MATRICES, np.uint8)
        )
        out = np.zeros(matrices.shape, np.int64)
        for info, nbytes in zip(self.tensors, self.slots(low=low)):
            out[info.gate, : len(nbytes)] += nbytes * (
                matrices[info.gate, : len(nbytes)] >> info.matrix & 1
            )
        return out

    # --- precision ---

    def set_precision(self, p: Precision, *, blind: bool = False) -> None:
        """Set which version serves a selected expert that is not resident.

        Args:
            blind: True to decide as if no expert was resident.

        Raises:
            OptionError: Low versions are needed and have no arena.
        """
        flags = (native.THRESHOLDS_BLIND if blind else 0) | (
            native.THRESHOLDS_MISPREDICTED if p.mispredicted_low else 0
        )
        flags |= native.THRESHOLDS_PROMPTS if p.weigh_prompts else 0
        self._set_options(
            thresholds=native.Thresholds(p.t1, p.t2, p.prefill_low_fraction, flags, p.tau)
        )

    def force(self, versions: np.ndarray | bytes = b"") -> int:
        """Queue decisions that replace the thresholds' at the next gate events.

        Args:
            versions: Concatenated `GateEvent.versions` of the events, uint8.

        Returns:
            Number of decisions left.

        Raises:
            OptionError: A value is invalid, or low without an arena for low versions.
        """
        array = np.ascontiguousarray(np.frombuffer(versions, np.uint8))
        return self._check(
            native.force_versions(
                self.handle, array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(array)
            ),
            OptionError,
        )

    def simulate_cache(self, share: float | None) -> None:
        """Decide in decoding by a simulated cache, empty at first.

        None: by the true residency. Otherwise the cache holds this share of each gate's
        experts.

        Raises:
            OptionError: The share is out of range.
        """
        self._set_options(simulated_share=-1.0)
        if share is not None:
            self._set_options(simulated_share=share)

    # --- events ---

    def set_gate_callback(
        self,
        callback: Callable[[GateEvent], None] | None,
        queue_bytes: int = QUEUE_BYTES,
        predictor: GatePredictor | None = None,
    ) -> None:
        """Call back for every gate event on the driver thread; only `drain` waits.

        Waiting events are kept up to `queue_bytes`, at least a few;
        `stats().events_dropped` counts the others. An exception ends the callbacks, and
        `check()` raises it.

        Args:
            predictor: Native predictor that runs before the callback.
        """
        if callback is None:
            delivery = native.GateCallback()
        else:
            # keep the thread's interpreter state: a new one for every event is slow
            states: list[int] = []

            def deliver(event: int | None, _user: int | None) -> None:
                if not event:
                    while states:
                        _PY.PyGILState_Release(states.pop())
                    return
                if not states:
                    states.append(_PY.PyGILState_Ensure())
                if self._exception is None:
                    try:
                        callback(_copy_event(event))
                    except BaseException as error:  # must not cross the C frame below
                        self._exception = error

            delivery = native.GateCallback(deliver)
        settings = None if predictor is None else predictor.settings
        # the old callback is no longer called
        self._check(native.set_gate_callback(self.handle, delivery, None, queue_bytes, settings))
        self._callback, self._predictor = delivery, predictor

    def set_gate_rows(self, max_rows: int = 0) -> None:
        """Limit events of larger batches to `max_rows` spread tokens; 0: no limit."""
        self._set_options(max_gate_rows=max_rows)

    def set_batch_kind(self, decode: bool | None = None) -> None:
        """Set whether later batches decode or process a prompt.

        None: single tokens decode, several are a prompt.
        """
        self._set_options(
            batch_kind=(
                native.BATCH_BY_SIZE
                if decode is None
                else native.BATCH_DECODE
                if decode
                else native.BATCH_PROMPT
            )
        )

    def drain(self) -> None:
        """Wait until every event posted so far has been delivered."""
        native.drain(self.handle)

    def check(self) -> None:
        """Raise a gate callback's error, or `ReadError` if the last graph failed."""
        message = ctypes.create_string_buffer(1024)
        # clear the error in any case, or it would end the next graph
        failed = native.take_error(self.handle, message, len(message))
        if self._exception is not None:
            error, self._exception = self._exception, None
            raise error
        if failed:
            raise ReadError(message.value.decode("utf-8", "replace"))

    # --- watching ---

    def log_reads(self, on: bool = True) -> None:
        """Start or stop logging finished reads for `take_reads()`."""
        self._set_options(flags=self._flags | (native.FLAG_LOG_READS if on else 0))

    def take_reads(self) -> np.ndarray:
        """Return reads finished since the last call, oldest first, as `native.Read`.

        The log keeps 65,536 reads; dropped ones leave a gap in `seq`.
        """
        parts = []
        while True:
            out = (native.Read * 256)()
            n = native.take_reads(self.handle, out, len(out))
            parts.append(np.frombuffer(memoryview(out), READ_DTYPE, n))
            if n < len(out):
                return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def check_unchanged(self) -> None:
        """Raise as `require_unchanged` if a file of experts was written to."""
        require_unchanged(self._files)

    def stats(self) -> native.Stats:
        stats = native.Stats()
        native.get_stats(self.handle, stats)
        return stats

    def reset_stats(self) -> None:
        native.reset_stats(self.handle)

    def gate_stats(self) -> np.ndarray:
        """Return the counters of each gate: [n_gates] records of `native.GateStats`."""
        out = (native.GateStats * self.priorities.shape[0])()
        self._check(native.get_gate_stats(self.handle, out, len(out)))
        return np.frombuffer(out, native.GateStats)

    def _set_options(self, **changed: Any) -> None:
        """Change fields of struct moeoff_options."""
        with self._closing:  # two threads would overwrite each other's changes
            options = native.Options()
            native.get_options(self.handle, options)
            for name, value in changed.items():
                setattr(options, name, value)
            self._check(native.set_options(self.handle, options), OptionError)

    @staticmethod
    def _check(result: int, error: type[MoeoffError] = MoeoffError) -> int:
        """Return the result of a native call. Raise its error if negative."""
        if result < 0:
            raise error(native.last_error().decode("utf-8", "replace"))
        return result
