#!/usr/bin/env python3
"""Item by item: where the resident memory of an opened model is.

    bench_process.py MODEL -c 512 --memory 1045M

Prints the process after each step of its life, from the kernel's table of mappings, and beside it what llama.cpp says that weights,
KV cache and compute buffers are. `--ubatch` compares compute buffers of several sizes of micro-batches; each is opened in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

MIB = 1 << 20
GROUPS = ("malloc", "stacks", "libraries", "files", "anonymous")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \d+\s*(.*)$")


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/self/smaps with what belongs to it; sizes in bytes."""

    mode: str
    name: str
    size: int
    rss: int


def mappings() -> Iterator[Mapping]:
    """Of this process."""
    mode = name = ""
    size = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            if found := _MAPPING.match(line):
                mode, name = found[1], found[2]
            elif line.startswith("Size:"):
                size = int(line.split()[1]) * 1024
            elif line.startswith("Rss:"):
                yield Mapping(mode, name, size, int(line.split()[1]) * 1024)


def group(mapping: Mapping) -> str:
    """Which of GROUPS a mapping belongs to. A malloc arena of a thread looks like any anonymous memory."""
    if mapping.name == "[heap]":
        return "malloc"
    if mapping.name.startswith("[stack"):
        return "stacks"
    if ".so" in mapping.name or os.path.basename(mapping.name).startswith("python"):
        return "libraries"
    return "files" if mapping.name.startswith("/") else "anonymous"


@dataclass(frozen=True)
class Snapshot:
    """Resident bytes by group, the libraries by name, and the largest anonymous mappings as (size, resident)."""

    step: str
    rss: int
    groups: dict[str, int]
    libraries: dict[str, int]
    largest: list[tuple[int, int]]

    @classmethod
    def take(cls, step: str) -> Snapshot:
        groups: dict[str, int] = defaultdict(int)
        libraries: dict[str, int] = defaultdict(int)
        anonymous = []
        for mapping in mappings():
            groups[group(mapping)] += mapping.rss
            if group(mapping) == "libraries":
                libraries[os.path.basename(mapping.name)] += mapping.rss
            if group(mapping) == "anonymous" and mapping.rss >= MIB:
                anonymous.append((mapping.size, mapping.rss))
        names = sorted(libraries, key=lambda name: -libraries[name])[:8]
        return cls(step, sum(groups.values()), dict(groups), {name: libraries[name] for name in names}, sorted(anonymous, key=lambda m: -m[1])[:16])


def measure(model: str, n_ctx: int, memory: str | None, ubatch: int | None, prompt: str, n_predict: int) -> dict:
    """Opens the model in this process and answers once; what `--json` prints."""
    snapshots = [Snapshot.take("python")]
    import moeoff

    moeoff.Llama  # noqa: B018  # loads llama.cpp
    snapshots.append(Snapshot.take("imported"))
    options = {"memory": memory} if memory else {"expert_memory": "64M"}
    if ubatch:
        options |= {"n_ubatch": ubatch}
    with moeoff.Llama(model, n_ctx=n_ctx, **options) as llm:
        snapshots.append(Snapshot.take("opened"))
        size = llm.memory_sizes()
        snapshots.append(Snapshot.take("measured"))
        tokens = llm.tokenize(prompt.encode())[: n_ctx - n_predict - 1]
        llm.eval(tokens)
        snapshots.append(Snapshot.take("prompt"))
        for _ in range(n_predict):
            llm.eval([llm.sample(temp=0.0)])
        snapshots.append(Snapshot.take("answered"))
        arena, plan = llm.expert_buffer.stats().arena_committed, llm.plan
    packages = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
    needed = {"weights": size.weights, "state": size.state, "compute": size.compute, "work area": size.work, "arena": arena}
    beside = snapshots[-1].rss - sum(needed.values())
    return {
        "n_prompt": len(tokens),
        "needed": needed,
        "beside": beside,
        "plan": asdict(plan),
        "packages": packages,
        "snapshots": [asdict(s) for s in snapshots],
    }


def report(found: dict) -> None:
    """Tables for people."""
    print(f"{'MiB':>14} {'resident':>9} " + " ".join(f"{name:>11}" for name in GROUPS))
    for s in found["snapshots"]:
        print(f"{s['step']:>14} {s['rss'] / MIB:>9.1f} " + " ".join(f"{s['groups'].get(name, 0) / MIB:>11.1f}" for name in GROUPS))
    last = found["snapshots"][-1]
    print("libraries: " + ", ".join(f"{name} {size / MIB:.1f}" for name, size in last["libraries"].items()))
    print("largest anonymous, resident of size: " + ", ".join(f"{rss / MIB:.1f} of {size / MIB:.1f}" for size, rss in last["largest"]))
    print("needed: " + ", ".join(f"{name} {size / MIB:.1f}" for name, size in found["needed"].items()))
    print(f"beside it: {found['beside'] / MIB:.1f} after a prompt of {found['n_prompt']} tokens and an answer")
    print("packages: " + " ".join(found["packages"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-c", "--ctx-size", type=int, default=512)
    parser.add_argument("--memory", help="budget of the process; default: 64 MiB for experts, whatever the rest takes")
    parser.add_argument("--ubatch", type=int, action="append", help="tokens computed at once; may be given several times")
    parser.add_argument("--prompt", default="The sun had set behind the hills, and the travellers spoke of the day. " * 40)
    parser.add_argument("-n", "--n-predict", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = options.ubatch or [None]
    if len(sizes) > 1:  # each in a process of its own
        for size in sizes:
            command = [sys.executable, __file__, options.model, "-c", str(options.ctx_size), "-n", str(options.n_predict), "--prompt", options.prompt]
            command += (["--memory", options.memory] if options.memory else []) + ["--json", "--ubatch", str(size)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            needed = ", ".join(f"{name} {found['needed'][name] / MIB:.1f}" for name in ("compute", "work area"))
            print(f"micro-batch of {size}: {needed}, resident {found['snapshots'][-1]['rss'] / MIB:.1f}, beside {found['beside'] / MIB:.1f} MiB")
        return 0
    found = measure(options.model, options.ctx_size, options.memory, sizes[0], options.prompt, options.n_predict)
    if options.json:
        print(json.dumps(found))
    else:
        report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
