"""The thread that computes for a model.

A caller hands a function to the model's thread and waits for the result. No signal's exception
reaches that thread: Ctrl-C interrupts the wait, the function is cancelled and comes to its end, and
the exception goes on. What computes is therefore never left between two instructions.
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
_computed_in = 0  # process in which llama.cpp has computed, whose threads a fork lacks


def computes_here() -> None:
    """Note that llama.cpp is about to compute in this process."""
    global _computed_in
    _computed_in = os.getpid()


def require_computable() -> None:
    """Raise `MoeoffError` in a fork of a process that has computed.

    OpenMP would wait for threads that only the other process has.
    """
    if _computed_in not in (0, os.getpid()):
        raise MoeoffError(
            f"this process is a copy (fork) of one in which llama.cpp has computed ({_computed_in}), without its threads: "
            "open models in processes that are started anew, as multiprocessing does with `spawn`"
        )


def require_process(pid: int) -> None:
    """Raise `MoeoffError` in another process than the one that opened a model."""
    if pid != os.getpid():
        raise MoeoffError(
            f"the model was opened in another process ({pid}), of which this one is a copy without its threads and memory: "
            "open it in this one, or let multiprocessing start its processes with `spawn`"
        )


class _Calls(queue.SimpleQueue[Any]):
    """Functions that a thread is to run; None ends it.

    Attributes:
        has_ended: True if no function runs any more.
        is_over: True if the thread is about to exit.
        running: A lock that is held until then.
    """

    has_ended = is_over = False
    native_id = 0

    def __init__(self) -> None:
        self.running = _thread.allocate_lock()
        self.running.acquire()


class _Call(Generic[T]):
    """A function for a compute thread, and what became of it.

    Attributes:
        is_done: True if the function has ended, or never runs.
        done: A lock that is held until then.
    """

    def __init__(self, thread: ComputeThread, function: Callable[[], T]):
        self.thread: ComputeThread | None = thread
        self.function: Callable[[], T] | None = function
        self.is_done = False
        self.done, self._claimed = threading.Lock(), threading.Lock()
        self.done.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def claim(self) -> bool:
        """Return True to one caller: to the thread, which runs the function, or to whoever drops it."""
        return self._claimed.acquire(blocking=False)

    def end(self, result: T | None = None, error: BaseException | None = None) -> None:
        # nothing of the function is kept, or the thread could be the last to hold the model
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
            del error  # whose traceback has this frame


class ThreadEnded(MoeoffError):
    """Nothing runs on a compute thread any more."""

    def __init__(self) -> None:
        super().__init__("the model is closed")


def _run_all(calls: _Calls) -> None:
    """Run a compute thread. Between two calls it holds nothing but their queue."""
    calls.native_id = threading.get_native_id()
    while (call := calls.get()) is not None:
        if call.claim():
            call.thread._run(call)
        del call  # which may hold an exception, and that the frames of a model's methods
    calls.has_ended = True
    while not calls.empty():
        if (call := calls.get()) is not None and call.claim():
            call.end(error=ThreadEnded())
    calls.is_over = True
    calls.running.release()


_current = threading.local()  # thread: the ComputeThread whose call runs on this thread


class ComputeThread:
    """Runs functions one after the other. A function that calls another one runs it at once.

    Attributes:
        cancelled: True if the running function is to end.
        set_stop: Called with True to end the graph that is being computed, and False to withdraw that.
    """

    def __init__(self) -> None:
        self._pid, self._calls, self._lock = os.getpid(), _Calls(), threading.RLock()
        self._running: _Call[Any] | None = None
        self.cancelled = self._completes = False
        self.set_stop: Callable[[bool], None] = lambda _stop: None
        # threading.Thread waits until it runs, in code that an interrupt leaves with a wrong exception
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
        del error, call  # or the exception, whose traceback has this frame, would refer to itself

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
        """Return a function's result.

        An exception in the waiting thread, as of Ctrl-C, cancels the function and goes on when that
        has ended. A second one does not wait.

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
        """End a call in whose wait an exception came."""
        if call.is_done or call.claim():
            return
        try:
            while not call.is_done:
                self.cancel(call)
                call.done.acquire()
        finally:
            self.cancel(call)

    def cancel(self, call: _Call[Any] | None = None, *, at_once: bool = False) -> None:
        """End what runs within a layer, from any thread or signal handler. If nothing runs, do nothing.

        Args:
            call: What is to end; None: anything.
            at_once: Also end a batch that would be completed, as a second request does.
        """
        with self._lock:
            if self._running is not None and call in (None, self._running):
                ends, self.cancelled = at_once or self.cancelled or not self._completes, True
                if ends:
                    self.set_stop(True)

    def require_uncancelled(self) -> None:
        """Raise `Cancelled` if the running function is to end."""
        if self.cancelled:
            raise Cancelled("the answer was cancelled")

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """While open, a request lets the running batch come to its end and then raises `Cancelled`."""
        self._completes = True
        try:
            yield
        finally:
            self._completes = False
        self.require_uncancelled()

    def end(self) -> None:
        """Cancel what runs, and wait until the thread has ended. May be called twice, and does nothing in a fork."""
        if self._pid != os.getpid() or sys.is_finalizing():
            return
        self.cancel(at_once=True)
        self._calls.put(None)
        if not self.is_current and not self._calls.is_over:
            self._calls.running.acquire()
            self._calls.running.release()


def is_cancelled() -> bool:
    """Return True if what the calling thread computes is to end."""
    thread = getattr(_current, "thread", None)
    return thread is not None and thread.cancelled


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls llama.cpp: from the main thread it runs on one that no signal's exception reaches.

    What a signal's handler raises in a callback of llama.cpp's is printed and lost.
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
