"""The judge of drafts, on made-up answers: each batch with drafts gains some tokens and takes longer."""

from __future__ import annotations

import numpy as np
import pytest

from moeoff.engine.ab_test import HOLD
from moeoff.engine.batch_spans import Span
from moeoff.server.draft_judge import WINDOW, DraftJudge


def answers(judge: DraftJudge, batches: int, accepted: float, costs: float, n_slots: int = 2) -> float:
    """Returns the share of batches that had drafts. A batch without takes 10 ms; with, `costs` as long."""
    rng, now, drafted, n_drafted = np.random.default_rng(0), 0.0, judge.on, 0
    first = np.zeros(n_slots, int)
    for _ in range(batches):
        judge.begin({slot: Span(int(f), int(f) + 1, 1, True) for slot, f in enumerate(first)}, True, now)
        n_drafted += drafted
        now += 0.01 * rng.uniform(0.95, 1.05) * (costs if drafted else 1.0)
        first += 1 + (rng.binomial(4, accepted / 4, n_slots) if drafted else 0)
        drafted = judge.on  # drafts of the next batch are made before it begins
    return n_drafted / batches


@pytest.mark.parametrize("accepted, costs, faster", [(2.0, 1.5, True), (0.5, 2.5, False), (1.0, 2.5, False), (1.0, 1.2, True)])
def test_keeps_what_is_faster(accepted, costs, faster):
    judge = DraftJudge()
    answers(judge, 64 * (WINDOW + 1) + 10, accepted, costs)
    assert judge.on == faster and judge.gain == pytest.approx((1 + accepted) / costs - 1, abs=0.2)


def test_what_does_not_pay_is_seldom_tried():
    assert answers(DraftJudge(), 16 * HOLD * WINDOW, 0.2, 2.0) < 0.05


def test_a_prompt_between_is_no_time_of_an_answer():
    judge = DraftJudge()
    for i in range(1000):
        judge.begin({0: Span(i, i + 1, 1, True)}, i % WINDOW != 0, float(i))
    assert judge.gain is None
