"""GPUs and other devices that llama.cpp can compute on, without the CPU: their names and memory."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass

from .llama import c_function, find_devices

__all__ = ["Device", "backends", "buffer_types", "devices", "why_none"]

_CPU = 0  # enum ggml_backend_dev_type
_WITHOUT_DEVICES = ("CPU", "BLAS")


# of ggml-backend.h
_count = c_function("ggml_backend_dev_count", c_size_t)
_get = c_function("ggml_backend_dev_get", c_void_p, c_size_t)
_type = c_function("ggml_backend_dev_type", c_int, c_void_p)
_name = c_function("ggml_backend_dev_name", c_char_p, c_void_p)
_description = c_function("ggml_backend_dev_description", c_char_p, c_void_p)
_reg_count = c_function("ggml_backend_reg_count", c_size_t)
_reg_get = c_function("ggml_backend_reg_get", c_void_p, c_size_t)
_reg_name = c_function("ggml_backend_reg_name", c_char_p, c_void_p)
_memory = c_function("ggml_backend_dev_memory", None, c_void_p, POINTER(c_size_t), POINTER(c_size_t))
_buffer_type = c_function("ggml_backend_dev_buffer_type", c_void_p, c_void_p)
_buffer_name = c_function("ggml_backend_buft_name", c_char_p, c_void_p)


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        handle: ggml_backend_dev_t.
        name: as llama.cpp's options take it: "CUDA0", "Vulkan0".
        description: of the hardware.
    """

    handle: int
    name: str
    description: str

    @property
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes now, as its driver tells; a driver that does not tell what is free says that all of it is."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _memory(self.handle, byref(free), byref(total))
        return free.value, total.value


def backends() -> list[str]:
    """Names of the backends in this build that have devices of their own, as "CUDA" or "Vulkan", whether or not there is such a device."""
    find_devices()
    names = [_reg_name(_reg_get(i)).decode() for i in range(_reg_count())]
    return [name for name in names if name not in _WITHOUT_DEVICES]


def devices() -> list[Device]:
    """All but the CPU, in llama.cpp's order."""
    find_devices()
    handles = [_get(i) for i in range(_count())]
    return [Device(h, _name(h).decode(), _description(h).decode("utf-8", "replace")) for h in handles if _type(h) != _CPU]


def why_none() -> str:
    """Of a build with backends that found no device, in words: which, and what is in the way."""
    names = backends()
    reason = find_devices()
    software = "; Vulkan's software driver has to be named: GGML_VK_VISIBLE_DEVICES=0" if "Vulkan" in names else ""
    return f"this build has {' and '.join(names)}, and no driver offers a device{f' ({reason})' if reason else ''}{software}"


def buffer_types() -> dict[str, int]:
    """ggml_backend_buffer_type_t of each device, by the names that llama.cpp's --override-tensor takes: "CPU", "CUDA0", ..."""
    find_devices()
    types = [_buffer_type(_get(i)) for i in range(_count())]
    return {_buffer_name(kind).decode(): kind for kind in types if kind}
