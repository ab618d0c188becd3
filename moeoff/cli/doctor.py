"""`moeoff doctor`: checks of this machine and installation.

A check is a function that yields findings and changes nothing. An error in a check is a
finding.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from .. import __version__
from ..budget.plan import DeviceBound
from ..errors import MoeoffError
from ..options import in_flags, with_gpu
from ..system import machine
from ..system.console import table_console
from ..system.disk import (
    IN_MEMORY,
    IO_THREADS,
    MOST_IO_THREADS,
    DiskRate,
    direct_io,
    file_system,
    probe,
)
from ..system.machine import n_cores
from ..system.memory import available, cgroup_limit, format_size
from .options import JSON_OPTION, command, model_argument, sentence

PROBE_SECONDS = 1.0
BLOCK_BYTES = 1 << 20  # read size of the disk probe without a model
SLOW_DISK = 300e6  # bytes per second: below, only a nearly complete cache helps
FEW_FILES = 256
LITTLE_MEMORY = 512 << 20
REMOTE = "nfs nfs4 cifs smb3 9p virtiofs fuse.sshfs fuse.gcsfuse ceph lustre".split()
TYPE_NUMBERS = 64  # more than ggml has types
# CPU features that matter for speed: names in /proc/cpuinfo and in llama.cpp
SIMD = {"avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512"}

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was found, and how to fix it."""

    name: str
    state: str
    text: str
    way_out: str = ""


def _ok_or_warning(name: str, is_ok: bool, text: str, way_out: str, warning: str = "") -> Finding:
    return Finding(name, OK, text) if is_ok else Finding(name, WARNING, warning or text, way_out)


def check_fork() -> Iterator[Finding]:
    version = metadata.version("llama-cpp-python")
    yield Finding("moeoff", OK, __version__)
    yield Finding("fork", OK, f"llama-cpp-python {version}")  # `import moeoff` refuses other builds
    from ..llamacpp import native  # raises ForkError if the two interfaces differ

    yield Finding("interface", OK, f"version {native.abi_version()}, structs agree")


def check_cpu() -> Iterator[Finding]:
    from ..llamacpp.llama import api, find_devices
    from ..llamacpp.native import attention_kernels, row_kernel

    find_devices()  # without it the next call logs errors of drivers
    built = set(re.findall(r"(\w+) = 1\b", api.llama_print_system_info().decode()))
    yield cpu_features(built, machine.cpu_info("flags").split(), machine.LEVEL)
    yield row_kernels({n: row_kernel(n) for n in range(TYPE_NUMBERS)}, attention_kernels())
    quota, cores = _cpu_quota(), n_cores()
    way_out = f"give -t {max(1, int(min(quota, cores)))}"
    yield _ok_or_warning(
        "cores", quota >= cores, str(cores), way_out, f"{cores}, but a quota of {quota:.1f}"
    )
    from ..llamacpp.devices import backends, devices, why_none

    gpus = devices()
    if not gpus:
        warning = f"{why_none()}: the CPU computes everything"
        yield _ok_or_warning(
            "gpu", not backends(), "none in this build", "install a driver, or a newer one", warning
        )
    for device in gpus:
        free, total = device.memory
        used = format_size(DeviceBound(auto=True).of(free))
        memory = f"{format_size(free)} free of {format_size(total)}; --vram auto uses {used}"
        yield Finding("gpu", OK, f"{device.name}, {device.description}: {memory}")


def cpu_features(built: Collection[str], flags: Collection[str], level: str | None) -> Finding:
    """Compare llama.cpp's features with the CPU's flags. `level` is the wheel's."""
    unused = [name for flag, name in SIMD.items() if flag in flags and name not in built]
    lacking = [name for flag, name in SIMD.items() if flags and flag not in flags and name in built]
    rebuild = "rebuild the fork here: make env"
    if lacking:
        text = f"built with {', '.join(lacking)}, which this CPU lacks: it will crash"
        return Finding("cpu features", PROBLEM, text, rebuild)
    if unused and level is None:
        text = f"built without {', '.join(unused)}, which this CPU has"
        return Finding("cpu features", WARNING, text, rebuild)
    of_level = "" if level is None else f": level {level} of the wheel"
    more = f"; a build on this machine would also have {', '.join(unused)}" if unused else ""
    return Finding("cpu features", OK, (", ".join(sorted(built)) or "none") + of_level + more)


