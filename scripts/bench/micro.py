"""What single parts cost: the native store, its waiting, the row kernels, attention, the driver in Python, and rows of a table on disk.

usage: micro.py store    [--shapes 4x8x2,...]             evictions and the store's mutex, for models of up to a million slices: docs/results/store.md
       micro.py switches [--threads 1,4,16]               sleeps, locks and CPU time of threads that wait for experts: store.md
       micro.py kernels  MODEL ... --text FILE            a token on one thread with everything in memory, stock's kernels and ours: kernels.md
       micro.py attention [--shapes 32/4x128,...]         a layer's attention by our kernels, ggml's, and ggml's without flash attention
       micro.py rows     [--gb 4] [--folder .]            rows of a table on disk that nothing has in memory, and through a memory map
       micro.py driver   [--shapes 48x128x8x2048,...]     made-up gate events through each part of the driver: docs/internals/papers.md
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
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


# --- the native store, as programs of tests/native drive it without a model ---

STORE_SHAPES = "4x8x2,12x32x4,28x128x8,48x128x8,130x256x8,1302x256x8"  # gates x experts x used, with three matrices each
BATCH = 512  # tokens
PUBLISHED = {"none": "nothing", "six": "6 rows", "all": "all rows"}  # before each event
LOOPS = ["visits", "op_run"]  # each thread visits each item and all wake for whatever settles; the loop that MUL_MAT_ID has
SWITCHES = ["threads", "misses", "voluntary_switches", "of_computing_threads", "locks", "cpu_ms"]


def build(name: str, folder: Path) -> Path:
    """A benchmark of tests/native, compiled as the wheel's sources are."""
    program = folder / name
    sources = [*CORE.glob("*.cpp"), ROOT / "tests" / "native" / f"{name}.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O2", "-DNDEBUG", f"-I{CORE}", *sources, "-o", program, "-pthread", "-ldl"], check=True)
    return program


