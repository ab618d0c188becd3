"""Functions of tests in processes of their own: memory that other tests have freed is neither theirs to plan with nor theirs to use."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_process_of_its_own(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module returns, or raises, in a new interpreter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *args).result()
