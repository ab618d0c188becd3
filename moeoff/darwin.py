"""Memory on macOS, which has neither /proc nor cgroups: what the system's own library says of this process and of the machine.

Written from the headers of the system (mach/task_info.h, sys/sysctl.h) and tested against a library with their interface; no Mac has run it.
"""

from __future__ import annotations

import ctypes
import functools
import resource

from .errors import OptionError

LIBRARY = "/usr/lib/libSystem.B.dylib"
_MACH_TASK_BASIC_INFO = 20


class _TaskBasicInfo(ctypes.Structure):
    """struct mach_task_basic_info, in which resident_size stands second."""

    _fields_ = [
        ("virtual_size", ctypes.c_uint64), ("resident_size", ctypes.c_uint64), ("resident_size_max", ctypes.c_uint64),
        ("user_time", ctypes.c_int32 * 2), ("system_time", ctypes.c_int32 * 2), ("policy", ctypes.c_int32), ("suspend_count", ctypes.c_int32),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY)


def _sysctl(name: str, kind: type[ctypes.c_int] | type[ctypes.c_uint64]) -> int:
    """int sysctlbyname(const char * name, void * old, size_t * old_size, void * new, size_t new_size);"""
    value, size = kind(), ctypes.c_size_t(ctypes.sizeof(kind))
    if _library().sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OptionError("this system does not say how much memory is free: state a budget")
    return int(value.value)


def available() -> int:
    """Bytes that the system could still give out: its memory, and the percentage of it that it calls free."""
    return _sysctl("hw.memsize", ctypes.c_uint64) * _sysctl("kern.memorystatus_level", ctypes.c_int) // 100


def rss() -> int:
    """Resident bytes of this process: kern_return_t task_info(task_t, task_flavor_t, task_info_t, mach_msg_type_number_t * count);"""
    library, info = _library(), _TaskBasicInfo()
    count = ctypes.c_uint32(ctypes.sizeof(info) // 4)
    task = ctypes.c_uint32.in_dll(library, "mach_task_self_")
    if library.task_info(task, ctypes.c_uint32(_MACH_TASK_BASIC_INFO), ctypes.byref(info), ctypes.byref(count)):
        return peak_rss()
    return int(info.resident_size)


def peak_rss() -> int:
    """The most that was ever resident: ru_maxrss, which is in bytes here, and in KiB elsewhere."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
