"""As much of ggml's C interface as the kernel tests need: contexts of tensors, and
graphs on the CPU backend.

Objects are plain addresses; `Context` and `Backend` own what they make. Nothing here
knows of the expert buffer.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)

import numpy as np

from moeoff.errors import ModelError
from moeoff.gguf.quantize import needs_imatrix, quantize, row_bytes, type_name
from moeoff.llamacpp.native import lib

F32, F16, I32 = 0, 1, 26  # enum ggml_type
SUCCESS, ABORTED = 0, 1  # enum ggml_status


def _function(name: str, result, *arguments):
    # of its own: the library's attribute has the types that the package gave it
    return ctypes.CFUNCTYPE(result, *arguments)((name, lib))


class _InitParams(Structure):
    """struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };"""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class _Plan(Structure):
    """struct ggml_cplan"""

    _fields_ = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    ]


class _CpuTraits(Structure):
    """struct ggml_type_traits_cpu"""

    _fields_ = [
        ("from_float", c_void_p),
        ("vec_dot", c_void_p),
        ("vec_dot_type", c_int),
        ("nrows", c_int64),
    ]


class Tensor(Structure):
    """struct ggml_tensor, to look at a graph's nodes"""


Tensor._fields_ = [
    ("type", c_int),
    ("buffer", c_void_p),
    ("ne", c_int64 * 4),
    ("nb", c_size_t * 4),
    ("op", c_int),
    ("op_params", c_int32 * 16),
    ("flags", c_int32),
    ("src", POINTER(Tensor) * 10),
    ("view_src", POINTER(Tensor)),
    ("view_offs", c_size_t),
    ("data", c_void_p),
    ("name", c_char * 64),
    ("extra", c_void_p),
    ("padding", c_char * 8),
]


