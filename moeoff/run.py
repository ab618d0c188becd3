"""`moeoff run`: a prompt answered, or a chat if nobody gave one."""

from __future__ import annotations

import importlib.resources
import json
import os
import random
import sys

from .errors import OptionError
from .memory import DEFAULT_SHARE

DEFAULT_CTX = 4096
DEMO_MODEL = "demo-moe-q8_0.gguf"
DEMO_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"


def demo_model() -> str:
    """Path of the model that ships inside the package."""
    return str(importlib.resources.files("moeoff") / "data" / DEMO_MODEL)


def default_ctx(layout) -> int:
    """Tokens of context if nobody states them: enough for a chat, and no more than the model was trained with."""
    return min(DEFAULT_CTX, layout.n_ctx_train or DEFAULT_CTX)


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
    experts: str | None = None,
    no_experts: bool = False,
    tier: str | None = None,
    verify_reads: bool = False,
    strategy: str = "auto",
    profile: str | None = None,
    no_profile: bool = False,
    max_loss: str | None = None,
    deterministic: bool = False,
    warm: bool = True,
    threads: int | None = None,
    ctx_size: int | None = None,
    flash_attn: bool = True,
    n_gpu_layers: int = 0,
    seed: int = -1,
    verbose: bool = False,
    **sampling,
) -> None:
    """Answers a prompt, or chats; see `moeoff run --help` for the options.

    Args:
        **sampling: the fields of `moeoff.answer.Sampling`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
        KeyboardInterrupt: the answer was stopped with Ctrl-C; what was written of it stays.
    """
    if experts and no_experts:
        raise OptionError("give --experts or --no-experts, not both")
    if profile and no_profile:
        raise OptionError("give --profile or --no-profile, not both")
    if model and hf_repo:
        raise OptionError("give -m or -hf, not both")
    if stats_json and not os.path.isdir(os.path.dirname(os.path.abspath(stats_json))):
        raise OptionError(f"{stats_json}: there is no such folder to write statistics into")
    if hf_repo:
        from .hub import download, parse

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

    sampling["stop"] = tuple(sampling.get("stop", ()))
    how = Sampling(**sampling)
    share = f" ({DEFAULT_SHARE:.0%} of what is available)" if memory is None and expert_memory is None else ""
    llm = _open(
        model or demo_model(),
        verbose=verbose,
        memory=memory,
        expert_memory=expert_memory,
        experts=experts or not no_experts,
        tier=tier,
        verify_reads=verify_reads,
        strategy=strategy,
        profile=profile or not no_profile,
        trace=trace,
        max_loss=max_loss,
        deterministic=deterministic,
        warm=warm,
        n_ctx=ctx_size,
        n_threads=threads,
        n_gpu_layers=n_gpu_layers,
        flash_attn=flash_attn,
        seed=seed if seed >= 0 else random.getrandbits(31),
    )
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


def _open(model: str, *, n_ctx: int | None, **options):
    """Loads the model with a bar on the terminal."""
    from .layout import Layout
    from .llama import Llama
    from .progress import loading_bar

    layout = Layout.read(model)
    with loading_bar(os.path.basename(model), layout.dense_bytes) as progress:
        return Llama(
            model,
            n_ctx=n_ctx or default_ctx(layout),
            progress=progress,
            **options,
        )


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
    dim(answer.summary() + share)
    return answer


def dim(text: str) -> None:
    """A remark on stderr, quieter than the answer if that is a terminal."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
