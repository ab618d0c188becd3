"""Benchmark results as rows with llama-bench's names, written as md, csv or json."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any

from .. import __version__
from ..gguf.model_index import ModelIndex
from ..policies import get_strategy
from ..system.console import wrapped
from ..system.machine import cpu_name, n_cores
from ..system.memory import format_size
from .job import MOEOFF, Job, Measurement, Sample, rates
from .rounds import Spread

# with repacked kernels (default), and with those that moeoff is bit-identical to
STOCK_NAME, PLAIN_NAME = "stock llama.cpp", "stock, plain"

Row = dict[str, Any]  # fields of `rows` in csv's order


def rows(result: Measurement, memory: int, note: str = "") -> list[Row]:
    """Return a row for each test of a job. Sizes are in bytes, None means unknown.

    Args:
        memory: Memory limit in bytes, 0 for none.
        note: Remark on the environment, for `mode`.

    Returns:
        memory: Limit of the process, or of stock's cgroup. 0: none.
        strategy: Strategy, "stock llama.cpp" or "stock, plain" (without repacking).
        avg_ns, stddev_ns: Nanoseconds of a repetition.
        avg_ts, stddev_ts: Tokens per second.
        mb_per_token: 10^6 bytes read for each token. None for stock, as all about
            experts.
        vram, vram_mode: Limit on each GPU's memory as given, and mode. Empty: no
            experts there.
        hit_rate, device_hit_rate: Share of routed slices found in memory, and on a GPU.
        stall_share: Share of the time in which compute waited for the disk.
        disk_mb_s: Rate of the disk alone, right after the run.
        ceiling_share: See `ceiling_share`.
        mode: Description of the run.
        error: Reason for missing samples, or "".
        samples_ratio: Speeds over the first job's of the same round, with rounds only.
    """
    return [_row(result, index, memory, note) for index in range(len(result.job.tests))]


def _row(result: Measurement, index: int, memory: int, note: str) -> Row:
    job, test, samples = result.job, result.job.tests[index], result.of(index)
    ours, options, opened = job.engine == MOEOFF, job.options, result.opened
    speeds, times = [s.tps for s in samples], [1e9 * s.seconds for s in samples]
    figures, disk = rates(samples), result.closed.get("disk_bytes_per_second")
    name, vram = str(options.get("strategy") or "auto"), str(ours and options.get("vram") or "")
    return {
        "build": f"moeoff {__version__}",
        "cpu_info": cpu_name(),
        "model_filename": job.model,
        **model_facts(job.model),
        "n_threads": options.get("n_threads") or n_cores(),
        "n_batch": options.get("n_batch"),
        "n_ubatch": opened.get("micro_batch") or options.get("n_ubatch"),
        "type_k": str(options.get("type_k") or "f16"),
        "type_v": str(options.get("type_v") or "f16"),
        "flash_attn": bool(options.get("flash_attn", ours)),
        "n_gpu_layers": int(options.get("n_gpu_layers", 0)),
        "vram": vram,
        "vram_mode": str(options.get("vram_mode") or get_strategy(name).vram_mode) if vram else "",
        "memory": opened.get("budget_bytes") or memory,
        "strategy": opened.get("strategy", name) if ours else _stock_name(job),
        "io_threads": result.closed.get("io_threads"),
        "n_ctx": opened.get("n_ctx") or options.get("n_ctx"),
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.depth,
        "test": test.name,
        "test_time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": statistics.fmean(times) if times else None,
        "stddev_ns": _deviation(times),
        "avg_ts": statistics.fmean(speeds) if speeds else None,
        "stddev_ts": _deviation(speeds),
        "mb_per_token": figures.get("mb_per_token"),
        "hit_rate": figures.get("hit_rate"),
        "device_hit_rate": figures.get("device_hit_rate") if options.get("vram") else None,
        "stall_share": figures.get("stall_share"),
        "disk_mb_s": disk / 1e6 if disk else None,
        "ceiling_share": (
            ceiling_share(samples, disk) if "stall_share" in figures and disk else None
        ),
        "cpu_ms_per_token": figures.get("cpu_ms_per_token"),
        "driver_ms_per_token": figures.get("driver_ms_per_token"),
        "arena": opened.get("cache_bytes"),
        "peak_rss": result.closed.get("peak_rss_bytes"),
        "mode": _mode(result, note),
        "error": result.error or _cut(samples, job.repetitions, test.n_tokens),
        "samples_ns": times,
        "samples_ts": speeds,
    }


def _stock_name(job: Job) -> str:
    return STOCK_NAME if job.options.get("use_extra_bufts", True) else PLAIN_NAME


def ceiling_share(samples: list[Sample], disk: float) -> float:
    """Return max(computing, reading) / time. 1 means perfect overlap of both.

    Args:
        disk: Bytes per second of the disk alone, unless a repetition had more.
    """
    seconds = sum(s.seconds for s in samples)
    nbytes = sum(s.counters["bytes_read"] for s in samples)
    compute = seconds - sum(s.counters["stall_seconds"] for s in samples)
    rate = max([disk, *(s.counters["bytes_read"] / s.seconds for s in samples if s.seconds)])
    return max(compute, nbytes / rate) / seconds


def _deviation(values: list[float]) -> float | None:
    """Return the sample standard deviation as llama-bench does: 0 for one value."""
    return (statistics.stdev(values) if len(values) > 1 else 0.0) if values else None


def _cut(samples: list[Sample], repetitions: int, n_tokens: int) -> str:
    if len(samples) == repetitions and all(s.n_tokens == n_tokens for s in samples):
        return ""
    return (
        f"cut off after {sum(s.n_tokens for s in samples)} tokens"
        if samples
        else "nothing was measured"
    )


def _mode(result: Measurement, note: str) -> str:
    job, closed, opened = result.job, result.closed, result.opened
    if job.engine != MOEOFF:
        loaded = "memory map" if job.options.get("use_mmap", True) else "read into memory"
        kernels = "repacked kernels" if _stock_name(job) == STOCK_NAME else "plain kernels"
        return ", ".join(filter(None, [loaded, kernels, note]))
    if "direct_io" not in closed:  # the process died; `closed` may still have its cgroup's peak
        return note
    parts = [
        f"{'direct reads' if closed['direct_io'] else 'reads through the page cache'} by"
        f" {closed['io_threads']} I/O threads"
    ]
    parts.append(
        f"{closed['resident_share']:.0%} of the experts fit at a context of {opened['n_ctx']}"
    )
    tier = opened["tier"]
    parts.append(
        "own precision"
        if tier == "original" and not closed["precision_summary"]
        else closed["precision_summary"] or f"all experts in {tier}"
    )
    if closed["prefetch_on"] is not None:
        gain = closed["prefetch_gain"]
        parts.append(
            f"prefetching {'on' if closed['prefetch_on'] else 'off'}"
            + (f" ({gain:+.1%} when compared)" if gain is not None else "")
        )
    parts.append(f"micro-batch {opened['micro_batch']} ({opened['micro_batch_reason']})")
    return ", ".join(filter(None, [*parts, note]))


@lru_cache(maxsize=8)
def model_facts(path: str) -> dict[str, Any]:
    """Return model_type, model_size and model_n_params of a file."""
    model_index = ModelIndex.read(path)
    spans = [*model_index.experts.values(), *model_index.dense.values()]
    n_params = sum(math.prod(max(n, 1) for n in span.shape) for span in spans)
    used = f", top {model_index.n_expert_used}" if model_index.n_expert_used else ""
    kind = f"{model_index.architecture} {model_index.n_layer} x {model_index.n_expert}{used}"
    return {
        "model_type": kind,
        "model_size": sum(span.nbytes for span in spans),
        "model_n_params": n_params,
    }


Configurations = Iterable[Sequence[Row]]  # rows of each configuration, as they are measured


def as_json(configurations: Configurations, varied: Collection[str] = ()) -> Iterator[str]:
    """Yield one JSON array."""
    between = "[\n"
    for row in itertools.chain.from_iterable(configurations):
        yield between + json.dumps(row, indent=2)
        between = ",\n"
    yield "\n]\n" if between != "[\n" else "[]\n"


def as_csv(configurations: Configurations, varied: Collection[str] = ()) -> Iterator[str]:
    """Yield a line of names, and a line for each row."""
    for i, row in enumerate(itertools.chain.from_iterable(configurations)):
        cells = {
            name: "" if value is None else value
            for name, value in row.items()
            if not name.startswith("samples_")
        }
        lines = io.StringIO()
        writer = csv.writer(lines, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writerows([cells, cells.values()][i > 0 :])
        yield lines.getvalue()


def _speed(row: Row) -> str:
    if row["avg_ts"] is None:
        return "-"
    digits = 2 if row["avg_ts"] < 1000 else 1
    return f"{row['avg_ts']:.{digits}f} ± {row['stddev_ts']:.{digits}f}"


def _spread(name: str, row: Row) -> str:
    """Return the median and the range of a row's values."""
    if not row[name]:
        return "-"
    middle, *ends = Spread.over(row[name])
    digits = 2 if ends[1] < 100 else 0
    return f"{middle:.{digits}f} ({' to '.join(f'{end:.{digits}f}' for end in ends)})"


