"""scripts/research/precision.py compares a rule with those of a curve."""

from __future__ import annotations

import numpy as np
import pytest

from precision import beside_curve

pytestmark = pytest.mark.slow  # tests of research scripts run in nightly


def test_a_rule_is_compared_at_as_many_bytes():
    rng = np.random.default_rng(0)
    text = rng.standard_normal((20, 50))  # its difficulty cancels
    curve = [(0.8, text + 0.01), (0.4, text + 0.05), (0.2, text + 0.2)]  # in any order
    for cost, expected in ((0.6, 0.03), (0.3, 0.125), (0.4, 0.05), (0.2, 0.2), (0.8, 0.01)):
        difference = beside_curve(curve[::-1], cost, text + 0.1)
        assert difference.value == pytest.approx(
            0.1 - expected
        ) and difference.high - difference.low == pytest.approx(0, abs=1e-9)


def test_beyond_the_curve_there_is_nothing_to_compare_with():
    nll = np.zeros((2, 3))
    assert beside_curve([], 0.5, nll) is None
    assert (
        beside_curve([(0.4, nll), (0.6, nll)], 0.39, nll) is None
        and beside_curve([(0.4, nll), (0.6, nll)], 0.61, nll) is None
    )
