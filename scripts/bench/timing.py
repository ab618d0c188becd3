"""Cold runs of bench_worker.py in processes of their own, and what a table says beside them: used by the other benchmarks."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from cgroup import memory_cgroup
from moeoff.bench.process import drop_from_page_cache
from moeoff.machine import machine_name

__all__ = ["drop_from_page_cache", "machine", "measure", "median", "run"]

WORKER = str(Path(__file__).with_name("bench_worker.py"))


def measure(engine: str, model: str, text: str, n_prompt: int, n_decode: int, timeout: float, run=subprocess.run, **options) -> dict:
    """One cold run of bench_worker.py in a process of its own; {"failed": why} if it did not end well."""
    drop_from_page_cache(model)
    command = [sys.executable, WORKER, engine, model, text, str(n_prompt), str(n_decode)]
    command += [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
    try:
        result = run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {timeout:.0f} s"}
    if result.returncode != 0:
        return {"failed": "killed" if result.returncode == -9 else (result.stderr.strip().splitlines() or ["failed"])[-1]}
    return json.loads(result.stdout.splitlines()[-1])


def run(limit: int, engine: str, model: str, text: str, n_prompt: int, n_decode: int, timeout: float, **options) -> dict:
    """The same in a memory cgroup of `limit` bytes."""
    with memory_cgroup(limit) as group:
        row = measure(engine, model, text, n_prompt, n_decode, timeout, group.run, **options)
        return row if "failed" in row else row | {"cgroup_peak_mib": group.peak_bytes / (1 << 20)}


def machine() -> str:
    return f"{machine_name()}, Linux {platform.release()}"


def median(rows: list[dict]) -> dict:
    good = [row for row in rows if "failed" not in row]
    if not good:
        return rows[0]
    out = {key: statistics.median(row[key] for row in good) for key in good[0]}
    speeds = [row["gen_tps"] for row in good if "gen_tps" in row]
    if speeds:
        out["gen_tps_range"] = [min(speeds), max(speeds)]
    return out
