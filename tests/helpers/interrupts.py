"""Interrupts: an exception between any two instructions of Python ends an answer, and the next one is that of a fresh process.

Two ways to come between: `at_event` raises at the n-th place at which Python itself would (where a function begins, and behind every call into C), so that
a case can be repeated; `at_time` is Ctrl-C as it is, a signal that arrives somewhere in the time of an answer, inside llama.cpp or outside. What each of the
KINDS of answers computed, and what one asks next, are drawn by a seed.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

OPTIONS = {"expert_memory": "1M", "n_ctx": 128, "n_batch": 16, "n_threads": 2, "warm": False, "profile": False, "experts": False, "seed": 1}
PROMPTS = ("Tom has 3 apples and buys 4 more. How many apples has Tom?", "Tom has 3 apples and eats one of them.", "A train leaves at nine.")
N = 6  # tokens of an answer


def _text(reply: Any) -> str:
    return str(reply["choices"][0]["text"])


def _stream(llm: Any, prompt: str) -> str:
    return "".join(_text(chunk) for chunk in llm.create_completion(prompt, max_tokens=N, temperature=0, stream=True))


def _processed(llm: Any, prompt: str) -> str:
    return _text(llm.create_completion(prompt, max_tokens=N, temperature=0, logits_processor=[lambda _ids, scores: -scores]))


def _tokens(llm: Any, prompt: str) -> list[int]:
    return [token for token, _ in zip(llm.generate(llm.tokenize(prompt.encode()), temp=0), range(N))]


def _by_hand(llm: Any, prompt: str) -> list[int]:
    llm.reset()
    llm.eval(llm.tokenize(prompt.encode()))
    found = []
    for _ in range(N):
        found.append(llm.sample(temp=0))
        llm.eval(found[-1:])
    return found


def _restored(llm: Any, prompt: str) -> list[int]:
    llm.reset()
    llm.eval(llm.tokenize(prompt.encode())[:-1])
    state = llm.save_state()
    llm.eval([5, 6])
    llm.load_state(state)
    return _tokens(llm, prompt)


# each gives the same however often and behind whatever it is asked
KINDS: dict[str, Callable[[Any, str], Any]] = {
    "completion": lambda llm, prompt: _text(llm.create_completion(prompt, max_tokens=N, temperature=0)),
    "sampled": lambda llm, prompt: _text(llm.create_completion(prompt, max_tokens=N, temperature=0.9, top_k=20, seed=11, repeat_penalty=1.1)),
    "stream": _stream,
    "processed": _processed,
    "tokens": _tokens,
    "by hand": _by_hand,
    "restored": _restored,
}


class Interrupt(BaseException):
    """Raised by `at_event`; like KeyboardInterrupt no Exception."""


@dataclass
class Counted:
    """Places passed so far, and where the exception was raised; None: it was not."""

    places: int = 0
    where: str | None = None


@contextmanager
def at_event(nth: int) -> Iterator[Counted]:
    """Raises `Interrupt` at the n-th place of this thread at which Python looks for signals. 0: never, they are counted."""
    counted = Counted()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_name == "__del__":  # what is raised in one goes nowhere
            return
        counted.places += 1
        if counted.places == nth:
            sys.setprofile(None)
            counted.where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name} {event}"
            raise Interrupt

    sys.setprofile(watch)
    try:
        yield counted
    finally:
        sys.setprofile(None)


@contextmanager
def at_time(seconds: float) -> Iterator[Counted]:
    """Raises `Interrupt` after this time, wherever the main thread is then, as Ctrl-C would: from a signal."""
    counted = Counted()

    def arrive(_signum: int, frame: FrameType | None) -> None:
        if counted.where is None and frame is not None and frame.f_code.co_name != "__del__":
            counted.where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
            raise Interrupt

    before = signal.signal(signal.SIGALRM, arrive)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield counted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Result:
    """Of one case: how it was interrupted, whether that arrived, and what was wrong; empty: nothing."""

    case: str
    arrived: bool
    problem: str = ""


@dataclass
class Rounds:
    """Answers that are interrupted, and the answers behind them.

    Attributes:
        expected: of each kind and prompt, from a fresh object of its own.
        places, seconds: of a whole answer of each, for the instants to be drawn from.
    """

    open: Callable[[], Any]
    prompts: tuple[str, ...] = PROMPTS
    kinds: tuple[str, ...] = tuple(KINDS)
    expected: dict[tuple[str, str], Any] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def prepare(self) -> None:
        for kind in self.kinds:
            for prompt in self.prompts:
                with self.open() as llm:
                    with at_event(0) as counted:
                        self.expected[kind, prompt] = KINDS[kind](llm, prompt)
                    if kind not in self.seconds:  # of an answer behind another one
                        started = time.perf_counter()
                        KINDS[kind](llm, prompt)
                        self.places[kind], self.seconds[kind] = counted.places, time.perf_counter() - started

    def one(self, llm: Any, rng: random.Random) -> Result:
        """An answer that is interrupted somewhere, then a whole one, to the same prompt more often than not."""
        kind, prompt = rng.choice(self.kinds), rng.choice(self.prompts)
        nth = rng.randint(1, self.places[kind]) if rng.random() < 0.5 else 0
        seconds = rng.uniform(1e-4, self.seconds[kind])
        case = f"{kind} {f'at event {nth}' if nth else f'after {seconds * 1e3:.2f} ms'}"
        interrupt = at_event(nth) if nth else at_time(seconds)
        try:
            with interrupt as counted:
                KINDS[kind](llm, prompt)
        except Interrupt:
            pass
        except Exception as error:
            return Result(case, True, f"{type(error).__name__} instead of the interrupt: {error}")
        return replaced(case, counted.where, self.next(llm, rng, kind, prompt))

    def next(self, llm: Any, rng: random.Random, kind: str, prompt: str) -> str:
        """What is wrong with the next answer."""
        kind = rng.choice(self.kinds) if rng.random() < 0.5 else kind
        prompt = rng.choice(self.prompts) if rng.random() < 0.25 else prompt
        try:
            found = KINDS[kind](llm, prompt)
        except BaseException as error:
            return f"the next one ({kind}) raises {type(error).__name__}: {error}"
        expected = self.expected[kind, prompt]
        return "" if found == expected else f"the next one ({kind}) is {found!r}, of a fresh object {expected!r}"

    def run(self, interrupts: int, seed: int) -> Iterator[Result]:
        """So many cases on one object, which is opened anew where something was wrong."""
        rng, llm = random.Random(seed), self.open()
        try:
            for _ in range(interrupts):
                result = self.one(llm, rng)
                yield result
                if result.problem:
                    llm.close()
                    llm = self.open()
        finally:
            llm.close()


def replaced(case: str, where: str | None, problem: str) -> Result:
    return Result(f"{case}, {where}" if where else case, where is not None, problem)
