"""Speed of `moeoff convert` beside cp on the same disk, and the error of each twin on a model's own experts.

usage: bench_convert.py -m MODEL [-d FOLDER] [--rounds 3] [--tiers keep] [--errors]

Every run starts with the model out of the page cache and ends when the output is on the disk (cp followed by fsync; convert
does that itself). Runs alternate. The file cp copies is the model whole, convert reads and writes its experts: rates, not
times, are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import moeoff.hooks  # noqa: F401  isort: skip
import click
import numpy as np

from moeoff.layout import Layout
from moeoff.quantize import dequantize, fits, quantize, row_bytes, type_from_name, type_name

TYPES = "Q8_0 Q6_K Q5_K Q4_K Q4_0 IQ4_NL IQ4_XS MXFP4 NVFP4 Q3_K IQ3_S IQ3_XXS Q2_K IQ2_S Q2_0 TQ2_0".split()


def drop(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def timed(command: list[str], out: Path, model: str) -> float:
    out.unlink(missing_ok=True)
    os.sync()
    drop(model)
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    fd = os.open(out, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - started
    out.unlink()
    return seconds


def errors(model: str) -> None:
    """Root mean square of the error, relative to that of the weights, over 24 slices spread over the model."""
    layout = Layout.read(model)
    spans = list(layout.experts.values())
    rng = np.random.default_rng(0)
    picked = [(spans[i], int(rng.integers(spans[i].shape[2]))) for i in rng.choice(len(spans), min(24, len(spans)), replace=False)]
    sums: dict[str, list[float]] = {}
    for span, expert in picked:
        rows = min(span.shape[1], 256)
        with open(layout.files[span.file], "rb") as file:
            data = os.pread(file.fileno(), rows * row_bytes(span.type, span.shape[0]), span.offset + expert * (span.nbytes // span.shape[2]))
        values = dequantize(data, span.type, (rows, span.shape[0]))
        for name in TYPES:
            type = type_from_name(name)
            if fits(type, span.shape[0]):
                got = dequantize(quantize(values, type), type, values.shape)
                sums.setdefault(name, []).append(float(((got - values) ** 2).sum() / (values**2).sum()))
    print(f"| type | bits per weight | error on {type_name(spans[0].type)} experts |\n|---|---|---|")
    for name, list_ in sums.items():
        print(f"| {name} | {row_bytes(type_from_name(name), 256) / 32:.2f} | {100 * statistics.mean(list_) ** 0.5:.1f} % |")


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("-d", "--folder", type=click.Path(exists=True, file_okay=False), help="Where to write. Default: beside the model.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--tiers", default="keep", show_default=True)
@click.option("--errors", "only_errors", is_flag=True, help="Only print the table of errors.")
def main(model, folder, rounds, tiers, only_errors) -> None:
    if only_errors:
        errors(model)
        return
    out = Path(folder or os.path.dirname(os.path.abspath(model))) / "bench-convert.gguf"
    convert = [os.path.join(os.path.dirname(sys.executable), "moeoff"), "convert", model, "-o", str(out), "--tiers", tiers]
    expert_bytes, file_bytes = Layout.read(model).expert_bytes, os.path.getsize(model)
    rates: dict[str, list[float]] = {"cp": [], "convert": []}
    for _ in range(rounds):
        rates["cp"].append(file_bytes / timed(["cp", "--reflink=never", model, str(out)], out, model))
        rates["convert"].append(expert_bytes / timed(convert, out, model))
    for name, list_ in rates.items():
        print(f"{name}: {statistics.median(list_) / 1e6:.0f} MB/s of source ({min(list_) / 1e6:.0f}-{max(list_) / 1e6:.0f})")
    print(f"convert / cp: {statistics.median(rates['convert']) / statistics.median(rates['cp']):.0%}")


if __name__ == "__main__":
    main()
