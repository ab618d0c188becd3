"""`moeoff run`: a model answers one prompt, or a person who chats. It is a client of the server that it starts in its own process, on a private socket."""

from __future__ import annotations

import base64
import contextlib
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
from .options import command, input_files, model_argument, option, remark_on_context, remark_on_memory, table_options
from .serve import HF_REPO, ServedCommand, chosen_model, say_choices

if TYPE_CHECKING:
    from ..server.arguments import CommandLine
    from ..server.private import PrivateServer
    from .client import Client, Completion

DEMO_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"
_MEDIA = 64 << 20  # bytes of a picture or a sound
# what has no template: a transcript, in which the model writes the assistant's lines
_TRANSCRIPT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}:{{ '' if m.content[:1] == ' ' else ' ' }}{{ m.content }}\n\n{% endfor %}Assistant:"
)
_TRANSCRIPT_ENDS = "\n\nUser:"
_TEMPLATES = ("--chat-template", "--chat-template-file")


@command(cls=ServedCommand)
@model_argument()
@HF_REPO
@option("-p", "--prompt", metavar="TEXT", help="Prompt. Without one, in a terminal: chat.")
@option("-f", "--file", type=click.Path(dir_okay=False), metavar="FILE", help="File with the prompt. Standard input is appended to -p or -f.")
@table_options("run")
@option("-sys", "--system-prompt", "--system", "system", group="Prompt and answer", metavar="TEXT", help="System prompt.")
@option("-sysf", "--system-prompt-file", "system_file", group="Prompt and answer", type=click.Path(dir_okay=False), metavar="FILE",
     help="File with the system prompt.")  # fmt: skip
@option("--image", "--audio", "media", group="Prompt and answer", metavar="FILE,...", multiple=True,
     help="Pictures or sounds that the prompt is about, with --mmproj. May be given several times.")  # fmt: skip
@option("--no-history", group="Prompt and answer", is_flag=True, help="Keep no file of what is typed in chats, ~/.cache/moeoff/chat_history.")
@option("-no-cnv", "--no-conversation", "--raw", "raw", group="Prompt and answer", is_flag=True,
     help="Continue the prompt as it is, without the model's chat template.")  # fmt: skip
@option("-st", "--single-turn", "single_turn", hidden=True, is_flag=True, help="Ends after one answer, as it does with -p anyway.")
@option("--json", "as_json", group="Prompt and answer", is_flag=True, help="Print one JSON object: text, finish_reason, usage, stats.")
@option("--stats-json", group="Prompt and answer", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write statistics to FILE.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    model: str | None, hf_repo: str | None, prompt: str | None, file: str | None, system: str | None, system_file: str | None, media: Sequence[str],
    no_history: bool, raw: bool, single_turn: bool, as_json: bool, stats_json: str | None, args: CommandLine, **options: Any,
) -> None:  # fmt: skip
    """Answer a prompt, or chat. Text goes to stdout, a line of statistics to stderr.

    ARGS are llama-cli's own options, such as --grammar, --json-schema, --lora and --chat-template.
    """
    if model and " " in model and not os.path.exists(model):
        raise OptionError(f"{model}: there is no such file; a prompt goes behind -p")
    if hf_repo:
        from ..gguf.hub import parse

        parse(hf_repo)  # before anything else is looked at
    if system is not None and system_file is not None:
        raise OptionError("give -sys or -sysf, not both")
    system = read_text(system_file).removesuffix("\n") if system_file is not None else system
    prompt = _prompt(prompt, file)
    options |= args.options
    outputs = {"--stats-json": stats_json, "--trace": options.get("trace")}
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
    if raw:
        _refuse_without_template(system, media, args)
    if media and chat:
        raise OptionError("--image: give the question with -p")
    pictures = [_media(name) for names in media for name in names.split(",")]
    path = chosen_model(model, hf_repo)
    with_gpu(options, adapters=any(word.startswith("--lora") for word in args.passed_on))
    if "memory" in args.options:
        remark_on_memory(args.options["memory"])

    from .client import Client

    transcript = not raw and not _has_template(path, args)
    if raw or transcript:  # the model's own need not be read
        args.passed_on.extend(["--chat-template", _TRANSCRIPT])
    raw = raw or (transcript and not chat and not system)
    with contextlib.ExitStack() as stack:
        if chat:
            from .chat import Chat, typed_ahead

            stack.enter_context(typed_ahead())  # also while the model is loaded
        server = stack.enter_context(_opened(path, args, options))
        _remark(server, options)
        share = f" ({DEFAULT_SHARE:.0%} of what is available)" if server.engine.budget.is_default else ""
        client = Client(server)
        if transcript and not raw:
            client.settings["stop"] = [_TRANSCRIPT_ENDS]
        if prompt is None:
            Chat(client, system, is_transcript=transcript, history=not no_history).loop(share)
            stats, cancelled = server.stats(), False
        else:
            content = [*pictures, {"type": "text", "text": prompt}] if pictures else prompt
            messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": content})
            answer = _answer(client, prompt if raw else messages, not raw, as_json, share)
            stats, cancelled = answer.stats, answer.finish_reason == "cancelled"
    if stats_json:
        with atomic_file(stats_json) as out:
            out.write(stats.to_json().encode())
    if cancelled:
        raise KeyboardInterrupt


