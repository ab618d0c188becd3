"""What `moeoff convert` takes: docs/results/conversion.md.

usage: bench_convert.py errors MODEL...   errors of each type on the experts of models
       bench_convert.py speed MODEL       beside cp on the same disk
       bench_convert.py memory MODEL      in a memory cgroup (root)

Runs alternate and start with what they read out of the page cache.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cgroup import memory_cgroup
from moeoff.bench.run import drop_from_page_cache
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.quantize import dequantize, fits, quantize, row_bytes, type_from_name, type_name
from results import HELP, ResultsFile

SEARCHED = "Q2_0, searched scales"
TYPES = f"Q8_0|Q6_K|Q5_K|Q4_K|Q4_0|IQ4_NL|IQ4_XS|MXFP4|NVFP4|Q3_K|IQ3_S|IQ3_XXS|Q2_K|IQ2_S|{SEARCHED}|Q2_0|TQ2_0".split("|")
COMMAND = os.path.join(os.path.dirname(sys.executable), "moeoff")
MODEL = click.argument("model", type=click.Path(exists=True, dir_okay=False))
FOLDER = click.option("-d", "--folder", type=click.Path(exists=True, file_okay=False), help="Where to write. Default: beside the model.")
ROUNDS = click.option("--rounds", default=5, show_default=True)
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)


@click.group(help=__doc__)
def main() -> None:
    pass


@contextlib.contextmanager
def scratch(folder: str | None, model: str, name: str) -> Iterator[Path]:
    """A path in the folder, or beside the model; what is there afterwards is removed."""
    path = Path(folder or os.path.dirname(os.path.abspath(model))) / f"bench-convert-{os.getpid()}-{name}.gguf"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def sampled(model: str, n_slices: int, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """Types and values f32 [at most n_rows, n_cols] of slices spread over a model."""
    model_index, rng = ModelIndex.read(model), np.random.default_rng(0)
    spans = list(model_index.experts.values())
    for i in rng.choice(len(spans), min(n_slices, len(spans)), replace=False):
        span, expert = spans[i], int(rng.integers(spans[i].shape[2]))
        rows = min(span.shape[1], n_rows)
        with open(model_index.files[span.file], "rb") as file:
            data = os.pread(file.fileno(), rows * row_bytes(span.type, span.shape[0]), span.offset + expert * (span.nbytes // span.shape[2]))
        yield span.type, dequantize(data, span.type, (rows, span.shape[0]))


@main.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@JSON
def errors(models, json_file) -> None:
    """Root mean square of the error, relative to that of the weights, over 24 slices of each model; CPU time of the first."""
    sums: dict[str, list[list[float]]] = {name: [[] for _ in models] for name in TYPES}
    seconds: dict[str, float] = dict.fromkeys(TYPES, 0)
    n_values, own = 0, []
    for column, model in enumerate(models):
        for source, values in sampled(model, 24, 256):
            own = own[:column] + [type_name(source)]
            n_values += values.size if column == 0 else 0
            for name in TYPES:
                type = type_from_name(name.split(",")[0])
                if not fits(type, values.shape[1]) or type == source:
                    continue
                started = time.thread_time()
                data = quantize(values, type, search=name == SEARCHED)
                seconds[name] += time.thread_time() - started if column == 0 else 0
                sums[name][column].append(float(((dequantize(data, type, values.shape) - values) ** 2).sum() / (values**2).sum()))
    with ResultsFile(json_file) as results:
        title = "Root mean square of the error, relative to that of the weights"
        table = results.table("errors", title, ["type", "bits per weight", "CPU ns per weight", *(f"of {name}" for name in own)])
        for name, columns in sums.items():
            cells = [f"{100 * statistics.mean(column) ** 0.5:.1f} %" if column else "" for column in columns]
            table.row(name, f"{row_bytes(type_from_name(name.split(',')[0]), 256) / 32:.2f}", f"{1e9 * seconds[name] / n_values:.0f}", *cells)


def timed(command: list[str], out: Path, model: str) -> float:
    """Seconds until the output is on the disk."""
    os.sync()
    drop_from_page_cache(model)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    fd = os.open(out, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - started
    out.unlink()
    return seconds


@main.command()
@MODEL
@FOLDER
@ROUNDS
@click.option("--tiers", default="original", show_default=True)
@JSON
def speed(model, folder, rounds, tiers, json_file) -> None:
    """Bytes of source per second. cp copies the model whole, convert its experts: rates, not times, are compared."""
    expert_bytes, file_bytes = ModelIndex.read(model).expert_bytes, os.path.getsize(model)
    rates: dict[str, list[float]] = {"cp": [], "convert": []}
    with scratch(folder, model, "speed") as out:
        for _ in range(rounds):
            rates["cp"].append(file_bytes / timed(["cp", "--reflink=never", model, str(out)], out, model))
            rates["convert"].append(expert_bytes / timed([COMMAND, "convert", model, "-o", str(out), "--tiers", tiers], out, model))
    ratios = [a / b for a, b in zip(rates["convert"], rates["cp"])]
    with ResultsFile(json_file) as results:
        columns = ["model", "`cp`", f"`convert --tiers {tiers}`", "convert / cp, pairs"]
        table = results.table("speed", "MB/s of source, median (range)", columns)
        cells = [f"{statistics.median(list_) / 1e6:.0f} ({min(list_) / 1e6:.0f}-{max(list_) / 1e6:.0f})" for list_ in rates.values()]
        size = f"{file_bytes / 2**30:.2f} GiB, {expert_bytes / 2**30:.2f} GiB of it experts, {rounds} rounds"
        table.row(size, *cells, f"{statistics.median(ratios):.0%} ({min(ratios):.0%}-{max(ratios):.0%})")


@main.command()
@MODEL
@FOLDER
@click.option("--limit", default=1024, show_default=True, help="MiB of the cgroup, in which the page cache counts too.")
@click.option("--tiers", default="original,auto", show_default=True)
@JSON
def memory(model, folder, limit, tiers, json_file) -> None:
    """Peak resident memory of a conversion, and whether it lives in a cgroup."""
    drop_from_page_cache(model)
    with scratch(folder, model, "memory") as out, memory_cgroup(limit << 20) as group:
        code = (
            f"import resource; from moeoff.cli.main import main; main(['convert', {model!r}, '-o', {str(out)!r}, '--tiers', {tiers!r}], standalone_mode=False)"
        )
        done = group.run([sys.executable, "-c", code + "; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"exit code {done.returncode}: {done.stderr.strip()}")
        *said, peak = done.stdout.splitlines()
        print(said[0])
        with ResultsFile(json_file) as results:
            columns = ["model", "written", "cgroup", "peak resident", "peak with page cache"]
            table = results.table("memory", f"A conversion to {tiers} in a memory cgroup", columns)
            sizes = [f"{os.path.getsize(path) / 2**30:.2f} GiB" for path in (model, out)]
            table.row(*sizes, f"{limit} MiB", f"{int(peak) / 1024:.0f} MiB", f"{group.peak_bytes >> 20} MiB")


if __name__ == "__main__":
    main()
