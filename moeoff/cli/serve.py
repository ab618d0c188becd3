"""`moeoff serve`."""

from __future__ import annotations

import os
import signal
from typing import Any

import click

from ..console import remark
from ..memory import format_size
from ..paths import demo_model
from .options import CONTEXT, one_sentence, opening_arguments, opening_options


@click.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one (give an --api-key then).")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("-np", "--parallel", type=click.IntRange(1, 256), default=4, show_default=True, help="Answers at a time; they share the context.")
@click.option("--cache-ram", metavar="SIZE", help="Memory for prompts that are kept outside the context; counts in --memory. Default: none.")
@click.option("--api-key", envvar="MOEOFF_API_KEY", show_envvar=True, metavar="KEY", help="Refuse requests without this bearer token.")
@click.option("-a", "--alias", metavar="NAME", help="What /v1/models calls the model. Default: its file name.")
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Allow requests from web pages of this origin, as https://example.org or *; may be repeated.")
@click.option("--mmproj", type=click.Path(dir_okay=False), metavar="FILE", help="Projector for images and sound.")
@click.option("-md", "--model-draft", "draft", type=click.Path(dir_okay=False), metavar="FILE", help="Draft model for speculative decoding.")
@click.option("--spec-type", metavar="NAME", help="How drafts are made: ngram-simple, draft-mtp (the model's own layers), or another kind of llama-server's.")
@click.option("--embedding", is_flag=True, help="Serve embeddings.")
@opening_options
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@one_sentence
def serve(model: str | None, **options: Any) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and llama.cpp's routes, several answers at a time, /metrics for Prometheus.

    ARGS behind -- go to llama-server.
    """
    from ..server.server import Server

    arguments = {name: value for name, value in opening_arguments(**options).items() if value is not None}
    path = model or demo_model()
    alias = arguments.pop("alias", None) or os.path.basename(path).removesuffix(".gguf")
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with Server(path, alias=alias, **arguments) as server:
            if server.settings_summary:
                remark(server.settings_summary)
            page = f"web page on {server.url}" if server.has_page else "no web page (this build was made without npm)"
            remark(f"serving {path} on {server.url}/v1, {page}, experts in {format_size(server.stats().arena_bytes)}; Ctrl-C ends")
            server.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> None:
    raise SystemExit(0)
