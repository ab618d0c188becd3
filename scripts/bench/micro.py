"""Costs of single parts: the native store, its waiting, rows of tables on disk, the
row kernels and attention.

usage: micro.py store    [--shapes 4x8x2,...]             evictions and the store's mutex, for models of up to a million slices: docs/results/time.md
       micro.py switches [--threads 1,4,16]               sleeps, locks and CPU time of threads that wait for experts: time.md
       micro.py rows     FILE [--batches 16,32768]        random rows of a file of any content, out of a cold page cache
       micro.py kernels  MODEL ... --text FILE            a token on one thread with everything in memory, stock's kernels and ours: kernels.md
       micro.py attention [--shapes 32/4x128,...]         a layer's attention by our kernels, ggml's, and ggml's without flash attention
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from results import HELP, ResultsFile

CORE = ROOT / "llamacpp_patches" / "src" / "core"
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)


@click.group(help=__doc__)
def main() -> None:
    pass


# --- the native store, as programs beside this one drive it without a model ---

# gates x experts x used, with three matrices each
STORE_SHAPES = "4x8x2,12x32x4,28x128x8,48x128x8,130x256x8,1302x256x8"
BATCH = 512  # tokens
PUBLISHED = {"none": "nothing", "six": "6 rows", "all": "all rows"}  # before each event
SWITCHES = ["threads", "misses", "voluntary_switches", "of_computing_threads", "locks", "cpu_ms"]


def build(name: str, folder: Path) -> Path:
    """A benchmark beside this file, compiled as the wheel's sources are."""
    program = folder / name
    sources = [*CORE.glob("*.cpp"), Path(__file__).with_name(f"{name}.cpp")]
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-O2",
            "-DNDEBUG",
            f"-I{CORE}",
            f"-I{ROOT / 'tests' / 'native'}",
            *sources,
            "-o",
            program,
            "-pthread",
            "-ldl",
        ],
        check=True,
    )
    return program


