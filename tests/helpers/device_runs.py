"""Runs on a device, in a process of their own: ggml looks for devices once, and a
software driver has to be asked for.

As a program it takes {"model": path, "runs": {name: run}} on stdin and writes the runs'
results to the files that it is given: logits as .npz, the rest as JSON. A run has the
options of `moeoff.Llama`, or of stock llama.cpp with "stock": where the experts are,
"CPU" or "device".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
# ggml leaves software drivers out, unless they are named
ENVIRONMENT = {"GGML_VK_VISIBLE_DEVICES": "0"}
COMMON = {
    "n_ctx": 256,
    "n_threads": 2,
    "n_threads_batch": 2,
    "n_gpu_layers": 99,
    "logits_all": True,
    "op_offload": False,
    "flash_attn": False,
}


def several(n: int) -> dict[str, str]:
    """Return the environment in which ggml finds a software driver n times."""
    return {name: ",".join([device] * n) for name, device in ENVIRONMENT.items()}


@cache
def why_no_device() -> str:
    """Empty, or what is missing on this machine."""
    code = (
        "from moeoff.llamacpp.llama import supports_gpu; from moeoff.llamacpp.devices import"
        " buffer_types; print(supports_gpu(), [n for n in buffer_types() if n != 'CPU'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    if done.returncode:
        return f"devices cannot be listed: {done.stderr[-200:]}"
    if not done.stdout.startswith("True"):
        return "this build has no GPU backend (CMAKE_ARGS=-DGGML_VULKAN=ON make env)"
    return (
        ""
        if "['" in done.stdout
        else "no device and no software driver (Debian: mesa-vulkan-drivers)"
    )


def device_runs(
    model: str,
    folder: Path,
    runs: dict[str, dict[str, Any]],
    timeout: float = 600,
    n_devices: int = 1,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(logits [positions, n_vocab], stats) of each run by its name.

    Args:
        n_devices: Devices, which may be one device several times.
        runs: options, "batches": how many tokens each batch has; of ours "slots": of
            each layer, one number or a list, instead of what vram has room for,
            "capacity": the same of all layers together, as the policy divides it,
            "stage": slots of a stage and stages, likewise, by default none, "uploads":
            by default as many as end in time, at each step, "block": tokens that
            vram_mode auto compares, "room": slots of a layer that the device has memory
            for, whatever its driver says, and "passes": the text is computed so often
            at most, until a device has served everything, and its last pass counts;
            "precision": fields of `Precision`; "versions": what serves each use of an
            expert, in the order of gate events; "trace" and "replay": files; "count":
            "counts" of the stats has for each batch what `counted_devices` counts, of
            stock, too; "second": every batch is computed in another context of the
            model first, and with "other" its logits count.
    """
    out, stats = folder / "logits.npz", folder / "stats.json"
    job = json.dumps({"model": model, "runs": runs})
    done = subprocess.run(
        [sys.executable, __file__, str(out), str(stats)],
        input=job,
        env=os.environ | several(n_devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as arrays:
        return {name: arrays[name] for name in arrays}, json.loads(stats.read_text())


def _run(model: str, run: dict[str, Any]) -> tuple[np.ndarray, Any]:
    from dataclasses import asdict

    import moeoff
    import moeoff.engine.comparison as comparison
    import moeoff.engine.device_tier as device_tier
    from helpers.counted_backend import counted_devices
    from helpers.logits import Stock, decode_in
    from moeoff.gguf.model_index import EXPERT_PATTERN
    from moeoff.llamacpp.llama import llama_cpp
    from moeoff.llamacpp.native import TensorOverrides, cpu_buffer_type
    from moeoff.precision import Precision

    where, batches, slots, passes = (
        run.pop("stock", None),
        run.pop("batches"),
        run.pop("slots", None),
        run.pop("passes", 1),
    )
    capacity = run.pop("capacity", None)
    second, versions = run.pop("second", False), run.pop("versions", [])
    if precision := run.pop("precision", None):
        run["precision"] = Precision(**precision)
    devices = counted_devices() if run.pop("count", False) else None
    device_tier._UPLOADS = run.pop("uploads", -1)
    if block := run.pop("block", None):
        comparison._BLOCK, comparison._SKIP = block, 0
    if slots or capacity:

        def slots_that_fit(
            _: Any, bytes_of: Any, n_experts: int, divide: Any, *, least: int, **__: Any
        ) -> list[int]:
            if capacity:
                return [max(n, least) for n in divide(capacity)]
            return slots if isinstance(slots, list) else [slots] * len(bytes_of)

        device_tier.slots_that_fit = slots_that_fit
        stage = tuple(run.pop("stage", (0, 0)))
        device_tier.stage_that_fits = lambda *_: stage
    if (room := run.pop("room", None)) is not None:
        _limit_room(room)
    options = COMMON | run
    ours = {"memory": "6G", "strategy": "lru", "vram_mode": "cooperative"} | options
    try:
        overrides = (
            TensorOverrides([(EXPERT_PATTERN, cpu_buffer_type())]) if where == "CPU" else None
        )
        llm: Any = (
            Stock(model, overrides=overrides, **options) if where else moeoff.Llama(model, **ours)
        )
    except (moeoff.BudgetError, moeoff.OptionError) as error:
        return np.zeros((0, 0), np.float32), {"error": str(error), "needed": error.hint.get("vram")}
    if devices and not where:
        devices.thread = llm.call(threading.get_ident)
    for _ in range(passes):
        llm.clear_context() if not where else llm.reset()
        if not where:
            llm.reset_stats()
            llm.engine.buffer.force(np.array(versions, np.uint8))
        rows, elsewhere, counts, first = [], [], [], 0
        ctx = llama_cpp.llama_init_from_model(llm.model, llm.context_params) if second else None
        for n in batches:
            tokens = [(7 + 13 * i) % min(300, llm.n_vocab()) for i in range(first, first + n)]
            if second:
                elsewhere.append(decode_in(ctx, tokens, first, llm.n_vocab()))
            if devices:
                devices.counts.clear()
            llm.eval(tokens)
            if devices:
                counts.append(dict(devices.counts))
            rows.append(llm.scores[first : first + n].copy())
            first += n
        if not where and llm.stats().device_hit_rate == 1:
            break
    if second:
        llama_cpp.llama_free(ctx)
        rows = elsewhere if second == "other" else rows
    stats = (
        None if where else asdict(llm.stats()) | {"device_hit_rate": llm.stats().device_hit_rate}
    )
    llm.close()
    return np.concatenate(rows), (stats or {}) | {"counts": counts}


def _limit_room(room: int) -> None:
    from moeoff.engine.buffer import ExpertBuffer
    from moeoff.errors import MoeoffError

    allocate = ExpertBuffer.set_device_slots

    def with_less(self: ExpertBuffer, slots: Any, *arguments: Any) -> None:
        if any(n > room for _, n, _ in slots):
            raise MoeoffError("Vulkan0 has no room for 123456 bytes of experts of layer 3")
        allocate(self, slots, *arguments)

    ExpertBuffer.set_device_slots = with_less  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    job = json.load(sys.stdin)
    results = {name: _run(job["model"], run) for name, run in job["runs"].items()}
    np.savez(sys.argv[1], **{name: logits for name, (logits, _) in results.items()})
    Path(sys.argv[2]).write_text(json.dumps({name: stats for name, (_, stats) in results.items()}))
