"""Building blocks of commands: table options, help, errors with flags."""

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


# keys of a context's meta
TYPED = "moeoff.typed"  # arguments as typed, for the flags in errors
HELP_ALL = "moeoff.help_all"  # True if help shows every option
_LONG_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")


class Command(click.Command):
    """A command with errors of one sentence. `-h` omits options with a heading."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.allow_extra_args = True  # `refuse_more` has a better message than click
        groups = list(
            dict.fromkeys(group for param in self.params if (group := getattr(param, "group", "")))
        )
        self.params.append(
            GroupedOption(
                ["--debug"],
                group="Machine" if groups else "",
                is_flag=True,
                help="Show the traceback of an error.",
            )
        )
        if groups:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help=f"Show more options: {', '.join(groups)}.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta.setdefault(TYPED, list(args))
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        self._refuse_one_dash(ctx, args)
        rest = super().parse_args(ctx, args)
        paths = ctx.params.get("path") or ()
        self.refuse_dashes(ctx, *((paths,) if isinstance(paths, str) else paths), *ctx.args)
        self.refuse_more(ctx, ctx.args)
        return rest

    def refuse_dashes(self, ctx: click.Context, *words: str) -> None:
        """Raise `UsageError` for a word that begins with a typographic dash."""
        for word in words:
            if word.startswith(_LONG_DASHES):
                raise click.UsageError(f"{word}: begins with a long dash, expected - or --", ctx)

    def refuse_more(self, ctx: click.Context, words: Sequence[str]) -> None:
        """Raise `UsageError` if there are surplus arguments."""
        if words:
            prompt = (
                ", give a prompt with -p" if any(p.name == "prompt" for p in self.params) else ""
            )
            message = f"unexpected argument: quote a path with spaces{prompt}"
            raise click.UsageError(f"{shlex.join(words)}: {message}", ctx)

    def invoke(self, ctx: click.Context) -> None:
        """Run the command. Exit with 1 after an error, 130 after Ctrl-C."""
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
        """Return each flag, and True if it takes a value."""
        options = [
            p for p in self.get_params(ctx) if isinstance(p, click.Option) and p.name not in without
        ]
        return {flag: not option.is_flag for option in options for flag in option.opts}

    def _refuse_one_dash(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Raise `UsageError` for -memory 6G, which click reads as -m emory."""
        takes_value = self.takes_value(ctx)
        for before, word in zip(("", *args), args, strict=False):
            flag = word.partition("=")[0]
            if word == "--":
                return
            if (
                re.fullmatch(r"-[a-zA-Z][\w-]+", flag)
                and flag not in takes_value
                and f"-{flag}" in takes_value
                and not takes_value.get(before)
            ):
                raise click.UsageError(f"{flag}: did you mean -{flag}?", ctx)

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
    def __init__(self, *args: Any, group: str = "", **settings: Any):
        super().__init__(*args, **settings)
        self.group = group


class _TableValue(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A value that the table parses later. Its choices are for completion."""

    name = "text"

    def __init__(self, line: Option):
        self._line = line

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if self._line.is_file:
            return [CompletionItem(incomplete, type="file")]
        choices: Sequence[str] = self._line.choices
        if self._line.name == "strategy":
            from ..policies.strategy import strategy_names

            choices = strategy_names()
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


class ValueList(_TableValue):
    """Several such values, separated by commas."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [
            CompletionItem(before + comma + item.value, type=item.type)
            for item in super().shell_complete(ctx, param, last)
        ]


def command(
    name: str | None = None, cls: type[Command] = Command
) -> Callable[[Callable[..., None]], click.Command]:
    return click.command(name=name, cls=cls, context_settings=CONTEXT)


def option(*flags: str, group: str = "", **settings: Any) -> Callable[[Any], Any]:
    """Declare an option that the table lacks."""
    return click.option(*flags, cls=GroupedOption, group=group, **settings)


def file_option(*flags: str, **settings: Any) -> Callable[[Any], Any]:
    """Declare an option whose value is a file."""
    return option(*flags, type=click.Path(dir_okay=False), metavar="FILE", **settings)


JSON_OPTION = option("--json", "as_json", is_flag=True, help="Print JSON.")
_MODEL_HELP = "GGUF with routed experts; the first part of a split one. Default: the demo model."


def model_argument(help: str = _MODEL_HELP, *, needed: bool = False) -> Decorator:
    """Declare MODEL and -m, passed to the command as `model`: a path, or None if not
    given.

    Args:
        needed: True if there is no default.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_model(*args: Any, path: str | None, model: str | None, **values: Any) -> None:
            if path and model:
                raise OptionError("give MODEL or -m, not both")
            if needed and not (path or model):
                raise click.UsageError("Missing MODEL: the GGUF, as MODEL or -m MODEL.")
            function(*args, model=_find_model(path or model), **values)

        out: Callable[..., None] = option(
            "-m", "--model", type=click.Path(), metavar="FILE", help=help
        )(with_model)
        return click.argument("path", type=click.Path(), required=False, metavar="[MODEL]")(out)

    return decorate


def _find_model(model: str | None) -> str | None:
    """Return the path of a model given by name. Paths stay as they are."""
    if not model or os.path.exists(model) or " " in model or model.lower().endswith(".gguf"):
        return model
    from ..gguf.local_models import find

    return find(model)


def help_of(line: Option, default: Any) -> str:
    """Return an option's help with its default, if that is a plain value."""
    if default in (None, False, "", ()) or "Default:" in line.help:
        return line.help
    return f"{line.help} Default: {line.spell(default)}."


