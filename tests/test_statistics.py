"""Estimates with intervals, and the quality that scores say: against definitions and made-up scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moeoff.budget.statistics import Estimate, Scores, divergence, log_probs, spearman, student


def test_log_probs_and_divergence():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (7, 50)).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(log_probs(logits), np.log(p), atol=1e-5)
    q = log_probs(rng.normal(0, 5, (7, 50)).astype(np.float32))
    np.testing.assert_allclose(divergence(log_probs(logits), q), (p * (np.log(p) - q)).sum(axis=1), rtol=1e-5)
    assert not divergence(q, q).any()


def test_intervals_cover():
    """95 % of intervals contain the truth, for few windows too."""
    rng = np.random.default_rng(1)
    for n, exact in ((2, 12.706), (5, 2.776), (10, 2.262), (30, 2.045)):
        assert student(n) == pytest.approx(exact, rel=0.005)
        hits = 0
        for _ in range(2000):
            window_effect = rng.normal(0, 1, (n, 1))  # tokens of a window have something in common
            e = Estimate.mean(3 + window_effect + rng.normal(0, 1, (n, 20)))
            hits += e.low <= 3 <= e.high
        assert 0.93 < hits / 2000 < 0.97
    assert Estimate.mean(np.ones((1, 5))) == Estimate(1.0, None, None)


def test_quality_of_known_scores():
    reference = np.full((4, 10), 2.0)
    scores = Scores(reference + 0.01, reference, np.full((4, 10), 0.25), np.arange(40).reshape(4, 10) % 2 == 0)
    q = scores.quality()
    assert q.perplexity == pytest.approx(math.exp(2.01))
    assert (q.loss.value, q.loss.low, q.loss.high) == pytest.approx((math.expm1(0.01),) * 3)
    assert (q.kl.value, q.top1.value, q.n_tokens, q.n_windows) == pytest.approx((0.25, 0.5, 40, 4))
    assert scores.quality(slice(0, 1)).loss.low is None


def test_spearman():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 50]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
