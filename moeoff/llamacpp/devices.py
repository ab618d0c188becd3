"""GPUs and other devices that llama.cpp can compute on, without the CPU: their names and memory."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass

from . import _abi as ggml
from .llama import find_devices

_CPU = 0  # enum ggml_backend_dev_type
_WITHOUT_DEVICES = ("CPU", "BLAS")


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
        ggml.dev_memory(self.handle, byref(free), byref(total))
        return free.value, total.value


def backends() -> list[str]:
    """Names of the backends in this build that have devices of their own, as "CUDA" or "Vulkan", whether or not there is such a device."""
    find_devices()
    names = [ggml.reg_name(ggml.reg_get(i)).decode() for i in range(ggml.reg_count())]
    return [name for name in names if name not in _WITHOUT_DEVICES]


def devices() -> list[Device]:
    """All but the CPU, in llama.cpp's order."""
    find_devices()
    handles = [ggml.dev_get(i) for i in range(ggml.dev_count())]
    return [Device(h, ggml.dev_name(h).decode(), ggml.dev_description(h).decode("utf-8", "replace")) for h in handles if ggml.dev_type(h) != _CPU]


def why_none() -> str:
    """Of a build with backends that found no device, in words: which, and what is in the way."""
    names = backends()
    reason = find_devices()
    software = "; Vulkan's software driver has to be named: GGML_VK_VISIBLE_DEVICES=0" if "Vulkan" in names else ""
    return f"this build has {' and '.join(names)}, and no driver offers a device{f' ({reason})' if reason else ''}{software}"


def buffer_types() -> dict[str, int]:
    """ggml_backend_buffer_type_t of each device, by the names that llama.cpp's --override-tensor takes: "CPU", "CUDA0", ..."""
    find_devices()
    types = [ggml.dev_buffer_type(ggml.dev_get(i)) for i in range(ggml.dev_count())]
    return {ggml.buft_name(kind).decode(): kind for kind in types if kind}
