"""The thread that computes for a model.

A caller passes a function to the model's thread and waits. Ctrl-C interrupts the wait:
it cancels the function and raises when the function has returned. The thread itself is
never interrupted, because only the main thread runs signal handlers.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, cast

from ..errors import Cancelled, MoeoffError

P = ParamSpec("P")
T = TypeVar("T")
_computed_in = 0  # PID of the process in which llama.cpp has computed; its forks lack the threads


def computes_here() -> None:
    """Record that llama.cpp is about to compute in this process."""
    global _computed_in
    _computed_in = os.getpid()


def require_computable() -> None:
    """Raise `MoeoffError` in a fork of a process that has computed: OpenMP would hang."""
    if _computed_in not in (0, os.getpid()):
        raise MoeoffError(
            f"this process is a fork of {_computed_in}, where llama.cpp has computed, and lacks its"
            " threads: open models in new processes, e.g. multiprocessing's with `spawn`"
        )


def require_process(pid: int) -> None:
    """Raise `MoeoffError` in a fork of the process that opened a model."""
    if pid != os.getpid():
        raise MoeoffError(
            f"the model was opened in process {pid}, and this fork lacks its threads and memory: "
            "open the model in this process, or start processes with `spawn`"
        )


class _Calls(queue.SimpleQueue[Any]):
    """A thread's queue of calls. None ends the thread."""

    has_ended = False  # True if the thread takes no more calls
    is_over = False  # True if the thread is about to exit
    native_id = 0  # of the operating system

    def __init__(self) -> None:
        self.running = _thread.allocate_lock()  # held until the thread is over
        self.running.acquire()


class _Call(Generic[T]):
    """A function to run on a compute thread, and its outcome."""

    def __init__(self, thread: ComputeThread, function: Callable[[], T]):
        self.thread: ComputeThread | None = thread
        self.function: Callable[[], T] | None = function
        self.is_done = False  # True if the function has returned, or will never run
        self.done, self._claimed = threading.Lock(), threading.Lock()  # `done` is held until then
        self.done.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def claim(self) -> bool:
        """Return True to the first caller, which runs or drops the function."""
        return self._claimed.acquire(blocking=False)

    def end(self, result: T | None = None, error: BaseException | None = None) -> None:
        # Drop the function, or the thread could hold the last reference to the model.
        self.thread = self.function = None
        self._result, self._error = result, error
        self.is_done = True
        self.done.release()

    def outcome(self) -> T:
        """Return the function's result, or raise its exception."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return cast(T, self._result)
        finally:
            del error  # its traceback refers to this frame


class ThreadEnded(MoeoffError):
    """A compute thread has ended."""

    def __init__(self) -> None:
        super().__init__("the model is closed")


def _run_all(calls: _Calls) -> None:
    """Run a compute thread. Between calls it refers only to the queue."""
    calls.native_id = threading.get_native_id()
    while (call := calls.get()) is not None:
        if call.claim():
            call.thread._run(call)
        del call  # its exception may refer to frames of a model's methods
    calls.has_ended = True
    while not calls.empty():
        if (call := calls.get()) is not None and call.claim():
            call.end(error=ThreadEnded())
    calls.is_over = True
    calls.running.release()


_current = threading.local()  # thread: the ComputeThread whose call runs on this thread


class ComputeThread:
    """A thread that runs functions in order. Calls from inside a function run at once.

    Attributes:
        cancelled: True if the running function should end.
        set_stop: Callback that stops the running graph (True), or resets that (False).
    """

    def __init__(self) -> None:
        self._pid, self._calls, self._lock = os.getpid(), _Calls(), threading.RLock()
        self._running: _Call[Any] | None = None
        self.cancelled = self._completes = False
        self.set_stop: Callable[[bool], None] = lambda _stop: None
        # An interrupt in threading.Thread.start raises a wrong exception.
        self._ident = _thread.start_new_thread(_run_all, (self._calls,))

    def __del__(self) -> None:
        self._calls.put(None)

    def _run(self, call: _Call[Any]) -> None:
        result = error = None
        with self._lock:
            self._running = call
        _current.thread = self
        try:
            assert call.function is not None
            result = call.function()
        except BaseException as raised:
            error = raised
        _current.thread = None
        with self._lock:
            self._running = None
            if self.cancelled:
                self.cancelled = False
                self.set_stop(False)
        call.end(result, error)
        del error, call  # the error's traceback refers to this frame: avoid a cycle

    @property
    def native_id(self) -> int:
        return self._calls.native_id

    @property
    def is_current(self) -> bool:
        """True on this thread."""
        return threading.get_ident() == self._ident and not self._calls.is_over

    @property
    def has_ended(self) -> bool:
        """True if no function runs on the thread any more."""
        return self._calls.has_ended or sys.is_finalizing()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread and return its result.

        An exception in the waiting thread, e.g. Ctrl-C, cancels the function and is
        raised when the function has ended. A second exception does not wait.

        Raises:
            MoeoffError: The thread has ended.
        """
        if self.is_current:
            return function()
        if self.has_ended:
            raise ThreadEnded
        call = _Call(self, function)
        try:
            self._calls.put(call)
            if not (self._calls.has_ended and call.claim()):
                call.done.acquire()
                return call.outcome()
        except BaseException:
            self._abandon(call)
            raise
        raise ThreadEnded

    def _abandon(self, call: _Call[Any]) -> None:
        """Cancel a call whose wait an exception has interrupted."""
        if call.is_done or call.claim():
            return
        try:
            while not call.is_done:
                self.cancel(call)
                call.done.acquire()
        finally:
            self.cancel(call)

    def cancel(self, call: _Call[Any] | None = None, *, at_once: bool = False) -> None:
        """Cancel the running call within a layer, from any thread or signal handler.

        Args:
            call: Call to cancel. None: any.
            at_once: True to also stop a batch inside `completing`, as a second request
                does.
        """
        with self._lock:
            if self._running is not None and call in (None, self._running):
                ends, self.cancelled = at_once or self.cancelled or not self._completes, True
                if ends:
                    self.set_stop(True)

    def require_uncancelled(self) -> None:
        """Raise `Cancelled` if the running call is cancelled."""
        if self.cancelled:
            raise Cancelled("the answer was cancelled")

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Let a running batch finish on a cancellation, then raise `Cancelled`."""
        self._completes = True
        try:
            yield
        finally:
            self._completes = False
        self.require_uncancelled()

    def end(self) -> None:
        """Cancel the running call and wait for the thread's end. Do nothing in a fork."""
        if self._pid != os.getpid() or sys.is_finalizing():
            return
        self.cancel(at_once=True)
        self._calls.put(None)
        if not self.is_current and not self._calls.is_over:
            self._calls.running.acquire()
            self._calls.running.release()


def is_cancelled() -> bool:
    """Return True if the call on this thread is cancelled."""
    thread = getattr(_current, "thread", None)
    return thread is not None and thread.cancelled


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run on a new thread if called on the main one.

    Exceptions of signal handlers would be lost inside callbacks of llama.cpp.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        thread = ComputeThread()
        try:
            return thread.call(partial(function, *args, **kwargs))
        finally:
            thread.end()

    return call
