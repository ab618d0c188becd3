"""`moeoff bench`: a table of a model's speed over many configurations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import OptionError
from ..option import Option
from ..options import TABLE, in_flags, without_gpu
from ..system.console import ProgressLine, note
from ..system.files import demo_model
from ..system.memory import format_size, parse_size
from .options import (
    ValueList,
    command,
    file_option,
    flags_as_typed,
    help_of,
    option,
    remark_on_context,
    remark_on_memory,
    table_options,
)

if TYPE_CHECKING:
    from ..measure.job import BenchTest, Job
    from ..measure.rows import Row
    from ..measure.run import Grid, Listener

_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")
_LONGEST_RANGE = 1000  # values


def expand(text: str) -> list[str]:
    """Split values at commas, and expand ranges: 128,256, 1-8, 128-1024*2, 0-4096+1024.

    Raises:
        ValueError: A value or a range is empty.
    """
    out = list[str]()
    for part in words(text):
        if (match := _RANGE.fullmatch(part)) is None:
            out.append(part)
            continue
        n, last, by = int(match[1]), int(match[2]), int(match[4] or 1)
        values = list[str]()
        while n <= last and len(values) < _LONGEST_RANGE:
            values.append(str(n))
            n = max(n * by if match[3] == "*" else n + by, n + 1)
        if not values:
            raise ValueError
        out += values
    return out


def numbers(text: str) -> list[int]:
    """Parse numbers in `expand`'s syntax. Raise ValueError for a negative one."""
    out = [int(value) for value in expand(text)]
    if min(out) < 0:
        raise ValueError
    return out


def words(text: str) -> list[str]:
    """Split values at commas. Raise ValueError for an empty one."""
    out = [part.strip() for part in text.split(",")]
    if not all(out):
        raise ValueError
    return out


def _list_option(
    *names: str, read: Callable[[str], list[Any]] = numbers, metavar: str = "N,...", **settings: Any
) -> Callable[[Any], Any]:
    """Declare an option that may be repeated, each time with several values."""

    def callback(
        context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
    ) -> list[Any]:
        out: list[Any] = []
        for value in values:
            try:
                out += read(value)
            except OptionError as error:
                raise click.BadParameter(in_flags(error), context, parameter) from None
            except ValueError:
                message = f"expected {metavar}, got {value!r}"
                raise click.BadParameter(message, context, parameter) from None
        return list(dict.fromkeys(out))

    return option(*names, multiple=True, metavar=metavar, callback=callback, **settings)


# Table options that take several values here: one configuration for each combination.
AXES = "memory strategy n_threads io_threads n_batch n_ubatch type_k type_v flash_attn".split()
AXES += ["n_gpu_layers", "vram", "vram_mode"]
_COLUMNS = AXES[2:]  # shown in the results only where given


def _axis_options(function: Callable[..., None]) -> Callable[..., None]:
    for line in (TABLE[name] for name in reversed(AXES)):
        function = _list_option(
            *line.flags,
            line.name,
            read=partial(_read_axis, line),
            metavar=f"{line.metavar},...",
            help=help_of(line, line.default),
            type=ValueList(line),
            group=line.group,
        )(function)
    return function


def _read_axis(line: Option, text: str) -> list[Any]:
    is_number = line.metavar == "N"
    values = expand(text) if is_number else words(text)
    parsed = [line.parse(value) for value in values]  # a bad value fails before any run
    return parsed if is_number or line.name == "flash_attn" else values


