"""The micro-batch: what memory allows and takes the least time, by rates that are
measured on the real model and remembered for what they depend on.
"""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeoff
from helpers.processes import own_process
from moeoff import BudgetError
from moeoff.budget.micro_batch import (
    DEFAULT_UBATCH,
    SIZES,
    PromptRates,
    choose_micro_batch,
    recall_rates,
    remember_rates,
)
from moeoff.engine.prompt_meter import PromptMeter
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp.llama import api
from moeoff.system.memory import rss

GIB = 1 << 30
# 16 GiB of experts are read in 17 s, 512 tokens computed in 0.3
FAST = PromptRates(token_seconds=0.0005, bytes_per_second=1e9)
SLOW = PromptRates(token_seconds=0.1, bytes_per_second=2e9)


def buffers(n: int) -> int:
    return n * 100_000


def test_usual_until_something_is_measured():
    assert choose_micro_batch(4096, 6 * GIB, 16 * GIB, buffers, None).n_tokens == DEFAULT_UBATCH
    assert choose_micro_batch(300, 6 * GIB, 16 * GIB, buffers, None).n_tokens == 300


def test_larger_where_the_disk_is_the_limit():
    choice = choose_micro_batch(8192, 6 * GIB, 16 * GIB, buffers, FAST)
    assert choice.n_tokens == 4096
    assert "in pieces of 512" in choice.reason


@pytest.mark.parametrize(
    "room, rates",
    [(6 * GIB, SLOW), (20 * GIB, FAST)],
    ids=["computing is the limit", "all experts stay"],
)
def test_usual_where_the_disk_is_not_the_limit(room, rates):
    assert choose_micro_batch(8192, room, 16 * GIB, buffers, rates).n_tokens == DEFAULT_UBATCH


