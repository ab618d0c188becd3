"""Speed and memory of moeoff and stock llama.cpp in memory cgroups, paired and cold. Needs root.

usage: bench_offload.py -m MODEL --text FILE [--limits 1400,1100,800] [--rounds 3] [--json FILE]

Each round runs every configuration once, in turn, each in a fresh process and cgroup after the model has been dropped
from the page cache; the disk's rate is measured beside every moeoff run. Rows are medians over rounds. The ceiling is
min(stock's in-memory speed, disk rate / bytes read per token), for a prompt and for decode; without runs in memory it is the disk's.
Stock in a cgroup gets a prompt of 4 tokens and decodes 8: it thrashes, and each may take ten seconds.
"""

from __future__ import annotations

import click
from rich.console import Console

from results_file import HELP, ResultsFile
from timing import machine, median, run

IN_MEMORY = 64 << 30  # a limit that limits nothing
IN_MEMORY_RUNS: dict[str, tuple[str, tuple[int, str, dict]]] = {
    "stock": ("stock in memory, same kernels", (IN_MEMORY, "stock", {"use_mmap": False, "use_extra_bufts": False})),
    "repacked": ("stock in memory, repacked kernels", (IN_MEMORY, "stock", {"use_mmap": False, "use_extra_bufts": True})),
    "moeoff": ("moeoff, everything resident", (IN_MEMORY, "moeoff", {"expert_memory": 1 << 40, "warm": True})),
}


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--limits", default="1400,1100,800", show_default=True, help="MiB of the cgroups; --memory is 5% below.")
@click.option("--strategies", default="lru", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--n-prompt", default=64, show_default=True)
@click.option("--n-decode", default=256, show_default=True)
@click.option("--in-memory", default=",".join(IN_MEMORY_RUNS), show_default=True, help="What also runs with everything in memory; '' for nothing.")
@click.option("--in-memory-rounds", type=int, help="Rounds of these.  [default: all]")
@click.option("--stock/--no-stock", default=True, show_default=True, help="Stock in the cgroups too (slow: it thrashes).")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model, text, limits, strategies, rounds, n_prompt, n_decode, in_memory, in_memory_rounds, stock, json_file) -> None:
    limits, strategies = [int(limit) for limit in limits.split(",")], strategies.split(",")
    args, common = (model, text, n_prompt, n_decode), {"n_ctx": max(1024, n_prompt + n_decode)}
    plans = dict(IN_MEMORY_RUNS[name] for name in in_memory.split(",") if name)
    n_rounds = dict.fromkeys(plans, rounds if in_memory_rounds is None else in_memory_rounds)
    for limit in limits:
        for strategy in strategies:
            plans[f"moeoff {strategy}, {limit} MiB"] = (limit << 20, "moeoff", {"memory": int(limit * 0.95) << 20, "strategy": strategy})
    console = Console(stderr=True)
    rows: dict[str, list[dict]] = {name: [] for name in plans}
    for index in range(rounds):
        for name, (limit, engine, options) in plans.items():
            if index >= n_rounds.get(name, rounds):
                continue
            console.print(f"round {index + 1}: {name}", style="dim")
            row = run(limit, engine, *args, 900, **common | options)
            if engine == "moeoff" and "failed" not in row:
                row |= run(IN_MEMORY, "disk", *args, 60, workers=4) | {"cgroup_peak_mib": row["cgroup_peak_mib"]}
            rows[name].append(row)
    if stock:
        for limit in limits:
            for kind, options in {"mmap": {}, "mmap, no repack": {"use_extra_bufts": False}}.items():
                name = f"stock {kind}, {limit} MiB"
                console.print(name, style="dim")
                rows[name] = [run(limit << 20, "stock", model, text, 4, 8, 300, **options)]
    result = {name: median(list_) for name, list_ in rows.items()}
    print(machine())
    with ResultsFile(json_file) as results:
        every_run(results, result, n_prompt)
        summary(results, result, limits, strategies)


