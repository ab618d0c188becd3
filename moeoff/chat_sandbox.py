"""The sandbox in which chat templates run: Jinja's, which lets them call nothing, with bounds on time and memory.

A template comes with the model and is a program. In Jinja's own sandbox it can still loop for ever, or ask for more memory than there is:
with `{{ 10 ** (10 ** 10) }}` already where it is compiled, because constants are folded there.

The bound of memory is one of what the process may write to, as the system has none for a thread, and a thread that is started or a buffer that is
allocated meanwhile would not get its own: what does either says so with `growing()`, and waits for templates as they wait for it. Address space
that is only reserved does not count: the allocator reserves 128 MiB for each new thread's first allocation, whenever that comes.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatSandbox", "TemplateBoundError", "growing"]

SECONDS = 10.0  # of this thread's processor time; templates of today take milliseconds
BYTES = 256 << 20  # more than the process has when the template begins
_BITS = 4096  # of a number


class TemplateBoundError(jinja2.TemplateRuntimeError):
    """A template takes too long, or too much memory."""


class _ProcessMemory:
    """Either one thread runs a template within a bound of memory, or any number of others may take more of it. First come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._growing: Counter[int] = Counter()  # how many times a thread is inside `growing`
        self._bounded = False

    def _wait(self, free: Callable[[], bool]) -> None:
        turn = object()
        self._queue.append(turn)
        try:
            self._changed.wait_for(lambda: self._queue[0] is turn and free())
        finally:  # interrupted, too
            self._queue.remove(turn)
            self._changed.notify_all()

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """While open, this thread may start threads and reserve memory: no other thread runs a template."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._growing:
                self._wait(lambda: not self._bounded)
            self._growing[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._growing[me] -= 1
                if not self._growing[me]:
                    del self._growing[me]
                self._changed.notify_all()

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """While open, no other thread is inside `growing`. One that is inside itself, as where a model is opened, is not for that time."""
        me = threading.get_ident()
        with self._changed:
            held = self._growing.pop(me, 0)
            self._changed.notify_all()
            try:
                self._wait(lambda: not self._bounded and not self._growing)
                self._bounded = True
            except BaseException:
                self._growing.update({me: held} if held else {})
                raise
        try:
            with _bounded_memory():
                yield
        finally:
            with self._changed:
                self._bounded = False
                self._growing.update({me: held} if held else {})
                self._changed.notify_all()


_process_memory = _ProcessMemory()
growing = _process_memory.growing


class ChatTemplate(jinja2.Template):
    """Raises `jinja2.TemplateRuntimeError` for one that takes too long, too much, or fails in another way."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        with _bounded():
            return super().render(*args, **kwargs)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Raises `jinja2.TemplateError` for what cannot be compiled, or takes too long or too much."""

    template_class = ChatTemplate
    intercepted_binops = frozenset(("*", "**"))  # one of them can take for ever by itself, and nothing interrupts it

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + (right.bit_length() if operator == "*" else 0)
            if bits > _BITS:
                raise TemplateBoundError("it computes with numbers that are too large")
        return super().call_binop(context, operator, left, right)

    def from_string(self, *args: Any, **kwargs: Any) -> jinja2.Template:
        with _bounded():
            try:
                return super().from_string(*args, **kwargs)
            except (TypeError, ValueError) as error:  # of what is folded
                raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {str(error)[:200]}") from None


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    end, before = time.thread_time() + SECONDS, sys.gettrace()

    def check_time(frame: FrameType, event: str, argument: object) -> Any:
        if time.thread_time() > end:
            raise TemplateBoundError(f"it takes longer than {SECONDS:g} s")
        return check_time

    with _process_memory.bounded():
        sys.settrace(check_time)
        try:
            yield
        except jinja2.TemplateError:
            raise
        except MemoryError:
            raise TemplateBoundError("it takes too much memory") from None
        except RecursionError as error:
            raise TemplateBoundError(f"RecursionError: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, SyntaxError) as error:
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {str(error)[:200]}") from None
        finally:
            sys.settrace(before)


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    try:
        with open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()  # private and writable, and the stack
    except OSError:  # not Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = now + BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
