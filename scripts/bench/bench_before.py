"""This checkout beside an earlier one, on one model: decode and prompt speed, paired in interleaved cold rounds.

Run as root, alone on the machine; each checkout has been set up with `make env`. The ratio of each round is this over the earlier.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import timing
from cgroup import memory_cgroup

ROOT = Path(__file__).resolve().parents[2]
IN_MEMORY = 1 << 40


def worker(checkout: Path) -> list[str]:
    """The command of a checkout's bench_worker.py, wherever its scripts were then."""
    found = next(path for folder in ("scripts/bench", "scripts") if (path := checkout / folder / "bench_worker.py").exists())
    return [str(checkout / ".venv/bin/python"), str(found)]


def cold_run(checkout: Path, limit: int, model: str, text: str, n_prompt: int, n_decode: int, options: list[str]) -> dict:
    timing.drop_from_page_cache(model)
    command = [*worker(checkout), "moeoff", model, text, str(n_prompt), str(n_decode), *options]
    with memory_cgroup(limit) as group:
        done = group.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


@click.command(help=__doc__)
@click.option("--before", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="The earlier checkout.")
@click.option("-m", "--model", type=click.Path(exists=True, dir_okay=False), required=True)
@click.option("--text", type=click.Path(exists=True, dir_okay=False), required=True)
@click.option("--limits", default="1400,1100,800", show_default=True, help="Memory cgroups in MiB, --memory 5 % below; 0: everything resident.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--n-prompt", default=256, show_default=True)
@click.option("--n-decode", default=128, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False))
def main(before: Path, model: str, text: str, limits: str, rounds: int, n_prompt: int, n_decode: int, output: str | None) -> None:
    console = Console(stderr=True)
    checkouts = {"before": before.resolve(), "now": ROOT}
    rows: dict[str, dict[str, list[dict]]] = {}
    for index in range(rounds):
        for limit in map(int, limits.split(",")):
            name = f"{limit} MiB" if limit else "all resident"
            options = [f"memory={int(limit * 0.95) << 20}"] if limit else [f"expert_memory={1 << 40}", "warm=true"]
            for side in ("before", "now") if index % 2 == 0 else ("now", "before"):
                console.print(f"round {index + 1}: {name}, {side}", style="dim")
                row = cold_run(checkouts[side], limit << 20 or IN_MEMORY, model, text, n_prompt, n_decode, options)
                rows.setdefault(name, {"before": [], "now": []})[side].append(row)
    table = Table("", "", "before", "now", "now / before (each round)", title=timing.machine())
    for name, sides in rows.items():
        for what in ("gen_tps", "prompt_tps", "cpu_ms_per_token"):
            ratios = sorted(now[what] / earlier[what] for now, earlier in zip(sides["now"], sides["before"], strict=True))
            middle = [statistics.median(row[what] for row in sides[side]) for side in ("before", "now")]
            table.add_row(name, what, *(f"{value:.2f}" for value in middle), f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    Console(width=120).print(table)
    if output:
        Path(output).write_text(json.dumps({"machine": timing.machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
