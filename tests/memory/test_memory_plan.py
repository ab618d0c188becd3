"""Plans of memory: whatever the sizes, a plan fits the bound, or the refusal names one
that is enough.
"""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeoff import BudgetError, OptionError
from moeoff.budget.plan import (
    RESERVE,
    DeviceBound,
    DeviceRoom,
    MemoryPlan,
    Pools,
    slots_that_fit,
    stage_that_fits,
)
from moeoff.cli.options import sentence
from moeoff.policies import CacheShape
from moeoff.policies.base import quotas
from moeoff.system.memory import MIB, format_size


@given(*[st.integers(0, 1 << 40)] * 7, st.integers(0, 1 << 45), st.integers(1, 1 << 20))
def test_plan_never_promises_more_than_the_budget(
    budget, process, weights, state, recurrent, compute, floor, more, n_ctx
):
    whole = MemoryPlan(
        n_ctx,
        weights,
        state=state + recurrent,
        compute=compute,
        process=process,
        arena_floor=floor,
        arena_full=floor + more,
    )

    def at(smaller):
        return replace(whole, n_ctx=smaller, state=state * smaller // n_ctx + recurrent)

    try:
        plan = whole.within(budget, at)
    except BudgetError as error:
        assert (
            budget < whole.floor
            and 0
            <= whole.floor - (process + weights + state + recurrent + compute + RESERVE + floor)
            < MIB
        )
        assert format_size(budget) in str(error)
        assert error.hint["memory"] == whole.floor
        # the budget that the message names is enough, and so is the context
        enough = int(re.search(r"--memory (\d+)M", sentence(error))[1]) * MIB
        assert whole.within(enough).arena >= floor
        assert ("n_ctx" in error.hint) == (n_ctx > 256 and at(256).floor <= budget)
        if smaller := error.hint.get("n_ctx"):
            assert 0 < smaller < n_ctx
            at(smaller).within(budget)
    else:
        assert floor <= plan.arena <= floor + more
        assert process + weights + state + recurrent + compute + RESERVE + plan.arena <= budget


def test_a_shorter_context_is_offered_however_sizes_are_rounded():
    """Also where they are not proportional to the context."""
    whole = MemoryPlan(1 << 15, weights=5 * MIB)

    def at(n_ctx):
        return replace(whole, n_ctx=n_ctx, state=1111 * n_ctx, compute=max(n_ctx, 9000) * 700)

    whole = at(1 << 15)
    for budget in range(at(256).floor, whole.floor, 100_000):
        with pytest.raises(BudgetError) as refused:
            whole.within(budget, at)
        assert at(refused.value.hint["n_ctx"]).floor <= budget


@given(*[st.integers(1, 1 << 30)] * 2, *[st.integers(0, 1 << 30)] * 3, st.floats(0.01, 0.99))
def test_pools_share_the_arena(floor, more, low_floor, low_more, extra, share):
    pools = Pools(floor, floor + more, low_floor, low_floor + low_more, share)
    arena = floor + low_floor + extra
    high, low = pools.split(arena)
    assert (
        high + low <= arena and floor <= high <= pools.full and low_floor <= low <= pools.low_full
    )
    if arena >= pools.full + pools.low_full:
        assert (high, low) == (pools.full, pools.low_full)
    elif high < pools.full and low < pools.low_full:
        assert high + low == arena


def test_items_of_a_plan_are_its_parts():
    sizes = {
        "weights": 300,
        "embedding": 100,
        "state": 20,
        "compute": 10,
        "work": 2,
        "outputs": 1,
        "process": 60,
        "arena_floor": 8,
        "arena_full": 10_000,
    }
    plan = MemoryPlan(
        512, row_cache=4 * MIB, **{name: n * MIB for name, n in sizes.items()}
    ).within(1000 * MIB)
    items = plan.items()
    assert (
        items["token_embedding"] == 100 * MIB
        and items["weights"] == 200 * MIB
        and items["row_cache"] == 4 * MIB
        and items["experts"] == plan.arena
    )
    assert sum(items.values()) == plan.budget


def layers(*sizes: int, spare: int = 2):
    """Return the bytes of n slots of each layer, with those of zeros."""
    return [lambda n, size=size: size * (n + spare) if n else 0 for size in sizes]


def test_bounds():
    assert DeviceBound.parse("2G").of(123) == 2 << 30
    assert DeviceBound.parse(5 * MIB).of(123) == 5 * MIB
    assert DeviceBound.parse("80%").of(1000) == 800
    auto = DeviceBound.parse("auto")
    assert (
        auto.of(8 << 30) == (8 << 30) - 512 * MIB
        and auto.of(80 << 30) == 80 * (31 << 30) // 32
        and auto.of(MIB) == 0
        and str(auto) == "auto"
    )
    for text in ("0%", "101%", "x%", "much", "-1"):
        with pytest.raises(OptionError):
            DeviceBound.parse(text)


def slots_in(room: DeviceRoom, *sizes: int, divide=None, **options) -> list[int]:
    """Slots of layers with 16 experts of so many bytes each, by default as many in
    each.
    """
    n = len(sizes)
    return slots_that_fit(
        room,
        layers(*sizes),
        16,
        divide or (lambda most: quotas(CacheShape(n, 16, 1, most), 0)),
        **options,
    )


@pytest.mark.parametrize(
    "free, sizes, n",
    [
        (1000, (4, 6), [8, 8]),
        (84, (4, 6), [7, 6]),
        (41, (4, 6), [2, 2]),
        (30, (4, 6), [1, 1]),
        (4000, (1,), [16]),
    ],
)
def test_all_layers_get_as_many_and_no_more_than_there_are_experts(free, sizes, n):
    assert (
        slots_in(
            DeviceRoom("GPU0", min(100, free) * MIB, 0, free * MIB), *(size * MIB for size in sizes)
        )
        == n
    )


def test_layers_get_the_policys_quotas():
    """Fate §4.4: the first layers whole, or as far as memory goes, and evenly what is
    left; each layer what a mode needs, as far as every layer can have it.
    """

    def shallow(capacity: int) -> list[int]:
        return quotas(CacheShape(6, 16, 2, capacity), 2)

    def fit(mib: int, **options) -> list[int]:
        return slots_in(
            DeviceRoom("GPU0", mib * MIB, 0, 1000 * MIB), *[MIB] * 6, divide=shallow, **options
        )

    assert (
        fit(60) == [16, 16, 4, 4, 4, 4] and fit(62) == [16, 16, 5, 5, 4, 4] and fit(500) == [16] * 6
    )
    assert (
        fit(24) == [16, 4, 0, 0, 0, 0]
        and fit(32, least=2) == [10, 2, 2, 2, 2, 2]
        and fit(20, least=2) == [3, 1, 1, 1, 1, 1]
    )
    assert fit(62, fixed=2 * MIB) == fit(60)


def test_what_would_do_is_named():
    with pytest.raises(BudgetError) as small:
        slots_in(DeviceRoom("GPU0", 50 * MIB, 45 * MIB, 1000 * MIB), 4 * MIB)
    needed = small.value.hint["vram"]
    assert "GPU0" in str(small.value) and slots_in(
        DeviceRoom("GPU0", needed, 45 * MIB, 1000 * MIB), 4 * MIB
    ) == [1]
    with pytest.raises(BudgetError) as large:
        slots_in(DeviceRoom("GPU0", 5000 * MIB, 45 * MIB, 1000 * MIB), 4 * MIB)
    needed = large.value.hint["vram"]
    assert needed == 1045 * MIB and slots_in(
        DeviceRoom("GPU0", needed, 45 * MIB, 1000 * MIB), 4 * MIB
    ) == [16]


@pytest.mark.parametrize(
    "room, most, stage",
    [
        (256, 64, (32, 2)),
        (255, 64, (32, 1)),
        (128, 64, (32, 1)),
        (127, 64, (31, 1)),
        (16, 64, (4, 1)),
        (15, 64, (0, 0)),  # it would take more than eight waves
        (256, 31, (31, 1)),  # the device has no such large buffer
        (256, 3, (0, 0)),
    ],
)
def test_a_stage_takes_a_quarter_of_the_room_at_most(room, most, stage):
    """32 experts of 1 MiB each: all of them twice, once, or a part."""
    device = DeviceRoom("GPU0", 1000 * MIB, (1000 - room) * MIB, 4000 * MIB)
    assert stage_that_fits([(device, lambda n: n * MIB if n <= most else 0, MIB)], 32, 4) == stage
    # a slot of each layer comes first
    assert stage_that_fits([(device, lambda n: n * MIB, room * MIB)], 32, 4) == (0, 0)
