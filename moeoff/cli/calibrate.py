"""`moeoff calibrate` and `moeoff eval`: a model's profile, its perplexity, and the loss
that lower precision causes.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..errors import OptionError
from ..options import parse_loss
from ..system.console import note, progress_bar, say, table, table_console
from ..system.files import atomic_file, demo_model, require_new
from ..system.memory import format_size, peak_rss
from .options import command, input_files, model_argument, option, remark_on_context, table_options

if TYPE_CHECKING:
    from ..budget.loss_contract import Candidate
    from ..measure.precision_search import SearchResult
    from ..measure.statistics import QualityMetrics

_RESIDENT = (0.1, 0.25, 0.5, 0.75, 0.9)
# options that not every kind of calibration has
_OPTIONS_OF = {
    ("--max-loss",): ("tier", "experts"),
    ("--bits-plan",): ("tolerance", "types", "measure"),
    ("", "--max-loss"): ("seed", "minutes"),
}
_FITTING = 0.5  # share of the time for the profile's fit, where a search follows

_PLAN = "A type for each expert"  # heading of the options of --bits-plan


@command()
@model_argument(
    "GGUF with routed experts, instead of MODEL; of a split one the first part.", needed=True
)
@option(
    "--text",
    multiple=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help=(
        "Text like what the model will see; may be repeated. Default: the package's own, and the"
        " help texts of Python."
    ),
)
@option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="PROFILE",
    help="File to write. Default: MODEL.profile.npz, where run and serve find it.",
)
@option(
    "--tokens",
    type=click.IntRange(512),
    metavar="N",
    default=16384,
    show_default=True,
    help="Tokens to evaluate, the same number from each text.",
)
@option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help=(
        "Deadline for all of it: what was measured by then counts. Default: 60. Not with"
        " --bits-plan."
    ),
)
@table_options("calibrate")
@option(
    "--seed",
    type=int,
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the predictors' training.",
)
@option(
    "--max-loss",
    metavar="PERCENT",
    help=(
        "Also measure which experts may be skipped, and what a sidecar's tiers lose, for run"
        " --max-loss, e.g. 1%."
    ),
)
@option("--tier", metavar="NAME", help="With --max-loss: the sidecar's tier to try. Default: all.")
@option(
    "--experts",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="With --max-loss: the sidecar. Default: MODEL.experts.gguf.",
)
@option(
    "--bits-plan",
    is_flag=True,
    group=_PLAN,
    help="Instead: choose a type for each expert, and write MODEL.bits.json for convert --bits.",
)
@option(
    "--tolerance",
    group=_PLAN,
    metavar="PERCENT",
    default="5%",
    show_default=True,
    help="Perplexity that may be lost.",
)
@option(
    "--types",
    group=_PLAN,
    metavar="NAMES",
    help="Types to choose from, e.g. Q4_K,Q2_K. Default: a ladder below the model's own.",
)
@option(
    "--measure",
    group=_PLAN,
    is_flag=True,
    help="Quantize experts one at a time instead of estimating their importance.",
)
def calibrate(model: str, max_loss: str | None, bits_plan: bool, **options: Any) -> None:
    """Measure a model on text, once, and keep in its profile what predictors and caches
    learn from that.

    Interrupted, the same command goes on from there; a search for a loss or a plan
    starts again.
    """
    started = time.monotonic()
    if max_loss and bits_plan:
        raise OptionError("give --max-loss or --bits-plan, not both")
    chosen = "--max-loss" if max_loss else "--bits-plan" if bits_plan else ""
    for kinds, names in _OPTIONS_OF.items():
        for name in names if chosen not in kinds else ():
            if (
                click.get_current_context().get_parameter_source(name)
                is not click.core.ParameterSource.DEFAULT
            ):
                raise OptionError(
                    f"--{name} has no effect"
                    f" {f'with {chosen}' if '' in kinds else f'without {kinds[0]}'}"
                )
            del options[name]
    if bits_plan:
        plan = _write_plan(model, **options)
        click.echo(f"{plan}: for moeoff convert {model} --bits {plan}")
        return
    from ..measure.profile_fit import DEFAULT_MINUTES

    minutes = options.pop("minutes") or DEFAULT_MINUTES
    search = {name: options.pop(name) for name in ("tier", "experts") if max_loss}
    if max_loss:  # raises before the work
        from ..gguf.model_index import ModelIndex
        from ..measure.precision_search import find_tiers

        parse_loss(max_loss)
        find_tiers(ModelIndex.read(model), search["experts"] or "auto", search["tier"])
    _fit(model, minutes=(_FITTING if max_loss else 1) * minutes, renew=not max_loss, **options)
    if not max_loss:
        return
    del options["seed"]
    left = minutes - (time.monotonic() - started) / 60
    searched = _search(model, max_loss=max_loss, minutes=left, **search, **options)
    if any(searched.contract.choose(searched.max_loss, share) for share in (0.0, *_RESIDENT)):
        click.echo(f"{searched.path}: for moeoff run -m {model} --max-loss {max_loss}")
    else:
        say(
            f"nothing that was measured keeps within {max_loss}: --max-loss {max_loss} leaves the"
            " model lossless"
        )


def _fit(model: str, **options: Any) -> None:
    """Fit the profile and print what it holds."""
    from ..measure.profile_fit import calibrate as library

    warnings: list[str] = []  # a line would begin where the bar is
    try:
        with progress_bar() as progress:
            progress("opening the model", 0, 0)
            result = library(model=model, **options, progress=progress, warn=warnings.append)
    except KeyboardInterrupt:
        note("interrupted: the same command goes on from here")
        raise
    finally:
        for sentence in warnings:
            note(sentence)
    if not result.sections:
        note(f"{result.path}: fitted with the same options before")
        return
    say(
        f"{result.path}: {', '.join(result.sections)}; {result.n_tokens:,} tokens in"
        f" {result.seconds:.0f} s"
    )
    if result.recall is not None:
        shallow = (
            f"; the first {result.shallow} layers are hard to predict"
            if result.shallow is not None
            else ""
        )
        note(f"the next layer's experts are predicted to {100 * result.recall:.0f} %{shallow}")


def _print(title: str, columns: list[str], rows: list[list[str]]) -> None:
    made = table(*columns, title=title)
    for row in rows:
        made.add_row(*row)
    table_console().print(made)


def _search(
    model: str,
    *,
    text: tuple[str, ...],
    max_loss: str,
    experts: str | None,
    minutes: float,
    **options: Any,
) -> SearchResult:
    """Measure precisions, write the profile, and print a table of them."""
    from ..measure.precision_search import search_precision
    from ..measure.statistics import interval

    bound = parse_loss(max_loss)
    with progress_bar() as progress:
        progress("opening the model", 0, 0)
        result = search_precision(
            model,
            text,
            bound,
            experts=experts or "auto",
            minutes=minutes,
            progress=progress,
            **options,
        )
    contract = result.contract
    rows = []
    for c in result.measured:
        limit = f"{c.upper_loss:+.2%}" + ("" if c.upper_loss <= bound else " no")
        rows.append(
            [
                _name(c),
                f"{c.resident:.0%}" if c.resident else "",
                f"{c.skipped:.1%}",
                f"{c.cost:.1%}",
                interval(c.distance.loss, "{:+.2%}"),
                limit,
                interval(c.distance.kl, "{:.4f}"),
                f"{c.distance.top1.value:.1%}",
            ]
        )
    title = (
        f"{os.path.basename(model)}, {contract.n_tokens} tokens scored; resident: experts in"
        " memory, bytes: of the lossless model's with as many"
    )
    _print(
        title,
        [
            "precision",
            "resident",
            "left out",
            "bytes",
            "loss (95 %)",
            "at most",
            "KL (95 %)",
            "same top",
        ],
        rows,
    )
    for share in _RESIDENT:
        chosen = contract.choose(bound, share)
        note(
            f"with {share:.0%} of the experts in memory: {_name(chosen) if chosen else 'lossless'}"
        )
    return result


def _name(c: Candidate) -> str:
    from ..experts.sidecar import ORIGINAL

    parts = [f"all in {c.tier}"] if c.tier != ORIGINAL else []
    return ", ".join(parts + ([f"τ {c.tau:.3g}"] if c.tau else []))


def _write_plan(
    model: str,
    *,
    text: tuple[str, ...],
    output: str | None,
    tolerance: str,
    types: str | None,
    measure: bool,
    **options: Any,
) -> str:
    """Find a plan, write it, print it beside plans of one type, and return its path."""
    from ..gguf.model_index import ModelIndex
    from ..measure.bit_allocation import Planner
    from ..measure.precision_search import CTX
    from ..measure.statistics import interval

    bound = parse_loss(tolerance)
    path = os.fspath(output) if output else model.removesuffix(".gguf") + ".bits.json"
    require_new(path, [*input_files(model), *text], "--output")
    if os.path.exists(path):
        raise OptionError(f"{path}: exists: move it away, or name another with -o")
    model_index = ModelIndex.read(model)
    ctx = min(CTX, model_index.n_ctx_train or CTX)
    with progress_bar() as progress:
        progress("opening the model", 0, 0)
        names = types.split(",") if types else None
        with Planner(
            model, text, types=names, measure=measure, ctx=ctx, progress=progress, **options
        ) as planner:
            plan = planner.plan(bound)
    with atomic_file(path) as file:
        file.write(plan.to_json().encode())
    rows = [
        [name, format_size(nbytes), interval(q.distance.loss, "{:+.2%}")]
        for name, (nbytes, q) in plan.uniform.items()
    ]
    chosen = f"plan: {len(plan.low)} of {plan.n_experts} in {plan.lower}, others {plan.upper}"
    rows.append(
        [chosen, format_size(plan.n_bytes), interval(plan.quality.distance.loss, "{:+.2%}")]
    )
    _print(
        f"{os.path.basename(model)}, {plan.quality.n_tokens} tokens scored",
        ["experts", "size", "loss (95 %)"],
        rows,
    )
    return path


@command("eval")
@model_argument()
@option(
    "--text",
    multiple=True,
    required=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Text to predict; may be repeated.",
)
@option(
    "--ctx",
    type=click.IntRange(min=4),
    metavar="N",
    default=512,
    show_default=True,
    help="Tokens in a window; its second half is scored.",
)
@option(
    "--chunks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first N windows of each text.",
)
@option(
    "--mode",
    type=click.Choice(["prefill", "decode", "simulated"]),
    default="prefill",
    show_default=True,
    help=(
        "decode: feed the scored half token by token; simulated: faster, what a --deterministic run"
        " decides token by token."
    ),
)
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@table_options("eval", strategy="lru")
def eval_(
    model: str | None,
    text: tuple[str, ...],
    ctx: int,
    mode: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure perplexity as llama-perplexity does, and how far a lower precision is
    from the lossless model.

    What is lossy is compared with the lossless model on the same windows: loss of
    perplexity, KL divergence, and how often both find the same token the likeliest.
    """
    from ..experts.sidecar import ORIGINAL
    from ..gguf.model_index import ModelIndex
    from ..measure.perplexity import evaluate_model
    from ..measure.statistics import interval

    model = model or demo_model()
    remark_on_context(ctx, ModelIndex.read(model).n_ctx_train, options)
    with progress_bar("tokens") as progress:
        run = evaluate_model(model, text, ctx=ctx, mode=mode, progress=progress, **options)
    stats = run.stats
    if as_json:
        result = {
            **asdict(stats),
            "model": model,
            "mode": mode,
            "ctx": ctx,
            **_fields(run.quality),
            "texts": [{"file": path, **_fields(quality)} for path, quality in zip(text, run.texts)],
            "precision": asdict(run.precision),
            "seconds": run.seconds,
            "bytes_read": run.bytes_read,
            "peak_rss_bytes": peak_rss(),
        }
        click.echo(json.dumps(result))
        return
    compared = run.quality.kl is not None
    lossy = (
        f"at most {100 * stats.max_loss:g}% lost"
        if stats.max_loss
        else stats.tier
        if stats.tier != ORIGINAL
        else "lossy"
        if compared
        else "lossless"
    )
    rows = []
    for path, q in [*zip(text, run.texts), *([("all", run.quality)] if len(text) > 1 else [])]:
        distance = (
            [
                interval(value, form)
                for value, form in zip(q.distance, ("{:+.2%}", "{:.5f}", "{:.2%}"))
            ]
            if compared
            else []
        )
        rows.append(
            [
                os.path.basename(path),
                str(q.n_windows),
                f"{q.perplexity:.4f} ± {q.perplexity_error:.5f}",
                *distance,
            ]
        )
    columns = [
        "text",
        "windows",
        "perplexity",
        *(["loss (95 %)", "KL (95 %)", "same top token (95 %)"] if compared else []),
    ]
    _print(f"{os.path.basename(model)}, {lossy}, {mode}, windows of {ctx} tokens", columns, rows)
    speed = (
        f"{run.n_tokens} tokens in {run.seconds:.1f} s, {run.n_tokens / run.seconds:.1f} tok/s |"
        f" {run.bytes_read / 1e6 / run.n_tokens:.2f} MB/token read"
    )
    note(f"{speed} | {stats.precision_summary}" if stats.precision_summary else speed)


def _fields(quality: QualityMetrics) -> dict[str, Any]:
    return {name: value for name, value in asdict(quality).items() if value is not None}
