"""`moeoff eval`: the quality of a model on text, as it would run with these options, as a table or JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from .budget.statistics import Quality, interval
from .calibrate.perplexity import Reference, evaluate, interruptible, open_model, read_windows
from .companion.file import KEEP
from .console import progress_bar, remark
from .errors import OptionError
from .memory import peak_rss

__all__ = ["evaluation"]


def evaluation(
    *,
    model: str | None = None,
    text: Sequence[str],
    ctx: int = 512,
    chunks: int | None = None,
    mode: str = "prefill",
    as_json: bool = False,
    experts: str | None = None,
    no_experts: bool = False,
    tier: str | None = None,
    max_loss: str | None = None,
    deterministic: bool = False,
    threads: int | None = None,
    verbose: bool = False,
    **options,
) -> None:
    """Evaluates and prints; see `moeoff eval --help` for the options.

    Args:
        **options: memory, expert_memory, strategy, verify_reads, flash_attn of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, a text, the budget or an option is no good.
    """
    from .paths import demo_model

    if experts and no_experts:
        raise OptionError("give --experts or --no-experts, not both")
    model = model or demo_model()
    options |= {"experts": experts or not no_experts, "n_threads": threads, "verbose": verbose}
    lossy = max_loss is not None or (tier is not None and tier.lower() != KEEP)
    lower = {"tier": tier, "max_loss": max_loss, "deterministic": deterministic}
    with contextlib.ExitStack() as stack:
        reference = None
        if lossy:
            with open_model(model, ctx, **lower, **options):
                pass  # what is wrong with the options comes before minutes of computing
            with open_model(model, ctx, **(options | {"experts": False, "verify_reads": False})) as llm:
                windows = read_windows(llm, text, ctx, chunks)
                with _token_bar("lossless", len(windows) * ctx) as progress, interruptible(llm) as call:
                    reference = stack.enter_context(call(Reference.record, llm, windows, mode, progress))
        with open_model(model, ctx, **lower, **options) as llm:
            windows = read_windows(llm, text, ctx, chunks)
            with _token_bar("evaluating", len(windows) * ctx) as progress, interruptible(llm) as call:
                started = time.perf_counter()
                scores = call(evaluate, llm, windows, reference, mode=mode, progress=progress)
                seconds = time.perf_counter() - started
            stats, budget, precision = llm.stats(), llm.plan.budget, llm.precision
    names = [os.path.basename(path) for path in text]
    by_text = [(name, scores.quality(_windows_of(windows, i))) for i, name in enumerate(names)]
    whole = scores.quality()
    if as_json:
        result = {
            "model": model,
            "mode": mode,
            "ctx": ctx,
            **_fields(whole),
            "texts": [{"file": path, **_fields(quality)} for path, (_, quality) in zip(text, by_text)],
            "precision": asdict(precision),
            **{name: getattr(stats, name) for name in ("tier", "expert_uses", "served_low", "skipped", "max_loss", "estimated_loss")},
            "seconds": seconds,
            "bytes_read": scores.bytes_read,
            "strategy": stats.strategy,
            "budget_bytes": budget,
            "arena_bytes": stats.arena_bytes,
            "peak_rss_bytes": peak_rss(),
        }
        print(json.dumps(result))
        return
    what = f"at most {max_loss} lost" if max_loss else tier or "lossless"
    _table(f"{os.path.basename(model)}, {what}, {mode}, windows of {ctx} tokens", [*by_text, *([("all", whole)] if len(names) > 1 else [])])
    n_tokens = len(windows) * ctx
    said = [
        f"{n_tokens} tokens in {seconds:.1f} s, {n_tokens / seconds:.1f} tok/s",
        f"{scores.bytes_read / 1e6 / n_tokens:.2f} MB/token read",
        stats.precision_summary,
    ]
    remark(" | ".join(part for part in said if part))


def _windows_of(windows, text: int) -> slice:
    inside = [i for i, window in enumerate(windows) if window.text == text]
    return slice(inside[0], inside[-1] + 1)


def _fields(quality: Quality) -> dict:
    return {name: value for name, value in asdict(quality).items() if value is not None}


def _table(title: str, rows: list[tuple[str, Quality]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("text", "windows", "perplexity"):
        table.add_column(name, justify="left" if name == "text" else "right")
    compared = rows[0][1].kl is not None
    for name in ("loss", "KL", "same top token") if compared else ():
        table.add_column(f"{name} (95 %)", justify="right")
    for name, q in rows:
        cells = [name, str(q.n_windows), f"{q.perplexity:.4f} ± {q.perplexity_error:.5f}"]
        if compared:
            cells += [interval(q.loss, "{:+.2%}"), interval(q.kl, "{:.5f}"), interval(q.top1, "{:.2%}")]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@contextlib.contextmanager
def _token_bar(stage: str, total: int) -> Iterator[Callable[[int], None] | None]:
    with progress_bar("tokens") as update:
        yield update and (lambda done: update(stage, done, total))
