"""The sandbox in which chat templates run: Jinja's, which lets them call nothing, with bounds on time and memory.

A template comes with the model and is a program. In Jinja's own sandbox it can still loop for ever, or ask for more memory than there is:
with `{{ 10 ** (10 ** 10) }}` already where it is compiled, because constants are folded there.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatSandbox", "TemplateBoundError"]

SECONDS = 10.0  # of this thread's processor time; templates of today take milliseconds
BYTES = 256 << 20  # more address space than before
_BITS = 4096  # of a number
_one = threading.Lock()  # the bound of memory is the process's: for these milliseconds other threads get no more, either


class TemplateBoundError(jinja2.TemplateRuntimeError):
    """A template takes too long, or too much memory."""


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

    def look(frame: FrameType, event: str, argument: object) -> Any:
        if time.thread_time() > end:
            raise TemplateBoundError(f"it takes longer than {SECONDS:g} s")
        return look

    with _one, _less_memory():
        sys.settrace(look)
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
def _less_memory() -> Iterator[None]:
    try:
        with open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = now + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(soft, bound), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