def run(program: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(
        subprocess.run(
            [program, *map(str, arguments)],
            cwd=program.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


def run_store(program: Path, shape: str, n_tokens: int, n_events: int) -> dict[str, Any]:
    """By what is published before each event: ns of each call; evictions for each
    event. 40 % of the slices fit into the arena, and reads end at once.
    """
    return run(program, *shape.split("x"), n_tokens, n_events)


def run_switches(program: Path, n_threads: int, hit_rate: float = 0.79) -> dict[str, Any]:
    """SWITCHES, for each of 20 tokens of a model of 48 gates x 128 experts x 3 matrices
    that uses 8; four I/O threads take 200 µs for a slice.
    """
    return run(program, n_threads, hit_rate, 200, 20, 4)


@main.command()
@click.option("--shapes", default=STORE_SHAPES, show_default=True, help="Gates x experts x used.")
@click.option("--events", default=1000, show_default=True)
@JSON
def store(shapes: str, events: int, json_file: str | None) -> None:
    """Medians, and the 99th percentile after the slash."""

    def cell(ns: dict[str, int]) -> str:
        return f"{ns['median'] / 1e3:.1f} / {ns['p99'] / 1e3:.1f}"

    columns = ["gates x experts x used", "slices", "eviction, ns", "evictions for each event", *(f"gate_event after {what}" for what in PUBLISHED.values()),
               "publish 6 rows", "publish all rows"]  # fmt: skip
    calls = ["gate_event", "prefetch", "pin", "unpin"]
    with tempfile.TemporaryDirectory() as folder, ResultsFile(json_file) as results:
        program = build("bench_store", Path(folder))
        for name, n_tokens, what in (
            ("decode", 1, "a token"),
            ("prompt", BATCH, f"a batch of {BATCH} tokens"),
        ):
            title = (
                f"{what}: gate_event and publish in µs, by what was published before, and one"
                " eviction in ns"
            )
            table, others = results.table(name, title, columns), []
            for shape in (
                shapes.split(",")
                if n_tokens == 1
                else [s for s in shapes.split(",") if s in STORE_SHAPES.split(",")[2:5]]
            ):
                r = run_store(program, shape, n_tokens, events if n_tokens == 1 else events // 10)
                events_after = (cell(r[case]["gate_event"]) for case in PUBLISHED)
                evictions = f"{r['slices']:,}", str(r["eviction"]), f"{r['none']['evictions']:.1f}"
                table.row(
                    shape,
                    *evictions,
                    *events_after,
                    cell(r["six"]["publish"]),
                    cell(r["all"]["publish"]),
                )
                others.append([shape, *(cell(r["expected"][call]) for call in calls)])
            head = [
                "gates x experts x used",
                "gate_event with prefetched experts",
                "prefetch of a gate's experts",
                "pin of an op",
                "unpin of a slice",
            ]
            table = results.table(
                f"{name}-calls", f"{what}: what else takes the mutex, in µs", head
            )
            for row in others:
                table.row(*row)


@main.command()
@click.option("--threads", default="1,4,16", show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Of which medians are told.")
@JSON
def switches(threads: str, rounds: int, json_file: str | None) -> None:
    """Nothing is computed: counts hardly depend on the machine or its load, CPU time
    does.
    """
    with tempfile.TemporaryDirectory() as folder, ResultsFile(json_file) as results:
        program = build("bench_switches", Path(folder))
        table = results.table(
            "switches", "for each token", [column.replace("_", " ") for column in SWITCHES]
        )
        for n_threads in map(int, threads.split(",")):
            runs = [run_switches(program, n_threads) for _ in range(rounds)]
            table.row(
                *(str(statistics.median(each[column] for each in runs)) for column in SWITCHES)
            )


# --- rows of tables on disk, one op at a time ---


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--batches",
    default="16,32768",
    show_default=True,
    help="Rows of a batch: those of a token, and of 2,048, where each has 16.",
)
@click.option("--row", default=100, show_default=True, help="Bytes of a row.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=7, show_default=True, help="Of which medians are told.")
@JSON
def rows(
    file: Path, batches: str, row: int, threads: int, rounds: int, json_file: str | None
) -> None:
    """The file is taken for a table of float32. Beside ours stands what llama.cpp does:
    ggml's op on a map of the file, which reads no page ahead.
    """
    from helpers.ggml_api import F32, Backend
    from helpers.row_tables import MAPPED, ON_DISK, Rows

    shape, rng, backend = (
        (file.stat().st_size // row, row // 4),
        np.random.default_rng(0),
        Backend(),
    )
    with ResultsFile(json_file) as results:
        columns = [
            "rows",
            "ours, ms",
            "ours through the page cache, ms",
            "from a map, ms",
            "pages read, each",
        ]
        table = results.table(
            "rows",
            f"random rows of {row} bytes of a file of {file.stat().st_size / 1e9:.1f} GB, {threads}"
            " threads",
            columns,
        )
        for n in map(int, batches.split(",")):
            with (
                Rows(file, F32, shape, n) as direct,
                Rows(file, F32, shape, n, direct_io=False) as buffered,
            ):
                ways, ms = (
                    ((direct, ON_DISK), (buffered, ON_DISK), (direct, MAPPED)),
                    np.zeros((rounds, 3)),
                )
                for turn in range(rounds):
                    ids = rng.integers(0, shape[0], n)
                    for i, (lookups, way) in enumerate(ways):
                        lookups.prepare(ids)
                        lookups.leave_page_cache()
                        began = time.perf_counter()
                        lookups.compute(backend, way, threads)
                        ms[turn, i] = 1e3 * (time.perf_counter() - began)
                stats = direct.buffer.stats()
                pages = stats.row_bytes_read / 4096 / max(stats.row_misses, 1)
                table.row(
                    f"{n:,}", *(f"{each:.2f}" for each in np.median(ms, axis=0)), f"{pages:.2f}"
                )


# --- row kernels, in models that are opened three times ---

ENGINES = ("stock, plain kernels", "stock, repacked kernels", "moeoff")


def time_engines(
    model: str, text: str, n_prompt: int, n_tokens: int
) -> tuple[list[float], list[float], bool]:
    """Measure a model with each of ENGINES.

    Returns:
        Median CPU milliseconds of a decoded token by engine; CPU milliseconds of a
        prompt token by engine; whether our logits are bit-identical to those of the
        plain kernels.
    """
    import moeoff
    from moeoff.llamacpp.llama import StockLlama
    from moeoff.llamacpp.native import use_attention_kernels
    from moeoff.measure.worker import load_everything

    def timed(engine: Any, batch: list[int]) -> float:
        began = time.thread_time()
        engine.eval(batch)
        return 1e3 * (time.thread_time() - began) / len(batch)

    options = {
        "n_ctx": n_prompt + n_tokens,
        "n_threads": 1,
        "n_threads_batch": 1,
        "flash_attn": True,
        "logits_all": True,
        "verbose": False,
    }
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                contextlib.closing(
                    StockLlama(model, use_mmap=False, use_extra_bufts=repacks, **options)
                )
            )
            for repacks in (False, True)
        ]
        engines.append(stack.enter_context(moeoff.Llama(model, expert_memory=1 << 40, **options)))
        load_everything(engines[2].engine.buffer)
        tokens = engines[2].tokenize(text.encode())[: n_prompt + n_tokens]
        spent: list[list[float]] = [[], [], []]
        for turn, batch in enumerate(
            [tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]
        ):
            for i in ((turn + first) % 3 for first in range(3)):
                use_attention_kernels(i == 2)  # ours would serve every model of the process
                spent[i].append(
                    timed(engines[i], batch) if i < 2 else engines[i].call(timed, engines[i], batch)
                )
        plain, ours = (np.asarray(engines[i].scores[: len(tokens)]).view(np.uint32) for i in (0, 2))
        return (
            [statistics.median(each[1:]) for each in spent],
            [each[0] for each in spent],
            np.array_equal(plain, ours),
        )


@main.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--prompt", default=64, show_default=True)
@click.option("--tokens", default=90, show_default=True)
@JSON
def kernels(
    models: Sequence[str], text: str, prompt: int, tokens: int, json_file: str | None
) -> None:
    """The engines decode the same tokens in turn, token by token, so that neighbours on
    the machine and its clock touch all alike. What counts is the CPU time of the
    thread: it does not say how fast several are, which share the memory's rate
    (`speed.py kernels` does). The model is in memory three times.
    """
    with ResultsFile(json_file) as results:
        columns = [
            "model",
            *(f"{name}: CPU ms/token" for name in ENGINES),
            "over plain",
            "over repacked",
            "prompt, each",
            "bits of plain",
        ]
        table = results.table("cpu", "CPU time of a token on one thread", columns)
        for model in models:
            each, of_prompt, same = time_engines(
                model, Path(text).read_text(encoding="utf-8"), prompt, tokens
            )
            gains = [f"{each[i] / each[2]:.2f} x" for i in (0, 1)]
            table.row(
                Path(model).stem,
                *(f"{ms:.2f}" for ms in each),
                *gains,
                " / ".join(f"{ms:.1f}" for ms in of_prompt),
                "yes" if same else "NO",
            )


# --- attention, one op at a time, each over K and V of its own ---

HEADS = "32/4x128,16/16x128,64/8x64"  # query heads / KV heads x numbers of a head
WAYS = ("ours", "ours in f32", "ggml's", "ggml's without flash attention")


def time_attention(
    heads: str, depth: int, n_tokens: int, n_threads: int, rounds: int
) -> list[float]:
    """Return the least milliseconds of an op for each of WAYS; of one thread, CPU time.

    Layers take turns, so that K and V come from memory as they do in a model.
    """
    from helpers.attention import Attention, Shape

    numbers, size = heads.split("x")
    n_heads, n_kv_heads = map(int, numbers.split("/"))
    shape = Shape(
        int(size), int(size), n_kv_heads, n_heads // n_kv_heads, n_tokens, n_tokens + depth
    )
    n_layers = min(8, 1 + (64 << 20) // (4 * shape.n_kv * n_kv_heads * shape.dk))
    with contextlib.ExitStack() as stack:
        layers, in_f32 = ([stack.enter_context(Attention(shape, np.random.default_rng(0), **options)) for _ in range(n_layers)]
                          for options in ({"with_products": True}, {"in_f32": True}))  # fmt: skip
        ways = [(layers, lambda op: op.compute(n_threads, True)), (in_f32, lambda op: op.compute(n_threads, True)),
                (layers, lambda op: op.compute(n_threads, False)), (layers, lambda op: op.compute_products(n_threads))]  # fmt: skip
        least, clock = (
            [float("inf")] * len(ways),
            time.thread_time if n_threads == 1 else time.perf_counter,
        )
        for _ in range(rounds):
            for i, (ops, way) in enumerate(ways):
                for op in ops:
                    began = clock()
                    way(op)
                    least[i] = min(least[i], 1e3 * (clock() - began))
        return least


@main.command()
@click.option(
    "--shapes", default=HEADS, show_default=True, help="Query heads / KV heads x numbers of a head."
)
@click.option(
    "--depths",
    default="512,4096,16384",
    show_default=True,
    help="Positions that the tokens are behind.",
)
@click.option("--tokens", default=1, show_default=True, help="1: decoding; 64 and more: a prompt.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@JSON
def attention(
    shapes: str, depths: str, tokens: int, threads: int, rounds: int, json_file: str | None
) -> None:
    """K and V of halves, and a causal mask. Ours and ggml's give the same bits."""
    with ResultsFile(json_file) as results:
        title = (
            f"{tokens} token{'s' if tokens > 1 else ''} on {threads}"
            f" thread{'s' if threads > 1 else ''}: ms of a layer's attention"
        )
        table = results.table("attention", title, ["heads", "behind", *WAYS, "gains"])
        for heads in shapes.split(","):
            for depth in map(int, depths.split(",")):
                ms = time_attention(heads, depth, tokens, threads, rounds)
                table.row(
                    heads,
                    f"{depth:,}",
                    *(f"{each:.3f}" for each in ms),
                    " ".join(f"{each / ms[0]:.1f} x" for each in ms[1:]),
                )


if __name__ == "__main__":
    main()
