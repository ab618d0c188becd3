"""`moeoff serve`: serve a model over HTTP. `moeoff run` shares the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import MoeoffError, OptionError
from ..options import TABLE, ServerOptions, with_gpu
from ..system.console import note, progress_bar
from ..system.files import demo_model
from ..system.memory import format_size, unmap_files
from .options import (
    TYPED,
    Command,
    command,
    model_argument,
    option,
    remark_on_context,
    sentence,
    table_options,
)

if TYPE_CHECKING:
    from ..server.arguments import CommandLine

# Seconds within which signals count as one: a terminal and a parent may both send it.
_SAME_SIGNAL = 1.0
HF_REPO_FLAGS = ("-hf", "--hf-repo")
HF_REPO = option(
    *HF_REPO_FLAGS,
    metavar="ORG/REPO[:QUANT]",
    help="Model from Hugging Face. Default quant: Q4_K_M, else the first GGUF.",
)


def chosen_model(model: str | None, hf_repo: str | None) -> str:
    """Return the model's path after a download. Default: the demo model."""
    if model and hf_repo:
        raise OptionError("give -m or -hf, not both")
    if hf_repo:
        from ..gguf.hub import download

        return download(hf_repo)
    return model or demo_model()


def say_choices(reasons: dict[str, str]) -> None:
    """Print each choice and its reason as a line."""
    for name, text in reasons.items():
        note(f"{name}: {text}")


_MODEL = ("-m", "--model", *HF_REPO_FLAGS)


