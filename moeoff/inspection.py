"""`moeoff inspect`: what a GGUF holds, what it takes, what more memory buys.

Reads headers, and for the disk probe a sample of the file; loads nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from .budget.footprint import Footprint, SliceKind, expected_bytes, slice_kinds
from .disk import DiskRate, probe
from .engine.open import DEFAULT_CTX
from .gguf.layout import Layout
from .memory import MIB, available, format_size

PROBE_SECONDS = 2.0
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
# Overlap of reading and computing is not perfect: at 38 % of the experts the reference model made 68 % of the disk's rate.
OVERLAP = 0.6


@dataclass(frozen=True)
class MemoryOption:
    """What `--memory` of so many bytes buys.

    Attributes:
        resident_share: of the experts' bytes.
        tps_low, tps_high: tokens per second as the disk allows them, see `speed`; None if nothing is missed or it was not probed.
    """

    memory_bytes: int
    resident_share: float
    tps_low: float | None
    tps_high: float | None


@dataclass(frozen=True)
class Report:
    """The fields of --json. Sizes in bytes, rates per second."""

    files: tuple[str, ...]
    architecture: str
    n_layer: int
    n_moe_layer: int
    n_expert: int
    n_expert_used: int
    n_expert_shared: int
    n_ctx_train: int
    dense_bytes: int
    expert_bytes: int
    token_bytes: int
    slices: tuple[SliceKind, ...]
    ctx_size: int
    kv_bytes: int
    kv_exact: bool
    compute_bytes: int
    process_bytes: int
    arena_floor_bytes: int
    arena_full_bytes: int
    floor_bytes: int
    available_bytes: int
    disk: DiskRate | None
    budgets: tuple[MemoryOption, ...]


def speed(token_bytes: int, resident_share: float, bytes_per_second: float) -> tuple[float | None, float | None]:
    """Tokens per second if the disk is what limits: rate / (bytes of a token's slices * share of them that is missed).

    The slow end assumes that every expert is as likely as any other (misses = 1 - share) and that 60 % of the disk's rate is
    reached; the fast end that tokens come back to their experts as in the reference model under LRU, (1 - share) squared, and
    the full rate. Compute is left out of both: it may be what limits.
    """
    missed = 1.0 - resident_share
    if missed <= 0 or not token_bytes:
        return None, None
    return OVERLAP * bytes_per_second / (token_bytes * missed), bytes_per_second / expected_bytes(token_bytes, resident_share)


def examine(model: str, *, ctx_size: int | None = None, probe_disk: bool = True) -> Report:
    """Everything `moeoff inspect` says.

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts.
        OptionError: the context is impossible.
    """
    layout = Layout.read(model)
    layout.require_experts()
    kinds = slice_kinds(layout)
    size = Footprint.of(layout, ctx_size or min(DEFAULT_CTX, layout.n_ctx_train or DEFAULT_CTX))
    disk = None
    if probe_disk:
        file = next(iter(layout.experts.values())).file
        disk = probe(layout.files[file], max(kind.nbytes for kind in kinds), PROBE_SECONDS)

    budgets = [size.floor] + [math.ceil(size.fixed + share * size.arena_full) for share in SHARES]
    rows = []
    for bound in sorted({-(-bound // MIB) * MIB for bound in budgets if bound >= size.floor}):
        share = size.resident_share(bound)
        low, high = speed(size.token_bytes, share, disk.bytes_per_second) if disk else (None, None)
        rows.append(MemoryOption(bound, round(share, 4), low, high))
    shared = layout.hparams.get("expert_shared_count")
    return Report(
        files=layout.files,
        architecture=layout.architecture,
        n_layer=layout.n_layer,
        n_moe_layer=len({name.split(".")[1] for name in layout.experts}),
        n_expert=layout.n_expert,
        n_expert_used=layout.n_expert_used,
        # some architectures have one shared expert, and no number for it
        n_expert_shared=shared if type(shared) is int else int(any("_shexp" in name for name in layout.dense)),
        n_ctx_train=layout.n_ctx_train,
        dense_bytes=layout.dense_bytes,
        expert_bytes=layout.expert_bytes,
        token_bytes=size.token_bytes,
        slices=tuple(kinds),
        ctx_size=size.n_ctx,
        kv_bytes=size.kv,
        kv_exact=size.kv_exact,
        compute_bytes=size.compute,
        process_bytes=size.process,
        arena_floor_bytes=size.arena_floor,
        arena_full_bytes=size.arena_full,
        floor_bytes=size.floor,
        available_bytes=available(),
        disk=disk,
        budgets=tuple(rows),
    )


def inspect(file: str, *, ctx_size: int | None = None, probe: bool = True, as_json: bool = False) -> Report:
    """Prints what `examine` finds, for people or as JSON; see `moeoff inspect --help`.

    Raises:
        MoeoffError: as `examine`.
    """
    report = examine(file, ctx_size=ctx_size, probe_disk=probe)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return report


def _rate(tps: float) -> str:
    return f"{tps:.0f}" if tps >= 10 else f"{tps:.2g}"


def _print(r: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)

    def table(*columns: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(any(columns)))
        for index, column in enumerate(columns):
            made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        return made

    def line(name: str, text: str) -> None:
        console.print(f"{name:<14}{text}", markup=False, soft_wrap=True)

    line("model", r.files[0] + (f" and {len(r.files) - 1} more" if len(r.files) > 1 else ""))
    line("architecture", f"{r.architecture}, {r.n_layer} layers, {r.n_moe_layer} of them with experts, trained for {r.n_ctx_train or '?'} tokens")
    shared = f", {r.n_expert_shared} shared" if r.n_expert_shared else ""
    line("experts", f"{r.n_expert} a layer, top-{r.n_expert_used}{shared}; a token uses {format_size(r.token_bytes)} of slices")
    line("weights", f"{format_size(r.expert_bytes)} in experts, {format_size(r.dense_bytes)} outside")
    console.print()
    slices = table("slices", "type", "size", "number")
    for kind in r.slices:
        slices.add_row(kind.matrix, kind.type, format_size(kind.nbytes), str(kind.count))
    console.print(slices)
    console.print()

    floor = table(f"needed at a context of {r.ctx_size}", "")
    floor.add_row("weights outside the experts", format_size(r.dense_bytes))
    floor.add_row("KV cache" + ("" if r.kv_exact else " and state (estimate)"), format_size(r.kv_bytes))
    floor.add_row("compute buffers (estimate)", format_size(r.compute_bytes))
    floor.add_row("Python and libraries, reserve", format_size(r.floor_bytes - r.dense_bytes - r.kv_bytes - r.compute_bytes - r.arena_floor_bytes))
    floor.add_row("two slots for slices", format_size(r.arena_floor_bytes))
    floor.add_row("floor", format_size(r.floor_bytes), style="bold")
    floor.add_row("available here", format_size(r.available_bytes))
    console.print(floor)
    console.print()

    bought = table("--memory", "experts resident", *(["tokens/s"] if r.disk else []))
    for row in r.budgets:
        cells = [f"{-(-row.memory_bytes // MIB)}M", f"{row.resident_share:.0%}"]
        if r.disk:
            cells.append("no reads" if row.tps_low is None else f"{_rate(row.tps_low)} to {_rate(row.tps_high)}")
        bought.add_row(*cells)
    console.print(bought)
    if r.disk:
        how = "direct reads" if r.disk.direct_io else "reads through the page cache, which may flatter it"
        text = (
            f"Disk: {r.disk.bytes_per_second / 1e6:.0f} MB/s, {how} of {format_size(r.disk.block_bytes)}. tokens/s = disk rate / (bytes a token uses x "
            "share missed): from 60 % of the rate and experts drawn evenly, to the full rate and tokens that come back to their "
            "experts, misses (1 - resident) squared. What computing takes comes on top."
        )
        console.print()
        console.print(text, style="dim", markup=False)
