"""llama-server's command line: what one that somebody has means here, and the one that
a server is started with. Both are made from the table of options.

What is in the table becomes that option, under any of llama-server's names for it; what
asks for what is so anyway is left out; what cannot be is refused, with the reason; the
rest is passed on.
"""

from __future__ import annotations

import csv
import difflib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OptionError
from ..experts.profile import profile_path
from ..experts.sidecar import Sidecar, sidecar_path
from ..gguf.model_index import loaded_whole
from ..llamacpp.llama_cpp_options import IDLE, REFUSED, LlamaOption, options_of
from ..option import Option, table_of
from ..options import TABLE, Config, Sampling, ServerOptions, without_gpu
from ..system.files import TEXT, open_file, require_new
from ..system.memory import MIB, format_size
from .library import aliases, server_options
from .sizes import PromptMemory

_TEXT, _ADAPTER, _VECTOR, _NGRAMS, _WRITTEN, _FOLDER = range(6)  # kinds of files
FILES = {  # by one of an option's names
    "--grammar-file": _TEXT,
    "--json-schema-file": _TEXT,
    "--chat-template-file": _TEXT,
    "--ui-config-file": _TEXT,
    # several each, separated by commas
    "--lora": _ADAPTER,
    "--lora-scaled": _ADAPTER,
    "--control-vector": _VECTOR,
    "--control-vector-scaled": _VECTOR,
    "--lookup-cache-static": _NGRAMS,
    "--lookup-cache-dynamic": _NGRAMS,
    "--log-file": _WRITTEN,
    "--slot-save-path": _FOLDER,  # clients name the files in it
}
_VECTOR_COPIES = 3  # of the file, of its sums, and of the context
_NGRAM_COPIES = 10  # bytes for each of the file's: one hash table in another
# of a prompt, what a slot must hold to be taken for it, unless the prompt goes on from
# most of what is there
_SIMILARITY = 0.5
# beside two for each answer: one that waits for its turn holds a thread, and /health
# and /metrics must not wait
_HTTP_THREADS = 32
_ENVIRONMENT = "LLAMA_ARG_"
_THEIRS = {"serve": "llama-server", "run": "llama-cli"}
_TRUE, _FALSE = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


@dataclass(frozen=True)
class PassedFile:
    """A file, and the option of llama-server's that names it."""

    option: str
    path: str

    @property
    def kind(self) -> int:
        return file_kinds()[self.option]

    def memory(self) -> int:
        """Bytes that llama-server takes for it. Raises `MoeoffError` if it is no file,
        or none of its kind.
        """
        if self.kind in (_ADAPTER, _VECTOR):
            weights, header = loaded_whole(self.path)
            return header + (_VECTOR_COPIES if self.kind == _VECTOR else 1) * weights
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise OptionError(
                f"{self.option} {self.path}: cannot be read: {error.strerror}"
            ) from None
        if self.kind == _TEXT and size > TEXT:
            raise OptionError(
                f"{self.option} {self.path}: it has {format_size(size)}, expected at most"
                f" {format_size(TEXT)}"
            )
        return _NGRAM_COPIES * size if self.kind == _NGRAMS else size


@dataclass(frozen=True)
class CommandLine:
    """A command line of llama-server's, in the terms of this server.

    Attributes:
        options: of moeoff's, by name in Python.
        passed_on: to llama-server.
        left_out: why something has no effect, a sentence each.
        files: that what is passed on names.
        alone: words that stand for themselves.
        own: the command's own options, and their values.
    """

    options: dict[str, Any] = field(default_factory=dict)
    passed_on: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    files: list[PassedFile] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls, args: Sequence[str], program: str = "serve", own: Mapping[str, bool] = {}
    ) -> CommandLine:  # noqa: B006  # is only read
        """Read its words, one after the other.

        Args:
            program: whose command line it is: serve or run.
            own: the command's own options, and whether each takes a value. With them
                words may stand for themselves, before a --.

        Raises:
            OptionError: what cannot be, is not known, or has no value.
        """
        out, words, names, stands_alone = cls(), list(args), _names(program), bool(own)
        while words:
            flag, equals, _ = words[0].partition("=")
            if own and flag == "--":
                stands_alone = not words.pop(0)
                continue
            if flag in own or (stands_alone and not flag.startswith("-")):
                n = 1 + int(own.get(flag, False) and not equals)
                (out.own if flag in own else out.alone).extend(words[:n])
                del words[:n]
                continue
            name, values = _next_option(words, names)
            if (known := names.get(name)) is None:
                near = difflib.get_close_matches(
                    name, [name for name, known in names.items() if known.line], 1
                )
                raise OptionError(
                    f"{name}: neither moeoff {program} nor {_THEIRS[program]} has such an option"
                    + (f"; is it {near[0]}?" if near else "")
                )
            llama_option, line = known.llama_option, known.line
            if llama_option is not None and llama_option.verdict == REFUSED:
                raise OptionError(f"{name}: {llama_option.why}")
            if len(values) < known.n_values:
                raise OptionError(f"{name} needs a value")
            if llama_option is not None:
                out.left_out.extend(
                    [f"{name} has no effect: {llama_option.why}"]
                    if llama_option.verdict == IDLE
                    else []
                )
            elif line is None:
                out.passed_on.extend([name, *values])
                out.files.extend(
                    PassedFile(name, path)
                    for path in (_paths(name, values[0]) if name in file_kinds() else ())
                )
            elif line.name in table_of(Sampling):
                # llama-server's own, whose values are looked at here
                line.read(values[0] if values else True)
                out.passed_on.extend([line.server, *values])
            elif not values:
                out.options[line.name] = known.value
            elif line.multiple:
                out.options[line.name] = [*out.options.get(line.name, []), *values[0].split(",")]
            else:
                out.options[line.name] = line.read(values[0])
        out.left_out.extend(without_gpu(out.options))
        return out


