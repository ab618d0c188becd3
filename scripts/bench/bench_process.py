"""Where the resident memory of an opened model is, item by item; tests/run/test_process.py holds it to the plan.

usage: bench_process.py MODEL [-c 512] [--memory 1045M] [--ubatch 64] [--json]

Prints the process after each step of its life, from the kernel's table of mappings, and what llama.cpp says that weights, KV cache and compute buffers are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

MIB = 1 << 20
GROUPS = ("malloc", "stacks", "libraries", "files", "anonymous")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S{4} \S+ \S+ \d+\s*(.*)$")


def group(name: str) -> str:
    """Which of GROUPS a mapping belongs to. A malloc arena of a thread looks like any anonymous memory."""
    if name == "[heap]":
        return "malloc"
    if name.startswith("[stack"):
        return "stacks"
    if ".so" in name or os.path.basename(name).startswith("python"):
        return "libraries"
    return "files" if name.startswith("/") else "anonymous"


def snapshot(step: str) -> dict[str, Any]:
    """Resident bytes of this process, all and by group."""
    groups: Counter[str] = Counter()
    name = ""
    with open("/proc/self/smaps") as file:
        for line in file:
            if found := _MAPPING.match(line):
                name = found[1]
            elif line.startswith("Rss:"):
                groups[group(name)] += int(line.split()[1]) * 1024
    return {"step": step, "rss": groups.total(), "groups": dict(groups)}


def measure(model: str, n_ctx: int, memory: str | None, ubatch: int | None, prompt: str, n_predict: int) -> dict[str, Any]:
    """Opens the model in this process and answers once."""
    snapshots = [snapshot("python")]
    import moeoff
    from moeoff.budget.dry_load import memory_sizes

    moeoff.Llama  # noqa: B018  # loads llama.cpp
    snapshots.append(snapshot("imported"))
    options: dict[str, Any] = ({"memory": memory} if memory else {"expert_memory": "64M"}) | ({"n_ubatch": ubatch} if ubatch else {})
    with moeoff.Llama(model, n_ctx=n_ctx, **options) as llm:
        snapshots.append(snapshot("opened"))
        size = memory_sizes(llm)
        snapshots.append(snapshot("measured"))
        tokens = llm.tokenize(prompt.encode())[: n_ctx - n_predict - 1]
        llm.eval(tokens)
        snapshots.append(snapshot("prompt"))
        for _ in range(n_predict):
            llm.eval([llm.sample(temp=0.0)])
        snapshots.append(snapshot("answered"))
        arena, plan = llm.engine.buffer.stats().arena_committed, llm.engine.plan
    packages = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
    needed = {"weights": size.weights, "state": size.state, "compute": size.compute, "work area": size.work, "arena": arena}
    beside = snapshots[-1]["rss"] - sum(needed.values())
    return {"n_prompt": len(tokens), "needed": needed, "beside": beside, "plan": asdict(plan), "packages": packages, "snapshots": snapshots}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-c", "--ctx-size", type=int, default=512)
    parser.add_argument("--memory", help="budget of the process; default: 64 MiB for experts, whatever the rest takes")
    parser.add_argument("--ubatch", type=int, help="tokens computed at once")
    parser.add_argument("--prompt", default="The sun had set behind the hills, and the travellers spoke of the day. " * 40)
    parser.add_argument("-n", "--n-predict", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.model, options.ctx_size, options.memory, options.ubatch, options.prompt, options.n_predict)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'MiB':>14} {'resident':>9} " + " ".join(f"{name:>11}" for name in GROUPS))
    for s in found["snapshots"]:
        print(f"{s['step']:>14} {s['rss'] / MIB:>9.1f} " + " ".join(f"{s['groups'].get(name, 0) / MIB:>11.1f}" for name in GROUPS))
    print("needed: " + ", ".join(f"{name} {size / MIB:.1f}" for name, size in found["needed"].items()))
    print(f"what comes with it: {found['beside'] / MIB:.1f} after a prompt of {found['n_prompt']} tokens and an answer")
    print("packages: " + " ".join(found["packages"]))


if __name__ == "__main__":
    main()