def table_options(name: str, *, without: Collection[str] = (), **defaults: Any) -> Decorator:
    """Declare a command's table options, passed to it parsed if given or with a
    default.

    Args:
        without: Options that the command declares itself.
        defaults: Defaults other than the table's.
    """
    lines = {
        line.name: line
        for line in TABLE.values()
        if name in line.commands and line.name not in without
    }
    defaults = {
        line.name: line.usual for line in lines.values() if line.usual is not None
    } | defaults

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_values(*args: Any, **values: Any) -> None:
            typed = {key: values.pop(key) for key in lines}
            read = {
                key: lines[key].read(value)
                for key, value in typed.items()
                if value not in (None, ())
            }
            for remark in without_gpu(read):
                note(remark)
            if "memory" in read:
                remark_on_memory(read["memory"])
            function(*args, **values, **(defaults | read))

        out: Callable[..., None] = with_values
        for line in reversed(lines.values()):
            settings: dict[str, Any] = (
                {"is_flag": True}
                if not line.metavar
                else {"type": _TableValue(line), "metavar": line.metavar}
            )
            out = option(
                *line.flags,
                line.name,
                group=line.group,
                default=None,
                multiple=line.multiple,
                envvar=line.envvar,
                show_envvar=bool(line.envvar),
                hidden=line.hidden,
                help=help_of(line, defaults.get(line.name, line.default)),
                **settings,
            )(out)
        return out

    return decorate


@contextlib.contextmanager
def written_whole() -> Iterator[None]:
    """Flush standard output at the end. Exit with 0 if its reader has closed it.

    Raises:
        WriteError: Standard output is closed or full.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(0)
    except OSError as error:
        # not a stream's
        if error.filename is not None or type(error) not in (OSError, BlockingIOError):
            raise
        _discard_output()
        raise WriteError(f"standard output cannot be written: {error.strerror}") from None


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's flush at exit fails again


def open_standard_streams() -> None:
    """Open closed standard streams, whose numbers the next opened files would get."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            # gets the lowest free number, fd; writing to standard output fails
            os.open(os.devnull, os.O_WRONLY if fd == 2 else os.O_RDONLY)
            os.set_inheritable(fd, True)
            stream = open(fd, "w" if fd else "r", encoding="utf-8", errors="replace")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # UTF-8 keeps file names that are not UTF-8; other encodings print ?
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


def remark_on_memory(size: int) -> None:
    """Print a note if a budget exceeds available memory."""
    if size > available():
        flag = TABLE["memory"].flag
        note(
            f"{flag} {format_size(size)} is more than the {format_size(available())} available here"
        )


_SCALED = {"rope_scaling_type", "rope_scale", "rope_freq_scale", "rope_freq_base", "yarn_orig_ctx"}


def remark_on_context(n_ctx: int, trained: int, options: Mapping[str, Any]) -> None:
    """Print a note if a context exceeds the trained length and positions are not
    scaled.
    """
    if 0 < trained < n_ctx and not options.keys() & _SCALED:
        note(f"context of {n_ctx} tokens: the model was trained for {trained}, and may fail beyond")


def input_files(
    model: str | None,
    options: Mapping[str, Any] = {},  # noqa: B006
    *without: str,
) -> list[str]:
    """Return a command's input files: the model's parts and companions, options'."""
    from ..experts.profile import profile_path
    from ..experts.sidecar import sidecar_path
    from ..gguf.model_index import SplitName

    path = model or demo_model()
    split = SplitName.parse(path)
    named = [
        value
        for name, value in options.items()
        if name not in without
        and name in TABLE
        and TABLE[name].is_file
        and isinstance(value, (str, os.PathLike))
    ]
    return [
        *(split.parts if split else [path]),
        sidecar_path(path),
        profile_path(path),
        *(os.fspath(value) for value in named),
    ]


def sentence(error: BaseException) -> str:
    """Return an error as one line, with the running command's flags as typed."""
    if not isinstance(error, MoeoffError):
        known = (
            isinstance(error, OSError)
            and error.strerror
            and (f"{error.filename}: " if error.filename else "") + error.strerror
        )
        return one_line(known or str(error)) or type(error).__name__
    context = click.get_current_context(silent=True)
    text = in_flags(error, None if context is None else flags_as_typed(context))
    tilde = " (the shell does not expand ~ in quotes or after =: write $HOME)"
    return text + tilde if error.message.startswith("~") else text


def flags_as_typed(context: click.Context) -> dict[str, tuple[str, str]]:
    """Return (flag as typed or longest flag, metavar) of the command's options."""
    typed = {word.partition("=")[0] for word in context.meta.get(TYPED, [])}
    options = {p.name: p for p in context.command.params if isinstance(p, click.Option) and p.name}
    return {
        name: (
            next((opt for opt in p.opts if opt in typed), max(p.opts, key=len)),
            p.metavar or name.upper(),
        )
        for name, p in options.items()
    }
