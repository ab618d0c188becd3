"""Counts of waits and copies of ggml's devices while a model computes, at ggml's own
backend interface (ggml-backend-impl.h).
"""

from __future__ import annotations

import threading
from collections import Counter
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_char_p, c_int, c_size_t, c_void_p, cast
from functools import cache
from typing import Any

from moeoff.llamacpp._abi import function

_BACKEND = (
    "get_name free set_tensor_async get_tensor_async set_tensor_2d_async get_tensor_2d_async"
    " cpy_tensor_async synchronize graph_plan_create graph_plan_free graph_plan_update"
    " graph_plan_compute graph_compute event_record event_wait graph_optimize"
)
_DEVICE = (
    "get_name get_description get_memory get_type get_props init_backend get_buffer_type"
    " get_host_buffer_type buffer_from_host_ptr supports_op supports_buft offload_op event_new"
    " event_free event_synchronize"
)
_BUFFER_TYPE = "get_name alloc_buffer get_alignment get_max_size get_alloc_size is_host"
_BUFFER = (
    "free_buffer get_base init_tensor memset_tensor set_tensor get_tensor set_tensor_2d"
    " get_tensor_2d cpy_tensor clear reset"
)


def _struct(name: str, functions: str, *before: str) -> Any:
    return type(
        name,
        (Structure,),
        {"_fields_": [(field, c_void_p) for field in (*before, *functions.split())]},
    )


Backend, Device = (
    _struct("Backend", _BACKEND + " device context", "guid"),
    _struct("Device", _DEVICE + " reg context"),
)
BufferType, Buffer = (
    _struct("BufferType", _BUFFER_TYPE + " device context"),
    _struct("Buffer", _BUFFER + " buft"),
)

_ASYNC = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)


class _CountedDevices:
    """Counts from here on, in this process, what is asked of every device but the CPU.

    Attributes:
        counts: of `thread`: "waits" for what was queued, "queued" copies, and "copies"
            that it waited for; of all others "elsewhere".
        thread: by default the one that made this.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._kept: list[Any] = []  # what ggml has pointers to
        self.thread = threading.get_ident()
        self._is_busy: dict[int, bool] = {}  # by backend: something was queued and not waited for
        count, get = (
            function("ggml_backend_dev_count", c_size_t),
            function("ggml_backend_dev_get", c_void_p, c_size_t),
        )
        kind = function("ggml_backend_dev_type", c_int, c_void_p)
        buffer_type = function("ggml_backend_dev_buffer_type", c_void_p, c_void_p)
        for device in filter(kind, map(get, range(count()))):  # 0: the CPU
            self._wrap(
                cast(device, POINTER(Device)).contents,
                "init_backend",
                CFUNCTYPE(c_void_p, c_void_p, c_char_p),
                self._backend,
            )
            self._wrap(
                cast(device, POINTER(Device)).contents,
                "event_synchronize",
                CFUNCTYPE(None, c_void_p, c_void_p),
                self._event,
            )
            self._wrap(
                cast(buffer_type(device), POINTER(BufferType)).contents,
                "alloc_buffer",
                CFUNCTYPE(c_void_p, c_void_p, c_size_t),
                self._buffer,
            )

    def _count(self, name: str, n: int = 1) -> None:
        self.counts[name if threading.get_ident() == self.thread else "elsewhere"] += n

    def _wrap(self, struct: Any, name: str, kind: Any, around: Any) -> None:
        if address := getattr(struct, name):
            original = kind(address)
            wrapped = kind(lambda *arguments: around(original, *arguments))
            self._kept += [original, wrapped]
            setattr(struct, name, cast(wrapped, c_void_p).value)

    def _backend(self, original: Any, *arguments: Any) -> Any:
        if backend := original(*arguments):
            struct = cast(backend, POINTER(Backend)).contents
            for name in ("set_tensor_async", "get_tensor_async"):
                self._wrap(struct, name, _ASYNC, self._queued)
            self._wrap(
                struct,
                "cpy_tensor_async",
                CFUNCTYPE(c_bool, c_void_p, c_void_p, c_void_p, c_void_p),
                self._tried,
            )
            self._wrap(struct, "synchronize", CFUNCTYPE(None, c_void_p), self._wait)
            self._wrap(struct, "graph_compute", CFUNCTYPE(c_int, c_void_p, c_void_p), self._graph)
        return backend

    def _buffer(self, original: Any, *arguments: Any) -> Any:
        if buffer := original(*arguments):
            struct = cast(buffer, POINTER(Buffer)).contents
            for name in ("set_tensor", "get_tensor"):
                self._wrap(struct, name, _ASYNC, self._copied)
        return buffer

    def _queued(self, original: Any, backend: int, *arguments: Any) -> None:
        self._count("queued")
        self._is_busy[backend] = True
        original(backend, *arguments)

    def _tried(self, original: Any, source: int, backend: int, *arguments: Any) -> bool:
        is_queued = original(source, backend, *arguments)
        self._count("queued", is_queued)
        self._is_busy[backend] = self._is_busy.get(backend, False) or is_queued
        return is_queued

    def _graph(self, original: Any, backend: int, *arguments: Any) -> int:
        self._is_busy[backend] = True
        return original(backend, *arguments)

    def _wait(self, original: Any, backend: int) -> None:
        self._count("waits", self._is_busy.get(backend, False))
        self._is_busy[backend] = False
        original(backend)

    def _event(self, original: Any, *arguments: Any) -> None:
        self._count("waits")
        original(*arguments)

    def _copied(self, original: Any, *arguments: Any) -> None:
        self._count("copies")
        original(*arguments)


@cache
def counted_devices() -> _CountedDevices:
    """Count calls of this process's devices. Call it before a context is created."""
    return _CountedDevices()
