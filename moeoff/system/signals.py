"""Temporary signal handlers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(number: signal.Signals, handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle a signal in this block; no change in threads other than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
