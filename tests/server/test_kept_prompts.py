"""What a server remembers of conversations outside the context, in the budget's terms."""

from __future__ import annotations

import pytest

from moeoff.budget.plan import MemoryPlan
from moeoff.options import ServerOptions
from moeoff.server.kept_prompts import KeptPrompts
from moeoff.system.memory import MIB

PLAN = MemoryPlan(n_ctx=4096, state=256 * MIB, arena_full=1600 * MIB)


def kept(room: int, sequence: int = 0, plan: MemoryPlan = PLAN, **options) -> KeptPrompts:
    return KeptPrompts.of(plan, room * MIB, sequence * MIB, 4, ServerOptions.make(**options))


@pytest.mark.parametrize("room, expected", [(-5, 0), (0, 0), (4, 0), (80, 10), (800, 100), (1600, 200), (1750, 218), (1850, 250), (3000, 256)])
def test_an_eighth_of_the_experts_or_what_they_cannot_use_up_to_a_whole_context(room, expected):
    assert kept(room).cache_ram == expected * MIB


def test_what_was_asked_for():
    assert kept(80, cache_ram="64M").cache_ram == 64 * MIB and kept(8000, cache_ram=0).cache_ram == 0
    assert kept(80, 4, ctx_checkpoints=3).checkpoints == 3 * 4 * 4 * MIB and kept(8000, 4, ctx_checkpoints=0).checkpoints == 0


def test_states_to_go_back_to_come_first():
    it = kept(1600, 2)
    assert it.n_checkpoints == 8 and it.checkpoints == 64 * MIB and it.cache_ram == (200 - 64) * MIB
    assert kept(160, 2).n_checkpoints == 2 and kept(32, 2).n_checkpoints == 0
