"""The binding on the real library: lossless, bounded, and usable again after whatever
went wrong.
"""

import contextlib
import ctypes
import os
import shutil
import threading

import llama_cpp
import numpy as np
import pytest

import moeoff
from helpers.logits import assert_bit_equal, decode_in, greedy_logits, stock_logits
from helpers.models import split_model
from helpers.waiting import wait_until
from moeoff import ModelError, OptionError, ReadError
from moeoff.engine.buffer import ExpertBuffer
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp import native
from moeoff.measure.worker import load_everything
from moeoff.policies import Policy, Strategy

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 4
OPTIONS = {"n_ctx": 128, "n_threads": 2, "logits_all": True}


@pytest.fixture(scope="module")
def reference(demo):
    return stock_logits(demo, PROMPT, 16, 128)


ON_DEMAND = Strategy("on-demand", "keeps nothing", keep=False, eager=False)


@pytest.mark.parametrize(
    "strategy, direct_io, share",
    [
        ("lru", True, 0.01),
        ("lru", True, 2.0),
        ("lru", False, 0.3),
        (ON_DEMAND, True, 0.3),
        (ON_DEMAND, False, 2.0),
    ],
)
def test_lossless(demo, reference, strategy, direct_io, share):
    arena = int(ModelIndex.read(demo).expert_bytes * share)
    with moeoff.Llama(
        demo, expert_memory=arena, strategy=strategy, direct_io=direct_io, **OPTIONS
    ) as llm:
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)
        stats = llm.stats()
        assert stats.demand_misses > 0
        assert stats.cache_bytes <= max(arena, llm.engine.buffer.arena_full)
        assert llm.engine.buffer.stats().arena_peak <= stats.cache_bytes
        assert stats.evictions > 0 or strategy != "lru" or share > 1
        assert not (stats.direct_io and not direct_io)
        if strategy != "lru":
            assert stats.hit_rate == 0


def test_split_model(demo, reference, tmp_path):
    parts = split_model(demo, tmp_path, 3)
    with moeoff.Llama(str(parts[0]), expert_memory="3M", **OPTIONS) as llm:
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)
    with pytest.raises(ModelError, match="give the first part"):
        moeoff.Llama(str(parts[1]), expert_memory="3M")