@command()
@click.argument("path", nargs=-1, type=click.Path(), metavar="[MODEL]...")
@option(
    "-m",
    "--model",
    type=click.Path(),
    metavar="FILE",
    multiple=True,
    help="GGUF with routed experts, as MODEL; may be repeated. Default: the demo model.",
)
@_list_option(
    "-p", "--n-prompt", help="Prompt tokens to process; 0 for no such test. Default: 512."
)
@_list_option(
    "-n", "--n-gen", help="Tokens to decode one by one; 0 for no such test. Default: 128."
)
@_list_option("-d", "--n-depth", help="Context depth of each test in tokens. Default: 0.")
@option(
    "-r",
    "--repetitions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Repetitions of each test, each on another piece of text.",
)
@option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Rounds of all configurations in turn: medians, and ratios to the first one.",
)
@option(
    "--cold",
    is_flag=True,
    help="Drop the model from the page cache before each run; in memory cgroups if possible.",
)
@_axis_options
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=8),
    metavar="N",
    help="Context length in tokens. Default: that of run, or more if a test needs more.",
)
@table_options("bench", without=(*AXES, "n_ctx"))
@file_option("--text", help="Text to process. Default: the help texts of Python.")
@option(
    "--compare-stock",
    is_flag=True,
    help="Also measure stock llama.cpp, and with --no-repack; implies --cold.",
)
@option("--no-warmup", is_flag=True, help="Run no warm-up before each test.")
@option(
    "-o",
    "--output",
    type=click.Choice(["md", "csv", "json"]),
    default="md",
    show_default=True,
    help="Output format.",
)
def bench(
    path: tuple[str, ...],
    model: tuple[str, ...],
    n_prompt: list[int],
    n_gen: list[int],
    n_depth: list[int],
    output: str,
    **options: Any,
) -> None:
    """Measure the speed of prompts (pp) and of decoding (tg), as llama-bench does.

    Options with several values take 128,256 or 128-1024*2, and may be repeated. Each
    combination runs in its own process.
    """
    from ..measure.job import BenchTest
    from ..measure.rows import OUTPUT_FORMATS

    for size in options["memory"]:
        remark_on_memory(parse_size(size))
    shapes = [(n, 0) for n in n_prompt or [512] if n] + [(0, n) for n in n_gen or [128] if n]
    if not shapes:
        raise OptionError("nothing to measure: give -p or -n")
    tests = tuple(
        BenchTest(prompt, single, depth) for depth in n_depth or [0] for prompt, single in shapes
    )
    _drop_gpu_axes(options)
    varied = {name for name in _COLUMNS if options[name]}
    varied |= {"rounds"} if options["rounds"] > 1 else set()
    grids = _grids(path + model or (demo_model(),), tests, **options)
    measured = False

    def configurations() -> Iterator[list[Row]]:
        nonlocal measured
        for rows in (rows for grid in grids for rows in grid.run(_listener)):
            measured = measured or any(row["avg_ts"] is not None for row in rows)
            yield rows

    for text in OUTPUT_FORMATS[output](configurations(), varied):
        print(text, end="", flush=True)
    if not measured:
        sys.exit(1)


def _drop_gpu_axes(options: dict[str, list[Any]]) -> None:
    """Drop GPU options, with a note, on a machine without a GPU."""
    bounded = (size for size in options["vram"] if size != "auto")
    asked = {
        "n_gpu_layers": any(options["n_gpu_layers"]),
        "vram": next(bounded, "auto" if options["vram"] else None),
    }
    for remark in without_gpu(asked):
        note(remark)
    options |= {name: [] for name in ("n_gpu_layers", "vram") if name not in asked}


def _grids(
    models: tuple[str, ...],
    tests: tuple[BenchTest, ...],
    *,
    n_ctx: int | None,
    repetitions: int,
    text: str | None,
    compare_stock: bool,
    cold: bool,
    rounds: int,
    no_warmup: bool,
    **options: Any,
) -> list[Grid]:
    from ..gguf.model_index import ModelIndex
    from ..measure.job import Job, read_text_or_default
    from ..measure.run import Grid

    read_text_or_default(text)  # an unreadable file fails before any run
    largest = max(test.depth + test.n_tokens for test in tests)
    if n_ctx is not None and n_ctx < largest:
        raise OptionError(
            f"-c {n_ctx}: too small for a test of {largest} tokens: give a larger -c, or none"
        )
    for path in models:
        model_index = ModelIndex.read(path)
        model_index.require_text()
        remark_on_context(n_ctx or 0, model_index.n_ctx_train, options)
    flags = flags_as_typed(click.get_current_context())
    axes = {name: options.pop(name) or [None] for name in AXES}
    job = Job(
        "",
        options=options | {"n_ctx": n_ctx},
        tests=tests,
        repetitions=repetitions,
        warm_up=not no_warmup,
        text=text,
        flags=flags,
    )
    return [Grid(replace(job, model=path), axes, compare_stock, cold, rounds) for path in models]


def _listener(job: Job, line: ProgressLine | None = None) -> Listener:
    """Make a listener that shows the running test's progress in `line`, or in its own."""
    line = line or ProgressLine()
    memory = job.options.get("memory")
    words = job.engine, job.options.get("strategy"), memory and format_size(memory)
    name = " ".join(filter(None, words))

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] in ("closed", "error"):
            line.clear()
        if event["kind"] != "progress":
            return
        test, repetition = job.tests[event["test"]], event["repetition"]
        n, total = min(event["done"], test.n_tokens), test.n_tokens
        if repetition is None:
            line.update(f"{name}, {test.name}, warming up", n, total)
        else:
            line.update(f"{name}, {test.name}", repetition * total + n, job.repetitions * total)

    return listen
