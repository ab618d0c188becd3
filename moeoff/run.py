"""`moeoff run`: one answer, streamed, and what it took."""

from __future__ import annotations

import importlib.resources
import os
import random
import sys
import time
from dataclasses import replace

from .errors import OptionError
from .memory import format_size
from .stats import Stats

DEFAULT_CTX = 4096
DEMO_MODEL = "demo-moe-q8_0.gguf"
DEMO_PROMPT = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"


def demo_model() -> str:
    """Path of the model that ships inside the package."""
    return str(importlib.resources.files("moeoff") / "data" / DEMO_MODEL)


def run(
    *,
    model: str | None = None,
    prompt: str | None = None,
    n_predict: int = 128,
    raw: bool = False,
    memory: str | None = None,
    expert_memory: str | None = None,
    strategy: str = "lru",
    threads: int | None = None,
    ctx_size: int | None = None,
    flash_attn: bool = True,
    temp: float = 0.8,
    seed: int = -1,
    n_gpu_layers: int = 0,
    ignore_eos: bool = False,
    stats_json: str | None = None,
) -> Stats:
    """Answers one prompt; see `moeoff run --help` for the options.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    from llama_cpp import llama_cpp as binding

    from .layout import Layout
    from .llama import Llama

    if prompt is None and model is not None:
        raise OptionError("give a prompt with -p")
    prompt = prompt if prompt is not None else DEMO_PROMPT
    if n_gpu_layers and not binding.llama_supports_gpu_offload():
        raise OptionError("-ngl: this build of llama.cpp has no GPU backend; rebuild with CMAKE_ARGS=-DGGML_CUDA=ON (or METAL, VULKAN)")
    if stats_json and not os.path.isdir(os.path.dirname(os.path.abspath(stats_json))):
        raise OptionError(f"{stats_json}: there is no such folder to write statistics into")
    model = model or demo_model()
    llm = Llama(
        model,
        memory=memory,
        expert_memory=expert_memory,
        strategy=strategy,
        n_ctx=ctx_size or min(DEFAULT_CTX, Layout.read(model).n_ctx_train or DEFAULT_CTX),
        n_threads=threads,
        n_gpu_layers=n_gpu_layers,
        flash_attn=flash_attn,
        seed=seed if seed >= 0 else random.getrandbits(31),
    )
    with llm:
        stats = _answer(llm, prompt, n_predict, raw, temp, ignore_eos)
    if stats_json:
        with open(stats_json, "w") as file:
            file.write(stats.to_json())
    return stats


def _answer(llm, prompt: str, n_predict: int, raw: bool, temp: float, ignore_eos: bool) -> Stats:
    options = {"max_tokens": n_predict, "temperature": temp, "stream": True}
    if ignore_eos:
        options["logit_bias"] = {llm.token_eos(): float("-inf")}
    cpu = time.process_time()
    started = time.perf_counter()
    if raw or "tokenizer.chat_template" not in llm.metadata:
        chunks = (c["choices"][0]["text"] for c in llm.create_completion(prompt, **options))
    else:
        replies = llm.create_chat_completion([{"role": "user", "content": prompt}], **options)
        chunks = (c["choices"][0]["delta"].get("content") or "" for c in replies)
    try:
        for text in chunks:
            sys.stdout.write(text)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
        ended = time.perf_counter()
        stats = llm.stats()
        timing = llm.timing
        stats = replace(
            stats,
            prompt_tokens=timing.prompt_tokens,
            prompt_tps=timing.prompt_tokens / timing.prompt_seconds if timing.prompt_seconds else 0.0,
            gen_tokens=timing.gen_tokens,
            gen_tps=timing.gen_tokens / (ended - started - timing.prompt_seconds) if timing.gen_tokens else 0.0,
            cpu_seconds=time.process_time() - cpu,
        )
        print(summary(stats), file=sys.stderr)
    return stats


def summary(s: Stats) -> str:
    """One line for people."""
    tokens = s.prompt_tokens + s.gen_tokens
    return (
        f"prompt {s.prompt_tokens} tokens, {s.prompt_tps:.1f} tok/s | generated {s.gen_tokens}, {s.gen_tps:.1f} tok/s | "
        f"hit rate {s.hit_rate:.1%}, {s.bytes_read / 1e6 / max(tokens, 1):.1f} MB/token read"
        f"{'' if s.direct_io else ' (through the page cache)'}, stalled {s.stall_seconds:.2f} s | "
        f"experts {format_size(s.arena_bytes)}, peak {format_size(s.peak_rss_bytes)}"
        + (f" of {format_size(s.budget_bytes)}" if s.budget_bytes else "")
    )
