"""Binding of compute threads to cores while llama.cpp computes a batch.

Beside other busy processes the kernel keeps two compute threads on one core
(docs/internals/design.md). Threads are bound only if there is one for each core that
the process may use: with fewer the kernel finds idle cores better. llama.cpp's thread
pools set the masks. The computing thread's mask is restored after each batch, or
callbacks would pass it on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from ctypes import c_int32

from ..system.files import machine_wide_file
from ._abi import attach_threadpool, detach_threadpool, threadpool_free, threadpool_new
from .llama import api, lib

MAX_CORES = 512  # GGML_MAX_N_THREADS, the length of llama.cpp's masks
USERS_OWN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_FLOCK = "hhqqi4x"  # struct flock
_OMP_PAUSE_SOFT = 1


def why_not(environ: Mapping[str, str] = os.environ, features: str | None = None) -> str | None:
    """Return why compute threads are never bound in this process, or None.

    `features` are llama.cpp's, by default those of the build.
    """
    if not hasattr(os, "sched_setaffinity") or not hasattr(fcntl, "F_OFD_SETLK"):
        return "this system cannot bind threads"
    if " OPENMP = 1 " not in (features or api.llama_print_system_info().decode()):
        return "llama.cpp was built without OpenMP"  # its pools would start threads of their own
    return next((f"{name}={environ[name]}" for name in USERS_OWN if name in environ), None)


def one_each(n_threads: int, cores: Iterable[int]) -> bool:
    """Return True if `n_threads` threads can be bound, one to each core."""
    cores = set(cores)
    return n_threads > 1 and n_threads == len(cores) and max(cores) < MAX_CORES


def runs(cores: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first core, number of cores) of each run of consecutive cores."""
    out: list[tuple[int, int]] = []
    for core in sorted(cores):
        if out and core == sum(out[-1]):
            out[-1] = (out[-1][0], out[-1][1] + 1)
        else:
            out.append((core, 1))
    return out


class CoreClaims:
    """Claims of cores between models: a locked byte in a file for each core.

    The locks belong to the open file, and end with the process.

    Args:
        path: File of the locks. None: every claim fails.
    """

    def __init__(self, path: str | None):
        self._fd = -1
        if path is not None:
            with contextlib.suppress(OSError):
                self._fd = _open_for_all(path)

    def claim(self, runs: Iterable[tuple[int, int]]) -> bool:
        """Claim all cores of these runs, or none if one is taken. Do not wait."""
        if self._fd < 0:
            return False
        try:
            for run in runs:
                self._set(fcntl.F_WRLCK, *run)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> None:
        self._set(fcntl.F_UNLCK, 0, 0)  # a length of 0 means the whole file

    def _set(self, kind: int, start: int, length: int) -> None:
        fcntl.fcntl(
            self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)
        )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_for_all(path: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # The kernel refuses O_CREAT for other users' files in sticky folders.
        return os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):  # another user has just created it
            os.fchmod(fd, 0o666)  # regardless of the umask
        return fd


class CoreBinding:
    """A context manager that binds threads to the process's cores during a
    llama_decode.

    Args:
        ctx: Address of the llama_context, always used on one thread. It must outlive
            this object.
    """

    def __init__(self, ctx: int):
        self._ctx = ctx
        self._off = why_not() is not None
        self._claims = CoreClaims(None if self._off else machine_wide_file("cores.lock"))
        self._made_for: tuple[set[int], int, int] | None = None
        self._pools: list[int] = []
        self._has_bound = False  # OpenMP keeps its threads, and they keep their masks
        self._attached = self._claimed = False

    def __enter__(self) -> None:
        if self._off:
            return
        now = (
            os.sched_getaffinity(os.getpid()),
            api.llama_n_threads(self._ctx),
            api.llama_n_threads_batch(self._ctx),
        )
        if now != self._made_for:
            self._make(*now)
            self._made_for = now
        if not self._pools:
            return
        self._claimed = bool(self._runs) and self._claims.claim(self._runs)
        self._has_bound |= self._claimed
        self._attached = True
        attach_threadpool(self._ctx, *(self._bound if self._claimed else self._free))

    def __exit__(self, *_exc: object) -> None:
        if self._attached:
            detach_threadpool(self._ctx)
            self._attached = False
        if self._claimed:
            with contextlib.suppress(OSError):  # the process may have lost the cores
                if os.sched_getaffinity(0) == self._callers:  # else another process has set it
                    os.sched_setaffinity(0, self._before)
            self._claims.release()
            self._claimed = False

    def _make(self, cores: set[int], *n_threads: int) -> None:
        self._drop_pools()
        binds = [one_each(n, cores) for n in n_threads]
        self._runs = runs(cores) if any(binds) else []
        try:
            if not self._runs and not self._has_bound:
                os.sched_setaffinity(0, cores)
                return
            self._before = _unbound(cores)
        except OSError:  # not permitted
            self._off = True
            return
        self._callers = {min(cores)}  # llama.cpp binds the calling thread first, to the first core
        self._free = [self._pool(n, self._before, False) for n in n_threads]
        self._bound = [
            self._pool(n, cores, True) if bind else free
            for n, bind, free in zip(n_threads, binds, self._free)
        ]

    def _pool(self, n_threads: int, cores: Iterable[int], one_each: bool) -> int:
        self._pools.append(_new_pool(n_threads, cores, one_each))
        return self._pools[-1]

    def _drop_pools(self) -> None:
        while self._pools:
            threadpool_free(self._pools.pop())

    def close(self) -> None:
        """Free the pools, after the context is freed. OpenMP's threads keep their
        masks.
        """
        self._drop_pools()
        self._claims.close()
        self._off = True


def _new_pool(n_threads: int, cores: Iterable[int], one_each: bool) -> int:
    listed = list(cores)
    pool: int = threadpool_new((c_int32 * len(listed))(*listed), len(listed), n_threads, one_each)
    return pool


@contextlib.contextmanager
def bound_pool(n_threads: int) -> Iterator[int | None]:
    """Yield a ggml thread pool bound as by `CoreBinding`, or None. It claims no cores."""
    if why_not() is not None or not one_each(n_threads, cores := os.sched_getaffinity(0)):
        yield None
        return
    pool = _new_pool(n_threads, cores, True)
    try:
        yield pool
    finally:
        with contextlib.suppress(AttributeError):
            lib["omp_pause_resource_all"](_OMP_PAUSE_SOFT)
        threadpool_free(pool)
        os.sched_setaffinity(0, cores)


def _unbound(cores: set[int]) -> Iterable[int]:
    # If only the cpuset restricts the thread, a mask of all cores includes those that
    # the cpuset gains.
    everything = range(min(os.sysconf("SC_NPROCESSORS_CONF"), MAX_CORES))
    os.sched_setaffinity(0, everything)
    if os.sched_getaffinity(0) == cores:
        return everything
    os.sched_setaffinity(0, cores)
    return cores
