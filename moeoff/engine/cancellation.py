"""Cancelling what is being computed, from another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .. import native
from ..errors import Cancelled
from .expert_buffer import ExpertBuffer


class Cancellation:
    """Of one buffer: a request that lasts until everything in progress has ended."""

    def __init__(self, buffer: ExpertBuffer):
        self._buffer = buffer
        self._lock = threading.Lock()
        self._n_open = 0  # generators and decodes in progress
        self.requested = False

    def request(self) -> None:
        """Ends what is in progress within a layer; if nothing is, does nothing."""
        with self._lock:
            if self._n_open:
                self.requested = True
                native.set_cancelled(self._buffer.handle, True)

    def withdraw(self) -> None:
        """Withdraws a request that had no effect: its answer was abandoned before the next decode."""
        with self._lock:
            self._withdraw()

    def _withdraw(self) -> None:
        if self.requested:
            self.requested = False
            native.set_cancelled(self._buffer.handle, False)

    @contextlib.contextmanager
    def in_progress(self) -> Iterator[None]:
        """While open, `request()` has something to cancel.

        Raises:
            Cancelled: it has been already.
        """
        with self._lock:
            self._n_open += 1
        try:
            if self.requested:
                raise Cancelled("the answer was cancelled")
            yield
        finally:
            with self._lock:
                self._n_open -= 1
                if self._n_open == 0:
                    self._withdraw()
