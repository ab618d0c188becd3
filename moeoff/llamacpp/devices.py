"""Names and memory of llama.cpp's devices other than the CPU."""

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
    """A device.

    Attributes:
        handle: ggml_backend_dev_t.
        name: Name in llama.cpp's options: "CUDA0", "Vulkan0".
        description: Name of the hardware.
    """

    handle: int
    name: str
    description: str

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total bytes now. Some drivers report all memory as free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.dev_memory(self.handle, byref(free), byref(total))
        return free.value, total.value


def backends() -> list[str]:
    """Return this build's backends for devices, e.g. "CUDA", with or without one."""
    find_devices()
    names = [ggml.reg_name(ggml.reg_get(i)).decode() for i in range(ggml.reg_count())]
    return [name for name in names if name not in _WITHOUT_DEVICES]


def devices() -> list[Device]:
    """Return all devices but the CPU, in llama.cpp's order."""
    find_devices()
    handles = [ggml.dev_get(i) for i in range(ggml.dev_count())]
    return [
        Device(h, ggml.dev_name(h).decode(), ggml.dev_description(h).decode("utf-8", "replace"))
        for h in handles
        if ggml.dev_type(h) != _CPU
    ]


def why_none() -> str:
    """Return why a build with device backends has found no device."""
    names = backends()
    reason = f" ({error})" if (error := find_devices()) else ""
    software = (
        "; GGML_VK_VISIBLE_DEVICES=0 enables Vulkan's software driver" if "Vulkan" in names else ""
    )
    return f"this build has {' and '.join(names)}, but no driver offers a device{reason}{software}"


def buffer_types() -> dict[str, int]:
    """Return devices' ggml_backend_buffer_type_t by name in --override-tensor."""
    find_devices()
    types = [ggml.dev_buffer_type(ggml.dev_get(i)) for i in range(ggml.dev_count())]
    return {ggml.buft_name(kind).decode(): kind for kind in types if kind}
