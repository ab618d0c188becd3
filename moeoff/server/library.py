"""llama-server as a library: the ctypes side of moeoff-server.h."""

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
    """Return a prompt's states: two at its end, then three of each checkpoint."""
    listed = zip(prompt.states, prompt.sizes[: 2 + 3 * prompt.n_checkpoints])
    return tuple(
        np.ctypeslib.as_array(data, (size,)).data if size else memoryview(b"")
        for data, size in listed
    )


def hooks(**fields: Any) -> ServerHooks:
    """Make the server's hooks. The struct must outlive the server."""
    kinds = {name: kind for name, kind, *_ in ServerHooks._fields_}
    return ServerHooks(
        **{name: kinds[name](value) if callable(value) else value for name, value in fields.items()}
    )


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Load the server's library.

    Raises:
        OptionError: This build has no server.
        ForkError: The build has another version of the server.
    """
    folder = os.path.dirname(str(llama.lib._name))
    try:
        lib = ctypes.CDLL(os.path.join(folder, _NAME))
    except OSError as error:
        raise OptionError(
            f"this build of llama-cpp-python has no server: run `make run` ({error})"
        ) from None
    other_version = ForkError(
        "llama-cpp-python has another version of the server: run `make env` to rebuild it"
    )
    for name, (result, *arguments) in SERVER_FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise other_version
        function.restype, function.argtypes = result, arguments
    if lib.moeoff_server_layout().decode() != native.layout(SERVER_STRUCTS):
        raise other_version
    lib.moeoff_isolate_templates(os.fsencode(templates.program()))
    return lib


def c_arguments(argv: Sequence[str]) -> ctypes.Array[c_char_p]:
    """Convert arguments to a null-terminated char **."""
    return (c_char_p * (len(argv) + 1))(*map(os.fsencode, argv), None)


def projector_memory(argv: Sequence[str]) -> tuple[int, int, int, str]:
    """Plan the projector of a command line. A file that lacks a tensor crashes the
    process.

    Returns:
        Embedding width or 0; bytes of weights and of compute buffers; llama.cpp's
        error.
    """
    sizes, message = (c_uint64 * 2)(), ctypes.create_string_buffer(1024)
    width = library().moeoff_projector_memory(
        len(argv), c_arguments(argv), sizes, message, len(message)
    )
    return width, sizes[0], sizes[1], message.value.decode("utf-8", "replace")


class ServerOption(NamedTuple):
    """An option of llama-server.

    Attributes:
        opposite: Names that switch it off.
        variable: Environment variable.
        chats: True if llama-cli also has the option.
    """

    names: tuple[str, ...]
    opposite: tuple[str, ...]
    n_values: int
    variable: str
    chats: bool


@functools.cache
def server_options() -> dict[str, ServerOption]:
    """Return llama-server's options by each name, including opposites."""
    out: dict[str, ServerOption] = {}
    for line in library().moeoff_server_options().decode().splitlines():
        n_values, names, opposite, variable, chats = line.split("\t")
        option = ServerOption(
            tuple(names.split()), tuple(opposite.split()), int(n_values), variable, chats == "1"
        )
        out |= dict.fromkeys((*option.names, *option.opposite), option)
    return out


def aliases(name: str) -> tuple[str, ...]:
    """Return all names of llama-server's option `name`. An unknown name has no others."""
    option = server_options().get(name)
    return (name,) if option is None else option.names if name in option.names else option.opposite


def check_arguments(argv: Sequence[str]) -> None:
    """Raise `OptionError` if llama-server refuses a command line."""
    message = ctypes.create_string_buffer(1024)
    if not library().moeoff_server_check(len(argv), c_arguments(argv), message, len(message)):
        raise OptionError(" ".join(message.value.decode("utf-8", "replace").split()))


def check_templates(path: str, args: Sequence[str]) -> None:
    """Try the chat templates of the command line, or else the model's.

    Raises:
        ModelError: A template of the model cannot be parsed, crashes, or exceeds a
            limit.
        OptionError: The same for a template of the command line.
    """
    for name, given in zip(args, args[1:]):
        if name in ("--chat-template", "--chat-template-file"):
            if (source := _template_source(name, given, "--no-jinja" not in args)) and (
                why := _fault(source)
            ):
                raise OptionError(f"{name}: the template {why}")
            return
    with ModelFile(path, longest=LONGEST_TEMPLATE) as file:
        sources = [
            value
            for key, raw in file.metadata.items()
            if key.startswith("tokenizer.chat_template") and isinstance(value := unpack(raw), str)
        ]
    for source in sources:
        if why := _fault(source):
            raise ModelError(f"{path}: its chat template {why}")


def _template_source(name: str, value: str, jinja: bool) -> str:
    """Return the source of a template, "" for llama.cpp's by name."""
    if name.endswith("file"):
        return read_text(value)
    if "{" in value:
        return value
    if value != "chatml" and jinja:
        raise OptionError(
            f"{name}: expected a Jinja template or chatml, got {value!r}; or give {name}-file"
        )
    return ""


def _fault(source: str) -> str:
    """Return what is wrong with a template, or ""."""
    try:
        templates.check_bounds(source)
        templates.check(source)
    except templates.TemplateBoundError as error:
        return f"cannot be run: {error}"
    except templates.TemplateError as error:
        return f"cannot be read: {str(error).rstrip('.')}"
    return ""


def write_text(address: int, size: int, text: str) -> None:
    """Write a null-terminated text into a buffer of `size` bytes, truncated."""
    data = text.encode("utf-8", "replace")[: size - 1] + b"\0"
    ctypes.memmove(address, data, len(data))
