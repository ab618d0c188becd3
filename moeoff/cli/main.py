"""The command `moeoff`. Each subcommand parses, calls one library function, and prints."""

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
_VARIABLE = "_MOEOFF_COMPLETE"  # click's name: if set, the program prints completions

# commands of similar programs and the equivalent of moeoff
_SYNONYMS = {
    "chat": "run",
    "generate": "run",
    "ask": "run",
    "server": "serve",
    "quantize": "convert",
    "perplexity": "eval",
    "pull": "run -hf ORG/REPO",
    "list": "models",
    "ls": "models",
    "help": "--help",
}


class Program(click.Group):
    """The top-level command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(
                error.option_name in param.opts
                for command in self.commands.values()
                for param in command.params
            ):
                raise _no_command(ctx, error.option_name, f"{error.option_name} ...") from None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, lower = args[0], args[0].lower()
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            if name.endswith(".gguf") or os.path.exists(name):
                raise _no_command(ctx, name, shlex.quote(name))
            if meant := _SYNONYMS.get(lower, lower if lower in self.commands else None):
                raise click.UsageError(
                    f"No such command {name!r}. Did you mean moeoff {meant}?", ctx
                )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # click would cut their sentences
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=1000))
                    for name, command in sorted(self.commands.items())
                ]
            )

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_streams()
        if not sys.warnoptions:
            warnings.simplefilter("ignore")  # e.g. NumPy's; PYTHONWARNINGS shows them
        try:
            with written_whole():
                return super().main(*args, **kwargs)
        except WriteError as error:  # in click's own output, e.g. --help
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(1)


def _no_command(ctx: click.Context, word: str, example: str) -> click.UsageError:
    return click.UsageError(f"{word}: expected a command first, e.g. moeoff run {example}", ctx)


@click.group(cls=Program, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="moeoff")
def main() -> None:
    """Run Mixture-of-Experts models (GGUF) in less memory than they need."""


@click.command(name="shell-completion", context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(SHELLS))
def shell_completion(shell: str) -> None:
    """Print a script that completes moeoff's commands, options and files in a shell.

    In ~/.bashrc: eval "$(moeoff shell-completion bash)"

    In ~/.zshrc, after compinit: eval "$(moeoff shell-completion zsh)"

    For fish, once: moeoff shell-completion fish >
    ~/.config/fish/completions/moeoff.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click has all of SHELLS
    context = click.get_current_context().find_root()
    click.echo(kind(context.command, {}, "moeoff", _VARIABLE).source())


for _command in (
    run,
    serve,
    bench,
    inspect,
    models,
    doctor,
    convert,
    verify,
    eval_,
    calibrate,
    simulate,
    shell_completion,
):
    main.add_command(_command)
