"""What `moeoff calibrate --max-loss` and `--bits-plan` print and write, beyond the profile."""

from __future__ import annotations

import os
import sys

from .budget.loss_contract import Candidate, parse_loss
from .budget.statistics import interval
from .calibrate.bit_allocation import BitsPlan, Planner
from .calibrate.precision_search import CTX, SearchResult, search_precision
from .errors import OptionError
from .gguf.layout import Layout
from .memory import format_size

__all__ = ["calibrate_loss", "write_plan"]

_RESIDENT = (0.1, 0.25, 0.5, 0.75, 0.9)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def calibrate_loss(model: str, *, text, max_loss: str, tier, thresholds, experts, tokens: int, output, memory, threads, progress) -> SearchResult:
    """Measures, writes the profile, and prints a table of what was tried.

    Raises:
        MoeoffError: as `search_precision`.
    """
    bound = parse_loss(max_loss)
    done = search_precision(model, text, bound, tier=tier, thresholds=thresholds, experts=experts or "auto", tokens=tokens, output=output, memory=memory, n_threads=threads,
                     progress=progress)  # fmt: skip
    contract = done.contract
    rows = []
    for c in contract.candidates:
        limit = f"{contract.upper(c):+.2%}" + ("" if contract.upper(c) <= bound else " no")
        rows.append([_name(c), f"{c.low:.1%}", f"{c.skipped:.1%}", f"{c.cost:.1%}",
                     interval(c.loss, "{:+.2%}"), limit, interval(c.kl, "{:.4f}"), f"{c.top1.value:.1%}"])  # fmt: skip
    title = f"{os.path.basename(model)}, {contract.n_tokens} tokens scored, as if no expert were in memory"
    _table(title, ["precision", "low", "skipped", "bytes", "loss (95 %)", "at most", "KL (95 %)", "same top"], rows)
    for resident in _RESIDENT:
        found = contract.choose(bound, resident)
        print(f"with {resident:.0%} of the experts in memory: {_name(found) if found else 'lossless'}", file=sys.stderr)
    return done


def _name(c: Candidate) -> str:
    if c.whole:
        return f"all experts in {c.tier}"
    return f"decode: T1 {c.t1:g}, T2 {c.t2:g}, p {c.share:g}, {c.tier}" if c.decode else f"batches: p {c.share:g}, {c.tier}"


def write_plan(model: str, *, text, output, tolerance: str, types, measure: bool, tokens: int, memory, threads, progress) -> tuple[str, BitsPlan]:
    """Finds a plan and writes it; prints it beside one type for all. Returns its path, too.

    Raises:
        MoeoffError: as `Planner`; OptionError if the file is there.
    """
    bound = parse_loss(tolerance)
    path = os.fspath(output) if output else model.removesuffix(".gguf") + ".bits.json"
    if os.path.exists(path):
        raise OptionError(f"{path}: exists: move it away, or name another with -o")
    layout = Layout.read(model)
    ctx = min(CTX, layout.n_ctx_train or CTX)
    with Planner(model, text, types=types.split(",") if types else None, importance="measured" if measure else "estimated", ctx=ctx,
                 chunks=max(tokens // (ctx * len(text)), 1), memory=memory, n_threads=threads, progress=progress) as planner:  # fmt: skip
        plan = planner.plan(bound)
    with open(path, "w", encoding="utf-8") as file:
        file.write(plan.to_json())
    rows = [[name, format_size(nbytes), interval(q.loss, "{:+.2%}")] for name, (nbytes, q) in plan.uniform.items()]
    rows.append(
        [f"plan: {len(plan.low)} of {plan.n_experts} in {plan.lower}, others {plan.upper}", format_size(plan.n_bytes), interval(plan.quality.loss, "{:+.2%}")]
    )
    _table(f"{os.path.basename(model)}, {plan.quality.n_tokens} tokens scored", ["experts", "size", "loss (95 %)"], rows)
    return path, plan
