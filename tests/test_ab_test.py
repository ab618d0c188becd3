"""The online comparison of token times, on made-up ones."""

import numpy as np
import pytest

from moeoff.engine.ab_test import BLOCK, HOLD, ORDER, PrefetchABTest

TRIAL = BLOCK * len(ORDER)


def run(judge, n, ns_on, ns_off, rng):
    for _ in range(n):
        judge.token(int((ns_on if judge.on else ns_off) * rng.uniform(0.9, 1.1)))


@pytest.mark.parametrize("ns_on, ns_off", [(20e6, 24e6), (24e6, 20e6)])
def test_keeps_what_is_faster(ns_on, ns_off):
    judge, rng = PrefetchABTest(), np.random.default_rng(0)
    run(judge, TRIAL, ns_on, ns_off, rng)
    assert judge.on == (ns_on < ns_off)
    assert judge.gain == pytest.approx(ns_off / ns_on - 1, abs=0.04)


def test_both_ways_get_the_same_share_of_a_trial():
    judge, ways = PrefetchABTest(), []
    for _ in range(TRIAL):
        ways.append(judge.on)
        judge.token(1_000_000)
    assert sum(ways) == TRIAL // 2


def test_one_burst_decides_nothing():
    judge = PrefetchABTest()
    for i in range(TRIAL):
        judge.token(5_000_000_000 if i == 5 else 20_000_000 if judge.on else 22_000_000)
    assert judge.on


def test_a_toss_of_a_coin_decides_nothing():
    """Two ways equally fast, with the spread that tokens have: switching off must be the exception."""
    off = 0
    for seed in range(200):
        judge, rng = PrefetchABTest(), np.random.default_rng(seed)
        for _ in range(TRIAL):
            judge.token(int(20e6 * rng.uniform(0.6, 1.4)))
        off += not judge.on
    assert 0 < off < 60  # a sixth, and something for what trimming hides


def test_looks_again():
    judge, rng = PrefetchABTest(), np.random.default_rng(1)
    run(judge, TRIAL, 24e6, 20e6, rng)
    assert not judge.on
    run(judge, HOLD + TRIAL, 20e6, 24e6, rng)  # the text has changed
    assert judge.on and judge.gain > 0.1
