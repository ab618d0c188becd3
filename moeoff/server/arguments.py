"""llama-server's command line: what one that somebody has means here, and the one that a server is started with. Both are made from the table of options.

What is in the table becomes that option, under any of llama-server's names for it; what asks for what is so anyway is left out; what cannot be is
refused, with the reason; the rest is passed on.
"""

from __future__ import annotations

import csv
import difflib
import functools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..files import TEXT, open_file, require_new
from ..gguf.model_index import loaded_whole
from ..memory import MIB, format_size
from ..options import Config, Option, ServerOptions, table_of, without_gpu
from ..sidecar.file import Sidecar, sidecar_path
from ..sidecar.profile import profile_path
from .kept_prompts import KeptPrompts
from .library import check_arguments

_PLACE = "experts are served from the expert buffer, and moeoff places the rest: give --override-tensor or -ngl to moeoff serve"
_BUDGET = "memory is bounded by --memory, and planned before anything is loaded"
_FILE = "models are files that are there: nothing is downloaded but with moeoff serve -hf"
_ENDS = "it ends the process that serves"
REFUSED: dict[str, str] = {
    name: reason
    for names, reason in (
        ("-otd --override-tensor-draft --spec-draft-override-tensor -dev --device", _PLACE),
        ("-m --model", "the model is given to the server itself"),
        ("--spec-default", "name the kind of drafts: --spec-type"),
        ("--mtmd-batch-max-tokens", _BUDGET),
        ("-mu --model-url -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -hfd -hfrd --hf-repo-draft --spec-draft-hf -mmu --mmproj-url -dr "
         "--docker-repo --mtp --dflash --eagle3 --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
         "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
         "--vision-gemma-12b-default", _FILE),
        ("-h --help --usage --version -cl --cache-list --completion-bash --list-devices --license", _ENDS),
        ("--models-dir --models-preset --models-max --models-autoload --no-models-autoload", "there is no router: one model for each server"),
        ("--sleep-idle-seconds", "a model that sleeps would have to be put together again"),
        ("--ssl-key-file --ssl-cert-file", "this build has no TLS: let a proxy on this machine, as Caddy or nginx, speak https for it"),
        ("--tools --tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent", "it lets answers start programs on this machine"),
    )
    for name in names.split()
}  # fmt: skip
_NONE, _ONE = 0, 1  # values
_TWO = {"--control-vector-layer-range": 2}
_LEFT_OUT: dict[str, tuple[int, str]] = {
    name: (n_values, reason)
    for names, n_values, reason in (
        ("-cmoe --cpu-moe -cmoed --cpu-moe-draft --spec-draft-cpu-moe", _NONE, "experts are served from the expert buffer"),
        ("-ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe", _ONE,
         "experts are served from the expert buffer; --vram gives a GPU those that fit there"),
        ("-fit --fit -fitt --fit-target -fitc --fit-ctx", _ONE, _BUDGET),
        ("--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io --no-host --warmup --no-warmup", _NONE, "experts are read as they are used"),
        ("-lm --load-mode -lzm --lazy-mode", _ONE, "experts are read as they are used"),
        ("-nr --no-repack --metrics -cb --cont-batching --offline", _NONE, ""),  # it is so
        ("--repack", _NONE, "repacked kernels round differently from the ones experts are computed with"),
        ("--threads-http", _ONE, "there are as many as the answers at a time need"),
    )
    for name in names.split()
}  # fmt: skip
_TEXT, _ADAPTER, _VECTOR, _NGRAMS, _WRITTEN, _FOLDER = range(6)  # kinds of files
FILES: dict[str, int] = {
    name: kind
    for kind, names in {
        _TEXT: "--grammar-file -jf --json-schema-file --chat-template-file --ui-config-file --webui-config-file",
        _ADAPTER: "--lora --lora-scaled",  # several each, separated by commas
        _VECTOR: "--control-vector --control-vector-scaled",
        _NGRAMS: "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
        _WRITTEN: "--log-file",
        _FOLDER: "--slot-save-path",  # clients name the files in it
    }.items()
    for name in names.split()
}
_VECTOR_COPIES = 3  # of the file, of its sums, and of the context
_NGRAM_COPIES = 10  # bytes for each of the file's: one hash table in another
_SIMILARITY = 0.5  # of a prompt, what a slot must hold to be taken for it: a shared system prompt alone would cost someone their conversation
_HTTP_THREADS = 32  # beside two for each answer: one that waits for its turn holds a thread, and /health and /metrics must not wait
_ENVIRONMENT = "LLAMA_ARG_"
_VARIABLES = {  # whose option has another name
    "BATCH": "--batch-size", "UBATCH": "--ubatch-size", "N_PARALLEL": "--parallel", "TEMPERATURE": "--temp", "ROPE_SCALING_TYPE": "--rope-scaling",
    "STATIC_PATH": "--path", "THINK": "--reasoning-format", "THINK_BUDGET": "--reasoning-budget", "THINK_BUDGET_MESSAGE": "--reasoning-budget-message",
    "ENDPOINT_METRICS": "--metrics", "ENDPOINT_PROPS": "--props", "ENDPOINT_SLOTS": "--slots", "CHECKPOINT_MIN_SPACING_NT": "--checkpoint-min-step",
    "SPEC_DRAFT_CACHE_TYPE_K": "--spec-draft-type-k", "SPEC_DRAFT_CACHE_TYPE_V": "--spec-draft-type-v", "N_GPU_LAYERS_DRAFT": "--spec-draft-ngl",
}  # fmt: skip
_TRUE, _FALSE = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")


