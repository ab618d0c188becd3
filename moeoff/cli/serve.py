"""`moeoff serve`."""

from __future__ import annotations

from typing import Any

import click

from .options import CONTEXT, one_sentence, opening_arguments, opening_options


@click.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one (give an --api-key then).")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--api-key", envvar="MOEOFF_API_KEY", show_envvar=True, metavar="KEY", help="Refuse requests without this bearer token.")
@click.option("-a", "--alias", metavar="NAME", help="What /v1/models calls the model. Default: its file name.")
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Allow requests from web pages of this origin, as https://example.org or *; may be repeated.")
@opening_options
@click.option("--logprobs", is_flag=True, help="Let requests ask for logprobs: takes context x vocabulary x 4 bytes.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@one_sentence
def serve(**options: Any) -> None:
    """Serve a model over HTTP as OpenAI's API does, one answer at a time.

    Completions, chat, streaming; /metrics for Prometheus, /health. Every answer carries its statistics in `moeoff`.
    """
    from ..server.app import serve as command

    command(**opening_arguments(**options))
