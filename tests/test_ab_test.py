"""The online comparison of token times, on made-up ones."""

import numpy as np
import pytest

from moeoff.engine.ab_test import BLOCK, HOLD, ORDER, PrefetchABTest

TRIAL = BLOCK * len(ORDER)


def run(ab_test, n, ns_on, ns_off, rng):
    for _ in range(n):
        ab_test.token(int((ns_on if ab_test.on else ns_off) * rng.uniform(0.9, 1.1)))


@pytest.mark.parametrize("ns_on, ns_off", [(20e6, 24e6), (24e6, 20e6)])
def test_keeps_what_is_faster(ns_on, ns_off):
    ab_test, rng = PrefetchABTest(), np.random.default_rng(0)
    run(ab_test, TRIAL, ns_on, ns_off, rng)
    assert ab_test.on == (ns_on < ns_off)
    assert ab_test.gain == pytest.approx(ns_off / ns_on - 1, abs=0.04)


def test_both_ways_get_the_same_share_of_a_trial():
    ab_test, ways = PrefetchABTest(), []
    for _ in range(TRIAL):
        ways.append(ab_test.on)
        ab_test.token(1_000_000)
    assert sum(ways) == TRIAL // 2


def test_one_burst_decides_nothing():
    ab_test = PrefetchABTest()
    for i in range(TRIAL):
        ab_test.token(5_000_000_000 if i == 5 else 20_000_000 if ab_test.on else 22_000_000)
    assert ab_test.on


def test_a_toss_of_a_coin_decides_nothing():
    """Two ways equally fast, with the spread that tokens have: switching off must be the exception."""
    off = 0
    for seed in range(200):
        ab_test, rng = PrefetchABTest(), np.random.default_rng(seed)
        for _ in range(TRIAL):
            ab_test.token(int(20e6 * rng.uniform(0.6, 1.4)))
        off += not ab_test.on
    assert 0 < off < 60  # a sixth, and something for what trimming hides


def test_looks_again():
    ab_test, rng = PrefetchABTest(), np.random.default_rng(1)
    run(ab_test, TRIAL, 24e6, 20e6, rng)
    assert not ab_test.on
    run(ab_test, HOLD + TRIAL, 20e6, 24e6, rng)  # the text has changed
    assert ab_test.on and ab_test.gain > 0.1
