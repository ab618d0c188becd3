"""The turns that threads take at one model: answer by answer, and none after the end."""

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
_LOOK = 0.5  # seconds between two looks whether the reader of an answer is still alive


class Stream:
    """An answer that is read token by token.

    Attributes:
        reader: The thread that read last.
        error: What the next reader gets, if the answer was ended from outside.
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
        """Return when the answer has ended, or after a while."""
        with contextlib.suppress(queue.Empty):
            self._waiting.get(timeout=_LOOK)
            self._waiting.put(None)  # for the next one who waits

    def blocks(self, reader: threading.Thread) -> bool:
        """Return True if another thread reads the answer."""
        return not self._has_ended and self.reader is not reader and self.reader.is_alive()


class Turns:
    """Access to one model: its thread computes, one answer at a time, and nothing comes after the end.

    Args:
        thread: The model's; None: whoever opened the model computes.

    Attributes:
        closed: True if the model is closed, or about to be.
    """

    def __init__(self, thread: ComputeThread | None = None) -> None:
        self._pid = os.getpid()
        self._thread = thread
        if thread is not None:
            weakref.finalize(self, thread.end)  # at the interpreter's exit, too
        self._latest: weakref.ref[Stream] | None = None  # it ends with the generator that holds it, too
        self._is_running = False
        self._deferred: BaseException | None = None
        self._free: Callable[[], None] | None = None  # to be called when the running call has returned
        self._closer = 0  # thread that frees the model
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
        """Raise `MoeoffError` if the model is closed, or this is a fork of the process that opened it."""
        require_process(self._pid)
        if self.closed and self._closer != threading.get_ident():
            raise MoeoffError("the model is closed")

    def take(self, function: Callable[[], T], *, stream: Stream | None = None, changes: bool = True) -> T:
        """Call a function on the model's thread, when no other thread reads an answer.

        A thread that reads an answer and then asks for something else has given that answer up:
        nobody else could read on. What a call itself calls is part of its turn.

        Args:
            stream: The answer of which the call is a step.
            changes: True if the call changes the context; else it may come between two steps of
                another answer.

        Raises:
            MoeoffError: The model is closed, or was opened by another process, or the stream was
                given up.
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
            has_run, result = self.thread.call(partial(self._take, function, reader, stream, changes))
            if has_run:
                return cast(T, result)

    def _take(self, function: Callable[[], T], reader: threading.Thread, stream: Stream | None, changes: bool) -> tuple[bool, T | None]:
        """Return (False, None) if another thread has begun an answer meanwhile."""
        self.require_open()
        if changes:
            if stream is not None and stream.error is not None:
                raise stream.error
            other = self._stream
            if other is not None and other is not stream:
                if other.blocks(reader):
                    return False, None
                other.end(MoeoffError("this answer was given up: the model was used for something else before it was read to its end"))
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
        """Raise an exception when the running call has ended: llama_cpp discards the generator that would raise it."""
        self._deferred = error

    def _raise_deferred(self) -> None:
        error, self._deferred = self._deferred, None
        if error is not None:
            raise error

    def steps(self, answer: Generator[T, Any, None]) -> Generator[T, Any, None]:
        """Yield what an answer does, each step of it in a turn; no other thread has one before the answer ends."""
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
        """End what is computed, and an answer between two tokens: whoever reads on gets `Cancelled`."""
        self._give_up(Cancelled("the answer was cancelled"))
        if self._thread is not None:
            self._thread.cancel()

    def _give_up(self, error: Exception) -> None:
        stream = self._stream
        if stream is not None:
            stream.end(error)

    def read(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that needs no turn, because what it reads never changes, while the model is open. It must not call back into Python."""
        self.require_open()
        with self._reading:
            self.require_open()
            return function(*args, **kwargs)

    def close(self, free: Callable[[], None]) -> None:
        """End what runs, wait for that, and free the model. Called from inside a call, free it when that has returned.

        Args:
            free: May be called twice. Not called in a fork.
        """
        if not self.here:
            return
        self.closed, self._free, thread = True, free, self.thread
        self._give_up(MoeoffError("the model is closed"))
        if self._is_running and thread.is_current:
            return thread.cancel(at_once=True)
        if thread.has_ended:
            return self._finish()
        thread.cancel(at_once=True)
        with contextlib.suppress(ThreadEnded):  # another thread has closed it meanwhile
            thread.call(self._finish)
        thread.end()

    def _finish(self) -> None:
        """Free the model, and end its thread."""
        free, self._closer = self._free, threading.get_ident()
        try:
            with self._reading:  # whoever reads has looked whether the model is open
                pass
            if free is not None:
                free()
            self._free = None
        finally:
            self._closer = 0
            if self.thread.is_current:
                self.thread.end()
