"""Speed of a model with lower precision beside the same model lossless, cold, with a share of its experts in memory.

usage: bench_precision_speed.py MODEL --experts COMPANION --text FILE [--low TIER --precision T1,T2,p ...] [--tier TIER ...] [--resident 25 --resident 50]

Each round runs every configuration once, in turn, each in a fresh process after model and companion have been dropped from the
page cache: a prompt in one batch, then tokens of the same text one by one. The lossless runs are part of every round; ratios are of
the same round. Rows are medians over rounds. --tier puts all experts in a tier, in the same memory. --disk slows the disk (root).
Ceilings: the same with everything in memory.
What the precisions lose is measured by bench_precision.py loss.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys

import click
from rich.console import Console

from cgroup import disk_cgroup
from moeoff.gguf.layout import Layout
from results_file import HELP, ResultsFile
from timing import drop_from_page_cache, machine, measure

LOSSLESS = "lossless"


def describe(precision: str) -> str:
    if precision == LOSSLESS:
        return precision
    t1, t2, p = precision.split(",")
    return f"T1 {t1}, T2 {t2}, p {p}"


def median(rounds: list[dict], lossless: list[dict]) -> dict:
    """Of each number; and of the ratios to the lossless run of the same round."""
    out = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    for key in ("gen_tps", "prompt_tps"):
        out[f"{key}_ratio"] = statistics.median(row[key] / base[key] for row, base in zip(rounds, lossless))
    return out


def cells(row: dict) -> list[str]:
    ratio = [f"{row[f'{key}_ratio']:.2f}" if f"{key}_ratio" in row else "" for key in ("prompt_tps", "gen_tps")]
    given = [f"{row['low']:.1%}", f"{row['skipped']:.1%}"]
    return [f"{row['prompt_tps']:.1f}", ratio[0], f"{row['prompt_mb']:.0f}", f"{row['gen_tps']:.2f}", ratio[1], f"{row['mb_per_token']:.1f}", *given]


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--experts", required=True, type=click.Path(exists=True, dir_okay=False), help="The companion.")
@click.option("--low", help="Its tier that the precisions fall back to.")
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--precision", "precisions", multiple=True, metavar="T1,T2,P")
@click.option("--tier", "tiers", multiple=True, help="All experts in this tier.")
@click.option("--resident", multiple=True, type=float, default=(25, 50), show_default=True, help="Percent of the experts' bytes.")
@click.option("--strategy", default="lru", show_default=True)
@click.option("--rounds", default=1, show_default=True)
@click.option("--n-prompt", default=512, show_default=True)
@click.option("--n-decode", default=128, show_default=True)
@click.option("--ceiling/--no-ceiling", default=False, help="Also with everything in memory.")
@click.option("--disk", type=int, metavar="MB/S", help="No faster than this.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model, experts, low, text, precisions, tiers, resident, strategy, rounds, n_prompt, n_decode, ceiling, disk, json_file) -> None:
    if precisions and not low:
        raise click.UsageError("--precision needs --low")
    total = sum(span.nbytes for span in Layout.read(model).experts.values())
    plans: dict[tuple[float, str], dict] = {}
    for share in resident:
        arena = {"strategy": strategy, "expert_memory": int(total * share / 100)}
        plans[share, LOSSLESS] = arena | {"experts": False}
        for precision in precisions:
            t1, t2, p = (float(x) for x in precision.split(","))
            plans[share, precision] = arena | {"experts": experts, "low": low, "t1": t1, "t2": t2, "p": p}
        for tier in tiers:
            plans[share, f"all in {tier}"] = arena | {"experts": experts, "tier": tier}
    if ceiling:
        whole = {"expert_memory": 1 << 40, "warm": True, "strategy": "lru"}
        plans[100, LOSSLESS] = whole | {"experts": False}
        for tier in tiers:
            plans[100, f"all in {tier}"] = whole | {"experts": experts, "tier": tier}
    rows: dict[tuple[float, str], list[dict]] = {key: [] for key in plans}
    for index in range(rounds):
        for (share, precision), options in plans.items():
            drop_from_page_cache(experts)
            with disk_cgroup(model, disk * 10**6) if disk else contextlib.nullcontext() as group:
                row = measure("moeoff", model, text, n_prompt, n_decode, 170, group.run if group else subprocess.run, **options)
            if "failed" in row:
                sys.exit(f"bench_precision_speed: {share:g} % resident, {precision}: {row['failed']}")
            rows[share, precision].append(row)
            Console(stderr=True).print(
                f"round {index + 1}: {share:g} % resident, {precision}: {row['prompt_tps']:.1f}, {row['gen_tps']:.2f} tok/s", style="dim"
            )
    print(machine())
    with ResultsFile(json_file) as results:
        title = f"{strategy}, prompt of {n_prompt}, {n_decode} tokens, rounds {rounds}{f', disk {disk} MB/s' if disk else ''}"
        columns = ["resident", "precision", "prompt tok/s", "ratio", "MB for the prompt", "decode tok/s", "ratio", "MB/token", "low", "skipped"]
        table = results.table("speed", title, columns)
        for (share, precision), found in rows.items():
            name = describe(precision) if precision.count(",") == 2 else precision
            table.row(f"{share:g} %", name, *cells(median(found, rows[share, LOSSLESS])))


if __name__ == "__main__":
    main()
