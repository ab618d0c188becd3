"""Waiting for something to be so, instead of for a time in which it usually is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout: float = 300) -> None:
    """Returns as soon as the condition holds; an AssertionError after `timeout` seconds
    without it.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout:g} s"
        time.sleep(0.005)


def wait_until_still(value: Callable[[], object], seconds: float = 1.0) -> None:
    """Returns when the value has not changed for this long: for what must not happen,
    and so cannot be waited for.
    """
    last, since = value(), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.01)
        if (now := value()) != last:
            last, since = now, time.monotonic()
