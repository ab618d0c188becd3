"""moeoff.Llama that shows every node of its graphs while they are computed: for benchmarks and tests, it is slow."""

import ctypes

import llama_cpp
import numpy as np

import moeoff.llamacpp.native

_name, _bytes, _get = (getattr(moeoff.llamacpp.native.lib, name) for name in ("ggml_get_name", "ggml_nbytes", "ggml_backend_tensor_get"))
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
_bytes.restype, _bytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
_get.restype, _get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]


def node_name(node: int) -> str:
    return _name(node).decode()


def node_values(node: int) -> np.ndarray:
    """[n] float32: of a node of that type, once it has been computed."""
    data = np.empty(_bytes(node) // 4, np.float32)
    _get(node, data.ctypes.data, 0, data.nbytes)
    return data


class WithCallback(moeoff.Llama):
    """Calls `_watch(node, ask, user)` as llama.cpp's cb_eval does: with ask, whether the node's data is wanted; then with the data."""

    def __init__(self, *args, **kwargs):
        self._on_node = llama_cpp.ggml_backend_sched_eval_callback(self._watch)
        super().__init__(*args, **kwargs)

    def _before_load(self) -> None:
        super()._before_load()
        self.context_params.cb_eval = self._on_node

    def _watch(self, node: int, ask: bool, user: object) -> bool:
        raise NotImplementedError
