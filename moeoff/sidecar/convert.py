"""`moeoff convert`: a model's experts repacked into a sidecar."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from ..cpu import n_cores
from ..errors import OptionError
from ..files import require_new
from ..gguf.imatrix import Imatrix
from ..gguf.model_index import ModelBytes, ModelIndex, parse_tensor_name
from ..gguf.quantize import dequantize, quantize
from .builder import SidecarBuilder
from .file import AUTO, sidecar_path
from .tiers import Tier, read_plan

__all__ = ["Converted", "convert"]


@dataclass(frozen=True)
class Converted:
    """Result of a conversion, or plan of one.

    Attributes:
        path: the sidecar.
        tiers: bytes of each, by name.
        n_bytes: of the file.
        n_experts: experts repacked, over all layers.
        seconds: it took; of a dry run a guess from one piece of each kind.
        fallbacks: one line for each type that could not hold a row.
    """

    path: str
    tiers: dict[str, int]
    n_bytes: int
    n_experts: int
    seconds: float
    fallbacks: tuple[str, ...]


def convert(
    model: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    tiers: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    bits: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Repacks a model's routed experts into a sidecar; the model stays as it is.

    Args:
        model: GGUF with routed experts; of a split one the first part.
        output: the sidecar. Default: MODEL.experts.gguf, where it is found on its own.
        tiers: names joined by commas: original, auto, or ggml types. Default: auto, or nothing but the plan's with `bits`.
        imatrix: importance matrix for what is quantized.
        bits: a plan that gives each expert its type: one more tier, "bits" (`moeoff.sidecar.tiers.read_plan`).
        threads: default: every core this process may use.
        dry_run: plans, and writes nothing.
        force: replaces an existing sidecar.
        resume: takes up an interrupted conversion, and leaves what there is of it if interrupted.
        progress: told the bytes of experts that have been read, and how many there are.

    Raises:
        ModelError: the model or the importance matrix is missing, damaged, or cannot be converted.
        OptionError: a tier, plan or type makes no sense; the sidecar exists, or the disk is too full for it.
        WriteError: the sidecar cannot be written. Like every error and Ctrl-C it leaves no file, unless `resume`.
    """
    model_index = ModelIndex.read(model)
    model_index.require_experts()
    made = Tier.parse(tiers) if tiers else [] if bits else [Tier(AUTO)]
    if bits:
        made.append(read_plan(bits, model_index.experts))
    builder = SidecarBuilder(model_index, made, Imatrix.read(imatrix) if imatrix else None)
    out = os.fspath(output) if output else sidecar_path(model)
    require_new(out, [*model_index.files, imatrix, bits], "`output`")
    threads = threads or n_cores()
    if threads < 1:
        raise OptionError(f"{threads} threads are too few")
    started = time.monotonic()
    if dry_run:
        seconds = _guess(builder, threads)
    else:
        total = builder.read_bytes
        with _termination_interrupts():
            builder.write(out, threads=threads, force=force, resume=resume, progress=progress and (lambda done: progress(done, total)))
        seconds = time.monotonic() - started
    lines = [f"{wanted} cannot hold rows of {n_cols}: {taken} instead, in {count} slices" for (wanted, taken, n_cols), count in builder.fallbacks.items()]
    n_experts = len({(role.layer, role.chunk, job.expert) for job in builder.jobs for role in [parse_tensor_name(job.span.name)]})
    return Converted(out, builder.tier_bytes(), builder.total_bytes, n_experts, seconds, tuple(lines))


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """While open, SIGTERM cleans up like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _guess(builder: SidecarBuilder, threads: int) -> float:
    """Seconds of a conversion: one piece of each kind is read and converted, and 1 GB/s assumed for the disk."""
    seconds = (builder.read_bytes + builder.total_bytes) / 1e9
    costs: dict[tuple[int, int], float] = {}
    with ModelBytes(builder.model_index.files) as files:
        for job in builder.jobs:
            span = job.span
            row = job.nbytes // span.shape[1]
            for target in job.targets:
                type = builder.tensors[target].type
                if type == span.type:
                    continue
                if (span.type, type) not in costs:
                    rows = max(1, min(span.shape[1], (1 << 18) // span.shape[0]))
                    data = files.read(span.file, job.offset, rows * row, span.name)
                    weights = builder.imatrix.columns(span.name, job.expert, span.shape[2], span.shape[0]) if builder.imatrix else None
                    started = time.perf_counter()
                    values = dequantize(data, span.type, (rows, span.shape[0]))
                    quantize(values, type, builder.weights(weights, type, span.shape[0]), search=target in builder.stand_ins)
                    costs[span.type, type] = (time.perf_counter() - started) / (rows * span.shape[0])
                seconds += costs[span.type, type] * span.shape[0] * span.shape[1] / threads
    return seconds
