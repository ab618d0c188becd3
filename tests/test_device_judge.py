"""Which way of using a device is kept: by made-up times, where the answer is known."""

from __future__ import annotations

import random

import pytest

from moeoff.engine.device_judge import DeviceJudge


def decode(judge, seconds, tokens, seed=0, n_tokens=1):
    """The modes that were used, with times that vary by 2 %."""
    rng = random.Random(seed)
    modes = []
    for _ in range(tokens):
        modes.append(judge.begin(n_tokens, True))
        judge.end(n_tokens, seconds[modes[-1]] * rng.uniform(0.98, 1.02), True)
    return modes


@pytest.mark.parametrize(
    "seconds, kept",
    [
        ({"cooperative": 0.10, "centric": 0.12, "cpu": 0.15}, "cooperative"),
        ({"cooperative": 0.12, "centric": 0.10, "cpu": 0.15}, "centric"),
        ({"cooperative": 0.12, "centric": 0.20, "cpu": 0.10}, "cpu"),
        ({"cooperative": 0.10, "centric": 0.10, "cpu": 0.10}, "cpu"),  # the one that does less
    ],
)
def test_the_fastest_is_kept(seconds, kept):
    judge = DeviceJudge(("cooperative", "centric"))
    assert judge.begin(1, True) == "cooperative" and judge.gain is None
    modes = decode(judge, seconds, 1200)
    assert set(modes) == {"cooperative", "centric", "cpu"} and judge.decode_mode == kept
    assert modes[-500:].count(kept) >= 250
    best = min(v for k, v in seconds.items() if k != "cpu")
    assert judge.gain == pytest.approx(seconds["cpu"] / best - 1, abs=0.03)


def test_it_is_compared_again():
    """What was slower while other work went on gets another chance."""
    judge = DeviceJudge(("cooperative",))
    decode(judge, {"cooperative": 0.2, "cpu": 0.1}, 200)
    assert judge.decode_mode == "cpu" and judge.gain < -0.4
    decode(judge, {"cooperative": 0.05, "cpu": 0.1}, 400)
    assert judge.decode_mode == "cooperative" and judge.gain > 0.8


def test_batches_of_other_sizes_are_compared_apart():
    judge = DeviceJudge(("cooperative",))
    decode(judge, {"cooperative": 0.05, "cpu": 0.1}, 150)
    decode(judge, {"cooperative": 0.4, "cpu": 0.2}, 150, n_tokens=4)
    assert judge.begin(4, True) == "cpu" and judge.begin(1, True) == "cooperative" == judge.decode_mode


def test_prompts_by_three_ways():
    """The fastest is kept; tokens are decoded by the first way where that is not to be compared."""
    judge = DeviceJudge(("centric",), ("centric", "waves", "cpu"), compares=False)

    def read(seconds):
        mode = judge.begin(100, False)
        judge.end(100, 100 * seconds[mode], False)
        return mode

    modes = [read({"centric": 0.03, "waves": 0.01, "cpu": 0.02}) for _ in range(60)]
    assert set(modes[:6]) == {"centric", "waves", "cpu"} and modes[6:].count("waves") >= 50 and {"centric", "cpu"} <= set(modes[6:])
    assert set(decode(judge, {"centric": 1.0, "cpu": 0.1}, 200)) == {"centric"} and judge.gain is None


def test_prompts():
    """Each way twice, then the faster one, and the other again now and then; short ones are not compared."""
    judge = DeviceJudge(("cooperative", "centric"))

    def read(n, seconds):
        mode = judge.begin(n, False)
        judge.end(n, n * seconds[mode], False)
        return mode

    assert [read(8, {"cooperative": 9}) for _ in range(3)] == ["cooperative"] * 3
    modes = [read(100, {"cooperative": 0.02, "cpu": 0.01}) for _ in range(40)]
    assert modes[:4].count("cpu") == 2 and modes[4:].count("cooperative") in (1, 2)
    modes = [read(100, {"cooperative": 0.005, "cpu": 0.01}) for _ in range(60)]
    assert modes[-15:].count("cooperative") >= 14
