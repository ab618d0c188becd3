"""`moeoff verify`."""

from __future__ import annotations

import functools
from typing import Any

import click

from ..console import progress_bar
from ..memory import format_size
from .options import CONTEXT, one_sentence


@click.command(context_settings=CONTEXT)
@click.argument("file", type=click.Path())
@click.option("-m", "--model", type=click.Path(), help="The model. Default: the one that the companion names, if it is beside it.")
@one_sentence
def verify(**options: Any) -> None:
    """Compare a companion with its hashes, and with the model that it was made of."""
    from ..companion.verify import verify as command

    with progress_bar("bytes") as progress:
        done = command(**options, progress=progress and functools.partial(progress, "verifying"))
    belongs = f"made of {done.model}" if done.model else "its model is not beside it and was not checked (give -m)"
    click.echo(f"{done.path}: {done.n_slices} slices, {format_size(done.n_bytes)}, intact; tiers {', '.join(done.tiers)}; {belongs}")
