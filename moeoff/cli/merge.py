"""`moeoff merge`."""

from __future__ import annotations

from typing import Any

import click

from ..console import progress_bar
from ..memory import format_size
from .options import CONTEXT, one_sentence


@click.command(context_settings=CONTEXT)
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="File to write. Default: MODEL.merged.gguf.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@one_sentence
def merge(**options: Any) -> None:
    """Rewrite an old file, with a tensor for each expert, in the form that llama.cpp reads today. No weight is changed."""
    from ..gguf.merge import merge as command

    with progress_bar("bytes") as progress:
        done = command(**options, progress=progress and (lambda now, all_: progress("merging", now, all_)))
    click.echo(f"{done.path}: {done.n_before} experts' tensors in {done.n_after}, {format_size(done.n_bytes)}")
