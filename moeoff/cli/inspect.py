"""`moeoff inspect`."""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..errors import MoeoffError
from ..options import Config, llama_keywords, with_gpu
from ..system.console import progress_bar, table, table_console, wrapped
from ..system.memory import MIB, format_size
from .options import (
    JSON_OPTION,
    command,
    model_argument,
    option,
    remark_on_context,
    sentence,
    table_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..budget.inspection import MemoryOption, Report


# Seconds of matrix products in a layer below which a rate is an upper bound: the
# unmeasured rest takes longer. Chosen; the demo model's products take a tenth.
_SMALL = 2e-4


@command()
@model_argument(
    "GGUF with routed experts, instead of MODEL; the first part of a split one.", needed=True
)
@table_options("inspect")
@option(
    "--probe",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Measure the disk for 2 seconds.",
)
@option(
    "--explain",
    is_flag=True,
    help="Show what run and serve would choose with these options, and why.",
)
@JSON_OPTION
def inspect(model: str, probe: str, explain: bool, as_json: bool, **options: Any) -> None:
    """Show a GGUF's content, memory needs and expected speed, from its headers."""
    from ..budget.inspection import examine

    config = Config.make(model, **options)
    if explain:
        return _explain(model, as_json, options)
    with progress_bar() as progress:
        if probe == "on":
            progress("measuring disk and CPU", 0, 0)
        keywords = {"flash_attn": config.flash_attn} | llama_keywords(options)
        report = examine(
            model,
            ctx_size=config.n_ctx,
            memory=config.memory,
            probe_disk=probe == "on",
            keywords=keywords,
        )
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        remark_on_context(report.ctx_size, report.n_ctx_train, options)
        _print(report)


def _explain(model: str, as_json: bool, options: dict[str, Any]) -> None:
    from ..server.private import PrivateServer
    from ..server.server import Server

    with_gpu(options)
    private = PrivateServer(model, **options)
    with contextlib.closing(private.engine):
        reasons = private.explain()
    try:
        server = Server(model, **options)
        with contextlib.closing(server.engine):
            served = {
                name: text for name, text in server.explain().items() if text != reasons.get(name)
            }
    except MoeoffError as error:  # e.g. several slots need more memory
        served = {"": sentence(error)}
    if as_json:
        return click.echo(json.dumps(reasons | {"serve": served}, indent=2))
    console = table_console()
    for name, text in reasons.items():
        _print_line(console, name, text)
    console.print("\nserve, where it differs:")
    for name, text in served.items():
        _print_line(console, name, text)


def _print_line(console: Console, name: str, text: str) -> None:
    console.print(wrapped(f"{name:<14}{text}", " " * 14), markup=False, soft_wrap=True)


def _rate(tps: float | None) -> str:
    return "" if tps is None else f"{tps:.0f}" if tps >= 10 else f"{tps:.2g}"


def _qualifier(r: Report) -> str:
    return "at most" if r.compute_seconds and r.compute_seconds < _SMALL * r.n_layer else "about"


def _print(r: Report) -> None:
    console = table_console()
    line = functools.partial(_print_line, console)
    line("model", r.files[0] + (f" and {len(r.files) - 1} more" if len(r.files) > 1 else ""))
    layers = f"{r.n_layer} layers, {r.n_moe_layer} of them with experts"
    line("architecture", f"{r.architecture}, {layers}, trained for {r.n_ctx_train or '?'} tokens")
    shared = f", {r.n_expert_shared} shared" if r.n_expert_shared else ""
    token = f"a token uses {format_size(r.token_bytes)} of slices"
    line("experts", f"{r.n_expert} a layer, top-{r.n_expert_used}{shared}; {token}")
    line(
        "weights", f"{format_size(r.expert_bytes)} in experts, {format_size(r.dense_bytes)} outside"
    )
    console.print()
    slices = table("slices", "type", "size", "number")
    for kind in r.slices:
        slices.add_row(kind.matrix, kind.type, format_size(kind.nbytes), str(kind.count))
    console.print(slices)
    console.print()

    needed = table(f"needed at a context of {r.ctx_size}", "")
    embedding = min(r.embedding_bytes, r.host_weight_bytes)
    on_disk = f" ({format_size(r.row_table_bytes)} more on disk)" if r.row_table_bytes else ""
    rows = {
        "Python and libraries": r.process_bytes,
        **({"token embedding": embedding} if embedding else {}),
        "weights outside the experts" + on_disk: r.host_weight_bytes - embedding,
        **({"rows of tables on disk": r.row_cache_bytes} if r.row_cache_bytes else {}),
        "samplers and chat templates": r.extra_bytes,
        "KV cache and other state": r.kv_bytes,
        "compute buffers": r.compute_bytes,
        "work area": r.work_bytes,
        "outputs": r.output_bytes,
        "reserve": r.reserve_bytes,
        "slots of two experts": r.arena_floor_bytes,
        "smallest --memory": r.floor_bytes,
        "available here": r.available_bytes,
    }
    for name, nbytes in rows.items():
        needed.add_row(
            name, format_size(nbytes), style="bold" if name == "smallest --memory" else ""
        )
    console.print(needed)
    console.print()

    speeds = [f"tokens/s, {_qualifier(r)}"] if r.disk else []
    full_speeds = ["tokens/s"] if r.attention_seconds else []
    depth = f"at a depth of {r.ctx_size:,} tokens"
    budgets = table("--memory", "experts in memory", *speeds, depth, *full_speeds)
    for row in r.budgets:
        cells = [
            f"{row.resident_share:.0%}" if row.fits else "does not fit",
            *([_rate(row.tps)] if speeds else []),
        ]
        cells += [
            f"{row.full_resident_share:.0%}" if row.fits else "",
            *([_rate(row.full_tps)] if full_speeds else []),
        ]
        budgets.add_row(
            f"{-(-row.memory_bytes // MIB)}M", *cells, style="bold" if row.asked else ""
        )
    console.print(budgets)
    if (asked := next((row for row in r.budgets if row.asked), None)) is not None:
        console.print()
        console.print(wrapped(_answer(r, asked)), markup=False, soft_wrap=True)
    if r.devices:
        console.print()
        for device in r.devices:
            share = min(device.free / r.expert_bytes, 1.0) if r.expert_bytes else 1.0
            free = f"{format_size(device.free)} free of {format_size(device.total)}"
            line(
                device.name,
                f"{device.description}: {free}, fits at most {share:.0%} of the experts (--vram)",
            )
    if r.disk:
        how = (
            "" if r.disk.direct_io else " through the page cache, which may be faster than the disk"
        )
        computing = (
            f"computing a token takes {1e3 * r.compute_seconds:.1f} ms on this CPU, "
            if r.compute_seconds
            else ""
        )
        if r.attention_seconds:
            computing += (
                f"attention to {r.ctx_size:,} tokens {1e3 * r.attention_seconds:.1f} ms more, "
            )
        size = format_size(r.disk.block_bytes)
        text = (
            f"Measured now: {computing}the disk gives {r.disk.bytes_per_second / 1e6:.0f} MB/s in"
            f" reads of {size}{how}. The estimate assumes that half of the reads overlap with"
            " computing."
        )
        console.print()
        console.print(text, style="dim", markup=False)


def speed_of(r: Report, row: MemoryOption) -> str:
    """Return the expected tokens per second with "about" or "at most", empty if
    unknown.
    """
    return "" if row.tps is None else f"{_qualifier(r)} {_rate(row.tps)}"


def _answer(r: Report, row: MemoryOption) -> str:
    budget = format_size(row.memory_bytes)
    if not row.fits:
        return (
            f"{budget} is too small at a context of {r.ctx_size}: needs"
            f" {format_size(r.floor_bytes)}"
        )
    speed = f", {rate} tokens/s" if (rate := speed_of(r, row)) else ""
    full_speed = f", {_rate(row.full_tps)} tokens/s" if row.full_tps else ""
    full = f"; at a depth of {r.ctx_size:,} tokens {row.full_resident_share:.0%}{full_speed}"
    experts = f"{row.resident_share:.0%} of the experts in memory"
    return f"{budget} is enough at a context of {r.ctx_size}: {experts}{speed}{full}"