class _Name(NamedTuple):
    """Meaning of an option's name: how many words behind it are its values, and the
    llama.cpp option or the line of the table that it stands for.

    Attributes:
        value: of the line, that the name alone gives.
        switch: on or off may follow.
    """

    n_values: int
    llama_option: LlamaOption | None = None
    line: Option | None = None
    value: bool = True
    switch: bool = False


@functools.cache
def _names(program: str) -> dict[str, _Name]:
    """Return every name that an option has here or in llama-server.

    An option of llama.cpp goes before a line of the table, and that before
    llama-server's own. In `run` those of a server alone are refused.
    """
    theirs = server_options()
    out = {
        name: _Name(
            option.n_values,
            (
                None
                if option.chats or program == "serve"
                else LlamaOption(REFUSED, "moeoff serve takes it: it is of servers")
            ),
        )
        for name, option in theirs.items()
    }
    for line in (line for line in TABLE.values() if program in line.commands):
        out |= dict.fromkeys(line.flags, _Name(int(bool(line.metavar)), line=line))
        for option in (theirs[name] for name in (*line.flags, line.server) if name in theirs):
            out |= dict.fromkeys(
                option.names,
                _Name(
                    int(bool(option.n_values)),
                    line=line,
                    switch=bool(line.metavar) and not option.n_values,
                ),
            )
            out |= dict.fromkeys(option.opposite, _Name(0, line=line, value=False))
    return out | {
        alias: _Name(int(llama_option.takes_value), llama_option)
        for name, llama_option in options_of(program).items()
        for alias in aliases(name)
    }


def _spelled(word: str) -> str:
    """The name of an option, as llama-server's table has it."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else word


def _next_option(words: list[str], names: Mapping[str, _Name]) -> tuple[str, list[str]]:
    """Takes the first option off a command line, and the words that are its values: as
    many as there are of those that it takes.
    """
    word = words.pop(0)
    name = _spelled(word)
    known = names.get(name)
    equals = word.startswith("--") and "=" in word
    if equals:
        words.insert(0, word.partition("=")[2])
    n = (
        0
        if known is None
        else known.n_values
        or int(known.switch and bool(words) and words[0].lower() in _TRUE + _FALSE)
    )
    if equals and known is not None and not n:
        raise OptionError(f"{name} takes no value, and {words[0]!r} is given")
    values = words[:n]
    del words[:n]
    return name, values


@functools.cache
def file_kinds() -> dict[str, int]:
    """Kinds of the files that llama-server's options name, by every name that these
    have.
    """
    return {alias: kind for name, kind in FILES.items() for alias in aliases(name)}


def _paths(name: str, value: str) -> list[str]:
    """The files that an option of llama-server's names."""
    if file_kinds()[name] not in (_ADAPTER, _VECTOR):
        return [value]
    try:
        paths = [path for row in csv.reader([value]) for path in row]
    except csv.Error as error:
        raise OptionError(f"{name} {value}: {error}") from None
    return [path.partition(":")[0] for path in paths] if name.endswith("-scaled") else paths


