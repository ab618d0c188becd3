"""Signals that a block of code answers itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(number: signal.Signals, handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Has a signal go to this handler, while open. In another thread than the main one, which alone may ask for that, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
