"""Strategies that predict, on the real library: lossless, they read ahead, and they
know when not to.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import moeoff
from device_simulator import Bandwidths, DeviceBuffer
from helpers.logits import assert_bit_equal, greedy_logits, stock_logits
from helpers.processes import own_process
from helpers.waiting import wait_until_still
from moeoff.engine.buffer import READ_DTYPE
from moeoff.engine.comparison import BLOCK_TOKENS, ORDER, ABTest
from moeoff.engine.driver import Driver, PolicyUpdates
from moeoff.engine.prefetcher import PredictionMeter, Prefetcher, PrefetchPrecision, WeightEstimate
from moeoff.engine.stats import Stats
from moeoff.experts.profile import Profile
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp import native
from moeoff.policies import PREDICTORS, PRESETS, CacheShape, Prediction, Predictor
from moeoff.policies.score import Score
from moeoff.precision import Precision
from moeoff.routing.batch import batch_spans, is_decode, spans_of
from moeoff.routing.event import GateEvent, Observer
from moeoff.routing.router import SIGMOID, SOFTMAX, SQRT_SOFTPLUS, Router
from moeoff.routing.trace import TensorInfo, TraceHeader

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 4
OPTIONS = {"n_ctx": 256, "n_threads": 2, "logits_all": True}
PREDICTING = [
    name for name, s in PRESETS.items() if s.predictor and s.precision.lossless and s.tier is None
] + [f"lru+{name}" for name in PREDICTORS]


def share(model: str, part: float) -> int:
    return int(ModelIndex.read(model).expert_bytes * part)


@pytest.fixture(scope="module")
def reference(demo):
    return stock_logits(demo, PROMPT, 24, 256)


@pytest.mark.parametrize("strategy", PREDICTING)
def test_lossless_and_ahead(calibrated, reference, strategy):
    model, _, _ = calibrated
    with moeoff.Llama(model, expert_memory=share(model, 0.5), strategy=strategy, **OPTIONS) as llm:
        assert_bit_equal(greedy_logits(llm, PROMPT, 24), reference)
        stats = llm.stats()
    assert stats.prefetch_issued > 0, "nothing was read ahead"
    assert 0 < stats.prefetch_useful <= stats.prefetch_issued
    assert stats.prefetch_on is not None


@pytest.mark.parametrize("strategy, n_ahead", [("auto", 1), ("score+stacked", 3)])
def test_the_driver_thread_predicts_as_python_would(demo, monkeypatch, strategy, n_ahead):
    """From the same rows, at once; what Python is told together comes in order."""
    monkeypatch.setattr(Prefetcher, "_predicts", True)
    with moeoff.Llama(demo, expert_memory=share(demo, 0.5), strategy=strategy, **OPTIONS) as llm:
        prefetcher, events = llm.engine.driver.prefetcher, []
        llm.eval([10])
        llm.set_gate_callback(events.append)
        monkeypatch.setattr(prefetcher, "_act", None)  # what would predict in Python
        for token in range(3):
            events.clear()
            llm.eval([100 + token])
            llm.engine.buffer.drain()
            assert [event.gate for event in events] == list(range(12))
            predictions = {
                gate: experts.tolist() for gate, experts, _ in prefetcher._native.predictions()
            }
            expected = {}
            for event in events:
                for p in prefetcher.predictor.observe(event)[:n_ahead]:
                    expected[p.gate] = [
                        *expected.get(p.gate, []),
                        np.argsort(-p.scores[0])[: prefetcher._n_candidates].tolist(),
                    ]
            assert len(predictions) == len(expected) == 11
            # of several layers ahead the last that was predicted
            assert all(predictions[gate] in expected[gate] for gate in predictions)
            assert all(
                predictions[gate] == expected[gate][-1] for gate in predictions if n_ahead == 1
            )
        assert llm.stats().prefetch_issued > 0


@pytest.mark.parametrize("gating", [SOFTMAX, SIGMOID, SQRT_SOFTPLUS])
def test_the_driver_thread_scores_as_python_would(demo, gating, monkeypatch):
    """Prompts, single tokens and several at once, by the same objects as a simulation;
    decoded tokens without Python.
    """
    events, in_python = [], []
    with moeoff.Llama(demo, expert_memory=share(demo, 0.5), **OPTIONS) as llm:
        policy, router = llm.engine.driver.policy, llm.engine.driver.prefetcher.predictor.router
        policy.native().gating = router.gating = gating
        update = policy.update
        monkeypatch.setattr(
            policy, "update", lambda event: in_python.append(event) or update(event)
        )
        llm.set_gate_callback(events.append)
        for tokens in (PROMPT, *([100 + i] for i in range(80)), PROMPT[:3], [7]):
            llm.eval(tokens)
        with llm.batches_as(decode=True):
            for i in range(0, len(PROMPT) - 4, 4):
                llm.eval(PROMPT[i : i + 4])
        llm.engine.buffer.drain()
        assert in_python and not any(event.decode for event in in_python)
        python = Score(policy.shape)
        for event in events:
            event.probs = router.gated(event.logits)
            python.update(event)
        np.testing.assert_allclose(policy.priorities, python.priorities, rtol=1e-3, atol=1e-5)


def whole_gates_ahead(demo, part) -> tuple[Stats, int]:
    """The statistics of a batch that needs most experts, and the number of slices."""
    options = OPTIONS | {"expert_memory": share(demo, part), "strategy": "lru+activation-path"}
    with moeoff.Llama(demo, **options) as llm:
        llm.eval(list(range(10, 2058, 16)))
        return llm.stats(), sum(t.ne[2] for t in llm.engine.buffer.tensors)


@pytest.mark.parametrize("part, least", [(0.1, 0.02), (0.5, 0.5)])
def test_large_batches_are_read_whole_gates_ahead(demo, part, least):
    """Every gate's experts are queued before its router has selected, the first gate's
    too, as far as the arena has room beside the gate before; none is read twice.
    """
    stats, n_slices = whole_gates_ahead(demo, part)
    assert stats.demand_hits + stats.demand_misses > 0.75 * n_slices
    assert least * n_slices < stats.prefetch_issued < 1.2 * n_slices


@pytest.mark.perf
def test_whole_gates_are_read_in_time(demo):
    """On an idle machine all experts are there first; half of them are asked for."""
    stats, _ = whole_gates_ahead(demo, 0.5)
    assert stats.prefetch_useful > 0.5 * (stats.demand_hits + stats.demand_misses)


@pytest.mark.parametrize("strategy", ["lru", "lru+gate"])
def test_a_prompts_demand_is_read_by_popularity(demo, strategy):
    """Fate §4.3, behind the gate: of each matrix the experts of the most tokens are
    read first, also those that a prefetch had queued in another order.
    """
    n_prompts = first_seen = n_late = n_ordered = 0
    with moeoff.Llama(
        demo,
        expert_memory=share(demo, 1),
        strategy=strategy,
        io_threads=1,
        gate_input=True,
        **OPTIONS,
    ) as llm:
        buffer, events = llm.engine.buffer, []
        llm.set_gate_callback(events.append)
        buffer.log_reads()
        # on a busy machine prefetches come in time
        while n_late <= (300 if strategy == "lru" else 30):
            assert n_prompts < 20, "hardly anything had to be read behind a gate"
            buffer.clear()
            events.clear()
            buffer.prefetch(6, range(32))  # by index
            llm.reset()
            llm.eval(np.random.default_rng(n_prompts).integers(10, 2000, 96).tolist())
            buffer.drain()
            reads, tensors = buffer.take_reads(), buffer.tensors
            n_prompts += 1
            for event in events:
                count = np.bincount(event.ids.ravel(), minlength=32)
                for i in (i for i, t in enumerate(tensors) if t.gate == event.gate):
                    late = reads[(reads["tensor"] == i) & (reads["t_start"] > event.t_ns)]
                    # a prefetch that was under way may begin its next chunk
                    late = late[np.isin(late["expert"], event.ids)]
                    late = late[np.argsort(late["t_start"])]
                    counts = count[late["expert"]]
                    n_ordered += bool((np.diff(counts) <= 0).all())
                    n_late += len(late)
                    appeared = np.array(
                        [event.ids.ravel().tolist().index(e) for e in late["expert"]]
                    )
                    first_seen += bool(len(late) > 2 and (np.diff(appeared) > 0).all())
    # an event's time is taken just before its experts are queued: on a busy machine a
    # read in the old order may begin in between
    assert n_ordered >= 0.8 * len(tensors) * n_prompts
    assert first_seen < 12 * n_prompts, "the same order as the tokens'"


def test_what_is_expected_stays(demo):
    """A full arena: residents that are expected outlive others of the same rank, until
    their router has selected.
    """
    with moeoff.Llama(demo, expert_memory=share(demo, 0.25), strategy="lru", **OPTIONS) as llm:
        buffer = llm.engine.buffer
        llm.eval(PROMPT)
        # the oldest of the last layer would go first
        resident = np.flatnonzero(buffer.residency()[11])
        buffer.prefetch(11, resident.tolist(), limit=0)
        before = buffer.stats().prefetch_issued
        buffer.preload(0, range(32))
        buffer.preload(1, range(32))
        wait_until_still(lambda: buffer.stats().reads)
        experts = np.flatnonzero(buffer.residency()[11])
        assert before == buffer.stats().prefetch_issued == 0, "limit=0 reads nothing"
        assert set(resident) <= set(experts)


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0)], ids=["pays", "costs"])
def test_ab_tested_strategies_report_what_they_found(demo, monkeypatch, times):
    """Tokens that take twice or half as long with prefetching as without, whatever they
    take here: that is said, and acted on.
    """
    judged, without, with_ = ABTest.token, *times
    monkeypatch.setattr(
        ABTest, "token", lambda self, ns: judged(self, int(1e6 * (with_ if self.on else without)))
    )
    with moeoff.Llama(
        demo, expert_memory=share(demo, 0.3), strategy="auto", n_ctx=512, n_threads=2
    ) as llm:
        llm.eval(PROMPT[:4])
        for token in range(BLOCK_TOKENS * len(ORDER) + 40):
            llm.eval([100 + token])
        llm.engine.buffer.drain()
        before = llm.stats()
        for token in range(8):
            llm.eval([300 + token])
        llm.engine.buffer.drain()
        stats = llm.stats()
    assert stats.prefetch_gain == pytest.approx(without / with_ - 1)
    assert stats.prefetch_on == (without > with_)
    # on only where it wins: it reads more
    assert (stats.prefetch_issued > before.prefetch_issued) == stats.prefetch_on


def test_no_driver_when_everything_is_resident(demo):
    with moeoff.Llama(demo, expert_memory=share(demo, 2), strategy="auto", **OPTIONS) as llm:
        llm.eval(PROMPT)
        stats = llm.stats()
        assert stats.prefetch_on is None and stats.driver_seconds == 0


@own_process
def test_a_smaller_budget_calls_the_driver(demo):
    with moeoff.Llama(demo, memory="4G", strategy="auto", n_ctx=256, n_threads=2) as llm:
        assert llm.stats().prefetch_on is None
        llm.set_memory(llm.engine.plan.fixed + (6 << 20))
        llm.eval(PROMPT)
        llm.engine.buffer.drain()
        assert llm.stats().prefetch_on is not None and llm.stats().prefetch_issued > 0


@pytest.mark.parametrize("strategy", ["arc", "score"])
@own_process
def test_the_policy_follows_the_budget(demo, strategy):
    batches = {"n_batch": 16, "n_ubatch": 16}
    sizes = []
    with moeoff.Llama(
        demo, memory="4G", strategy=strategy, n_ctx=256, n_threads=2, **batches
    ) as llm:
        buffer = llm.engine.buffer
        for _ in range(2):  # the second budget counts what the policy took with the first events
            llm.set_memory(llm.engine.plan.fixed + (12 << 20))
            llm.eval([10, 300, 500, 700])
        fixed = llm.engine.plan.fixed
        for kib in (1536, 14 << 10, 14 << 10):
            llm.set_memory(fixed + (kib << 10))
            before = None
            # what is lent changes behind a batch, and the next one tells the policy
            while before != (before := buffer.stats().cache_bytes):
                llm.eval([10])
            model = TraceHeader.of(buffer, "", llm.engine.model_index.n_expert_used)
            now = CacheShape.of(model, buffer.stats().cache_bytes)
            sizes.append((llm.engine.driver.policy.shape.capacity, now.capacity))
    # all 384 experts, and fewer where they have what rows, samplers and templates leave
    low, *high = sizes
    assert min(high)[0] > 1.1 * low[0]
    for told, holds in sizes:
        # a change of less than 1 % is not told
        assert told == pytest.approx(holds, rel=0.02, abs=1)


@pytest.mark.parametrize("strategy", ["hobbit+none", "lfu"])
def test_a_new_conversation_forgets_the_old_ones_counts(demo, strategy):
    """HOBBIT §3.4, through what applications call: a prompt that shares its beginning
    with the last one is a new sequence, a turn more of it is not.
    """
    with moeoff.Llama(
        demo, expert_memory=share(demo, 0.5), strategy=strategy, n_ctx=256, n_threads=2
    ) as llm:
        n_gates, n_used = (
            llm.engine.buffer.priorities.shape[0],
            llm.engine.model_index.n_expert_used,
        )
        policy = llm.engine.driver.policy

        def counted():
            llm.engine.buffer.drain()
            return (
                policy._tokens - 1
                if strategy == "hobbit+none"
                else llm.engine.buffer.priorities.sum() / n_gates / n_used
            )

        answer = llm.create_completion(PROMPT[:12], max_tokens=4, temperature=0)["usage"]
        # the last layer leaves out tokens whose logits are not asked for
        assert counted() == pytest.approx(12 + answer["completion_tokens"] - 1, abs=1)
        # of which eight tokens are in the context
        llm.create_completion([*PROMPT[:8], 20, 21, 22], max_tokens=1)
        assert counted() == pytest.approx(3, abs=1)
        llm.create_completion([*llm.input_ids[: llm.n_tokens].tolist(), 30, 31], max_tokens=1)
        assert counted() == pytest.approx(5, abs=1)


def test_a_text_begins_where_no_other_goes_on():
    """New, or back behind what it had computed; a draft of which a part is rejected
    goes on.
    """
    policy = Parts()
    driver = Driver(Recorder())
    driver.add(PolicyUpdates(policy, Recorder()))

    def begins(*tokens, decode=None):
        before = policy.begun
        sequences, positions = [sequence for sequence, _ in tokens], [pos for _, pos in tokens]
        driver.begin(
            np.zeros(len(tokens), np.int32),
            spans_of(sequences, positions, None if decode is None else [not decode] * len(tokens)),
            bool(decode),
        )
        return policy.begun > before

    assert begins((0, 0), (0, 1), (0, 2)) and not begins((0, 3))
    assert not begins((0, 4), (1, 0), (1, 1)) and not begins((0, 5), (1, 2))
    assert begins((2, 0), (0, 2), (0, 3)) and not begins((1, 3), (0, 4))
    assert begins((1, 1), (1, 2)) and not begins((1, 3))
    assert not begins((1, 4), (1, 5), (1, 6), decode=True) and not begins(
        (1, 5), (0, 5), decode=True
    )
    assert begins((1, 5), (1, 6))  # another prompt that shares its beginning


def test_a_trace_is_closed_whatever_fails_before():
    class Failure(Observer):
        def close(self):
            raise OSError("no space left")

    driver, calls = Driver(Recorder()), []
    driver.buffer.running = True
    driver._trace = SimpleNamespace(note=calls.append, close=lambda: calls.append("closed"))
    driver.add(Failure())
    with pytest.raises(OSError):
        driver.close({"reads": 3})
    assert calls == [{"reads": 3}, "closed"]


def test_several_sequences_are_decoded_and_a_text_is_read():
    def decodes(*sequences):
        batch = SimpleNamespace(
            n_tokens=len(sequences),
            pos=list(range(len(sequences))),
            seq_id=[[sequence] for sequence in sequences],
        )
        return is_decode(batch_spans(batch))

    assert decodes(0) and decodes(0, 1, 2) and not decodes(0, 0) and not decodes(0, 1, 1)
    # a server knows
    assert is_decode(spans_of([0, 1, 1], [5, 7, 8], [0, 0, 0])) and not is_decode(
        spans_of([0, 1], [5, 0], [0, 1])
    )


class Parts:
    """Counts the texts that begin, as a policy is told."""

    static, wants_probs, begun = False, False, 0

    def reset_sequence(self):
        self.begun += 1


def test_edgemoe_begins_with_the_most_frequent_experts(calibrated):
    """EdgeMoE §3.3.3: the buffer is full of them before the first token, and the policy
    evicts the least frequent of them first.
    """
    model, _, _ = calibrated
    counts = Profile.find(ModelIndex.read(model)).section("popularity")["counts"]
    with moeoff.Llama(model, expert_memory=share(model, 0.5), strategy="edgemoe", **OPTIONS) as llm:
        resident, stats = llm.engine.buffer.residency(), llm.stats()
        slots = llm.engine.buffer.slots()
        held = sum(
            int(slots[i][resident[t.gate, : len(slots[i])] & (1 << t.matrix) > 0].sum())
            for i, t in enumerate(llm.engine.buffer.tensors)
        )
        assert stats.evictions == 0 and 0.97 * stats.cache_bytes < held <= stats.cache_bytes
        assert counts[resident > 0].min() >= counts[resident == 0].max()
        priorities = llm.engine.buffer.priorities
        assert priorities[0, counts[0].argmax()] == priorities[0].max() and priorities.max() < 1
    with moeoff.Llama(
        model, expert_memory=share(model, 0.5), strategy="edgemoe", profile=False, **OPTIONS
    ) as llm:
        assert not llm.engine.buffer.residency().any()


class TwoAhead(Predictor):
    """Always the same experts, of the next two gates."""

    def observe(self, event):
        scores = np.tile(np.linspace(1, 0, 8, dtype=np.float32), (len(event.ids), 1))
        return [
            Prediction(event.gate + ahead, scores) for ahead in (1, 2) if event.gate + ahead < 3
        ]


def two_ahead(n_tokens, resident, bounded=False):
    """Return what is requested of gates 1 and 2 when gate 0 has selected: two
    candidates each, experts 0 and 1. If bounded, the disk has had no time to spare.
    """
    model = TraceHeader(
        "three", 2, tuple(TensorInfo(g, g, m, 8, 5000) for g in range(3) for m in (1, 2))
    )
    buffer = DeviceBuffer(model, Bandwidths(link=500, layer_us=1), model.full_bytes)
    prefetcher = Prefetcher(
        buffer,
        TwoAhead(Router([None] * 3, [2] * 3, n_experts=8)),
        n_used=2,
        ab_tested=False,
        bounded=bounded,
    )
    for gate, experts in resident.items():
        buffer.prefetch(gate, experts)
        buffer.compute(
            GateEvent(gate, np.array([experts + [6]])[:, :2], np.ones((1, 2), np.float32))
        )
    buffer.set_gate_callback(prefetcher.observe)
    before = buffer.counts["prefetched"]
    buffer.compute(
        GateEvent(0, np.tile([[6, 7]], (n_tokens, 1)), np.ones((n_tokens, 2), np.float32))
    )
    return buffer.counts["prefetched"] - before, buffer._keeps.reshape(3, 8).any(axis=1).tolist()


@pytest.mark.parametrize("n_tokens", [1, 3], ids=["decode", "batch"])
def test_looks_further_only_if_all_that_is_predicted_is_there(n_tokens):
    """HOBBIT §3.3, on a buffer that knows what it has: also where nothing may be read."""
    assert two_ahead(n_tokens, {1: [0, 1]}) == (4, [False, True, True])
    assert two_ahead(n_tokens, {1: [0]}) == (2, [False, True, False])
    assert two_ahead(n_tokens, {}) == (4, [False, True, False])
    if n_tokens == 1:  # a batch's reads are not rationed
        assert two_ahead(1, {1: [0], 2: [0]}, bounded=True) == (0, [False, True, False])
        assert two_ahead(1, {1: [0, 1], 2: [0]}, bounded=True) == (0, [False, True, True])


class Recorder:
    """As much of a buffer as the prefetcher asks of one; remembers what was prefetched."""

    def __init__(self):
        self.priorities = np.zeros((2, 8), np.float32)
        self.tensors = [
            SimpleNamespace(gate=g, matrix=m, ne=(1, 1, 8)) for g in (0, 1) for m in (1, 3)
        ]
        self.prefetched = []
        self.counters = native.Stats()
        self.arena_full = 1 << 20

    def drain(self): ...

    def publish(self): ...

    def set_gate_callback(self, callback): ...

    def prefetch(self, gate, experts, n_read=None, low=False, limit=-1):
        n_read = len(experts) if n_read is None else n_read
        queued = n_read if limit < 0 else min(n_read, limit)
        self.prefetched.append((gate, list(experts), low, queued))
        return queued

    def stats(self):
        return self.counters

    def residency(self):
        return np.zeros((2, 8), np.uint8)


class Expected:
    """Predicts the same scores for one gate, before decoded tokens or within a prompt."""

    wants_tokens = True

    def __init__(self, scores, gate=1):
        self.prediction = Prediction(gate, np.asarray(scores, np.float32))

    def begin(self, tokens):
        return [self.prediction]

    def observe(self, event):
        return [] if event.decode else [self.prediction]


def prefetched(scores, events=(), decode=True, **options):
    """Return what these scores prefetch after these events, if reads are not rationed."""
    buffer = Recorder()
    prefetcher = Prefetcher(buffer, Expected(scores), bounded=False, ab_tested=False, **options)
    for event in events:
        prefetcher.observe(event)
    if decode:
        prefetcher.begin(np.zeros(len(scores), np.int32), True)
    else:
        prefetcher.observe(event_of(0, len(scores)))
    return buffer.prefetched


@pytest.mark.parametrize("on_devices", [False, True])
def test_preloads_until_the_router_has_selected(on_devices):
    """EdgeMoE §3.3.2: every expert in its turn, as many at once as a token uses, as far
    as the disk can read before the next router selects; but as many as a token uses in
    any case. All stay protected, and what is not read is still written to a device.
    """
    scores = np.array([[0.0, 0.4, 0.1, 0.3, 0.2, 0.15, 0.05, 0.02]], np.float32)
    ranked = [1, 3, 4, 5, 2, 6, 7, 0]
    for gap, reads in ((0, [2, 2]), (5, [2, 2, 1]), (100, [2, 2, 2, 2])):
        buffer = Recorder()
        prefetcher = Prefetcher(
            buffer,
            Expected(scores),
            n_used=2,
            share=1.0,
            bounded=False,
            ab_tested=False,
            fills_devices=on_devices,
        )
        for t in (1000, 1000 + 2 * gap * 1000):  # a token of two gates, a slice in 1000 ns
            prefetcher.observe(decoded(0, 1, t))
            buffer.counters.disk_busy_ns += gap * 1000
            buffer.counters.reads += gap
        prefetcher.begin(np.array([7]), True)
        assert [queued for *_, queued in buffer.prefetched if queued] == reads
        assert [order for _, order, *_ in buffer.prefetched] == [
            ranked[2 * i :] + ranked[: 2 * i] for i in range(len(buffer.prefetched))
        ]
        rests = [order for _, order, _, queued in buffer.prefetched if not queued]
        assert len(rests) == (on_devices and gap < 100)


def test_predictions_whose_upload_is_late_count_as_late():
    """ProMoE §4.1: what has to be uploaded once its router has selected was not fetched
    in time; what the CPU computes with was.
    """
    tensors = [SimpleNamespace(gate=0, matrix=m) for m in range(3)]
    ids, weights = np.array([[3, 5]], np.int32), np.full((1, 2), 0.5, np.float32)
    for uploaded, rate in (
        (None, 1.0),
        ([[False, False]], 1.0),
        ([[True, False]], 0.5),
        ([[True, True]], 0.0),
    ):
        meter = PredictionMeter(tensors, 1)
        meter.predicted(0, np.array([5, 3]))
        meter.selected(
            GateEvent(
                0, ids, weights, t_ns=10, uploaded=None if uploaded is None else np.array(uploaded)
            )
        )
        assert (meter.accuracy, meter.fetch_rate, meter.good_pred) == (1, rate, rate)
        late = np.zeros(3, READ_DTYPE)  # its three matrices were read late, too: each counts once
        late["tensor"], late["expert"], late["t_done"] = range(3), 3, 20
        meter.read(late)
        assert meter.fetch_rate == min(rate, 0.5)


def test_prefetches_by_predicted_weight():
    """Predicted scores stand in for weights: what the rule would serve low is read low,
    what it would skip is not read.
    """
    # unimportance 0, 0.4, 0.7, 0.9
    scores = [[0.0, 0.4, 0.1, 0.3, 0.2, 0.0, 0.0, 0.0]]
    rule = Precision(0.5, 0.8, 0.5, "Q4_0")
    # 4 and 2 are protected where they are resident
    assert prefetched(scores, n_used=4, precision=rule) == [
        (1, [1, 3, 4, 2], False, 2),
        (1, [4], True, 1),
    ]
    assert prefetched(scores, n_used=4) == [(1, [1, 3, 4, 2], False, 4)]
    batch = [[9, 8, 1, 0], [9, 8, 0, 1], [9, 1, 8, 0], [9, 1, 0, 8]]
    # chosen by 4, 2, 1, 1 tokens
    assert prefetched(batch, decode=False, n_used=2, precision=rule) == [
        (1, [0, 1], False, 2),
        (1, [2, 3], True, 2),
    ]


@pytest.mark.parametrize(
    "precision, expected",
    [
        (
            Precision(0.4, 0.8, low_tier="Q4_0", weigh_prompts=True),
            [(1, [0, 1], False, 2), (1, [3, 2], True, 2)],
        ),
        (
            Precision(0.4, 0.5, low_tier="Q4_0", weigh_prompts=True),
            [(1, [0, 1], False, 2)],
        ),
        (Precision(0.4, 0.8, low_tier="Q4_0"), [(1, [0, 1, 3, 2], False, 4)]),
    ],
)
def test_prefetches_of_a_prompt_by_predicted_weight(precision, expected):
    """An expert is read as the token wants it to which it matters most: 0 and 1 are
    somebody's first; before 2 and 3 lies 0.6 of their tokens' weight, or more; what
    nobody needs is not read.
    """
    batch = [[3.5, 6.5, 0, 0], [3.5, 6.5, 0, 0], [6, 0, 4, 0], [6, 0, 0, 4], [9, 0, 0, 0.5]]
    batch = np.pad(np.array(batch), ((0, 0), (0, 4)))
    assert prefetched(batch, decode=False, n_used=2, precision=precision) == expected


def test_of_what_is_left_out_below_a_weight_only_what_is_predicted_above_it_is_read():
    """Scores are made weights as the gate made them before: here all of a token's add
    up to 2.5.
    """
    scores = [[0.0, 0.4, 0.1, 0.3, 0.2, 0.0, 0.0, 0.0]]
    selected = GateEvent(
        1, np.array([[1, 3, 4, 2]]), np.array([[1.0, 0.75, 0.5, 0.25]], np.float32), decode=True
    )
    for n, n_read in ((0, 0), (20, 2)):
        # nothing is known of the gate's weights; then 1.0 and 0.75 are above, and the
        # others are protected where they are resident
        asked = prefetched(scores, [selected] * n, n_used=4, precision=Precision(tau=0.6))
        assert asked == [(1, [1, 3, 4, 2], False, n_read)]


def test_weights_are_estimated_as_the_gate_makes_them():
    """Normalized over the selected and scaled, or a part of all experts' probabilities,
    which the scores then are, too.
    """
    rng = np.random.default_rng(0)
    for normalized in (True, False):
        estimate = WeightEstimate(1, 4)
        for _ in range(400):
            weights = -np.sort(-rng.dirichlet(np.full(32, 0.3)).astype(np.float32))[None, :4]
            if normalized:
                weights *= 2.5 / weights.sum()
            estimate.selected(0, weights)
            estimates = estimate.of(0, weights * (rng.random() if normalized else 1.0))
        np.testing.assert_allclose(estimates, weights, rtol=1e-3 if normalized else 0.1)


@pytest.mark.parametrize("strategy", ["auto", "lru+activation-path"])
def test_a_prompt_is_read_ahead_whatever_decode_leaves_out(demo, strategy):
    with moeoff.Llama(
        demo,
        expert_memory=share(demo, 0.5),
        strategy=strategy,
        precision=Precision(tau=0.2),
        **OPTIONS,
    ) as llm:
        llm.eval(list(range(10, 2058, 16)))
        llm.engine.buffer.drain()
        assert llm.stats().prefetch_issued > 100
        for token in range(80):
            llm.eval([100 + token])
        llm.engine.buffer.drain()
        stats = llm.stats()
    # in decode as judged
    assert stats.skipped > 0 and (strategy != "auto" or stats.prefetch_gain is not None)


class Constant:
    """Predicts the same scores for the other gate, whatever happens."""

    wants_tokens = False

    def __init__(self, scores):
        self.scores, self.n_asked = np.asarray(scores, np.float32), 0

    def observe(self, event):
        self.n_asked += 1
        return [Prediction(1 - event.gate, self.scores[: len(event.ids)])]


def event_of(gate, n_tokens, t_ns=0, n_miss=1, ids=(0, 1)):
    return GateEvent(
        gate,
        np.tile(np.array(ids, np.int32), (n_tokens, 1)),
        np.ones((n_tokens, 2), np.float32),
        n_miss=n_miss,
        t_ns=t_ns,
    )


def test_what_decode_found_leaves_prompts_alone():
    buffer, predictor = Recorder(), Constant([[9, 8, 1, 0, 0, 0, 0, 0]] * 4)
    prefetcher = Prefetcher(buffer, predictor, n_used=2)
    prefetcher.ab_test.on = False
    prefetcher.observe(event_of(0, 1))
    assert not buffer.prefetched and predictor.n_asked == 0
    prefetcher.observe(event_of(0, 4))
    assert buffer.prefetched == [(1, [0, 1], False, 2)]


def test_predicts_nothing_while_the_disk_has_nothing_to_do():
    buffer, predictor = Recorder(), Constant([[9, 8, 1, 0, 0, 0, 0, 0]])
    prefetcher = Prefetcher(buffer, predictor, n_used=2, ab_tested=False)
    t = 0

    def tokens(n, busy_ns):
        nonlocal t
        for _ in range(n):
            buffer.counters.disk_busy_ns += busy_ns
            buffer.counters.reads += 1
            for gate in (0, 1):
                t += 10_000_000
                prefetcher.observe(event_of(gate, 1, t_ns=t))
        asked, predictor.n_asked = predictor.n_asked, 0
        return asked

    assert tokens(30, busy_ns=5_000_000) == 60
    tokens(30, busy_ns=1000)
    assert tokens(30, busy_ns=1000) == 0
    tokens(2, busy_ns=5_000_000)
    assert tokens(30, busy_ns=5_000_000) == 60


def decoded(gate, n_tokens, t_ns=0):
    event = event_of(gate, n_tokens, t_ns)
    event.decode = True
    return event


def test_each_number_of_tokens_is_compared_by_itself():
    """Four at once take longer than one, with prefetching and without."""
    prefetcher = Prefetcher(Recorder(), Constant(np.ones((4, 8))), n_used=2)
    t = 0

    def step(n_tokens, ns):
        nonlocal t
        for gate in (0, 1):
            t += ns // 2
            prefetcher.observe(decoded(gate, n_tokens, t))

    step(1, 1000)
    one = prefetcher.ab_test
    for _ in range(BLOCK_TOKENS * len(ORDER) + 1):
        step(4, 4000)
    four = prefetcher.ab_test
    assert four is not one and four.gain is not None and one.gain is None
    step(1, 1000)
    assert prefetcher.ab_test is one
    step(4, 4000)
    assert prefetcher.ab_test is four


def run(share_of_place, n_tokens=200, n_gates=6, n_experts=16, resident=0.5, bad_gate=None, seed=0):
    """Predictions right with these shares, the candidates absent or not by chance.
    Returns how many places pay for each gate.
    """
    rng, prefetch_precision = (
        np.random.default_rng(seed),
        PrefetchPrecision(n_gates, n_experts, len(share_of_place)),
    )
    for _ in range(n_tokens):
        table = rng.random((n_gates, n_experts)) < resident
        waiting = {}
        for gate in range(n_gates):
            prefetch_precision.selected(gate, waiting.get(gate, np.array([0])))
            if gate == 0:
                prefetch_precision.next_token(table)
            target = (gate + 1) % n_gates
            best = rng.permutation(n_experts)[: len(share_of_place)]
            prefetch_precision.predicted(target, best)
            right = rng.random(len(best)) < (
                0.1 if target == bad_gate else np.array(share_of_place)
            )
            if target:
                waiting[target] = best[right]
    return prefetch_precision.max_rank[1:]


@pytest.mark.parametrize(
    "shares, n", [((0.9, 0.8, 0.7, 0.6), 4), ((0.9, 0.8, 0.3, 0.2), 2), ((0.2, 0.2, 0.1, 0.1), 0)]
)
def test_reads_the_places_that_are_more_useful_than_not(shares, n):
    assert run(shares) == [n] * 5


def test_begins_with_all_places():
    assert PrefetchPrecision(3, 8, 4).max_rank[2] == 4


def test_a_gate_that_is_hard_to_foresee_reads_less():
    places = run((0.9, 0.85, 0.8, 0.75), bad_gate=3)
    assert places[2] == 0 and places[0] == places[1] == places[3] == places[4] == 4


def test_what_is_resident_says_nothing():
    """A good cache's residents are predicted well, so only predictions that would be
    read count.
    """
    prefetch_precision, resident = PrefetchPrecision(2, 8, 2), np.ones((2, 8), bool)
    resident[1, 4:] = False
    for _ in range(50):
        prefetch_precision.selected(0, np.array([0]))
        prefetch_precision.next_token(resident)
        prefetch_precision.predicted(1, np.array([0, 5]))
        # the resident one is right, the absent one never
        prefetch_precision.selected(1, np.array([0]))
    assert prefetch_precision.max_rank[1] < 2


def test_several_sequences_have_one_place_for_each_expert():
    """Experts that several want count once; a place is as good as what any of the
    sequences selects of it.
    """
    prefetch_precision, resident = PrefetchPrecision(2, 8, 2), np.zeros((2, 8), bool)
    for _ in range(50):
        prefetch_precision.selected(0, np.array([0]))
        prefetch_precision.next_token(resident)
        # of three sequences
        prefetch_precision.predicted(1, np.array([0, 1, 2, 5, 6]), np.array([0, 0, 0, 1, 1]))
        prefetch_precision.selected(1, np.array([[0, 3], [1, 3], [2, 4]]).ravel())
    assert prefetch_precision.max_rank[1] == 1
