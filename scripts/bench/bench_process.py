"""Resident memory of an opened model after each step of its life, and what llama.cpp
says that weights, KV cache and compute buffers are.

usage: bench_process.py MODEL [-c 512] [--memory 1045M]      prints JSON; tests/run/test_process.py holds it to the plan
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from dataclasses import asdict
from typing import Any

PROMPT = "The sun had set behind the hills, and the travellers spoke of the day. " * 40
N_PREDICT = 8


def rss() -> int:
    """Bytes of this process, before anything is imported."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(model: str, n_ctx: int, memory: str | None) -> dict[str, Any]:
    """Opens the model in this process and answers once."""
    sizes = {"python": rss()}
    import moeoff
    from moeoff.budget.dry_load import memory_sizes

    moeoff.Llama  # noqa: B018  # loads llama.cpp
    sizes["imported"] = rss()
    with moeoff.Llama(
        model, n_ctx=n_ctx, **({"memory": memory} if memory else {"expert_memory": "64M"})
    ) as llm:
        sizes["opened"] = rss()
        size = memory_sizes(llm)
        llm.eval(llm.tokenize(PROMPT.encode())[: n_ctx - N_PREDICT - 1])
        sizes["prompt"] = rss()
        for _ in range(N_PREDICT):
            llm.eval([llm.sample(temp=0.0)])
        sizes["answered"] = rss()
        arena, plan = llm.engine.buffer.stats().arena_committed, llm.engine.plan
    packages = sorted(
        {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
    )
    needed = {
        "weights": size.weights,
        "state": size.state,
        "compute": size.compute,
        "work area": size.work,
        "arena": arena,
    }
    return {
        "rss": sizes,
        "needed": needed,
        "beside": sizes["answered"] - sum(needed.values()),
        "plan": asdict(plan),
        "packages": packages,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("-c", "--ctx-size", type=int, default=512)
    parser.add_argument(
        "--memory",
        help="budget of the process; default: 64 MiB for experts, whatever the rest takes",
    )
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.ctx_size, options.memory), indent=1))