# field (or "": the row), title, width (negative: left-aligned), format
_Column = tuple[str, str, int, Callable[[Any], str]]
_ALWAYS: list[_Column] = [
    ("memory", "memory", 10, lambda size: format_size(size) if size else "no limit"),
    ("strategy", "strategy", -15, str),
]
_IF_VARIED: list[_Column] = [
    ("n_threads", "n_threads", 7, str),
    ("n_batch", "n_batch", 7, str),
    ("n_ubatch", "n_ubatch", 8, str),
    ("type_k", "type_k", 6, str),
    ("type_v", "type_v", 6, str),
    ("flash_attn", "flash_attn", 10, lambda on: str(int(on))),
    ("n_gpu_layers", "n_gpu_layers", 12, str),
    ("vram", "vram", 6, str),
    ("vram_mode", "vram_mode", 11, str),
    ("device_hit_rate", "on GPU", 7, "{:.1%}".format),
    ("io_threads", "io_threads", 7, str),
]
_RESULTS: list[_Column] = [
    ("test", "test", 8, str),
    ("", "t/s", 16, _speed),
    ("mb_per_token", "MB/tok", 6, "{:.1f}".format),
    ("hit_rate", "hits", 6, "{:.1%}".format),
]
_ROUNDS: list[_Column] = [  # in the place of t/s
    ("", "t/s", 24, partial(_spread, "samples_ts")),
    ("", "ratio", 20, partial(_spread, "samples_ratio")),
]


