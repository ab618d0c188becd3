"""The command line: commands parse, call the library function of the same name, and turn its errors into one sentence."""

from __future__ import annotations

import functools
import sys

import click

from . import __version__
from .errors import MoeoffError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def _one_sentence(command):
    """Library errors become a message and exit code 1; Ctrl-C becomes 130. `--debug` lets the traceback through."""

    @functools.wraps(command)
    def wrapped(*args, debug: bool = False, **kwargs):
        try:
            return command(*args, **kwargs)
        except (MoeoffError, OSError, MemoryError) as error:
            if debug:
                raise
            raise click.ClickException(str(error) or type(error).__name__) from None
        except KeyboardInterrupt:
            if debug:
                raise
            sys.exit(130)
        except BrokenPipeError:
            sys.exit(0)  # whoever read us has left

    return click.option("--debug", is_flag=True, help="Show the traceback of an error.")(wrapped)


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="moeoff")
def main() -> None:
    """Mixture-of-Experts models (GGUF) in less memory than they need."""


@main.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("-p", "--prompt", help="What to answer. Default: a question for the demo model.")
@click.option("-n", "--n-predict", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to generate at most.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--memory", metavar="SIZE", help="Bound of the whole process, as 6G, 700MiB or 80%. Default: 80% of what is available.")
@click.option("--expert-memory", metavar="SIZE", help="Bound of the experts alone, instead of --memory.")
@click.option("--strategy", default="lru", show_default=True, metavar="NAME", help="What stays in memory: lru, on-demand.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use.")
@click.option("-c", "--ctx-size", type=click.IntRange(min=8), help="Context in tokens. Default: 4096, or less if the model was trained with less.")
@click.option("-fa/-no-fa", "--flash-attn/--no-flash-attn", default=True, show_default=True, help="Flash attention: smaller compute buffers.")
@click.option("--temp", type=click.FloatRange(min=0), default=0.8, show_default=True, help="Temperature; 0 takes the likeliest token.")
@click.option("--seed", type=int, default=-1, show_default=True, help="Seed of the sampler; -1 draws one.")
@click.option("-ngl", "--n-gpu-layers", type=click.IntRange(min=-1), default=0, show_default=True, help="Layers whose dense part goes to the GPU; -1: all.")
@click.option("--ignore-eos", is_flag=True, help="Generate -n tokens even if the model wants to stop.")
@click.option("--stats-json", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write statistics to FILE.")
@_one_sentence
def run(**options) -> None:
    """Answer a prompt. Text goes to stdout, one line of statistics to stderr."""
    from .run import run as command

    command(**options)
