"""The command `moeoff`: one file for each thought, whose commands parse, call one library function, and print."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from typing import Any

import click
from click.shell_completion import get_completion_class

from .. import __version__
from ..errors import WriteError
from .bench import bench
from .calibrate import calibrate, eval_
from .convert import convert, verify
from .doctor import doctor
from .inspect import inspect
from .models import models
from .options import CONTEXT, open_standard_streams, written_whole
from .run import run
from .serve import serve
from .simulate import simulate

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MOEOFF_COMPLETE"  # click's own name for it: with it set, the program answers what could come next


# commands that others have, and ours for it
_MEANT = {"chat": "run", "generate": "run", "ask": "run", "server": "serve", "quantize": "convert", "perplexity": "eval", "pull": "run -hf ORG/REPO", "list": "models", "ls": "models", "help": "--help"}  # fmt: skip


class Program(click.Group):
    """The command as the shell starts it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(error.option_name in param.opts for command in self.commands.values() for param in command.params):
                raise click.UsageError(f"{error.option_name}: a command comes first, as in: moeoff run {error.option_name} ...", ctx) from None
            raise

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            if name.endswith(".gguf") or os.path.exists(name):
                raise click.UsageError(f"{name}: a command comes first, as in: moeoff run {shlex.quote(name)}", ctx)
            if meant := _MEANT.get(name.lower(), name.lower() if name.lower() in self.commands else None):
                raise click.UsageError(f"No such command {name!r}: is moeoff {meant} meant?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A sentence each, whole."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in sorted(self.commands.items())])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_streams()
        if not sys.warnoptions:
            warnings.simplefilter("ignore")  # NumPy's are not for people who run a model; PYTHONWARNINGS shows them
        try:
            with written_whole():
                return super().main(*args, **kwargs)
        except WriteError as error:  # of what click prints by itself, as --help
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(1)


@click.group(cls=Program, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="moeoff")
def main() -> None:
    """Mixture-of-Experts models (GGUF) in less memory than they need."""


@click.command(name="shell-completion", context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(SHELLS))
def shell_completion(shell: str) -> None:
    """Print what makes a shell complete moeoff's commands, options and files.

    In ~/.bashrc: eval "$(moeoff shell-completion bash)"

    In ~/.zshrc, after compinit: eval "$(moeoff shell-completion zsh)"

    For fish, once: moeoff shell-completion fish > ~/.config/fish/completions/moeoff.fish
    """
    kind = get_completion_class(shell)
    if kind is None:  # click knows all three
        raise click.ClickException(f"this click cannot complete for {shell}")
    context = click.get_current_context().find_root()
    click.echo(kind(context.command, {}, "moeoff", _VARIABLE).source())


for _command in (run, serve, bench, inspect, models, doctor, convert, verify, eval_, calibrate, simulate, shell_completion):
    main.add_command(_command)
