"""Strategies that predict, on the real library: lossless, they read ahead, and they know when not to."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import moeoff
from helpers.logits import assert_bit_equal, greedy_logits
from moeoff import OptionError, cache, native
from moeoff.budget.precision import Precision
from moeoff.engine.ab_test import BLOCK, ORDER
from moeoff.engine.prefetcher import Prefetcher
from moeoff.engine.strategy import PRESETS, Strategy, get_strategy, strategy_names
from moeoff.gguf.layout import Layout
from moeoff.predict import PREDICTORS, Prediction, Predictor, get_predictor
from stock import Stock

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 4
OPTIONS = {"n_ctx": 256, "n_threads": 2, "logits_all": True}
PREDICTING = [name for name, s in PRESETS.items() if s.predictor] + [f"lru+{name}" for name in PREDICTORS]


def share(model: str, part: float) -> int:
    return int(Layout.read(model).expert_bytes * part)


@pytest.fixture(scope="module")
def reference(demo):
    with_stock = Stock(demo, n_ctx=256, logits_all=True)
    logits = greedy_logits(with_stock, PROMPT, 24)
    with_stock.close()
    return logits


@pytest.mark.parametrize("strategy", PREDICTING)
def test_lossless_and_ahead(calibrated, reference, strategy):
    model, _, _ = calibrated
    with moeoff.Llama(model, expert_memory=share(model, 0.5), strategy=strategy, **OPTIONS) as llm:
        assert_bit_equal(greedy_logits(llm, PROMPT, 24), reference)
        stats = llm.stats()
    assert stats.prefetch_issued > 0, "nothing was read ahead"
    assert 0 < stats.prefetch_useful <= stats.prefetch_issued
    assert stats.prefetch_on is not None


def test_prompts_are_read_ahead(calibrated):
    model, _, _ = calibrated
    with moeoff.Llama(model, expert_memory=share(model, 0.5), strategy="lru+gate", **OPTIONS) as llm:
        llm.eval(PROMPT)
        stats = llm.stats()
    assert stats.prefetch_useful > 0.3 * (stats.demand_hits + stats.demand_misses)


def test_what_is_expected_stays(demo):
    """A full arena: residents that are expected outlive others of the same rank, until their router has selected."""
    with moeoff.Llama(demo, expert_memory=share(demo, 0.25), strategy="lru", **OPTIONS) as llm:
        buffer = llm.expert_buffer
        llm.eval(PROMPT)
        resident = np.flatnonzero(buffer.residency()[11])  # the oldest of the last layer would go first
        buffer.prefetch(11, resident.tolist(), limit=0)
        before = buffer.stats().prefetch_issued
        buffer.preload(0, range(32))
        buffer.preload(1, range(32))
        while buffer.stats().reads < buffer.stats().demand_misses:
            pass
        kept = np.flatnonzero(buffer.residency()[11])
        assert before == buffer.stats().prefetch_issued == 0, "limit=0 reads nothing"
        assert set(resident) <= set(kept)


def test_limit(demo):
    with moeoff.Llama(demo, expert_memory=share(demo, 0.5), strategy="lru", **OPTIONS) as llm:
        assert llm.expert_buffer.prefetch(3, range(32), limit=5) == 5
        assert llm.expert_buffer.prefetch(3, range(32), limit=0) == 0
        assert llm.expert_buffer.prefetch(4, range(2)) == 6


def test_ab_tested_strategies_report_what_they_found(demo):
    n = BLOCK * len(ORDER) + 40
    with moeoff.Llama(demo, expert_memory=share(demo, 0.3), strategy="auto", n_ctx=512, n_threads=2) as llm:
        llm.eval(PROMPT[:4])
        for token in range(n):
            llm.eval([100 + token])
        stats = llm.stats()
    assert stats.prefetch_gain is not None and -0.9 < stats.prefetch_gain < 9
    assert stats.prefetch_on or stats.prefetch_gain < 0  # off only where it loses; a loss within the noise changes nothing


def test_no_driver_when_everything_is_resident(demo):
    with moeoff.Llama(demo, expert_memory=share(demo, 2), strategy="auto", **OPTIONS) as llm:
        llm.eval(PROMPT)
        stats = llm.stats()
        assert stats.prefetch_on is None and stats.driver_seconds == 0


def test_a_smaller_budget_calls_the_driver(demo):
    with moeoff.Llama(demo, memory="4G", strategy="auto", n_ctx=256, n_threads=2) as llm:
        assert llm.stats().prefetch_on is None
        llm.set_memory(llm.plan.needs.total + (6 << 20))
        llm.eval(PROMPT)
        assert llm.stats().prefetch_on is not None and llm.stats().prefetch_issued > 0


def test_learned_needs_a_profile(demo):
    with pytest.raises(OptionError, match="needs a calibration of this model"):
        moeoff.Llama(demo, strategy="promoe", profile=False, expert_memory=share(demo, 0.5), **OPTIONS)


def test_names():
    assert set(PRESETS) <= set(strategy_names())
    assert {"fate", "edgemoe", "hobbit", "promoe", "eap", "lru", "on-demand", "auto"} <= set(strategy_names())
    assert get_strategy("score+gate").predictor == "gate" and get_strategy("hobbit+none").predictor is None
    assert get_strategy(own := Strategy("own", "", policy="lfu")) is own
    for wrong in ("magic", "lru+magic", "magic+gate", "belady+gate"):
        with pytest.raises(OptionError):
            get_strategy(wrong)


def test_register_takes_either_part_of_a_strategy():
    policy, predictor = type("Mine", (cache.Policy,), {"name": "mine"}), type("Mine", (Predictor,), {"name": "mine"})
    try:
        assert moeoff.register(policy) is policy and moeoff.register(predictor) is predictor
        assert cache.get_policy("mine") is policy and get_predictor("mine") is predictor
        assert "mine" in strategy_names() and get_strategy("mine+mine").predictor == "mine"
        with pytest.raises(OptionError, match="not taken: 'mine'"):
            moeoff.register(policy)
        with pytest.raises(OptionError, match="neither of moeoff.cache.Policy nor of moeoff.predict.Predictor"):
            moeoff.register(dict)
    finally:
        cache.POLICIES.pop("mine", None)
        PREDICTORS.pop("mine", None)


class Recorder:
    """As much of a buffer as the prefetcher asks of one; remembers what was prefetched."""

    def __init__(self):
        self.priorities = np.zeros((2, 8), np.float32)
        self.tensors = [SimpleNamespace(gate=g) for g in (0, 0, 1, 1)]
        self.prefetched = []

    def prefetch(self, gate, experts, low=False, limit=-1):
        queued = len(experts) if limit < 0 else min(len(experts), limit)
        self.prefetched.append((gate, list(experts), low, queued))
        return queued

    def stats(self):
        return native.Stats()


def test_prefetches_by_predicted_weight():
    """Predicted scores stand in for weights: what the rule would serve low is read low, what it would skip is not read."""
    scores = np.array([[0.0, 0.4, 0.1, 0.3, 0.2, 0.0, 0.0, 0.0]], np.float32)  # unimportance 0, 0.4, 0.7, 0.9
    rule = Precision(0.5, 0.8, 0.5, "Q4_0")
    lossy = [(1, [1, 3], False, 2), (1, [4, 2], False, 0), (1, [4], True, 1)]  # 4 and 2 are protected where they are resident
    for precision, expected in ((rule, lossy), (Precision(), [(1, [1, 3, 4, 2], False, 4)])):
        buffer = Recorder()
        prefetcher = Prefetcher(buffer, SimpleNamespace(), n_used=4, n_lanes=1, ab_tested=False, precision=precision)
        prefetcher._credit = 8.0
        prefetcher._act([Prediction(1, scores)], single=True)
        assert buffer.prefetched == expected and prefetcher._credit == 8 - sum(n for *_, n in expected)
    buffer = Recorder()
    batch = np.array([[9, 8, 1, 0], [9, 8, 0, 1], [9, 1, 8, 0], [9, 1, 0, 8]], np.float32)
    Prefetcher(buffer, SimpleNamespace(), n_used=2, n_lanes=1, ab_tested=False, precision=rule)._act([Prediction(0, batch)], single=False)
    assert buffer.prefetched == [(0, [0, 1], False, 2), (0, [2, 3], True, 2)]  # chosen by 4, 2, 1, 1 tokens