# struct ggml_context * ggml_init(struct ggml_init_params params);
_init = _function("ggml_init", c_void_p, _InitParams)
# void ggml_free(struct ggml_context * ctx);
_free = _function("ggml_free", None, c_void_p)
# size_t ggml_tensor_overhead(void);
_tensor_overhead = _function("ggml_tensor_overhead", c_size_t)
# const char * ggml_op_desc(const struct ggml_tensor * t);
op_name = _function("ggml_op_desc", c_char_p, POINTER(Tensor))
# size_t ggml_graph_overhead(void);
_graph_overhead = _function("ggml_graph_overhead", c_size_t)
# struct ggml_tensor * ggml_new_tensor(struct ggml_context * ctx, enum ggml_type type,
# int n_dims, const int64_t * ne);
_new_tensor = _function("ggml_new_tensor", c_void_p, c_void_p, c_int, c_int, POINTER(c_int64))
# struct ggml_tensor * ggml_set_name(struct ggml_tensor * tensor, const char * name);
_set_name = _function("ggml_set_name", c_void_p, c_void_p, c_char_p)
# size_t ggml_nbytes(const struct ggml_tensor * tensor);
_nbytes = _function("ggml_nbytes", c_size_t, c_void_p)
# struct ggml_tensor * ggml_view_2d(ctx, struct ggml_tensor * a, int64_t ne0, int64_t
# ne1, size_t nb1, size_t offset);
_view_2d = _function(
    "ggml_view_2d", c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t
)
# struct ggml_tensor * ggml_view_3d(ctx, a, int64_t ne0, int64_t ne1, int64_t ne2,
# size_t nb1, size_t nb2, size_t offset);
_view_3d = _function(
    "ggml_view_3d",
    c_void_p,
    c_void_p,
    c_void_p,
    c_int64,
    c_int64,
    c_int64,
    c_size_t,
    c_size_t,
    c_size_t,
)
# struct ggml_tensor * ggml_mul_mat_id(ctx, struct ggml_tensor * as, struct ggml_tensor
# * b, struct ggml_tensor * ids);
_mul_mat_id = _function("ggml_mul_mat_id", c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
# struct ggml_tensor * ggml_mul_mat(ctx, struct ggml_tensor * a, struct ggml_tensor *
# b);
_mul_mat = _function("ggml_mul_mat", c_void_p, c_void_p, c_void_p, c_void_p)
# struct ggml_tensor * ggml_permute(ctx, struct ggml_tensor * a, int axis0, int axis1,
# int axis2, int axis3);
_permute = _function("ggml_permute", c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int)
# struct ggml_tensor * ggml_soft_max_ext(ctx, struct ggml_tensor * a, struct ggml_tensor
# * mask, float scale, float max_bias);
_soft_max_ext = _function(
    "ggml_soft_max_ext", c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float
)
# struct ggml_tensor * ggml_flash_attn_ext(ctx, q, k, v, mask, float scale, float
# max_bias, float logit_softcap);
_flash_attn_ext = _function("ggml_flash_attn_ext", c_void_p, *[c_void_p] * 5, *[c_float] * 3)
# void ggml_flash_attn_ext_add_sinks(struct ggml_tensor * a, struct ggml_tensor *
# sinks);
_add_sinks = _function("ggml_flash_attn_ext_add_sinks", None, c_void_p, c_void_p)
# struct ggml_tensor * ggml_cast(ctx, struct ggml_tensor * a, enum ggml_type type);
_cast = _function("ggml_cast", c_void_p, c_void_p, c_void_p, c_int)
# struct ggml_tensor * ggml_get_rows(ctx, struct ggml_tensor * a, struct ggml_tensor *
# b);
_get_rows = _function("ggml_get_rows", c_void_p, c_void_p, c_void_p, c_void_p)
# struct ggml_tensor * ggml_custom_4d(ctx, enum ggml_type type, int64_t ne0, int64_t
# ne1, int64_t ne2, int64_t ne3, struct ggml_tensor ** args, int n_args,
# ggml_custom_op_t fun, int n_tasks, void * userdata);
_custom_4d = _function(
    "ggml_custom_4d",
    c_void_p,
    c_void_p,
    c_int,
    c_int64,
    c_int64,
    c_int64,
    c_int64,
    POINTER(c_void_p),
    c_int,
    c_void_p,
    c_int,
    c_void_p,
)
# void * moeoff_gate_of(const struct ggml_tensor * tensor);
_gate_of = _function("moeoff_gate_of", c_void_p, c_void_p)
# struct ggml_cgraph * ggml_new_graph(struct ggml_context * ctx);
_new_graph = _function("ggml_new_graph", c_void_p, c_void_p)
# void ggml_build_forward_expand(struct ggml_cgraph * cgraph, struct ggml_tensor *
# tensor);
_build_forward_expand = _function("ggml_build_forward_expand", None, c_void_p, c_void_p)
# struct ggml_cplan ggml_graph_plan(const struct ggml_cgraph * cgraph, int n_threads,
# struct ggml_threadpool * threadpool);
_graph_plan = _function("ggml_graph_plan", _Plan, c_void_p, c_int, c_void_p)
# ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ctx,
# ggml_backend_buffer_type_t buft);
_alloc_ctx_tensors = _function(
    "ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p, c_void_p
)
# ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void * ptr, size_t size);
_buffer_from_ptr = _function("ggml_backend_cpu_buffer_from_ptr", c_void_p, c_void_p, c_size_t)
# enum ggml_status ggml_backend_tensor_alloc(ggml_backend_buffer_t buffer, struct
# ggml_tensor * tensor, void * addr);
_tensor_alloc = _function("ggml_backend_tensor_alloc", c_int, c_void_p, c_void_p, c_void_p)
# void moeoff_adopt_dense(ggml_backend_buffer_t buffer);
_adopt_dense = _function("moeoff_adopt_dense", None, c_void_p)
# void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
_buffer_free = _function("ggml_backend_buffer_free", None, c_void_p)
# ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
cpu_buffer_type = _function("ggml_backend_cpu_buffer_type", c_void_p)
# void ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data, size_t
# offset, size_t size);
_tensor_set = _function("ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)
# void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t
# offset, size_t size);
_tensor_get = _function("ggml_backend_tensor_get", None, c_void_p, c_void_p, c_size_t, c_size_t)
# ggml_backend_t ggml_backend_cpu_init(void);
_cpu_init = _function("ggml_backend_cpu_init", c_void_p)
# void ggml_backend_free(ggml_backend_t backend);
_backend_free = _function("ggml_backend_free", None, c_void_p)
# void ggml_backend_cpu_set_n_threads(ggml_backend_t backend_cpu, int n_threads);
_set_n_threads = _function("ggml_backend_cpu_set_n_threads", None, c_void_p, c_int)
# void ggml_backend_cpu_set_abort_callback(ggml_backend_t backend_cpu,
# ggml_abort_callback abort_callback, void * data);
_set_abort_callback = _function(
    "ggml_backend_cpu_set_abort_callback", None, c_void_p, c_void_p, c_void_p
)
# enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph
# * cgraph);
_graph_compute = _function("ggml_backend_graph_compute", c_int, c_void_p, c_void_p)
# const struct ggml_type_traits_cpu * ggml_get_type_traits_cpu(enum ggml_type type);
_cpu_traits = _function("ggml_get_type_traits_cpu", POINTER(_CpuTraits), c_int)

# void (*ggml_from_float_t)(const float * x, void * y, int64_t k);
_FromFloat = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
# void (*ggml_vec_dot_t)(int n, float * s, size_t bs, const void * x, size_t bx, const
# void * y, size_t by, int nrc);
_VecDot = ctypes.CFUNCTYPE(
    None, c_int, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_int
)
_RESET = 10  # of the functions that struct ggml_backend_buffer begins with

_OBJECT_SIZE = 32  # struct ggml_object, which ggml counts with each tensor
assert ctypes.sizeof(Tensor) + _OBJECT_SIZE == _tensor_overhead(), (
    "struct ggml_tensor has changed: see ggml.h"
)


def quantizable_types() -> dict[str, int]:
    """Every type of this build that `moeoff.gguf.quantize` can write, by name."""
    types = {}
    for number in range(256):
        try:
            name = type_name(number)
            quantized(np.empty((1, 0, 256), np.float32), number)
        except ModelError:
            continue
        types[name] = number
    return types


def has_cpu_kernel(type: int) -> bool:
    """Return whether ggml-cpu multiplies rows of this type."""
    return bool(_cpu_traits(type).contents.vec_dot)


def activation_type(type: int) -> int:
    """The type that ggml-cpu converts the other operand's rows to."""
    return _cpu_traits(type).contents.vec_dot_type


def from_float(type: int, column: np.ndarray) -> np.ndarray:
    """float32 [n] -> the column as ggml-cpu converts it for its products."""
    out = np.zeros(row_bytes(type, len(column)), np.uint8)
    _FromFloat(_cpu_traits(type).contents.from_float)(
        column.ctypes.data, out.ctypes.data, len(column)
    )
    return out


def vec_dot(type: int, n: int, out: int, row: int, column: int) -> None:
    """ggml-cpu's own product of a row of n weights with a converted column, written to
    out; all three are addresses.
    """
    _VecDot(_cpu_traits(type).contents.vec_dot)(n, out, 0, row, 0, column, 0, 1)


def is_dense(tensor: int) -> bool:
    """Return whether the tensor lies in a buffer of a model with an expert buffer."""
    buffer = ctypes.cast(tensor, POINTER(Tensor)).contents.buffer
    return ctypes.cast(buffer, POINTER(c_void_p))[_RESET] is not None


# ggml makes tables first, in up to half a minute
SLOW_TO_QUANTIZE = ("IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")


def random_experts(type: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bytes of random weights: shape [n_expert, n_rows, n_cols] -> uint8 [n_expert,
    bytes of one expert].
    """
    name = type_name(type)
    if name not in SLOW_TO_QUANTIZE:
        return quantized(rng.standard_normal(shape, np.float32), type)
    blocks = rng.integers(
        0, 256, (shape[0], shape[1] * shape[2] // 256, row_bytes(type, 256)), np.uint8
    )
    if name == "IQ1_M":  # a scale of 1/64, in the upper halves of four bytes
        blocks[..., 49::2] = blocks[..., 49::2] & 0x0F | np.array([0, 0, 0x40, 0x20], np.uint8)
    else:
        blocks[..., :2] = 0, 0x24
    return blocks.reshape(shape[0], -1)


def quantized(weights: np.ndarray, type: int) -> np.ndarray:
    """f32 [n_expert, n_rows, n_cols] -> uint8 [n_expert, bytes of one expert]."""
    imatrix = np.ones(weights.shape[-1], np.float32) if needs_imatrix(type) else None
    return quantize(weights.reshape(-1, weights.shape[-1]), type, imatrix).reshape(len(weights), -1)


class Context:
    """Tensors that are allocated together, and the graphs that end in them."""

    def __init__(self, n_tensors: int = 16, n_graphs: int = 0):
        size = n_tensors * _tensor_overhead() + n_graphs * _graph_overhead()
        self._handle = _init(_InitParams(mem_size=size, mem_buffer=None, no_alloc=True))
        self._buffer = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def close(self) -> None:
        if self._buffer:
            _buffer_free(self._buffer)
        if self._handle:
            _free(self._handle)
        self._buffer = self._handle = None

    def tensor(self, type: int, *ne: int, name: str = "") -> int:
        """A new tensor; ne counts from the row length on, as in ggml."""
        tensor = _new_tensor(self._handle, type, len(ne), (c_int64 * len(ne))(*ne))
        _set_name(tensor, name.encode())
        return tensor

    def view_2d(self, tensor: int, ne0: int, ne1: int, nb1: int, offset: int = 0) -> int:
        return _view_2d(self._handle, tensor, ne0, ne1, nb1, offset)

    def view_3d(
        self, tensor: int, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int = 0
    ) -> int:
        return _view_3d(self._handle, tensor, ne0, ne1, ne2, nb1, nb2, offset)

    def mul_mat_id(self, experts: int, rows: int, ids: int) -> int:
        return _mul_mat_id(self._handle, experts, rows, ids)

    def mul_mat(self, weights: int, columns: int) -> int:
        return _mul_mat(self._handle, weights, columns)

    def soft_max(self, scores: int, mask: int | None, scale: float) -> int:
        return _soft_max_ext(self._handle, scores, mask, scale, 0)

    def flash_attn(
        self,
        q: int,
        k: int,
        v: int,
        mask: int | None,
        sinks: int | None = None,
        *,
        scale: float,
        max_bias: float = 0,
        softcap: float = 0,
    ) -> int:
        out = _flash_attn_ext(self._handle, q, k, v, mask, scale, max_bias, softcap)
        _add_sinks(out, sinks)
        return out

    def permute(self, tensor: int, *axes: int) -> int:
        return _permute(self._handle, tensor, *axes)

    def cast(self, tensor: int, type: int) -> int:
        return _cast(self._handle, tensor, type)

    def get_rows(self, rows: int, ids: int) -> int:
        return _get_rows(self._handle, rows, ids)

    def gate_node(self, experts: int, ids: int, weights: int) -> int:
        """The node by which llama.cpp's MoE block tells the expert buffer what was
        chosen; experts is allocated already.
        """
        args = (c_void_p * 2)(ids, weights)
        function = ctypes.cast(lib.moeoff_gate_node, c_void_p)
        return _custom_4d(self._handle, I32, 1, 1, 1, 1, args, 2, function, 1, _gate_of(experts))

    def graph(self, *outputs: int) -> int:
        graph = _new_graph(self._handle)
        for tensor in outputs:
            _build_forward_expand(graph, tensor)
        return graph

    def allocate(self, buffer_type: int) -> None:
        self._buffer = _alloc_ctx_tensors(self._handle, buffer_type)
        assert self._buffer, "the buffer type gave no buffer"

    def place(self, tensor: int, memory: np.ndarray, offset: int) -> None:
        """Into memory that outlives this, instead of `allocate`."""
        self._buffer = _buffer_from_ptr(memory.ctypes.data, memory.nbytes)
        assert _tensor_alloc(self._buffer, tensor, memory.ctypes.data + offset) == SUCCESS

    def adopt(self) -> None:
        """Marks what is allocated as dense weights of the model that is being loaded."""
        _adopt_dense(self._buffer)


def write(tensor: int, values: np.ndarray) -> None:
    """All of a tensor's bytes."""
    values = np.ascontiguousarray(values)
    assert values.nbytes == _nbytes(tensor)
    _tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


def read(tensor: int, shape: tuple[int, ...]) -> np.ndarray:
    """The bits of an F32 tensor as uint32 of a shape, so that equal means equal, NaN
    and signed zero included.
    """
    out = np.empty(shape, np.uint32)
    assert out.nbytes == _nbytes(tensor)
    _tensor_get(tensor, out.ctypes.data, 0, out.nbytes)
    return out


def matrix(tensor: Tensor) -> np.ndarray:
    """A copy of a two-dimensional F32 or I32 tensor in host memory, [ne1, ne0]."""
    return cube(tensor)[0]


def cube(tensor: Tensor) -> np.ndarray:
    """A copy of an F32 or I32 tensor of up to three dimensions in host memory, [ne2,
    ne1, ne0].
    """
    assert tensor.type in (F32, I32) and tensor.nb[0] == 4 and tensor.ne[3] == 1
    n_cols, n_rows, n_planes = tensor.ne[:3]
    places = [
        tensor.data + k * tensor.nb[2] + i * tensor.nb[1]
        for k in range(n_planes)
        for i in range(n_rows)
    ]
    data = b"".join(ctypes.string_at(place, 4 * n_cols) for place in places)
    return np.frombuffer(data, np.float32 if tensor.type == F32 else np.int32).reshape(
        n_planes, n_rows, n_cols
    )


def work_size(graph: int, n_threads: int) -> int:
    """Bytes of the work area that ggml plans for a graph on that many threads."""
    return _graph_plan(graph, n_threads, None).work_size


class Backend:
    """The CPU backend."""

    def __init__(self):
        self._handle = _cpu_init()

    def close(self) -> None:
        _backend_free(self._handle)

    def set_abort_callback(self, callback, data: int | None) -> None:
        """callback: a ctypes function kept alive by the caller, or None."""
        _set_abort_callback(
            self._handle, ctypes.cast(callback, c_void_p) if callback else None, data
        )

    def compute(self, graph: int, n_threads: int = 2) -> int:
        """Runs a graph; returns its ggml_status."""
        _set_n_threads(self._handle, n_threads)
        return _graph_compute(self._handle, graph)
