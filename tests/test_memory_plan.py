"""The plan of memory: whatever the sizes, it fits the budget, or the refusal names one that is enough."""

import re

from hypothesis import given
from hypothesis import strategies as st

from moeoff import BudgetError
from moeoff.budget.memory_plan import RESERVE, Needs, Plan, Pools
from moeoff.cli.errors import sentence
from moeoff.memory import MIB, format_size


@given(*[st.integers(0, 1 << 40)] * 6, st.integers(0, 1 << 45), st.integers(1, 1 << 20))
def test_plan_never_promises_more_than_the_budget(budget, python, weights, state, compute, floor, more, n_ctx):
    full, needs = floor + more, Needs(python, weights, state, compute, 0, 0, n_ctx)
    try:
        plan = Plan.divide(budget, needs, floor, full)
    except BudgetError as error:
        assert budget < python + weights + state + compute + RESERVE + floor
        assert format_size(budget) in str(error)
        assert error.facts["needed"] == python + weights + state + compute + RESERVE + floor
        # the budget that the message names is enough, and so is the context
        enough = int(re.search(r"--memory (\d+)M", sentence(error))[1]) * MIB
        assert Plan.divide(enough, needs, floor, full).arena >= floor
        if context := re.search(r"-c (\d+)\)", sentence(error)):
            smaller = int(context[1])
            assert 0 < smaller < n_ctx
            Plan.divide(budget, Needs(python, weights, state * smaller // n_ctx, compute, 0, 0, smaller), floor, full)
    else:
        assert floor <= plan.arena <= full
        assert python + weights + state + compute + RESERVE + plan.arena <= budget


@given(*[st.integers(1, 1 << 30)] * 2, *[st.integers(0, 1 << 30)] * 3, st.floats(0.01, 0.99))
def test_pools_share_the_arena(floor, more, low_floor, low_more, extra, share):
    pools = Pools(floor, floor + more, low_floor, low_floor + low_more, share)
    arena = floor + low_floor + extra
    high, low = pools.split(arena)
    assert high + low <= arena and floor <= high <= pools.full and low_floor <= low <= pools.low_full
    if arena >= pools.full + pools.low_full:
        assert (high, low) == (pools.full, pools.low_full)
    elif high < pools.full and low < pools.low_full:
        assert high + low == arena


def test_items_of_a_plan_are_its_parts():
    plan = Plan.divide(1000 * MIB, Needs(60 * MIB, 300 * MIB, 20 * MIB, 10 * MIB, 2 * MIB, MIB, 512), 8 * MIB, 10_000 * MIB)
    items = plan.items(embedding=100 * MIB)
    assert items["token_embedding"] == 100 * MIB and items["weights"] == 200 * MIB and items["experts"] == plan.arena
    assert sum(items.values()) == plan.budget
