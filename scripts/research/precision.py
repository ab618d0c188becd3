"""Quality that lower precision and rerouting cost, and what they spare: docs/results/loss.md, bit-plans.md, rerouting.md.

usage: precision.py bits       -m MODEL --calib FILE --text FILE                    EdgeMoE's plans, and one type for all experts
       precision.py loss       -m MODEL --text FILE --lower Q4_0 --precision T1,T2,P  what precisions lose, every expert taken for a miss
       precision.py rerouting  -m MODEL --text FILE                                 quality behind a simulated cache, as calibrate prices it
       precision.py live       -m MODEL --text FILE --memory 1045M,760M             rerouting by what is resident in truth: speed and quality, cold

--calib and --text may be given several times; losses are on --text, which nothing was chosen by. Speed of lower precision is measured by speed.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "bench")]

from cgroup import disk_cgroup
from moeoff.bench.run import drop_from_page_cache
from moeoff.calibrate.bit_allocation import Planner
from moeoff.calibrate.perplexity import Reference, evaluate, open_model, read_windows
from moeoff.calibrate.precision_search import PrecisionEvaluator
from moeoff.calibrate.rerouting_search import MeasuredCandidate, ReroutingEvaluator
from moeoff.calibrate.statistics import Distance, Quality, interval
from moeoff.gguf.model_index import ModelIndex
from moeoff.memory import format_size, parse_size
from moeoff.policies.precision import Precision
from moeoff.sidecar.convert import convert
from moeoff.sidecar.file import ORIGINAL, Sidecar, relative_bytes
from results import HELP, ResultsFile

FILE = click.Path(exists=True, dir_okay=False)
CALIB = click.option("--calib", multiple=True, required=True, type=FILE)
TEXT = click.option("--text", multiple=True, required=True, type=FILE)
WINDOWS = click.option("--windows", default=32, show_default=True, help="Of each text.")
CTX = click.option("--ctx", default=256, show_default=True, help="Tokens of a window.")
THREADS = click.option("-t", "--threads", default=2, show_default=True)
LOWER = click.option("--lower", required=True, help="The lower type.")
SHARES = click.option("--share", "shares", multiple=True, type=float, default=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3), show_default=True, help="λ.")
RESIDENT = click.option("--resident", multiple=True, type=float, default=(0.25, 0.5, 0.75), show_default=True)
PLAN = (
    click.option("--calib-windows", default=8, show_default=True, help="Of each calibration text."),
    click.option("--types", help="To choose from, as Q4_0,Q2_0."),
    CALIB, CTX, THREADS,
)  # fmt: skip
REROUTES = Precision(reroute=1.0, resident=1.0)  # opens a model that can
EVERYTHING = 1 << 40  # expert_memory that holds all
QUALITY = ["loss (95 %)", "KL", "same top token"]


@click.group(help=__doc__)
def main() -> None:
    pass


def command(*options: Any, name: str | None = None) -> Callable[..., Any]:
    """A command with -m, --json and these."""

    def decorate(function: Any) -> click.Command:
        for option in (click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP), *options):
            function = option(function)
        return main.command(name)(click.option("-m", "--model", required=True, type=FILE)(function))

    return decorate


def loss_text(q: Quality | Distance) -> str:
    return interval(q.loss, "{:+.2%}").replace("%", " %")


def quality(q: Quality | Distance) -> list[str]:
    return [loss_text(q), f"{q.kl.value:.4f}", f"{q.top1.value:.1%}"]


# one precision for each expert


def planner(model: str, calib: Sequence[str], ctx: int, windows: int, types: str | None, threads: int, importance: str = "estimated") -> Planner:
    said: list[str] = []

    def tell(what: str, done: int, total: int) -> None:
        if said[-1:] != [what]:
            said.append(what)
            print(f"  {time.strftime('%H:%M:%S')} {what}, {total} in all", file=sys.stderr, flush=True)

    kinds = types.split(",") if types else None
    return Planner(
        model, calib, types=kinds, importance=importance, ctx=ctx, tokens=windows * ctx * len(calib), n_threads=threads, progress=tell, expert_memory=EVERYTHING
    )


@command(TEXT, WINDOWS, *PLAN, click.option("--importance", type=click.Choice(["estimated", "measured"]), default="estimated", show_default=True),
         click.option("--tolerance", multiple=True, type=float, default=(5, 10, 20), show_default=True, help="Percent."))  # fmt: skip
def bits(model: str, text: Sequence[str], windows: int, calib: Sequence[str], ctx: int, calib_windows: int, types: str | None, threads: int, importance: str,
         tolerance: Sequence[float], json_file: str | None) -> None:  # fmt: skip
    """EdgeMoE's plans at several tolerances, and one type for all experts."""
    with ResultsFile(json_file) as results, planner(model, calib, ctx, calib_windows, types, threads, importance) as plans:
        other = plans.trial_on(plans.trial.sidecar, text, windows)
        n_weights = sum(int(np.prod(span.shape)) for span in plans.model_index.experts.values())
        n = len(plans.trial.experts)
        columns = ["experts", "low experts", "MB", "bits per weight", "loss, calibration", "loss, other text", "KL, other text"]
        table = results.table("bits", "One type for all experts, and plans", columns)

        def row(name: str, low: str, nbytes: int, found: Quality, upper: str, others: Mapping[Any, str]) -> None:
            on_other = other.quality(upper, others)
            table.row(name, low, f"{nbytes / 1e6:.2f}", f"{8 * nbytes / n_weights:.2f}", loss_text(found), loss_text(on_other), f"{on_other.kl.value:.4f}")

        for name, (nbytes, found) in plans.uniform().items():
            if name != ORIGINAL:
                row(name, "", nbytes, found, name, {})
        for percent in tolerance:
            p = plans.plan(percent / 100)
            row(f"plan, {percent:g} %: {p.upper}, {p.lower}", f"{len(p.low)} of {n}", p.n_bytes, p.quality, p.upper, dict.fromkeys(p.low, p.lower))


