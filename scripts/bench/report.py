"""A page about one run whose every gate event and read is recorded: where memory and
time went, by layer, and what more memory would give.

usage: report.py -m MODEL [--memory 6G] [-o page.html]

HTML that needs no network and no script, and can be read on a phone
(report.html.jinja).
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import click
import jinja2
import numpy as np

from moeoff import __version__
from moeoff.budget.dry_load import context_for
from moeoff.cli.options import command, input_files, model_argument, option, table_options
from moeoff.engine.llama import Llama
from moeoff.engine.stats import Stats
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.job import Sample, TokenStream, default_text, read_text_or_default
from moeoff.measure.rows import ceiling_share, model_facts
from moeoff.measure.worker import disk_rate
from moeoff.policies.replay import simulate
from moeoff.routing.trace import PREFETCH_LEVEL, Trace
from moeoff.system.console import note, progress_bar
from moeoff.system.disk import DiskRate
from moeoff.system.files import atomic_file, demo_model, require_new
from moeoff.system.machine import machine_name
from moeoff.system.memory import MIB, format_size

GIB = 1 << 30
_PROBE_SECONDS = 1.0


@dataclass(frozen=True)
class Session:
    """Everything that was recorded of a run.

    Attributes:
        prompt, decode: statistics of the two parts.
        trace: of all events.
        reads: [n] `moeoff.routing.trace.READ` of the single tokens.
        disk: measured right afterwards.
        n_ctx: tokens of the context, and
        needed: the smallest budget at it.
    """

    model_index: ModelIndex
    prompt: Stats
    decode: Stats
    n_tokens: tuple[int, int]
    trace: Trace
    reads: np.ndarray
    disk: DiskRate
    policy: str
    n_ctx: int
    needed: int

    @property
    def seconds(self) -> tuple[float, float]:
        """Inside llama_decode: of the prompt, and of the single tokens."""
        return self.prompt.prompt_seconds, self.decode.gen_seconds

    @property
    def arena(self) -> int:
        return self.decode.cache_bytes


def record(
    model: str, *, memory: str | int | None = None, text: str | None = None, n_prompt: int = 128, n_decode: int = 96,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Session:  # fmt: skip
    """Runs the model.

    Args:
        text: file whose tokens are fed; None: the usual text of measurements.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    model_index = ModelIndex.read(model)
    model_index.require_text()
    words = None if text is None else read_text_or_default(text)
    options = {"n_ctx": context_for(model_index, n_prompt + n_decode)} | options
    with tempfile.TemporaryDirectory(prefix="moeoff-report-") as folder:
        path = os.path.join(folder, "session.trace")
        with Llama(model, memory=memory, trace=path, **options) as llm:
            # the usual text takes memory to be read, and is nobody's mistake: what the
            # model needs is planned without it
            stream = TokenStream(llm, words or default_text(), llm.adds_bos())
            tokens = stream.take(n_prompt + n_decode, first=True)
            llm.eval(tokens[:n_prompt])
            llm.engine.buffer.drain()
            prompt = llm.stats()
            llm.reset_stats()
            for i, token in enumerate(tokens[n_prompt:], 1):
                llm.eval([token])
                if progress:
                    progress("single tokens", i, n_decode)
            llm.engine.buffer.drain()
            decode = llm.stats()
            policy = llm.engine.config.strategy.policy
            policy_name, n_ctx, needed = (
                "lru" if policy is None else policy.name,
                llm.n_ctx(),
                llm.engine.planned.floor,
            )
        trace = Trace.read(path)
    disk = disk_rate(model_index, decode.io_threads, _PROBE_SECONDS)
    start = next((event.t_ns for event in trace.events if event.decode), 0)
    reads = trace.reads[(trace.reads["result"] == 0) & (trace.reads["t_queued"] >= start)]
    return Session(
        model_index,
        prompt,
        decode,
        (n_prompt, n_decode),
        trace,
        reads,
        disk,
        policy_name,
        n_ctx,
        needed,
    )


