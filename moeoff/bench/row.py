"""A line of results: one test of one configuration. llama-bench's names for what llama-bench has."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from .. import __version__
from ..engine.strategy import get_strategy
from ..gguf.layout import Layout
from ..machine import cpu_name, n_cores
from .job import MOEOFF, Measurement, Sample

STOCK_NAME = "stock llama.cpp"


@dataclass(frozen=True)
class Row:
    """Sizes in bytes, times in nanoseconds or as their name says, rates per second.

    Attributes:
        memory: the bound of the process; of stock in a cgroup that of the cgroup; 0: none.
        strategy: or "stock llama.cpp".
        avg_ts, stddev_ts: tokens per second over the repetitions.
        mb_per_token: read from disk, in 10^6 bytes; of stock unknown, as other fields about experts: None.
        vram, vram_mode: the bound of each GPU's memory, as it was given, and how it computes with experts; empty: no experts there.
        hit_rate: of the slices that routers selected, those that were in memory; device_hit_rate: those that a GPU held.
        stall_share: of the time, in which compute waited for bytes.
        disk_mb_s: what the disk gave when it was asked for nothing else, measured right after the run.
        ceiling_share: the longer one of computing alone and of reading alone at that rate, or what the run itself got if that was more, over the
            time that was taken.
        peak_rss: of the process.
        mode: how it ran, in words.
        error: why there are no samples, or fewer; empty: nothing went wrong.
    """

    build: str
    cpu_info: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_threads: int
    n_batch: int | None
    n_ubatch: int | None
    type_k: str
    type_v: str
    flash_attn: bool
    n_gpu_layers: int
    vram: str
    vram_mode: str
    memory: int
    strategy: str
    n_lanes: int | None
    n_prompt: int
    n_gen: int
    n_depth: int
    test: str
    test_time: str
    avg_ns: float | None
    stddev_ns: float | None
    avg_ts: float | None
    stddev_ts: float | None
    mb_per_token: float | None
    hit_rate: float | None
    device_hit_rate: float | None
    stall_share: float | None
    disk_mb_s: float | None
    ceiling_share: float | None
    cpu_ms_per_token: float | None
    driver_ms_per_token: float | None
    arena: int | None
    peak_rss: int | None
    mode: str
    error: str = ""
    samples_ns: list[float] = field(default_factory=list)
    samples_ts: list[float] = field(default_factory=list)


def rows(done: Measurement, memory: int, note: str = "") -> list[Row]:
    """A row for each test of a job.

    Args:
        memory: the bound, 0 for none.
        note: about the surroundings, for `mode`.
    """
    return [_row(done, index, memory, note) for index in range(len(done.job.tests))]


def _row(done: Measurement, index: int, memory: int, note: str) -> Row:
    job, test, samples = done.job, done.job.tests[index], done.of(index)
    ours, options, facts = job.engine == MOEOFF, job.options, model_facts(job.model)
    speeds, times = [s.tps for s in samples], [1e9 * s.seconds for s in samples]
    n, seconds = sum(s.n_tokens for s in samples), sum(s.seconds for s in samples)
    uses = sum(s.hits + s.misses for s in samples)
    disk = done.closed.get("disk_bytes_per_second")
    expert_facts = bool(ours and n and seconds)
    return Row(
        build=f"moeoff {__version__}",
        cpu_info=cpu_name(),
        model_filename=job.model,
        **facts,
        n_threads=options.get("n_threads") or n_cores(),
        n_batch=options.get("n_batch"),
        n_ubatch=done.opened.get("micro_batch") or options.get("n_ubatch"),
        type_k=str(options.get("type_k") or "f16"),
        type_v=str(options.get("type_v") or "f16"),
        flash_attn=bool(options.get("flash_attn")),
        n_gpu_layers=int(options.get("n_gpu_layers", 0)),
        vram=str(options.get("vram") or "") if ours else "",
        vram_mode=str(options.get("vram_mode") or get_strategy(options.get("strategy") or "auto").vram_mode) if ours and options.get("vram") else "",
        memory=done.opened.get("budget_bytes") or memory,
        strategy=done.opened.get("strategy", str(options.get("strategy", "auto"))) if ours else STOCK_NAME,
        n_lanes=done.opened.get("n_lanes"),
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.depth,
        test=test.name,
        test_time=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        avg_ns=statistics.fmean(times) if times else None,
        stddev_ns=_deviation(times),
        avg_ts=statistics.fmean(speeds) if speeds else None,
        stddev_ts=_deviation(speeds),
        mb_per_token=sum(s.bytes_read for s in samples) / 1e6 / n if expert_facts else None,
        hit_rate=sum(s.hits for s in samples) / uses if uses else None,
        device_hit_rate=sum(s.device_hits for s in samples) / uses if uses and options.get("vram") else None,
        stall_share=sum(s.stall_seconds for s in samples) / seconds if expert_facts else None,
        disk_mb_s=disk / 1e6 if disk else None,
        ceiling_share=ceiling_share(samples, disk) if expert_facts and disk else None,
        cpu_ms_per_token=1e3 * sum(s.cpu_seconds for s in samples) / n if n else None,
        driver_ms_per_token=1e3 * sum(s.driver_seconds for s in samples) / n if expert_facts else None,
        arena=done.opened.get("arena_bytes"),
        peak_rss=done.closed.get("peak_rss_bytes"),
        mode=_mode(done, note),
        error=done.error or _cut(samples, job.repetitions, test.n_tokens),
        samples_ns=times,
        samples_ts=speeds,
    )


def ceiling_share(samples: list[Sample], disk: float) -> float:
    """max(computing, reading) / time: what is left to win by overlapping both is what is missing to 1, at most 1.

    Args:
        disk: bytes per second that it gave beside the run. A disk that gave the run more, in a burst, can give that.
    """
    seconds = sum(s.seconds for s in samples)
    compute = seconds - sum(s.stall_seconds for s in samples)
    rate = max([disk, *(s.bytes_read / s.seconds for s in samples if s.seconds)])
    return max(compute, sum(s.bytes_read for s in samples) / rate) / seconds


def _deviation(values: list[float]) -> float | None:
    """llama-bench's: of a sample; of one value 0."""
    return (statistics.stdev(values) if len(values) > 1 else 0.0) if values else None


