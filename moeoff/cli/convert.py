"""`moeoff convert` and `moeoff verify`: write and check sidecar files."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import click

from ..system.console import note, progress_bar, say
from ..system.memory import format_size
from .options import command, file_option, model_argument


@command()
@model_argument("GGUF, instead of MODEL; of a split one the first part.", needed=True)
@file_option(
    "-o",
    "--output",
    help="Sidecar to write. Default: MODEL.experts.gguf, where run and serve find it.",
)
@click.option(
    "--tiers",
    metavar="NAMES",
    help="Precisions, e.g. original,Q2_K; original: the model's, auto: a lower one. Default: auto.",
)
@file_option("--imatrix", help="Importance matrix of llama-imatrix.")
@click.option(
    "--bits",
    type=click.Path(dir_okay=False),
    metavar="PLAN.json",
    help="Add a tier 'bits' with a type for each expert, from this plan.",
)
@click.option(
    "-j",
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads. Default: every core this process may use.",
)
@click.option("--dry-run", is_flag=True, help="Print sizes, and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing sidecar.")
@click.option(
    "--resume", is_flag=True, help="Continue an interrupted conversion, or make this one resumable."
)
def convert(**options: Any) -> None:
    """Repack a model's experts into a sidecar file, in one or more precisions.

    The model file does not change.
    """
    from ..experts.convert import convert as library
    from ..experts.sidecar import ORIGINAL, sidecar_path

    try:
        with progress_bar("bytes") as progress:
            file = library(**options, progress=functools.partial(progress, "converting"))
    except KeyboardInterrupt:
        note(
            "interrupted: "
            + ("repeat with --resume to continue" if options["resume"] else "nothing was written")
        )
        raise
    for line in file.fallbacks:
        note(line)
    tiers = ", ".join(f"{name} {format_size(n)}" for name, n in file.tiers.items())
    duration = "of disk" if options["dry_run"] else f"in {file.seconds:.1f} s"
    say(f"{file.path}: {file.n_experts} experts: {tiers}; {format_size(file.n_bytes)} {duration}")
    if not options["dry_run"]:
        lower = next((name for name in file.tiers if name != ORIGINAL), None)
        where = ["--experts", file.path] if file.path != sidecar_path(options["model"]) else []
        tier = ["--tier", lower] if lower else []
        print("next:", shlex.join(["moeoff", "run", "-m", options["model"], *where, *tier]))


@command()
@click.argument("file", type=click.Path())
@click.option(
    "-m",
    "--model",
    type=click.Path(),
    help="Model. Default: the one named in the sidecar, in the same folder.",
)
def verify(**options: Any) -> None:
    """Compare a sidecar with its hashes, and with the model it was made from."""
    from ..experts.verify import verify as library

    with progress_bar("bytes") as progress:
        file = library(**options, progress=functools.partial(progress, "verifying"))
    model = (
        f"made from {file.model}" if file.model else "model not found and not compared (give -m)"
    )
    tiers = ", ".join(file.tiers)
    say(
        f"{file.path}: {file.n_slices} slices, {format_size(file.n_bytes)}, intact; tiers {tiers};"
        f" {model}"
    )