def every_run(results: ResultsFile, result: dict[str, dict], n_prompt: int) -> None:
    in_memory = result.get("stock in memory, same kernels", {})
    columns = ["", "opened in s", "prompt tok/s", "of ceiling", "decode tok/s", "of ceiling", "CPU ms/token", "driver ms/token"]
    columns += ["hit rate", "MB/token", "disk MB/s", "peak RSS MiB"]
    table = results.table("runs", "Every configuration", columns)
    for name, row in result.items():
        if "failed" in row:
            table.row(name, row["failed"], *[""] * (len(columns) - 2))
            continue
        of_prompt = of_decode = driver = hits = read = disk = ""
        if "disk_mb_per_s" in row:
            of_prompt = f"{row['prompt_tps'] / ceiling(in_memory.get('prompt_tps'), row, row['prompt_mb'] / n_prompt, row['prompt_tps']):.0%}"
            of_decode = f"{row['gen_tps'] / ceiling(in_memory.get('gen_tps'), row, row['mb_per_token'], row['gen_tps']):.0%}"
            driver, hits, read = f"{row['driver_ms_per_token']:.1f}", f"{row['hit_rate']:.1%}", f"{row['mb_per_token']:.1f}"
            disk = f"{row['disk_mb_per_s']:.0f}"
        low, high = row["gen_tps_range"]
        decode = f"{row['gen_tps']:.2f} ({low:.2f}-{high:.2f})"
        cells = [f"{row['open_s']:.1f}", f"{row['prompt_tps']:.1f}", of_prompt, decode, of_decode, f"{row['cpu_ms_per_token']:.1f}", driver]
        table.row(name, *cells, hits, read, disk, f"{row['peak_rss_mib']:.0f}")


def ceiling(in_memory: float | None, row: dict, mb_per_token: float, measured: float) -> float:
    """tok/s that neither the cores nor the disk beside `row` could have surpassed; where the run got more of either, what it got.

    Args:
        measured: tok/s of the row.
    """
    by_disk = row["disk_mb_per_s"] / mb_per_token if mb_per_token else float("inf")
    return max(measured, by_disk if in_memory is None else min(in_memory, by_disk))


def summary(results: ResultsFile, result: dict[str, dict], limits: list[int], strategies: list[str]) -> None:
    """A row for each limit: every strategy's speed, what the first one reads and takes, and the best of the stock runs."""

    def number(row: dict, key: str, form: str = ".1f") -> str:
        return row.get("failed") or format(row[key], form)

    def stock(names: list[str]) -> str:
        speeds = [result[name]["gen_tps"] for name in names if "gen_tps" in result.get(name, {})]
        return f"{max(speeds):.3g}" if speeds else ""

    first = strategies[0]
    columns = ["memory cgroup", *(f"`{s}`: tok/s" for s in strategies), f"`{first}`: MB read per token", f"`{first}`: peak RSS, MiB", "stock llama.cpp: tok/s"]
    table = results.table("summary", "Decode speed and memory", columns)
    for limit in limits:
        of = [result[f"moeoff {s}, {limit} MiB"] for s in strategies]
        cells = [*(number(row, "gen_tps") for row in of), number(of[0], "mb_per_token", ".0f"), number(of[0], "peak_rss_mib", ".0f")]
        table.row(f"{limit} MiB", *cells, stock([f"stock {kind}, {limit} MiB" for kind in ("mmap", "mmap, no repack")]))
    row = result.get("moeoff, everything resident")
    if row is None:
        return
    cells = [number(row, "gen_tps"), *[""] * (len(strategies) - 1), number(row, "mb_per_token", ".0f"), number(row, "peak_rss_mib", ".0f")]
    table.row("no limit, all in memory", *cells, stock([f"stock in memory, {kernels} kernels" for kernels in ("same", "repacked")]))


if __name__ == "__main__":
    main()
