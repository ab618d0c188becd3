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


# What is given up without a bound: thresholds of the papers, unmeasured. The same wherever a model is opened, and in `simulate`.
def threshold_options(t1: str, t2: str) -> tuple[Callable[..., Any], ...]:
    """HOBBIT's thresholds; the defaults in words."""
    share = click.FloatRange(0, 1)
    return (
        click.option("--t1", type=share, metavar="S", help=f"Read absent experts whose unimportance is above S in low precision (HOBBIT's T1). Default: {t1}."),
        click.option("--t2", type=share, metavar="S", help=f"Skip absent experts whose unimportance is above S (HOBBIT's T2). Default: {t2}."),
    )


PROMPT_LOW = click.option(
    "--prompt-low",
    type=click.FloatRange(0, 1),
    metavar="P",
    help="Of a prompt's experts, read this share, the least popular, in low precision (Fate's p). Default: 0.",
)
REROUTE = click.option(
    "--reroute", type=click.FloatRange(0, 1), metavar="SHARE",
    help="Let resident experts take the places of absent ones, as docs/guides/rerouting.md has it: what they gain, of the scores' range (λ). Default: 0, never.",
)  # fmt: skip
PRECISION = (
    *threshold_options("1, none", "1, none"),
    PROMPT_LOW,
    REROUTE,
    click.option("--mispredicted-low", is_flag=True, help="Where a preset predicts, read in low precision only what it did not ask for (Fate §5.3)."),
    click.option("--low-tier", metavar="NAME", help="Tier of the companion that --t1, --t2, --prompt-low and --mispredicted-low read, as Q2_K."),
)


def precision_argument(*, t1: float | None, t2: float | None, prompt_low: float | None, reroute: float | None, low_tier: str | None,
                       mispredicted_low: bool) -> dict[str, Any]:  # fmt: skip
    """`precision`, where one of `PRECISION` was given. Naming a threshold is asking for what it costs: no bound is promised, and `--max-loss` takes none of them.

    Raises:
        OptionError: out of range, a threshold that reads low versions without a tier, or a tier that none reads.
    """
    from ..budget.precision import Precision

    if all(value is None for value in (t1, t2, prompt_low, reroute, low_tier)) and not mispredicted_low:
        return {}
    t1 = t1 if t1 is not None else min(t2 if t2 is not None else 1.0, 1.0)
    precision = Precision(t1, 1.0 if t2 is None else t2, prompt_low or 0.0, low_tier, reroute=reroute or 0.0, mispredicted_low=mispredicted_low)
    if low_tier and not precision.uses_low:
        raise OptionError("--low-tier is read by --t1, --t2, --prompt-low or --mispredicted-low, and none of them is given")
    return {"precision": precision}


STRIDE = click.option("--stride", type=int, metavar="N", help="Layers that a learned predictor looks ahead, 1 or 2. Default: the strategy's; promoe has 2.")
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
        help="What stays in memory and what is prefetched: auto, lru, fate, ... See docs/guides/strategies.md. Default: what tune found, or auto.",
    ),
    STRIDE,
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
        "--warm/--no-warm",
        default=True,
        show_default=True,
        help="Load in the background all experts if all fit, else those that were in memory when the model was last closed.",
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
    return with_options(_OPENING, PRECISION, FLASH, BATCH, CACHE, SHIFT, GPU, VRAM, ROPE, SYSTEM)(command)


def opening_arguments(
    *, experts: str | None, no_experts: bool, profile: str | None, no_profile: bool, settings: str | None, no_settings: bool, ctx_size: int | None,
    threads: int | None, t1: float | None, t2: float | None, prompt_low: float | None, reroute: float | None, low_tier: str | None,
    mispredicted_low: bool, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The values of `opening_options`, and of any others, as `moeoff.engine.open.open_model` calls them."""
    if profile and no_profile:
        raise OptionError("give --profile or --no-profile, not both")
    if settings and no_settings:
        raise OptionError("give --settings or --no-settings, not both")
    arguments = llama_arguments(**options) | {"settings": settings or not no_settings}
    arguments |= precision_argument(t1=t1, t2=t2, prompt_low=prompt_low, reroute=reroute, low_tier=low_tier, mispredicted_low=mispredicted_low)
    return {"experts": companion(experts, no_experts), "profile": profile or not no_profile, "n_ctx": ctx_size, "n_threads": threads, **arguments}


def companion(experts: str | None, no_experts: bool) -> str | bool:
    """What --experts and --no-experts say together."""
    if experts and no_experts:
        raise OptionError("give --experts or --no-experts, not both")
    return experts or not no_experts
