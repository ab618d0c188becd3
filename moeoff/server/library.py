"""llama-server as a library: the ctypes side of llamacpp_patches/src/server/moeoff-server.h. Loaded when a server starts, and never by a chat."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_uint64
from typing import Any, NamedTuple

import numpy as np

from ..errors import ForkError, ModelError, OptionError
from ..gguf.file import LONGEST_TEMPLATE, ModelFile, unpack
from ..llamacpp import llama, native, templates
from ..llamacpp._abi import SERVER_FUNCTIONS, SERVER_STRUCTS, Prompt, ServerHooks
from ..system.files import read_text

_NAME = "libllama-server-impl.so"


def states(prompt: Prompt) -> tuple[memoryview, ...]:
    """Bytes of a prompt's states: both behind all of it, then three of each checkpoint."""
    listed = zip(prompt.states, prompt.sizes[: 2 + 3 * prompt.n_checkpoints])
    return tuple(np.ctypeslib.as_array(data, (size,)).data if size else memoryview(b"") for data, size in listed)


def hooks(**fields: Any) -> ServerHooks:
    """The struct of all that the server calls and reads: functions by the names of the fields, which must live as long as the server."""
    kinds = {name: kind for name, kind, *_ in ServerHooks._fields_}
    return ServerHooks(**{name: kinds[name](value) if callable(value) else value for name, value in fields.items()})


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The server's library, loaded at the first call.

    Raises:
        OptionError: this build has no server.
        ForkError: it has another one.
    """
    folder = os.path.dirname(str(llama.lib._name))
    try:
        lib = ctypes.CDLL(os.path.join(folder, _NAME))
    except OSError as error:
        raise OptionError(f"this build of llama-cpp-python has no server, `make run` builds it ({error})") from None
    for name, (result, *arguments) in SERVER_FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ForkError(f"the installed llama-cpp-python has another version of the server ({name}): run `make env` to rebuild it")
        function.restype, function.argtypes = result, arguments
    if lib.moeoff_server_layout().decode() != native.layout(SERVER_STRUCTS):
        raise ForkError("the installed llama-cpp-python has another version of the server: run `make env` to rebuild it")
    lib.moeoff_isolate_templates(os.fsencode(templates.program()))
    return lib


def c_arguments(argv: Sequence[str]) -> ctypes.Array[c_char_p]:
    """char ** argv, ended by a null."""
    return (c_char_p * (len(argv) + 1))(*map(os.fsencode, argv), None)


def projector_memory(argv: Sequence[str]) -> tuple[int, int, int, str]:
    """Plans llama-server's projector: numbers of an embedding, 0 if it cannot be loaded; bytes of its weights, and of what it computes with; why it cannot be
    loaded. A file that lacks what llama.cpp computes with ends the process."""
    sizes, message = (c_uint64 * 2)(), ctypes.create_string_buffer(1024)
    width = library().moeoff_projector_memory(len(argv), c_arguments(argv), sizes, message, len(message))
    return width, sizes[0], sizes[1], message.value.decode("utf-8", "replace")


class ServerOption(NamedTuple):
    """One line of llama-server's own table.

    Attributes:
        opposite: names that switch it off.
        chats: llama-cli has it, too.
    """

    names: tuple[str, ...]
    opposite: tuple[str, ...]
    n_values: int
    variable: str
    chats: bool


@functools.cache
def server_options() -> dict[str, ServerOption]:
    """llama-server's own table of options, by each name and each of the opposite."""
    out: dict[str, ServerOption] = {}
    for line in library().moeoff_server_options().decode().splitlines():
        n_values, names, opposite, variable, chats = line.split("\t")
        option = ServerOption(tuple(names.split()), tuple(opposite.split()), int(n_values), variable, chats == "1")
        out |= dict.fromkeys((*option.names, *option.opposite), option)
    return out


def aliases(name: str) -> tuple[str, ...]:
    """Every name that means the same in llama-server; of one that it does not have the name alone."""
    option = server_options().get(name)
    return (name,) if option is None else option.names if name in option.names else option.opposite


def check_arguments(argv: Sequence[str]) -> None:
    """Has llama-server read a command line.

    Raises:
        OptionError: llama-server does not take them.
    """
    message = ctypes.create_string_buffer(1024)
    if not library().moeoff_server_check(len(argv), c_arguments(argv), message, len(message)):
        raise OptionError(" ".join(message.value.decode("utf-8", "replace").split()))


def check_templates(path: str, args: Sequence[str]) -> None:
    """Try a model's templates, or one of the command line in their place. What one makes of another conversation is found out when there is one.

    Raises:
        ModelError: a chat template that cannot be read, crashes, or takes too long or too much, with an ordinary conversation.
        OptionError: the same of one of the command line.
    """
    for name, given in zip(args, args[1:]):
        if name in ("--chat-template", "--chat-template-file"):
            if (source := _given_template(name, given, "--no-jinja" not in args)) and (why := _fault(source)):
                raise OptionError(f"{name}: the template {why}")
            return
    with ModelFile(path, longest=LONGEST_TEMPLATE) as file:
        sources = [value for key, raw in file.metadata.items() if key.startswith("tokenizer.chat_template") and isinstance(value := unpack(raw), str)]
    for source in sources:
        if why := _fault(source):
            raise ModelError(f"{path}: its chat template {why}")


def _given_template(name: str, value: str, jinja: bool) -> str:
    """Return the source of a template of the command line; of one that has a name nothing."""
    if name.endswith("file"):
        return read_text(value)
    if "{" in value:
        return value
    if value != "chatml" and jinja:
        raise OptionError(f"{name}: a Jinja template or chatml, not {value!r}; one in a file is given with {name}-file")
    return ""


def _fault(source: str) -> str:
    """Return what is wrong with a template, or nothing."""
    try:
        templates.check_bounds(source)
        templates.check(source)
    except templates.TemplateBoundError as error:
        return f"cannot be run: {error}"
    except templates.TemplateError as error:
        return f"cannot be read: {str(error).rstrip('.')}"
    return ""


def write_text(address: int, size: int, text: str) -> None:
    """Into a buffer of the library's, cut where it ends."""
    data = text.encode("utf-8", "replace")[: size - 1] + b"\0"
    ctypes.memmove(address, data, len(data))
