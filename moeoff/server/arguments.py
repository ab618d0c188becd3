"""llama-server's command line: parsed into moeoff's options, and made from them.

Words in the table of options become that option, under any of llama-server's names.
Words without effect are left out, unsupported ones are refused with the reason, and
others are passed on.
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
_VECTOR_COPIES = 3  # of file, sums and context
_NGRAM_COPIES = 10  # bytes per byte of file: nested hash tables
# least share of a prompt in a slot that is reused; continued prompts need less
_SIMILARITY = 0.5
# beside two per answer, as waiting requests hold a thread, and /health must not wait
_HTTP_THREADS = 32
_ENVIRONMENT = "LLAMA_ARG_"
_THEIRS = {"serve": "llama-server", "run": "llama-cli"}
_TRUE, _FALSE = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


@dataclass(frozen=True)
class PassedFile:
    """A file and the llama-server option that names it."""

    option: str
    path: str

    @property
    def kind(self) -> int:
        return file_kinds()[self.option]

    def memory(self) -> int:
        """Return the bytes that llama-server takes for the file.

        Raises:
            MoeoffError: The path is no file, or none of its kind.
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
    """A parsed command line of llama-server.

    Attributes:
        options: Options of moeoff by Python name.
        passed_on: Words for llama-server.
        left_out: Sentences on words without effect.
        files: Files named in `passed_on`.
        alone: Positional words.
        own: Values of the command's own options.
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
    ) -> CommandLine:  # noqa: B006  # read-only
        """Parse words.

        Args:
            program: Command: serve or run.
            own: The command's own options, and whether each takes a value. Allows
                positional words before a --.

        Raises:
            OptionError: An option is unsupported, unknown, or lacks its value.
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
                # options of llama-server whose values are checked here
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
    """The meaning of an option's name: number of values, and the llama.cpp option or
    the line of the table.

    Attributes:
        value: Value that the name implies.
        switch: True if on or off may follow.
    """

    n_values: int
    llama_option: LlamaOption | None = None
    line: Option | None = None
    value: bool = True
    switch: bool = False


@functools.cache
def _names(program: str) -> dict[str, _Name]:
    """Return all names of options, here and in llama-server.

    llama.cpp's options take precedence over the table, and the table over
    llama-server's own. `run` refuses those of servers.
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
    """Return the option's name in llama-server's table."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else word


def _next_option(words: list[str], names: Mapping[str, _Name]) -> tuple[str, list[str]]:
    """Remove the first option and its values from a command line, and return them."""
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
    """Return the kinds of files that llama-server's options name, by each name."""
    return {alias: kind for name, kind in FILES.items() for alias in aliases(name)}


def _paths(name: str, value: str) -> list[str]:
    """Return the files that an option of llama-server names."""
    if file_kinds()[name] not in (_ADAPTER, _VECTOR):
        return [value]
    try:
        paths = [path for row in csv.reader([value]) for path in row]
    except csv.Error as error:
        raise OptionError(f"{name} {value}: {error}") from None
    return [path.partition(":")[0] for path in paths] if name.endswith("-scaled") else paths


def check_files(passed_on: Sequence[PassedFile], others: Sequence[str]) -> int:
    """Check files before llama-server opens them.

    llama-server would wait for a pipe's writer, allocate the size in a header, and
    overwrite any file with its log's name.

    Args:
        others: Files in use.

    Returns:
        Bytes that llama-server takes for the files while loading.

    Raises:
        MoeoffError: A file is missing, of another kind, too long, or would be
            overwritten.
    """
    read = [file for file in passed_on if file.kind not in (_WRITTEN, _FOLDER)]
    used = [*others, *(file.path for file in read)]
    for file in passed_on:
        if file.kind == _WRITTEN:
            require_new(file.path, used, file.option)
            # a file without a name, as a shell's >(...), has its reader
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
    """Return the files of a model and of moeoff's options."""
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
    """Yield the options in llama-server's environment (LLAMA_ARG_*) and their values.

    `run` ignores those of servers.
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
    """Return argv.

    Args:
        n_ctx: Context length of all slots in tokens.
        keywords: Keywords of llama_cpp.Llama from `Config.keywords`.
        prompts: Memory limits of prompts.

    Raises:
        OptionError: llama-server has a keyword under another name, or adapters cannot
            be passed on.
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
    # without a cache no prompt is evicted
    cache_ram = max(prompts.cache_ram // MIB, 1 if options.kv_disk else 0)
    out += [
        "--cache-ram",
        str(cache_ram),
        "--ctx-checkpoints",
        str(prompts.n_checkpoints),
        "--slot-prompt-similarity",
        str(_SIMILARITY),
    ]
    # idle slots keep their prompts: such a small cache may not hold them
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
        # a number is taken from llama_cpp's keywords
        value = getattr(config, name) if line.number else keywords.get(name, getattr(config, name))
        # llama-server's default would choose flash attention itself
        out += (
            line.server_arguments(value)
            if value != line.default or line.name == "flash_attn"
            else []
        )
    # llama_cpp's default: a sliding window's state could not be continued
    if config.swa_full is not False:
        out.append("--swa-full")
    for name, line in table_of(ServerOptions).items():
        out += line.server_arguments(getattr(options, name))
    if options.mmproj:
        # images are planned and computed one at a time
        out += ["--mtmd-batch-max-tokens", "1"]
    return [*out, *options.args]
