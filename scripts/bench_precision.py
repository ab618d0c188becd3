"""What lower precision costs and buys; each sub-command prints a table for docs/precision.md.

usage: bench_precision.py bits MODEL --calib FILE... --valid FILE... [--importance measured] [--tolerance 5 --tolerance 10 ...]
       bench_precision.py importance MODEL --calib FILE...
       bench_precision.py order MODEL --calib FILE... --valid FILE... --lower Q2_K

bits: EdgeMoE's plans at several tolerances beside one type for all experts. importance: how well the cheap estimate ranks
experts against quantizing one at a time. order: loss over the share of low experts, in order of importance, against it, and
at random. Losses under "valid" are on text that nothing was chosen by.
"""

from __future__ import annotations

import random
import sys
import time


import click
import numpy as np

from moeoff.bits import Planner, measure_importance
from moeoff.companion import KEEP
from moeoff.evaluation import interval
from moeoff.importance import estimate_importance
from moeoff.quality import Quality, spearman


def _files(name: str):
    return click.option(f"--{name}", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False), metavar="FILE")


def _common(command):
    for option in (
        click.argument("model", type=click.Path(exists=True, dir_okay=False)),
        _files("calib"),
        click.option("--ctx", default=256, show_default=True),
        click.option("--chunks", default=8, show_default=True, help="Windows of each calibration text."),
        click.option("--valid-chunks", default=32, show_default=True, help="Windows of each validation text."),
        click.option("--types", help="To choose from, as Q4_0,Q2_0."),
        click.option("-t", "--threads", default=2, show_default=True),
    ):
        command = option(command)
    return command


def _planner(model, calib, ctx, chunks, types, threads, importance: str = "estimated") -> Planner:
    said = []

    def tell(what: str, done: int, total: int) -> None:
        if said[-1:] != [what]:
            said.append(what)
            print(f"  {time.strftime('%H:%M:%S')} {what}, {total} in all", file=sys.stderr, flush=True)

    types = types.split(",") if types else None
    return Planner(model, calib, types=types, importance=importance, ctx=ctx, chunks=chunks, n_threads=threads, progress=tell, expert_memory=1 << 33)


def _loss(q: Quality) -> str:
    return interval(q.loss, "{:+.2%}").replace("%", " %")


@click.group()
def main() -> None:
    pass


@main.command()
@_common
@_files("valid")
@click.option("--importance", type=click.Choice(["estimated", "measured"]), default="estimated", show_default=True)
@click.option("--tolerance", multiple=True, type=float, default=(5, 10, 20), show_default=True, help="Percent.")
def bits(model, calib, valid, ctx, chunks, valid_chunks, types, threads, importance, tolerance) -> None:
    with _planner(model, calib, ctx, chunks, types, threads, importance) as planner:
        other = planner.trial_on(planner.trial.companion, valid, valid_chunks)
        n_weights = sum(int(np.prod(span.shape)) for span in planner.layout.experts.values())
        n = len(planner.trial.experts)
        print("| experts | low experts | MB | bits per weight | loss, calibration | loss, other text | KL, other text |\n|---|---|---|---|---|---|---|")

        def row(name: str, low: str, nbytes: int, quality: Quality, upper: str, others: dict) -> None:
            on_other = other.quality(upper, others)
            print(
                f"| {name} | {low} | {nbytes / 1e6:.2f} | {8 * nbytes / n_weights:.2f} | {_loss(quality)} | {_loss(on_other)} | {on_other.kl.value:.4f} |",
                flush=True,
            )

        for name, (nbytes, quality) in planner.uniform().items():
            if name != KEEP:
                row(name, "", nbytes, quality, name, {})
        for percent in tolerance:
            p = planner.plan(percent / 100)
            name = f"plan, {percent:g} %: {p.upper}, {p.lower}"
            row(name, f"{len(p.low)} of {n}", p.n_bytes, p.quality, p.upper, dict.fromkeys(p.low, p.lower))


@main.command()
@_common
@click.option("--lower", help="The lower type. Default: the last of the types.")
def importance(model, calib, ctx, chunks, valid_chunks, types, threads, lower) -> None:
    with _planner(model, calib, ctx, chunks, types, threads) as planner:
        lower = lower or planner.types[-1]
        trial = planner.trial
        started = time.perf_counter()
        estimated = estimate_importance(planner.layout, trial.companion, lower, trial.windows, n_threads=threads, expert_memory=1 << 33, flash_attn=True)
        middle = time.perf_counter()
        measured = measure_importance(trial, lower)
        ended = time.perf_counter()
        keys = trial.experts
        a, b = (np.array([d[key] for key in keys]) for d in (estimated, measured))
        layers = np.array([layer for layer, _ in keys])
        within = [spearman(a[layers == layer], b[layers == layer]) for layer in np.unique(layers)]
        print(f"{len(keys)} experts in {lower}, {len(trial.windows)} windows of {ctx}: measured {ended - middle:.0f} s, estimated {middle - started:.0f} s")
        print(f"Spearman, all experts: {spearman(a, b):.3f}; within a layer: {np.mean(within):.3f} ({min(within):.3f} to {max(within):.3f})")
        print("| layer | measured KL, sum | estimate, sum | Spearman |\n|---|---|---|---|")
        for layer, r in zip(np.unique(layers), within):
            print(f"| {layer} | {b[layers == layer].sum():.5f} | {a[layers == layer].sum():.4g} | {r:.3f} |")


@main.command()
@_common
@_files("valid")
@click.option("--lower", help="The lower type. Default: the last of the types.")
@click.option("--importance", type=click.Choice(["estimated", "measured"]), default="estimated", show_default=True)
@click.option("--share", multiple=True, type=int, default=(10, 25, 50, 75, 90), show_default=True, help="Percent.")
def order(model, calib, valid, ctx, chunks, valid_chunks, types, threads, lower, importance, share) -> None:
    with _planner(model, calib, ctx, chunks, types, threads, importance) as planner:
        lower = lower or planner.types[-1]
        scores = planner.importance(lower)
        other = planner.trial_on(planner.trial.companion, valid, valid_chunks)
        ranked = sorted(scores, key=scores.get)
        shuffled = random.Random(0).sample(ranked, len(ranked))
        print(f"| share in {lower} | least important first | at random | most important first |\n|---|---|---|---|")
        for percent in share:
            n = len(ranked) * percent // 100
            cells = [_loss(other.quality(KEEP, dict.fromkeys(keys[:n], lower))) for keys in (ranked, shuffled, ranked[::-1])]
            print(f"| {percent} % | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