def render(session: Session) -> str:
    """HTML of a recorded session."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["size"] = format_size
    template = environment.from_string(
        Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    )
    path, n, seconds, more = (
        session.model_index.files[0],
        session.n_tokens,
        session.seconds,
        more_memory(session),
    )
    return template.render(
        version=__version__, date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), machine=machine_name(), model=os.path.basename(path),
        facts=model_facts(path), s=session, prompt_tps=n[0] / seconds[0] if seconds[0] else 0.0, tps=n[1] / seconds[1],
        mb_per_token=session.decode.bytes_read / 1e6 / n[1], ceiling=ceiling(session), memory=memory_parts(session), time=time_parts(session),
        layers=layers(session), more=more, advice=advice(more),
    )  # fmt: skip


_SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)  # of all experts in memory


class Part(NamedTuple):
    """A part of a whole: of memory, say."""

    name: str
    value: float
    text: str


class LayerUse(NamedTuple):
    """One layer, over the single tokens: hit rate of slices; bytes read for each token,
    and those of them that were prefetched.
    """

    layer: int
    hit_rate: float
    nbytes: float
    prefetched: float


class MoreMemory(NamedTuple):
    """A run as it would be with this share of all experts in memory, or (here) was; the
    process's bound in bytes, 0 where only the experts are bounded.
    """

    share: float
    memory: int
    hit_rate: float
    mb_per_token: float
    tps: float
    here: bool = False


_MEMORY = {
    "experts": "experts",
    "weights": "other weights",
    "row_cache": "rows of tables on disk",
    "token_embedding": "token embedding",
    "state": "KV cache and state",
    "compute_buffers": "compute buffers",
    "work_area": "work area",
    "outputs": "outputs",
    "python": "Python and libraries",
    "extras": "samplers and chat templates",
    "reserve": "reserve",
}


def memory_parts(session: Session) -> list[Part]:
    """Memory that the process holds or plans for, the largest first."""
    items = sorted(session.decode.memory.items(), key=lambda item: -item[1])
    return [
        Part(_MEMORY.get(name, name), nbytes, format_size(nbytes))
        for name, nbytes in items
        if nbytes
    ]


def time_parts(session: Session) -> list[Part]:
    """A token's milliseconds: computing, and waiting for bytes."""
    n, seconds = session.n_tokens[1], session.seconds[1]
    stall = min(session.decode.stall_seconds, seconds)
    return [
        Part(name, ms, f"{ms:.1f} ms")
        for name, ms in (
            ("computing", 1e3 * (seconds - stall) / n),
            ("waiting for experts", 1e3 * stall / n),
        )
    ]


def ceiling(session: Session) -> float:
    """`moeoff.measure.rows.ceiling_share` of the single tokens."""
    counters = {
        "bytes_read": session.decode.bytes_read,
        "stall_seconds": session.decode.stall_seconds,
    }
    return ceiling_share(
        [Sample(0, session.n_tokens[1], session.seconds[1], counters=counters)],
        session.disk.bytes_per_second,
    )


def layers(session: Session) -> list[LayerUse]:
    trace, n = session.trace, session.n_tokens[1]
    hits, misses = np.zeros(trace.model.n_gates), np.zeros(trace.model.n_gates)
    for event in trace.events:
        if event.decode:
            hits[event.gate] += event.n_hit
            misses[event.gate] += event.n_miss
    gates = np.array([t.gate for t in trace.model.tensors])
    of_read = gates[session.reads["tensor"]]
    nbytes = np.bincount(of_read, session.reads["nbytes"], trace.model.n_gates)
    early = session.reads["level"] == PREFETCH_LEVEL
    prefetched = np.bincount(of_read[early], session.reads["nbytes"][early], trace.model.n_gates)
    layer = {t.gate: t.layer for t in trace.model.tensors}
    uses = np.maximum(hits + misses, 1)
    return [
        LayerUse(layer[g], float(hits[g] / uses[g]), float(nbytes[g] / n), float(prefetched[g] / n))
        for g in range(trace.model.n_gates)
    ]


