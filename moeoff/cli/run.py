"""`moeoff run`: answers a prompt, or chats where none is given."""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..atomic_file import atomic_file
from ..console import remark
from ..errors import OptionError
from ..memory import DEFAULT_SHARE
from ..paths import demo_model
from .options import CONTEXT, one_sentence, opening_arguments, opening_options

if TYPE_CHECKING:
    from .completion import Completer, Completion

DEMO_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"


@click.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("-hf", "--hf-repo", metavar="ORG/REPO[:QUANT]", help="Model from Hugging Face. Default quant: Q4_K_M, or else the first GGUF.")
@click.option("-p", "--prompt", help="Prompt. Without one, in a terminal: chat.")
@click.option("-f", "--file", type=click.Path(dir_okay=False), metavar="FILE", help="File with the prompt. Standard input is appended to -p or -f.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("-n", "--n-predict", type=click.IntRange(min=-1), default=-1, show_default=True, help="Tokens to generate at most; -1: as many as fit.")
@click.option("-s", "--stop", multiple=True, metavar="TEXT", help="Text that ends the answer. May be given several times.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: text, finish_reason, usage, stats.")
@opening_options
@click.option("--temp", type=click.FloatRange(min=0), default=0.8, show_default=True, help="Temperature; 0 takes the likeliest token.")
@click.option("--top-k", type=int, default=40, show_default=True, help="Draw from the likeliest K tokens; 0: from all.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Draw from the likeliest tokens that make up this probability.")
@click.option(
    "--min-p", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Leave out tokens below this share of the likeliest one's probability."
)
@click.option("--repeat-penalty", type=float, default=1.0, show_default=True, help="Penalty on tokens that occurred lately; 1: none.")
@click.option("--seed", type=int, default=-1, show_default=True, help="Seed of the sampler; -1 draws one.")
@click.option("--ignore-eos", is_flag=True, help="Generate -n tokens even if the model wants to stop.")
@click.option("--prompt-cache", type=click.Path(dir_okay=False), metavar="FILE", help="Take the computed prompt from FILE, and write it there when it is new.")
@click.option("--prompt-cache-all", is_flag=True, help="Keep the answer in the prompt cache, too.")
@click.option("--prompt-cache-ro", is_flag=True, help="Use the prompt cache, and do not write it.")
@click.option("--stats-json", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write statistics to FILE.")
@click.option("--trace", type=click.Path(dir_okay=False), metavar="FILE", help="Record which experts the router selected, for simulate; appends to FILE.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@one_sentence
def run(**options: Any) -> None:
    """Answer a prompt, or chat. Text goes to stdout, a line of statistics to stderr."""
    _run(**opening_arguments(**options))


def _run(
    *,
    model: str | None = None,
    hf_repo: str | None = None,
    prompt: str | None = None,
    file: str | None = None,
    system: str | None = None,
    raw: bool = False,
    as_json: bool = False,
    stats_json: str | None = None,
    trace: str | None = None,
    prompt_cache: str | None = None,
    prompt_cache_all: bool = False,
    prompt_cache_ro: bool = False,
    memory: str | None = None,
    expert_memory: str | None = None,
    seed: int = -1,
    **options: Any,
) -> None:
    """Answers a prompt, or chats; see `moeoff run --help` for the options.

    Args:
        **options: the fields of `moeoff.cli.completion.Sampling`, and what `open_model` takes.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
        KeyboardInterrupt: the answer was stopped with Ctrl-C; what was written of it stays.
    """
    if model and hf_repo:
        raise OptionError("give -m or -hf, not both")
    if stats_json and not os.path.isdir(os.path.dirname(os.path.abspath(stats_json))):
        raise OptionError(f"{stats_json}: there is no such folder to write statistics into")
    if prompt_cache is None and (prompt_cache_all or prompt_cache_ro):
        raise OptionError("--prompt-cache-all and --prompt-cache-ro say how a --prompt-cache FILE is used: give one")
    if hf_repo:
        from ..gguf.hub import download, parse

        parse(hf_repo)
    prompt = _prompt(prompt, file)
    chat = prompt is None and not raw and not as_json and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    if prompt is None and not chat:
        if model or hf_repo:
            raise OptionError("give a prompt with -p, with -f or on standard input; without one, in a terminal, moeoff chats")
        prompt = DEMO_PROMPT
    if chat and prompt_cache:
        raise OptionError("--prompt-cache keeps one prompt, and a chat has many: give a prompt with -p or -f")
    if hf_repo:
        model = download(hf_repo)

    from ..engine.llama import Llama
    from ..engine.open import open_model
    from ..engine.prompt_cache import PromptCache
    from .completion import Completer, Sampling

    sampling = {f.name: options.pop(f.name) for f in fields(Sampling) if f.name in options}
    how = Sampling(**sampling | {"stop": tuple(sampling.get("stop", ()))})
    cache = PromptCache(prompt_cache, read_only=prompt_cache_ro, answers=prompt_cache_all) if prompt_cache else None
    share = f" ({DEFAULT_SHARE:.0%} of what is available)" if memory is None and expert_memory is None else ""
    options |= {"memory": memory, "expert_memory": expert_memory, "trace": trace}
    llm = open_model(Llama, model or demo_model(), seed=seed if seed >= 0 else random.getrandbits(31), **options)
    with llm, Completer(llm, how, cache) as completer:
        if prompt is None:
            from .chat import Chat

            stats = Chat(completer, system).loop(share)
            cancelled = False
        else:
            answer = _complete(completer, prompt, system, raw, as_json, share)
            stats, cancelled = answer.stats, answer.finish_reason == "cancelled"
    if stats_json and stats is not None:
        with atomic_file(stats_json) as out:
            out.write(stats.to_json().encode())
    if cancelled:
        raise KeyboardInterrupt


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _prompt(prompt: str | None, file: str | None) -> str | None:
    """What -p, -f and standard input say together, or None if none says anything. What is piped in follows the question."""
    if prompt is not None and file is not None:
        raise OptionError("give -p or -f, not both")
    try:
        if file is not None:
            with open(file, encoding="utf-8") as text:
                prompt = text.read().removesuffix("\n")
        if sys.stdin is not None and not _is_terminal(sys.stdin):
            source, piped = "standard input", sys.stdin.read().removesuffix("\n")
            if piped:
                prompt = piped if prompt is None else f"{prompt}\n\n{piped}"
    except OSError as error:
        raise OptionError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{file or source}: is not UTF-8 text") from None
    if prompt is not None and not prompt.strip():
        raise OptionError("the prompt is empty: there is nothing to answer")
    return prompt


def _complete(completer: Completer, prompt: str, system: str | None, raw: bool, as_json: bool, share: str) -> Completion:
    """One prompt: text, or one JSON object, on stdout, and a line about it on stderr."""
    from ..engine.chat_template import Template
    from ..engine.prompt import prompt_tokens

    llm = completer.llm
    if raw or "tokenizer.chat_template" not in llm.metadata:
        if system:
            raise OptionError("--system: there is no chat template to put it into")
        tokens = prompt_tokens(llm, prompt, add_bos=True)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        tokens = Template(llm).tokens([*messages, {"role": "user", "content": prompt}])
    if as_json:
        answer = completer.complete(tokens, lambda _text: None)
        print(json.dumps(answer.to_dict(), ensure_ascii=False))
        return answer

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    answer = completer.complete(tokens, write)
    write("\n")
    remark(answer.summary() + share)
    return answer