@dataclass(frozen=True)
class PassedFile:
    """A file, and the option of llama-server's that names it."""

    option: str
    path: str

    @property
    def kind(self) -> int:
        return FILES[self.option]

    def memory(self) -> int:
        """Bytes that llama-server takes for it. Raises `MoeoffError` if it is no file, or none of its kind."""
        if self.kind in (_ADAPTER, _VECTOR):
            weights, header = loaded_whole(self.path)
            return header + (_VECTOR_COPIES if self.kind == _VECTOR else 1) * weights
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise OptionError(f"{self.option} {self.path}: cannot be read: {error.strerror}") from None
        if self.kind == _TEXT and size > TEXT:
            raise OptionError(f"{self.option} {self.path}: it has {format_size(size)}, expected at most {format_size(TEXT)}")
        return _NGRAM_COPIES * size if self.kind == _NGRAMS else size


@dataclass(frozen=True)
class CommandLine:
    """What a command line of llama-server's means here.

    Attributes:
        options: of moeoff's, by name in Python.
        passed_on: to llama-server.
        left_out: why something has no effect, a sentence each.
        files: that what is passed on names.
    """

    options: dict[str, Any] = field(default_factory=dict)
    passed_on: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    files: list[PassedFile] = field(default_factory=list)

    @classmethod
    def read(cls, args: Sequence[str]) -> CommandLine:
        """
        Raises:
            OptionError: what cannot be, is not known, or has no value.
        """
        out = cls()
        rest = _Words(args)
        for name in rest:
            if name in REFUSED:
                raise OptionError(f"{name} cannot be passed to llama-server: {REFUSED[name]}")
            if found := _ours().get(name):
                line, value = found
                if value is not None:
                    out.options[line.name] = value
                elif line.multiple:
                    out.options[line.name] = [*out.options.get(line.name, []), *rest.value(name).split(",")]
                else:
                    out.options[line.name] = line.read(rest.value_of(_TRUE + _FALSE, "on") if line.bare else rest.value(name))
            elif name in _LEFT_OUT:
                n_values, reason = _LEFT_OUT[name]
                for _ in range(n_values):
                    rest.value(name)
                if reason:
                    out.left_out.append(f"{name} has no effect: {reason}")
            else:
                values = [rest.value(name) for _ in range(_n_values(name))]
                out.passed_on.extend([name, *values])
                out.files.extend(PassedFile(name, path) for path in (_paths(name, values[0]) if name in FILES else ()))
        out.left_out.extend(without_gpu(out.options))
        return out


def _paths(name: str, value: str) -> list[str]:
    """The files that an option of llama-server's names."""
    if FILES[name] not in (_ADAPTER, _VECTOR):
        return [value]
    try:
        paths = [path for row in csv.reader([value]) for path in row]
    except csv.Error as error:
        raise OptionError(f"{name} {value}: {error}") from None
    return [path.partition(":")[0] for path in paths] if name.endswith("-scaled") else paths


