"""Speed of every strategy, live and paired: one prompt of 512 tokens, then tokens one by one.

usage: bench_strategies.py -m MODEL --text FILE [--shares 25,50,75] [--rounds 2] [--ladder] [--json FILE]

The experts' memory is a share of what all of them take. Each round runs every strategy once, in turn, each in a fresh process
after the model has been dropped from the page cache. A model on tmpfs stays where it is: that is the second regime, memory
that is slower than memory. A profile of `moeoff calibrate` beside the model is used. Rows are medians over rounds.
"""

from __future__ import annotations

import sys

import click

from moeoff.engine.strategy import PRESETS
from moeoff.gguf.layout import Layout
from results_file import HELP, ResultsFile
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
@click.option("--strategies", default=",".join(["lru", *(name for name, s in PRESETS.items() if s.precision.lossless)]), show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--n-prompt", default=512, show_default=True)
@click.option("--n-decode", default=160, show_default=True)
@click.option("--ladder", is_flag=True, help="The ablation ladder instead of the strategies.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model, text, shares, strategies, rounds, n_prompt, n_decode, ladder, json_file) -> None:
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
    print(f"{machine()}; {n_prompt} + {n_decode} tokens; medians of {rounds}")
    found = {key: median(rows) for key, rows in runs.items()}
    with ResultsFile(json_file) as results:
        summary(results, found, shares.split(","), list(names), rounds)
        table = results.table("runs", "Every run", ["experts in memory", "strategy", *(title for title, _ in COLUMNS.values())])
        for (share, name), row in found.items():
            cells = [row["failed"], *[""] * (len(COLUMNS) - 1)] if "failed" in row else [form.format(row[key]) for key, (_, form) in COLUMNS.items()]
            table.row(f"{share} %", name, *cells)


def summary(results: ResultsFile, found: dict[tuple[str, str], dict], shares: list[str], names: list[str], rounds: int) -> None:
    """A row for each strategy; driver: its share of all CPU of a token, the worst of the sizes."""
    columns = [f"{share} %: {what}" for share in shares for what in ("tok/s", "hits", "MB/token", "stall")]
    table = results.table("strategies", "Strategies by share of the experts in memory", ["strategy", *columns, "prompt tok/s", "driver"])
    for name in names:
        rows = [found[share, name] for share in shares]
        cells, good = [], [row for row in rows if "failed" not in row]
        for row in rows:
            if "failed" in row:
                cells += [row["failed"], "", "", ""]
                continue
            spread = " ({0[0]:.1f}-{0[1]:.1f})".format(row["gen_tps_range"]) if rounds > 1 else ""
            cells += [f"{row['gen_tps']:.1f}{spread}", f"{row['hit_rate']:.0%}", f"{row['mb_per_token']:.0f}", f"{row['stall_share']:.0%}"]
        prompts = [row["prompt_tps"] for row in good] or [0]
        driver = max((row["driver_ms_per_token"] / row["cpu_ms_per_token"] for row in good), default=0)
        table.row(f"`{name}`", *cells, f"{min(prompts):.0f}-{max(prompts):.0f}", f"{driver:.1%}")


if __name__ == "__main__":
    main()
