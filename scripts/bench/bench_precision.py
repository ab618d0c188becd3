"""What lower precision costs and buys; each sub-command prints a table, those of docs/results/loss.md and bit-plans.md among them.

usage: bench_precision.py bits MODEL --calib FILE... --valid FILE... [--importance measured] [--tolerance 5 --tolerance 10 ...]
       bench_precision.py importance MODEL --calib FILE...
       bench_precision.py order MODEL --calib FILE... --valid FILE... --lower Q2_K
       bench_precision.py loss MODEL --valid FILE... --lower Q4_0 --precision T1,T2,p ...
       bench_precision.py skip MODEL --valid FILE... --lower Q4_0

bits: EdgeMoE's plans at several tolerances beside one type for all experts. importance: how well the cheap estimate ranks
experts against quantizing one at a time. order: loss over the share of low experts, in order of importance, against it, and
at random. loss: what precisions lose, every expert taken for a miss. skip: what is lost if experts beyond a threshold are served
in low precision, and if the same ones are skipped. Losses under "valid" are on text that nothing was chosen by.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time

import click
import numpy as np

from moeoff.budget.loss_contract import Candidate
from moeoff.budget.precision import Precision
from moeoff.budget.statistics import Quality, interval, spearman
from moeoff.calibrate.bit_allocation import Planner, measure_importance
from moeoff.calibrate.expert_importance import estimate_importance
from moeoff.calibrate.perplexity import open_model, read_windows
from moeoff.calibrate.precision_search import PrecisionEvaluator
from moeoff.companion.convert import convert
from moeoff.companion.file import KEEP, Companion
from moeoff.companion.source import relative_bytes
from moeoff.gguf.layout import Layout
from results_file import HELP, ResultsFile


def _files(name: str):
    return click.option(f"--{name}", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False), metavar="FILE")


def _options(*more):
    """The model, the size of windows and the threads; and these."""

    def decorate(command):
        for option in (
            click.argument("model", type=click.Path(exists=True, dir_okay=False)),
            click.option("--ctx", default=256, show_default=True),
            click.option("-t", "--threads", default=2, show_default=True),
            click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP),
            *more,
        ):
            command = option(command)
        return command

    return decorate


_common = _options(
    _files("calib"),
    click.option("--chunks", default=8, show_default=True, help="Windows of each calibration text."),
    click.option("--valid-chunks", default=32, show_default=True, help="Windows of each validation text."),
    click.option("--types", help="To choose from, as Q4_0,Q2_0."),
)
_trial_options = _options(
    _files("valid"),
    click.option("--chunks", default=32, show_default=True, help="Windows of each text."),
    click.option("--lower", required=True, help="The lower type."),
)


def _planner(model, calib, ctx, chunks, types, threads, importance: str = "estimated") -> Planner:
    said = []

    def tell(what: str, done: int, total: int) -> None:
        if said[-1:] != [what]:
            said.append(what)
            print(f"  {time.strftime('%H:%M:%S')} {what}, {total} in all", file=sys.stderr, flush=True)

    types = types.split(",") if types else None
    return Planner(model, calib, types=types, importance=importance, ctx=ctx, chunks=chunks, n_threads=threads, progress=tell, expert_memory=1 << 33)


@contextlib.contextmanager
def _evaluator(model, valid, ctx, chunks, lower, threads):
    """PrecisionEvaluator of precisions with one lower type, in a companion that lasts as long."""
    with tempfile.TemporaryDirectory(prefix="moeoff-precision-") as folder:
        companion = Companion(convert(model, output=os.path.join(folder, "lower.experts.gguf"), tiers=lower).path)
        options = {"experts": companion, "tier": KEEP, "precision": Precision(tier=lower), "deterministic": True, "flash_attn": True}
        with open_model(model, ctx, expert_memory=1 << 33, n_threads=threads, **options) as llm:
            windows = read_windows(llm, valid, ctx, chunks)
            print(f"{len(windows)} windows of {ctx} tokens, {lower}", file=sys.stderr)
            yield PrecisionEvaluator(llm, windows, lower, relative_bytes(Layout.read(model), companion, lower))


def _cells(c: Candidate) -> list[str]:
    return [f"{c.low:.1%}", f"{c.skipped:.1%}" if c.decode else "", f"{c.cost:.1%}", _loss(c), f"{c.kl.value:.4f}", f"{c.top1.value:.1%}"]


def _loss(q: Quality | Candidate) -> str:
    return interval(q.loss, "{:+.2%}").replace("%", " %")


@click.group()
def main() -> None:
    pass


@main.command()
@_common
@_files("valid")
@click.option("--importance", type=click.Choice(["estimated", "measured"]), default="estimated", show_default=True)
@click.option("--tolerance", multiple=True, type=float, default=(5, 10, 20), show_default=True, help="Percent.")
def bits(model, calib, valid, ctx, chunks, valid_chunks, types, threads, json_file, importance, tolerance) -> None:
    with ResultsFile(json_file) as results, _planner(model, calib, ctx, chunks, types, threads, importance) as planner:
        other = planner.trial_on(planner.trial.companion, valid, valid_chunks)
        n_weights = sum(int(np.prod(span.shape)) for span in planner.layout.experts.values())
        n = len(planner.trial.experts)
        columns = ["experts", "low experts", "MB", "bits per weight", "loss, calibration", "loss, other text", "KL, other text"]
        table = results.table("bits", "One type for all experts, and plans", columns)

        def row(name: str, low: str, nbytes: int, quality: Quality, upper: str, others: dict) -> None:
            on_other = other.quality(upper, others)
            sizes = [f"{nbytes / 1e6:.2f}", f"{8 * nbytes / n_weights:.2f}"]
            table.row(name, low, *sizes, _loss(quality), _loss(on_other), f"{on_other.kl.value:.4f}")

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
def importance(model, calib, ctx, chunks, valid_chunks, types, threads, json_file, lower) -> None:
    with ResultsFile(json_file) as results, _planner(model, calib, ctx, chunks, types, threads) as planner:
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
        title = f"Rank correlation of estimated and measured importance, {lower}, {len(keys)} experts"
        table = results.table("importance", title, ["experts", "Spearman"])
        table.row("all", f"{spearman(a, b):.2f}")
        table.row("within a layer, mean (range)", f"{np.mean(within):.2f} ({min(within):.2f} to {max(within):.2f})")
        table = results.table("layers", "By layer", ["layer", "measured KL, sum", "estimate, sum", "Spearman"])
        for layer, r in zip(np.unique(layers), within):
            table.row(str(layer), f"{b[layers == layer].sum():.5f}", f"{a[layers == layer].sum():.4g}", f"{r:.3f}")


@main.command()
@_common
@_files("valid")
@click.option("--lower", help="The lower type. Default: the last of the types.")
@click.option("--importance", type=click.Choice(["estimated", "measured"]), default="estimated", show_default=True)
@click.option("--share", multiple=True, type=int, default=(10, 25, 50, 75, 90), show_default=True, help="Percent.")
def order(model, calib, valid, ctx, chunks, valid_chunks, types, threads, json_file, lower, importance, share) -> None:
    with ResultsFile(json_file) as results, _planner(model, calib, ctx, chunks, types, threads, importance) as planner:
        lower = lower or planner.types[-1]
        scores = planner.importance(lower)
        other = planner.trial_on(planner.trial.companion, valid, valid_chunks)
        ranked = sorted(scores, key=scores.get)
        shuffled = random.Random(0).sample(ranked, len(ranked))
        columns = [f"share in {lower}", "least important first", "at random", "most important first"]
        table = results.table("order", f"Loss over the share of experts in {lower}", columns)
        for percent in share:
            n = len(ranked) * percent // 100
            cells = [_loss(other.quality(KEEP, dict.fromkeys(keys[:n], lower))) for keys in (ranked, shuffled, ranked[::-1])]
            table.row(f"{percent} %", *cells)


@main.command()
@_trial_options
@click.option("--precision", "precisions", multiple=True, required=True, metavar="T1,T2,P")
def loss(model, valid, ctx, chunks, lower, threads, json_file, precisions) -> None:
    wanted = [tuple(float(x) for x in text.split(",")) for text in precisions]
    with ResultsFile(json_file) as results, _evaluator(model, valid, ctx, chunks, lower, threads) as evaluator:
        columns = ["precision", "low", "skipped", "bytes", "loss (95 %)", "KL", "same top token"]
        table = results.table("loss", f"Losses with {lower}", columns)
        if shares := sorted({p for _, _, p in wanted if p}, reverse=True):
            with evaluator.reference("prefill") as reference:
                for p in shares:
                    table.row(f"batches, p {p:g}", *_cells(evaluator.measure(reference, 1.0, 1.0, p, decode=False)))
        with evaluator.reference("decode") as reference:
            for t1, t2, p in wanted:
                table.row(f"T1 {t1:g}, T2 {t2:g}, p {p:g}", *_cells(evaluator.measure(reference, t1, t2, p, decode=True)))


@main.command()
@_trial_options
@click.option("--threshold", multiple=True, type=float, default=(0.9, 0.8, 0.7, 0.5, 0.2), show_default=True, help="T1; beyond it an expert is given up.")
def skip(model, valid, ctx, chunks, lower, threads, json_file, threshold) -> None:
    with (
        ResultsFile(json_file) as results,
        _evaluator(model, valid, ctx, chunks, lower, threads) as evaluator,
        evaluator.reference("decode") as reference,
    ):
        columns = ["T1", "given up", f"in {lower}: loss (95 %)", "KL", "skipped: loss (95 %)", "KL"]
        table = results.table("skip", f"Served in {lower}, or skipped", columns)
        for t1 in threshold:
            low, skipped = (evaluator.measure(reference, t1, t2, 0.0, decode=True) for t2 in (1.0, t1))
            table.row(f"{t1:g}", f"{low.low:.1%}", _loss(low), f"{low.kl.value:.4f}", _loss(skipped), f"{skipped.kl.value:.4f}")


if __name__ == "__main__":
    main()
