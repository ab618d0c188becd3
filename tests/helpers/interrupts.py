"""Interrupts: an exception between any two instructions of Python ends an answer, and
the next one is that of a fresh process.

Two ways to come between: `at_event` raises at the n-th place at which Python itself
would (where a function begins, and behind every call into C), so that a case can be
repeated; `at_time` is Ctrl-C as it is, a signal that arrives somewhere in the time of
an answer, inside llama.cpp or outside. `within_graph` cancels what llama.cpp computes,
in the middle of a graph.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from moeoff.llamacpp import native
from moeoff.llamacpp.llama import api

OPTIONS = {
    "expert_memory": "1M",
    "n_ctx": 128,
    "n_batch": 16,
    "n_threads": 2,
    "warm": False,
    "profile": False,
    "experts": False,
    "seed": 1,
}
N = 6  # tokens of an answer


def _text(reply: Any) -> str:
    return str(reply["choices"][0]["text"])


def _stream(llm: Any, prompt: str) -> str:
    return "".join(
        _text(chunk)
        for chunk in llm.create_completion(prompt, max_tokens=N, temperature=0, stream=True)
    )


def _processed(llm: Any, prompt: str) -> str:
    return _text(
        llm.create_completion(
            prompt, max_tokens=N, temperature=0, logits_processor=[lambda _ids, scores: -scores]
        )
    )


def _tokens(llm: Any, prompt: str) -> list[int]:
    return [
        token for token, _ in zip(llm.generate(llm.tokenize(prompt.encode()), temp=0), range(N))
    ]


def _restored(llm: Any, prompt: str) -> list[int]:
    llm.reset()
    llm.eval(llm.tokenize(prompt.encode())[:-1])
    state = llm.save_state()
    llm.eval([5, 6])
    llm.load_state(state)
    return _tokens(llm, prompt)


# each gives the same however often and behind whatever it is asked
KINDS: dict[str, Callable[[Any, str], Any]] = {
    "stream": _stream,
    "processed": _processed,
    "restored": _restored,
}


class Interrupt(BaseException):
    """Raised by `at_event`; like KeyboardInterrupt no Exception."""


@dataclass
class Places:
    """Places passed so far, and where the exception was raised; None: it was not."""

    places: int = 0
    where: str | None = None


@contextmanager
def at_event(nth: int) -> Iterator[Places]:
    """Raises `Interrupt` at the n-th place of this thread at which Python looks for
    signals. 0: never, they are counted. Garbage is not collected meanwhile: it comes at
    any place, and what its callbacks raise goes nowhere.
    """
    counted, collects = Places(), gc.isenabled()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        # what is raised in one goes nowhere
        if event not in ("call", "c_return") or frame.f_code.co_name == "__del__":
            return
        counted.places += 1
        if counted.places == nth:
            sys.setprofile(None)
            counted.where = (
                f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                f" {frame.f_code.co_name} {event}"
            )
            raise Interrupt

    gc.disable()
    sys.setprofile(watch)
    try:
        yield counted
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


@contextmanager
def at_time(seconds: float) -> Iterator[Places]:
    """Raises `Interrupt` after this time, wherever the main thread is then, as Ctrl-C
    would: from a signal.
    """
    counted = Places()

    def arrive(_signum: int, frame: FrameType | None) -> None:
        if counted.where is None and frame is not None and frame.f_code.co_name != "__del__":
            counted.where = (
                f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                f" {frame.f_code.co_name}"
            )
            raise Interrupt

    before = signal.signal(signal.SIGALRM, arrive)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield counted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def within_graph(
    llm: Any, is_time: Callable[[], bool] = lambda: True, cancel: Callable[[], object] | None = None
) -> Iterator[None]:
    """Call `cancel`, by default the model's, once, in the middle of the first graph in
    which is_time() is true.
    """
    nodes = 0

    def look(handle: int | None) -> bool:
        nonlocal nodes
        nodes += is_time()
        if nodes == 20:
            (cancel or llm.cancel)()
        return bool(native.should_abort(handle))

    callback, handle = api.ggml_abort_callback(look), llm.engine.buffer.handle
    api.llama_set_abort_callback(llm.context_handle, callback, handle)
    try:
        yield
    finally:
        api.llama_set_abort_callback(llm.context_handle, native.should_abort, handle)
