"""Exclusive access of threads to one model, answer by answer, until it is closed."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar, cast

from ..errors import Cancelled, MoeoffError
from .compute_thread import ComputeThread, ThreadEnded, require_process

T = TypeVar("T")
_POLL = 0.5  # seconds between checks whether an answer's reader is alive


class Stream:
    """An answer that is read token by token.

    Attributes:
        reader: Thread of the last read.
        error: Exception for the next read if the answer was ended from outside.
    """

    reader: threading.Thread
    error: Exception | None = None

    def __init__(self) -> None:
        self._has_ended, self._waiting = False, queue.SimpleQueue[None]()

    def end(self, error: Exception | None = None) -> None:
        if not self._has_ended:
            self._has_ended, self.error = True, error
            self._waiting.put(None)

    def wait(self) -> None:
        """Wait for the answer's end, at most `_POLL`."""
        with contextlib.suppress(queue.Empty):
            self._waiting.get(timeout=_POLL)
            self._waiting.put(None)  # for the next waiting thread

    def blocks(self, reader: threading.Thread) -> bool:
        """Return True if another thread reads the answer."""
        return not self._has_ended and self.reader is not reader and self.reader.is_alive()


class ModelLock:
    """A model's lock: one answer at a time, and nothing once it is closed.

    Args:
        thread: Compute thread. None: the opening thread computes.

    Attributes:
        closed: True if the model is closed or closing.
    """

    def __init__(self, thread: ComputeThread | None = None) -> None:
        self._pid = os.getpid()
        self._thread = thread
        if thread is not None:
            weakref.finalize(self, thread.end)  # also runs at the interpreter's exit
        self._latest: weakref.ref[Stream] | None = None  # the answer's generator owns the stream
        self._is_running = False
        self._deferred: BaseException | None = None
        self._free: Callable[[], None] | None = None  # called when the running call has returned
        self._closer = 0  # ID of the thread that frees the model
        self.closed = False
        self._reading = threading.RLock()

    @property
    def thread(self) -> ComputeThread:
        assert self._thread is not None
        return self._thread

    @property
    def _stream(self) -> Stream | None:
        return None if self._latest is None else self._latest()

    @property
    def here(self) -> bool:
        """True in the process that opened the model, False in a fork."""
        return self._pid == os.getpid()

    @property
    def is_open(self) -> bool:
        return self.here and not self.closed and not self.thread.has_ended

    def require_open(self) -> None:
        """Raise `MoeoffError` if the model is closed or was opened by another process."""
        require_process(self._pid)
        if self.closed and self._closer != threading.get_ident():
            raise MoeoffError("the model is closed")

    def take(
        self, function: Callable[[], T], *, stream: Stream | None = None, changes: bool = True
    ) -> T:
        """Call a function on the model's thread, while no other thread reads an answer.

        The reader of an answer abandons it with any other call. Nested calls run at
        once.

        Args:
            stream: Answer that the call is a step of.
            changes: True if the call changes the context, False if it may run between
                two steps of another thread's answer.

        Raises:
            MoeoffError: The model is closed or another process's, or the answer is
                abandoned.
        """
        if self.thread.is_current:
            return function()
        reader = threading.current_thread()
        while True:
            self.require_open()
            other = self._stream if changes else None
            if other is not None and other is not stream and other.blocks(reader):
                other.wait()
                continue
            del other
            has_run, result = self.thread.call(
                partial(self._take, function, reader, stream, changes)
            )
            if has_run:
                return cast(T, result)

    def _take(
        self,
        function: Callable[[], T],
        reader: threading.Thread,
        stream: Stream | None,
        changes: bool,
    ) -> tuple[bool, T | None]:
        """Return (True, result), or (False, None) if another thread has begun an
        answer.
        """
        self.require_open()
        if changes:
            if stream is not None and stream.error is not None:
                raise stream.error
            other = self._stream
            if other is not None and other is not stream:
                if other.blocks(reader):
                    return False, None
                message = "this answer was abandoned: the model was called before the answer's end"
                other.end(MoeoffError(message))
            if stream is not None:
                stream.reader = reader
            self._latest = None if stream is None else weakref.ref(stream)
        self._is_running, self._deferred = True, None
        try:
            result = function()
        except StopIteration:
            self._raise_deferred()
            raise
        finally:
            self._is_running = False
            if self._free is not None:
                self._finish()
        self._raise_deferred()
        return True, result

    def defer(self, error: BaseException) -> None:
        """Raise an exception after the running call, as llama_cpp would discard it."""
        self._deferred = error

    def _raise_deferred(self) -> None:
        error, self._deferred = self._deferred, None
        if error is not None:
            raise error

    def steps(self, answer: Generator[T, Any, None]) -> Generator[T, Any, None]:
        """Run an answer's steps on the model's thread. Other answers wait."""
        stream, sent = Stream(), None
        try:
            while True:
                try:
                    item = self.take(partial(answer.send, sent), stream=stream)
                except StopIteration:
                    return
                sent = yield item
        finally:
            stream.end()
            if self.is_open:
                self.take(answer.close, changes=False)
            else:
                answer.close()

    def cancel(self) -> None:
        """Cancel the running call and answer. The next read raises `Cancelled`."""
        self._end_stream(Cancelled("the answer was cancelled"))
        if self._thread is not None:
            self._thread.cancel()

    def _end_stream(self, error: Exception) -> None:
        stream = self._stream
        if stream is not None:
            stream.end(error)

    def read(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on immutable data at once. It must not call back into Python."""
        self.require_open()
        with self._reading:
            self.require_open()
            return function(*args, **kwargs)

    def close(self, free: Callable[[], None]) -> None:
        """Cancel the running call and free the model after its end.

        Args:
            free: Function that frees the model. It may be called twice, and never in a
                fork.
        """
        if not self.here:
            return
        self.closed, self._free, thread = True, free, self.thread
        self._end_stream(MoeoffError("the model is closed"))
        if self._is_running and thread.is_current:
            return thread.cancel(at_once=True)
        if thread.has_ended:
            return self._finish()
        thread.cancel(at_once=True)
        with contextlib.suppress(ThreadEnded):  # another thread has closed the model
            thread.call(self._finish)
        thread.end()

    def _finish(self) -> None:
        """Free the model, and end its thread."""
        free, self._closer = self._free, threading.get_ident()
        try:
            with self._reading:  # wait for a running `read`
                pass
            if free is not None:
                free()
            self._free = None
        finally:
            self._closer = 0
            if self.thread.is_current:
                self.thread.end()