def more_memory(session: Session) -> list[MoreMemory]:
    """By replaying the recorded selections through the policy with other arenas.

    Bytes are those that were read here, times what the replay says of the one size
    against the other; the time is computing, which stays, and waiting, which shrinks as
    the bytes do.
    """
    trace, full = session.trace, session.trace.model.full_bytes
    n, seconds = session.n_tokens[1], session.seconds[1]
    stall, mb = session.decode.stall_seconds, session.decode.bytes_read / 1e6 / n
    floor = trace.model.arena_floor
    rest = session.decode.budget_bytes - session.arena if session.decode.budget_bytes else 0

    here = min(session.arena, full)
    replayed = simulate(trace, session.policy, here)
    out = [
        MoreMemory(
            here / full, session.decode.budget_bytes, session.decode.hit_rate, mb, n / seconds, True
        )
    ]
    for share in _SHARES:
        arena = int(share * full)
        if (
            arena < floor
            or (rest and rest + arena < session.needed)
            or abs(share - here / full) < 0.02
        ):
            continue
        # with everything in memory a replay would still read each slice once
        ratio, hit_rate = 0.0, 1.0
        if share < 1:
            result = simulate(trace, session.policy, arena)
            ratio = (
                result.bytes_read / replayed.bytes_read
                if replayed.bytes_read
                else float(share < here / full)
            )
            hit_rate = 1 - (1 - session.decode.hit_rate) * (1 - result.hit_rate) / max(
                1 - replayed.hit_rate, 1e-9
            )
        out.append(
            MoreMemory(
                share,
                rest + arena if rest else 0,
                min(max(hit_rate, 0.0), 1.0),
                mb * ratio,
                n / (seconds - stall + stall * ratio),
            )
        )
    return sorted(out, key=lambda row: row.share)


_WORTH = 1.15  # times the speed that more memory is advised for


def advice(rows: list[MoreMemory]) -> str:
    """Advice in one sentence: the least memory that is worth it; or that more gives
    little.
    """
    here = next(row for row in rows if row.here)
    best = max(row.tps for row in rows)
    if best < _WORTH * here.tps:
        return "More memory would give little: it is computing that takes the time."
    row = next(
        row
        for row in rows
        if row.tps >= min(1.5 * here.tps, 0.95 * best) and row.share > here.share
    )
    if row.memory:
        return (
            f"With --memory {_typed(row.memory)} instead of {_typed(here.memory)}: about"
            f" {row.tps / here.tps:.1f} x as fast."
        )
    return (
        f"With {row.share:.0%} of the experts in memory instead of {here.share:.0%}: about"
        f" {row.tps / here.tps:.1f} x as fast."
    )


def _typed(nbytes: int) -> str:
    """A budget as people type it, at least as large: 8G, 6.5G, 760M."""
    return f"{math.ceil(nbytes / (GIB / 10)) / 10:g}G" if nbytes >= GIB else f"{-(-nbytes // MIB)}M"


@command()
@model_argument()
@option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    default="moeoff-report.html",
    show_default=True,
    metavar="FILE",
    help="Page to write.",
)
@option(
    "--text",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Text to process. Default: the help texts of Python.",
)
@option(
    "-p",
    "--n-prompt",
    type=click.IntRange(min=1),
    metavar="N",
    default=128,
    show_default=True,
    help="Tokens of the prompt.",
)
@option(
    "-n",
    "--n-gen",
    "n_decode",
    type=click.IntRange(min=8),
    metavar="N",
    default=96,
    show_default=True,
    help="Tokens after it, one by one.",
)
@table_options("eval")
def main(
    output: str, model: str | None, text: str | None, n_prompt: int, n_decode: int, **options: Any
) -> None:
    """Run a model and write a page about it: where memory and time went, by layer and
    by token, and what more memory would give.
    """
    require_new(output, [*input_files(model, options), text], "--output")
    with progress_bar("tokens") as progress:
        session = record(
            model or demo_model(),
            text=text,
            n_prompt=n_prompt,
            n_decode=n_decode,
            progress=progress,
            **options,
        )
    with atomic_file(output) as file:
        file.write(render(session).encode())
    note(f"{output}: open it in a browser; it needs no network")


if __name__ == "__main__":
    main()
