"""Chat templates, rendered in a sandboxed process.

A template is a program in the model file. moeoff-templates-main.cpp in
llamacpp_patches/src/common runs it without any access and with limits on time and
memory.
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

SECONDS = 10  # time limit; usual templates take milliseconds
# memory limit in bytes: fixed, and for each byte of the conversation
_MEMORY, _TIMES = 32 << 20, 64
# characters for `_CONVERSATION`; templates with tool instructions write thousands
_LONGEST = 1 << 17
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
    """A chat template crashes, or exceeds the limits on time or memory."""


def program() -> Path:
    """Return the path of the program that runs templates."""
    package = importlib.util.find_spec("llama_cpp")
    (folder,) = (
        package.submodule_search_locations
        if package and package.submodule_search_locations
        else [""]
    )
    return Path(folder, "lib", "moeoff-templates")


def render(source: str, variables: Mapping[str, Any], seconds: int = SECONDS) -> str:
    """Render a template. The program replaces functions among the variables.

    Raises:
        TemplateError: The template cannot be parsed, or refuses the variables.
        TemplateBoundError: A limit is exceeded.
    """
    values = {name: value for name, value in variables.items() if not callable(value)}
    return _request(_RENDER, source, values, seconds)


def check(source: str) -> None:
    """Parse a template. Raise `TemplateError` if that fails."""
    _request(_SUMMARIZE, source, {})


def check_bounds(source: str, seconds: int = SECONDS) -> None:
    """Render a short conversation. Raise `TemplateBoundError` if a limit is exceeded.

    A template may refuse the conversation.
    """
    try:
        text = render(source, _CONVERSATION, seconds)
    except TemplateBoundError:
        raise
    except TemplateError:
        return
    if len(text) > _LONGEST:
        raise TemplateBoundError(f"it makes {len(text)} characters of a few words")


def _request(task: int, source: str, variables: Mapping[str, Any], seconds: int = SECONDS) -> str:
    """Run the program for one task and return its output."""
    template, conversation = source.encode("utf-8", "replace"), json.dumps(variables).encode()
    question = _QUESTION.pack(
        task, 0, _MEMORY + _TIMES * len(conversation), seconds + 1, len(template), len(conversation)
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(seconds)
        try:
            process = subprocess.Popen(
                [str(program())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise TemplateBoundError(
                f"{program()}: the program for chat templates does not start: {error.strerror}"
            ) from None
        try:
            theirs.close()
            with ours.makefile("rwb") as channel:
                channel.read(1)  # the program has started
                channel.write(question + template + conversation)
                channel.flush()
                status, n_summary, n_text = _ANSWER.unpack(channel.read(_ANSWER.size))
                channel.read(n_summary)
                text = channel.read(n_text).decode("utf-8", "replace")
        except TimeoutError:
            raise TemplateBoundError(f"it takes longer than {seconds} s") from None
        except (OSError, struct.error):
            raise TemplateBoundError("it ends the program that runs it") from None
        finally:
            process.kill()
            process.wait()
    if status == _NO_MEMORY:
        raise TemplateBoundError("it takes too much memory")
    if status == _FAILED:  # the template's own message, else llama.cpp's
        raise TemplateError(text.partition("Jinja Exception: ")[2] or text)
    return text


class Environment:
    """A replacement for jinja2's class in llama_cpp's formatter."""

    def __init__(self, **_options: Any):
        self.filters: dict[str, Any] = {}

    def from_string(self, source: str) -> Environment:
        self._source = source
        return self

    def render(self, **variables: Any) -> str:
        return render(self._source, variables)
