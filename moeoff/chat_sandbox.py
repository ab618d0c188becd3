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
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatSandbox", "TemplateBoundError", "growing"]

SECONDS = 10.0  # of this thread's processor time; templates of today take milliseconds
BYTES = 256 << 20  # more than the process has when the template begins
_BITS = 4096  # of a number
_LOOK = 0.001  # seconds between two looks of who waits: templates take milliseconds


class TemplateBoundError(jinja2.TemplateRuntimeError):
    """A template takes too long, or too much memory."""


class _Stay:
    """A thread's, inside `growing` or `bounded`. It ends with the frame that holds it, if an exception has come where nothing could say so."""

    __slots__ = ("__weakref__", "bounded", "ended", "thread")

    def __init__(self, *, bounded: bool) -> None:
        self.thread, self.bounded, self.ended = threading.get_ident(), bounded, False


_Stays = list["weakref.ref[_Stay]"]


def _lasting(stays: _Stays) -> _Stays:
    return [stay for stay in stays if (found := stay()) is not None and not found.ended]


def _threads(stays: _Stays) -> set[int]:
    return {found.thread for stay in stays if (found := stay()) is not None and not found.ended}


class _ProcessMemory:
    """Either one thread runs a template within a bound of memory, or any number of others may take more of it. First come, first served.

    An interrupt may come between any two instructions. So nothing here has to be counted down or given back: who comes next finds what has ended, and
    the lock is a plain one, whose `with` no interrupt divides.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: _Stays = []
        self._growing: _Stays = []
        self._bounded: _Stays = []
        self._limits: tuple[int, int] | None = None  # the process's own, while they are lower

    def _enter(self, stay: _Stay) -> None:
        turn, me = weakref.ref(stay), {stay.thread}
        with self._lock:
            self._queue = [*_lasting(self._queue), turn]
        while True:
            with self._lock:
                queue = self._queue = _lasting(self._queue)
                growing, bounded = _threads(self._growing), _threads(self._bounded) - me
                if stay.bounded:
                    waiting = _threads([other for other in queue if (found := other()) is not None and found.bounded])
                    may = queue[0] is turn and not bounded and growing <= waiting  # which includes this one
                else:
                    may = not bounded and (queue[0] is turn or stay.thread in growing)
                if may:
                    self._queue = [other for other in queue if other is not turn]
                    if stay.bounded:
                        self._bounded = [turn]
                    else:
                        self._growing = [*_lasting(self._growing), turn]
                    self.unbind()  # whoever was interrupted could not
                    return
            time.sleep(_LOOK)

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """While open, this thread may start threads and reserve memory: no other thread runs a template."""
        stay = _Stay(bounded=False)
        try:
            self._enter(stay)
            yield
        finally:
            stay.ended = True

    @contextlib.contextmanager
    def bounded(self) -> Iterator[_Stay]:
        """While open, no other thread is inside `growing`. One that is inside itself, as where a model is opened, is not for that time."""
        stay = _Stay(bounded=True)
        try:
            self._enter(stay)
            try:
                self._bind()
                yield stay
            finally:  # not of who was interrupted while it waited: the limits are another thread's then
                self.unbind()
        finally:
            stay.ended = True

    def _bind(self) -> None:
        try:
            with open("/proc/self/statm", "rb") as file:
                now = int(file.read().split()[5]) * resource.getpagesize()  # private and writable, and the stack
        except OSError:  # not Linux
            return
        self._limits = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = now + BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))

    def unbind(self) -> None:
        """The process has its own limits again."""
        if (limits := self._limits) is not None:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
            self._limits = None


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

    with _process_memory.bounded() as stay:
        this = weakref.ref(stay)

        def check_time(frame: FrameType, event: str, argument: object) -> Any:
            if (still := this()) is None or still.ended:  # an interrupt came before the end below
                sys.settrace(before)
                return None
            if time.thread_time() > end:
                raise TemplateBoundError(f"it takes longer than {SECONDS:g} s")
            return check_time

        try:
            sys.settrace(check_time)
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
