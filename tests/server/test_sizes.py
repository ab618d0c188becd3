"""Tokens of a server's conversations where nobody said how many, and prompts kept
outside the context, by plans of known sizes.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.processes import run_python
from helpers.servers import LONGER, Service, needed
from moeoff.budget.dry_load import dry_load
from moeoff.budget.plan import RESERVE, MemoryPlan
from moeoff.gguf.model_index import ModelIndex
from moeoff.options import Config, ServerOptions
from moeoff.server.sizes import PromptMemory, choose_sizes
from moeoff.system.memory import MIB

# bytes of a token, of each answer's own state, and of all but state and experts
TOKEN, OWN, OTHERS = 64 << 10, 2 * MIB, 300 * MIB


def plan(n_ctx: int, n: int) -> MemoryPlan:
    return MemoryPlan(
        n_ctx=n_ctx,
        state=n_ctx * TOKEN + n * OWN,
        weights=OTHERS - RESERVE,
        arena_floor=4 * MIB,
        arena_full=4096 * MIB,
    )


@pytest.mark.parametrize("left, n_parallel, expected", [
    # bytes for context and experts: twice what the usual context takes, and more
    (4096, None, (16384, 4)),
    (1024, None, (8064 // 256 * 256, 4)),
    (512, None, (3840, 3)),  # four would have less than 1024 tokens each
    (40, None, (256, 1)),
    (512, 4, (3968 // 256 * 256, 4)),  # what was said stays
    (40, 2, (256, 2)),
    (-10, None, (256, 1)),  # refused then, with the numbers
])  # fmt: skip
def test_half_of_what_is_left(left, n_parallel, expected):
    chosen = choose_sizes(plan, 4096, n_parallel, OTHERS + left * MIB)
    assert (chosen.n_ctx, chosen.n_parallel) == expected
    assert (chosen.remark is None) == (expected[0] == 16384)


@pytest.mark.parametrize("left", [1024, 700, 400, 200, 100, 60, 20])
@pytest.mark.parametrize("n_parallel", [None, 1, 4])
def test_what_is_chosen_was_planned_once_and_fits(left, n_parallel):
    """Also where compute buffers grow with the context, and the number of answers had
    to shrink first. Each plan opens the model.
    """
    asked = []

    def planned(n_ctx: int, n: int) -> MemoryPlan:
        asked.append((n_ctx, n))
        return replace(plan(n_ctx, n), compute=n_ctx * (TOKEN // 8))

    budget = OTHERS + left * MIB
    chosen = choose_sizes(planned, 4096, n_parallel, budget)
    assert (chosen.n_ctx, chosen.n_parallel) in asked and len(asked) == len(set(asked))
    last = planned(chosen.n_ctx, chosen.n_parallel)
    assert chosen.n_ctx == 256 or last.state <= (budget - (last.fixed - last.state)) / 2


PROMPTS = MemoryPlan(n_ctx=4096, state=256 * MIB, arena_full=1600 * MIB)


def remembered(room: int, sequence: int = 0, plan: MemoryPlan = PROMPTS, **options) -> PromptMemory:
    return PromptMemory.of(plan, room * MIB, sequence * MIB, 4, ServerOptions.make(**options))


@pytest.mark.parametrize(
    "room, expected",
    [
        (-5, 0),
        (0, 0),
        (4, 0),
        (80, 10),
        (800, 100),
        (1600, 200),
        (1750, 218),
        (1850, 250),
        (3000, 256),
    ],
)
def test_an_eighth_of_the_experts_or_what_they_cannot_use_up_to_a_whole_context(room, expected):
    assert remembered(room).cache_ram == expected * MIB


def test_what_was_asked_for():
    assert remembered(80, cache_ram="64M").cache_ram == 64 * MIB
    assert remembered(8000, cache_ram=0).cache_ram == 0
    floor = replace(PROMPTS, arena_floor=30 * MIB)
    assert [
        remembered(room, 2, floor, cache_ram="-1", ctx_checkpoints=1).cache_ram
        for room in (800, 20)
    ] == [(800 - 30 - 8) * MIB, 0]
    assert remembered(80, 4, ctx_checkpoints=3).checkpoints == 3 * 4 * 4 * MIB
    assert remembered(8000, 4, ctx_checkpoints=0).checkpoints == 0


def test_states_to_go_back_to_come_first():
    prompts = remembered(1600, 2)
    assert prompts.n_checkpoints == 8
    assert prompts.checkpoints == 64 * MIB
    assert prompts.cache_ram == (200 - 64) * MIB
    assert remembered(160, 2).n_checkpoints == 2 and remembered(32, 2).n_checkpoints == 0


def test_a_server_starts_with_less_context_in_the_place_of_a_refusal(grown):
    more = LONGER
    memory = needed(grown, n_ctx=1024, args=more)
    code = "from moeoff.server import server\nserver.default_ctx = lambda *_: 4096\n"
    with Service(grown, code, memory=f"{memory}M", args=more) as server:
        assert server.ask("How many?", max_tokens=4).usage.completion_tokens
        slots = server.get("/props").json()
        assert slots["default_generation_settings"]["n_ctx"] < 4096 * 4


def test_what_is_planned_for_a_divided_context_is_what_is_taken(demo):
    code = """
import json, sys
import moeoff
with moeoff.Server(sys.argv[1], port=0, n_ctx=2048, parallel=4, memory="200M", kv_unified=False, cache_ram=0) as server:
    print(json.dumps(server.stats().memory))
"""
    memory = json.loads(run_python(code, demo))
    plan = dry_load(
        ModelIndex.read(demo),
        2048,
        Config.make(demo, n_ctx=2048, flash_attn=True).keywords,
        n_sequences=4,
        unified=False,
    )
    assert plan.state == memory["state"]
    assert plan.compute == pytest.approx(memory["compute_buffers"], abs=1 << 20)
    assert sum(memory.values()) <= 200 << 20
