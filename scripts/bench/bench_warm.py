"""What a warm start buys: time to first token and speed of the first 50, with and without. Rounds alternate.

What is warm is left by a session about another part of the text than the one that is then asked about, a new one in each round.

usage: bench_warm.py MODEL TEXT MEMORY [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

from results_file import HELP, ResultsFile
from timing import drop_from_page_cache, machine

CHILD = """
import json, sys, time
started = time.perf_counter()
import moeoff
model, text, memory, warm, pause, skip = sys.argv[1:]
with open(text, encoding="utf-8") as file:
    words = file.read()
llm = moeoff.Llama(model, memory=memory, warm=warm == "1", n_ctx=1024, flash_attn=True)
tokens = llm.tokenize(words.encode())[int(skip):][:82]
assert len(tokens) == 82, "the text is too short"
time.sleep(float(pause))  # a prompt is being typed
asked = time.perf_counter()
llm.eval(tokens[:32])
first = time.perf_counter()
for token in tokens[32:]:
    llm.eval([token])
ended = time.perf_counter()
print(json.dumps({"load_s": asked - started - float(pause), "ttft_s": first - asked, "tps_50": 50 / (ended - first)}))
llm.close()
"""


def child(model: str, text: str, memory: str, warm: bool, pause: float, cache: str, skip: int) -> dict:
    """Of the text from token `skip` on. It leaves what it remembers in `cache`."""
    drop_from_page_cache(model)
    env = os.environ | {"XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", CHILD, model, text, memory, "1" if warm else "0", str(pause), str(skip)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "memory"):
        parser.add_argument(name)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help=HELP)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as cache:
        child(args.model, args.text, args.memory, True, 0, f"{cache}/session", 0)  # leaves what a session would
        rows: dict[str, list[dict]] = {}
        for index in range(args.rounds):
            for name, warm, pause in (("cold, asked at once", False, 0), ("warm, asked at once", True, 0), ("warm, asked after 2 s", True, 2)):
                before = f"{cache}/{index}-{name}"
                shutil.copytree(f"{cache}/session", before)
                rows.setdefault(name, []).append(child(args.model, args.text, args.memory, warm, pause, before, 400 * (index + 1)))
    with ResultsFile(args.json) as results:
        columns = ["run", "time to load, s", "time to first token, s", "tok/s of the first 50"]
        table = results.table("warm", f"Warm start with --memory {args.memory}, after a session about something else", columns)
        for name, list_ in rows.items():
            table.row(name, *(f"{statistics.median(row[key] for row in list_):.2f}" for key in ("load_s", "ttft_s", "tps_50")))


if __name__ == "__main__":
    main()