# a lower precision for what is missing


@contextlib.contextmanager
def evaluator(model: str, text: Sequence[str], ctx: int, windows: int, lower: str, threads: int) -> Iterator[PrecisionEvaluator]:
    """Of precisions with one lower type, in a sidecar that lasts as long."""
    with tempfile.TemporaryDirectory(prefix="moeoff-precision-") as folder:
        sidecar = Sidecar(convert(model, output=os.path.join(folder, "lower.experts.gguf"), tiers=lower).path)
        options = {"experts": sidecar, "tier": ORIGINAL, "precision": Precision(tier=lower), "deterministic": True, "flash_attn": True}
        with open_model(model, ctx, expert_memory=EVERYTHING, n_threads=threads, **options) as llm:
            parts = read_windows(llm, text, ctx, windows)
            print(f"{len(parts)} windows of {ctx} tokens, {lower}", file=sys.stderr)
            yield PrecisionEvaluator(llm, parts, lower, relative_bytes(ModelIndex.read(model), sidecar, lower))


@command(TEXT, WINDOWS, CTX, THREADS, LOWER, click.option("--precision", "precisions", multiple=True, required=True, metavar="T1,T2,P"))
def loss(model: str, text: Sequence[str], windows: int, ctx: int, threads: int, lower: str, precisions: Sequence[str], json_file: str | None) -> None:
    """What precisions lose, every expert taken for a miss."""
    wanted = [tuple(float(x) for x in one.split(",")) for one in precisions]

    def cells(c: MeasuredCandidate) -> list[str]:
        return [f"{c.low:.1%}", f"{c.skipped:.1%}" if c.decode else "", f"{c.cost:.1%}", *quality(c.distance)]

    with ResultsFile(json_file) as results, evaluator(model, text, ctx, windows, lower, threads) as found:
        table = results.table("loss", f"Losses with {lower}", ["precision", "low", "skipped", "bytes", *QUALITY])
        if shares := sorted({p for _, _, p in wanted if p}, reverse=True):
            with found.reference("prefill") as reference:
                for p in shares:
                    table.row(f"batches, p {p:g}", *cells(found.measure(reference, 1.0, 1.0, p, decode=False)))
        with found.reference("decode") as reference:
            for t1, t2, p in wanted:
                table.row(f"T1 {t1:g}, T2 {t2:g}, p {p:g}", *cells(found.measure(reference, t1, t2, p, decode=True)))


# another expert for what is missing


