"""The reference model in numpy, which scripts/research/normalized.py changes: against llama.cpp's, and its rule against the native one."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.files import CALIBRATION_TEXTS
from moeoff.calibrate.perplexity import open_model, read_windows
from moeoff.calibrate.precision_search import RuleEvaluator
from moeoff.calibrate.statistics import Scores
from moeoff.policies.precision import Precision
from normalized import Caches, NumpyModel, Rule, mean_sums, measure

OPTIONS = {"n_threads": 1, "expert_memory": 1 << 26, "flash_attn": True}
TAU, SHARE = 0.1, 0.25


@pytest.fixture(scope="module")
def windows(demo):
    with open_model(demo, 128, **OPTIONS) as llm:
        return read_windows(llm, CALIBRATION_TEXTS, 128, 3)


def test_the_numpy_model_leaves_out_what_the_native_rule_does(demo, windows):
    """Near ties of the routers' scores may go the other way: numpy does not quantize the rows."""
    with open_model(demo, 128, precision=Precision(tau=TAU, resident=SHARE), deterministic=True, **OPTIONS) as llm:
        evaluator = RuleEvaluator(llm, windows)
        with evaluator.reference() as reference:
            native = evaluator.measure(reference, Precision(tau=TAU, resident=SHARE))
            lossless, found, misses = measure(NumpyModel(demo, normalized=False), [w.tokens for w in windows], [Rule(TAU)], [SHARE])
            np.testing.assert_allclose(lossless.mean(), reference.nll.mean(), rtol=5e-3)
    of = found[SHARE, Rule(TAU)]
    ours = Scores(of.nll, lossless, of.kl, of.same).quality().distance
    assert of.misses / misses[SHARE] == pytest.approx(native.cost, rel=0.03)
    assert of.skipped / of.uses == pytest.approx(native.skipped, rel=0.03)
    assert ours.kl.value == pytest.approx(native.kl, rel=0.1) and ours.top1.value == pytest.approx(native.distance.top1.value, abs=0.02)


def test_what_was_computed_before_is_not_computed_again(demo, windows):
    model, tokens = NumpyModel(demo, normalized=True), windows[0].tokens
    whole, _ = model.compute(tokens)
    _, past = model.compute(tokens[:50])
    np.testing.assert_allclose(model.compute(tokens[50:], past)[0], whole[50:], atol=2e-3)


def test_normalized_weights_are_shares(demo, windows):
    tokens = [windows[0].tokens]
    np.testing.assert_allclose(mean_sums(NumpyModel(demo, normalized=True), tokens), 1, rtol=1e-5)
    as_is = mean_sums(NumpyModel(demo, normalized=False), tokens)
    assert (as_is > 0.1).all() and (as_is < 0.9).all()


WEIGHTS = np.array([[0.4, 0.3, 0.2, 0.1]], np.float32)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(0.25), [0.4, 0.3, 0, 0]),
        (Rule(0.3), [0.4, 0.3, 0, 0]),  # a weight that equals tau is enough
        (Rule(0.25, renormalized=True), [4 / 7, 3 / 7, 0, 0]),
        (Rule(0.5), [0, 0, 0, 0]),
        (Rule(0.5, renormalized=True), [0, 0, 0, 0]),
        (Rule(0.5, keeps_first=True), [0.4, 0, 0, 0]),
        (Rule(0.5, renormalized=True, keeps_first=True), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_rules(rule, kept):
    caches = Caches(rule, 1, 8, 0.5)
    high, low = caches.decide(0, np.array([[5, 2, 7, 1]]), WEIGHTS)
    np.testing.assert_allclose(high, [kept], rtol=1e-6)
    assert not low.any()
    n = np.count_nonzero(kept)
    assert (caches.misses, caches.skipped, caches.uses) == (n, 4 - n, 4)


def test_what_is_in_the_cache_serves_whatever_it_weighs():
    caches = Caches(Rule(0.5), 1, 8, 0.25)
    caches.follow(0, np.array([[5, 2], [5, 2], [5, 7]]))  # two fit: 7 took the place of 2
    kept, _ = caches.decide(0, np.array([[2, 5, 7, 1]]), WEIGHTS)
    np.testing.assert_allclose(kept, [[0, 0.3, 0.2, 0]])
    assert caches.misses == 0 and caches.skipped == 2


def test_a_second_threshold_serves_low_what_lies_between():
    caches = Caches(Rule(0.35, low_from=0.15, low_room=0.5), 1, 8, 0.5)
    high, low = caches.decide(0, np.array([[5, 2, 7, 1]] * 2), np.repeat(WEIGHTS, 2, axis=0))
    np.testing.assert_allclose(high, [[0.4, 0, 0, 0]] * 2)
    np.testing.assert_allclose(low, [[0, 0.3, 0.2, 0]] * 2)
    # of the second token all that is served is there: two fit of each
    assert (caches.misses, caches.low_misses, caches.skipped, caches.uses) == (1, 2, 2, 8)


def test_low_versions_are_in_their_type(demo, windows):
    tokens = windows[0].tokens
    high, low, q2 = (NumpyModel(demo, normalized=False, types=types) for types in (("Q4_0", "Q4_0"), ("Q4_0", "Q2_0"), ("Q2_0", "Q2_0")))
    assert high.low_size == 1 and 0.4 < low.low_size < 0.6

    def all_low(_: int, __: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(weights), weights

    np.testing.assert_allclose(low.compute(tokens, decide=all_low)[0], q2.compute(tokens)[0], rtol=1e-5, atol=1e-5)
    assert np.abs(high.compute(tokens)[0] - q2.compute(tokens)[0]).max() > 0.1
