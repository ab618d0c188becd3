"""What `moeoff inspect` says of a model in a budget, beside what `moeoff run` then does: said, measured, and measured / said.

usage: bench_inspect.py -m MODEL --memory 6G,8G [-m MODEL --memory 4G ...] [-c 8192] [--tokens 128] [--rounds 3] [--prompt TEXT | --text FILE] [--json FILE]

A row for each budget: medians of the rounds, each of which says and measures anew, in processes of their own with an empty cache folder, so that neither depends
on what an earlier run has left there. The model leaves the page cache before. With --text it is `moeoff bench` that is measured, which feeds a text token by
token: a model of random weights, left to itself, repeats a few tokens, and with them a few experts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeoff.bench.run import drop_from_page_cache
from moeoff.gguf.model_index import ModelIndex
from results import HELP, ResultsFile

COLUMNS = ["model", "memory", "context", "experts in memory", "computing, ms/token", "disk, MB/s", "said, tok/s", "measured, tok/s", "measured / said", "hits"]


def moeoff(*words: str, cache: str) -> str:
    """What the command prints. Raises SystemExit with what it said, if that was an error."""
    done = subprocess.run([sys.executable, "-m", "moeoff.cli", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          env=os.environ | {"XDG_CACHE_HOME": cache}, check=False)  # fmt: skip
    if done.returncode:
        sys.exit(f"moeoff {' '.join(words)}: {done.stderr}{done.stdout}")
    return done.stdout


def said(model: str, memory: str, ctx: list[str], cache: str) -> dict:
    """A report of inspect's, with the row that was asked for under "asked"."""
    report = json.loads(moeoff("inspect", model, "--memory", memory, *ctx, "--json", cache=cache))
    return report | {"asked": next(row for row in report["budgets"] if row["asked"])}


def measured(model: str, memory: str, ctx: list[str], n: int, prompt: str, text: str | None, cache: str) -> tuple[float, float]:
    """Tokens per second, and the share of slices that were found in memory."""
    if text is not None:
        row = json.loads(moeoff("bench", model, "--memory", memory, *ctx, "-p", "0", "-n", str(n), "-r", "1", "--text", text, "-o", "jsonl", cache=cache))
        return row["avg_ts"], row["hit_rate"]
    answer = json.loads(moeoff("run", model, "--memory", memory, *ctx, "-p", prompt, "-n", str(n), "--ignore-eos", "--json", cache=cache))
    return answer["stats"]["gen_tps"], answer["stats"]["hit_rate"]


@click.command(help=__doc__)
@click.option("-m", "--model", "models", required=True, multiple=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--memory", "budgets", required=True, multiple=True, help="Budgets, with commas between them; once for each model.")
@click.option("-c", "--ctx-size", help="Context. Default: as run has it.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--prompt", default="Why is the sky blue? Explain it to a child, and then to a physicist.", show_default=True)
@click.option("--text", type=click.Path(exists=True, dir_okay=False), help="File whose tokens are fed, in the place of the prompt.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(models: tuple[str, ...], budgets: tuple[str, ...], ctx_size: str | None, tokens: int, rounds: int, prompt: str, text: str | None,
         json_file: str | None) -> None:  # fmt: skip
    if len(models) != len(budgets):
        raise click.UsageError("give --memory once for each model")
    ctx = ["-c", ctx_size] if ctx_size else []
    with ResultsFile(json_file) as results, tempfile.TemporaryDirectory() as cache:
        table = results.table("inspect", "what inspect says, and what was measured", COLUMNS)
        for model, budget in ((model, budget) for model, several in zip(models, budgets) for budget in several.split(",")):
            reports, speeds = [], []
            for _ in range(rounds):
                for file in ModelIndex.read(model).files:
                    drop_from_page_cache(file)
                reports.append(said(model, budget, ctx, tempfile.mkdtemp(dir=cache)))
                speeds.append(measured(model, budget, ctx, tokens, prompt, text, tempfile.mkdtemp(dir=cache)))
            told = [report["asked"]["tps"] for report in reports]
            tps = [speed for speed, _ in speeds]
            table.row(
                Path(model).name, budget, str(reports[0]["ctx_size"]), f"{reports[0]['asked']['resident_share']:.0%}",
                f"{1e3 * statistics.median(r['compute_seconds'] for r in reports):.1f}",
                f"{statistics.median(r['disk']['bytes_per_second'] for r in reports) / 1e6:.0f}",
                *(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in (told, tps)),
                f"{statistics.median(b / a for a, b in zip(told, tps)):.2f}", f"{statistics.median(hits for _, hits in speeds):.0%}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
