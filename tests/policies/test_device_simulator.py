"""The simulated device of the papers' comparison: by hand, against brute force, and
with the live policies and predictors on it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import baselines  # registers what the papers are compared with
from device_simulator import (
    NEVER,
    Bandwidths,
    DeviceBuffer,
    Execution,
    LowVersions,
    decode,
    on_device,
)
from helpers.gate_events import random_recording
from moeoff.engine.driver import Driver
from moeoff.experts.profile import Profile
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.profile_fit import fit
from moeoff.policies import PRESETS, CacheShape, FitOptions, get_strategy
from moeoff.policies.replay import simulate
from moeoff.routing.batch import Span
from moeoff.routing.event import GateEvent
from moeoff.routing.recording import Recording
from moeoff.routing.trace import TensorInfo, Trace, TraceHeader

pytestmark = pytest.mark.slow  # tests of research scripts run in nightly

LAYER_US = 1000  # any: all that matters is how long sending takes beside it


@pytest.fixture(scope="module")
def learned(recording, demo, tmp_path_factory) -> tuple[Recording, Profile]:
    """Return the held-out recording, and a profile of the rest."""
    train, held = recording.split(0.2)
    path = str(tmp_path_factory.mktemp("device") / "demo.profile.npz")
    model_index = ModelIndex.read(demo)
    names = {"gate", "shallow", "path", "pairs", "learned", "popularity", "tokens"}
    Profile.write(
        path,
        model_index,
        fit(recording.take(train), FitOptions(hidden=64), only=names, compare=False),
    )
    return recording.take(held), Profile.read(path, model_index)


def attached(demo, learned, strategy, *, share=0.5, read=1 / 8):
    """A device and what `Llama` would put together for it; read: sending a matrix of an
    expert, as a share of what a layer takes.
    """
    held, profile = learned
    speeds = Bandwidths(
        link=held.model.tensors[0].nbytes / (1000 * read * LAYER_US), device=1e9, layer_us=LAYER_US
    )
    buffer = DeviceBuffer(
        held.model, speeds, int(sum(t.nbytes * t.n_experts for t in held.model.tensors) * share)
    )
    driver = Driver(buffer)
    driver.attach(strategy, ModelIndex.read(demo), profile=profile)
    return buffer, driver


def meter(demo, learned, strategy, **options):
    """Return the driver's counts of the held-out text's predictions."""
    buffer, driver = attached(demo, learned, strategy, **options)
    decode(buffer, learned[0], driver, 192)
    return driver.prefetcher.meter


# the demo model's experts are small: over PCIe 4.0 hardly anything would be waited for
SLOW_LINK = Bandwidths(link=1.0)


def test_papers_on_a_device(demo, learned):
    """Absent experts are sent to a GPU: the papers' systems beat sending everything, a
    larger GPU and smaller copies help, and a run repeats.
    """
    held, profile = learned

    def decode(name, share=0.25, **options):
        strategy = replace(get_strategy(name), ab_tested=False)
        return on_device(
            held,
            strategy,
            ModelIndex.read(demo),
            SLOW_LINK,
            share=share,
            profile=profile,
            tokens=96,
            **options,
        )

    results = {name: decode(name) for name in ("on-demand", "lru", "fate", "hobbit", "promoe")}
    assert decode("hobbit") == results["hobbit"]
    assert all(
        result.n_tokens == 96 and result.device + result.host == 96 * 12 * 4
        for result in results.values()
    )
    assert results["on-demand"].device == 0 and results["on-demand"].uploads == 96 * 12 * 4
    # LRU's hits are those of the simulator without a clock, which knows no device
    events = held.events(0, 96, inputs=False)
    hits = simulate(
        Trace(held.model, events, np.zeros(len(events), bool)), "lru", held.model.full_bytes // 4
    ).hit_rate
    assert (
        results["lru"].device / (96 * 12 * 4) == pytest.approx(hits, abs=0.01)
        and results["lru"].uploads == results["lru"].host
    )
    # prediction sends more and waits less than the same cache without it
    for name in ("fate", "hobbit", "promoe"):
        strategy = replace(get_strategy(name), ab_tested=False, predictor=None)
        without = on_device(
            held, strategy, ModelIndex.read(demo), SLOW_LINK, share=0.25, profile=profile, tokens=96
        )
        assert results[name].tps > 1.02 * without.tps and results[name].uploads > without.uploads, (
            name
        )
        assert results[name].uploads < 1.6 * without.uploads, (
            "what was sent ahead was thrown out before its use"
        )
    assert decode("lru", share=0.5).uploads < 0.8 * results["lru"].uploads
    mixed = decode("hobbit", low=LowVersions(0.25, 0.6, 0.9))
    assert mixed.tps > results["hobbit"].tps and mixed.low > 0 < mixed.skipped


def test_the_oracle_looks_as_far_ahead_as_it_is_asked_to():
    recording = random_recording(3, n_gates=4)
    for options, gates in (
        ({}, [1]),
        ({"stride": 2}, [2]),
        ({"p": 3}, [1, 2, 3]),
        ({"stride": 3, "p": 3}, [3]),
    ):
        oracle = baselines.Oracle(recording.router, **options)
        oracle.text = recording
        oracle.begin(recording.tokens[:2])
        predictions = oracle.observe(recording.events(1, 2, inputs=False)[0])
        assert [p.gate for p in predictions] == gates
        assert all(
            set(np.flatnonzero(p.scores[0])) == set(recording.ids[1, p.gate]) for p in predictions
        )


def read_order(demo, learned, strategy, n_tokens=128):
    """Return what the strategy reads ahead of each gate of a prompt's first batch, in
    order, and how many of its tokens select each expert.
    """
    held, _ = learned
    buffer, driver = attached(demo, learned, strategy)
    driver.begin(held.tokens[:n_tokens], {0: Span(0, n_tokens, n_tokens, False)}, False)
    asked, prefetch = {}, buffer.prefetch
    buffer.prefetch = lambda gate, experts, *rest, **options: [
        asked.setdefault(gate, list(experts)),
        prefetch(gate, experts, *rest, **options),
    ][1]
    for g in range(held.model.n_gates):
        part = slice(0, n_tokens)
        buffer.compute(
            GateEvent(
                g,
                held.ids[part, g],
                held.weights[part, g],
                None,
                held.inputs[part, g].astype(np.float32),
            )
        )
    return {
        g: (order, np.bincount(held.ids[:n_tokens, g].ravel(), minlength=32))
        for g, order in asked.items()
        if g
    }


def test_a_prompts_popular_experts_are_read_first(demo, learned):
    """Fate §4.3, in the first prompt of a process, of which nothing is known but the
    layer before: the experts of the most tokens come first.
    """
    share = {}
    for name in ("fate", "lru+gate"):
        orders = read_order(demo, learned, get_strategy(name))
        assert len(orders) > 8 and all(len(order) == 32 for order, _ in orders.values())
        share[name] = np.mean(
            [count[order[:8]].sum() / count.sum() for order, count in orders.values()]
        )
    best = np.mean(
        [
            np.sort(count)[-8:].sum() / count.sum()
            for _, count in read_order(demo, learned, PRESETS["fate"]).values()
        ]
    )
    assert share["fate"] > 0.85 * best and share["fate"] > 1.4 * share["lru+gate"]


def test_the_meter_counts_what_was_there_in_time(demo, learned):
    """GoodPred's two factors are counts: over a link that takes no time everything
    predicted is there, over a slow one little, and accuracy is the predictor's own
    whatever the link. One layer more of distance costs accuracy and leaves more time
    (ProMoE §4.4).
    """
    # else all but the slowest of these links bring nearly everything in time
    promoe = replace(PRESETS["promoe"], bounded=True)
    meters = {
        read: meter(demo, learned, promoe, share=0.25, read=read) for read in (1 / 64, 1 / 8, 3)
    }
    accuracies = [m.accuracy for m in meters.values()]
    assert max(accuracies) - min(accuracies) < 1e-9 and 0.4 < accuracies[0] < 0.95
    assert all(m.good_pred == pytest.approx(m.accuracy * m.fetch_rate) for m in meters.values())
    assert meters[1 / 64].fetch_rate > 0.97 > meters[1 / 8].fetch_rate > meters[3].fetch_rate + 0.05
    one, two = (meter(demo, learned, promoe.with_stride(stride), share=0.25) for stride in (1, 2))
    assert 0.02 < one.accuracy - two.accuracy < 0.15 and two.fetch_rate > one.fetch_rate + 0.01


def test_presets_are_what_their_papers_say(demo, learned):
    """By what they do: EAP keeps what Fate keeps (§5.1) and predicts otherwise; ProMoE
    keeps as many of each layer, and foresees the layer after the next.
    """
    held, profile = learned
    arena = held.model.full_bytes // 2
    tables = {}
    for name in ("eap", "fate", "promoe"):
        strategy = PRESETS[name]
        arrays = next((profile.section(section.name) for section in strategy.policy.sections), None)
        policy = strategy.policy.from_profile(
            arrays, CacheShape.of(held.model, arena), np.zeros((12, 32), np.float32)
        )
        for event in held.events(0, 64, inputs=False):
            policy.update(event)
        tables[name] = policy.priorities.copy()
    assert (
        np.array_equal(tables["eap"], tables["fate"])
        and PRESETS["eap"].predictor != PRESETS["fate"].predictor
    )
    n_foreseen = (tables["promoe"] > -1.5).sum(axis=1)  # those beyond a layer's quota lie below
    assert n_foreseen.tolist() == [16] * 12
    targets = {}
    for name in ("promoe", "fate", "eap"):
        _, driver = attached(demo, learned, PRESETS[name])
        (event,) = held.events(0, 1)[3:4]
        targets[name] = [p.gate for p in driver.prefetcher.predictor.observe(event)]
    assert targets == {"promoe": [5], "fate": [4], "eap": [4]}


# one matrix of 5000 bytes, two layers of four experts; a byte takes 2 ns over the link,
# a tenth on the device
ONE = TraceHeader("one", 1, tuple(TensorInfo(g, g, 0, 4, 5000) for g in range(2)))
SPEEDS = Bandwidths(link=0.5, device=10, layer_us=3)
LINK, DEVICE, LAYER = 10_000, 500, 3_000


def took(buffer, *events):
    """Nanoseconds of each event: a gate, and one expert."""
    times = []
    for gate, expert in events:
        before = buffer.now
        buffer.compute(GateEvent(gate, np.array([[expert]], np.int32), np.ones((1, 1), np.float32)))
        times.append(buffer.now - before)
    return times


def test_a_device_by_hand():
    """Link and device one after the other; then the device alone; a third expert takes
    the place of the one used longest ago.
    """
    buffer = DeviceBuffer(ONE, SPEEDS, 2 * 5000)
    assert took(buffer, (0, 1), (0, 1)) == [LINK + DEVICE + LAYER, DEVICE + LAYER]
    assert took(buffer, (1, 2), (0, 1), (0, 3), (1, 2)) == [
        LINK + DEVICE + LAYER,
        DEVICE + LAYER,
        LINK + DEVICE + LAYER,
        LINK + DEVICE + LAYER,
    ]
    assert buffer.residency().tolist() == [[0, 0, 0, 1], [0, 0, 1, 0]]
    assert (
        buffer.sent
        == {
            "device": 2,
            "host": 4,
            "low": 0,
            "skipped": 0,
            "uploads": 4,
            "up_bytes": 20_000,
            "ahead": 0,
        }
        and buffer.counts["stall_ns"] == 4 * LINK
    )
    assert (buffer.counts["hits"], buffer.counts["misses"]) == (2, 4)


def test_a_devices_prefetch_by_hand():
    """A prefetch that has arrived is not waited for, a late one for the rest of its
    time; one that is not selected is given up.
    """
    buffer = DeviceBuffer(ONE, SPEEDS, 4 * 5000)
    assert took(buffer, (0, 0)) == [LINK + DEVICE + LAYER]
    assert buffer.prefetch(1, [2, 3]) == 2
    assert took(buffer, (0, 0)) == [DEVICE + LAYER]
    assert took(buffer, (1, 2)) == [LINK - DEVICE - LAYER + DEVICE + LAYER]
    assert (
        buffer.sent["uploads"] == 2
        and buffer.sent["ahead"] == 1
        and buffer.residency().tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    )
    assert buffer.prefetch(1, [3], limit=0) == 0


@pytest.mark.parametrize("predict_ns", [0, 500, LAYER // 2])
def test_a_prediction_takes_time(predict_ns):
    """A prefetch is sent so much later, if the link is idle until then."""
    execution = Execution(predict_us=predict_ns / 1000)
    buffer = DeviceBuffer(ONE, SPEEDS, 4 * 5000, execution=execution)
    took(buffer, (0, 0))
    buffer.prefetch(1, [2])
    assert took(buffer, (0, 0)) == [DEVICE + LAYER]
    left = LINK - (DEVICE + LAYER - predict_ns)
    assert took(buffer, (1, 2)) == [left + DEVICE + LAYER]


TWO_STEPS = Execution(eager=False, reordered=NEVER, chunked=False)
# two matrices: two pieces an expert
WIDE = TraceHeader(
    "wide", 2, tuple(TensorInfo(g, g, m, 8, 5000) for g in range(2) for m in range(2))
)


def compute(buffer, gate, *rows):
    """Nanoseconds of an event whose tokens select these experts."""
    before, ids = buffer.now, np.array(rows, np.int32)
    buffer.compute(GateEvent(gate, ids, np.full(ids.shape, 0.5, np.float32), decode=len(rows) == 1))
    return buffer.now - before


@pytest.mark.parametrize(
    "execution, ns",
    [
        # 1 is there, 5 and 3 are not: all three sent behind each other beside the
        # computing of what is there and of what has come
        (Execution(), 4 * LINK + 2 * DEVICE + LAYER),
        # the first has to be waited for, and the second is sent beside its computing
        (Execution(reordered=NEVER), 4 * LINK + 2 * DEVICE + LAYER),
        # 3 is sent when 5 has been computed
        (Execution(eager=False), 4 * LINK + 2 * 2 * DEVICE + 2 * DEVICE + LAYER),
        (TWO_STEPS, 4 * LINK + 3 * 2 * DEVICE + LAYER),
    ],
    ids=["native", "in order", "one after the other", "neither"],
)
def test_execution_by_hand(execution, ns):
    """Twice as long as any prompt's experts take to compute, an expert is on its way:
    what overlaps shows.
    """
    buffer = DeviceBuffer(replace(WIDE, n_used=3), SPEEDS, 8 * 10_000, execution=execution)
    compute(buffer, 0, [1, 1, 1])
    assert compute(buffer, 0, [5, 1, 3]) == ns


def test_a_prefetch_gives_way_after_a_piece_or_after_the_expert():
    """While 4 is sent ahead, 2 is selected: it waits for the rest of a matrix, or of
    the whole expert; and what was not selected is given up, or not.
    """
    times = {}
    for chunked in (True, False):
        for eager in (True, False):
            buffer = DeviceBuffer(
                replace(WIDE, n_used=1),
                SPEEDS,
                8 * 10_000,
                execution=Execution(chunked=chunked, eager=eager),
            )
            compute(buffer, 0, [0])
            buffer.prefetch(1, [4])
            # 2 * DEVICE + LAYER later: of the first piece LINK - 4000 are left
            compute(buffer, 0, [0])
            times[chunked, eager] = compute(buffer, 1, [2])
            compute(buffer, 0, [1])
            assert (buffer.sent["uploads"], bool(buffer._resident[8 + 4])) == (
                (3, False) if chunked and eager else (4, True)
            ), (chunked, eager)
    late = LINK - 4000
    assert times[True, True] == times[True, False] == late + 2 * LINK + 2 * DEVICE + LAYER
    assert times[False, True] == times[False, False] == late + 3 * LINK + 2 * DEVICE + LAYER


def test_the_processor_computes_with_what_is_absent():
    """Beside the device, and nothing is sent; what was predicted is, and is then the
    device's. Whole layers begin there.
    """
    speeds = replace(SPEEDS, host=2)  # a fifth of the device's rate
    buffer = DeviceBuffer(
        replace(WIDE, n_used=2), speeds, 8 * 10_000, execution=Execution(cooperative=True)
    )
    assert compute(buffer, 0, [1, 2]) == 2 * 5_000 + LAYER and buffer.sent["uploads"] == 0
    buffer.prefetch(1, [3])
    for _ in range(3):
        compute(buffer, 0, [1, 2])
    # the device has ended by then
    assert buffer.sent["uploads"] == 1 and compute(buffer, 1, [3, 4]) == 5_000 + LAYER
    whole = DeviceBuffer(
        replace(WIDE, n_used=2), speeds, 8 * 10_000, execution=Execution(cooperative=True)
    )
    whole.fill_layers()
    assert (compute(whole, 0, [1, 2]), compute(whole, 1, [1, 2])) == (
        2 * 2 * DEVICE + LAYER,
        2 * 5_000 + LAYER,
    )
