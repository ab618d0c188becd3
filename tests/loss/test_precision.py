"""Whole models in two precisions: what is given up is what was asked for, replays bit
for bit, does not depend on timing, and is there again after a warm start.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import moeoff
from helpers.budgets import needed
from helpers.logits import assert_bit_equal, greedy_logits
from helpers.processes import own_process
from helpers.refusals import parse_options, refusals, refused
from helpers.waiting import wait_until, wait_until_still
from moeoff import OptionError
from moeoff.experts.convert import convert
from moeoff.llamacpp import native
from moeoff.policies import Strategy
from moeoff.precision import Precision
from moeoff.routing.trace import Trace

HIGH, LOW = native.HIGH, native.LOW
PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 2
OPTIONS = {"n_ctx": 64, "n_threads": 2, "logits_all": True}
LOSSY = Precision(0.4, 0.8, 0.4, "Q4_0")


@pytest.mark.parametrize("given, code, words", refusals("Precision"))
def test_bad_precision(given, code, words):
    with refused(code, words):
        Precision(**parse_options(given))


@pytest.fixture(scope="module")
def model(demo, tmp_path_factory) -> str:
    """The demo model (Q8_0) with a sidecar in Q4_0."""
    path = tmp_path_factory.mktemp("precision") / "model.gguf"
    shutil.copy(demo, path)
    convert(path, tiers="Q4_0")
    return str(path)


def logits(model, n=16, prompt=PROMPT, **options):
    with moeoff.Llama(model, **OPTIONS | {"expert_memory": "1M"} | options) as llm:
        out = greedy_logits(llm, prompt, n)
        return out, llm.stats()


def test_forced_low_is_the_low_model(model):
    """All experts forced low: bit for bit the model that runs with that tier alone. All
    high: the model itself.
    """
    tier, _ = logits(model, tier="Q4_0")
    own, _ = logits(model)
    assert (tier != own).any()
    n_uses = 12 * 4 * (len(PROMPT) + 16)
    for version, expected in ((LOW, tier), (HIGH, own)):
        with moeoff.Llama(
            model, expert_memory="1M", precision=Precision(low_tier="q4_0"), **OPTIONS
        ) as llm:
            llm.engine.buffer.force(np.full(n_uses, version, np.uint8))
            assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)
            assert llm.engine.buffer.force() == 0
            assert llm.stats().served_low == (n_uses if version == LOW else 0)


def test_lossless_with_a_low_pool(model):
    own, _ = logits(model)
    with_pool, stats = logits(model, precision=Precision(low_tier="Q4_0"))
    assert_bit_equal(with_pool, own)
    assert (
        stats.served_low == stats.skipped == 0
        and stats.low_cache_bytes > 0
        and stats.precision_summary == ""
    )


def test_replay_is_bit_identical(model, tmp_path):
    """A lossy run is repeated from its trace, whatever is resident, prefetched or asked
    by the rule.
    """
    trace = tmp_path / "trace"
    recorded, stats = logits(model, precision=LOSSY, trace=trace, strategy="hobbit")
    assert (
        stats.served_low > 50 and stats.skipped > 10 and "low precision" in stats.precision_summary
    )
    versions = np.frombuffer(Trace.read(trace).decisions(), np.uint8)
    assert np.bincount(versions).tolist() == [
        stats.expert_uses - stats.served_low - stats.skipped,
        stats.served_low,
        stats.skipped,
    ]
    elsewhere, _ = logits(model, precision=LOSSY, expert_memory="3M")
    assert (elsewhere != recorded).any()  # decisions depend on what is resident
    for memory, precision in (("700K", LOSSY), ("3M", LOSSY), ("12M", Precision(low_tier="Q4_0"))):
        again, replayed = logits(
            model,
            precision=precision,
            replay=trace,
            expert_memory=memory,
            strategy="hobbit",
            io_threads=1,
        )
        assert_bit_equal(again, recorded)
        assert (replayed.served_low, replayed.skipped) == (stats.served_low, stats.skipped)


def test_a_trace_tells_low_reads(model, tmp_path):
    """Every read of a lossy run: which version it was for, as its size and the counters
    say too.
    """
    with moeoff.Llama(
        model, **OPTIONS, expert_memory="1M", precision=LOSSY, trace=tmp_path / "trace"
    ) as llm:
        greedy_logits(llm, PROMPT, 16)
        wait_until_still(lambda: llm.engine.buffer.stats().reads)
        stats = llm.engine.buffer.stats()
    trace = Trace.read(tmp_path / "trace")
    reads = trace.reads[trace.reads["result"] == 0]
    low = reads["version"] == LOW
    assert 20 < low.sum() < len(reads) - 20 and trace.reads_lost == 0
    assert reads["nbytes"][low].sum() == stats.low_bytes_read == trace.notes[-1]["low_bytes_read"]
    assert reads["nbytes"].sum() == stats.bytes_read
    # Q8_0: 34 bytes for 32 values, Q4_0: 18
    whole = np.array([t.nbytes for t in trace.model.tensors])[reads["tensor"]]
    np.testing.assert_array_equal(reads["nbytes"], np.where(low, whole * 18 // 34, whole))


def test_replay_of_another_run_is_refused(model, demo, tmp_path):
    logits(model, precision=LOSSY, trace=tmp_path / "trace")
    with pytest.raises(OptionError, match="chose other experts"):
        logits(model, prompt=PROMPT[::-1], precision=LOSSY, replay=tmp_path / "trace")
    with pytest.raises(OptionError, match="decision .* low versions"):
        logits(model, replay=tmp_path / "trace")
    (tmp_path / "text").write_text("once upon a time")
    with pytest.raises(OptionError, match="not a trace"):
        logits(model, replay=tmp_path / "text")


def test_deterministic(model):
    """Same text for any budget, number of I/O threads or policy; without the flag it is
    not.
    """
    expected, stats = logits(model, precision=LOSSY, deterministic=True)
    assert stats.served_low > 50 and stats.skipped > 10
    for options in (
        {"expert_memory": "700K", "io_threads": 1},
        {"expert_memory": "4M", "strategy": "hobbit"},
        {"expert_memory": "12M", "io_threads": 8},
        {"n_threads": 1},
    ):
        again, other = logits(model, precision=LOSSY, deterministic=True, **options)
        assert_bit_equal(again, expected)
        assert (other.served_low, other.skipped) == (stats.served_low, stats.skipped)


@pytest.fixture
def remembered(model, tmp_path, monkeypatch):
    """After a lossy run with room for everything: options of another, what was resident
    in both versions, and the warm start's file.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = OPTIONS | {"warm": True, "precision": LOSSY, "deterministic": True}
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        expected = greedy_logits(llm, PROMPT, 16)
        residency = [llm.engine.buffer.residency(low=low) for low in (False, True)]
        assert llm.stats().low_bytes_read > 0
    (path,) = (tmp_path / "moeoff" / "warm").glob("*.npz")
    return options, residency, path, expected


