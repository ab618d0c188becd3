"""`moeoff run`: a prompt answered, or a chat if nobody gave one."""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import fields

from .console import remark
from .engine.open import open_model
from .errors import OptionError
from .memory import DEFAULT_SHARE
from .paths import demo_model

DEMO_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"


def run(
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
    memory: str | None = None,
    expert_memory: str | None = None,
    seed: int = -1,
    **options,
) -> None:
    """Answers a prompt, or chats; see `moeoff run --help` for the options.

    Args:
        **options: the fields of `moeoff.answer.Sampling`, and what `open_model` takes.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
        KeyboardInterrupt: the answer was stopped with Ctrl-C; what was written of it stays.
    """
    if model and hf_repo:
        raise OptionError("give -m or -hf, not both")
    if stats_json and not os.path.isdir(os.path.dirname(os.path.abspath(stats_json))):
        raise OptionError(f"{stats_json}: there is no such folder to write statistics into")
    if hf_repo:
        from .gguf.hub import download, parse

        parse(hf_repo)
    prompt = _prompt(prompt, file)
    chat = prompt is None and not raw and not as_json and _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    if prompt is None and not chat:
        if model or hf_repo:
            raise OptionError("give a prompt with -p, with -f or on standard input; without one, in a terminal, moeoff chats")
        prompt = DEMO_PROMPT
    if hf_repo:
        model = download(hf_repo)

    from .answer import Answerer, Sampling
    from .engine.llama import Llama

    sampling = {f.name: options.pop(f.name) for f in fields(Sampling) if f.name in options}
    how = Sampling(**sampling | {"stop": tuple(sampling.get("stop", ()))})
    share = f" ({DEFAULT_SHARE:.0%} of what is available)" if memory is None and expert_memory is None else ""
    options |= {"memory": memory, "expert_memory": expert_memory, "trace": trace}
    llm = open_model(Llama, model or demo_model(), seed=seed if seed >= 0 else random.getrandbits(31), **options)
    with llm, Answerer(llm, how) as answerer:
        if chat:
            from .chat import Chat

            stats = Chat(answerer, system).loop(share)
            cancelled = False
        else:
            answer = _answer(answerer, prompt, system, raw, as_json, share)
            stats, cancelled = answer.stats, answer.finish_reason == "cancelled"
    if stats_json and stats is not None:
        with open(stats_json, "w") as out:
            out.write(stats.to_json())
    if cancelled:
        raise KeyboardInterrupt


def _is_terminal(stream) -> bool:
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


def _answer(answerer, prompt: str, system: str | None, raw: bool, as_json: bool, share: str):
    """One prompt: text, or one JSON object, on stdout, and a line about it on stderr."""
    from .answer import Template, text_tokens

    llm = answerer.llm
    if raw or "tokenizer.chat_template" not in llm.metadata:
        if system:
            raise OptionError("--system: there is no chat template to put it into")
        tokens = text_tokens(llm, prompt)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        tokens = Template(llm).tokens([*messages, {"role": "user", "content": prompt}])
    if as_json:
        answer = answerer.answer(tokens, lambda _text: None)
        print(json.dumps(answer.to_dict(), ensure_ascii=False))
        return answer

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    answer = answerer.answer(tokens, write)
    write("\n")
    remark(answer.summary() + share)
    return answer
