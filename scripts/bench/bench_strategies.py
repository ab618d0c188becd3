"""Speed of every strategy, live and paired: one prompt of 512 tokens, then tokens one by one.

usage: bench_strategies.py -m MODEL --text FILE [--shares 25,50,75] [--rounds 2] [--ladder] [-o OUT.json]

The experts' memory is a share of what all of them take. Each round runs every strategy once, in turn, each in a fresh process
after the model has been dropped from the page cache. A model on tmpfs stays where it is: that is the second regime, memory
that is slower than memory. A profile of `moeoff calibrate` beside the model is used. Rows are medians over rounds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from moeoff.engine.strategy import PRESETS
from moeoff.gguf.layout import Layout
from timing import machine, measure, median

COLUMNS = {
    "prompt_tps": ("prompt tok/s", "{:.1f}"),
    "gen_tps": ("tok/s", "{:.1f}"),
    "gen_tps_range": ("range", "{0[0]:.1f}-{0[1]:.1f}"),
    "hit_rate": ("hits", "{:.1%}"),
    "mb_per_token": ("MB/token", "{:.1f}"),
    "stall_share": ("stall", "{:.0%}"),
    "prefetched_per_token": ("prefetched/token", "{:.1f}"),
    "prefetch_precision": ("of these used", "{:.0%}"),
    "cpu_ms_per_token": ("CPU ms/token", "{:.1f}"),
    "driver_ms_per_token": ("driver ms", "{:.2f}"),
}
STEPS = ("on-demand (serial)", "+ cache", "+ prefetch", "+ chunks, preemption, ready first")


def arena_full(model: str) -> int:
    """Bytes of the arena that holds every expert: each slice in whole pages, and one for a start inside a page."""
    spans = Layout.read(model).experts.values()
    return sum((-(-(s.nbytes // s.shape[2]) // 4096) + 1) * 4096 * s.shape[2] for s in spans)


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--shares", default="25,50,75", show_default=True, help="Percent of the experts in memory.")
@click.option("--strategies", default=",".join(["lru", *PRESETS]), show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--n-prompt", default=512, show_default=True)
@click.option("--n-decode", default=160, show_default=True)
@click.option("--ladder", is_flag=True, help="The ablation ladder instead of the strategies.")
@click.option("-o", "--output", type=click.Path(dir_okay=False))
def main(model, text, shares, strategies, rounds, n_prompt, n_decode, ladder, output) -> None:
    full = arena_full(model)
    names = dict(zip(STEPS, ({"step": i + 1} for i in range(len(STEPS))))) if ladder else {s: {"strategy": s} for s in strategies.split(",")}
    runs: dict[tuple[str, str], list[dict]] = {(share, name): [] for share in shares.split(",") for name in names}
    for _ in range(rounds):
        for (share, name), rows in runs.items():
            options = names[name] | {"expert_memory": int(full * int(share) / 100)}
            if name == "on-demand":
                options["n_lanes"] = 1
            rows.append(measure("moeoff", model, text, n_prompt, n_decode, 300, **options))
            print(share, name, rows[-1].get("failed") or f"{rows[-1]['prompt_tps']:.1f} {rows[-1]['gen_tps']:.1f}", file=sys.stderr, flush=True)
    table = Table(title=f"{machine()}; {n_prompt} + {n_decode} tokens; medians of {rounds}")
    for title in ("experts in memory", "strategy", *(title for title, _ in COLUMNS.values())):
        table.add_column(title, justify="right")
    result = []
    for (share, name), rows in runs.items():
        row = median(rows)
        result.append({"share": int(share), "strategy": name} | row)
        cells = [row["failed"]] if "failed" in row else [form.format(row[key]) for key, (_, form) in COLUMNS.items()]
        table.add_row(f"{share} %", name, *cells)
    Console(width=200).print(table)
    if output:
        Path(output).write_text(json.dumps({"machine": machine(), "rows": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