def check_files(passed_on: Sequence[PassedFile], others: Sequence[str]) -> int:
    """Before llama-server opens anything: it waits for whoever writes to a pipe, takes what a header claims to need, and writes over what has the name of
    its log.

    Args:
        others: files that are in use.

    Returns:
        bytes that it takes for these files while it loads.

    Raises:
        MoeoffError: one is no file, or none of its kind, too long, or would be written over.
    """
    read = [file for file in passed_on if file.kind not in (_WRITTEN, _FOLDER)]
    used = [*others, *(file.path for file in read)]
    for file in passed_on:
        if file.kind == _WRITTEN:
            require_new(file.path, used, file.option)
            if stat.S_ISFIFO(_mode(os.path.realpath(file.path))):  # one without a name, as a shell's >(...), has its reader
                raise OptionError(f"{file.option} {file.path}: is a pipe, and llama-server would wait for its reader: name a file")
        elif file.kind == _FOLDER and any(os.path.realpath(file.path) == os.path.dirname(os.path.realpath(path)) for path in used):
            raise OptionError(f"{file.option} {file.path}: files lie there that are in use, and clients could write over them: name another folder")
    return sum(file.memory() for file in read)


def _mode(path: str) -> int:
    """Of what is there; 0: nothing."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def in_use(model_files: Sequence[str], config: Config, options: ServerOptions) -> list[str]:
    """A model's files, those that are found beside it by name, and those that moeoff's own options name."""
    named = [getattr(given, name) for given, kind in ((config, Config), (options, ServerOptions)) for name, line in table_of(kind).items() if line.is_file]
    named = [value.path if isinstance(value, Sidecar) else value for value in named]
    beside = [sidecar_path(model_files[0]), profile_path(model_files[0])]
    return [*model_files, *beside, *(os.fspath(value) for value in named if isinstance(value, (str, os.PathLike)))]


class _Words:
    """The words of a command line, one after the other: `--name=value` is two."""

    def __init__(self, args: Sequence[str]):
        self._left = [part for word in args for part in (word.split("=", 1) if word.startswith("--") and "=" in word else [word])]

    def __iter__(self) -> _Words:
        return self

    def __next__(self) -> str:
        if not self._left:
            raise StopIteration
        word = self._left.pop(0)
        return word.replace("_", "-") if word.startswith("--") else word

    def value(self, name: str) -> str:
        if not self._left:
            raise OptionError(f"{name} needs a value")
        return self._left.pop(0)

    def value_of(self, known: Sequence[str], default: str) -> str:
        """The next word if it is one of these."""
        return self._left.pop(0) if self._left and self._left[0].lower() in known else default


@functools.cache
def _ours() -> dict[str, tuple[Option, bool | None]]:
    """Options of the table by every name that they have, and the value that the name alone gives."""
    out: dict[str, tuple[Option, bool | None]] = {}
    for line in [*table_of(Config).values(), *table_of(ServerOptions).values()]:
        if "serve" not in line.commands and not line.also:
            continue
        flag = not line.metavar
        for name in line.flags + line.also:
            out[name] = (line, True if flag else None)
            if flag or line.bare:
                dashes = "--" if name.startswith("--") else "-"
                out[f"{dashes}no-{name.removeprefix(dashes)}"] = (line, False)
    return out


def _n_values(name: str) -> int:
    """Values that an option of llama-server's takes: it is asked without one, and says if that is too few."""
    try:
        check_arguments(["llama-server", name])
    except OptionError as error:
        if error.message.endswith("has no such option"):
            near = difflib.get_close_matches(name, _ours(), 1)
            raise OptionError(f"{name}: neither moeoff serve nor llama-server has such an option" + (f"; is it {near[0]}?" if near else "")) from None
        return _TWO.get(name, 1)
    return 0


