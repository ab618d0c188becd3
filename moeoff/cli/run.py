"""`moeoff run` and `moeoff serve`: a model answers one prompt, a person who chats, or programs over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..errors import MoeoffError, OptionError
from ..llamacpp.habits import without_habits
from ..option import table_of
from ..options import TABLE, Sampling, with_gpu
from ..system.console import note, progress_bar
from ..system.files import TEXT, atomic_file, demo_model, read_text, require_new
from ..system.memory import DEFAULT_SHARE, format_size
from .options import TYPED, Command, command, input_files, model_argument, option, remark_on_context, sentence, table_options

if TYPE_CHECKING:
    from .completion import Completer, Completion

_ONE_SIGNAL = 1.0  # seconds within which several are one: a terminal and the program that was started in it may both send it
DEMO_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"


HF_REPO_FLAGS = ("-hf", "--hf-repo")
HF_REPO = option(*HF_REPO_FLAGS, metavar="ORG/REPO[:QUANT]", help="Model from Hugging Face. Default quant: Q4_K_M, or else the first GGUF.")


def _downloaded(model: str | None, hf_repo: str | None) -> str | None:
    """The model, fetched if a repository is named."""
    if hf_repo:
        from ..gguf.hub import download

        return download(hf_repo)
    return model


class _Run(Command):
    """Takes llama-cli's command lines: what has no effect here is left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # as for completion
            ctx.meta[TYPED] = args
            try:
                args, remarks = without_habits(args, self.takes_value(ctx))
            except OptionError as error:
                raise click.UsageError(str(error), ctx) from None
            for remark in remarks:
                note(remark)
        return super().parse_args(ctx, args)


@command(cls=_Run)
@model_argument()
@HF_REPO
@option("-p", "--prompt", metavar="TEXT", help="Prompt. Without one, in a terminal: chat.")
@option("-f", "--file", type=click.Path(dir_okay=False), metavar="FILE", help="File with the prompt. Standard input is appended to -p or -f.")
@table_options("run")
@option("-sys", "--system-prompt", "--system", "system", group="Prompt and answer", metavar="TEXT", help="System prompt.")
@option("--chat-template", group="Prompt and answer", metavar="TEXT", help="Chat template in Jinja, or chatml, instead of the model's own.")
@option("--chat-template-file", group="Prompt and answer", type=click.Path(dir_okay=False), metavar="FILE", help="File with the chat template.")
@option("-rea", "--reasoning", group="Prompt and answer", type=click.Choice(["on", "off", "auto"]), default="auto",
     help="Let the model think before it answers, if it does so; off: tell its template not to.")  # fmt: skip
