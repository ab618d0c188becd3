"""`moeoff tune`, then what it chose beside the defaults and beside every setting that a person might choose by hand.

usage: bench_tuned.py -m MODEL --text FILE --memory 1330M,1045M,760M [--rounds 3] [--json FILE]

Tunes once for each budget, and says how long that took and was announced to take. Then all contenders run in turn, each in a fresh process
and, where one can be made, a memory cgroup of the budget. What tune leaves lies beside the model.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics

import click
from rich.console import Console

from moeoff.bench.cgroup import unavailable
from moeoff.bench.job import BenchTest, Job
from moeoff.bench.process import measure
from moeoff.companion.settings import settings_path
from moeoff.gguf.layout import Layout
from moeoff.memory import format_size, parse_size
from moeoff.tune import Request, tune
from results_file import HELP, ResultsFile
from timing import drop_from_page_cache

BY_HAND: dict[str, dict] = {
    "defaults": {"settings": False, "profile": False},
    **{name: {"settings": False, "profile": False, "strategy": name} for name in ("score", "lru")},
    "2 I/O workers": {"settings": False, "profile": False, "n_lanes": 2},
    "8 I/O workers": {"settings": False, "profile": False, "n_lanes": 8},
    "auto with the profile": {"settings": False, "strategy": "auto"},
}


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False), help="Whose tokens are fed; tune does not see it.")
@click.option("--memory", required=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--n-prompt", default=64, show_default=True)
@click.option("--n-decode", default=128, show_default=True)
@click.option("--minutes", default=8.0, show_default=True, help="For each tuning.")
@click.option("--companion/--no-companion", default=False, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, text: str, memory: str, rounds: int, n_prompt: int, n_decode: int, minutes: float, companion: bool, json_file: str | None) -> None:
    console = Console(stderr=True)
    budgets = [parse_size(size) for size in memory.split(",")]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(settings_path(model))
    tuned = {}
    for budget in budgets:
        console.print(f"tune for {format_size(budget)}", style="dim")
        tuned[budget] = tune(Request(model, memory=budget, minutes=minutes, companion=companion))
    n_ctx = min(4096, Layout.read(model).n_ctx_train or 4096)  # as tune takes it
    limited = unavailable() is None
    tests = (BenchTest(n_prompt, 0), BenchTest(0, n_decode))
    with ResultsFile(json_file) as results:
        table = results.table("tunings", "Tunings", ["memory", "announced s", "took s", "choice"])
        for budget, found in tuned.items():
            summary = found.tuning.summary.partition(": ")[2]
            table.row(format_size(budget), f"{sum(step.seconds for step in found.steps):.0f}", f"{found.seconds:.0f}", summary)
        for budget in budgets:
            contenders = {"tuned": {}} | BY_HAND
            speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
            for index in range(rounds):
                for name, options in random.Random(index).sample(list(contenders.items()), len(contenders)):  # no place in the round is anyone's
                    console.print(f"{format_size(budget)}, round {index + 1}: {name}", style="dim")
                    drop_from_page_cache(model)
                    common = {"memory": budget, "n_ctx": n_ctx, "flash_attn": True}
                    job = Job(model, options=common | options, tests=tests, repetitions=1, warm_up=False, text=text, probe_seconds=0,
                              limit_bytes=int(budget / 0.95) if limited else None)  # fmt: skip
                    done = measure(job)
                    if done.error:
                        raise click.ClickException(f"{name}: {done.error}")
                    speeds[name].append((done.samples[0].tps, done.samples[1].tps))
            columns = ["", "prompt tok/s", "decode tok/s", "both, times the defaults"]
            table = results.table(f"at-{budget >> 20}", f"{format_size(budget)}", columns)
            base = [n_prompt / p + n_decode / g for p, g in speeds["defaults"]]
            for name, rows in speeds.items():
                ratios = [before / (n_prompt / p + n_decode / g) for before, (p, g) in zip(base, rows, strict=True)]
                cells = [f"{statistics.median(p for p, _ in rows):.1f}", f"{statistics.median(g for _, g in rows):.2f}"]
                table.row(name, *cells, f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")


if __name__ == "__main__":
    main()