def of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """The arguments that llama-server's variables (LLAMA_ARG_*) stand for, as far as it has them."""
    for name, value in environment.items():
        if not name.startswith(_ENVIRONMENT):
            continue
        short = name.removeprefix(_ENVIRONMENT)
        flag = _VARIABLES.get(short, "--" + short.lower().replace("_", "-"))
        found = _ours().get(flag)
        if flag in REFUSED or (found and found[1] is None and not found[0].bare):
            yield from (flag, value)
            continue
        try:
            n_values = 0 if found else _LEFT_OUT[flag][0] if flag in _LEFT_OUT else _n_values(flag)
        except OptionError:  # llama-server does not read it
            continue
        if n_values:
            yield from (flag, value)
        elif value.lower() in _TRUE:
            yield flag
        elif value.lower() in _FALSE and not flag.startswith("--no-"):
            yield "--no-" + flag[2:]


def own_arguments(args: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str], list[str]]:
    """Divides a command line into words that stand for themselves, options of the command itself, and all others.

    Args:
        own: whether each takes a value.
    """
    alone: list[str] = []
    ours: list[str] = []
    others: list[str] = []
    words = list(args)
    passed_on = False  # what stands behind -- is all llama-server's
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--":
            passed_on = True
        elif name in own:
            n_values = 1 if own[name] and not equals else 0
            ours += [word, *words[:n_values]]
            del words[:n_values]
        elif not word.startswith("-") and not passed_on:
            alone.append(word)
        else:
            others.append(word)
            if (n := _n_words(word, words)) is None:  # it will be refused, and is not to be taken for something else before
                return alone, ours, others + words
            others += words[:n]
            del words[:n]
    return alone, ours, others


def _n_words(word: str, behind: Sequence[str]) -> int | None:
    """How many of the words behind an option belong to it; None: it is refused, or not known."""
    name, equals, _ = word.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    if name in REFUSED:
        return None
    if found := _ours().get(name):
        line, value = found
        taken = 0 if value is not None or line.bare and not (behind and behind[0].lower() in _TRUE + _FALSE) else 1
    elif name in _LEFT_OUT:
        taken = _LEFT_OUT[name][0]
    else:
        try:
            taken = _n_values(name)
        except OptionError:
            return None
    return max(taken - bool(equals), 0)


def arguments(config: Config, n_ctx: int, keywords: Mapping[str, Any], options: ServerOptions, kept: KeptPrompts) -> list[str]:
    """argv.

    Args:
        n_ctx: tokens of the context that all slots share.
        keywords: of llama_cpp.Llama, as `Config.keywords` gives them.
        kept: what is remembered of prompts.

    Raises:
        OptionError: a keyword that llama-server has under another name, or adapters that cannot be passed on.
    """
    config.check_adapters(any(argument.startswith("--lora") for argument in options.args))
    if unknown := {name for name, value in config.llama_cpp.items() if value is not None} - {"use_mmap", "use_mlock"}:
        raise OptionError(f"{min(unknown)}: give llama-server's own option for it in args")
    out = ["llama-server", "-m", config.model_path, "-c", str(n_ctx), "--kv-unified" if options.kv_unified else "--no-kv-unified"]
    cache_ram = max(kept.cache_ram // MIB, 1 if options.kv_disk else 0)  # without a cache nothing falls out of it
    out += ["--cache-ram", str(cache_ram), "--ctx-checkpoints", str(kept.n_checkpoints), "--slot-prompt-similarity", str(_SIMILARITY)]
    if not options.cache_ram:  # what is in a slot stays there until the slot is needed: a cache of this size may be too small for it
        out.append("--no-cache-idle-slots")
    out += ["--threads-http", str(_HTTP_THREADS + 2 * kept.n_slots), "--metrics", "--no-slots", "-lv", "4" if config.verbose else "1"]
    for name, line in table_of(Config).items():
        value = getattr(config, name) if line.number else keywords.get(name, getattr(config, name))  # its number is llama_cpp's
        out += line.server_arguments(value) if value != line.default else []
    if config.swa_full is not False:  # llama_cpp's default: what a sliding window forgets could not be gone on from
        out.append("--swa-full")
    for name, line in table_of(ServerOptions).items():
        out += line.server_arguments(getattr(options, name))
    out += ["--cors-origins", ",".join(options.cors)]  # llama-server's default is every page of the web
    if options.mmproj:
        out += ["--mtmd-batch-max-tokens", "1"]  # one picture is computed at a time, and planned for
    return [*out, *options.args]
