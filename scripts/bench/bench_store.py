"""What the native store costs the threads that compute: evictions and the store's mutex, for models of up to a million slices.

usage: bench_store.py [--shapes 4x8x2,...] [--events N] [--json FILE]

A shape is gates x experts x used, with three matrices each. tests/native/bench_store.cpp is compiled as the wheel's sources are, without
a model: reads end at once and bring nothing. 40 % of the slices fit into the arena. Medians, and the 99th percentile after the slash.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from results import HELP, ResultsFile

ROOT = Path(__file__).parents[2]
CORE = ROOT / "llamacpp_patches" / "src" / "core"
SHAPES = "4x8x2,12x32x4,28x128x8,48x128x8,130x256x8,1302x256x8"
PROMPT = 512  # tokens of a batch
CASES = {"none": "nothing", "six": "6 rows", "all": "all rows"}  # what is published before each event


def build(folder: Path) -> Path:
    """The benchmark, compiled into a folder."""
    program = folder / "bench_store"
    sources = [*CORE.glob("*.cpp"), ROOT / "tests" / "native" / "bench_store.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O2", "-DNDEBUG", f"-I{CORE}", *sources, "-o", program, "-pthread"], check=True)
    return program


def measure(program: Path, shape: str, n_tokens: int, n_events: int) -> dict:
    """By what is published before each event: ns of each call; evictions for each event."""
    gates, experts, used = shape.split("x")
    done = subprocess.run([program, gates, experts, used, str(n_tokens), str(n_events)], cwd=program.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def cell(ns: dict) -> str:
    return f"{ns['median'] / 1e3:.1f} / {ns['p99'] / 1e3:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--json", help=HELP)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ResultsFile(options.json) as results:
        program = build(Path(folder))
        for n_tokens, what in ((1, "a token"), (PROMPT, f"a batch of {PROMPT} tokens")):
            calls = results.table(
                "decode" if n_tokens == 1 else "prompt",
                f"{what}: gate_event and publish in µs, by what was published before, and one eviction in ns",
                [
                    "gates x experts x used",
                    "slices",
                    "eviction, ns",
                    "evictions for each event",
                    *(f"gate_event after {w}" for w in CASES.values()),
                    "publish 6 rows",
                    "publish all rows",
                ],
            )
            rows = []
            for shape in options.shapes.split(","):
                if n_tokens > 1 and shape not in SHAPES.split(",")[2:5]:
                    continue
                found = measure(program, shape, n_tokens, options.events if n_tokens == 1 else options.events // 10)
                calls.row(
                    shape, f"{found['slices']:,}", str(found["eviction"]), f"{found['none']['evictions']:.1f}",
                    *(cell(found[case]["gate_event"]) for case in CASES), cell(found["six"]["publish"]), cell(found["all"]["publish"]),
                )  # fmt: skip
                expected = found["expected"]
                rows.append((shape, *(cell(expected[call]) for call in ("gate_event", "prefetch", "pin", "unpin"))))
            others = results.table(
                "decode-calls" if n_tokens == 1 else "prompt-calls",
                f"{what}: what else takes the mutex, in µs",
                ["gates x experts x used", "gate_event with prefetched experts", "prefetch of a gate's experts", "pin of an op", "unpin of a slice"],
            )
            for row in rows:
                others.row(*row)


if __name__ == "__main__":
    main()
