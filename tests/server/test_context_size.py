"""How many tokens a server's conversations get where nobody said, by plans of known sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest

from helpers.servers import Served, needed
from moeoff.budget.dry_load import dry_load
from moeoff.budget.plan import RESERVE, MemoryPlan
from moeoff.gguf.model_index import ModelIndex
from moeoff.options import Config
from moeoff.server.context_size import choose
from moeoff.system.memory import MIB

TOKEN, OWN, OTHERS = 64 << 10, 2 * MIB, 300 * MIB  # bytes of a token, of each answer's own state, and of all but state and experts


def plan(n_ctx: int, n: int) -> MemoryPlan:
    return MemoryPlan(n_ctx=n_ctx, state=n_ctx * TOKEN + n * OWN, weights=OTHERS - RESERVE, arena_floor=4 * MIB, arena_full=4096 * MIB)


@pytest.mark.parametrize("left, n_parallel, expected", [
    (4096, None, (16384, 4)),  # bytes for context and experts: twice what the usual context takes, and more
    (1024, None, (8064 // 256 * 256, 4)),
    (512, None, (3840, 3)),  # four would have less than 1024 tokens each
    (40, None, (256, 1)),
    (512, 4, (3968 // 256 * 256, 4)),  # what was said stays
    (40, 2, (256, 2)),
    (-10, None, (256, 1)),  # refused then, with the numbers
])  # fmt: skip
def test_half_of_what_is_left(left, n_parallel, expected):
    found = choose(plan, 4096, n_parallel, OTHERS + left * MIB)
    assert (found.n_ctx, found.n_parallel) == expected
    assert (found.remark is None) == (expected[0] == 16384)


@pytest.mark.parametrize("left", [1024, 700, 400, 200, 100, 60, 20])
@pytest.mark.parametrize("n_parallel", [None, 1, 4])
def test_what_is_chosen_was_planned_once_and_fits(left, n_parallel):
    """Also where compute buffers grow with the context, and the number of answers had to shrink first. Each plan opens the model."""
    asked = []

    def planned(n_ctx: int, n: int) -> MemoryPlan:
        asked.append((n_ctx, n))
        return replace(plan(n_ctx, n), compute=n_ctx * (TOKEN // 8))

    budget = OTHERS + left * MIB
    found = choose(planned, 4096, n_parallel, budget)
    assert (found.n_ctx, found.n_parallel) in asked and len(asked) == len(set(asked))
    last = planned(found.n_ctx, found.n_parallel)
    assert found.n_ctx == 256 or last.state <= (budget - (last.fixed - last.state)) / 2


def test_a_server_starts_with_less_context_in_the_place_of_a_refusal(grown):
    more = ["--override-kv", "qwen2moe.context_length=int:4096"]
    memory = needed(grown, n_ctx=1024, args=more)
    code = "from moeoff.server import server\nserver.usual_ctx = lambda *_: 4096\n"
    with Served(grown, code, memory=f"{memory}M", args=more) as it:
        assert it.ask("How many?", max_tokens=4).usage.completion_tokens
        slots = httpx.get(f"{it.url}/props", timeout=300).json()
        assert slots["default_generation_settings"]["n_ctx"] < 4096 * 4


@pytest.mark.parametrize("divided", [False, True])
def test_what_is_planned_for_a_divided_context_is_what_is_taken(demo, divided):
    code = """
import json, sys
import moeoff
with moeoff.Server(sys.argv[1], port=0, n_ctx=2048, parallel=4, memory="200M", kv_unified=sys.argv[2] == "on", cache_ram=0) as server:
    print(json.dumps(server.stats().memory))
"""
    done = subprocess.run([sys.executable, "-c", code, demo, "off" if divided else "on"], capture_output=True, text=True, timeout=300)
    taken = json.loads(done.stdout)
    plan = dry_load(ModelIndex.read(demo), 2048, Config.make(demo, n_ctx=2048, flash_attn=True).keywords, n_sequences=4, unified=not divided)
    assert plan.state == taken["state"] and plan.compute == pytest.approx(taken["compute_buffers"], abs=1 << 20)
    assert sum(taken.values()) <= 200 << 20


def test_a_context_that_is_divided_stays_within_the_budget(demo):
    """With four answers at a time, of which each fills its part."""
    more = ["--override-kv", "qwen2moe.context_length=int:4096"]
    memory = needed(demo, n_ctx=2048, parallel=4, kv_unified=False, args=more) + 8
    with Served(demo, memory=f"{memory}M", n_ctx=2048, parallel=4, kv_unified=False, args=more) as it:
        answers = it.complete([f"Count to a hundred, {i}:" for i in range(4)], 480).choices
        assert all(answer.text for answer in answers)
        with open(f"/proc/{it.process.pid}/status") as file:
            assert next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM")) <= memory << 20


def test_a_context_that_is_divided(demo):
    with Served(demo, expert_memory=4 << 20, n_ctx=1024, parallel=2, args=["--no-kv-unified", "--override-kv", "qwen2moe.context_length=int:4096"]) as it:
        assert httpx.get(f"{it.url}/props", timeout=300).json()["default_generation_settings"]["n_ctx"] == 512
        one, two = it.complete(["The heron stood", "Count to a hundred:"], 16).choices
        assert one.text and two.text
