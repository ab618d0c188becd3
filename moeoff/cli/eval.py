"""`moeoff eval`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..console import progress_bar, remark
from ..memory import peak_rss
from ..paths import demo_model
from .llama_options import BATCH, CACHE, FLASH, GPU, ROPE, SYSTEM, VRAM, llama_arguments, with_options
from .options import CONTEXT, PRECISION, STRIDE, companion, one_sentence, precision_argument

if TYPE_CHECKING:
    from ..budget.statistics import Quality


@click.command(name="eval", context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("--text", multiple=True, required=True, type=click.Path(dir_okay=False), metavar="FILE", help="Text to predict; may be repeated.")
@click.option("--ctx", type=click.IntRange(min=4), default=512, show_default=True, help="Tokens in a window; its second half is scored.")
@click.option("--chunks", type=click.IntRange(min=1), metavar="N", help="Only the first N windows of each text.")
@click.option(
    "--mode", type=click.Choice(["prefill", "decode", "simulated"]), default="prefill", show_default=True,
    help="decode: feed the scored half token by token; simulated: faster, what a --deterministic run decides token by token.",
)  # fmt: skip
@click.option("--memory", metavar="SIZE", help="Bound of the whole process, as 6G, 700MiB or 80%. Default: 80% of what is available.")
@click.option("--expert-memory", metavar="SIZE", help="Bound of the experts alone, instead of --memory.")
@click.option("--experts", type=click.Path(dir_okay=False), metavar="FILE", help="Companion of moeoff convert. Default: MODEL.experts.gguf, if it is there.")
@click.option("--no-experts", is_flag=True, help="Leave the companion beside the model alone.")
@click.option("--tier", metavar="NAME", help="Precision of the companion to evaluate, as Q2_K. Default: the model's own.")
@click.option("--max-loss", metavar="PERCENT", help="Evaluate what calibrate --max-loss found to lose at most this, as 1%.")
@click.option("--deterministic", is_flag=True, help="With --max-loss: decide by the gates alone and not by what is in memory, so that a run can be repeated.")
@click.option(
    "--strategy", default="lru", show_default=True, metavar="NAME", help="What stays in memory: lru, score, on-demand, ... See docs/guides/strategies.md."
)
@STRIDE
@with_options(PRECISION)
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use.")
@with_options(FLASH, BATCH, CACHE, GPU, VRAM, ROPE, SYSTEM)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@one_sentence
def eval_(
    model: str | None, text: tuple[str, ...], ctx: int, mode: str, tier: str | None, max_loss: str | None, as_json: bool,
    experts: str | None, no_experts: bool, threads: int | None, t1: float | None, t2: float | None, prompt_low: float | None, reroute: float | None,
    low_tier: str | None, mispredicted_low: bool, **options: Any,
) -> None:  # fmt: skip
    """Measure perplexity as llama-perplexity does, and how far a lower precision is from the lossless model.

    What is lossy is compared with the lossless model on the same windows: loss of perplexity, KL divergence, and how often
    both find the same token the likeliest.
    """
    from ..calibrate.evaluation import evaluate_model

    model = model or demo_model()
    with progress_bar("tokens") as progress:
        done = evaluate_model(
            model,
            text,
            ctx=ctx,
            mode=mode,
            tier=tier,
            max_loss=max_loss,
            experts=companion(experts, no_experts),
            n_threads=threads,
            progress=progress,
            **precision_argument(t1=t1, t2=t2, prompt_low=prompt_low, reroute=reroute, low_tier=low_tier, mispredicted_low=mispredicted_low),
            **llama_arguments(**options),
        )
    stats = done.stats
    if as_json:
        result = {
            "model": model,
            "mode": mode,
            "ctx": ctx,
            **_fields(done.quality),
            "texts": [{"file": path, **_fields(quality)} for path, quality in zip(text, done.texts)],
            "precision": asdict(done.precision),
            **{
                name: getattr(stats, name)
                for name in ("tier", "expert_uses", "served_low", "skipped", "rerouted", "rerouted_margin", "max_loss", "estimated_loss")
            },
            "seconds": done.seconds,
            "bytes_read": done.bytes_read,
            "strategy": stats.strategy,
            "budget_bytes": stats.budget_bytes,
            "arena_bytes": stats.arena_bytes,
            "peak_rss_bytes": peak_rss(),
        }
        click.echo(json.dumps(result))
        return
    given_up = "as its thresholds say" if not done.precision.lossless else "lossless"
    what = f"at most {max_loss} lost" if max_loss else tier or given_up
    rows = [(os.path.basename(path), quality) for path, quality in zip(text, done.texts)]
    _table(f"{os.path.basename(model)}, {what}, {mode}, windows of {ctx} tokens", [*rows, *([("all", done.quality)] if len(rows) > 1 else [])])
    remarks = [
        f"{done.n_tokens} tokens in {done.seconds:.1f} s, {done.n_tokens / done.seconds:.1f} tok/s",
        f"{done.bytes_read / 1e6 / done.n_tokens:.2f} MB/token read",
        stats.precision_summary,
    ]
    remark(" | ".join(part for part in remarks if part))


def _fields(quality: Quality) -> dict[str, Any]:
    return {name: value for name, value in asdict(quality).items() if value is not None}


def _table(title: str, rows: list[tuple[str, Quality]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..budget.statistics import interval

    table = Table(title=title, title_justify="left")
    for name in ("text", "windows", "perplexity"):
        table.add_column(name, justify="left" if name == "text" else "right")
    compared = rows[0][1].kl is not None
    for name in ("loss", "KL", "same top token") if compared else ():
        table.add_column(f"{name} (95 %)", justify="right")
    for name, q in rows:
        cells = [name, str(q.n_windows), f"{q.perplexity:.4f} ± {q.perplexity_error:.5f}"]
        if compared:
            cells += [interval(value, form) for value, form in zip(q.distance, ("{:+.2%}", "{:.5f}", "{:.2%}"))]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