@option("--no-history", group="Prompt and answer", is_flag=True, help="Keep no file of what is typed in chats, ~/.cache/moeoff/chat_history.")
@option(
    "-no-cnv",
    "--no-conversation",
    "--raw",
    "raw",
    group="Prompt and answer",
    is_flag=True,
    help="Continue the prompt as it is, without the model's chat template.",
)
@option("-st", "--single-turn", "single_turn", hidden=True, is_flag=True, help="Ends after one answer, as it does with -p anyway.")
@option("--json", "as_json", group="Prompt and answer", is_flag=True, help="Print one JSON object: text, finish_reason, usage, stats.")
@option("--stats-json", group="Prompt and answer", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write statistics to FILE.")
@option("--prompt-cache", group="Prompt and answer", type=click.Path(dir_okay=False), metavar="FILE",
     help="Take the computed prompt from FILE, and write it there when it is new.")  # fmt: skip
def run(
    model: str | None, hf_repo: str | None, prompt: str | None, file: str | None, system: str | None, chat_template: str | None,
    chat_template_file: str | None, reasoning: str, no_history: bool, raw: bool, single_turn: bool, as_json: bool, stats_json: str | None,
    prompt_cache: str | None, **options: Any,
) -> None:  # fmt: skip
    """Answer a prompt, or chat. Text goes to stdout, a line of statistics to stderr."""
    if model and hf_repo:
        raise OptionError("give -m or -hf, not both")
    if model and " " in model and not os.path.exists(model):
        raise OptionError(f"{model}: there is no such file; a prompt goes behind -p")
    if chat_template and chat_template_file:
        raise OptionError("give --chat-template or --chat-template-file, not both")
    sampling = Sampling.make(**{name: options.pop(name) for name in table_of(Sampling) if name in options})
    if hf_repo:
        from ..gguf.hub import parse

        parse(hf_repo)  # before anything else is looked at
    prompt = _prompt(prompt, file)
    outputs = {"--stats-json": stats_json, "--prompt-cache": prompt_cache, "--trace": options.get("trace")}
    for flag, path in outputs.items():
        others = [other for name, other in outputs.items() if name != flag]
        require_new(path, [*input_files(model, options, "trace"), file, *others], flag)
    chat = prompt is None and not raw and not as_json and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    if single_turn and chat:
        raise OptionError("-st: give the question with -p")
    if prompt is None and not chat:
        if model or hf_repo:
            raise OptionError("give a prompt with -p, with -f or on standard input; without one, in a terminal, moeoff chats")
        prompt = DEMO_PROMPT
    if chat and prompt_cache:
        raise OptionError("--prompt-cache keeps one prompt, and a chat has many: give a prompt with -p or -f")
    model = _downloaded(model, hf_repo)

    from ..engine.explanation import explain
    from ..engine.llama import Llama, open_model
    from ..engine.prompt import PromptCache
    from ..engine.prompt import chat_template as find_template
    from .completion import Completer

    path = model or demo_model()
    template = read_text(chat_template_file) if chat_template_file else chat_template
    template = None if raw else find_template(path, template)  # before the weights are read
    cache = PromptCache(prompt_cache) if prompt_cache else None
    with_gpu(options)
    with contextlib.ExitStack() as stack:
        if chat:
            from .chat import Chat, typed_ahead

            stack.enter_context(typed_ahead())  # also while the model is loaded
        llm = stack.enter_context(open_model(Llama, path, seed=sampling.seed if sampling.seed >= 0 else random.getrandbits(31), **options))
        if llm.engine.config.verbose:
            _explain(explain(llm.engine))
        elif llm.engine.device_remark:
            note(llm.engine.device_remark)
        remark_on_context(llm.n_ctx(), llm.engine.model_index.n_ctx_train, options)
        if lower := llm.engine.quality.unread_tiers:
            names = ", ".join(lower)
            if llm.engine.config.max_loss is None:
                note(f"lossless, though the sidecar has {names}: give --tier {lower[0]}, or --max-loss for what calibrate --max-loss measures it to lose")
            else:
                note(f"--max-loss was measured without the sidecar's {names}: calibrate --max-loss again, and it may be chosen")
        share = f" ({DEFAULT_SHARE:.0%} of what is available)" if llm.engine.budget.is_default else ""
        completer = stack.enter_context(Completer(llm, sampling, cache))
        if prompt is None:
            Chat(completer, system, template, thinks=reasoning != "off", history=not no_history).loop(share)
            stats, cancelled = llm.stats(), False
        else:
            answer = _complete(completer, prompt, system, template, reasoning != "off", raw, as_json, share)
            stats, cancelled = answer.stats, answer.finish_reason == "cancelled"
    if stats_json:
        with atomic_file(stats_json) as out:
            out.write(stats.to_json().encode())
    if cancelled:
        raise KeyboardInterrupt


def _explain(reasons: dict[str, str]) -> None:
    for name, text in reasons.items():
        note(f"{name}: {text}")


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _prompt(prompt: str | None, file: str | None) -> str | None:
    """The prompt of -p, -f and standard input together, or None if none says anything. What is piped in follows the question."""
    if prompt is not None and file is not None:
        raise OptionError("give -p or -f, not both")
    try:
        if file is not None:
            prompt = read_text(file, newlines=True).removesuffix("\n")
        if sys.stdin is not None and not _is_terminal(sys.stdin):
            piped = sys.stdin.read(TEXT + 1).removesuffix("\n")
            if len(piped) > TEXT:
                raise OptionError(f"standard input: cannot be read: it is longer, expected at most {format_size(TEXT)}")
            if piped:
                prompt = piped if prompt is None else f"{prompt}\n\n{piped}"
    except OSError as error:
        raise OptionError(f"standard input: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError("standard input: is not UTF-8 text") from None
    if prompt is not None and not prompt.strip():
        raise OptionError("the prompt is empty: there is nothing to answer")
    return prompt


def _complete(completer: Completer, prompt: str, system: str | None, template: str | None, thinks: bool, raw: bool, as_json: bool, share: str) -> Completion:
    """One prompt: text, or one JSON object, on stdout, and a line about it on stderr."""
    from ..engine.prompt import Template, prompt_tokens
    from .writer import Writer

    llm = completer.llm
    opens_thought = False
    if raw and system:
        raise OptionError("--system: without a chat template there is no place for it")
    if raw and not thinks:
        raise OptionError("--reasoning off: without a chat template there is nothing to tell it")
    if raw or not (template or system):
        tokens = prompt_tokens(llm, prompt, add_bos=True)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        renderer = Template(llm, template, thinks)
        tokens = renderer.tokens([*messages, {"role": "user", "content": prompt}])
        opens_thought = renderer.opens_thought
        if renderer.stop:
            completer.stop_at(renderer.stop)
    if as_json:
        answer = completer.complete(tokens, lambda _text: None)
        print(json.dumps(answer.to_dict(), ensure_ascii=False))
        return answer

    writer = Writer(not raw, opens_thought)
    answer = completer.complete(tokens, writer.write)
    writer.end()
    note(answer.summary() + share)
    return answer


_MODEL = ("-m", "--model", *HF_REPO_FLAGS)


class _Serve(Command):
    """Takes llama-server's command lines, and its variables: what is not the command's own is read by the server. A model that the command line
    names goes before one of a variable, and the rest of it, which comes later, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # as for completion
            return super().parse_args(ctx, args)
        from ..server.arguments import of_environment, own_arguments

        ctx.meta[TYPED] = list(args)
        own = self.takes_value(ctx, without=TABLE)
        try:
            model, ours, others = own_arguments(args, own)
            _, theirs, variables = own_arguments(list(of_environment(os.environ)), own)
        except MoeoffError as error:  # this build has no server
            raise click.ClickException(sentence(error)) from None
        if not model and not any(word.partition("=")[0] in _MODEL for word in ours):
            ours = [*theirs, *ours]
        rest = super().parse_args(ctx, [*model, *ours])
        ctx.params["args"] += (*variables, *others)
        return rest


@command(cls=_Serve)
@model_argument()
@HF_REPO
@table_options("serve")
@option("-q", "--quiet", group="Server", is_flag=True, help="No line for each request.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def serve(model: str | None, hf_repo: str | None, quiet: bool, args: tuple[str, ...], **options: Any) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's, Ollama's and llama.cpp's routes, several answers at a time, /metrics for Prometheus.

    ARGS are llama-server's own options, as are LLAMA_ARG_* in the environment.
    """
    if model and hf_repo:
        raise OptionError("give -m or -hf, not both")
    path = _downloaded(model, hf_repo) or demo_model()

    from ..server.server import Server

    with_gpu(options, adapters=any(word.startswith("--lora") for word in args))
    options = {"alias": os.path.basename(path).removesuffix(".gguf")} | options
    with _ended_by_signals(), contextlib.ExitStack() as stack:
        with progress_bar() as progress:
            progress(f"loading {os.path.basename(path)}", 0, 0)
            server = stack.enter_context(Server(path, args=args, on_request=None if quiet else note, **options))
        for remark in server.remarks:
            note(remark)
        if server.engine.config.verbose:
            _explain(server.explain())
        model_index, each = server.engine.model_index, server.n_ctx_each
        trained, longer = model_index.n_ctx_train, f"{model_index.architecture}.context_length=int:"
        if any(longer in word for word in args):
            remark_on_context(each, trained, options)
        elif 0 < trained < each:
            note(f"a conversation ends at {trained} tokens, which the model was trained for: --override-kv {longer}{each} gives it more")
        page = f"web page on {server.url}" if server.has_page else "no web page (this build was made without npm)"
        context = f"{server.engine.planned.n_ctx} tokens of context for {server.n_parallel} answer{'s' * (server.n_parallel > 1)} at a time"
        experts = f"experts in {format_size(server.stats().cache_bytes)}"
        note(f"serving {path} on {server.url}/v1, {page}, figures on {server.url}/moeoff, {context}, {experts}; Ctrl-C ends")
        server.wait()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C end the program well, while open, also where it was started with Ctrl-C ignored, as a script's `&` does. One that comes
    again when they should have done so ends it at once."""
    first: list[float] = []

    def end(number: int, _frame: object) -> None:
        if not first:
            first.append(time.monotonic())
            note(f"{signal.Signals(number).name}: every answer ends, then the server; once more ends it at once")
            sys.exit(0)
        if time.monotonic() - first[0] > _ONE_SIGNAL:
            os._exit(1)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not first:  # what comes after it must not end the program in another way
                signal.signal(number, handler)
