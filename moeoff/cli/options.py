"""How commands are made: options out of the table (moeoff/options.py), headings in `--help`, and errors as one sentence with flags."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import MoeoffError, OptionError, WriteError, one_line
from ..option import Option
from ..options import TABLE, in_flags, without_gpu
from ..system.console import note
from ..system.files import demo_model
from ..system.memory import available, format_size

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


TYPED = "moeoff.typed"  # of a context: the words behind the command's name, for the flags that an error names
HELP_ALL = "moeoff.help_all"  # of a context: its help shows every option
_LONG_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")


class Command(click.Command):
    """A command whose options stand under headings, those without one first: they are what `-h` shows, and `--help-all` shows all. Its errors are sentences."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.allow_extra_args = True  # `parse_args` has words for them
        groups = list(dict.fromkeys(group for param in self.params if (group := getattr(param, "group", ""))))
        self.params.append(GroupedOption(["--debug"], group="Machine" if groups else "", is_flag=True, help="Show the traceback of an error."))
        if groups:
            self.params.append(click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                                            help=f"Show more options: {', '.join(groups)}."))  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta.setdefault(TYPED, list(args))
        if ctx.resilient_parsing:  # as for completion
            return super().parse_args(ctx, args)
        self._refuse_one_dash(ctx, args)
        rest = super().parse_args(ctx, args)
        paths = ctx.params.get("path") or ()
        self.refuse_dashes(ctx, *((paths,) if isinstance(paths, str) else paths), *ctx.args)
        self.refuse_more(ctx, ctx.args)
        return rest

    def refuse_dashes(self, ctx: click.Context, *words: str) -> None:
        """Refuse words that begin with what looks like a dash."""
        for word in words:
            if word.startswith(_LONG_DASHES):
                raise click.UsageError(f"{word}: begins with a long dash, as pages print it: type - or --", ctx)

    def refuse_more(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Refuse words that stand for nothing."""
        if words:
            prompt = ", and a prompt behind -p" if any(param.name == "prompt" for param in self.params) else ""
            raise click.UsageError(f"{shlex.join(words)}: more than this command takes; a path with blanks goes in quotes{prompt}", ctx)

    def invoke(self, ctx: click.Context) -> None:
        """Library errors become a message and exit code 1; Ctrl-C becomes 130. `--debug` lets the traceback through."""
        debug = ctx.params.pop("debug")
        try:
            with written_whole():
                super().invoke(ctx)
        except (MoeoffError, OSError, MemoryError) as error:
            if debug:
                raise
            raise click.ClickException(sentence(error)) from None
        except KeyboardInterrupt:
            if debug:
                raise
            sys.exit(130)

    def takes_value(self, ctx: click.Context, without: Collection[str] = ()) -> dict[str, bool]:
        """Flags, and whether each takes a value."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and p.name not in without]
        return {flag: not option.is_flag for option in options for flag in option.opts}

    def _refuse_one_dash(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Refuses -memory 6G, which would be -m with the value emory."""
        takes_value = self.takes_value(ctx)
        for before, word in zip(("", *args), args, strict=False):
            flag = word.partition("=")[0]
            if word == "--":
                return
            if re.fullmatch(r"-[a-zA-Z][\w-]+", flag) and flag not in takes_value and f"-{flag}" in takes_value and not takes_value.get(before):
                raise click.UsageError(f"{flag}: is -{flag} meant?", ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"": []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "group", ""), []).append(record)
        for heading, records in sections.items():
            if heading and not ctx.meta.get(HELP_ALL):
                continue
            with formatter.section(heading or "Options"):
                formatter.write_dl(records)


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class GroupedOption(click.Option):
    """An option with the heading that it stands under."""

    def __init__(self, *args: Any, group: str = "", **settings: Any):
        super().__init__(*args, **settings)
        self.group = group


class _TableValue(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A value as it was typed: the table reads it."""

    name = "text"

    def __init__(self, line: Option):
        self._line = line

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._line.is_file:
            return [CompletionItem(incomplete, type="file")]
        choices: Sequence[str] = self._line.choices
        if self._line.name == "strategy":
            from ..policies.strategy import strategy_names

            choices = strategy_names()
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


class ValueList(_TableValue):
    """The same, where several values stand between commas."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(before + comma + item.value, type=item.type) for item in super().shell_complete(ctx, param, last)]


def command(name: str | None = None, cls: type[Command] = Command) -> Callable[[Callable[..., None]], click.Command]:
    return click.command(name=name, cls=cls, context_settings=CONTEXT)


def option(*flags: str, group: str = "", **settings: Any) -> Callable[[Any], Any]:
    """An option of one command, which the table does not have."""
    return click.option(*flags, cls=GroupedOption, group=group, **settings)


def model_argument(help: str = "GGUF with routed experts; of a split one the first part. Default: the demo model.", *, needed: bool = False) -> Decorator:
    """Gives a command its model, as MODEL or as -m. It arrives as `model`, and None if neither was given.

    Args:
        needed: there is no default.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_model(*args: Any, path: str | None, model: str | None, **values: Any) -> None:
            if path and model:
                raise OptionError("give MODEL or -m, not both")
            if needed and not (path or model):
                raise click.UsageError("Missing MODEL: the GGUF, as MODEL or -m MODEL.")
            function(*args, model=_named(path or model), **values)

        out: Callable[..., None] = option("-m", "--model", type=click.Path(), metavar="FILE", help=help)(with_model)
        return click.argument("path", type=click.Path(), required=False, metavar="[MODEL]")(out)

    return decorate


def _named(model: str | None) -> str | None:
    """Return the path of a model that is given by its name."""
    if not model or os.path.exists(model) or " " in model or model.lower().endswith(".gguf"):
        return model
    from ..gguf.local_models import find

    return find(model)


def help_of(line: Option, default: Any) -> str:
    """Its help, with the default if that is a plain value."""
    return line.help if default in (None, False, "", ()) or "Default:" in line.help else f"{line.help} Default: {line.spell(default)}."


def table_options(name: str, *, without: Collection[str] = (), **defaults: Any) -> Decorator:
    """Gives a command its options of the table. What was given arrives read, by its name in Python; what was not is left out.

    Args:
        without: options that it takes in another way.
        defaults: of this command alone, instead of the table's.
    """
    lines = {line.name: line for line in TABLE.values() if name in line.commands and line.name not in without}
    usual = {line.name: line.usual for line in lines.values() if line.usual is not None} | defaults

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_values(*args: Any, **values: Any) -> None:
            typed = {key: values.pop(key) for key in lines}
            read = {key: lines[key].read(value) for key, value in typed.items() if value not in (None, ())}
            for remark in without_gpu(read):
                note(remark)
            if "memory" in read:
                remark_on_memory(read["memory"])
            function(*args, **values, **(usual | read))

        out: Callable[..., None] = with_values
        for line in reversed(lines.values()):
            settings: dict[str, Any] = {"is_flag": True} if not line.metavar else {"type": _TableValue(line), "metavar": line.metavar}
            shown = help_of(line, usual.get(line.name, line.default))
            out = option(*line.flags, line.name, group=line.group, default=None, multiple=line.multiple, envvar=line.envvar, show_envvar=bool(line.envvar),
                      hidden=line.hidden, help=shown, **settings)(out)  # fmt: skip
        return out

    return decorate


@contextlib.contextmanager
def written_whole() -> Iterator[None]:
    """Writes what is printed inside when the block ends. Where the reader of our output has gone, the program ends well.

    Raises:
        WriteError: standard output is not there, or full.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None or type(error) not in (OSError, BlockingIOError):  # not of a stream
            raise
        _forget_output()
        raise WriteError(f"standard output cannot be written: {error.strerror}") from None


def _forget_output() -> None:
    """Python must not try once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_standard_streams() -> None:
    """Opens those that the caller has closed: files that are opened later would get their numbers, and be written to as such."""
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)  # the lowest number that is free
            os.set_inheritable(fd, True)
            for name in ("stdin", "stdout", "stderr")[fd : fd + 1]:
                setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8", errors="replace"))
                setattr(sys, f"__{name}__", getattr(sys, name))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal of another encoding gets ? for what it has no sign for; names of files keep bytes that are no UTF-8
        sys.stdout.reconfigure(errors="surrogateescape" if codecs.lookup(sys.stdout.encoding).name == "utf-8" else "replace")


def remark_on_memory(size: int) -> None:
    """Says that a budget is more than there is."""
    if size > available():
        note(f"{TABLE['memory'].flag} {format_size(size)} is more than the {format_size(available())} that are available here")


_SCALED = {"rope_scaling_type", "rope_scale", "rope_freq_scale", "rope_freq_base", "yarn_orig_ctx"}


def remark_on_context(n_ctx: int, trained: int, options: Mapping[str, Any]) -> None:
    """Says that a context is longer than the model was trained for, unless positions are scaled for that."""
    if 0 < trained < n_ctx and not options.keys() & _SCALED:
        note(f"a context of {n_ctx}: the model was trained for {trained} tokens, and what it writes behind them may make no sense")


def input_files(model: str | None, options: Mapping[str, Any] = {}, *without: str) -> list[str]:  # noqa: B006  # is only read
    """Files that a command may read: the model's parts, what is found beside it by name, and what options of the table name."""
    from ..experts.profile import profile_path
    from ..experts.sidecar import sidecar_path
    from ..gguf.model_index import SplitName

    path = model or demo_model()
    split = SplitName.parse(path)
    named = [
        value for name, value in options.items() if name not in without and name in TABLE and TABLE[name].is_file and isinstance(value, (str, os.PathLike))
    ]
    return [*(split.parts if split else [path]), sidecar_path(path), profile_path(path), *(os.fspath(value) for value in named)]


def sentence(error: BaseException) -> str:
    """One line for people, with the flags of the running command as they were typed."""
    if not isinstance(error, MoeoffError):
        known = isinstance(error, OSError) and error.strerror and (f"{error.filename}: " if error.filename else "") + error.strerror
        return one_line(known or str(error)) or type(error).__name__
    context = click.get_current_context(silent=True)
    text = in_flags(error, None if context is None else flags_as_typed(context))
    return f"{text} (the shell leaves ~ as it is within quotes and behind =: write $HOME)" if error.message.startswith("~") else text


def flags_as_typed(context: click.Context) -> dict[str, tuple[str, str]]:
    """Flag and form of the value of each option of the running command: the flag that was typed, or the longest."""
    typed = {word.partition("=")[0] for word in context.meta.get(TYPED, [])}
    options = {p.name: p for p in context.command.params if isinstance(p, click.Option) and p.name}
    return {name: (next((opt for opt in p.opts if opt in typed), max(p.opts, key=len)), p.metavar or name.upper()) for name, p in options.items()}
