"""How long this CPU computes on a token of a model: some of its layers' products, with weights of one byte repeated, timed by ggml itself, type by type.

Attention over the context, and what llama.cpp does between products, are left out: they are little beside the weights of a model that is worth offloading.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import POINTER, Structure, c_bool, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

from .._abi import function
from ..gguf.model_index import ModelIndex, TensorSpan
from ..memory import available
from ..threads import bound_pool

_F32 = 0
_BYTES = 96 << 20  # of weights, at least
_MOST_BYTES = 512 << 20
_NODES = 1500  # of a graph, which has room for 2048
_ORDINARY = 0x38  # a byte of which F32, F16, BF16 and the scales of all types are ordinary numbers: zeros are slow where a scale is tiny, as MXFP4's then is

_Product = tuple[int, int, int, int]  # type, columns, rows, bytes of a matrix


class _InitParams(Structure):
    """struct ggml_init_params"""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


# declared as in ggml.h, ggml-backend.h and ggml-cpu.h
_init = function("ggml_init", c_void_p, _InitParams)
_free = function("ggml_free", None, c_void_p)
_new_tensor = function("ggml_new_tensor", c_void_p, c_void_p, c_int, c_int, POINTER(c_int64))
_mul_mat = function("ggml_mul_mat", c_void_p, c_void_p, c_void_p, c_void_p)
_new_graph = function("ggml_new_graph", c_void_p, c_void_p)
_expand = function("ggml_build_forward_expand", None, c_void_p, c_void_p)
_alloc = function("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p, c_void_p)
_adopt_dense = function("moeoff_adopt_dense", None, c_void_p)
_clear = function("ggml_backend_buffer_clear", None, c_void_p, c_uint8)
_buffer_free = function("ggml_backend_buffer_free", None, c_void_p)
_cpu_buffer_type = function("ggml_backend_cpu_buffer_type", c_void_p)
_cpu_init = function("ggml_backend_cpu_init", c_void_p)
_backend_free = function("ggml_backend_free", None, c_void_p)
_set_n_threads = function("ggml_backend_cpu_set_n_threads", None, c_void_p, c_int)
_set_threadpool = function("ggml_backend_cpu_set_threadpool", None, c_void_p, c_void_p)
_compute = function("ggml_backend_graph_compute", c_int, c_void_p, c_void_p)


def _uncached_bytes() -> int:
    """Of weights, so many that no cache of the CPU holds them, as none holds a model's."""
    try:
        cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        largest = int(cache.removesuffix("K")) << 10
    except (OSError, ValueError):  # there is none, or it is not said
        largest = 0
    return min(max(_BYTES, largest), _MOST_BYTES, max(_BYTES, available() // 8))


def token_seconds(model_index: ModelIndex, n_threads: int, seconds: float = 1.0) -> float:
    """Seconds of computing that a token takes, once everything is in memory: of each type of weights the shortest of what was tried for `seconds`, by its bytes."""
    products = _products(model_index)
    every, timed = sum(nbytes for *_, nbytes in products), _uncached_bytes()
    with ExitStack() as stack:
        backend = _cpu_init()
        stack.callback(_backend_free, backend)
        _set_n_threads(backend, n_threads)
        if (pool := stack.enter_context(bound_pool(n_threads))) is not None:  # as a run has them, next to other programs, too
            _set_threadpool(backend, pool)
            stack.callback(_set_threadpool, backend, None)
        graphs: list[int] = []
        wholes: list[float] = []  # of each type, times what its graph has
        for kind in {kind for kind, *_ in products}:
            of_kind = [product for product in products if product[0] == kind]
            total = sum(nbytes for *_, nbytes in of_kind)
            graph, shown = _graph(stack, of_kind, timed * total // every)
            graphs.append(graph)
            wholes.append(total / shown)
        times: list[list[float]] = []  # of the types in turn, so that none finds its weights in a cache
        started = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - started < seconds:
            times.append([_seconds(backend, graph) for graph in graphs])
    return float(sum(min(tried) * whole for tried, whole in zip(zip(*times), wholes)))


def _graph(stack: ExitStack, products: Sequence[_Product], nbytes: int) -> tuple[int, int]:
    """A graph of the first of these products, about as many bytes of weights, and how many these are. At least one."""
    context = _init(_InitParams((4 * _NODES + 64) * 512 + (1 << 20), None, True))
    stack.callback(_free, context)
    graph, shown = _new_graph(context), 0
    for kind, n_cols, n_rows, size in products[:_NODES]:
        if shown and shown + size > nbytes:
            break
        weights, column = (_new_tensor(context, of, 2, (c_int64 * 2)(n_cols, n)) for of, n in ((kind, n_rows), (_F32, 1)))
        _expand(graph, _mul_mat(context, weights, column))
        shown += size
    buffer = _alloc(context, _cpu_buffer_type())
    stack.callback(_buffer_free, buffer)
    _adopt_dense(buffer)
    _clear(buffer, _ORDINARY)
    return graph, shown


def _seconds(backend: int, graph: int) -> float:
    begun = time.perf_counter()
    _compute(backend, graph)
    return time.perf_counter() - begun


def _products(model_index: ModelIndex) -> list[_Product]:
    """The matrices that a token is multiplied with, layer by layer from the middle of the model, whose first layers may be of another kind."""

    def matrices(span: TensorSpan) -> list[_Product]:
        n_experts = max(span.shape[2], 1) if len(span.shape) > 2 else 1
        used = min(model_index.n_expert_used, n_experts) if span.name in model_index.experts else n_experts
        return [(span.type, span.shape[0], max(span.shape[1], 1), span.nbytes // n_experts)] * used

    lookup = model_index.lookup_embedding
    spans = [span for span in (*model_index.dense.values(), *model_index.experts.values()) if span is not lookup and len(span.shape) > 1 and span.shape[1] > 1]
    layers: dict[str, list[TensorSpan]] = {}
    for span in spans:
        layers.setdefault(span.name.split(".")[1] if span.name.startswith("blk.") else "", []).append(span)
    output = layers.pop("", [])
    from_the_middle = [layer for _, layer in sorted(enumerate(layers.values()), key=lambda numbered: abs(numbered[0] - len(layers) // 2))]
    out = [product for layer in from_the_middle for span in layer for product in matrices(span)]
    return out + [product for span in output for product in matrices(span)]
