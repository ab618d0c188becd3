"""The trial on a GPU, in steps: what is there, the device's bits against stock's,
transfer rates, and the table of modes, presets and stock.

usage: gpu_trial.py [-o results] [--minutes N] [--fake | --small] [STEP...]     the named steps, or all that have no result yet
       gpu_trial.py --list | --table [--json FILE]                              the steps, or what the results say
       gpu_trial.py --pack WHEEL -o FILE.tar.xz [--python 3.12,...]             an archive that gpu_trial.sh runs from, with a wheel of cuda.py in it

A step is a process that ends within nine minutes, or is ended then. Its result is a
JSON file of its name, written when it has ended. With --minutes a step after the first
that has not ended by then is ended without a result, and none begins in the last half
minute: so the trial goes on, call by call, where a machine is lent for some minutes at
a time. A step that failed has a result that says why, and is run again only by its
name. Models are made on the spot: the demo model grown to 1.63 GiB, and the shape of
Qwen3-30B-A3B (18 GB) with the routing of models that answer. A row is a share of the
experts' bytes on the device, host memory for all experts or a quarter of them, and who
computes: five prompts of 512 tokens, then five answers of 128 tokens, the model's own,
behind 64 tokens of text each; one more of both, the first, does not count. STEP@2 is
the step once more, in a process of its own, so that contenders take turns: the table
has both.

--small takes the demo model in the place of both and short texts, for a software driver
(GGML_VK_VISIBLE_DEVICES=0). --fake does the same without any device:
every step runs its own code, and what would be on a device is on the CPU; its results
say so, and their figures are those of the CPU. A preset that needs a calibration, as
ProMoE, is left out unless `moeoff calibrate` has made one of the model file.

The archive has the repository's Python, the packages that it imports, numpy for each
Python, and the libraries of the wheel that compute. What serves or calibrates is left
out. cuBLAS alone is ten times the archive's bound: small_cublas.cu stands in for it,
for all contenders alike; it computes what is not quantized in batches of more than 16
tokens: in these models the routers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import lzma
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from results import HEAD, ResultsFile, commit, machine, write

PACKED_COMMIT = ROOT / "commit"  # of an archive
DEMO = ROOT / "moeoff/data/demo-moe-q8_0.gguf"
STEP_SECONDS = 520  # of nine minutes, the rest is for beginning and ending
LEAST_SECONDS = 30  # in which some step may end
MODELS = {
    "grown": ["grow_model.py", str(DEMO), "--width", "16", "--ff", "16"],
    "qwen3": ["shape_model.py", "qwen3-30b-a3b"],
}
# of the experts' bytes, in per cent, on the device; the first ones say most
SHARES = (25, 50, 10, 100)
# of the experts' bytes in host memory, ample with what whole pages take more
HOST = {"ample": 1.02, "short": 0.25}
SMALL = ((25, "short"),)  # the table's part that --small has
VRAM_MODES = ("cooperative", "centric", "reordered", "waves", "auto")
# lru, with each expert uploaded before its use: load on demand
PRESETS = ("fate", "hobbit", "promoe", "lru")
BESIDE = 1 << 30  # on the device, for caches and compute buffers
BATCHES = [40, 1, 2, 9, *[1] * 12]


@dataclass(frozen=True)
class Trial:
    """Where results go and what stands in for what.

    Attributes:
        small: the demo model and short texts.
        fake: no device: the CPU computes everything.
    """

    folder: Path
    small: bool
    fake: bool

    @property
    def models(self) -> dict[str, Path]:
        return (
            {"demo": DEMO}
            if self.small
            else {name: self.folder / f"{name}.gguf" for name in MODELS}
        )

    @property
    def layers(self) -> dict[str, Any]:
        return {} if self.fake else {"n_gpu_layers": 99}

    def vram(self, size: int | str, mode: str) -> dict[str, Any]:
        return {} if self.fake else {"vram": size, "vram_mode": mode}


# --- steps ---


def check(trial: Trial) -> dict[str, Any]:
    """Devices, and what `moeoff doctor` finds; without a device nothing else can run."""
    from moeoff import __version__
    from moeoff.llamacpp.devices import backends, devices

    doctor = subprocess.run(
        [sys.executable, "-m", "moeoff.cli", "doctor", "--json"], capture_output=True, text=True
    )
    if not doctor.stdout:
        raise RuntimeError(
            (doctor.stderr.strip().splitlines() or [f"doctor: exit code {doctor.returncode}"])[-1]
        )
    gpus = [
        {"name": device.name, "description": device.description, "memory": device.memory}
        for device in devices()
    ]
    if not gpus and not trial.fake:
        raise RuntimeError(
            f"no device: this build has {' and '.join(backends()) or 'no GPU backend'}, and no"
            " driver offers one"
        )
    driver = Path("/proc/driver/nvidia/version")
    return {
        "moeoff": __version__,
        "python": sys.version.split()[0],
        "machine": machine(),
        "commit": PACKED_COMMIT.read_text() if PACKED_COMMIT.exists() else commit(),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "devices": gpus,
        "doctor": json.loads(doctor.stdout),
    }


def bits(trial: Trial) -> dict[str, Any]:
    """On the demo model: the same bits as stock where every expert is in a slot, and
    where none is.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    import numpy as np

    from helpers.device_runs import device_runs

    ours = {
        "batches": BATCHES,
        **(
            {"n_gpu_layers": 0, "memory": None, "expert_memory": "3M"}
            if trial.fake
            else {"vram": "1G"}
        ),
    }
    stock = {"batches": BATCHES, **({"n_gpu_layers": 0} if trial.fake else {})}
    every = {} if trial.fake else {"slots": 32}
    learned = {} if trial.fake else {"uploads": 32, "passes": 40}  # until everything is there
    runs = {
        "stock, device": stock | {"stock": "device"},
        "stock, CPU": stock | {"stock": "CPU"},
        "centric, all in slots": ours | every | {"vram_mode": "centric"},
        "reordered, all in slots": ours | every | {"vram_mode": "reordered"},
        "waves, a quarter in slots": (
            ours | ({} if trial.fake else {"slots": 8}) | {"vram_mode": "waves"}
        ),
        "staged, a quarter in slots": (
            ours | ({} if trial.fake else {"slots": 8, "stage": (32, 2)}) | {"vram_mode": "waves"}
        ),
        "cooperative, all in slots": ours | every | learned,
        "cooperative, none in slots": ours | {"uploads": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        logits, stats = device_runs(str(DEMO), Path(folder), runs, timeout=STEP_SECONDS)
    out = {}
    for name in list(runs)[2:]:
        other = logits["stock, CPU" if "none" in name else "stock, device"]
        if logits[name].shape != other.shape:
            raise RuntimeError(f"{name}: {stats[name].get('error')}")
        n = int((logits[name].view(np.uint32) != other.view(np.uint32)).sum())
        largest = float(np.abs(logits[name] - other).max())
        out[name] = {
            "differ": n,
            "of": other.size,
            "largest": largest,
            "device_hits": stats[name]["device_hits"],
            "uploads": stats[name]["device_uploads"],
        }
    return {"same": all(run["differ"] == 0 for run in out.values()), "runs": out}


def transfers(trial: Trial) -> dict[str, Any]:
    """Bytes per second to each device and back, from ordinary and from pinned memory:
    copies that are waited for, in one piece and in pieces of a matrix; and to the device
    queued copies of experts, by matrix, as three rows of one copy, and in one piece.
    """
    from moeoff.llamacpp.devices import devices

    handles = {device.name: device.handle for device in devices()} or (
        {"CPU": None} if trial.fake else {}
    )
    return {
        name: _transfer_rates(handle, (16 << 20) if trial.small else (256 << 20))
        for name, handle in handles.items()
    }


def _transfer_rates(device: int | None, size: int) -> dict[str, float]:
    import ctypes
    from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p

    from moeoff.llamacpp._abi import function

    class InitParams(ctypes.Structure):  # ggml_init_params
        _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]

    by_index, count = (
        function("ggml_backend_dev_get", c_void_p, c_size_t),
        function("ggml_backend_dev_count", c_size_t),
    )
    device = by_index(count() - 1) if device is None else device  # the CPU is the last
    buffer_type = function("ggml_backend_dev_buffer_type", c_void_p, c_void_p)(device)
    host_type = function("ggml_backend_dev_host_buffer_type", c_void_p, c_void_p)(device)
    allocate, free = (
        function("ggml_backend_buft_alloc_buffer", c_void_p, c_void_p, c_size_t),
        function("ggml_backend_buffer_free", None, c_void_p),
    )
    base = function("ggml_backend_buffer_get_base", c_void_p, c_void_p)
    write = function("ggml_backend_tensor_set", None, c_void_p, c_void_p, c_size_t, c_size_t)
    read = function("ggml_backend_tensor_get", None, c_void_p, c_void_p, c_size_t, c_size_t)
    context = function("ggml_init", c_void_p, InitParams)(InitParams(1 << 16, None, True))
    # GGML_TYPE_I8
    tensor = function("ggml_new_tensor_1d", c_void_p, c_void_p, c_int, c_int64)(context, 24, size)
    buffer = function("ggml_backend_alloc_ctx_tensors_from_buft", c_void_p, c_void_p, c_void_p)(
        context, buffer_type
    )
    if not buffer:
        raise RuntimeError(f"the device has no {size >> 20} MiB for a tensor")
    ordinary = ctypes.create_string_buffer(b"\1" * size, size)
    sources = {"ordinary": ctypes.addressof(ordinary)}
    if pinned := allocate(host_type, size) if host_type else None:
        ctypes.memset(base(pinned), 1, size)
        sources["pinned"] = base(pinned)
    out = {}
    for (kind, source), (way, copy) in itertools.product(
        sources.items(), {"to": write, "from": read}.items()
    ):
        for piece in (size, 1 << 20):
            copy(tensor, source, 0, size)  # once before it counts
            rounds, started = 0, time.perf_counter()
            while rounds < 4 or time.perf_counter() - started < 0.5:
                for at in range(0, size, piece):
                    copy(tensor, source + at, at, piece)
                rounds += 1
            out[f"{kind} memory, {way} the device, {piece >> 20} MiB"] = (
                rounds * size / (time.perf_counter() - started)
            )
    for kind, source in sources.items():
        out |= {
            f"{kind} memory, to the device, queued: {name}": rate
            for name, rate in _queued_rates(device, tensor, source, size).items()
        }
    for one in filter(None, (buffer, pinned)):
        free(one)
    function("ggml_free", None, c_void_p)(context)
    return out


def _queued_rates(device: int, tensor: int, source: int, size: int) -> dict[str, float]:
    """Return the rates of queued copies of experts of three matrices of 1 MiB, which are
    4 KiB apart in memory and adjacent on the device. Every eight experts are waited for.
    """
    from ctypes import c_size_t, c_void_p

    from moeoff.llamacpp._abi import function

    places, matrix, expert = (c_void_p, c_void_p, c_void_p, c_size_t), 1 << 20, 4 << 20
    copy = function("ggml_backend_tensor_set_async", None, *places, c_size_t)
    rows = function("ggml_backend_tensor_set_2d_async", None, *places, *[c_size_t] * 4)
    wait = function("ggml_backend_synchronize", None, c_void_p)
    backend = function("ggml_backend_dev_init", c_void_p, c_void_p, c_void_p)(device, None)
    step = matrix + 4096

    def by_matrix(at: int) -> None:
        for i in range(3):
            copy(backend, tensor, source + at + i * step, at + i * matrix, matrix)

    ways: dict[str, Callable[[int], None]] = {
        "3 copies": by_matrix,
        "1 copy of 3 rows": lambda at: rows(
            backend, tensor, source + at, at, matrix, 3, matrix, step
        ),
        "1 copy": lambda at: copy(backend, tensor, source + at, at, 3 * matrix),
    }
    out = {}
    for name, queue in ways.items():
        n, started = 0, time.perf_counter()
        while time.perf_counter() - started < 0.5:
            for at in range(0, min(size, 8 * expert), expert):
                queue(at)
                n += 1
            wait(backend)
        out[name] = n * 3 * matrix / (time.perf_counter() - started)
    function("ggml_backend_free", None, c_void_p)(backend)
    return out


def model(trial: Trial, name: str) -> dict[str, Any]:
    """Writes a model file, unless it is there."""
    path = trial.models[name]
    if not path.exists():
        script, *arguments = MODELS[name]
        part = path.with_suffix(".part.gguf")
        subprocess.run(
            [
                sys.executable,
                ROOT / "scripts/models" / script,
                *arguments,
                "--overwrite",
                "-o",
                part,
            ],
            check=True,
            env=_with_scripts(),
        )
        os.replace(part, path)
    return {"bytes": path.stat().st_size}


def row(
    trial: Trial, name: str, options: dict[str, Any], stock: bool, share: int = 0, host: str = ""
) -> dict[str, Any]:
    """Prompts and single tokens of one contender, by `moeoff bench`'s own measurement,
    in a process of its own.

    Stock's share is whole layers, the last ones, as with --n-cpu-moe.
    """
    from moeoff.engine.driver import require_calibration
    from moeoff.errors import OptionError
    from moeoff.experts.profile import Profile
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.job import MOEOFF, STOCK, BenchTest, Job
    from moeoff.measure.rows import rows
    from moeoff.measure.run import measure
    from moeoff.policies import get_strategy
    from moeoff.system.machine import n_cores

    path = trial.models[name]
    index = ModelIndex.read(str(path))
    try:
        require_calibration(
            get_strategy(options.get("strategy", "auto")), Profile.find(index), index
        )
    except OptionError as error:
        return {"left_out": str(error)}
    rest = sum(Path(file).stat().st_size for file in index.files) - index.expert_bytes
    beside = BESIDE // 4 if trial.small else BESIDE
    if stock:
        options = {"n_cpu_moe": index.n_layer - index.n_layer * share // 100}
    elif share:
        options = options | trial.vram(
            index.expert_bytes * share // 100 + rest + beside, options["vram_mode"]
        )
        if trial.fake:
            del options["vram_mode"]
        options["expert_memory"] = int(index.expert_bytes * HOST[host])
    n_prompt, n_before, n_answer, n_ctx = (64, 16, 8, 256) if trial.small else (512, 64, 128, 1024)
    tests = BenchTest(n_prompt, 0), BenchTest(0, n_answer, n_before)
    n_rounds = 1 if trial.small else 6  # the first of them warms up
    # an old software driver crashes over it
    usual = {"n_ctx": n_ctx, "flash_attn": not trial.small}
    if stock:
        usual |= {"use_mmap": False, "n_threads": n_cores(), "n_threads_batch": n_cores()}
    job = Job(
        str(path),
        STOCK if stock else MOEOFF,
        trial.layers | usual | options,
        tests,
        answer=(),
        seconds=60.0,
        probe_seconds=0.0,
        repetitions=n_rounds,
        warm_up=False,
    )
    result = measure(job, timeout=STEP_SECONDS - 20)
    if result.error:
        raise RuntimeError(result.error)
    facts = {fact: result.closed[fact] for fact in result.closed if fact.startswith("device_")}
    return {"share": share, "host": host, "rows": rows(result, 0), **facts}


def _with_scripts() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    }


def steps(trial: Trial) -> dict[str, Callable[[], dict[str, Any]]]:
    """In the order in which they run: what says most comes first."""
    out: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(step, trial)
        for name, step in (("check", check), ("transfers", transfers), ("bits", bits))
    }
    for name in trial.models:
        if not trial.small:
            out[f"model-{name}"] = partial(model, trial, name)
        run = partial(row, trial, name)
        out |= {f"{name}-stock-{share}": partial(run, {}, True, share) for share in (0, *SHARES)}
        out[f"{name}-experts-on-cpu"] = partial(run, {}, False)
        for share, host in SMALL if trial.small else itertools.product(SHARES, HOST):
            for mode in VRAM_MODES:
                out[f"{name}-{share}-{host}-{mode}"] = partial(
                    run, {"vram_mode": mode}, False, share, host
                )
            for preset in PRESETS:
                out[f"{name}-{share}-{host}-{preset}"] = partial(
                    run, {"strategy": preset, "vram_mode": "centric"}, False, share, host
                )
    return out


