"""`moeoff report`."""

from __future__ import annotations

import os
from typing import Any

import click

from ..atomic_file import atomic_file
from ..console import progress_bar, remark
from ..errors import OptionError
from ..paths import demo_model
from .options import CONTEXT, one_sentence, opening_arguments, opening_options


@click.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="moeoff-report.html", show_default=True, metavar="FILE", help="Page to write.")
@click.option("--text", type=click.Path(dir_okay=False), metavar="FILE", help="Text whose tokens are fed. Default: the help texts of Python itself.")
@click.option("-p", "--n-prompt", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of the prompt.")
@click.option("-n", "--n-gen", "n_decode", type=click.IntRange(min=8), default=96, show_default=True, help="Tokens after it, one by one.")
@opening_options
@one_sentence
def report(output: str, model: str | None, text: str | None, n_prompt: int, n_decode: int, **options: Any) -> None:
    """Run a model and write a page about it: where memory and time went, by layer and by token, and what more memory would give."""
    from ..report import write_report

    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise OptionError(f"{output}: there is no such folder to write a page into")
    arguments = {name: value for name, value in opening_arguments(**options).items() if value is not None}
    with progress_bar("tokens") as progress:
        page = write_report(model or demo_model(), text=text, n_prompt=n_prompt, n_decode=n_decode, progress=progress, **arguments)
    with atomic_file(output) as file:
        file.write(page.encode())
    remark(f"{output}: open it in a browser; it needs no network")
