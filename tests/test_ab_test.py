"""The online comparison of token times, on made-up ones."""

import numpy as np
import pytest

from moeoff.engine.ab_test import BLOCK, HOLD, LONGEST_HOLD, ORDER, ROUND, ABTest

TRIAL = BLOCK * len(ORDER)
FIRST = BLOCK * ROUND


def run(ab_test, n, ns_on, ns_off, rng, spread=0.1):
    """Returns how many of n tokens had prefetching."""
    n_on = 0
    for _ in range(n):
        n_on += ab_test.on
        ab_test.token(int((ns_on if ab_test.on else ns_off) * rng.uniform(1 - spread, 1 + spread)))
    return n_on


@pytest.mark.parametrize("ns_on, ns_off", [(20e6, 24e6), (24e6, 20e6)])
def test_keeps_what_is_faster(ns_on, ns_off):
    ab_test, rng = ABTest(), np.random.default_rng(0)
    run(ab_test, TRIAL, ns_on, ns_off, rng)
    assert ab_test.on == (ns_on < ns_off)
    assert ab_test.gain == pytest.approx(ns_off / ns_on - 1, abs=0.08)


def test_both_ways_get_the_same_share_of_every_round():
    for first in range(0, len(ORDER), ROUND):
        assert sum(ORDER[first : first + ROUND]) == ROUND // 2


def test_one_burst_decides_nothing():
    ab_test = ABTest()
    for i in range(TRIAL):
        ab_test.token(5_000_000_000 if i == 5 else 20_000_000 + i * 1000 if ab_test.on else 22_000_000 + i * 1000)
    assert ab_test.on


def test_of_two_ways_equally_fast_the_one_that_reads_less_is_kept():
    """With the spread that tokens have: on is the exception."""
    on = 0
    for seed in range(200):
        ab_test, rng = ABTest(), np.random.default_rng(seed)
        run(ab_test, TRIAL, 20e6, 20e6, rng, spread=0.4)
        on += ab_test.on
    assert on < 60  # a sixth, and something for what trimming hides


def test_a_short_answer_is_not_spoiled():
    """Prefetching that costs a quarter of the speed is found out within 16 tokens, half of them without it."""
    worst = 0
    for seed in range(100):
        ab_test, rng = ABTest(), np.random.default_rng(seed)
        worst = max(worst, run(ab_test, 32, 25e6, 20e6, rng))
    assert FIRST // 2 <= worst <= FIRST


def test_looks_again():
    ab_test, rng = ABTest(), np.random.default_rng(1)
    run(ab_test, TRIAL, 24e6, 20e6, rng)
    assert not ab_test.on
    run(ab_test, HOLD + TRIAL, 20e6, 24e6, rng)  # the text has changed
    assert ab_test.on and ab_test.gain > 0.1


def test_an_answer_that_is_found_again_holds_longer():
    ab_test, rng = ABTest(), np.random.default_rng(2)
    early = run(ab_test, 2 * (HOLD + TRIAL), 30e6, 20e6, rng)
    late = run(ab_test, 16 * (HOLD + TRIAL), 30e6, 20e6, rng) / 8
    assert 0 < late < early / 2
    assert run(ab_test, 2 * LONGEST_HOLD, 30e6, 20e6, rng) > 0  # but not for ever