# --- the driver: starts each step and keeps its result ---


def run_step(trial: Trial, name: str, seconds: float) -> dict[str, Any] | None:
    """In a process of its own; the last line that it says is its result, or why it
    failed. None: it was ended before its time, and has no result.
    """
    out = trial.folder / f"{name}.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--do", name, "-o", str(trial.folder)]
    command += ["--fake"] * trial.fake + ["--small"] * trial.small
    started, error, errors, result = time.monotonic(), "", "", None
    with subprocess.Popen(
        command,
        env=_with_scripts(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
            if process.returncode:
                error = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            else:
                result = json.loads(output.splitlines()[-1])
        except subprocess.TimeoutExpired:
            if seconds < STEP_SECONDS:
                return None
            error = f"not finished after {seconds} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                # what it has started, too: it would keep the device's memory
                os.killpg(process.pid, signal.SIGKILL)
    step = {
        "step": name,
        "fake": trial.fake,
        "small": trial.small,
        "seconds": round(time.monotonic() - started, 1),
        "error": error,
        "result": result,
    }
    if error:
        step["stderr"] = errors[-4000:]
    part = out.with_suffix(".part")
    part.write_text(json.dumps(step, indent=1) + "\n")
    os.replace(part, out)
    return step


def run(trial: Trial, names: list[str], minutes: float | None) -> int:
    """Runs the named steps, or those without a result; returns how many failed, 75
    (EX_TEMPFAIL) if time ran out before the last.
    """
    trial.folder.mkdir(parents=True, exist_ok=True)
    every, started, failed = steps(trial), time.monotonic(), 0
    todo = names or [name for name in every if not (trial.folder / f"{name}.json").exists()]
    for i, name in enumerate(todo):
        left = (
            STEP_SECONDS
            if minutes is None or not i
            else 60 * minutes - (time.monotonic() - started)
        )
        step = run_step(trial, name, min(left, STEP_SECONDS)) if left >= LEAST_SECONDS else None
        if step is None:
            print(f"{len(todo) - i} steps are left; run it again", flush=True)
            return 75
        print(f"{name}: {step['error'] or 'done'} ({step['seconds']} s)", flush=True)
        failed += bool(step["error"])
        if name == "check" and step["error"]:
            return 1
    return min(failed, 1)


def save_tables(folder: Path, path: Path | None) -> None:
    """Prints what the results say, and writes it as a data file of where they were
    measured.
    """
    results = sorted(folder.glob("*.json"), key=lambda result: result.stat().st_mtime)
    steps = {result.stem: json.loads(result.read_text()) for result in results}
    file = ResultsFile(None)
    tables(steps, file)
    if path:
        facts = steps["check"]["result"]
        place = ", ".join(
            [facts["machine"], *(device["description"] for device in facts["devices"])]
        )
        day = datetime.date.fromtimestamp(results[0].stat().st_mtime).isoformat()
        head = (
            shlex.join(["python", "scripts/bench/gpu_trial.py", *steps]),
            place,
            day,
            facts["commit"],
        )
        write(path, dict(zip(HEAD, head)) | {"tables": [vars(table) for table in file.tables]})


def tables(steps: dict[str, dict[str, Any]], file: ResultsFile) -> None:
    """Write the tables of the results, with failed steps last."""
    results = {name: step["result"] for name, step in steps.items() if step["result"]}
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, result in results.items():
        if "rows" in result:
            rows.setdefault(name.partition("@")[0] + " (fake)" * steps[name]["fake"], []).append(
                result
            )
    if rows:
        tests = [test["test"] for test in next(iter(rows.values()))[0]["rows"]]
        speeds = file.table(
            "rows",
            "Tokens/s, the model's share on the device, host memory and contender",
            ["", *tests, "of the experts on the GPU", "slots"],
        )
        for name, processes in rows.items():
            rates = [
                _speed([process["rows"][i]["samples_ts"] for process in processes])
                for i in range(len(tests))
            ]
            hits = [process["rows"][-1]["device_hit_rate"] for process in processes]
            slots = {use["n_slots"] for use in processes[0].get("device_memory", {}).values()}
            speeds.row(
                name,
                *rates,
                "" if None in hits else f"{statistics.median(hits):.0%}",
                ", ".join(map(str, slots)),
            )
        longest = max(
            len(result["rows"][0]["samples_ts"]) for result in results.values() if "rows" in result
        )
        prompts = file.table(
            "prompts", f"Each {tests[0]} in turn: tokens/s", ["", *map(str, range(1, longest + 1))]
        )
        for name, processes in rows.items():
            for process in processes:
                rates = [f"{rate:.0f}" for rate in process["rows"][0]["samples_ts"]]
                prompts.row(name, *rates, *[""] * (longest - len(rates)))
    if "transfers" in results:
        transfers = file.table("transfers", "To and from the device", ["", "GB/s"])
        for device, rates in results["transfers"].items():
            for way, rate in rates.items():
                transfers.row(f"{device}, {way}", f"{rate / 1e9:.1f}")
    if "bits" in results:
        bits = file.table(
            "bits", "Numbers that differ from stock's", ["", "differ", "of", "experts uploaded"]
        )
        for name, run in results["bits"]["runs"].items():
            bits.row(name, str(run["differ"]), str(run["of"]), str(run["uploads"]))
    reasons = {
        name: step["error"] or step["result"].get("left_out") for name, step in steps.items()
    }
    if any(reasons.values()):
        failed = file.table("failed", "Steps without a result", ["", "why"])
        for name, why in reasons.items():
            if why:
                failed.row(name, why)


def _speed(processes: list[list[float]]) -> str:
    """The median of all repetitions behind the first of each process, and their range."""
    rates = [rate for samples in processes for rate in samples[1:] or samples]
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


# --- the archive ---

NUMPY = "2.2.6"  # the newest that Python 3.10 has, and the same library for all
PURE = ("gguf", "jinja2", "markupsafe", "psutil", "platformdirs", "click", "rich", "pygments", "markdown-it-py", "mdurl", "prompt_toolkit", "wcwidth",
        "typing_extensions", "diskcache", "tqdm", "pyyaml", "threadpoolctl")  # fmt: skip
# what computes needs none of these
LEFT_OUT = ("libllama-server-impl.so", "libllama-common.so", "libmtmd.so", "moeoff-templates")
NOT_PACKED = {"tests", "__pycache__", "f2py", "include", "bin"}  # folders of packages
FOLDERS = ("moeoff", "scripts/bench", "scripts/models", "tests/helpers")
LARGEST = 60 << 20


def pack(wheel: Path, out: Path, pythons: list[str]) -> int:
    """Writes the archive; returns its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "gpu-trial"
        site = home / "site"
        _install(site, "3.10", *PURE)
        for version in pythons:
            _install(home / f"numpy-cp{version.replace('.', '')}", version, f"numpy=={NUMPY}")
        with zipfile.ZipFile(wheel) as content:
            content.extractall(
                site, [name for name in content.namelist() if Path(name).name not in LEFT_OUT]
            )
        if (site / "llama_cpp/lib/libggml-cuda.so").exists():
            sys.path.insert(0, str(ROOT / "scripts/build"))
            import cuda

            for library in cuda.for_trial():
                (site / "llama_cpp/lib" / library.name).write_bytes(library.read_bytes())
        for path in _files_of_the_repository():
            target = home / "tree" / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        (home / "tree/commit").write_text(commit())
        script = home / "gpu_trial.sh"
        script.write_bytes((ROOT / "scripts/bench/gpu_trial.sh").read_bytes())
        script.chmod(0o755)
        files = [
            path for path in home.rglob("*") if path.is_file() and is_packed(path.relative_to(home))
        ]
        # the same file of several Pythons one behind the other, so that the second
        # costs nothing
        files.sort(
            key=lambda path: (path.name.partition(".cpython-")[0], path.stat().st_size, str(path))
        )
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
        with (
            lzma.open(out, "wb", filters=filters) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for path in files:
                tar.add(path, str(path.relative_to(home.parent)))
    if (size := out.stat().st_size) > LARGEST:
        out.unlink()
        raise SystemExit(
            f"{out.name} would have {size / (1 << 20):.1f} MiB, more than {LARGEST >> 20}: give"
            " fewer --python"
        )
    return size


def is_packed(path: Path) -> bool:
    """Return whether a file of the archive's folder is part of the archive.

    It has all files of the repository, and of packages those that running needs.
    """
    return (
        path.parts[0] == "tree"
        or not NOT_PACKED & set(path.parts)
        and path.suffix not in (".pyi", ".a")
    )


def _install(folder: Path, python: str, *packages: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qqq",
        "--no-deps",
        "--no-compile",
        "--only-binary",
        ":all:",
        "--python-version",
        python,
    ]
    subprocess.run(
        [*command, "--platform", "manylinux2014_x86_64", "--target", str(folder), *packages],
        check=True,
    )


def _files_of_the_repository() -> list[Path]:
    paths = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return [*paths, ROOT / "scripts/results.py", ROOT / "LICENSE", ROOT / "NOTICE"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("results"),
        help="folder of results and models, or the archive",
    )
    parser.add_argument(
        "--minutes", type=float, help="no step after the first lasts longer than these"
    )
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path, help="with --table: a data file of the tables, too")
    parser.add_argument("--pack", type=Path, metavar="WHEEL")
    parser.add_argument(
        "--python", default="3.10,3.11,3.12,3.13", help="that the archive has numpy for"
    )
    parser.add_argument("--do", help=argparse.SUPPRESS)
    options = parser.parse_args()
    trial = Trial(options.out.resolve(), options.small or options.fake, options.fake)
    known = steps(trial)
    if wrong := sorted(
        {name.partition("@")[0] for name in (*options.steps, options.do or "check")} - set(known)
    ):
        parser.error(f"no step {wrong[0]!r}; --list has them")
    if options.list:
        print("\n".join(known))
    elif options.table:
        save_tables(trial.folder, options.json)
    elif options.pack:
        print(f"{pack(options.pack, options.out, options.python.split(',')) / (1 << 20):.1f} MiB")
    elif options.do:
        print(json.dumps(known[options.do.partition("@")[0]]()))
    else:
        return run(trial, options.steps, options.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