def _opened(path: str, line: CommandLine, options: dict[str, Any]) -> PrivateServer:
    """Return the server, started, with a bar on the terminal while it loads."""
    from ..server.private import PrivateServer

    with progress_bar() as progress:
        progress(f"loading {os.path.basename(path)}", 0, 0)
        server = PrivateServer(path, args=line, **options)
        server.start()
    return server


def _remark(server: PrivateServer, options: dict[str, Any]) -> None:
    """Say what whoever runs the model should know."""
    engine = server.engine
    for remark in server.remarks:
        note(remark)
    if engine.config.verbose:
        say_choices(server.explain())
    remark_on_context(server.n_ctx_each, engine.model_index.n_ctx_train, options)
    if lower := engine.quality.unread_tiers:
        names = ", ".join(lower)
        if engine.config.max_loss is None:
            note(f"lossless, though the sidecar has {names}: give --tier {lower[0]}, or --max-loss for what calibrate --max-loss measures it to lose")
        else:
            note(f"--max-loss was measured without the sidecar's {names}: calibrate --max-loss again, and it may be chosen")


def _refuse_without_template(system: str | None, media: Sequence[str], line: CommandLine) -> None:
    given = {"--system": system, "--image": media, **{name: True for name in line.passed_on if name in (*_TEMPLATES, "--reasoning")}}
    for name, value in given.items():
        if value:
            raise OptionError(f"{name}: with --raw there is no chat template, and so no place for it")


def _has_template(path: str, line: CommandLine) -> bool:
    """Whether conversations have a template: the model's own, or one of the command line."""
    from ..gguf.file import LONGEST_TEMPLATE, ModelFile

    if any(name in line.passed_on for name in _TEMPLATES):
        return True
    with ModelFile(path, longest=LONGEST_TEMPLATE) as file:
        return "tokenizer.chat_template" in file.metadata


def _media(path: str) -> dict[str, Any]:
    """Return a part of a message with a picture or a sound from a file."""
    kind = mimetypes.guess_type(path)[0] or ""
    try:
        data = base64.b64encode(read_file(path, _MEDIA)).decode()
    except OSError as error:
        raise OptionError(f"--image {path}: cannot be read: {error.strerror}") from None
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    if kind in ("audio/wav", "audio/x-wav", "audio/mpeg"):
        return {"type": "input_audio", "input_audio": {"data": data, "format": "mp3" if kind == "audio/mpeg" else "wav"}}
    raise OptionError(f"--image {path}: a picture, or a sound as .wav or .mp3, by the end of its name")


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


def _answer(client: Client, prompt: str | list[dict[str, Any]], strips: bool, as_json: bool, share: str) -> Completion:
    """Print one answer, as text or as one JSON object, and a line about it on stderr."""
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
