"""Speed and memory of moeoff and stock llama.cpp in memory cgroups, paired and cold. Needs root.

usage: bench_offload.py -m MODEL --text FILE [--limits 1400,1100,800] [--rounds 3] [-o OUT.json]

Each round runs every configuration once, in turn, each in a fresh process and cgroup after the model has been dropped
from the page cache; the disk's rate is measured beside every moeoff run. Rows are medians over rounds. The ceiling is
min(in-memory speed, disk rate / bytes read per token).
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from timing import machine, median, run

IN_MEMORY = 64 << 30  # a limit that limits nothing


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--limits", default="1400,1100,800", show_default=True, help="MiB of the cgroups; --memory is 5% below.")
@click.option("--strategies", default="lru", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--n-prompt", default=64, show_default=True)
@click.option("--n-decode", default=256, show_default=True)
@click.option("--stock/--no-stock", default=True, show_default=True, help="Stock in the cgroups too (slow: it thrashes).")
@click.option("-o", "--output", type=click.Path(dir_okay=False))
def main(model, text, limits, strategies, rounds, n_prompt, n_decode, stock, output) -> None:
    limits = [int(limit) for limit in limits.split(",")]
    args = (model, text, n_prompt, n_decode)
    plans: dict[str, tuple] = {
        "stock in memory, same kernels": (IN_MEMORY, "stock", {"use_mmap": False, "use_extra_bufts": False}),
        "stock in memory, repacked kernels": (IN_MEMORY, "stock", {"use_mmap": False, "use_extra_bufts": True}),
        "moeoff, everything resident": (IN_MEMORY, "moeoff", {"expert_memory": 1 << 40, "warm": True}),
    }
    for limit in limits:
        for strategy in strategies.split(","):
            plans[f"moeoff {strategy}, {limit} MiB"] = (limit << 20, "moeoff", {"memory": int(limit * 0.95) << 20, "strategy": strategy})
    console = Console(stderr=True)
    rows: dict[str, list[dict]] = {name: [] for name in plans}
    for index in range(rounds):
        for name, (limit, engine, options) in plans.items():
            console.print(f"round {index + 1}: {name}", style="dim")
            row = run(limit, engine, *args, 600, **options)
            if engine == "moeoff" and "failed" not in row:
                row |= run(IN_MEMORY, "disk", *args, 60, lanes=4) | {"cgroup_peak_mib": row["cgroup_peak_mib"]}
            rows[name].append(row)
    if stock:
        for limit in limits:
            for kind, options in {"mmap": {}, "mmap, no repack": {"use_extra_bufts": False}}.items():
                name = f"stock {kind}, {limit} MiB"
                console.print(name, style="dim")
                # a thrashing stock takes seconds for each token: a few tokens tell its speed
                rows[name] = [run(limit << 20, "stock", model, text, 16, 16, 300, **options)]
    result = {name: median(list_) for name, list_ in rows.items()}
    in_memory = result["stock in memory, same kernels"]["gen_tps"]
    table = Table("", "prompt tok/s", "decode tok/s", "CPU ms/token", "hit rate", "MB/token", "disk MB/s", "of ceiling", "peak RSS MiB", title=machine())
    for name, row in result.items():
        if "failed" in row:
            table.add_row(name, row["failed"])
            continue
        if "disk_mb_per_s" in row:
            by_disk = row["disk_mb_per_s"] / row["mb_per_token"] if row["mb_per_token"] else float("inf")
            row["of_ceiling"] = row["gen_tps"] / min(in_memory, by_disk)
        low, high = row["gen_tps_range"]
        cells = [f"{row['prompt_tps']:.1f}", f"{row['gen_tps']:.2f} ({low:.2f}-{high:.2f})", f"{row['cpu_ms_per_token']:.1f}"]
        cells += [f"{row['hit_rate']:.1%}", f"{row['mb_per_token']:.1f}"] if "hit_rate" in row else ["", ""]
        cells += [f"{row['disk_mb_per_s']:.0f}", f"{row['of_ceiling']:.0%}"] if "of_ceiling" in row else ["", ""]
        table.add_row(name, *cells, f"{row['peak_rss_mib']:.0f}")
    Console(width=170).print(table)
    if output:
        Path(output).write_text(json.dumps({"machine": machine(), "rows": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
