"""How a bound of a device's memory is divided."""

import pytest

from moeoff import BudgetError, OptionError
from moeoff.budget.device_plan import DeviceBound, DeviceRoom, slots_that_fit
from moeoff.memory import MIB


def layers(*sizes: int, spare: int = 2):
    """What n slots of each layer take, with those of zeros."""
    return [lambda n, size=size: size * (n + spare) for size in sizes]


def test_bounds():
    assert DeviceBound.parse("2G").of(123) == 2 << 30
    assert DeviceBound.parse(5 * MIB).of(123) == 5 * MIB
    assert DeviceBound.parse("80%").of(1000) == 800
    for text in ("0%", "101%", "x%", "much", "-1"):
        with pytest.raises(OptionError):
            DeviceBound.parse(text)


@pytest.mark.parametrize("free, n", [(1000 * MIB, 8), (80 * MIB, 6), (41 * MIB, 2), (30 * MIB, 1)])
def test_all_layers_get_as_many(free, n):
    assert slots_that_fit(DeviceRoom("GPU0", min(100 * MIB, free), 0, free), layers(4 * MIB, 6 * MIB), 16) == n


def test_never_more_than_there_are_experts():
    assert slots_that_fit(DeviceRoom("GPU0", 500 * MIB, 100 * MIB, 4000 * MIB), layers(MIB), 16) == 16


def test_what_would_do_is_named():
    with pytest.raises(BudgetError) as small:
        slots_that_fit(DeviceRoom("GPU0", 50 * MIB, 45 * MIB, 1000 * MIB), layers(4 * MIB), 16)
    needed = small.value.facts["needed"]
    assert "GPU0" in str(small.value) and slots_that_fit(DeviceRoom("GPU0", needed, 45 * MIB, 1000 * MIB), layers(4 * MIB), 16) == 1
    with pytest.raises(BudgetError) as large:
        slots_that_fit(DeviceRoom("GPU0", 5000 * MIB, 45 * MIB, 1000 * MIB), layers(4 * MIB), 16)
    needed = large.value.facts["needed"]
    assert needed == 1045 * MIB and slots_that_fit(DeviceRoom("GPU0", needed, 45 * MIB, 1000 * MIB), layers(4 * MIB), 16) == 16
