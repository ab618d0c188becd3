"""`moeoff convert`."""

from __future__ import annotations

import functools
from typing import Any

import click

from ..console import progress_bar
from ..memory import format_size
from .options import CONTEXT, one_sentence


@click.command(context_settings=CONTEXT)
@click.argument("model", type=click.Path())
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="File to write. Default: MODEL.experts.gguf, where run and serve find it."
)
@click.option("--tiers", metavar="NAMES", help="Precisions, as keep,Q2_K. keep: the model's own bytes; twin: a lower one for each type. Default: twin.")
@click.option("--imatrix", type=click.Path(dir_okay=False), metavar="FILE", help="Importance matrix of llama-imatrix for what is quantized.")
@click.option("--bits", type=click.Path(dir_okay=False), metavar="PLAN.json", help="One more tier, 'bits', in which each expert has the type of this plan.")
@click.option("-j", "--threads", type=click.IntRange(min=1), metavar="N", help="Threads. Default: every core this process may use.")
@click.option("--dry-run", is_flag=True, help="Print sizes and time, and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing companion.")
@click.option("--resume", is_flag=True, help="Continue an interrupted conversion; if interrupted again, keep what is written.")
@one_sentence
def convert(**options: Any) -> None:
    """Repack a model's experts into a companion file, in one or more precisions. The model stays as it is."""
    from ..companion.convert import convert as command

    try:
        with progress_bar("bytes") as progress:
            done = command(**options, progress=progress and functools.partial(progress, "converting"))
    except KeyboardInterrupt:
        click.echo("interrupted: " + ("--resume goes on from here" if options["resume"] else "nothing was written"), err=True)
        raise
    for line in done.fallbacks:
        click.echo(line, err=True)
    tiers = ", ".join(f"{name} {format_size(n)}" for name, n in done.tiers.items())
    if options["dry_run"]:
        click.echo(f"{done.path}: {done.n_experts} experts: {tiers}; {format_size(done.n_bytes)} of disk, about {done.seconds:.0f} s")
    else:
        click.echo(f"{done.path}: {done.n_experts} experts: {tiers}; {format_size(done.n_bytes)} in {done.seconds:.1f} s")