def as_markdown(configurations: Configurations, varied: Collection[str] = ()) -> Iterator[str]:
    """Yield a table of 80 columns, by configuration, and notes on the runs.

    Args:
        varied: Options that were given, which get a column, or replace t/s ("rounds").
    """
    varied = {*varied, *(["device_hit_rate"] if "vram" in varied else [])}
    columns = [*_ALWAYS, *(column for column in _IF_VARIED if column[0] in varied)]
    columns += [_RESULTS[0], *_ROUNDS, *_RESULTS[2:]] if "rounds" in varied else _RESULTS
    rules = ["-" * (abs(width) + 1) + (":" if width > 0 else "-") for _, _, width, _ in columns]
    yield (
        f"| {' | '.join(_cell(title, width) for _, title, width, _ in columns)}"
        f" |\n|{'|'.join(rules)}|\n"
    )
    notes, model = list[str](), ""
    for rows in configurations:
        out = ""
        for row in rows:
            what = (
                f"{row['model_type']}, {format_size(row['model_size'])},"
                f" {row['model_n_params'] / 1e9:.2f} B parameters, {row['n_threads']} threads"
            )
            if what != model:
                out += f"{what}:\n" if model else ""
                model = what
                notes.append(f"model: {what}")
            cells = [
                (row if not name else row[name], width, value) for name, _, width, value in columns
            ]
            texts = (_cell("" if x is None else value(x), width) for x, width, value in cells)
            out += f"| {' | '.join(texts)} |\n"
            if row["error"] and not any(row["error"] in note for note in notes[-len(rows) :]):
                notes.append(f"{_title(row)}, {row['test']}: {row['error']}")
        if rows and rows[0]["mode"]:
            notes.append(f"mode: {_title(rows[0])}: {rows[0]['mode']}")
        yield out
    yield "\n" + "".join(wrapped(note, "    ") + "\n" for note in notes)


OUTPUT_FORMATS = {"md": as_markdown, "csv": as_csv, "json": as_json}


def _title(row: Row) -> str:
    return (
        f"{row['strategy']}, {format_size(row['memory'])}"
        if row["memory"]
        else str(row["strategy"])
    )


def _cell(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)