def test_buffers_leave_the_experts_most_of_the_memory():
    for room in (GIB // 4, GIB // 16, GIB // 64):
        for rates in (None, FAST):
            n = choose_micro_batch(8192, room, 16 * GIB, buffers, rates).n_tokens
            assert n == SIZES[0] or buffers(n) <= room / 8


def test_a_larger_one_needs_room_for_a_layer():
    """The parts of a larger micro-batch use a layer's experts one after the other."""
    rooms = {
        n: choose_micro_batch(8192, 6 * GIB, 16 * GIB, buffers, FAST, layer_bytes=n * GIB).n_tokens
        for n in (5, 6)
    }
    assert rooms == {5: 4096, 6: DEFAULT_UBATCH}


def test_a_larger_one_may_take_more_where_its_buffers_are_lent():
    rooms = {
        share: choose_micro_batch(8192, GIB, 16 * GIB, buffers, FAST, largest_share=share).n_tokens
        for share in (1 / 8, 1 / 3)
    }
    assert rooms == {1 / 8: 1024, 1 / 3: 2048}


@given(
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 36),
    st.integers(1, 1 << 40),
    st.floats(1e-6, 10),
    st.floats(1e3, 1e11),
)
def test_never_slower_than_the_usual_one(n_ctx, room, expert_bytes, token_seconds, rate):
    rates = PromptRates(token_seconds, rate)
    usual, chosen = (
        choose_micro_batch(n_ctx, room, expert_bytes, buffers, r).n_tokens for r in (None, rates)
    )
    assert usual <= chosen <= max(n_ctx, SIZES[0])
    n_prompt = min(n_ctx, 4096)

    def seconds(n):
        return max(
            n_prompt * token_seconds,
            -(-n_prompt // n) * max(expert_bytes - max(room - buffers(n), 0), 0) / rate,
        )

    assert seconds(chosen) <= seconds(usual) * (1 + 1e-9)


RATES = PromptRates(0.01, 1e9)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


THREADS = {"n_threads": 2}


def test_rates_change_when_they_differ_plainly(demo, cache):
    model_index = ModelIndex.read(demo)
    for rates, expected in (
        (RATES, RATES),
        (PromptRates(0.012, 0.8e9), RATES),
        (slower := PromptRates(0.02, 1e9), slower),
    ):
        remember_rates(model_index, THREADS, None, rates)
        assert recall_rates(model_index, THREADS, None) == expected, (
            "a little noise must not change the choice"
        )
    (file,) = (cache / "moeoff" / "rates").iterdir()
    for damaged in (
        '{"token_seconds": 1.0}',
        '{"token_seconds": 1e999, "bytes_per_second": 1.0}',
        '{"token_seconds": NaN, "bytes_per_second": 1.0}',
    ):
        file.write_text(damaged)
        assert recall_rates(model_index, THREADS, None) is None


@pytest.mark.parametrize(
    "keywords, tier, same",
    [
        (THREADS, None, True),
        (THREADS, "Original", True),
        ({"n_threads": 4}, None, False),
        (THREADS | {"n_gpu_layers": 1}, None, False),
        (THREADS, "auto", False),
    ],
)
def test_rates_of_other_options_are_others(demo, cache, keywords, tier, same):
    remember_rates(ModelIndex.read(demo), THREADS, None, RATES)
    assert recall_rates(ModelIndex.read(demo), keywords, tier) == (RATES if same else None)


def test_rates_of_another_model_are_others(demo, cache):
    remember_rates(ModelIndex.read(demo), THREADS, None, RATES)
    model = shutil.copy(demo, cache / "model.gguf")
    assert recall_rates(ModelIndex.read(model), THREADS, None) is None
    remember_rates(ModelIndex.read(model), THREADS, None, RATES)
    os.utime(model, ns=(1, 1))
    assert recall_rates(ModelIndex.read(model), THREADS, None) is None


@own_process
def test_measured_while_it_runs(grown, cache):
    tokens = np.random.default_rng(0).integers(10, 4000, 300).tolist()
    with moeoff.Llama(
        grown, n_ctx=512, n_threads=2, memory=rss() + (150 << 20), strategy="lru"
    ) as llm:
        assert llm.stats().micro_batch == api.llama_n_ubatch(llm.ctx)
        llm.eval(tokens[:200])
        model_index, bytes_read = llm.engine.model_index, llm.stats().bytes_read
    assert recall_rates(model_index, THREADS, None) is None, "too short to tell"
    with moeoff.Llama(
        grown, n_ctx=512, n_threads=2, memory=rss() + (150 << 20), strategy="lru"
    ) as llm:
        llm.eval(tokens)
        assert llm.stats().bytes_read >= bytes_read > 64 << 20
    rates = recall_rates(model_index, THREADS, None)
    assert rates.token_seconds > 0 and rates.bytes_per_second > 0


def test_what_lies_deep_in_a_context_is_not_metered():
    """The choice is made for a prompt of 4,096 tokens. What attention takes behind more
    of them would make pieces smaller that read experts once each.
    """
    counters = [
        SimpleNamespace(stall_ns=0, bytes_read=n << 30, disk_busy_ns=n * 10**9) for n in range(3)
    ]
    buffer = SimpleNamespace(stats=lambda: counters[0])
    meter = PromptMeter(buffer)
    for depth, seconds in ((0, 1.0), (4096, 60.0)):
        meter.begin(depth)
        counters.pop(0)
        meter.end(512, seconds)
    assert meter.rates == PromptRates(1 / 512, 2.0**30)


@pytest.mark.parametrize(
    "busy, n", [(0.1, 150), (3.0, 300)], ids=["computed in 1.5 s", "while the disk reads"]
)
def test_a_prompt_beside_answers(busy, n):
    counters = [
        SimpleNamespace(stall_ns=i * 10**9, bytes_read=0, disk_busy_ns=int(i * busy * 1e9))
        for i in range(2)
    ]
    meter = PromptMeter(SimpleNamespace(stats=lambda: counters[0]))
    assert meter.n_beside() == SIZES[-1], "nothing is known yet"
    meter.begin(0)
    counters.pop(0)
    meter.end(400, 5.0)  # of which a second waited for the disk
    assert meter.n_beside() == n


@own_process
def test_the_smallest_budget_is_that_of_the_smallest_micro_batch(grown, cache):
    """And where flash attention is the way out, a refusal names it."""

    def refused(memory, **options):
        with pytest.raises(BudgetError) as error:
            moeoff.Llama(grown, memory=memory, n_ctx=16384, n_threads=2, **options)
        return error.value.hint

    floor, flash = (refused("1M", flash_attn=on)["memory"] for on in (False, True))
    assert (
        floor + (64 << 20) < refused("1M", flash_attn=False, n_ubatch=512)["memory"]
        and flash + (16 << 20) < floor
    )
    assert refused((flash + floor) // 2, flash_attn=False)[
        "flash_attn"
    ] is True and "flash_attn" not in refused("1M")
    with moeoff.Llama(
        grown, memory=floor + (8 << 20), n_ctx=16384, n_threads=2, flash_attn=False
    ) as llm:
        assert llm.engine.micro_batch.n_tokens == SIZES[0] == api.llama_n_ubatch(llm.ctx)


@own_process
def test_a_small_budget_takes_a_smaller_micro_batch(grown, cache):
    with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory="2G") as llm:
        usual, plan = llm.engine.micro_batch.n_tokens, llm.engine.plan
    assert usual == 512
    budget = plan.fixed - plan.computing + 4 * plan.computing
    with moeoff.Llama(grown, n_ctx=512, n_threads=2, memory=budget) as llm:
        assert llm.stats().micro_batch == api.llama_n_ubatch(llm.ctx) < usual
        assert llm.engine.plan.computing < plan.computing
        assert "leave experts most of the memory" in llm.stats().micro_batch_reason
    for options in (
        {"deterministic": True},
        {"trace": cache / "trace"},
        {"replay": cache / "trace"},
    ):
        with moeoff.Llama(
            grown, n_ctx=512, n_threads=2, memory=budget + 2 * plan.computing, **options
        ) as llm:
            assert llm.stats().micro_batch == usual, (
                "a recorded run must be the same at another budget"
            )
            llm.eval(range(300, 600))