def run(program: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(subprocess.run([program, *map(str, arguments)], cwd=program.parent, capture_output=True, text=True, check=True).stdout)


def run_store(program: Path, shape: str, n_tokens: int, n_events: int) -> dict[str, Any]:
    """By what is published before each event: ns of each call; evictions for each event. 40 % of the slices fit into the arena, and reads end at once."""
    return run(program, *shape.split("x"), n_tokens, n_events)


def run_switches(program: Path, n_threads: int, hit_rate: float = 0.79, loop: str = "op_run") -> dict[str, Any]:
    """SWITCHES, for each of 20 tokens of a model of 48 gates x 128 experts x 3 matrices that uses 8; four I/O threads take 200 µs for a slice."""
    return run(program, loop, n_threads, hit_rate, 200, 20, 4)


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
        for name, n_tokens, what in (("decode", 1, "a token"), ("prompt", BATCH, f"a batch of {BATCH} tokens")):
            title = f"{what}: gate_event and publish in µs, by what was published before, and one eviction in ns"
            table, others = results.table(name, title, columns), []
            for shape in shapes.split(",") if n_tokens == 1 else [s for s in shapes.split(",") if s in STORE_SHAPES.split(",")[2:5]]:
                r = run_store(program, shape, n_tokens, events if n_tokens == 1 else events // 10)
                events_after = (cell(r[case]["gate_event"]) for case in PUBLISHED)
                evictions = f"{r['slices']:,}", str(r["eviction"]), f"{r['none']['evictions']:.1f}"
                table.row(shape, *evictions, *events_after, cell(r["six"]["publish"]), cell(r["all"]["publish"]))
                others.append([shape, *(cell(r["expected"][call]) for call in calls)])
            head = ["gates x experts x used", "gate_event with prefetched experts", "prefetch of a gate's experts", "pin of an op", "unpin of a slice"]
            table = results.table(f"{name}-calls", f"{what}: what else takes the mutex, in µs", head)
            for row in others:
                table.row(*row)


@main.command()
@click.option("--threads", default="1,4,16", show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Of which medians are told.")
@JSON
def switches(threads: str, rounds: int, json_file: str | None) -> None:
    """Nothing is computed: counts hardly depend on the machine or its load, CPU time does."""
    with tempfile.TemporaryDirectory() as folder, ResultsFile(json_file) as results:
        program = build("bench_switches", Path(folder))
        table = results.table("switches", "for each token", ["loop", *(column.replace("_", " ") for column in SWITCHES)])
        for n_threads in map(int, threads.split(",")):
            for loop in LOOPS:
                runs = [run_switches(program, n_threads, loop=loop) for _ in range(rounds)]
                table.row(loop, *(str(statistics.median(each[column] for each in runs)) for column in SWITCHES))


# --- row kernels, in models that are opened three times ---

ENGINES = ("stock, plain kernels", "stock, repacked kernels", "moeoff")


def time_engines(model: str, text: str, n_prompt: int, n_tokens: int) -> tuple[list[float], list[float], bool]:
    """Of ENGINES: median CPU ms of a token, and CPU ms for each token of the prompt; and whether our logits are those of the plain kernels, bit for bit."""
    import moeoff
    from moeoff.llamacpp.llama import StockLlama
    from moeoff.llamacpp.native import use_attention_kernels
    from moeoff.measure.worker import load_everything

    options = {"n_ctx": n_prompt + n_tokens, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "logits_all": True, "verbose": False}
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(contextlib.closing(StockLlama(model, use_mmap=False, use_extra_bufts=repacks, **options))) for repacks in (False, True)]
        engines.append(stack.enter_context(moeoff.Llama(model, expert_memory=1 << 40, **options)))
        load_everything(engines[2].engine.buffer)
        tokens = engines[2].tokenize(text.encode())[: n_prompt + n_tokens]
        spent: list[list[float]] = [[], [], []]
        for turn, batch in enumerate([tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]):
            for i in ((turn + first) % 3 for first in range(3)):
                use_attention_kernels(i == 2)  # ours would serve every model of the process
                began = time.thread_time()
                engines[i].eval(batch)
                spent[i].append(1e3 * (time.thread_time() - began) / len(batch))
        plain, ours = (np.asarray(engines[i].scores[: len(tokens)]).view(np.uint32) for i in (0, 2))
        return [statistics.median(each[1:]) for each in spent], [each[0] for each in spent], np.array_equal(plain, ours)


@main.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--prompt", default=64, show_default=True)
@click.option("--tokens", default=90, show_default=True)
@JSON
def kernels(models: Sequence[str], text: str, prompt: int, tokens: int, json_file: str | None) -> None:
    """The engines decode the same tokens in turn, token by token, so that neighbours on the machine and its clock touch all alike. What counts is the CPU
    time of the thread: it does not say how fast several are, which share the memory's rate (`speed.py kernels` does). The model is in memory three times."""
    with ResultsFile(json_file) as results:
        columns = ["model", *(f"{name}: CPU ms/token" for name in ENGINES), "over plain", "over repacked", "prompt, each", "bits of plain"]
        table = results.table("cpu", "CPU time of a token on one thread", columns)
        for model in models:
            each, of_prompt, same = time_engines(model, Path(text).read_text(encoding="utf-8"), prompt, tokens)
            gains = [f"{each[i] / each[2]:.2f} x" for i in (0, 1)]
            table.row(Path(model).stem, *(f"{ms:.2f}" for ms in each), *gains, " / ".join(f"{ms:.1f}" for ms in of_prompt), "yes" if same else "NO")


# --- attention, one op at a time, each over K and V of its own ---

HEADS = "32/4x128,16/16x128,64/8x64"  # query heads / KV heads x numbers of a head
WAYS = ("ours", "ours in f32", "ggml's", "ggml's without flash attention")


def time_attention(heads: str, depth: int, n_tokens: int, n_threads: int, rounds: int) -> list[float]:
    """Of WAYS: the least ms of an op, of one thread CPU time. Layers take turns, so that K and V come from memory as they do in a model."""
    from helpers.attention import Attention, Shape

    numbers, size = heads.split("x")
    n_heads, n_kv_heads = map(int, numbers.split("/"))
    shape = Shape(int(size), int(size), n_kv_heads, n_heads // n_kv_heads, n_tokens, n_tokens + depth)
    n_layers = min(8, 1 + (64 << 20) // (4 * shape.n_kv * n_kv_heads * shape.dk))
    with contextlib.ExitStack() as stack:
        layers, in_f32 = ([stack.enter_context(Attention(shape, np.random.default_rng(0), **options)) for _ in range(n_layers)]
                          for options in ({"with_products": True}, {"in_f32": True}))  # fmt: skip
        ways = [(layers, lambda op: op.compute(n_threads, True)), (in_f32, lambda op: op.compute(n_threads, True)),
                (layers, lambda op: op.compute(n_threads, False)), (layers, lambda op: op.compute_products(n_threads))]  # fmt: skip
        least, clock = [float("inf")] * len(ways), time.thread_time if n_threads == 1 else time.perf_counter
        for _ in range(rounds):
            for i, (ops, way) in enumerate(ways):
                for op in ops:
                    began = clock()
                    way(op)
                    least[i] = min(least[i], 1e3 * (clock() - began))
        return least


@main.command()
@click.option("--shapes", default=HEADS, show_default=True, help="Query heads / KV heads x numbers of a head.")
@click.option("--depths", default="512,4096,16384", show_default=True, help="Positions that the tokens are behind.")
@click.option("--tokens", default=1, show_default=True, help="1: decoding; 64 and more: a prompt.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@JSON
def attention(shapes: str, depths: str, tokens: int, threads: int, rounds: int, json_file: str | None) -> None:
    """K and V of halves, and a causal mask. Ours and ggml's give the same bits."""
    with ResultsFile(json_file) as results:
        title = f"{tokens} token{'s' if tokens > 1 else ''} on {threads} thread{'s' if threads > 1 else ''}: ms of a layer's attention"
        table = results.table("attention", title, ["heads", "behind", *WAYS, "gains"])
        for heads in shapes.split(","):
            for depth in map(int, depths.split(",")):
                ms = time_attention(heads, depth, tokens, threads, rounds)
                table.row(heads, f"{depth:,}", *(f"{each:.3f}" for each in ms), " ".join(f"{each / ms[0]:.1f} x" for each in ms[1:]))


# --- rows of a table, as Qwen3.8-Flash-Next has them for its n-grams ---

N_COLS, ROW_BYTES, ROWS_OF_A_TOKEN = 160, 90, 16  # in Q4_0


@contextlib.contextmanager
def rows_on_disk(path: Path, n_rows: int, n_tokens: int, n_threads: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Computes GET_ROWS of row numbers on the table that a file is."""
    from helpers.ggml_api import I32, SUCCESS, Backend, Context, cpu_buffer_type, write
    from moeoff.engine.buffer import ExpertBuffer
    from moeoff.gguf.quantize import type_from_name
    from moeoff.llamacpp import native

    q4_0 = type_from_name("Q4_0")
    with contextlib.ExitStack() as stack:
        reserved, ops = stack.enter_context(contextlib.closing(Context())), stack.enter_context(contextlib.closing(Context(8, 1)))
        buffer, backend = stack.enter_context(contextlib.closing(ExpertBuffer())), stack.enter_context(contextlib.closing(Backend()))
        table = reserved.tensor(q4_0, N_COLS, n_rows, name="table.weight")
        with buffer.loading():
            reserved.allocate(native.buffer_type())
        assert native.add_file(buffer.handle, os.fsencode(path)) == 0
        assert native.set_row_table_source(buffer.handle, 0, native.Source(0, q4_0, 0, ROW_BYTES * n_rows, 0)) == 0
        ids = ops.tensor(I32, n_tokens * ROWS_OF_A_TOKEN)
        graph = ops.graph(ops.get_rows(table, ids))
        ops.allocate(cpu_buffer_type())

        def compute(rows: np.ndarray) -> None:
            write(ids, rows)
            assert backend.compute(graph, n_threads) == SUCCESS

        yield compute


@main.command()
@click.option("--gb", default=4.0, show_default=True, help="Of the table.")
@click.option("--folder", default=".", show_default=True, type=click.Path(file_okay=False), help="On the disk that is measured.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=9, show_default=True, help="Of which medians are told.")
@JSON
def rows(gb: float, folder: str, threads: int, rounds: int, json_file: str | None) -> None:
    """16 random rows of 90 bytes for each token, none of them in memory."""
    n_rows, rng = int(gb * 1e9) // ROW_BYTES, np.random.default_rng(0)
    with tempfile.NamedTemporaryFile(dir=folder) as file, ResultsFile(json_file) as results:
        piece = rng.integers(0, 256, (1 << 20, ROW_BYTES), np.uint8)
        for first in range(0, n_rows, len(piece)):
            file.write(piece[: n_rows - first].data)
        file.flush()
        os.fsync(file.fileno())
        table = results.table("rows", f"rows of a table of {gb:g} GB: ms, on {threads} threads", ["tokens", "rows", "from the file", "through a memory map"])
        for n_tokens in (1, 32, 2048):
            with rows_on_disk(Path(file.name), n_rows, n_tokens, threads) as compute:

                def through_map(ids: np.ndarray) -> None:
                    np.memmap(file.name, np.uint8, "r", shape=(n_rows, ROW_BYTES))[ids]  # anew: what is mapped stays in memory

                ms: list[list[float]] = [[], []]
                for way, times in [(compute, ms[0]), (through_map, ms[1])] * rounds:
                    ids = rng.integers(0, n_rows, n_tokens * ROWS_OF_A_TOKEN).astype(np.int32)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    began = time.perf_counter()
                    way(ids)
                    times.append(1e3 * (time.perf_counter() - began))
            table.row(str(n_tokens), f"{n_tokens * ROWS_OF_A_TOKEN:,}", *(f"{statistics.median(each):.1f}" for each in ms))


# --- the driver: what stands in for the library and the disk counts nothing ---

DRIVER_SHAPES = "48x128x8x2048,24x32x4x2880,60x256x8x7168,12x32x4x512"  # gates x experts x used x n_embd
POLICIES = ("lfu", "decay", "arc", "edgemoe", "hobbit", "score")
PREDICTORS = ("gate", "stacked", "activation-path")
ON = SimpleNamespace(on=True, gain=None, token=lambda ns: None)
ABSENT = 0.1  # share of the experts that are not resident


class StandInBuffer:
    """As much of a buffer as a driver asks of one: a share of the experts is absent for ever."""

    running = True

    def __init__(self, n_gates: int, n_experts: int):
        from moeoff.llamacpp import native

        self.priorities = np.zeros((n_gates, n_experts), np.float32)
        self.tensors = [SimpleNamespace(gate=g, matrix=m, ne=(1, 1, n_experts)) for g in range(n_gates) for m in (1, 2, 3)]
        self.arena_full = 3 * n_gates * n_experts
        self._residency = np.where(np.random.default_rng(1).random((n_gates, n_experts)) < ABSENT, 0, 0b1110).astype(np.uint8)
        self._stats = native.Stats()

    def set_gate_callback(self, callback: object) -> None:
        pass

    def drain(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def residency(self) -> np.ndarray:
        return self._residency.copy()

    def stats(self) -> Any:
        self._stats.io_thread_busy_ns += 20_000_000
        self._stats.reads += 10
        return self._stats

    def prefetch(self, gate: int, experts: list[int], low: bool = False, limit: int = -1) -> int:
        (ctypes.c_int32 * len(experts))(*experts)
        return min(limit, 1)


def made_up_events(router: Any, n_tokens: int) -> list[Any]:
    """Of decode, one token each, one gate after the other, with inputs that drift from token to token and from layer to layer."""
    from moeoff.routing.event import GateEvent

    rng, d = np.random.default_rng(2), router.weights[0].shape[1]
    events, stream = [], rng.standard_normal(d, np.float32)
    for t in range(n_tokens):
        stream = 0.6 * stream + 0.8 * rng.standard_normal(d, np.float32)
        x = stream
        for gate in range(router.n_gates):
            x = 0.9 * x + 0.44 * rng.standard_normal(d, np.float32)
            inputs = (x / np.linalg.norm(x))[None]
            logits = router.logits(gate, inputs)
            probs = router.gated(logits)
            ids = router.select(gate, probs).astype(np.int32)
            weights = np.take_along_axis(probs, ids, axis=1)
            t_ns = 1 + 2_000_000 * (t * router.n_gates + gate)
            events.append(GateEvent(gate, ids, weights, probs, inputs, None, gate, 3 * ids.size, 0, 1 + len(events), t_ns, logits))
    return events


def parts(router: Any) -> Iterator[tuple[str, Callable[[Any], object]]]:
    from moeoff import policies
    from moeoff.engine.driver import Driver, PolicyUpdates, Probabilities
    from moeoff.engine.prefetcher import Prefetcher

    n, e, k = router.n_gates, router.n_experts, router.n_used[0]
    yield "probabilities", lambda event: router.gated(event.logits)
    shape = policies.CacheShape(n, e, k, n * e * (1 - ABSENT))
    for name in POLICIES:
        yield f"policy {name}", policies.get_policy(name)(shape).update
    for name in PREDICTORS:
        yield f"predictor {name}", policies.get_predictor(name)(router).observe
    for policy, predictor in (("score", None), ("score", "gate")):
        buffer = StandInBuffer(n, e)
        driver = Driver(buffer)
        if predictor is not None:
            prefetcher = Prefetcher(buffer, policies.get_predictor(predictor)(router), k, 4)
            prefetcher.ab_test = ON
            driver.add(prefetcher)
        driver.add(Probabilities(router))
        driver.add(PolicyUpdates(policies.get_policy(policy)(shape, buffer.priorities), buffer))
        yield f"driver: {policy}" + (f" and {predictor}" if predictor else ""), driver.deliver


@main.command("driver")
@click.option("--shapes", default=DRIVER_SHAPES, show_default=True, help="Gates x experts x used x n_embd.")
@click.option("--tokens", default=60, show_default=True)
@JSON
def time_driver(shapes: str, tokens: int, json_file: str | None) -> None:
    """Medians over tokens, of the thread's CPU time."""
    from moeoff.routing.router import Router

    with ResultsFile(json_file) as results:
        for text in shapes.split(","):
            n_gates, n_experts, n_used, n_embd = map(int, text.split("x"))
            rng = np.random.default_rng(0)
            router = Router([rng.standard_normal((n_experts, n_embd), np.float32) for _ in range(n_gates)], [n_used] * n_gates, n_experts=n_experts)
            events = made_up_events(router, tokens)
            table = results.table(text, f"{text}: {tokens} tokens", ["part", "µs an event", "ms a token"])
            for name, step in parts(router):
                times = []
                for at in range(0, len(events), n_gates):
                    began = time.thread_time_ns()
                    for event in events[at : at + n_gates]:
                        step(event)
                    times.append(time.thread_time_ns() - began)
                ns = float(np.median(times[len(times) // 4 :]))
                table.row(name, f"{ns / n_gates / 1e3:.1f}", f"{ns / 1e6:.2f}")


if __name__ == "__main__":
    main()
