"""Models on a device: with the experts on the CPU, and with some of them in slots of its memory."""

import pytest

from helpers.device_runs import device_runs, why_no_device
from helpers.logits import assert_bit_equal

pytestmark = pytest.mark.skipif(bool(why_no_device()), reason=why_no_device())

BATCHES = [40, 1, 2, 9, *[1] * 12]


def test_experts_on_the_cpu_are_stocks(demo, tmp_path):
    """Everything else is on the device: with all experts in memory, and with a few."""
    runs = {"stock": {"stock": "CPU"}, "ours": {}, "small": {"memory": None, "expert_memory": "3M"}}
    logits, stats = device_runs(demo, tmp_path, {name: run | {"batches": BATCHES} for name, run in runs.items()})
    assert_bit_equal(logits["ours"], logits["stock"])
    assert_bit_equal(logits["small"], logits["stock"])
    assert stats["small"]["evictions"] > 0
