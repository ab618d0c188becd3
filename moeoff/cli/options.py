"""What the commands have in common: options that say how a model is opened, and errors as one sentence."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from ..errors import MoeoffError, OptionError
from .errors import sentence
from .llama_options import BATCH, CACHE, FLASH, GPU, ROPE, SHIFT, SYSTEM, VRAM, llama_arguments, with_options

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """Library errors become a message and exit code 1; Ctrl-C becomes 130. `--debug` lets the traceback through."""

    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # the reader of our output has gone; Python must not try once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(0)
        except (MoeoffError, OSError, MemoryError) as error:
            if debug:
                raise
            raise click.ClickException(sentence(error)) from None
        except KeyboardInterrupt:
            if debug:
                raise
            sys.exit(130)

    return click.option("--debug", is_flag=True, help="Show the traceback of an error.")(wrapped)


_OPENING = (
    click.option("--memory", metavar="SIZE", help="Bound of the whole process, as 6G, 700MiB or 80%. Default: 80% of what is available."),
    click.option("--expert-memory", metavar="SIZE", help="Bound of the experts alone, instead of --memory."),
    click.option(
        "--experts", type=click.Path(dir_okay=False), metavar="FILE", help="Companion written by moeoff convert. Default: MODEL.experts.gguf, if it is there."
    ),
    click.option("--no-experts", is_flag=True, help="Do not use the companion beside the model."),
    click.option("--tier", metavar="NAME", help="Precision of the companion to run with, as Q2_K. Default: the model's own."),
    click.option("--verify-reads", is_flag=True, help="Compare every expert that is read with its hash in the companion."),
    click.option(
        "--strategy",
        metavar="NAME",
        help="What stays in memory and what is prefetched: auto, lru, fate, ... See docs/strategies.md. Default: what tune found, or auto.",
    ),
    click.option(
        "--profile", type=click.Path(dir_okay=False), metavar="FILE", help="Profile written by moeoff calibrate. Default: MODEL.profile.npz, if it is there."
    ),
    click.option("--no-profile", is_flag=True, help="Do not use the profile beside the model."),
    click.option("--max-loss", metavar="PERCENT", help="Give up what calibrate --max-loss measured to cost at most this, as 1%. Default: lossless."),
    click.option(
        "--deterministic",
        is_flag=True,
        help="With --max-loss: decide by the gates alone and not by what is in memory, so that a run can be repeated.",
    ),
    click.option(
        "--warm/--no-warm", default=True, show_default=True, help="Load in the background the experts that were in memory when the model was last closed."
    ),
    click.option("--io-workers", "n_lanes", type=click.IntRange(1, 64), help="Threads that read experts. Default: what tune found, or 4."),
    click.option(
        "--settings", type=click.Path(dir_okay=False), metavar="FILE", help="Settings written by moeoff tune. Default: MODEL.moeoff.json, if it is there."
    ),
    click.option("--no-settings", is_flag=True, help="Do not use the settings beside the model."),
    click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use."),
    click.option("-c", "--ctx-size", type=click.IntRange(8, 2**31 - 1), help="Context in tokens. Default: 4096, or less if the model was trained with less."),
)


def opening_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say how a model is opened, the same wherever one is; `opening_arguments` takes them."""
    return with_options(_OPENING, FLASH, BATCH, CACHE, SHIFT, GPU, VRAM, ROPE, SYSTEM)(command)


def opening_arguments(
    *, experts: str | None, no_experts: bool, profile: str | None, no_profile: bool, settings: str | None, no_settings: bool, ctx_size: int | None,
    threads: int | None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The values of `opening_options`, and of any others, as `moeoff.engine.open.open_model` calls them."""
    if profile and no_profile:
        raise OptionError("give --profile or --no-profile, not both")
    if settings and no_settings:
        raise OptionError("give --settings or --no-settings, not both")
    arguments = llama_arguments(**options) | {"settings": settings or not no_settings}
    return {"experts": companion(experts, no_experts), "profile": profile or not no_profile, "n_ctx": ctx_size, "n_threads": threads, **arguments}


def companion(experts: str | None, no_experts: bool) -> str | bool:
    """What --experts and --no-experts say together."""
    if experts and no_experts:
        raise OptionError("give --experts or --no-experts, not both")
    return experts or not no_experts
