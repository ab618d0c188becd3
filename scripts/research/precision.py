"""Quality that lossy rules cost, and what they spare: docs/results/loss.md, bit-plans.md.

usage: precision.py bits      -m MODEL --calib FILE --text FILE            EdgeMoE's plans, and one type for all experts
       precision.py frontier  -m MODEL --text FILE                         loss and bytes of every rule behind a simulated cache
       precision.py contract  -m MODEL --calib FILE --text FILE            what the model's contract finds: bytes, and loss on other and on own text
       precision.py live      -m MODEL --text FILE --memory 1045M,760M     rules on what is resident in truth: speed and quality, cold

--calib and --text may be given several times; losses are on --text, which nothing was chosen by. Speed of lower precision is measured by speed.py.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from moeoff.calibrate.precision_search import RuleEvaluator, search_precision
from moeoff.calibrate.statistics import Distance, Estimate, Quality, interval
from moeoff.gguf.model_index import ModelIndex
from moeoff.memory import format_size, parse_size
from moeoff.options import parse_loss
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
TAUS = click.option(
    "--tau",
    "taus",
    multiple=True,
    type=float,
    default=(0.04, 0.06, 0.08, 0.1, 0.12, 0.16, 0.2),
    show_default=True,
    help="τ, on the scale of the model's weights.",
)
SHARES = click.option("--share", "shares", multiple=True, type=float, default=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3), show_default=True, help="λ.")
RESIDENT = click.option("--resident", multiple=True, type=float, default=(0.25, 0.34, 0.5), show_default=True)
PLAN = (
    click.option("--calib-windows", default=8, show_default=True, help="Of each calibration text."),
    click.option("--types", help="To choose from, as Q4_0,Q2_0."),
    CALIB, CTX, THREADS,
)  # fmt: skip
REROUTES = Precision(reroute=1.0, resident=1.0)  # opens a model that can
EVERYTHING = 1 << 40  # expert_memory that holds all
QUALITY = ["loss (95 %)", "KL", "same top token"]
UPPER = "upper bound (one-sided 95 %)"
BESIDE = "more loss than τ at as many bytes (95 %)"


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


def percent(value: float) -> str:
    return f"{value:+.2%}".replace("%", " %")


def interval_text(estimate: Estimate) -> str:
    return interval(estimate, "{:+.2%}").replace("%", " %")


def loss_text(q: Quality | Distance) -> str:
    return interval_text(q.loss)


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


# rules for what is missing


def ctx_of(model: str) -> int:
    return min(512, ModelIndex.read(model).n_ctx_train or 512)


def beside_curve(curve: Sequence[tuple[float, np.ndarray]], cost: float, nll: np.ndarray) -> Estimate | None:
    """How much more a rule loses than those of a curve do at the same cost, on the straight line between the two that read next less and more.

    Args:
        curve: (cost, nll [n_windows, n_scored]) of each.

    Returns:
        None beyond the curve's ends.
    """
    less = max((point for point in curve if point[0] <= cost), key=lambda point: point[0], default=None)
    more = min((point for point in curve if point[0] >= cost), key=lambda point: point[0], default=None)
    if less is None or more is None:
        return None
    part = (cost - less[0]) / (more[0] - less[0]) if more[0] > less[0] else 0.0
    return Estimate.mean(nll - (1 - part) * less[1] - part * more[1])


@command(TEXT, WINDOWS, THREADS, RESIDENT, TAUS, SHARES,
         click.option("--hobbit", "ts", multiple=True, type=float, default=(0.9, 0.8, 0.7, 0.6, 0.5), show_default=True, help="T, beyond which is skipped."),
         click.option("--lower", help="A type: what lies beyond T is read in it, too."))  # fmt: skip
def frontier(model: str, text: Sequence[str], windows: int, threads: int, resident: Sequence[float], taus: Sequence[float], shares: Sequence[float],
             ts: Sequence[float], lower: str | None, json_file: str | None) -> None:  # fmt: skip
    """Loss and bytes of every rule behind a simulated cache, in batches."""
    ctx = ctx_of(model)
    rules = {f"τ {tau:g}": Precision(tau=tau) for tau in taus} | {f"λ {share:g}": Precision(reroute=share) for share in shares}
    rules |= {f"T {t:g}": Precision(t, t) for t in ts} | ({f"T {t:g}, {lower}": Precision(t, 1.0, tier=lower) for t in ts} if lower else {})
    opens = replace(REROUTES, t1=0.0, tier=lower) if lower else REROUTES
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(ResultsFile(json_file))
        options: dict[str, Any] = {"experts": False}
        size = 0.0
        if lower:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moeoff-precision-"))
            sidecar = Sidecar(convert(model, output=os.path.join(folder, "lower.experts.gguf"), tiers=lower).path)
            options, size = {"experts": sidecar, "tier": ORIGINAL}, relative_bytes(ModelIndex.read(model), sidecar, lower)
        llm = stack.enter_context(open_model(model, ctx, precision=opens, deterministic=True, flash_attn=True, profile=False, n_threads=threads, **options))
        found = RuleEvaluator(llm, read_windows(llm, text, ctx, windows), low_size=size)
        reference = stack.enter_context(found.reference())
        for room in resident:
            columns = ["rule", "bytes, of lossless", "left out", "rerouted", "low", *QUALITY, UPPER, BESIDE]
            table = results.table(f"frontier-{room:g}", f"{room:.0%} of each layer's experts in a simulated cache", columns)
            curve: list[tuple[float, np.ndarray]] = []  # of τ: bytes, and the nll of each token
            for name, rule in rules.items():
                c = found.measure(reference, replace(rule, resident=room))
                if rule.tau:
                    curve.append((c.cost, found.scores.nll))
                beside = beside_curve(curve, c.cost, found.scores.nll) if not rule.tau else None
                numbers = f"{c.cost:.3f}", f"{c.skipped:.1%}", f"{c.rerouted:.1%}", f"{c.low:.1%}"
                table.row(name, *numbers, *quality(c.distance), percent(c.upper_loss), interval_text(beside) if beside else "")


@command(CALIB, TEXT, WINDOWS, THREADS, RESIDENT, click.option("--max-loss", default="1%", show_default=True),
         click.option("--calib-tokens", default=16384, show_default=True, help="That are searched on, in all."),
         click.option("--own-tokens", default=32768, show_default=True, help="That are written, for each share."))  # fmt: skip
def contract(model: str, calib: Sequence[str], text: Sequence[str], windows: int, threads: int, resident: Sequence[float], max_loss: str, calib_tokens: int,
             own_tokens: int, json_file: str | None) -> None:  # fmt: skip
    """What the contract of a bound finds on --calib: bytes and loss behind a simulated cache on --text, and on text of its own behind openings of that."""
    ctx, bound = ctx_of(model), parse_loss(max_loss)
    with tempfile.TemporaryDirectory(prefix="moeoff-precision-") as folder, contextlib.ExitStack() as stack:
        results = stack.enter_context(ResultsFile(json_file))
        profile = os.path.join(folder, "profile")
        found = search_precision(model, calib, bound, experts=False, tokens=calib_tokens, output=profile, n_threads=threads).contract
        options = {"precision": REROUTES, "deterministic": True, "flash_attn": True, "profile": False, "experts": False, "n_threads": threads}
        llm = stack.enter_context(open_model(model, ctx, **options))
        evaluator = RuleEvaluator(llm, read_windows(llm, text, ctx, windows))
        reference = stack.enter_context(evaluator.reference())
        columns = ["in a simulated cache", "τ", "bytes, of lossless", "left out", *QUALITY, UPPER, "loss on own text (95 %)"]
        title = f"`--max-loss {max_loss}`, on {len(evaluator.windows)} windows of other text and on {own_tokens} tokens of its own"
        table = results.table("contract", title, columns)
        for room in resident:
            chosen = found.choose(bound, room)
            if chosen is None:
                table.row(f"{room:.0%}", "nothing is left out", *[""] * (len(columns) - 2))
                continue
            c = evaluator.measure(reference, Precision(tau=chosen.tau, resident=room))
            own = evaluator.own_text_loss(c, own_tokens)
            table.row(f"{room:.0%}", f"{c.tau:.3g}", f"{c.cost:.3f}", f"{c.skipped:.1%}", *quality(c.distance), percent(c.upper_loss), interval_text(own))


@command(TEXT, click.option("--windows", default=8, show_default=True, help="Of each text."), TAUS, SHARES, click.option("--memory", required=True),
         click.option("--max-loss", help="Also what the model's contract finds within this."), click.option("--rounds", default=5, show_default=True),
         click.option("--disk", type=int, metavar="MB/S", help="No faster than this (root)."))  # fmt: skip
def live(model: str, text: Sequence[str], windows: int, taus: Sequence[float], shares: Sequence[float], memory: str, max_loss: str | None, rounds: int, disk: int | None,
         json_file: str | None) -> None:  # fmt: skip
    """Token by token, cold, with what is resident in truth; the rules in turn, each with the model opened anew."""
    ctx, console = ctx_of(model), Console(stderr=True)
    rules: dict[str, dict[str, Any]] = {"lossless": {}} | {f"τ {tau:g}": {"precision": Precision(tau=tau)} for tau in taus}
    rules |= {f"λ {share:g}": {"precision": Precision(reroute=share)} for share in shares}
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
