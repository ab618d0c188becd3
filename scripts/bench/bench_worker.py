"""One measured run, started by timing.py: evaluates a text token by token and prints what it took as JSON.

usage: bench_worker.py ENGINE MODEL TEXT N_PROMPT N_DECODE [OPTION=VALUE ...]

ENGINE: moeoff (options of moeoff.Llama; step=1..4 of the ladder from on-demand to everything; fields of the strategy, as serial or predictor,
replace its own; t1, t2, p, mispredicted and low, a tier of the companion, make a precision), stock (llama_cpp.Llama from the same library: use_mmap, use_extra_bufts),
disk (no model: random direct reads of the model's expert slices; option workers).
The text is real and its tokens are fed as they are, so that every engine sees the same routing.
"""

from __future__ import annotations

import concurrent.futures
import json
import mmap
import os
import random
import resource
import sys
import time
from dataclasses import replace


def _ladder() -> list[dict]:
    """From the papers' on-demand to everything, one part more at each step."""
    from moeoff.engine.strategy import Strategy

    cache = Strategy("cache", "", eager=False, serial=True, policy="score")
    prefetch = replace(cache, name="prefetch", eager=True, predictor="gate")
    everything = replace(prefetch, name="everything", serial=False)
    return [{"strategy": "on-demand", "n_lanes": 1}, {"strategy": cache, "n_lanes": 1}, {"strategy": prefetch, "n_lanes": 1}, {"strategy": everything}]


def _value(text: str):
    if text in ("true", "false"):
        return text == "true"
    if text == "None":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _precision(options: dict):
    from moeoff.budget.precision import LOSSLESS, Precision

    named = (("t1", 1.0), ("t2", 1.0), ("p", 0.0), ("low", None), ("mispredicted", False))
    t1, t2, p, low, mispredicted = (options.pop(name, default) for name, default in named)
    return Precision(t1, t2, p, low, mispredicted_low=mispredicted) if low else LOSSLESS


def _strategy(options: dict) -> dict:
    """With the strategy that its name and its changed parts make."""
    from moeoff.engine.strategy import get_strategy

    names = ("keep", "eager", "serial", "policy", "predictor", "share", "ab_tested", "fill")
    changes = {name: options.pop(name) for name in names if name in options}
    return options | {"strategy": replace(get_strategy(options["strategy"]), **changes)} if changes else options


def open_engine(engine: str, model: str, options: dict):
    base = {"n_ctx": 1024, "n_threads": 2, "n_threads_batch": 2, "flash_attn": True, "verbose": False}
    if engine == "moeoff":
        import moeoff

        base["settings"] = False  # of a tuning that may lie beside the model

        if step := options.pop("step", None):
            options |= _ladder()[step - 1]
        options["precision"] = _precision(options)
        return moeoff.Llama(model, **base | _strategy(options))

    from stock import Stock

    return Stock(model, **{"use_extra_bufts": True, "use_mmap": True} | base | options)


def measure(engine: str, model: str, text: str, n_prompt: int, n_decode: int, options: dict) -> dict:
    with open(text, encoding="utf-8") as file:
        words = file.read(40 * (n_prompt + n_decode))
    warm = options.pop("warm", False)
    started = time.perf_counter()
    llm = open_engine(engine, model, options)
    opened = time.perf_counter() - started
    if warm:
        from moeoff.bench.worker import load_everything

        load_everything(llm.expert_buffer)
        llm.reset_stats()
    tokens = llm.tokenize(words.encode())[: n_prompt + n_decode]
    assert len(tokens) == n_prompt + n_decode, f"{text} is too short"

    started = time.perf_counter()
    llm.eval(tokens[:n_prompt])
    prompted = time.perf_counter()
    if engine == "moeoff":
        prompt_stats = llm.stats()
        llm.reset_stats()
    cpu, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for token in tokens[n_prompt:]:
        llm.eval([token])
    ended = time.perf_counter()
    cpu, faults = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    result = {
        "open_s": opened,
        "prompt_tps": n_prompt / (prompted - started),
        "gen_tps": n_decode / (ended - prompted),
        "cpu_ms_per_token": 1e3 * cpu / n_decode,
        "page_faults_per_token": faults / n_decode,
    }
    if engine == "moeoff":
        stats = llm.stats()
        assert prompt_stats.events_dropped == stats.events_dropped == 0
        result |= {
            "hit_rate": stats.hit_rate,
            "mb_per_token": stats.bytes_read / 1e6 / n_decode,
            "stall_share": stats.stall_seconds / (ended - prompted),
            "driver_ms_per_token": 1e3 * stats.driver_seconds / n_decode,
            "arena_mib": stats.arena_bytes / (1 << 20),
            "budget_mib": stats.budget_bytes / (1 << 20),
            "direct_io": stats.direct_io,
            "evictions": stats.evictions,
            "prefetched_per_token": stats.prefetch_issued / n_decode,
            "prefetch_precision": stats.prefetch_useful / max(stats.prefetch_issued, 1),
            "prompt_mb": prompt_stats.bytes_read / 1e6,
            "low": stats.served_low / max(stats.expert_uses, 1),
            "skipped": stats.skipped / max(stats.expert_uses, 1),
        }
    with open("/proc/self/status") as file:
        result["peak_rss_mib"] = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    return result


def disk_rate(model: str, seconds: float, workers: int) -> dict:
    """MB/s of direct reads at the places and sizes of random expert slices."""
    from moeoff.gguf.layout import Layout

    layout = Layout.read(model)
    n = layout.n_expert
    spans = [(span.offset + i * (span.nbytes // n), span.nbytes // n) for span in layout.experts.values() for i in range(n)]
    flags = os.O_RDONLY | os.O_DIRECT
    stop = time.perf_counter() + seconds

    def work(seed: int) -> int:
        rng = random.Random(seed)
        fd = os.open(layout.files[0], flags)
        buffer = mmap.mmap(-1, max(n for _, n in spans) + 8192)
        total = 0
        while time.perf_counter() < stop:
            offset, nbytes = rng.choice(spans)
            begin = offset & ~4095
            total += os.preadv(fd, [memoryview(buffer)[: (offset + nbytes - begin + 4095) & ~4095]], begin)
        os.close(fd)
        return total

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        total = sum(pool.map(work, range(workers)))
    return {"disk_mb_per_s": total / 1e6 / (time.perf_counter() - started)}


def main() -> None:
    engine, model, text, n_prompt, n_decode, *rest = sys.argv[1:]
    options = {key: _value(value) for key, value in (item.split("=", 1) for item in rest)}
    if engine == "disk":
        result = disk_rate(model, 2.0, options.get("workers", 4))
    else:
        result = measure(engine, model, text, int(n_prompt), int(n_decode), options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
