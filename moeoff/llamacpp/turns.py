"""Turns at one model: of several threads one computes at a time, an answer that is read token by token keeps its turn, and nothing comes after the end.

Whatever an exception leaves behind, wherever it comes (Ctrl-C comes between any two instructions), the next turn finds in order: locks are only held by
`with`, and nothing is told by what has to be counted down again.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import MoeoffError

T = TypeVar("T")
_LOOK = 0.5  # seconds after which a waiting thread looks whether the reader that it waits for still runs
_computed_in = 0  # the process in which llama.cpp has computed, whose threads a copy lacks


def computes_here() -> None:
    """llama.cpp is about to compute in this process."""
    global _computed_in
    _computed_in = os.getpid()


def require_computable() -> None:
    """Raises `MoeoffError` in a copy of a process that has computed: OpenMP would wait for threads that only the other one has."""
    if _computed_in not in (0, os.getpid()):
        raise MoeoffError(
            f"this process is a copy (fork) of one in which llama.cpp has computed ({_computed_in}), without its threads: "
            "open models in processes that are started anew, as multiprocessing does with `spawn`"
        )


def require_process(pid: int) -> None:
    """Raises `MoeoffError` in another process than the one that opened a model."""
    if pid != os.getpid():
        raise MoeoffError(
            f"the model was opened in another process ({pid}), of which this one is a copy without its threads and memory: "
            "open it in this one, or let multiprocessing start its processes with `spawn`"
        )


class Stream:
    """An answer that is read token by token.

    Attributes:
        reader: the thread that read last.
        ended: nothing more comes; other threads wait for this.
        error: what its next reader is told, if it was ended from outside.
    """

    def __init__(self) -> None:
        self.reader = threading.current_thread()
        self.ended = threading.Event()
        self.error: Exception | None = None

    def give_up(self, error: Exception) -> None:
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class Turns:
    """One model's.

    Attributes:
        closed: the model is closed, or about to be.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owner = 0  # the thread that has the lock
        self._latest: weakref.ref[Stream] | None = None  # it ends with the generator that holds it, too
        self._free: Callable[[], None] | None = None  # to be called when the running call has returned
        self._closer = 0  # the thread that frees the model
        self.closed = False
        self._reading = threading.RLock()

    @property
    def _stream(self) -> Stream | None:
        return None if self._latest is None else self._latest()

    @property
    def inside(self) -> bool:
        """The calling thread has the turn."""
        return self._owner == threading.get_ident() and self._lock.locked()

    @property
    def here(self) -> bool:
        """This is the process that opened the model, and not a copy."""
        return self._pid == os.getpid()

    def require_open(self) -> None:
        """Raises `MoeoffError` if the model is closed, or this is a copy of the process that opened it."""
        require_process(self._pid)
        if self.closed and self._closer != threading.get_ident():
            raise MoeoffError("the model is closed")

    def take(self, function: Callable[..., T], *args: Any, stream: Stream | None = None, changes: bool = True, **kwargs: Any) -> T:
        """Calls a function when no other thread computes, nor reads an answer to which it belongs.

        A thread that reads an answer and then asks for something else has given that answer up: nobody else could read on. What a call itself calls
        is part of its turn.

        Args:
            stream: the call is a step of it.
            changes: the context; else the call may come between two steps of another answer.

        Raises:
            MoeoffError: the model is closed, or was opened by another process; or the stream was given up.
        """
        self.require_open()  # before a lock that a fork may have copied while it was held
        if self.inside:
            return function(*args, **kwargs)
        while True:
            self.require_open()
            if changes and (other := self._blocker(stream)) is not None:
                other.ended.wait(_LOOK)
                del other
                continue
            with self._lock:
                if changes and self._blocker(stream) is not None:
                    continue
                try:
                    self._owner = threading.get_ident()
                    self.require_open()
                    if changes:
                        self._begin(stream)
                    return function(*args, **kwargs)
                finally:
                    self._owner = 0
                    if self._free is not None:
                        self._finish()

    def _blocker(self, mine: Stream | None) -> Stream | None:
        """An answer that another thread reads."""
        other = self._stream
        if other is None or other is mine or other.ended.is_set():
            return None
        return None if other.reader is threading.current_thread() or not other.reader.is_alive() else other

    def _begin(self, stream: Stream | None) -> None:
        if stream is not None and stream.error is not None:
            raise stream.error
        other = self._stream
        if other is not None and other is not stream:
            other.give_up(MoeoffError("this answer was given up: the model was used for something else before it was read to its end"))
        self._latest = None if stream is None else weakref.ref(stream)
        if stream is not None:
            stream.reader = threading.current_thread()

    def give_up(self, error: Exception) -> None:
        """Ends an answer that is being read, if there is one: whoever reads on is told so."""
        stream = self._stream
        if stream is not None:
            stream.give_up(error)

    def read(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function that needs no turn, because what it reads never changes, while the model is open. It must not call back into Python."""
        self.require_open()
        with self._reading:
            self.require_open()
            return function(*args, **kwargs)

    def close(self, cancel: Callable[[], None], free: Callable[[], None]) -> None:
        """Ends what runs, waits for it, and frees the model: at once, or when a call of this thread has returned, if it comes from inside one.

        Args:
            cancel: ends the running call.
            free: may be called twice. Not called in a copy of the process.
        """
        if not self.here:
            return
        self.closed = True
        self.give_up(MoeoffError("the model is closed"))
        self._free = free
        if self.inside:
            return cancel()
        if self._lock.locked():
            cancel()
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        free, self._closer = self._free, threading.get_ident()
        try:
            with self._reading:  # whoever reads has looked whether it is open
                pass
            if free is not None:
                free()
            self._free = None
        finally:
            self._closer = 0