def test_two_models_and_two_contexts_at_once(demo, grown, reference):
    """Neither models nor threads share anything that could mix them up."""
    results = {}

    def work(name, path, memory):
        with moeoff.Llama(path, expert_memory=memory, **OPTIONS) as llm:
            results[name] = greedy_logits(llm, PROMPT, 16)

    threads = [
        threading.Thread(target=work, args=("a", demo, "1M")),
        threading.Thread(target=work, args=("b", demo, "3M")),
        threading.Thread(target=work, args=("grown", grown, "12M")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_bit_equal(results["a"], reference)
    assert_bit_equal(results["b"], reference)
    assert np.isfinite(results["grown"]).all()


def test_several_contexts_of_one_model(demo, reference):
    """Contexts of one model compute at the same time from one arena that is too small
    for both.
    """
    with moeoff.Llama(demo, expert_memory="600K", **OPTIONS) as llm:
        results = [None, None]

        def work(i):
            context = llama_cpp.llama_init_from_model(llm.model, llm.context_params)
            results[i] = decode_in(context, PROMPT, 0, llm.n_vocab())
            llama_cpp.llama_free(context)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rows in results:
            assert_bit_equal(rows, reference[: len(PROMPT)])


def test_resize_between_decodes(demo, reference):
    with moeoff.Llama(demo, expert_memory="9M", **OPTIONS) as llm:
        buffer = llm.engine.buffer
        for arena in (9 << 20, 400 << 10, 2 << 20, buffer.arena_floor, buffer.arena_full):
            buffer.set_cache_bytes(arena)
            assert buffer.stats().arena_committed <= arena
            assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)
        with pytest.raises(moeoff.MoeoffError, match="below the floor"):
            buffer.set_cache_bytes(buffer.arena_floor - 1)


def test_gate_events(demo):
    events = []
    with moeoff.Llama(demo, expert_memory="3M", gate_input=True, **OPTIONS) as llm:
        llm.set_gate_callback(events.append)
        llm.eval(PROMPT)
        llm.eval([5])
        llm.engine.buffer.drain()
        stats = llm.engine.buffer.stats()
    assert [e.layer for e in events] == [*range(12), *range(12)]
    assert [e.seq for e in events] == list(range(1, 25))
    assert {e.ids.shape for e in events[:12]} == {(len(PROMPT), 4)}
    assert {e.gate_input.shape for e in events[12:]} == {(1, 128)}
    for event in events:
        assert ((0 <= event.ids) & (event.ids < 32)).all()
        assert (event.weights >= 0).all() and (event.weights.sum(axis=1) <= 1 + 1e-5).all()
        assert (np.diff(event.weights, axis=1) <= 0).all()  # the gate lists the likeliest first
        assert event.n_hit + event.n_miss == 3 * len(np.unique(event.ids))
    assert sum(e.n_miss for e in events) == stats.demand_misses
    assert stats.events_dropped == 0 and stats.driver_ns > 0


def test_a_batch_larger_than_the_queue_is_not_dropped(demo):
    """One event of a large batch may be larger than all that may wait: 512 tokens of a
    model 4096 wide are 8 MiB.
    """
    events = []
    with moeoff.Llama(demo, expert_memory="3M", strategy="lru", gate_input=True, **OPTIONS) as llm:
        llm.engine.buffer.set_gate_callback(events.append, queue_bytes=4096)
        llm.eval(PROMPT)
        llm.engine.buffer.drain()
        assert llm.stats().events_dropped == 0
    assert len(events) == 12 and all(e.gate_input.nbytes > 4096 for e in events)


def test_gate_rows(demo):
    """A larger batch keeps rows of evenly spread tokens, equal to those that all tokens
    have.
    """
    events, few = [], []
    with moeoff.Llama(demo, expert_memory="3M", strategy="lru", gate_input=True, **OPTIONS) as llm:
        for into, rows in ((events, 0), (few, 5)):
            llm.reset()
            llm.engine.buffer.set_gate_rows(rows)
            llm.set_gate_callback(into.append)
            llm.eval(PROMPT)
            llm.eval([5])
            llm.engine.buffer.drain()
    for event, sample in zip(events, few, strict=True):
        assert event.row_step == 1 and len(event.gate_input) == len(event.ids) == len(sample.ids)
        assert sample.row_step == (7 if len(event.ids) == 32 else 1)
        np.testing.assert_array_equal(sample.ids, event.ids)
        np.testing.assert_array_equal(sample.gate_input, event.gate_input[:: sample.row_step])
        picked, again = event.sample(5), sample.sample(5)
        np.testing.assert_array_equal(picked.gate_input, again.gate_input)
        np.testing.assert_array_equal(picked.ids, again.ids)
        assert len(again.ids) == len(again.gate_input) and again.row_step == 1


def test_batches_are_what_they_are_said_to_be(demo):
    """Several tokens of one sequence are a prompt, unless their caller verifies a
    draft.
    """
    events = []
    with moeoff.Llama(demo, expert_memory="3M", strategy="lru", **OPTIONS) as llm:
        llm.set_gate_callback(events.append)
        llm.eval([1, 2, 3])
        llm.eval([4])
        with llm.batches_as(decode=True):
            llm.eval([5, 6])
        with llm.batches_as(decode=False):
            llm.eval([7])
        llm.eval([8, 9])
        llm.engine.buffer.drain()
        assert (llm.stats().prompt_tokens, llm.stats().gen_tokens) == (3 + 1 + 2, 1 + 2)
    assert [e.decode for e in events[::12]] == [False, True, True, False, False]


def test_what_a_policy_raises_surfaces_after_decode(demo, reference):
    class Broken(Policy):
        n_updates = 0

        def update(self, event):
            self.n_updates += 1
            if self.n_updates == 1:
                raise KeyError("from the policy")

    with moeoff.Llama(
        demo, expert_memory="3M", strategy=Strategy("broken", "", policy=Broken), **OPTIONS
    ) as llm:
        with pytest.raises(KeyError, match="from the policy"):
            llm.eval(PROMPT)
            llm.engine.buffer.drain()
            llm.eval([5])
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)


@contextlib.contextmanager
def cut_off(demo, tmp_path, monkeypatch, **options):
    """A model whose file ends within its experts while it is open, and what makes the
    file whole again.
    """
    monkeypatch.setattr(ExpertBuffer, "check_unchanged", lambda self: None)  # it would notice first
    path = tmp_path / "model.gguf"
    shutil.copy(demo, path)

    def mend() -> None:
        with open(demo, "rb") as whole, open(path, "r+b") as file:
            file.write(whole.read())

    with moeoff.Llama(str(path), **OPTIONS | {"expert_memory": "400K"} | options) as llm:
        os.truncate(path, ModelIndex.read(demo).experts["blk.3.ffn_up_exps.weight"].offset)
        yield llm, mend


