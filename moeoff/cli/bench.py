"""`moeoff bench`."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..atomic_file import atomic_file
from ..console import remark
from ..errors import OptionError
from ..memory import parse_size
from ..paths import demo_model
from .llama_options import llama_arguments
from .options import CONTEXT, companion, one_sentence

if TYPE_CHECKING:
    from ..bench.job import BenchTest, Job
    from ..bench.process import Listener
    from ..bench.row import Row

_FORMATS = click.Choice(["md", "csv", "json", "jsonl", "sql"])
_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")
_LONGEST_RANGE = 1000


def numbers(least: int, most: float = math.inf) -> Callable[[str], list[int]]:
    """Reads numbers as llama-bench takes them: 512, or 128,256, or 1-8, 128-1024*2, 0-4096+1024. Raises ValueError."""

    def read(text: str) -> list[int]:
        out: list[int] = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part.strip())
            if match:
                out += _range(int(match[1]), int(match[2]), match[3] or "+", int(match[4] or 1))
            else:
                out.append(int(part))
        if not out or min(out) < least or max(out) > most:
            raise ValueError
        return out

    return read


def _range(first: int, last: int, step: str, by: int) -> list[int]:
    out: list[int] = []
    n = first
    while n <= last and len(out) < _LONGEST_RANGE:
        out.append(n)
        following = n * by if step == "*" else n + by
        if following <= n:
            break
        n = following
    return out


def words(text: str) -> list[str]:
    """Reads values between commas. Raises ValueError if one is empty."""
    out = [part.strip() for part in text.split(",")]
    if not all(out):
        raise ValueError
    return out


def pair(text: str) -> list[tuple[int, int]]:
    """Reads PP,TG. Raises ValueError."""
    prompt, single = (int(part) for part in text.split(","))
    if min(prompt, single) < 0 or not prompt + single:
        raise ValueError
    return [(prompt, single)]


def _several(*names: str, read: Callable[[str], list[Any]], help: str, metavar: str = "N,...") -> Callable[[Any], Any]:
    """An option that may be repeated, each time with several values."""

    def callback(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[Any]:
        out: list[Any] = []
        for value in values:
            try:
                out += read(value)
            except ValueError:
                raise click.BadParameter(f"{value!r} is not {metavar}", context, parameter) from None
        return list(dict.fromkeys(out))

    return click.option(*names, multiple=True, metavar=metavar, callback=callback, help=help)


@click.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), multiple=True, help="GGUF with routed experts; may be repeated. Default: the demo model.")
@_several("-p", "--n-prompt", read=numbers(0), help="Tokens of a prompt, 0 for no such test. Default: 512.")
@_several("-n", "--n-gen", read=numbers(0), help="Tokens that are decoded one by one, 0 for no such test. Default: 128.")
@_several("-pg", read=pair, metavar="PP,TG", help="A prompt and then single tokens, timed together.")
@_several("-d", "--n-depth", read=numbers(0), help="Tokens that the context holds before. Default: 0.")
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Repetitions of each test, each on another piece of text.")
@_several("--memory", read=words, metavar="A,...", help="Bounds of the process, as 4G,6G,80%. Default: 80% of what is available.")
@_several("--strategy", read=words, metavar="A,...", help="Strategies, as auto,lru. Default: what tune found, or auto.")
@_several("-t", "--threads", read=numbers(1), help="Compute threads. Default: every core this process may use.")
@_several("--io-workers", read=numbers(1), help="Threads that read experts. Default: what tune found, or 4.")
@_several("-b", "--batch-size", read=numbers(1), help="Tokens of a prompt given to llama.cpp at once. Default: as -ub.")
@_several("-ub", "--ubatch-size", read=numbers(1), help="Tokens computed at once. Default: 512, or what memory and the disk make faster.")
@_several("-ctk", "--cache-type-k", read=words, metavar="A,...", help="Types of the KV cache's keys. Default: f16.")
@_several("-ctv", "--cache-type-v", read=words, metavar="A,...", help="Types of the KV cache's values. Default: f16.")
@_several("-fa", "--flash-attn", read=numbers(0, 1), metavar="0,1", help="Flash attention, 0 or 1. Default: 1.")
@_several("-ngl", "--n-gpu-layers", read=numbers(0), help="Layers whose dense part goes to the GPU. Default: 0.")
@_several("--vram", read=words, metavar="A,...", help="Bounds of what is allocated on each GPU, as 8G,80%. Default: no experts there.")
@_several("--vram-mode", read=words, metavar="A,...", help="How a GPU computes with experts: auto, cooperative, centric, waves, cpu. Default: auto.")
@click.option("-c", "--ctx-size", type=click.IntRange(min=8), help="Context in tokens. Default: what the largest test needs.")
@click.option("--experts", type=click.Path(dir_okay=False), metavar="FILE", help="Companion written by moeoff convert. Default: MODEL.experts.gguf.")
@click.option("--no-experts", is_flag=True, help="Do not use the companion beside the model.")
@click.option("--tier", metavar="NAME", help="Precision of the companion to run with, as Q2_K. Default: the model's own.")
@click.option("--max-loss", metavar="PERCENT", help="Use the lower precision that was measured to cost at most this, as 1%. Default: lossless.")
@click.option("--no-profile", is_flag=True, help="Do not use the profile beside the model.")
@click.option("--no-settings", is_flag=True, help="Do not use the settings that tune has left beside the model.")
@click.option("--text", type=click.Path(dir_okay=False), metavar="FILE", help="Text whose tokens are fed. Default: the help texts of Python itself.")
@click.option("--compare-stock", is_flag=True, help="Stock llama.cpp, too, both in a memory cgroup of the bound where one can be made.")
@click.option("--no-warmup", is_flag=True, help="Count the first run of each test, too.")
@click.option("-o", "--output", type=_FORMATS, default="md", show_default=True, help="Form of the results on stdout.")
@click.option("-oe", "--output-err", type=_FORMATS, help="The same on stderr, in another form.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw tokens per second over memory into an SVG or PNG.")
@click.option("--report", type=click.Path(dir_okay=False), metavar="FILE.html", help="Write a page about the first configuration, as moeoff report does.")
@one_sentence
def bench(
    model: tuple[str, ...], n_prompt: list[int], n_gen: list[int], pg: list[tuple[int, int]], n_depth: list[int],
    output: str, output_err: str | None, plot: str | None, report: str | None, **options: Any,
) -> None:  # fmt: skip
    """Measure speed, as llama-bench does: prompts (pp), single tokens (tg), both (pg), over memory budgets and strategies.

    Options that take several values take 128,256 or 128-1024*2, and may be repeated; every combination runs in a process of its own.
    """
    from ..bench.formats import format_named

    tests = _tests(n_prompt or [512], n_gen or [128], pg, n_depth or [0])
    varied = {name for name, given in _COLUMNS.items() if options[given]}
    grids = _grids(model or (demo_model(),), tests, **options)
    formats = [(sys.stdout, format_named(output, varied))]
    if output_err:
        formats.append((sys.stderr, format_named(output_err, varied)))
    for stream, form in formats:
        stream.write(form.begin())
        stream.flush()
    every: list[Row] = []
    for grid in grids:
        for rows in grid.run(_listener):
            every += rows
            for stream, form in formats:
                stream.write(form.rows(rows))
                stream.flush()
    for stream, form in formats:
        stream.write(form.end())
        stream.flush()
    if plot:
        from ..bench.plot import plot as draw

        draw(plot, every)
        remark(f"{plot}: drawn")
    if report:
        _report(report, grids[0], every)
    if every and all(row.avg_ts is None for row in every):
        sys.exit(1)


# columns of the table, and the option that fills each
_COLUMNS = {"n_batch": "batch_size", "n_ubatch": "ubatch_size", "type_k": "cache_type_k", "type_v": "cache_type_v", "flash_attn": "flash_attn",
            "n_gpu_layers": "n_gpu_layers", "vram": "vram", "vram_mode": "vram_mode", "n_lanes": "io_workers"}  # fmt: skip


def _tests(prompts: list[int], singles: list[int], pairs: list[tuple[int, int]], depths: list[int]) -> tuple[BenchTest, ...]:
    from ..bench.job import BenchTest

    shapes = [(n, 0) for n in prompts if n] + [(0, n) for n in singles if n] + pairs
    if not shapes:
        raise OptionError("there is nothing to measure: give -p, -n or -pg")
    return tuple(BenchTest(prompt, single, depth) for depth in depths for prompt, single in shapes)


def _grids(models: tuple[str, ...], tests: tuple[BenchTest, ...], *, memory: Any, strategy: Any, threads: Any, io_workers: Any, batch_size: Any, ubatch_size: Any,
           cache_type_k: Any, cache_type_v: Any, flash_attn: Any, n_gpu_layers: Any, vram: Any, vram_mode: Any, repetitions: int, ctx_size: int | None, experts: str | None,
           no_experts: bool, tier: str | None, max_loss: str | None, no_profile: bool, no_settings: bool, text: str | None, compare_stock: bool,
           no_warmup: bool) -> list[Any]:  # fmt: skip
    from ..bench.grid import Grid
    from ..bench.text import read_text
    from ..engine.strategy import get_strategy
    from ..gguf.layout import Layout

    read_text(text)  # raises before the work
    largest = max(test.depth + test.n_tokens for test in tests)
    if ctx_size is not None and ctx_size < largest:
        raise OptionError(f"a context of {ctx_size} tokens is too small for a test of {largest}: give a larger -c, or none")
    for path in models:
        Layout.read(path).require_experts()
    for size in memory:
        parse_size(size)
    for name in strategy:
        get_strategy(name)
    axes = {
        "memory": memory or [None], "strategy": strategy or [None], "n_threads": threads or [None], "n_lanes": io_workers or [None],
        "n_batch": batch_size or [None], "n_ubatch": ubatch_size or [None], "type_k": cache_type_k or [None], "type_v": cache_type_v or [None],
        "flash_attn": [bool(n) for n in flash_attn or [1]], "n_gpu_layers": n_gpu_layers or [None], "vram": vram or [None], "vram_mode": vram_mode or [None],
    }  # fmt: skip
    common: dict[str, Any] = {"n_ctx": ctx_size, "experts": companion(experts, no_experts), "tier": tier, "max_loss": max_loss, "profile": not no_profile,
              "settings": not no_settings}  # fmt: skip
    return [Grid(path, tests, axes, llama_arguments(**common), repetitions, not no_warmup, text, compare_stock) for path in models]


def _listener(job: Job) -> Listener | None:
    """Says on a terminal what is running."""
    if not sys.stderr.isatty():
        return None
    words = [job.engine, str(job.options.get("strategy") or "")]
    n = 0

    def listen(event: dict[str, Any]) -> None:
        nonlocal n
        if event["kind"] == "sample":
            n += 1
        done = f"{n} of {len(job.tests) * job.repetitions}" if event["kind"] != "closed" else ""
        sys.stderr.write(f"\r\x1b[2K{' '.join(words)} {done}" if done else "\r\x1b[2K")
        sys.stderr.flush()

    return listen


def _report(path: str, grid: Any, rows: list[Row]) -> None:
    from ..report import write_report

    job, memory, _ = grid.jobs()[0]
    options = {name: value for name, value in job.options.items() if name != "memory"}
    page = write_report(job.model, memory=memory or None, text=job.text, rows=rows, **options)
    with atomic_file(path) as file:
        file.write(page.encode())
    remark(f"{path}: written")