def _cut(samples: list[Sample], repetitions: int, n_tokens: int) -> str:
    if len(samples) == repetitions and all(s.n_tokens == n_tokens for s in samples):
        return ""
    return f"cut off after {sum(s.n_tokens for s in samples)} tokens" if samples else "nothing was measured"


def _mode(done: Measurement, note: str) -> str:
    """How the run went about its work, in words."""
    job, closed, opened = done.job, done.closed, done.opened
    if job.engine != MOEOFF:
        parts = ["memory map" if job.options.get("use_mmap", True) else "read into memory"]
        parts.append("repacked kernels" if job.options.get("use_extra_bufts", True) else "plain kernels")
        return ", ".join([*parts, *([note] if note else [])])
    if not closed:
        return note
    parts = [f"{'direct reads' if closed['direct_io'] else 'reads through the page cache'} by {opened['n_lanes']} I/O workers"]
    parts.append(f"{opened['resident_share']:.0%} of the experts fit")
    tier = opened["tier"]
    parts.append("own precision" if tier == "keep" and not closed["precision_summary"] else closed["precision_summary"] or f"all experts in {tier}")
    if closed["prefetch_on"] is not None:
        gain = closed["prefetch_gain"]
        parts.append(f"prefetching {'on' if closed['prefetch_on'] else 'off'}" + (f" ({gain:+.1%} when compared)" if gain is not None else ""))
    parts.append(f"micro-batch {opened['micro_batch']} ({opened['micro_batch_reason']})")
    parts += [part for part in (opened["settings"], note) if part]
    return ", ".join(parts)


@lru_cache(maxsize=8)
def model_facts(path: str) -> dict[str, Any]:
    """model_type, model_size and model_n_params of a file."""
    layout = Layout.read(path)
    spans = [*layout.experts.values(), *layout.dense.values()]
    n_params = sum(math.prod(max(n, 1) for n in span.shape) for span in spans)
    used = f", top {layout.n_expert_used}" if layout.n_expert_used else ""
    kind = f"{layout.architecture} {layout.n_layer} x {layout.n_expert}{used}"
    return {"model_type": kind, "model_size": sum(span.nbytes for span in spans), "model_n_params": n_params}
