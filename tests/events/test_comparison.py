"""Online comparisons on made-up times, where the answer is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moeoff.engine.comparison import (
    BLOCK_TOKENS,
    HOLD,
    LONGEST_HOLD,
    ORDER,
    ROUND,
    ABTest,
    ModeTuner,
    _Prompts,
)

TRIAL = BLOCK_TOKENS * len(ORDER)
FIRST = BLOCK_TOKENS * ROUND


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
        ab_test.token(
            5_000_000_000
            if i == 5
            else 20_000_000 + i * 1000
            if ab_test.on
            else 22_000_000 + i * 1000
        )
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
    """Prefetching that costs a quarter of the speed is found out within 16 tokens, half
    of them without it.
    """
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


def decode(tuner, seconds, tokens, seed=0, n_tokens=1):
    """The modes that were used, with times that vary by 2 %."""
    rng = random.Random(seed)
    modes = []
    for _ in range(tokens):
        modes.append(tuner.begin(n_tokens, True))
        tuner.end(n_tokens, seconds[modes[-1]] * rng.uniform(0.98, 1.02), True)
    return modes


@pytest.mark.parametrize(
    "seconds, fastest",
    [
        ({"cooperative": 0.10, "centric": 0.12, "cpu": 0.15}, "cooperative"),
        ({"cooperative": 0.12, "centric": 0.10, "cpu": 0.15}, "centric"),
        ({"cooperative": 0.12, "centric": 0.20, "cpu": 0.10}, "cpu"),
        ({"cooperative": 0.10, "centric": 0.10, "cpu": 0.10}, "cpu"),  # the one that does less
    ],
)
def test_the_fastest_is_kept(seconds, fastest):
    tuner = ModeTuner(("cooperative", "centric"))
    assert tuner.begin(1, True) == "cooperative" and tuner.gain is None
    modes = decode(tuner, seconds, 1200)
    assert set(modes) == {"cooperative", "centric", "cpu"} and tuner.decode_mode == fastest
    assert modes[-500:].count(fastest) >= 250
    best = min(v for k, v in seconds.items() if k != "cpu")
    assert tuner.gain == pytest.approx(seconds["cpu"] / best - 1, abs=0.03)


def test_it_is_compared_again():
    """A mode that was slower while other work ran is tried again."""
    tuner = ModeTuner(("cooperative",))
    decode(tuner, {"cooperative": 0.2, "cpu": 0.1}, 200)
    assert tuner.decode_mode == "cpu" and tuner.gain < -0.4
    decode(tuner, {"cooperative": 0.05, "cpu": 0.1}, 400)
    assert tuner.decode_mode == "cooperative" and tuner.gain > 0.8


def test_a_cpu_that_takes_twice_as_long_is_not_tried_again_soon():
    modes = decode(
        ModeTuner(("cooperative", "centric")),
        {"cooperative": 0.012, "centric": 0.008, "cpu": 0.025},
        3000,
    )
    assert modes[:200].count("cpu") == 32 and set(modes[200:]) == {"centric"}


def test_batches_of_other_sizes_are_compared_apart():
    tuner = ModeTuner(("cooperative",))
    decode(tuner, {"cooperative": 0.05, "cpu": 0.1}, 150)
    decode(tuner, {"cooperative": 0.4, "cpu": 0.2}, 150, n_tokens=4)
    assert (
        tuner.begin(4, True) == "cpu" and tuner.begin(1, True) == "cooperative" == tuner.decode_mode
    )


def test_prompts_by_three_ways():
    """The fastest is kept; tokens are decoded by the first way where that is not to be
    compared.
    """
    tuner = ModeTuner(("centric",), ("centric", "waves", "cpu"), compares=False)

    def read(seconds):
        mode = tuner.begin(100, False)
        tuner.end(100, 100 * seconds[mode], False)
        return mode

    modes = [read({"centric": 0.019, "waves": 0.01, "cpu": 0.015}) for _ in range(60)]
    assert (
        set(modes[:6]) == {"centric", "waves", "cpu"}
        and modes[6:].count("waves") >= 50
        and {"centric", "cpu"} <= set(modes[6:])
    )
    assert (
        set(decode(tuner, {"centric": 1.0, "cpu": 0.1}, 200)) == {"centric"} and tuner.gain is None
    )


def test_a_way_that_is_much_slower_is_tried_once():
    prompts = _Prompts(("cooperative", "waves", "cpu"))
    modes = []
    for _ in range(40):
        modes.append(prompts.next())
        prompts.add(modes[-1], {"cooperative": 0.004, "waves": 0.0007, "cpu": 0.0044}[modes[-1]])
    assert (
        modes[:5] == ["cooperative", "waves", "cpu", "waves", "waves"]
        and modes.count("waves") >= 36
    )


@pytest.mark.parametrize("cpu, n_cpu", [(0.004, 0), (0.0008, 30)], ids=["hopeless", "the best"])
def test_what_a_short_prompt_showed_spares_long_ones_the_trial(cpu, n_cpu):
    tuner = ModeTuner(("cooperative",), ("waves", "cpu"))

    def read(n):
        mode = tuner.begin(n, False)
        tuner.end(n, n * {"waves": 0.001, "cpu": cpu}[mode], False)
        return mode

    assert [read(512) for _ in range(10)] == ["waves"] * 10
    assert {read(64) for _ in range(6)} == {"waves", "cpu"}
    modes = [read(512) for _ in range(40)]
    assert modes.count("cpu") >= n_cpu and (n_cpu or "cpu" not in modes)


def test_prompts():
    """Each way twice, then the faster one, and the other again now and then; short ones
    are not compared.
    """
    tuner = ModeTuner(("cooperative", "centric"))

    def read(n, seconds):
        mode = tuner.begin(n, False)
        tuner.end(n, n * seconds[mode], False)
        return mode

    assert [read(8, {"cooperative": 9}) for _ in range(3)] == ["cooperative"] * 3
    modes = [read(100, {"cooperative": 0.02, "cpu": 0.01}) for _ in range(40)]
    # the first had to read the experts
    assert modes[1:5].count("cpu") == 2 and modes[5:].count("cooperative") in (1, 2)
    modes = [read(100, {"cooperative": 0.005, "cpu": 0.01}) for _ in range(60)]
    assert modes[-15:].count("cooperative") >= 14