def ctx_of(model: str) -> int:
    return min(512, ModelIndex.read(model).n_ctx_train or 512)


def rerouting_model(model: str, ctx: int) -> Any:
    return open_model(model, ctx, precision=REROUTES, deterministic=True, flash_attn=True, profile=False)


@command(TEXT, WINDOWS, SHARES, RESIDENT, click.option("--skip", "skips", multiple=True, type=float, default=(1.0,), show_default=True,
         help="T: what lies beyond it is skipped if it is absent."))  # fmt: skip
def rerouting(model: str, text: Sequence[str], windows: int, shares: Sequence[float], resident: Sequence[float], skips: Sequence[float],
              json_file: str | None) -> None:  # fmt: skip
    """Quality and misses behind a simulated cache, in batches."""
    ctx = ctx_of(model)
    with rerouting_model(model, ctx) as llm, ResultsFile(json_file) as results:
        found = ReroutingEvaluator(llm, read_windows(llm, text, ctx, windows), ORIGINAL, 1.0)
        with found.reference() as reference:
            for room in resident:
                columns = ["λ", "T", "misses, of lossless", "rerouted", "skipped", *QUALITY]
                table = results.table(f"cache-{room:g}", f"{room:.0%} of each layer's experts in a simulated cache", columns)
                for reroute, t in itertools.product(shares, skips):
                    c = found.measure(reference, reroute, t, t, room)
                    table.row(f"{reroute:g}", f"{t:g}", f"{c.cost:.2f}", f"{c.rerouted:.1%}", f"{c.skipped:.1%}", *quality(c.distance))


@command(TEXT, click.option("--windows", default=8, show_default=True, help="Of each text."), SHARES, click.option("--memory", required=True),
         click.option("--max-loss", help="Also what the model's contract finds within this."), click.option("--rounds", default=5, show_default=True),
         click.option("--disk", type=int, metavar="MB/S", help="No faster than this (root)."))  # fmt: skip
def live(model: str, text: Sequence[str], windows: int, shares: Sequence[float], memory: str, max_loss: str | None, rounds: int, disk: int | None,
         json_file: str | None) -> None:  # fmt: skip
    """Token by token, cold, with what is resident in truth; the rules in turn, each with the model opened anew."""
    ctx, console = ctx_of(model), Console(stderr=True)
    rules: dict[str, dict[str, Any]] = {"lossless": {}} | {f"λ {share:g}": {"precision": Precision(reroute=share)} for share in shares}
    if max_loss:
        rules[f"--max-loss {max_loss}"] = {"max_loss": max_loss}
    common = {"flash_attn": True, "n_batch": ctx, "n_ubatch": ctx}
    with open_model(model, ctx, profile=False, **common) as llm:
        parts = read_windows(llm, text, ctx, windows)
        reference = Reference.record(llm, parts, "decode")
    if disk:
        click.get_current_context().with_resource(disk_cgroup(model, disk * 10**6)).enter()
    with reference, ResultsFile(json_file) as results:
        for budget in map(parse_size, memory.split(",")):
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in rules}
            last = {}
            for index in range(rounds):
                for name, options in rules.items():
                    console.print(f"{format_size(budget)}, round {index + 1}: {name}", style="dim")
                    drop_from_page_cache(model)
                    with open_model(model, ctx, memory=budget, **common, **options) as llm:
                        found = evaluate(llm, parts, reference, mode="decode").quality()
                        stats = llm.stats()
                    rows[name].append((stats.gen_tps, stats.bytes_read / 1e6 / (stats.prompt_tokens + stats.gen_tokens)))
                    last[name] = found, stats.precision_summary.partition(" (")[0] or "nothing"
            columns = ["", "tok/s", "times lossless", "MB/token", "given up", *QUALITY]
            table = results.table(f"live-{budget >> 20}", f"{format_size(budget)}, {rounds} rounds, medians", columns)
            for name, measured in rows.items():
                ratios = [here[0] / there[0] for here, there in zip(measured, rows["lossless"])]
                numbers = [f"{statistics.median(column):.1f}" for column in zip(*measured)]
                speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                table.row(name, numbers[0], speed, numbers[1], last[name][1], *quality(last[name][0]))


if __name__ == "__main__":
    main()