def test_read_error(demo, reference, tmp_path, monkeypatch):
    """A failed read ends that decode with file and offset, and that of no other
    context; the model answers again once the file is whole.
    """
    with cut_off(demo, tmp_path, monkeypatch) as (llm, mend):
        told = []

        def other() -> None:
            handle = llm.engine.buffer.handle
            while not told:
                message = ctypes.create_string_buffer(64)
                seen = native.should_abort(handle), native.take_error(handle, message, len(message))
                if any(seen):
                    told.append(seen)

        thread = threading.Thread(target=other)
        thread.start()
        with pytest.raises(
            ReadError,
            match=r"model\.gguf: read of \d+ bytes at offset \d+ failed: the file ends at",
        ):
            greedy_logits(llm, PROMPT, 1)
        told.append(())
        thread.join()
        assert told == [()]
        mend()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)
        assert llm.engine.buffer.stats().read_errors > 0


def test_a_prefetch_that_fails_ends_no_answer(demo, reference, tmp_path, monkeypatch):
    """Nobody needs it: it is counted, and read again by whoever does."""
    with cut_off(demo, tmp_path, monkeypatch, expert_memory="9M", strategy="lru") as (llm, mend):
        buffer = llm.engine.buffer
        last = len(buffer.priorities) - 1
        queued = buffer.prefetch(last, range(8)) + buffer.preload(last, range(8, 16))
        assert queued > 0
        wait_until(lambda: buffer.stats().read_errors == queued)
        mend()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)
        assert buffer.stats().prefetch_dropped >= queued


def test_a_bench_waits_for_no_read_that_has_failed(demo, reference, tmp_path, monkeypatch):
    """It reads all experts ahead; those that could not be read are asked for again by
    the token that needs them.
    """
    with cut_off(demo, tmp_path, monkeypatch, expert_memory="1G") as (llm, mend):
        load_everything(llm.engine.buffer)
        assert llm.engine.buffer.stats().read_errors > 0
        with pytest.raises(ReadError, match="failed"):
            llm.eval(PROMPT)
        mend()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)


def test_a_callback_that_raises_beside_a_read_that_fails(demo, reference, tmp_path, monkeypatch):
    """The callback's exception is reported, and the failed read does not end the next
    answer.
    """

    def broken(event):
        raise KeyError("from the policy")

    with cut_off(demo, tmp_path, monkeypatch, strategy="lru") as (llm, mend):
        llm.set_gate_callback(broken)
        with pytest.raises((KeyError, ReadError)) as first:
            llm.eval(PROMPT)
        llm.set_gate_callback(None)
        mend()
        if first.type is ReadError:  # the callback came to it late
            with pytest.raises(KeyError):
                llm.engine.buffer.check()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)


def test_prefetch_is_used_and_dropped(demo, reference):
    with moeoff.Llama(demo, expert_memory="9M", strategy="lru", **OPTIONS) as llm:
        buffer = llm.engine.buffer
        assert sum(buffer.prefetch(gate, range(32)) for gate in range(12)) == 12 * 32 * 3
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), reference)
        stats = buffer.stats()
        assert stats.prefetch_issued == 12 * 32 * 3
        assert 0 < stats.prefetch_useful < stats.prefetch_issued
        with pytest.raises(OptionError):
            buffer.prefetch(12, [0])
        with pytest.raises(OptionError):
            buffer.prefetch(0, [32])


def test_priorities_decide_who_stays(demo):
    """Experts with a high priority survive a sweep through all the others."""
    with moeoff.Llama(demo, expert_memory="3M", strategy="lru", **OPTIONS) as llm:
        buffer = llm.engine.buffer
        buffer.priorities[:, :2] = 1.0
        buffer.publish()
        for gate in range(12):
            buffer.prefetch(gate, [0, 1])
        wait_until(lambda: buffer.stats().resident_slices == 12 * 2 * 3)
        llm.eval(PROMPT)
        llm.eval(PROMPT[::-1])
        assert (buffer.residency()[:, :2] == 0b1110).all()
        assert buffer.stats().evictions > 100
