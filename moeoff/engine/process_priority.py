"""How the system schedules this process beside others, by llama.cpp's levels."""

from __future__ import annotations

import os

from ..errors import OptionError

__all__ = ["PRIORITIES", "set_priority"]

PRIORITIES = {-1: 5, 0: 0, 1: -5, 2: -10, 3: -20}  # llama.cpp's --prio -> nice


def set_priority(level: int) -> None:
    """For the whole process and the threads that it starts from now on: -1 low, 0 as it is, 1 medium, 2 high, 3 realtime.

    Raises:
        OptionError: there is no such level, or the system does not allow it.
    """
    if level not in PRIORITIES:
        raise OptionError(f"priority: -1 to 3, not {level}")
    if level:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, PRIORITIES[level])
        except OSError as error:
            raise OptionError(f"priority {level}: the system does not allow a niceness of {PRIORITIES[level]}: {error.strerror}") from None
