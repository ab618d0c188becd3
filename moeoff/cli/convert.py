"""`moeoff convert` and `verify`: files of experts, written and checked."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import click

from ..system.console import note, progress_bar, say
from ..system.memory import format_size
from .options import command, model_argument


@command()
@model_argument("GGUF, instead of MODEL; of a split one the first part.", needed=True)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="File to write. Default: MODEL.experts.gguf, where run and serve find it."
)
@click.option(
    "--tiers", metavar="NAMES", help="Precisions, e.g. original,Q2_K. original: the model's own bytes; auto: a lower one for each type. Default: auto."
)
@click.option("--imatrix", type=click.Path(dir_okay=False), metavar="FILE", help="Importance matrix of llama-imatrix for what is quantized.")
@click.option("--bits", type=click.Path(dir_okay=False), metavar="PLAN.json", help="One more tier, 'bits', in which each expert has the type of this plan.")
@click.option("-j", "--threads", type=click.IntRange(min=1), metavar="N", help="Threads. Default: every core this process may use.")
@click.option("--dry-run", is_flag=True, help="Print sizes, and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing sidecar.")
@click.option("--resume", is_flag=True, help="Continue an interrupted conversion, or leave one that can be continued.")
def convert(**options: Any) -> None:
    """Repack a model's experts into a sidecar file, in one or more precisions. The model stays as it is."""
    from ..experts.convert import convert as library
    from ..experts.sidecar import ORIGINAL, sidecar_path

    try:
        with progress_bar("bytes") as progress:
            file = library(**options, progress=functools.partial(progress, "converting"))
    except KeyboardInterrupt:
        note("interrupted: " + ("--resume goes on from here" if options["resume"] else "nothing was written"))
        raise
    for line in file.fallbacks:
        note(line)
    tiers = ", ".join(f"{name} {format_size(n)}" for name, n in file.tiers.items())
    say(f"{file.path}: {file.n_experts} experts: {tiers}; {format_size(file.n_bytes)} " + ("of disk" if options["dry_run"] else f"in {file.seconds:.1f} s"))
    if not options["dry_run"]:
        lower = next((name for name in file.tiers if name != ORIGINAL), None)
        where = ["--experts", file.path] if file.path != sidecar_path(options["model"]) else []
        print("next:", shlex.join(["moeoff", "run", "-m", options["model"], *where, *(["--tier", lower] if lower else [])]))


@command()
@click.argument("file", type=click.Path())
@click.option("-m", "--model", type=click.Path(), help="The model. Default: the one that the sidecar names, if it is beside it.")
def verify(**options: Any) -> None:
    """Compare a sidecar with its hashes, and with the model that it was made of."""
    from ..experts.verify import verify as library

    with progress_bar("bytes") as progress:
        file = library(**options, progress=functools.partial(progress, "verifying"))
    belongs = f"made of {file.model}" if file.model else "its model is not beside it and was not checked (give -m)"
    say(f"{file.path}: {file.n_slices} slices, {format_size(file.n_bytes)}, intact; tiers {', '.join(file.tiers)}; {belongs}")
