"""llama.cpp's own GGUF parser, through its C interface: what a file's header says, or that it is refused."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass

from llama_cpp import _logger, llama_cpp

from moeoff.binding import lib


class _InitParams(Structure):
    """struct gguf_init_params { bool no_alloc; struct ggml_context ** ctx; };"""

    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


def _function(name: str, result, *arguments):
    function = getattr(lib, "gguf_" + name)
    function.restype = result
    function.argtypes = arguments
    return function


_init_from_file = _function("init_from_file", c_void_p, c_char_p, _InitParams)
_free = _function("free", None, c_void_p)
_data_offset = _function("get_data_offset", c_size_t, c_void_p)
_n_kv = _function("get_n_kv", c_int64, c_void_p)
_key = _function("get_key", c_char_p, c_void_p, c_int64)
_kv_type = _function("get_kv_type", c_int, c_void_p, c_int64)
_val_data = _function("get_val_data", c_void_p, c_void_p, c_int64)
_val_str = _function("get_val_str", c_char_p, c_void_p, c_int64)
_arr_type = _function("get_arr_type", c_int, c_void_p, c_int64)
_arr_n = _function("get_arr_n", c_size_t, c_void_p, c_int64)
_n_tensors = _function("get_n_tensors", c_int64, c_void_p)
_tensor_name = _function("get_tensor_name", c_char_p, c_void_p, c_int64)
_tensor_offset = _function("get_tensor_offset", c_size_t, c_void_p, c_int64)
_tensor_type = _function("get_tensor_type", c_int, c_void_p, c_int64)
_tensor_size = _function("get_tensor_size", c_size_t, c_void_p, c_int64)
_tensor_ne = _function("get_tensor_ne", POINTER(c_int64), c_void_p, c_int64)

_silence = llama_cpp.llama_log_callback(lambda *_: None)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    """values: type and bytes of a scalar or string, type of elements and their number of an array, by key. tensors: type,
    shape with the row length first, offset in the file and bytes, by name. Names and keys end at their first zero."""

    values: dict[bytes, tuple]
    tensors: dict[bytes, tuple[int, tuple[int, ...], int, int]]


def read_header(path: str | os.PathLike) -> Header | None:
    """None: refused. What the parser says about it is not shown."""
    llama_cpp.llama_log_set(_silence, None)
    try:
        handle = _init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    finally:
        llama_cpp.llama_log_set(_logger.llama_log_callback, None)
    if not handle:
        return None
    try:
        values = {_key(handle, i): _value(handle, i) for i in range(_n_kv(handle))}
        begin = _data_offset(handle)
        tensors = {
            _tensor_name(handle, i): (
                _tensor_type(handle, i),
                tuple(_tensor_ne(handle, i)[:4]),
                begin + _tensor_offset(handle, i),
                _tensor_size(handle, i),
            )
            for i in range(_n_tensors(handle))
        }
        return Header(values, tensors)
    finally:
        _free(handle)


def _value(handle: int, i: int) -> tuple:
    kind = _kv_type(handle, i)
    if kind == _ARRAY:
        return kind, _arr_type(handle, i), _arr_n(handle, i)
    if kind == _STRING:
        return kind, _val_str(handle, i)
    return kind, ctypes.string_at(_val_data(handle, i), _SIZES[kind])
