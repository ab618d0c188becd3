"""`moeoff bench` beside llama-bench on the same file, everything in memory and the same kernels: do the columns mean the same?

usage: bench_agreement.py -m MODEL [--rounds 3] [--json FILE]

llama-bench is built from the tree that moeoff's library comes from. It and moeoff run in turn, each in a process of its own; moeoff's
stock engine (llama_cpp.Llama) runs beside them, with plain kernels as well. llama-bench feeds random tokens, moeoff a text: where nothing
is read that makes no difference.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console

from moeoff.bench.job import MOEOFF, STOCK, BenchTest, Job
from moeoff.bench.process import measure
from moeoff.machine import n_cores
from results_file import HELP, ResultsFile

FORK = Path(__file__).parents[1] / "build" / "fork.py"


def theirs(program: str, model: str, n_prompt: int, n_gen: int, repetitions: int) -> list[float]:
    """Tokens per second of llama-bench's two tests."""
    command = [program, "-m", model, "-p", str(n_prompt), "-n", str(n_gen), "-r", str(repetitions), "-t", str(n_cores()), "-lm", "none", "-fa", "1"]
    done = subprocess.run([*command, "--repack", "0", "-o", "json"], check=True, capture_output=True, text=True)
    return [row["avg_ts"] for row in json.loads(done.stdout)]


def ours(engine: str, model: str, n_prompt: int, n_gen: int, repetitions: int) -> list[float]:
    options = {"n_ctx": max(n_prompt, n_gen), "flash_attn": True, "n_threads": n_cores(), "n_threads_batch": n_cores()}
    options |= {"expert_memory": 1 << 40, "settings": False, "strategy": "lru"} if engine == MOEOFF else {"use_mmap": False, "use_extra_bufts": False}
    job = Job(model, engine, options, (BenchTest(n_prompt, 0), BenchTest(0, n_gen)), repetitions, probe_seconds=0)
    done = measure(job)
    if done.error:
        sys.exit(f"{engine}: {done.error}")
    return [statistics.fmean(sample.tps for sample in done.of(i)) for i in range(2)]


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("-p", "--n-prompt", default=256, show_default=True)
@click.option("-n", "--n-gen", default=128, show_default=True)
@click.option("-r", "--repetitions", default=3, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, n_prompt: int, n_gen: int, repetitions: int, rounds: int, json_file: str | None) -> None:
    program = subprocess.run([sys.executable, str(FORK), "llama-bench"], check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    runs = {
        "llama-bench": lambda: theirs(program, model, n_prompt, n_gen, repetitions),
        "moeoff bench, stock": lambda: ours(STOCK, model, n_prompt, n_gen, repetitions),
        "moeoff bench": lambda: ours(MOEOFF, model, n_prompt, n_gen, repetitions),
    }
    console = Console(stderr=True)
    speeds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for index in range(rounds):
        for name, run in runs.items():
            console.print(f"round {index + 1}: {name}", style="dim")
            speeds[name].append(run())
    columns = ["", f"pp{n_prompt} tok/s", "of llama-bench", f"tg{n_gen} tok/s", "of llama-bench"]
    with ResultsFile(json_file) as results:
        table = results.table("agreement", "Everything in memory, plain kernels", columns)
        for name, rows in speeds.items():
            cells = []
            for test in range(2):
                ratios = [row[test] / base[test] for row, base in zip(rows, speeds["llama-bench"], strict=True)]
                cells += [f"{statistics.median(row[test] for row in rows):.1f}", f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"]
            table.row(name, *cells)


if __name__ == "__main__":
    main()
