"""`moeoff calibrate`: the profile of a model, or with --max-loss and --bits-plan what lower precision costs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from ..atomic_file import atomic_file
from ..console import progress_bar, remark
from ..errors import OptionError
from ..memory import format_size
from .llama_options import GPU, ROPE, SYSTEM, llama_arguments, with_options
from .options import CONTEXT, one_sentence

if TYPE_CHECKING:
    from ..budget.loss_contract import Candidate
    from ..calibrate import Effort
    from ..calibrate.precision_search import SearchResult

_RESIDENT = (0.1, 0.25, 0.5, 0.75, 0.9)


@click.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), required=True, help="GGUF with routed experts; of a split one the first part.")
@click.option(
    "--text", multiple=True, required=True, type=click.Path(dir_okay=False), metavar="FILE", help="Text like what the model will see; may be repeated."
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="PROFILE", help="File to write. Default: MODEL.profile.npz, where run and serve find it."
)
@click.option("--tokens", type=click.IntRange(512), default=16384, show_default=True, help="Tokens to evaluate, as many from each text.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="Reading the text takes no longer than about this: fewer tokens if it would.",
)
@click.option("--memory", metavar="SIZE", help="Bound of the process while the model runs. Default: 80% of what is available.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use.")
@with_options(GPU, ROPE, SYSTEM)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the predictors' training.")
@click.option(
    "--max-loss", metavar="PERCENT", help="Instead: measure what rerouting, skipping and a companion's low precision cost, for run --max-loss, as 1%."
)
@click.option("--tier", metavar="NAME", help="With --max-loss: the companion's low precision. Default: all of them are tried.")
@click.option("--thresholds", is_flag=True, help="With --max-loss: also measure thresholds in their worst case, as if nothing were in memory. Slow.")
@click.option("--no-rerouting", is_flag=True, help="With --max-loss: measure low precision alone.")
@click.option("--experts", type=click.Path(dir_okay=False), metavar="FILE", help="With --max-loss: the companion. Default: MODEL.experts.gguf.")
@click.option("--bits-plan", is_flag=True, help="Instead: choose a type for each expert and write a plan for convert --bits, by default MODEL.bits.json.")
@click.option("--tolerance", metavar="PERCENT", default="5%", show_default=True, help="With --bits-plan: perplexity that may be lost.")
@click.option("--types", metavar="NAMES", help="With --bits-plan: types to choose from, as Q4_K,Q2_K. Default: a ladder below the model's own.")
@click.option("--measure", is_flag=True, help="With --bits-plan: quantize experts one at a time instead of estimating their importance.")
@click.pass_context
@one_sentence
def calibrate(
    context: click.Context, max_loss: str | None, tier: str | None, thresholds: bool, no_rerouting: bool, experts: str | None, bits_plan: bool, tolerance: str,
    types: str | None, measure: bool, seed: int, minutes: float, **options: Any,
) -> None:  # fmt: skip
    """Measure a model on text, once, and keep in a profile beside it what predictors and caches learn from that."""
    _refuse_unused(context, max_loss, bits_plan)
    options = llama_arguments(**options)
    if bits_plan:
        path = _write_plan(**options, tolerance=tolerance, types=types, measure=measure)
        click.echo(f"{path}: for moeoff convert {options['model']} --bits {path}")
    elif max_loss:
        found = _search(**options, max_loss=max_loss, tier=tier, thresholds=thresholds, rerouting=not no_rerouting, experts=experts)
        kept = "" if any(found.contract.choose(found.max_loss, share) for share in (0.0, *_RESIDENT)) else "; nothing but lossless keeps the bound"
        click.echo(f"{found.path}: for moeoff run -m {options['model']} --max-loss {max_loss}{kept}")
    else:
        from ..calibrate import calibrate as command

        with progress_bar() as progress:
            done = command(**options, seed=seed, minutes=minutes, progress=progress, announce=_announce)
        click.echo(f"{done.path}: {', '.join(done.sections)}; {done.n_tokens:,} tokens in {done.seconds:.0f} s")
        if done.recall is not None:
            click.echo(f"the next layer's experts are predicted to {100 * done.recall:.0f} %; the first {done.shallow} layers are hard to predict", err=True)


def _refuse_unused(context: click.Context, max_loss: str | None, bits_plan: bool) -> None:
    """Refuses options that the chosen kind of calibration would leave unused."""
    if max_loss and bits_plan:
        raise OptionError("give --max-loss or --bits-plan, not both")
    kinds = {"--max-loss": ("tier", "thresholds", "no_rerouting", "experts"), "--bits-plan": ("tolerance", "types", "measure"), "": ("seed", "minutes")}
    chosen = "--max-loss" if max_loss else "--bits-plan" if bits_plan else ""
    for kind, names in kinds.items():
        for name in names:
            given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
            if given and kind != chosen:
                raise OptionError(f"--{name.replace('_', '-')} has no effect {f'without {kind}' if kind else f'with {chosen}'}")


def _announce(effort: Effort) -> None:
    minutes = effort.seconds / 60
    time = f"{effort.seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
    remark(f"{effort.n_tokens:,} tokens: about {time}, and {format_size(effort.nbytes)} of memory for the fits that follow")


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _search(
    model: str, *, text: tuple[str, ...], max_loss: str, tier: str | None, thresholds: bool, rerouting: bool, experts: str | None, tokens: int, output: str | None,
    memory: str | None, threads: int | None, **options: Any,
) -> SearchResult:  # fmt: skip
    """Measures, writes the profile, and prints a table of what was tried."""
    from ..budget.loss_contract import parse_loss
    from ..budget.statistics import interval
    from ..calibrate.precision_search import search_precision

    bound = parse_loss(max_loss)
    with progress_bar() as progress:
        done = search_precision(
            model, text, bound, tier=tier, thresholds=thresholds, rerouting=rerouting, experts=experts or "auto", tokens=tokens, output=output, memory=memory, n_threads=threads,
            progress=progress, **options,
        )  # fmt: skip
    contract = done.contract
    rows = []
    for c in contract.candidates:
        limit = f"{contract.upper(c):+.2%}" + ("" if contract.upper(c) <= bound else " no")
        resident = f"{c.resident:.0%}" if c.resident else "none"
        rows.append([_name(c), resident, f"{c.low:.1%}", f"{c.rerouted:.1%}", f"{c.skipped:.1%}", f"{c.cost:.1%}",
                     interval(c.loss, "{:+.2%}"), limit, interval(c.kl, "{:.4f}"), f"{c.top1.value:.1%}"])  # fmt: skip
    title = f"{os.path.basename(model)}, {contract.n_tokens} tokens scored; resident: experts in memory, bytes: of the lossless model's with as many"
    _table(title, ["precision", "resident", "low", "rerouted", "skipped", "bytes", "loss (95 %)", "at most", "KL (95 %)", "same top"], rows)
    for share in _RESIDENT:
        found = contract.choose(bound, share)
        click.echo(f"with {share:.0%} of the experts in memory: {_name(found) if found else 'lossless'}", err=True)
    return done


def _name(c: Candidate) -> str:
    if c.resident:
        parts = [f"all in {c.tier}"] if c.whole else []
        parts += [f"rerouting {c.reroute:g}"] if c.reroute else []
        if c.t1 < c.t2:
            parts.append(f"T1 {c.t1:g}, T2 {c.t2:g}, {c.tier}")
        elif c.t2 < 1:
            parts.append(f"T {c.t2:g}")
        return ", ".join(parts)
    if c.whole:
        return f"all experts in {c.tier}"
    return f"decode: T1 {c.t1:g}, T2 {c.t2:g}, p {c.share:g}, {c.tier}" if c.decode else f"batches: p {c.share:g}, {c.tier}"


def _write_plan(
    model: str, *, text: tuple[str, ...], output: str | None, tolerance: str, types: str | None, measure: bool, tokens: int, memory: str | None,
    threads: int | None, **options: Any,
) -> str:  # fmt: skip
    """Finds a plan, writes it, and prints it beside one type for all. Returns its path."""
    from ..budget.loss_contract import parse_loss
    from ..budget.statistics import interval
    from ..calibrate.bit_allocation import Planner
    from ..calibrate.precision_search import CTX
    from ..gguf.layout import Layout

    bound = parse_loss(tolerance)
    path = os.fspath(output) if output else model.removesuffix(".gguf") + ".bits.json"
    if os.path.exists(path):
        raise OptionError(f"{path}: exists: move it away, or name another with -o")
    layout = Layout.read(model)
    ctx = min(CTX, layout.n_ctx_train or CTX)
    with progress_bar() as progress, Planner(
        model, text, types=types.split(",") if types else None, importance="measured" if measure else "estimated", ctx=ctx,
        chunks=max(tokens // (ctx * len(text)), 1), memory=memory, n_threads=threads, progress=progress, **options,
    ) as planner:  # fmt: skip
        plan = planner.plan(bound)
    with atomic_file(path) as file:
        file.write(plan.to_json().encode())
    rows = [[name, format_size(nbytes), interval(q.distance.loss, "{:+.2%}")] for name, (nbytes, q) in plan.uniform.items()]
    rows.append(
        [
            f"plan: {len(plan.low)} of {plan.n_experts} in {plan.lower}, others {plan.upper}",
            format_size(plan.n_bytes),
            interval(plan.quality.distance.loss, "{:+.2%}"),
        ]
    )
    _table(f"{os.path.basename(model)}, {plan.quality.n_tokens} tokens scored", ["experts", "size", "loss (95 %)"], rows)
    return path
