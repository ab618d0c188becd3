"""Chat templates. A template comes with the model and is a program, so another program runs it (llamacpp_patches/src/common/moeoff-templates-main.cpp):
with no access to anything, and bounds on time and memory. A server asks that program from C++; everything else asks it here.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError

SECONDS = 10  # templates of today take milliseconds
_MEMORY, _TIMES = 32 << 20, 64  # bytes, and for each byte of the conversation
_LONGEST = 1 << 17  # characters of an ordinary conversation of a few words; templates with instructions for tools write thousands
# struct template_question and struct template_answer of moeoff-template-wire.h
_QUESTION, _ANSWER = struct.Struct("=IIQQQQ"), struct.Struct("=IIQ")
_SUMMARIZE, _RENDER = range(2)
_DONE, _FAILED, _NO_MEMORY = range(3)
_CONVERSATION = {
    "messages": [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")],
    "bos_token": "",
    "eos_token": "",
    "add_generation_prompt": True,
}


class TemplateError(ModelError):
    """A chat template cannot be read, or refuses a conversation."""


class TemplateBoundError(TemplateError):
    """A chat template crashes, or takes too long or too much memory."""


def program() -> Path:
    """The program that runs templates, beside the libraries."""
    package = importlib.util.find_spec("llama_cpp")
    (folder,) = package.submodule_search_locations if package and package.submodule_search_locations else [""]
    return Path(folder, "lib", "moeoff-templates")


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of these variables; those that JSON cannot hold are left out: functions are the program's own.

    Raises:
        TemplateError: the template refuses them, or cannot be read.
        TemplateBoundError: a bound is reached.
    """
    return _ask(_RENDER, source, {name: value for name, value in variables.items() if not callable(value)})


def check(source: str) -> None:
    """Reads a template. Raises `TemplateError` if it cannot be read."""
    _ask(_SUMMARIZE, source, {})


def check_bounds(source: str) -> None:
    """Runs a template with an ordinary conversation. Raises `TemplateBoundError`; that it does not take this conversation is no error."""
    try:
        text = render(source, _CONVERSATION)
    except TemplateBoundError:
        raise
    except TemplateError:
        return
    if len(text) > _LONGEST:
        raise TemplateBoundError(f"it makes {len(text)} characters of a few words")


def _ask(task: int, source: str, variables: Mapping[str, Any]) -> str:
    """Starts the program for one question, and returns its answer."""
    template, conversation = source.encode("utf-8", "replace"), json.dumps(variables).encode()
    question = _QUESTION.pack(task, 0, _MEMORY + _TIMES * len(conversation), SECONDS + 1, len(template), len(conversation))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(SECONDS)
        try:
            process = subprocess.Popen([str(program())], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise TemplateBoundError(f"{program()}: the program for chat templates does not start: {error.strerror}") from None
        try:
            theirs.close()
            with ours.makefile("rwb") as channel:
                channel.read(1)  # it runs
                channel.write(question + template + conversation)
                channel.flush()
                status, n_summary, n_text = _ANSWER.unpack(channel.read(_ANSWER.size))
                channel.read(n_summary)
                text = channel.read(n_text).decode("utf-8", "replace")
        except TimeoutError:
            raise TemplateBoundError(f"it takes longer than {SECONDS} s") from None
        except (OSError, struct.error):
            raise TemplateBoundError("it ends the program that runs it") from None
        finally:
            process.kill()
            process.wait()
    if status == _NO_MEMORY:
        raise TemplateBoundError("it takes too much memory")
    if status == _FAILED:
        raise TemplateError(text.partition("Jinja Exception: ")[2] or text)  # what the template says itself, else what llama.cpp's engine says of it
    return text


class Environment:
    """jinja2's in the formatter of llama_cpp, which renders templates with it."""

    def __init__(self, **_options: Any):
        self.filters: dict[str, Any] = {}

    def from_string(self, source: str) -> Environment:
        self._source = source
        return self

    def render(self, **variables: Any) -> str:
        return render(self._source, variables)
