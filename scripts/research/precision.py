"""Quality that lossy rules cost, and what they spare: docs/results/loss.md.

usage: precision.py frontier  -m MODEL --text FILE                         loss and bytes of every rule behind a simulated cache
       precision.py contract  -m MODEL --calib FILE --text FILE            what the model's loss budget finds: bytes, and loss on other and on own text

--calib and --text may be given several times; losses are on --text, which nothing was
chosen by. Speed of lower precision is measured by speed.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.perplexity import open_model, read_windows
from moeoff.measure.precision_search import OPENING, RuleEvaluator, search_precision
from moeoff.measure.statistics import Distance, Estimate, interval
from moeoff.options import parse_loss
from moeoff.precision import Precision
from results import HELP, ResultsFile

FILE = click.Path(exists=True, dir_okay=False)
CALIB = click.option("--calib", multiple=True, required=True, type=FILE)
TEXT = click.option("--text", multiple=True, required=True, type=FILE)
WINDOWS = click.option("--windows", default=32, show_default=True, help="Of each text.")
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
RESIDENT = click.option(
    "--resident", multiple=True, type=float, default=(0.25, 0.34, 0.5), show_default=True
)
QUALITY = ["loss (95 %)", "KL", "same top token"]
UPPER = "upper bound (one-sided 95 %)"
BESIDE = "more loss than τ at as many bytes (95 %)"


@click.group(help=__doc__)
def main() -> None:
    pass


def command(*options: Any) -> Callable[..., Any]:
    """A command with -m, --json and these."""

    def decorate(function: Any) -> click.Command:
        for option in (
            click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP),
            *options,
        ):
            function = option(function)
        return main.command()(click.option("-m", "--model", required=True, type=FILE)(function))

    return decorate


def percent(value: float) -> str:
    return f"{value:+.2%}".replace("%", " %")


def interval_text(estimate: Estimate) -> str:
    return interval(estimate, "{:+.2%}").replace("%", " %")


def quality(q: Distance) -> list[str]:
    return [interval_text(q.loss), f"{q.kl.value:.4f}", f"{q.top1.value:.1%}"]


# rules for what is missing


def ctx_of(model: str) -> int:
    return min(512, ModelIndex.read(model).n_ctx_train or 512)


def beside_curve(
    curve: Sequence[tuple[float, np.ndarray]], cost: float, nll: np.ndarray
) -> Estimate | None:
    """Compare a rule's loss with a curve's at the same cost, by linear interpolation.

    Args:
        curve: (cost, nll [n_windows, n_scored]) of each point.

    Returns:
        Additional loss of the rule; None beyond the curve's ends.
    """
    less = max(
        (point for point in curve if point[0] <= cost), key=lambda point: point[0], default=None
    )
    more = min(
        (point for point in curve if point[0] >= cost), key=lambda point: point[0], default=None
    )
    if less is None or more is None:
        return None
    part = (cost - less[0]) / (more[0] - less[0]) if more[0] > less[0] else 0.0
    return Estimate.mean(nll - (1 - part) * less[1] - part * more[1])


@command(
    TEXT,
    WINDOWS,
    THREADS,
    RESIDENT,
    TAUS,
    click.option(
        "--hobbit",
        "ts",
        multiple=True,
        type=float,
        default=(0.9, 0.8, 0.7, 0.6, 0.5),
        show_default=True,
        help="T, beyond which is skipped.",
    ),
)
def frontier(model: str, text: Sequence[str], windows: int, threads: int, resident: Sequence[float], taus: Sequence[float], ts: Sequence[float],
             json_file: str | None) -> None:  # fmt: skip
    """Loss and bytes of every rule behind a simulated cache, in batches."""
    ctx = ctx_of(model)
    rules = {f"τ {tau:g}": Precision(tau=tau) for tau in taus} | {
        f"T {t:g}": Precision(t, t) for t in ts
    }
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(ResultsFile(json_file))
        llm = stack.enter_context(
            open_model(
                model, ctx, deterministic=True, profile=False, n_threads=threads, experts=False
            )
        )
        evaluator = RuleEvaluator(llm, read_windows(llm, text, ctx, windows))
        reference = stack.enter_context(evaluator.reference())
        for room in resident:
            columns = ["rule", "bytes, of lossless", "left out", *QUALITY, UPPER, BESIDE]
            table = results.table(
                f"frontier-{room:g}",
                f"{room:.0%} of each layer's experts in a simulated cache",
                columns,
            )
            curve: list[tuple[float, np.ndarray]] = []  # of τ: bytes, and the nll of each token
            for name, rule in rules.items():
                c = evaluator.measure(reference, replace(rule, resident=room))
                if rule.tau:
                    curve.append((c.cost, evaluator.scores.nll))
                beside = beside_curve(curve, c.cost, evaluator.scores.nll) if not rule.tau else None
                table.row(
                    name,
                    f"{c.cost:.3f}",
                    f"{c.skipped:.1%}",
                    *quality(c.distance),
                    percent(c.upper_loss),
                    interval_text(beside) if beside else "",
                )


@command(CALIB, TEXT, WINDOWS, THREADS, RESIDENT, click.option("--max-loss", default="1%", show_default=True),
         click.option("--calib-tokens", default=16384, show_default=True, help="That are searched on, in all."),
         click.option("--own-tokens", default=32768, show_default=True, help="That are written, for each share."))  # fmt: skip
def contract(model: str, calib: Sequence[str], text: Sequence[str], windows: int, threads: int, resident: Sequence[float], max_loss: str, calib_tokens: int,
             own_tokens: int, json_file: str | None) -> None:  # fmt: skip
    """Search a loss budget on --calib, and measure its bytes and loss with a simulated
    cache on --text, and on text that the model continues from its beginnings.
    """
    ctx, bound = ctx_of(model), parse_loss(max_loss)
    with (
        tempfile.TemporaryDirectory(prefix="moeoff-precision-") as folder,
        contextlib.ExitStack() as stack,
    ):
        results = stack.enter_context(ResultsFile(json_file))
        profile = os.path.join(folder, "profile")
        budget = search_precision(
            model,
            calib,
            bound,
            experts=False,
            tokens=calib_tokens,
            output=profile,
            n_threads=threads,
        ).contract
        options = {"deterministic": True, "profile": False, "experts": False, "n_threads": threads}
        llm = stack.enter_context(open_model(model, ctx, **options))
        evaluator = RuleEvaluator(llm, read_windows(llm, text, ctx, windows))
        reference = stack.enter_context(evaluator.reference())
        n_texts = -(-own_tokens // (ctx - OPENING))
        columns = [
            "in a simulated cache",
            "τ",
            "bytes, of lossless",
            "left out",
            *QUALITY,
            UPPER,
            "loss on own text (95 %)",
        ]
        title = (
            f"`--max-loss {max_loss}`, on {len(evaluator.windows)} windows of other text and on"
            f" {n_texts * (ctx - OPENING)} tokens of its own"
        )
        table = results.table("contract", title, columns)
        for room in resident:
            chosen = budget.choose(bound, room)
            if chosen is None:
                table.row(f"{room:.0%}", "nothing is left out", *[""] * (len(columns) - 2))
                continue
            c = evaluator.measure(reference, Precision(tau=chosen.tau, resident=room))
            own = evaluator.own_text_loss(c, n_texts, n_texts)
            table.row(
                f"{room:.0%}",
                f"{c.tau:.3g}",
                f"{c.cost:.3f}",
                f"{c.skipped:.1%}",
                *quality(c.distance),
                percent(c.upper_loss),
                interval_text(own),
            )


if __name__ == "__main__":
    main()