class ServedCommand(Command):
    """A command that also accepts llama.cpp's arguments and environment variables.

    The command line overrides variables.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        from ..server.arguments import CommandLine, of_environment

        ctx.meta[TYPED], program = list(args), self.name or ""
        self._refuse_one_dash(ctx, args)
        own = self.takes_value(ctx, without=TABLE)
        try:
            variables = list(of_environment(os.environ, program))
            line = CommandLine.read(
                [*(word for words in variables if words[0] not in own for word in words), *args],
                program,
                own,
            )
        except MoeoffError as error:
            raise click.ClickException(sentence(error)) from None
        self.refuse_dashes(ctx, *line.alone)
        self.refuse_more(ctx, line.alone[1:])
        words = [*line.alone, *line.own]
        if not line.alone and not any(word.partition("=")[0] in _MODEL for word in line.own):
            words[:0] = [word for words in variables if words[0] in own for word in words]
        rest = super().parse_args(ctx, words)
        ctx.params["args"] = line
        return rest


@command(cls=ServedCommand)
@model_argument()
@HF_REPO
@table_options("serve")
@option(
    "--models",
    group="Server",
    is_flag=True,
    help=(
        "Serve the models that `moeoff models` lists by their names, one at a time: a request for "
        "another one opens it. MODEL, or else the first, is open at the start."
    ),
)
@option("-q", "--quiet", group="Server", is_flag=True, help="Do not log requests.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def serve(
    model: str | None,
    hf_repo: str | None,
    models: bool,
    quiet: bool,
    args: CommandLine,
    **options: Any,
) -> None:
    """Serve a model over HTTP, several answers at a time.

    The routes are OpenAI's, Anthropic's, Ollama's and llama.cpp's, with /metrics for
    Prometheus. ARGS are llama-server's own options, as are LLAMA_ARG_* in the
    environment.
    """
    options |= args.options
    if models:
        with_gpu(options, adapters=any(word.startswith("--lora") for word in args.passed_on))
        first = chosen_model(model, hf_repo) if model or hf_repo else None
        return _serve_models(first, None if quiet else note, options, args)
    path = chosen_model(model, hf_repo)

    from ..server.server import Server

    with_gpu(options, adapters=any(word.startswith("--lora") for word in args.passed_on))
    options = {"alias": os.path.basename(path).removesuffix(".gguf")} | options
    with _exit_on_signals(), contextlib.ExitStack() as stack:
        with progress_bar() as progress:
            progress(f"loading {os.path.basename(path)}", 0, 0)
            on_request = None if quiet else note
            server = Server(path, args=args, on_request=on_request, on_remark=note, **options)
            stack.enter_context(server)
        for remark in server.remarks:
            note(remark)
        if server.engine.config.verbose:
            say_choices(server.explain())
        model_index, each = server.engine.model_index, server.n_ctx_each
        trained, longer = model_index.n_ctx_train, f"{model_index.architecture}.context_length=int:"
        if server.n_parallel == 1 or any(longer in word for word in args.passed_on):
            remark_on_context(each, trained, options)
        elif 0 < trained < each:
            note(
                f"a conversation ends at the trained {trained} tokens, or --override-kv"
                f" {longer}{each}"
            )
        page = f"web page on {server.url}" if server.has_page else "no web page (build without npm)"
        slots = f"{server.n_parallel} slot{'s' * (server.n_parallel > 1)}"
        context = f"context of {server.engine.planned.n_ctx} tokens for {slots}"
        experts = f"experts in {format_size(server.stats().cache_bytes)}"
        statistics = f"statistics on {server.url}/moeoff"
        note(
            f"serving {path} on {server.url}/v1, {page}, {statistics}, {context}, {experts}; Ctrl-C"
            " ends"
        )
        server.wait()


# options of one model, or of connections that end at its server
_ONE_MODEL = (
    "--alias",
    "--mmproj",
    "--draft-model",
    "--ssl-key-file",
    "--ssl-cert-file",
    "--lora",
    "--lora-scaled",
)


def _serve_models(
    first: str | None,
    on_request: Callable[[str], None] | None,
    options: dict[str, Any],
    line: CommandLine,
) -> None:
    """Serve the models of this machine, one at a time.

    Args:
        first: Path of the model that is open at the start; None: the first of the list
            that can be.
    """
    import asyncio

    from ..gguf.local_models import LocalModel, local_models
    from ..server.router import ModelRouter, with_experts
    from ..server.server import open_warning

    for flag in _ONE_MODEL:
        if flag in line.passed_on or options.get(flag[2:].replace("-", "_")):
            raise OptionError(f"{flag}: is of one model, and --models serves several")
    models = with_experts(local_models())
    if first is not None:
        place = os.path.realpath(first)
        same = [model for model in models if os.path.realpath(model.path) == place]
        named = same or [LocalModel(os.path.basename(first).removesuffix(".gguf"), first, "")]
        models = [named[0], *(model for model in models if model not in same)]
    if not models:
        raise MoeoffError("no Mixture-of-Experts model is found: give one with -m or -hf")
    asked = ("host", "port", "api_key", "api_key_file", "allowed_hosts")
    server_options = ServerOptions.make(
        **{name: options[name] for name in asked if name in options}
    )
    host, port = options.pop("host", server_options.host), options.pop("port", server_options.port)
    if (address := server_options.open_to) is not None:
        note(open_warning(address))
    if server_options.sites is None:
        options["allowed_hosts"] = ("*",)
    for text in line.left_out:
        note(text)

    async def main() -> None:
        router = ModelRouter(models, {"args": line, **options}, note, on_request)
        try:
            urls = await router.listen(host, port)
            unmap_files()  # what reading the options has brought
            await router.start(1 if first is not None else len(models))
            note(f"serving {len(models)} models on {urls[0]}/v1, one at a time; Ctrl-C ends")
            await asyncio.Event().wait()
        finally:
            await router.stop()

    with _exit_on_signals():
        asyncio.run(main())


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGINT, even if SIGINT was ignored, as a script's `&` does.

    A second signal exits at once.
    """
    first: list[float] = []

    def end(number: int, _frame: object) -> None:
        if not first:
            first.append(time.monotonic())
            note(f"{signal.Signals(number).name}: stopping the server; repeat to exit at once")
            sys.exit(0)
        if time.monotonic() - first[0] > _SAME_SIGNAL:
            os._exit(1)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not first:  # else later signals keep exiting at once
                signal.signal(number, handler)
