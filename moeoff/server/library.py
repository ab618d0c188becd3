"""llama-server as a library: the ctypes side of llamacpp_patches/src/server/moeoff-server.h. Loaded when a server starts, and never by a chat."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint64, c_void_p
from typing import NamedTuple

from .. import native, templates
from ..errors import ModelError, OptionError
from ..gguf.file import LONGEST_TEMPLATE, ModelFile, unpack

_NAME = "libllama-server-impl.so"

Loaded = CFUNCTYPE(c_int, c_void_p, c_void_p)
Ready = CFUNCTYPE(c_int, c_void_p, c_void_p, c_char_p, c_char_p)
Before = CFUNCTYPE(None, POINTER(c_int32), POINTER(c_int32), POINTER(c_int32), POINTER(c_uint8), c_int32)
After = CFUNCTYPE(c_int, c_int32, c_int32, c_void_p, c_size_t)
Lend = CFUNCTYPE(c_int, c_int64, c_void_p, c_size_t)
Metrics = CFUNCTYPE(None, c_void_p, c_size_t)
Keep = CFUNCTYPE(c_int, c_int64)
Wants = CFUNCTYPE(c_int, POINTER(c_int32), c_int32, c_uint64)
Answered = CFUNCTYPE(None, c_char_p, c_char_p, c_int32, c_char_p)


class Prompt(Structure):
    """struct moeoff_prompt"""

    _fields_ = [
        ("tokens", POINTER(c_int32)),
        ("n_tokens", c_int32),
        ("state_data", c_void_p),
        ("state_size", c_uint64),
        ("draft_data", c_void_p),
        ("draft_size", c_uint64),
    ]

    @property
    def parts(self) -> tuple[memoryview, memoryview]:
        """Bytes of both states."""
        return _bytes_at(self.state_data, self.state_size), _bytes_at(self.draft_data, self.draft_size)


def _bytes_at(address: int | None, size: int) -> memoryview:
    if not address or not size:
        return memoryview(b"")
    return memoryview((c_uint8 * size).from_address(address)).cast("B")


Takes = CFUNCTYPE(None, POINTER(Prompt))
Finds = CFUNCTYPE(c_int, POINTER(c_int32), c_int32, c_int32, POINTER(Prompt))
Reads = CFUNCTYPE(c_int, POINTER(Prompt))
Fills = CFUNCTYPE(None, c_int32)


class Hooks(Structure):
    """struct moeoff_server_hooks"""

    _fields_ = [
        ("buffer", c_void_p),
        ("overrides", POINTER(native.BuftOverride)),
        ("ending", POINTER(c_int32)),
        ("drafting", POINTER(c_int32)),
        ("loaded", Loaded),
        ("ready", Ready),
        ("before", Before),
        ("after", After),
        ("lend", Lend),
        ("metrics", Metrics),
        ("keep", Keep),
        ("answered", Answered),
        ("wants", Wants),
        ("takes", Takes),
        ("finds", Finds),
        ("reads", Reads),
        ("fills", Fills),
        ("page", c_char_p),
    ]


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """
    Raises:
        OptionError: this build has no server.
    """
    folder = os.path.dirname(str(native.lib._name))
    try:
        lib = ctypes.CDLL(os.path.join(folder, _NAME))
    except OSError as error:
        raise OptionError(f"this build of llama-cpp-python has no server, `make env` builds it ({error})") from None
    lib.moeoff_serve.restype, lib.moeoff_serve.argtypes = c_int, [c_int, POINTER(c_char_p), POINTER(Hooks)]
    lib.moeoff_server_check.restype, lib.moeoff_server_check.argtypes = c_bool, [c_int, POINTER(c_char_p), c_char_p, c_size_t]
    lib.moeoff_server_options.restype, lib.moeoff_server_options.argtypes = c_char_p, []
    lib.moeoff_projector_memory.restype = c_int32
    lib.moeoff_projector_memory.argtypes = [c_int, POINTER(c_char_p), POINTER(c_uint64), c_char_p, c_size_t]
    lib.moeoff_isolate_templates.restype, lib.moeoff_isolate_templates.argtypes = None, [c_char_p]
    lib.moeoff_serve_has_page.restype, lib.moeoff_serve_has_page.argtypes = c_bool, []
    lib.moeoff_serve_forget.restype, lib.moeoff_serve_forget.argtypes = None, [POINTER(Prompt)]
    lib.moeoff_serve_stop.restype, lib.moeoff_serve_stop.argtypes = None, []
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
    """One line of llama-server's own table: its names, those of the opposite, how many values it takes, and the variable that gives it."""

    names: tuple[str, ...]
    opposite: tuple[str, ...]
    n_values: int
    variable: str


@functools.cache
def server_options() -> dict[str, ServerOption]:
    """llama-server's own table of options, by each name and each of the opposite."""
    out: dict[str, ServerOption] = {}
    for line in library().moeoff_server_options().decode().splitlines():
        n_values, names, opposite, variable = line.split("\t")
        option = ServerOption(tuple(names.split()), tuple(opposite.split()), int(n_values), variable)
        out |= dict.fromkeys((*option.names, *option.opposite), option)
    return out


def aliases(name: str) -> tuple[str, ...]:
    """Every name that means the same in llama-server; of one that it does not have the name alone."""
    option = server_options().get(name)
    return (name,) if option is None else option.names if name in option.names else option.opposite


def check_arguments(argv: Sequence[str]) -> None:
    """
    Raises:
        OptionError: llama-server does not take them.
    """
    message = ctypes.create_string_buffer(1024)
    if not library().moeoff_server_check(len(argv), c_arguments(argv), message, len(message)):
        raise OptionError(" ".join(message.value.decode("utf-8", "replace").split()))


def check_templates(path: str) -> None:
    """Of a model's file. What a template makes of another conversation is found out when there is one: it fails, and the server goes on.

    Raises:
        ModelError: a chat template that crashes, or takes too long or too much, with an ordinary conversation.
    """
    with ModelFile(path, longest=LONGEST_TEMPLATE) as file:
        sources = [value for key, raw in file.metadata.items() if key.startswith("tokenizer.chat_template") and isinstance(value := unpack(raw), str)]
    for source in sources:
        try:
            templates.check_bounds(source)
        except templates.TemplateBoundError as error:
            raise ModelError(f"{path}: its chat template cannot be run: {error}") from None


def write_text(address: int, size: int, text: str) -> None:
    """Into a buffer of the library's, cut where it ends."""
    data = text.encode("utf-8", "replace")[: size - 1] + b"\0"
    ctypes.memmove(address, data, len(data))
