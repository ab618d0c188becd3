"""The length of drafts, on made-up answers; what the server makes of them is in
tests/server/test_extra_models.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moeoff.engine.drafts import DraftLength
from moeoff.options import LONGEST_DRAFT
from moeoff.routing.batch import Span


def measured(
    length: DraftLength, n: int, accepted, seconds, n_sequences: int = 1
) -> tuple[float, list[int]]:
    """Tokens per second of n batches, and the length of each one's draft. accepted:
    chance of each token by batch; seconds: of a batch, by its tokens.
    """
    rng, now, n_drafted, lengths = np.random.default_rng(0), 0.0, length.best, []
    first = np.zeros(n_sequences, int)
    for batch in range(n):
        length.begin(
            {
                i: Span(int(f), int(f) + 1 + n_drafted, 1 + n_drafted, True)
                for i, f in enumerate(first)
            },
            now,
        )
        lengths.append(n_drafted)
        now += seconds(1 + n_drafted) * rng.uniform(0.95, 1.05)
        for i in range(n_sequences):
            first[i] += 1 + np.cumprod(rng.random(n_drafted) < accepted(batch)).sum()
        n_drafted = length.best  # drafts of the next batch are made before it begins
    return first.sum() / now, lengths


@pytest.mark.parametrize("slope", [0.15, 0.8])
@pytest.mark.parametrize("chance", [0.05, 0.6, 0.98])
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_nearly_as_fast_as_the_best_length(slope, chance, n_sequences):
    def seconds(n):
        return 0.1 * (1 + slope * (n - 1))

    rate, _ = measured(DraftLength(), 2000, lambda _: chance, seconds, n_sequences)
    by_length = [
        n_sequences * sum(chance**i for i in range(k + 1)) / seconds(k + 1)
        for k in range(LONGEST_DRAFT + 1)
    ]
    assert rate > 0.94 * max(by_length) and rate > 0.98 * by_length[0]


def test_drafts_from_the_first_token_on_are_compared_with_none():
    """Accepted or not: the first batches, with nothing in memory, say little."""
    n_batches = itertools.count()
    rate, _ = measured(
        DraftLength(),
        2000,
        lambda _: 0.97,
        lambda n: (0.3 if next(n_batches) < 2 else 0.1) * (1 + 1.3 * (n - 1)),
    )
    assert rate > 0.95 / 0.1


def test_a_text_that_begins_to_repeat_itself_gets_drafts():
    length = DraftLength()
    _, lengths = measured(
        length,
        3000,
        lambda batch: 0.05 if batch < 2000 else 0.95,
        lambda n: 0.1 * (1 + 0.3 * (n - 1)),
    )
    assert np.mean(lengths[:2000]) < 0.1 and np.mean(lengths[2400:]) > 4 and length.gain > 0.5


def test_a_prompt_between_is_no_time_of_an_answer():
    length = DraftLength()
    for i in range(1000):
        length.begin({0: Span(i, i + 1, 1, i % 2 == 0)}, float(i))
    assert length.gain is None


def test_what_was_rejected():
    """Also where a prompt of somebody else is read beside it. Not what a new question
    in an answer's place leaves out of that.
    """
    length = DraftLength()
    assert length.begin({0: Span(10, 14, 4, True), 1: Span(0, 5, 5, False)}, 0.0) == 0
    assert length.begin({0: Span(12, 17, 5, True)}, 1.0) == 2
    assert length.begin({0: Span(13, 14, 1, True)}, 2.0) == 4
    assert length.begin({0: Span(14, 18, 4, True)}, 3.0) == 0
    assert length.begin({0: Span(3, 9, 6, False)}, 4.0) == 0