def check_files(passed_on: Sequence[PassedFile], others: Sequence[str]) -> int:
    """Checks files before llama-server opens them: it waits for whoever writes to a
    pipe, takes what a header claims to need, and writes over what has the name of its
    log.

    Args:
        others: files that are in use.

    Returns:
        bytes that it takes for these files while it loads.

    Raises:
        MoeoffError: one is no file, or none of its kind, too long, or would be written
            over.
    """
    read = [file for file in passed_on if file.kind not in (_WRITTEN, _FOLDER)]
    used = [*others, *(file.path for file in read)]
    for file in passed_on:
        if file.kind == _WRITTEN:
            require_new(file.path, used, file.option)
            # one without a name, as a shell's >(...), has its reader
            if Path(os.path.realpath(file.path)).is_fifo():
                raise OptionError(
                    f"{file.option} {file.path}: is a pipe, and llama-server would wait for its"
                    " reader: name a file"
                )
        elif file.kind == _FOLDER and any(
            os.path.realpath(file.path) == os.path.dirname(os.path.realpath(path)) for path in used
        ):
            raise OptionError(
                f"{file.option} {file.path}: files lie there that are in use, and clients could"
                " write over them: name another folder"
            )
    return sum(file.memory() for file in read)


def in_use(model_files: Sequence[str], config: Config, options: ServerOptions) -> list[str]:
    """A model's files, those that are found beside it by name, and those that moeoff's
    own options name.
    """
    named = [
        getattr(values, name)
        for values, kind in ((config, Config), (options, ServerOptions))
        for name, line in table_of(kind).items()
        if line.is_file
    ]
    named = [value.path if isinstance(value, Sidecar) else value for value in named]
    beside = [sidecar_path(model_files[0]), profile_path(model_files[0])]
    return [
        *model_files,
        *beside,
        *(os.fspath(value) for value in named if isinstance(value, (str, os.PathLike))),
    ]


def of_environment(
    environment: Mapping[str, str], program: str = "serve"
) -> Iterator[tuple[str, ...]]:
    """Yield the options that llama-server's variables (LLAMA_ARG_*) stand for, with
    their values; in `run` without those of servers alone.
    """
    if not any(name.startswith(_ENVIRONMENT) for name in environment):
        return  # without loading the server
    for option in dict.fromkeys(
        option for option in server_options().values() if option.variable.startswith(_ENVIRONMENT)
    ):
        if program == "run" and not option.chats:
            continue
        value = environment.get(option.variable)
        switch = None if value is None or option.n_values else value.lower()
        if option.opposite and (
            switch in _FALSE
            or option.variable.replace(_ENVIRONMENT, f"{_ENVIRONMENT}NO_") in environment
        ):
            yield option.opposite[:1]
        elif value is not None and option.n_values:
            yield option.names[-1], value
        elif switch in _TRUE:
            yield option.names[-1:]


def arguments(
    config: Config,
    n_ctx: int,
    keywords: Mapping[str, Any],
    options: ServerOptions,
    prompts: PromptMemory,
) -> list[str]:
    """argv.

    Args:
        n_ctx: tokens of the context that all slots share.
        keywords: of llama_cpp.Llama, as `Config.keywords` gives them.
        prompts: what is remembered of them.

    Raises:
        OptionError: a keyword that llama-server has under another name, or adapters
            that cannot be passed on.
    """
    config.check_adapters(any(argument.startswith("--lora") for argument in options.args))
    if unknown := {name for name, value in config.llama_cpp.items() if value is not None} - {
        "use_mmap",
        "use_mlock",
    }:
        raise OptionError(f"{min(unknown)}: give llama-server's own option for it in args")
    out = [
        "llama-server",
        "-m",
        config.model_path,
        "-c",
        str(n_ctx),
        "--kv-unified" if options.kv_unified else "--no-kv-unified",
    ]
    # without a cache nothing falls out of it
    cache_ram = max(prompts.cache_ram // MIB, 1 if options.kv_disk else 0)
    out += [
        "--cache-ram",
        str(cache_ram),
        "--ctx-checkpoints",
        str(prompts.n_checkpoints),
        "--slot-prompt-similarity",
        str(_SIMILARITY),
    ]
    # what is in a slot stays there until the slot is needed: a cache of this size may
    # be too small for it
    if not options.cache_ram:
        out.append("--no-cache-idle-slots")
    out += [
        "--threads-http",
        str(_HTTP_THREADS + 2 * prompts.n_slots),
        "--metrics",
        "--no-slots",
        "-lv",
        "4" if config.verbose else "1",
    ]
    for name, line in table_of(Config).items():
        # its number is llama_cpp's
        value = getattr(config, name) if line.number else keywords.get(name, getattr(config, name))
        # llama-server would choose flash attention by itself
        out += (
            line.server_arguments(value)
            if value != line.default or line.name == "flash_attn"
            else []
        )
    # llama_cpp's default: what a sliding window forgets could not be gone on from
    if config.swa_full is not False:
        out.append("--swa-full")
    for name, line in table_of(ServerOptions).items():
        out += line.server_arguments(getattr(options, name))
    if options.mmproj:
        # one picture is computed at a time, and planned for
        out += ["--mtmd-batch-max-tokens", "1"]
    return [*out, *options.args]