def test_warm_start_with_low_versions(model, remembered):
    options, (high, low), _, expected = remembered
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        wait_until(
            lambda: (
                np.array_equal(llm.engine.buffer.residency(), high)
                and np.array_equal(llm.engine.buffer.residency(low=True), low)
            )
        )
        before = llm.engine.buffer.stats()
        assert before.low_bytes_read > 0 and before.prefetch_issued == 0
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)
        stats = llm.stats()
        assert (
            stats.served_low > 50
            and stats.demand_misses == 0
            and stats.bytes_read == before.bytes_read
        )


def test_warm_start_fills_smaller_arenas(model, remembered):
    """As far as each arena goes, and no further: nothing that was preloaded is evicted
    for something else of it.
    """
    options, (high, low), _, expected = remembered
    with moeoff.Llama(
        model, expert_memory="3M", **options | {"precision": replace(LOSSY, low_share=0.2)}
    ) as llm:
        buffer = llm.engine.buffer
        stats = buffer.stats()
        high_arena, low_arena = stats.cache_bytes - stats.low_cache_bytes, stats.low_cache_bytes

        def committed() -> tuple[int, int]:
            now = buffer.stats()
            return now.arena_committed - now.low_arena_committed, now.low_arena_committed

        wait_until(lambda: committed()[0] > 0.9 * high_arena and committed()[1] > 0.9 * low_arena)
        wait_until_still(lambda: buffer.stats().reads)
        stats = buffer.stats()
        assert committed()[0] <= high_arena and committed()[1] <= low_arena
        assert stats.evictions == 0 and stats.reads == stats.resident_slices
        for now, then in ((buffer.residency(), high), (buffer.residency(low=True), low)):
            assert now.any() and not (now & ~then).any() and (now != then).any()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)


def test_warm_start_from_a_file_of_another_shape(model, remembered):
    options, (high, _), path, expected = remembered
    np.savez_compressed(path, high=high, low=np.ones((3, 3), np.uint8))
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        assert not llm.engine.buffer.residency().any() and llm.engine.buffer.stats().reads == 0
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)


def test_options_that_make_no_sense(model, demo):
    with pytest.raises(OptionError, match="low precision .* needs a sidecar"):
        moeoff.Llama(model, precision=LOSSY, experts=False)
    with pytest.raises(OptionError, match="no tier Q2_K below original; there are: Q4_0"):
        moeoff.Llama(model, precision=Precision(0, 1, low_tier="Q2_K"))
    with pytest.raises(OptionError, match="on-demand.* supports neither lower precision"):
        moeoff.Llama(
            model,
            precision=LOSSY,
            strategy=Strategy("on-demand", "keeps nothing", keep=False, eager=False),
        )


@own_process
def run_two_pools(model, budget, options):
    precision = Precision(0.3, 0.7, 0.3, "Q2_K")
    with moeoff.Llama(model, memory=budget, precision=precision, **options) as llm:
        text = "The sun had set behind the hills. " * 8
        llm.create_completion(text, max_tokens=40, temperature=0)
        stats = llm.stats()
        assert stats.peak_rss_bytes <= stats.budget_bytes == budget
        assert stats.low_cache_bytes > 0 and stats.served_low > 0 and stats.evictions > 0
        llm.set_memory(budget - (10 << 20))
        now = llm.engine.buffer.stats()
        assert 0 < now.low_cache_bytes < now.cache_bytes < stats.cache_bytes


@pytest.mark.slow
def test_memory_stays_below_the_budget_with_two_pools(grown, tmp_path):
    model, options = shutil.copy(grown, tmp_path / "model.gguf"), {"n_ctx": 512, "n_threads": 2}
    convert(model, tiers="Q2_K")
    # pytest itself, and what this file imports
    budget = needed(str(model), **options) + 27 + 64 << 20
    run_two_pools(str(model), budget, options)
