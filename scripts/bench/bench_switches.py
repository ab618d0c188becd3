"""What waiting for experts costs: voluntary context switches, locks and CPU time for each token, by the number of compute threads.

usage: bench_switches.py [--threads 1,4,16] [--hits R] [--read-us N] [--tokens N] [--io-threads N] [--rounds N] [--json FILE]

tests/native/bench_switches.cpp drives the native store as a model of 48 gates x 128 experts x 3 matrices does that uses 8 of them, without a
model or arithmetic; a read takes as long as it is told to. "op_run" is the loop that MUL_MAT_ID has, "visits" the one that it had before: each
thread visits each item, and all wake for whatever settles. Counts hardly depend on the machine or its load, CPU time does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import HELP, ResultsFile

ROOT = Path(__file__).parents[2]
CORE = ROOT / "llamacpp_patches" / "src" / "core"
LOOPS = ["visits", "op_run"]
COLUMNS = ["threads", "misses", "voluntary_switches", "of_computing_threads", "locks", "cpu_ms"]


def build(folder: Path) -> Path:
    """The benchmark, compiled into a folder."""
    program = folder / "bench_switches"
    sources = [*CORE.glob("*.cpp"), ROOT / "tests" / "native" / "bench_switches.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O2", "-DNDEBUG", f"-I{CORE}", *sources, "-o", program, "-pthread", "-ldl"], check=True)
    return program


def measure(program: Path, n_threads: int, hit_rate: float = 0.79, read_us: int = 200, n_tokens: int = 20, n_io_threads: int = 4, loop: str = "op_run") -> dict:
    """COLUMNS, for each token; every slice that is missing is read in read_us."""
    arguments = map(str, (loop, n_threads, hit_rate, read_us, n_tokens, n_io_threads))
    done = subprocess.run([program, *arguments], cwd=program.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,4,16")
    parser.add_argument("--hits", type=float, default=0.79)
    parser.add_argument("--read-us", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are told")
    parser.add_argument("--json", help=HELP)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ResultsFile(options.json) as results:
        program = build(Path(folder))
        table = results.table("switches", "for each token", ["loop", *(column.replace("_", " ") for column in COLUMNS)])
        for n_threads in map(int, options.threads.split(",")):
            for loop in LOOPS:
                runs = [measure(program, n_threads, options.hits, options.read_us, options.tokens, options.io_threads, loop) for _ in range(options.rounds)]
                table.row(loop, *(str(statistics.median(run[column] for run in runs)) for column in COLUMNS))


if __name__ == "__main__":
    main()
