"""`moeoff run`: answer one prompt, or chat.

The command is a client of a server in its own process, on a private socket.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import mimetypes
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..errors import OptionError
from ..options import with_gpu
from ..system.console import note, progress_bar
from ..system.files import TEXT, atomic_file, read_file, read_text, require_new
from ..system.memory import DEFAULT_SHARE, format_size
from .options import (
    command,
    file_option,
    input_files,
    model_argument,
    option,
    remark_on_context,
    remark_on_memory,
    table_options,
)
from .serve import HF_REPO, ServedCommand, chosen_model, say_choices

if TYPE_CHECKING:
    from ..server.arguments import CommandLine
    from ..server.private import PrivateServer
    from .client import Client, Completion

DEMO_PROMPT = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell"
    " altogether?"
)
_MEDIA = 64 << 20  # largest image or sound in bytes
# for models without a chat template
_TRANSCRIPT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}:{{ '' if m.content[:1] == ' '"
    " else ' ' }}{{ m.content }}\n\n{% endfor %}Assistant:"
)
_TRANSCRIPT_ENDS = "\n\nUser:"
_TEMPLATES = ("--chat-template", "--chat-template-file")
_GROUP = "Prompt and answer"
_answer_option = functools.partial(option, group=_GROUP)


@command(cls=ServedCommand)
@model_argument()
@HF_REPO
@option("-p", "--prompt", metavar="TEXT", help="Prompt. Without one, in a terminal: chat.")
@file_option("-f", "--file", help="Prompt file. Standard input follows -p or -f.")
@table_options("run")
@_answer_option(
    "-sys", "--system-prompt", "--system", "system", metavar="TEXT", help="System prompt."
)
@file_option(
    "-sysf",
    "--system-prompt-file",
    "system_file",
    group=_GROUP,
    help="File with the system prompt.",
)
@_answer_option(
    "--image",
    "--audio",
    "media",
    metavar="FILE,...",
    multiple=True,
    help="Images or sounds for the prompt, with --mmproj; may be repeated.",
)
@_answer_option(
    "--no-history", is_flag=True, help="Do not write chat input to ~/.cache/moeoff/chat_history."
)
@_answer_option(
    "-no-cnv",
    "--no-conversation",
    "--raw",
    "raw",
    is_flag=True,
    help="Continue the prompt as it is, without the model's chat template.",
)
@option(
    "-st",
    "--single-turn",
    "single_turn",
    hidden=True,
    is_flag=True,
    help="End after one answer, as -p does anyway.",
)
@_answer_option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: text, finish_reason, usage, stats.",
)
@_answer_option(
    "--stats-json",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Write statistics to FILE.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    model: str | None,
    hf_repo: str | None,
    prompt: str | None,
    file: str | None,
    system: str | None,
    system_file: str | None,
    media: Sequence[str],
    no_history: bool,
    raw: bool,
    single_turn: bool,
    as_json: bool,
    stats_json: str | None,
    args: CommandLine,
    **options: Any,
) -> None:
    """Answer a prompt, or chat. The answer goes to stdout, statistics to stderr.

    ARGS are llama-cli's own options, such as --grammar, --json-schema, --lora and
    --chat-template.
    """
    if model and " " in model and not os.path.exists(model):
        raise OptionError(f"{model}: no such file; give a prompt with -p")
    if hf_repo:
        from ..gguf.hub import parse_repository

        parse_repository(hf_repo)  # a bad name fails first
    if system is not None and system_file is not None:
        raise OptionError("give -sys or -sysf, not both")
    system = read_text(system_file).removesuffix("\n") if system_file is not None else system
    prompt = _prompt(prompt, file)
    options |= args.options
    outputs = {"--stats-json": stats_json, "--trace": options.get("trace")}
    for flag, path in outputs.items():
        others = [other for name, other in outputs.items() if name != flag]
        require_new(path, [*input_files(model, options, "trace"), file, *others], flag)
    chat = (
        prompt is None
        and not raw
        and not as_json
        and _is_terminal(sys.stdin)
        and _is_terminal(sys.stdout)
    )
    if single_turn and chat:
        raise OptionError("-st: give the question with -p")
    if prompt is None and not chat:
        if model or hf_repo:
            raise OptionError("expected a prompt: give it with -p, with -f or on standard input")
        prompt = DEMO_PROMPT
    if raw:
        _refuse_without_template(system, media, args)
    if media and chat:
        raise OptionError("--image: give the question with -p")
    parts = [_media_part(name) for names in media for name in names.split(",")]
    path = chosen_model(model, hf_repo)
    with_gpu(options, adapters=any(word.startswith("--lora") for word in args.passed_on))
    if "memory" in args.options:
        remark_on_memory(args.options["memory"])

    from .client import Client

    transcript = not raw and not _has_template(path, args)
    if raw or transcript:  # skips reading the model's template
        args.passed_on.extend(["--chat-template", _TRANSCRIPT])
    raw = raw or (transcript and not chat and not system)
    with contextlib.ExitStack() as stack:
        if chat:
            from .chat import Chat, typed_ahead

            stack.enter_context(typed_ahead())  # also during loading
        server = stack.enter_context(_start_server(path, args, options))
        _print_remarks(server, options)
        share = (
            f" ({DEFAULT_SHARE:.0%} of what is available)"
            if server.engine.budget.is_default
            else ""
        )
        client = Client(server)
        if transcript and not raw:
            client.settings["stop"] = [_TRANSCRIPT_ENDS]
        if prompt is None:
            Chat(client, system, is_transcript=transcript, history=not no_history).loop(share)
            stats, cancelled = server.stats(), False
        else:
            content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
            messages: list[dict[str, Any]] = (
                [{"role": "system", "content": system}] if system else []
            )
            messages.append({"role": "user", "content": content})
            answer = _answer(client, prompt if raw else messages, not raw, as_json, share)
            stats, cancelled = answer.stats, answer.finish_reason == "cancelled"
    if stats_json:
        with atomic_file(stats_json) as out:
            out.write(stats.to_json().encode())
    if cancelled:
        raise KeyboardInterrupt


def _start_server(path: str, line: CommandLine, options: dict[str, Any]) -> PrivateServer:
    from ..server.private import PrivateServer

    with progress_bar() as progress:
        progress(f"loading {os.path.basename(path)}", 0, 0)
        server = PrivateServer(path, args=line, **options)
        server.start()
    return server


def _print_remarks(server: PrivateServer, options: dict[str, Any]) -> None:
    engine = server.engine
    for remark in server.remarks:
        note(remark)
    if engine.config.verbose:
        say_choices(server.explain())
    remark_on_context(server.n_ctx_each, engine.model_index.n_ctx_train, options)
    if lower := engine.quality.unread_tiers:
        names = ", ".join(lower)
        if engine.config.max_loss is None:
            way_out = f"give --tier {lower[0]}, or --max-loss after calibrate --max-loss"
            note(f"lossless, though the sidecar has {names}: {way_out}")
        else:
            note(f"--max-loss was measured without {names}: repeat calibrate --max-loss to use it")


def _refuse_without_template(system: str | None, media: Sequence[str], line: CommandLine) -> None:
    given = {
        "--system": system,
        "--image": media,
        **{name: True for name in line.passed_on if name in (*_TEMPLATES, "--reasoning")},
    }
    for name, value in given.items():
        if value:
            raise OptionError(f"{name}: has no effect with --raw, which uses no chat template")


def _has_template(path: str, line: CommandLine) -> bool:
    from ..gguf.file import LONGEST_TEMPLATE, ModelFile

    if any(name in line.passed_on for name in _TEMPLATES):
        return True
    with ModelFile(path, longest=LONGEST_TEMPLATE) as file:
        return "tokenizer.chat_template" in file.metadata


def _media_part(path: str) -> dict[str, Any]:
    kind = mimetypes.guess_type(path)[0] or ""
    try:
        data = base64.b64encode(read_file(path, _MEDIA)).decode()
    except OSError as error:
        raise OptionError(f"--image {path}: cannot be read: {error.strerror}") from None
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    if kind in ("audio/wav", "audio/x-wav", "audio/mpeg"):
        return {
            "type": "input_audio",
            "input_audio": {"data": data, "format": "mp3" if kind == "audio/mpeg" else "wav"},
        }
    raise OptionError(f"--image {path}: expected the name of an image, .wav or .mp3")


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _prompt(prompt: str | None, file: str | None) -> str | None:
    """Return the prompt of -p or -f, followed by standard input, or None without any."""
    if prompt is not None and file is not None:
        raise OptionError("give -p or -f, not both")
    try:
        if file is not None:
            prompt = read_text(file, newlines=True).removesuffix("\n")
        if sys.stdin is not None and not _is_terminal(sys.stdin):
            piped = sys.stdin.read(TEXT + 1).removesuffix("\n")
            if len(piped) > TEXT:
                raise OptionError(f"standard input: expected at most {format_size(TEXT)}")
            if piped:
                prompt = piped if prompt is None else f"{prompt}\n\n{piped}"
    except OSError as error:
        raise OptionError(f"standard input: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError("standard input: expected UTF-8 text") from None
    if prompt is not None and not prompt.strip():
        raise OptionError("the prompt is empty")
    return prompt


def _answer(
    client: Client, prompt: str | list[dict[str, Any]], strips: bool, as_json: bool, share: str
) -> Completion:
    from .writer import Writer

    if as_json:
        answer = client.ask(prompt, lambda _text, _is_thought: None)
        client.say_remarks()
        print(json.dumps(answer.to_dict(), ensure_ascii=False))
        return answer
    writer = Writer(strips)
    try:
        answer = client.ask(prompt, writer.write)
    finally:
        writer.end()
    client.say_remarks()
    note(answer.summary() + share)
    return answer
