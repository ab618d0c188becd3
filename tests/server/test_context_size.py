"""How many tokens a server's conversations get where nobody said, by plans of known sizes."""

from __future__ import annotations

import httpx
import pytest

from helpers.servers import Served, needed
from moeoff.budget.memory_plan import RESERVE, MemoryPlan
from moeoff.memory import MIB
from moeoff.server.context_size import choose

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


def test_a_server_starts_with_less_context_in_the_place_of_a_refusal(grown):
    more = ["--override-kv", "qwen2moe.context_length=int:4096"]
    memory = needed(grown, n_ctx=1024, args=more)
    code = "from moeoff.server import server\nserver.usual_ctx = lambda *_: 4096\n"
    with Served(grown, code, memory=f"{memory}M", args=more) as it:
        assert it.ask("How many?", max_tokens=4).usage.completion_tokens
        slots = httpx.get(f"{it.url}/props", timeout=300).json()
        assert slots["default_generation_settings"]["n_ctx"] < 4096 * 4


def test_a_context_that_is_divided(demo):
    with Served(demo, expert_memory=4 << 20, n_ctx=1024, parallel=2, args=["--no-kv-unified", "--override-kv", "qwen2moe.context_length=int:4096"]) as it:
        assert httpx.get(f"{it.url}/props", timeout=300).json()["default_generation_settings"]["n_ctx"] == 512
        one, two = it.complete(["The heron stood", "Count to a hundred:"], 16).choices
        assert one.text and two.text