def row_kernels(state: Mapping[int, int], attention: int) -> Finding:
    """Report the types with row kernels. A state is 1: used, 0: none, -1: refused."""
    from ..gguf.quantize import type_name

    used, refused = (
        [type_name(number) for number, answer in state.items() if answer == use] for use in (1, -1)
    )
    refused += ["attention"] * (attention < 0)
    if not machine.wants_row_kernels():
        text = f"off ({machine.ROW_KERNELS} is set): slower, the results are the same"
        return Finding("row kernels", WARNING, text, f"unset {machine.ROW_KERNELS}")
    if refused:
        text = (
            f"{', '.join(refused)}: not bit-identical here, llama.cpp's are used: slower, the"
            " results are the same"
        )
        way_out = "rebuild the fork with another compiler: CC=... CXX=... make env"
        return Finding("row kernels", WARNING, text, way_out)
    names = f"{', '.join(used)}: four rows at a time"
    return Finding("row kernels", OK, names if used else "llama.cpp's: this build has no others")


def _cpu_quota() -> float:
    """Return the cgroup's limit in cores, infinite without one."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max"
        return math.inf


def check_openmp() -> Iterator[Finding]:
    from ..llamacpp.threads import why_not

    spin, reason = os.environ.get("GOMP_SPINCOUNT"), why_not()  # the import has set a default
    spins = os.environ.get("OMP_WAIT_POLICY", "").lower() == "active" or spin in (
        "infinite",
        "infinity",
    )
    bound = "bound to cores while they compute" if reason is None else f"not bound: {reason}"
    warning = "waiting threads spin, and take the cores from the I/O threads"
    text = f"GOMP_SPINCOUNT={spin}, threads {bound}"
    yield _ok_or_warning(
        "openmp", not spins, text, "unset OMP_WAIT_POLICY and GOMP_SPINCOUNT", warning
    )


def check_memory(free: int | None = None) -> Iterator[Finding]:
    limit, free = cgroup_limit(), available() if free is None else free
    yield Finding(
        "cgroup",
        OK,
        "no memory limit" if limit is None else f"memory limited to {format_size(limit)}",
    )
    way_out = "small models only: close other programs, or raise the limit"
    yield _ok_or_warning("memory", free >= LITTLE_MEMORY, f"{format_size(free)} available", way_out)


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    way_out = (
        f"ulimit -n {min(hard, 1024) if hard > 0 else 1024}: split models and servers need more"
    )
    is_ok = soft == resource.RLIM_INFINITY or soft >= FEW_FILES
    yield _ok_or_warning("open files", is_ok, f"at most {soft}", way_out)


def check_disk(
    path: str, block_bytes: int = BLOCK_BYTES, seconds: float = PROBE_SECONDS
) -> Iterator[Finding]:
    """Check the file system and the disk of a file or a folder, for `seconds` a probe.

    In a folder without models a temporary file is written.
    """
    if not os.path.exists(path):
        yield Finding(
            "file system", PROBLEM, f"{path} does not exist", "give an existing model or folder"
        )
        return
    kind = file_system(path)
    where = f"{kind} at {path}"
    if kind in IN_MEMORY:
        text = f"{where} keeps files in memory: offloading saves nothing"
        yield Finding("file system", WARNING, text, "put the model on a disk")
    else:
        warning = f"{where} is on a network or a host: reads have a high latency"
        yield _ok_or_warning(
            "file system", kind not in REMOTE, where, "put the model on a local disk", warning
        )
    models = [path]
    if not os.path.isfile(path):
        with os.scandir(path) as entries:
            models = [e.path for e in entries if e.name.endswith(".gguf") and e.is_file()]
    if models:
        yield from _disk_of(max(models, key=os.path.getsize), block_bytes, seconds)
        return
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".moeoff-doctor-") as file:
            for _ in range(64):
                file.write(os.urandom(BLOCK_BYTES))  # some disks compress zeros
            file.flush()
            os.fsync(file.fileno())
            yield from _disk_of(file.name, block_bytes, seconds)
    except OSError as error:
        text = f"not measured: {path} cannot be written ({error.strerror})"
        yield Finding("disk", WARNING, text, "give a model with -m")


def _disk_of(path: str, block_bytes: int, seconds: float) -> Iterator[Finding]:
    warning = "not possible: reads use the page cache, which counts in a container's limit"
    yield _ok_or_warning(
        "direct reads", direct_io(path), "work here", "put the model on a local disk", warning
    )
    yield from disk_rates(
        *(probe(path, block_bytes, seconds, n) for n in (IO_THREADS, MOST_IO_THREADS))
    )


def disk_rates(rate: DiskRate, with_more: DiskRate) -> Iterator[Finding]:
    """Report the rates with the fewest and with the most I/O threads."""
    cached = "" if rate.direct_io else ", perhaps from the page cache"
    size = format_size(rate.block_bytes)
    text = f"{rate.bytes_per_second / 1e6:.0f} MB/s in reads of {size}{cached}"
    way_out = "slow for offloading: use an SSD, or a budget that holds most experts"
    yield _ok_or_warning("disk rate", rate.bytes_per_second >= SLOW_DISK, text, way_out)
    gain = with_more.bytes_per_second / rate.bytes_per_second
    more = f"{MOST_IO_THREADS} read {gain:.1f}x as fast now"
    text = f"{IO_THREADS} to {MOST_IO_THREADS}, tuned while a model runs; {more}"
    yield Finding("I/O threads", OK, text)


def check_model(path: str, free: int | None = None) -> Iterator[Finding]:
    """Check a model's headers, memory floor, and disk at its slice size."""
    from ..budget.dry_load import answer_bytes, default_ctx, dry_load, slice_kinds
    from ..budget.micro_batch import SMALLEST
    from ..gguf.model_index import ModelIndex
    from ..server.private import PrivateServer

    try:
        model_index = ModelIndex.read(path)
        model_index.require_experts()
    except MoeoffError as error:
        yield Finding(
            "model", PROBLEM, in_flags(error), "moeoff runs GGUF files with routed experts"
        )
        return
    size = dry_load(
        model_index,
        default_ctx(model_index),
        {"flash_attn": True} | SMALLEST,
        extras=answer_bytes(model_index, 1),
    )
    text = (
        f"{model_index.architecture}, needs {format_size(size.floor)} at a context of {size.n_ctx},"
        f" {format_size(size.fixed + size.arena_full)} with all experts in memory"
    )
    if size.floor > (available() if free is None else free):
        way_out = "more memory, a smaller -c, or a model with fewer weights outside the experts"
        yield Finding("model", PROBLEM, text, way_out)
    else:
        yield Finding("model", OK, text)
        options: dict[str, Any] = {"flash_attn": True}
        try:
            with_gpu(options)
            server = PrivateServer(path, **options)
            with contextlib.closing(server.engine):
                for name, reason in server.explain().items():
                    if name not in ("memory", "I/O threads"):  # other checks report these
                        yield Finding(name, OK, reason)
        except MoeoffError as error:  # e.g. the default share of available memory is too small
            yield Finding("model", PROBLEM, sentence(error))
    yield from check_disk(path, max(kind.nbytes for kind in slice_kinds(model_index)))


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    console, grid = table_console(), Table.grid("", "", "", padding=(0, 1))
    colours = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
    for finding in findings:
        state, name, text = (
            Text(f"{finding.state:<8}", colours[finding.state]),
            f"{finding.name:<13}",
            Text(finding.text, overflow="fold"),
        )
        if finding.way_out:
            text.append(f" -> {finding.way_out}", "bold")
        if console.is_terminal:
            grid.add_row(state, name, text)
        else:
            console.print(Text.assemble(state, f" {name} ", text), soft_wrap=True)
    if console.is_terminal:
        console.print(grid)


@command()
@model_argument("GGUF, or a folder of models. Default: the current folder.")
@JSON_OPTION
def doctor(model: str | None, as_json: bool) -> None:
    """Check this machine and installation. The exit code is 1 if there is a problem."""
    path = model or os.getcwd()
    checks = {
        "fork": check_fork(),
        "cpu": check_cpu(),
        "openmp": check_openmp(),
        "memory": check_memory(),
        "files": check_files(),
    }
    checks |= {"model": check_model(path)} if os.path.isfile(path) else {"disk": check_disk(path)}
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings.extend(check)
        except (MoeoffError, OSError, metadata.PackageNotFoundError) as error:
            findings.append(Finding(name, PROBLEM, sentence(error)))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.state == PROBLEM for finding in findings):
        sys.exit(1)
