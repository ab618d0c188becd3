"""Decode speed beside busy processes, and of two of us at once, with compute threads bound to cores and without.

usage: bench_threads.py MODEL TEXT [--memory 1045M --limit 1100] [--situations 0,1,2,two] [--rounds 3] [--json FILE]

"unbound" is OMP_PROC_BIND=false, OpenMP's own default. Neighbours are endless loops, and every process has a session of its
own, as programs of two terminals or containers have: the kernel shares the cores between sessions first. Both ways take turns,
and each run is a fresh process. Without --memory all experts are in memory before the clock starts; --limit, in MiB, needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from results_file import HELP, ResultsFile
from timing import drop_from_page_cache

HERE = Path(__file__).parent
BUSY = "while True: pass"
SITUATIONS = {"0": (0, 1), "1": (1, 1), "2": (2, 1), "two": (0, 2)}  # neighbours, processes of ours
NAMES = {"0": "idle machine", "1": "1 busy process", "2": "2 busy processes", "two": "two of us"}
WAYS = {"unbound": {"OMP_PROC_BIND": "false"}, "bound": {}}
CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from bench_worker import open_engine
from moeoff.bench.worker import load_everything

model, text, memory, seconds = sys.argv[2:]
seconds = float(seconds)
llm = open_engine("moeoff", model, {"memory": memory} if memory else {"expert_memory": 1 << 40})
if not memory:
    load_everything(llm.expert_buffer)
with open(text, encoding="utf-8") as file:
    tokens = llm.tokenize(file.read(100_000).encode())
n = 0

def decode(seconds):
    global n
    latencies = []
    started = last = time.perf_counter()
    while last - started < seconds:
        if llm.n_tokens == llm.n_ctx():
            llm.reset()
        llm.eval([tokens[n % len(tokens)]])
        n += 1
        now = time.perf_counter()
        latencies.append(now - last)
        last = now
    return latencies

llm.eval(tokens[:64])
print("ready", flush=True)
sys.stdin.readline()
decode(0.2 * seconds)  # threads come to lie where they will, caches fill
latencies = decode(seconds)
print(json.dumps({"tps": len(latencies) / sum(latencies), "p95_ms": 1e3 * sorted(latencies)[int(0.95 * len(latencies))]}), flush=True)
decode(0.2 * seconds)  # two of us end together, more or less
"""


def run(model: str, text: str, memory: str, limit: int, seconds: float, situation: str, way: str) -> list[dict]:
    """Speeds of our processes in this situation, the slower one first."""
    n_busy, n_ours = SITUATIONS[situation]
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")} | WAYS[way]
    command = [sys.executable, "-c", CHILD, str(HERE), model, text, memory, str(seconds)]
    if limit:
        command = [sys.executable, str(HERE / "cgroup.py"), str(limit), *command]
        drop_from_page_cache(model)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    ours = [subprocess.Popen(command, env=environment, start_new_session=True, **pipes) for _ in range(n_ours)]
    busy: list[subprocess.Popen] = []
    try:
        for process in ours:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{' '.join(command)} failed")
        busy += [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(n_busy)]
        for process in ours:
            process.stdin.write("go\n")
            process.stdin.flush()
        return sorted((json.loads(process.stdout.readline()) for process in ours), key=lambda row: row["tps"])
    finally:
        for process in busy:
            process.kill()
        for process in ours:
            process.stdin.close()
            process.wait()


def cell(rounds: list[list[dict]], key: str) -> str:
    """Medians and ranges over rounds, of each of our processes."""
    columns = [[row[key] for row in column] for column in zip(*rounds)]
    return " and ".join(f"{_digits(statistics.median(values))} ({_digits(min(values))}-{_digits(max(values))})" for values in columns)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--memory", default="", help="as moeoff run has it; without it everything is in memory")
    parser.add_argument("--limit", type=int, default=0, help="MiB of a cgroup around each process of ours")
    parser.add_argument("--situations", default=",".join(SITUATIONS), help="numbers of busy neighbours; two for two of us")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of decode in each run")
    parser.add_argument("--json", help=HELP)
    args = parser.parse_args()
    situations = args.situations.split(",")
    rows: dict[tuple[str, str], list[list[dict]]] = {}
    for index in range(args.rounds):
        for situation in situations:
            for way in list(WAYS)[:: 1 if index % 2 else -1]:
                found = run(args.model, args.text, args.memory, args.limit, args.seconds, situation, way)
                rows.setdefault((situation, way), []).append(found)
                print(f"round {index + 1}, {NAMES[situation]}, {way}: " + ", ".join(f"{row['tps']:.1f} tok/s" for row in found), file=sys.stderr, flush=True)
    with ResultsFile(args.json) as results:
        for name, key, title in (("speed", "tps", "Decode, tok/s"), ("latency", "p95_ms", "95th percentile of ms per token")):
            table = results.table(name, f"{title}: medians of {args.rounds} rounds (lowest-highest)", ["", *WAYS])
            for situation in situations:
                table.row(NAMES[situation], *(cell(rows[situation, way], key) for way in WAYS))


if __name__ == "__main__":
    main()
