"""What a warm start buys: time to first token and speed of the first 50, with and without. Rounds alternate.

usage: bench_warm.py MODEL TEXT MEMORY [ROUNDS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from timing import drop_from_page_cache, machine

CHILD = """
import json, sys, time
started = time.perf_counter()
import moeoff
model, text, memory, warm, pause = sys.argv[1:]
with open(text, encoding="utf-8") as file:
    words = file.read(20000)
llm = moeoff.Llama(model, memory=memory, warm=warm == "1", n_ctx=1024, flash_attn=True)
tokens = llm.tokenize(words.encode())[:82]
time.sleep(float(pause))  # somebody types a prompt
asked = time.perf_counter()
llm.eval(tokens[:32])
first = time.perf_counter()
for token in tokens[32:]:
    llm.eval([token])
ended = time.perf_counter()
print(json.dumps({"load_s": asked - started - float(pause), "ttft_s": first - asked, "tps_50": 50 / (ended - first)}))
llm.close()
"""


def child(model: str, text: str, memory: str, warm: bool, pause: float, cache: str) -> dict:
    drop_from_page_cache(model)
    env = os.environ | {"XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", CHILD, model, text, memory, "1" if warm else "0", str(pause)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    model, text, memory = sys.argv[1:4]
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 3
    print(machine())
    with tempfile.TemporaryDirectory() as cache:
        child(model, text, memory, True, 0, cache)  # leaves what a session would
        rows: dict[str, list[dict]] = {}
        for _ in range(rounds):
            for name, warm, pause in (("cold, asked at once", False, 0), ("warm, asked at once", True, 0), ("warm, asked after 2 s", True, 2)):
                rows.setdefault(name, []).append(child(model, text, memory, warm, pause, cache))
    for name, list_ in rows.items():
        print(f"{name}: " + ", ".join(f"{key} {statistics.median(row[key] for row in list_):.2f}" for key in list_[0]))


if __name__ == "__main__":
    main()
