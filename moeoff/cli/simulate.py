"""`moeoff simulate`."""

from __future__ import annotations

import json
from typing import Any

import click

from ..options import TABLE
from ..system.console import progress_bar, wrapped
from ..system.memory import format_size, parse_size
from .options import JSON_OPTION, ValueList, command, option, table_options

DEFAULT_SIZES = ("10%", "25%", "50%", "75%", "90%")


@command()
@click.argument(
    "traces",
    type=click.Path(exists=True, dir_okay=False),
    nargs=-1,
    required=True,
    metavar="TRACE...",
)
@click.option(
    "--strategy",
    multiple=True,
    metavar="NAME[,NAME]",
    type=ValueList(TABLE["strategy"]),
    help="Strategies to compare with lru and belady; may be repeated. Default: auto.",
)
@click.option(
    "--memory",
    multiple=True,
    metavar="SIZE",
    help=(
        "Memory for experts, e.g. 6G or 25% of them; may be repeated. Default: 10, 25, 50, 75, 90%."
    ),
)
@option(
    "--decoded",
    is_flag=True,
    help="Replay answers without their prompts, from an empty cache.",
)
@table_options("simulate", t1=0.6, t2=0.9)
@click.option(
    "--low-cost",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Relative size of a low version, for the penalty. Default: 0.25, int4 of float16.",
)
@JSON_OPTION
def simulate(
    traces: tuple[str, ...],
    strategy: tuple[str, ...],
    memory: tuple[str, ...],
    decoded: bool,
    low_cost: float | None,
    as_json: bool,
    tau: float = 0.0,
    **penalty: Any,
) -> None:
    """Replay traces through strategies: their hit rates and bytes read.

    A trace is of `run --trace`, or a route trace (v1, also gzip) of another program.
    """
    from ..policies.hobbit import MissCost
    from ..policies.replay import compare, gap_recovered, without_probs
    from ..routing.route_trace import read_trace
    from ..routing.trace import Trace

    trace = Trace.join([read_trace(path) for path in traces])
    trace = trace.decoded() if decoded else trace
    names = [name for item in strategy or ("auto",) for name in item.split(",")]
    arenas = [parse_size(size, trace.model.full_bytes) for size in memory or DEFAULT_SIZES]
    without = without_probs(trace, names)
    cost = MissCost(**penalty, **({} if low_cost is None else {"low": low_cost}))
    with progress_bar("events") as progress:
        results = compare(trace, names, arenas, tau=tau, cost=cost, progress=progress)
    rows = [r.to_dict() | {"gap_recovered": gap_recovered(r, results)} for r in results]
    if as_json:
        head = {
            "model": trace.model.name,
            "full_bytes": trace.model.full_bytes,
            "events": len(trace.events),
            "without_probs": without,
        }
        click.echo(json.dumps(head | {"results": rows}, indent=2))
        return
    click.echo(_table(rows, trace.model.full_bytes, tau > 0))
    if without:
        why = "has only the selected experts' weights: the trace lacks the router's probabilities"
        click.echo("\n" + wrapped(f"{', '.join(without)}: {why}"))


def _table(rows: list[dict[str, Any]], full: int, skips: bool) -> str:
    lines = [
        f"{'buffer':>10} {'':>5} {'strategy':<16} {'hit rate':>8} {'read/token':>11} {'penalty':>8}"
        f" {'of the gap':>10}{'   skipped' if skips else ''}"
    ]
    for row in rows:
        share = "" if row["strategy"] == "belady" else f"{row['skipped_share']:.1%}"
        skipped = f"{share:>10}" if skips else ""
        gap = "" if row["gap_recovered"] is None else f"{100 * row['gap_recovered']:.0f} %"
        lines.append(
            f"{format_size(row['cache_bytes']):>10} {100 * row['cache_bytes'] / full:4.0f}%"
            f" {row['strategy']:<16} {100 * row['hit_rate']:7.2f}%"
            f" {format_size(int(row['bytes_per_token'])):>11} {row['miss_penalty_per_token']:8.3f}"
            f" {gap:>10}{skipped}"
        )
    lines.append(
        "\nhit rate: share of slices found in memory; penalty: cost of the misses, 1 for a\n"
        "slice in full precision; of the gap: share of the gap from LRU to the optimum\n"
        "(belady) that is closed" + ("; skipped: share of decoded tokens' experts" if skips else "")
    )
    return "\n".join(lines)
