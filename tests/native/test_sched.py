"""ggml's scheduler with a device that copies when it is waited for, as one with a queue
of its own may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, c_bool, c_int, c_size_t, c_void_p, cast
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.counted_backend import Backend, Buffer, BufferType, Device
from helpers.ggml_api import ABORTED, F32, SUCCESS, Context, cpu_buffer_type, read, write
from moeoff.llamacpp._abi import function

_GPU = 1  # enum ggml_backend_dev_type

_cpu_init = function("ggml_backend_cpu_init", c_void_p)
_backend_free = function("ggml_backend_free", None, c_void_p)
_sched_new = function(
    "ggml_backend_sched_new",
    c_void_p,
    POINTER(c_void_p),
    POINTER(c_void_p),
    c_int,
    c_size_t,
    c_bool,
    c_bool,
)
_sched_free = function("ggml_backend_sched_free", None, c_void_p)
_set_backend = function("ggml_backend_sched_set_tensor_backend", None, c_void_p, c_void_p, c_void_p)
_set_eval_callback = function(
    "ggml_backend_sched_set_eval_callback", None, c_void_p, c_void_p, c_void_p
)
_alloc_graph = function("ggml_backend_sched_alloc_graph", c_bool, c_void_p, c_void_p)
_compute = function("ggml_backend_sched_graph_compute_async", c_int, c_void_p, c_void_p)
_set_input = function("ggml_set_input", None, c_void_p)
_tensor_set = function("ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)
_tensor_get = function("ggml_backend_tensor_get", None, c_void_p, c_void_p, c_size_t, c_size_t)


class QueueingDevice:
    """A CPU backend that the scheduler takes for a device.

    Attributes:
        queue: Copies that nobody has waited for.
        n_graphs: Graphs that it computes before it aborts one.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.n_graphs = 100
        self._kept: list[Any] = []
        self.handle = _cpu_init()
        backend = cast(self.handle, POINTER(Backend)).contents
        self._device = Device.from_buffer_copy(cast(backend.device, POINTER(Device)).contents)
        self._buffer_type = BufferType.from_buffer_copy(
            cast(cpu_buffer_type(), POINTER(BufferType)).contents
        )
        self.buffer_type = ctypes.addressof(self._buffer_type)
        alloc = CFUNCTYPE(c_void_p, c_void_p, c_size_t)(self._buffer_type.alloc_buffer)

        def alloc_buffer(_type: int, size: int) -> int:
            buffer = alloc(cpu_buffer_type(), size)
            cast(buffer, POINTER(Buffer)).contents.buft = self.buffer_type
            return buffer

        self._set(
            self._buffer_type, "alloc_buffer", CFUNCTYPE(c_void_p, c_void_p, c_size_t), alloc_buffer
        )
        self._set(self._buffer_type, "is_host", CFUNCTYPE(c_bool, c_void_p), lambda _type: False)
        self._set(self._device, "get_type", CFUNCTYPE(c_int, c_void_p), lambda _device: _GPU)
        self._set(
            self._device,
            "supports_buft",
            CFUNCTYPE(c_bool, c_void_p, c_void_p),
            lambda _device, type: type == self.buffer_type,
        )
        backend.device = ctypes.addressof(self._device)

        copy = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)
        for name, now in (("set_tensor_async", _tensor_set), ("get_tensor_async", _tensor_get)):
            self._set(
                backend,
                name,
                copy,
                lambda _backend, *arguments, now=now: self.queue.append(partial(now, *arguments)),
            )
        backend.cpy_tensor_async = None
        self._set(
            backend, "synchronize", CFUNCTYPE(None, c_void_p), lambda _backend: self._finish()
        )
        graph = CFUNCTYPE(c_int, c_void_p, c_void_p)
        compute = graph(backend.graph_compute)

        def graph_compute(handle: int, cgraph: int) -> int:
            self.n_graphs -= 1
            if self.n_graphs < 0:
                return ABORTED
            self._finish()
            return compute(handle, cgraph)

        self._set(backend, "graph_compute", graph, graph_compute)

    def _set(self, struct: Any, name: str, kind: Any, python: Callable[..., Any]) -> None:
        self._kept.append(kind(python))
        setattr(struct, name, cast(self._kept[-1], c_void_p).value)

    def _finish(self) -> None:
        while self.queue:
            self.queue.pop(0)()


@pytest.fixture
def device() -> Iterator[QueueingDevice]:
    device = QueueingDevice()
    yield device
    _backend_free(device.handle)


@pytest.mark.parametrize("watched", [False, True])
def test_no_copy_is_in_flight_after_an_aborted_graph(watched: bool, device: QueueingDevice) -> None:
    """The caller may free what a copy reads."""
    watch = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)(lambda _tensor, _asks, _user: False)
    cpu = _cpu_init()
    backends, types = (
        (c_void_p * 2)(device.handle, cpu),
        (c_void_p * 2)(device.buffer_type, cpu_buffer_type()),
    )
    scheduler = _sched_new(backends, types, 2, 64, False, False)
    try:
        with Context(8, 2) as context:
            first = context.tensor(F32, 8)
            _set_input(first)
            nodes = [first]
            for backend in (device.handle, cpu, device.handle):
                nodes.append(context.soft_max(nodes[-1], None, 1.0))
                _set_backend(scheduler, nodes[-1], backend)
            graph = context.graph(nodes[-1])
            assert _alloc_graph(scheduler, graph)
            write(first, np.arange(8, dtype=np.float32))
            if watched:
                _set_eval_callback(scheduler, cast(watch, c_void_p), None)
            assert _compute(scheduler, graph) == SUCCESS and not device.queue
            result = read(nodes[-1], (8,)).view(np.float32)
            assert result.sum() == pytest.approx(1) and result[7] > result[0]
            device.n_graphs = 1
            write(first, np.arange(8, dtype=np.float32))
            assert _compute(scheduler, graph) == ABORTED
            assert not device.queue
    finally:
        _sched_free(scheduler)
        _backend_free(cpu)
