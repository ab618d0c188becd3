"""Cache policies: one contract for all, brute-force references, the papers' formulas,
what is fitted for them, and what an update costs; the registry.
"""

import re
from collections import OrderedDict

import numpy as np
import pytest

import baselines  # noqa: F401  registers policies that the package does not have
import moeoff
from helpers.files import ROOT, SMALL_TRACE
from helpers.gate_events import SHAPE, random_events, random_recording, update_cost
from moeoff import OptionError
from moeoff.policies import (
    POLICIES,
    PREDICTORS,
    PRESETS,
    CacheShape,
    FitOptions,
    Policy,
    Predictor,
    Strategy,
    fate,
    get_policy,
    get_predictor,
    get_strategy,
    policy_names,
    register,
    strategy_names,
)
from moeoff.policies.hobbit import (
    HIGH,
    LOW,
    SKIP,
    T1,
    T2,
    Hobbit,
    MissCost,
    fit_weights,
    recorded_unimportance,
    thresholds,
    unimportance,
    versions,
)
from moeoff.policies.replay import simulate
from moeoff.policies.score import Score, fit_score, next_use
from moeoff.routing.event import GateEvent
from moeoff.routing.trace import TensorInfo, Trace, TraceHeader


@pytest.mark.parametrize("name", policy_names())
class TestContract:
    def test_writes_into_the_given_table(self, name):
        table = np.zeros((3, 8), np.float32)
        policy = get_policy(name)(SHAPE, table)
        events = random_events(60)
        policy.prepare(events)
        tables = [table.copy()]
        for event in events:
            policy.update(event)
            assert policy.priorities is table and np.isfinite(table).all()
            tables.append(table.copy())
        changes = [not np.array_equal(a, b) for a, b in zip(tables, tables[1:])]
        # what has several gates at a time is written at the last of them at the latest
        assert any(changes[-3:]) if name != "lru" else not any(changes), (
            "the table is what it was before the last token"
        )

    def test_a_new_text_forgets_everything_or_nothing(self, name):
        """A policy is about one text, and then starts afresh, or about all."""
        before, after = random_events(60), random_events(45, seed=1)

        def table(*parts, reset):
            policy = get_policy(name)(SHAPE)
            policy.prepare([event for part in parts for event in part])
            for i, part in enumerate(parts):
                if i and reset:
                    policy.reset_sequence()
                for event in part:
                    policy.update(event)
            return policy.priorities

        after_reset, afresh, continued = (
            table(before, after, reset=True),
            table(after, reset=False),
            table(before, after, reset=False),
        )
        forgets = get_policy(name)(SHAPE).options.get("sequence", False)
        assert np.array_equal(after_reset, afresh if forgets else continued)
        assert not forgets or not np.array_equal(afresh, continued)

    def test_refuses_a_table_of_another_shape(self, name):
        assert (
            get_policy(name)(SHAPE).priorities.shape == (3, 8)
            and get_policy(name)(SHAPE).priorities.dtype == np.float32
        )
        with pytest.raises(OptionError, match=r"a table of \(8, 3\) does not fit"):
            get_policy(name)(SHAPE, np.zeros((8, 3), np.float32))

    def test_batches_and_missing_probabilities(self, name):
        policy = get_policy(name)(SHAPE)
        events = [GateEvent(e.gate, e.ids, e.weights) for e in random_events(12, n_tokens=5)]
        policy.prepare(events)
        for event in events:
            policy.update(event)
        assert np.isfinite(policy.priorities).all()

    def test_unknown_option(self, name):
        with pytest.raises(OptionError, match="unknown option 'colour'"):
            get_policy(name)(SHAPE, colour=1)

    def test_a_resized_buffer_keeps_what_was_learned(self, name):
        """As a policy of the new capacity would go on: nothing but the capacity tells
        them apart once the old is forgotten.
        """
        before, after = random_events(60), random_events(3000, seed=1)
        policies = [get_policy(name)(CacheShape(3, 8, 2, capacity)) for capacity in (22, 6)]
        for policy in policies:
            policy.prepare(before + after)
            for event in before:
                policy.update(event)
        policies[0].resize(6)
        assert policies[0].shape == policies[1].shape
        for policy in policies:
            for event in after:
                policy.update(event)
        np.testing.assert_allclose(
            policies[0].priorities, policies[1].priorities, rtol=1e-4, atol=1e-6
        )

    @pytest.mark.parametrize("n_tokens", [1, 3])
    def test_updates_say_whether_the_table_changed(self, name, n_tokens):
        """An update that returns False has left the table alone, because it is not
        published.
        """
        shape = CacheShape(24, 8, 2, 90)
        policy = get_policy(name)(shape)
        events = random_events(24 * 6, shape, n_tokens=n_tokens)
        # llama.cpp may leave out a layer
        events = [event for i, event in enumerate(events) if i % 31 != 30]
        policy.prepare(events)
        changes = 0
        for event in events:
            table = policy.priorities.copy()
            if policy.update(event) is False:
                assert np.array_equal(table, policy.priorities)
            else:
                changes += 1
        assert changes >= 6 * 8

    @pytest.mark.perf
    def test_update_cost(self, name):
        """20 us for each event at 64 x 256 experts, 8 used; the best of several rounds,
        because others use the machine too.
        """
        assert update_cost(name) < 20e-6


def test_decay_orders_as_the_definition_does():
    policy, counts = get_policy("decay")(SHAPE, rate=0.1), np.zeros((3, 8))
    for event in random_events(2000):  # long enough for the increment to be scaled back
        policy.update(event)
        counts[event.gate, event.ids[0]] += 1
        if event.gate == 2:
            counts *= 0.9
    scale = policy.priorities.max() / counts.max()
    assert np.allclose(policy.priorities, counts * scale, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("printed", [False, True])
def test_edgemoe_by_the_formula(printed):
    policy, f, s = (
        get_policy("edgemoe-printed" if printed else "edgemoe")(SHAPE),
        np.zeros((3, 8)),
        3,
    )
    for event in random_events(50):
        policy.update(event)
        f[event.gate, event.ids[0]] += 1
        now = (event.gate + 1) % s  # the layer that evicts next
        for i in range(s):
            distance = ((s - i + now) if printed else (i - now + s)) % s
            assert np.allclose(policy.priorities[i], f[i] / (distance or s))


def test_hobbit_by_equation_3():
    w = {"lru": 0.3, "lfu": 0.2, "lhu": 0.4, "fld": 0.1}
    policy = get_policy("hobbit")(SHAPE, **w)
    r, f, h, t = np.zeros((3, 8)), np.zeros((3, 8)), np.zeros((3, 8)), 1
    for event in random_events(60):
        policy.update(event)
        t += event.gate == 0
        for k, e in enumerate(event.ids[0]):
            r[event.gate, e], f[event.gate, e] = t, f[event.gate, e] + 1
            h[event.gate, e] += unimportance(event.weights)[0, k] <= 0.6
        i = (event.gate + 1) % 3
        fld = 1 - ((np.arange(3) - i) % 3) / 3
        p = (w["lru"] * r + w["lfu"] * f + w["lhu"] * h) / t + w["fld"] * fld[:, None]
        assert np.allclose(policy.priorities, p * t, atol=1e-4)


def hobbit_of(events, **options):
    policy = get_policy("hobbit")(
        CacheShape(1, 4, 2, 2), lru=0, lfu=0.3, lhu=0.7, fld=0, t1=0.5, **options
    )
    for ids, weights, served in events:
        served = None if served is None else np.array([served], np.uint8)
        selected = np.array([ids], np.int32), np.array([weights], np.float32)
        policy.update(GateEvent(0, *selected, versions=served))
    return policy.priorities[0]


def test_hobbit_counts_what_was_served_in_high_precision():
    """H is the frequency of high-precision usage (HOBBIT §3.4): a resident expert is
    served high however unimportant, a low or a skipped one is not.
    """
    events = [
        ([0, 1], [0.9, 0.1], [0, 0]),
        ([0, 2], [0.6, 0.4], [0, 1]),
        ([3, 0], [0.8, 0.2], [0, 2]),
        ([0, 1], [0.9, 0.1], None),
    ]
    served = np.array([3, 2, 0, 1])  # of 4, 2, 1 and 1 uses; without versions all were high
    np.testing.assert_allclose(
        hobbit_of(events, actual=True), 0.3 * np.array([4, 2, 1, 1]) + 0.7 * served, rtol=1e-6
    )


def test_hobbit_keeps_both_fitted_weights():
    """A lossy run uses the weights that a calibration found: no part of them gives way
    to another formula.
    """
    fitted = {
        name: np.array(weight)
        for name, weight in (("lru", 0.1), ("lfu", 0.2), ("lhu", 0.6), ("fld", 0.1), ("t1", 0.5))
    }
    policy = get_policy("hobbit").from_profile(fitted, SHAPE, t1=0.7, actual=True)
    assert {name: policy.options[name] for name in fitted} == fitted | {"t1": 0.7}


def test_unimportance_by_brute_force():
    rng = np.random.default_rng(5)
    weights = rng.dirichlet(np.ones(6), 200).astype(np.float32) * rng.uniform(
        0.5, 2, (200, 1)
    ).astype(np.float32)
    weights[::3, 2] = weights[::3, 4]
    weights[7] = 0
    for n_scale in (None, 4):
        for row, shares in zip(weights, unimportance(weights, n_scale)):
            ranked = sorted(range(6), key=lambda k: (-row[k], k))
            total = sum(float(row[k]) for k in ranked[:n_scale])
            for i, k in enumerate(ranked):
                assert shares[k] == pytest.approx(
                    sum(float(row[j]) for j in ranked[:i]) / total if total else 0, abs=1e-6
                )


def test_thresholds_leave_the_shares_of_the_paper():
    """Two thirds and 30 % of 1,000 evenly spread uses, as on Mixtral; where half of the
    scores are 0, T1 lies above them.
    """
    scores = np.random.default_rng(0).permutation(np.linspace(0, 1, 1001))
    t1, t2 = thresholds(scores)
    assert (t1, t2) == pytest.approx((0.67, 0.97), abs=2e-3)
    top_2 = np.concatenate([np.zeros(500), np.linspace(0.5, 1, 500)])
    t1, t2 = thresholds(top_2)
    assert np.mean(top_2 <= t1) == pytest.approx(0.67, abs=2e-3) and np.mean(
        (top_2 > t1) & (top_2 <= t2)
    ) == pytest.approx(0.3, abs=2e-3)
    assert thresholds(np.zeros(9)) == (0, 0) and thresholds(scores, 1, 0) == (1, 1)
    with pytest.raises(OptionError, match="thresholds need scores"):
        thresholds(np.zeros(0))


def test_unimportance_and_miss_cost():
    weights = np.array([[0.1, 0.6, 0.3]])
    assert np.allclose(unimportance(weights), [[0.9, 0.0, 0.6]])
    at_bounds = versions(np.array([0.6, 0.7, 0.9, 1.0]), 0.6, 0.9)
    assert at_bounds.tolist() == [HIGH, LOW, LOW, SKIP]
    assert MissCost().decoded(np.array([[0.04, 0.5, 0.2, 0.26]])).tolist() == [
        [0.0, 1.0, 0.25, 1.0]
    ]
    assert MissCost(0.4, 0.7, 0.5).decoded(np.array([[0.04, 0.5, 0.2, 0.26]])).tolist() == [
        [0.0, 1.0, 0.0, 0.5]
    ]
    prompt = GateEvent(
        0, np.array([[0, 1], [0, 2], [0, 3], [2, 3]]), np.full((4, 2), 0.5, np.float32)
    )
    # chosen by 3, 1, 2 and 2 tokens; of equals the first
    assert MissCost(low=0.5, prefill_low_fraction=0.5).of(prompt, 5).tolist() == [1, 0.5, 0.5, 1, 0]
    for wrong in ({"t1": 0.8, "t2": 0.5}, {"low": 2}, {"prefill_low_fraction": -1}):
        with pytest.raises(OptionError, match="a miss costs by"):
            MissCost(**wrong)


def test_shallow_layers_in_proportion():
    """3 of the paper's 24 layers; of 12 two, so that a quarter of the experts leaves
    room in every layer.
    """
    assert [fate.proportional_boundary(n) for n in (24, 12, 48, 2)] == [3, 2, 6, 1]
    policy = get_policy("arc")(CacheShape(12, 32, 4, 96))
    assert policy.quotas[:2] == [32, 32] and min(policy.quotas) == 3


class BruteARC:
    """Megiddo and Modha's figure 4, word for word, for one layer."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def replace(self, x):
        if self.t1 and (
            len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p) or not self.t2
        ):
            self.b1[self.t1.popitem(False)[0]] = None
        else:
            self.b2[self.t2.popitem(False)[0]] = None

    def use(self, x):
        c, t1, t2, b1, b2 = self.c, self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            t1.pop(x, None), t2.pop(x, None)
        elif x in b1:
            self.p = min(c, self.p + max(1, len(b2) / len(b1)))
            self.replace(x)
            del b1[x]
        elif x in b2:
            self.p = max(0, self.p - max(1, len(b1) / len(b2)))
            self.replace(x)
            del b2[x]
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(False)
                    self.replace(x)
                else:
                    t1.popitem(False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popitem(False)
                self.replace(x)
            t1[x] = None
            return
        t2[x] = None


@pytest.mark.parametrize("name", ["hobbit", "edgemoe"])
def test_events_that_wait_lose_nothing(name):
    """After a whole token, what a policy knows is the same whether it took the gates
    one by one or several at once.
    """
    shape = CacheShape(24, 8, 2, 90)
    priorities = []
    for group in (1, 3):
        policy = get_policy(name)(shape)
        policy.group = group
        for n_tokens in (1, 4, 1):
            for event in random_events(24 * 5, shape, n_tokens=n_tokens):
                policy.update(event)
        # a text that ends within a token, and within a group
        for event in random_events(10, shape, seed=1):
            policy.update(event)
        for event in random_events(24, shape, seed=2):
            policy.update(event)
        priorities.append(policy.priorities.copy())
    np.testing.assert_allclose(*priorities, rtol=1e-5)


def test_arcs_quotas_follow_the_buffer():
    """Both ways: a smaller buffer leaves the layer as many experts as its new quota,
    the latest; a larger one lets it keep more.
    """
    policy = get_policy("arc")(CacheShape(2, 8, 1, 12), shallow=0)

    def use(experts):
        for expert in experts:
            for gate in (0, 1):
                policy.update(
                    GateEvent(gate, np.array([[expert]], np.int32), np.ones((1, 1), np.float32))
                )
        return [set(np.flatnonzero(row > -1)) for row in policy.priorities]

    assert use([0, 1, 2, 3, 4, 5]) == [{0, 1, 2, 3, 4, 5}] * 2
    policy.resize(4)
    assert (
        policy.quotas == [2, 2]
        and [set(np.flatnonzero(row > -1)) for row in policy.priorities] == [{4, 5}] * 2
    )
    assert use([6, 7, 6, 7]) == [{6, 7}] * 2
    policy.resize(8)
    assert all({6, 7} < experts and len(experts) == 4 for experts in use([0, 1, 0, 1]))


def test_memory_that_is_divided_decides_the_quotas():
    """A device's slots: as many in each layer as the device has there, whatever the
    boundary.
    """
    shape = CacheShape(3, 8, 1, 24).divided([5, 0, 2])
    assert shape.capacity == 7
    for name in ("arc", "lru-layer"):
        policy = get_policy(name)(shape)
        for expert in range(8):
            for gate in range(3):
                policy.update(
                    GateEvent(gate, np.array([[expert]], np.int32), np.ones((1, 1), np.float32))
                )
        kept = [set(np.flatnonzero(row > row.min())) for row in policy.priorities]
        assert kept == [{3, 4, 5, 6, 7}, set(), {6, 7}], name


def test_arc_keeps_what_arc_keeps():
    shape = CacheShape(1, 12, 1, 5)
    policy, brute = get_policy("arc")(shape, shallow=0), BruteARC(5)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        expert = int(rng.zipf(1.5)) % 12 if rng.random() < 0.7 else int(rng.integers(12))
        policy.update(GateEvent(0, np.array([[expert]]), np.ones((1, 1), np.float32)))
        brute.use(expert)
        assert set(np.flatnonzero(policy.priorities[0] >= 0)) == set(brute.t1) | set(brute.t2)


def test_lru_layer_by_brute_force(recording):
    """As many experts in each layer, the last used of it: once the arena is full, what
    each layer has is what its own LRU would have.
    """
    model, quota = recording.model, 10
    events = recording.events(0, 200, inputs=False)
    arena = quota * model.n_gates * model.expert_slots[0]
    result = simulate(Trace(model, events, np.zeros(len(events), bool)), "lru-layer", arena)
    caches = [OrderedDict() for _ in range(model.n_gates)]
    for event in events:
        cache = caches[event.gate]
        for expert in event.ids[0].tolist():
            cache[expert] = None
            cache.move_to_end(expert)
            if len(cache) > quota:
                cache.popitem(last=False)
    resident = result.resident.reshape(model.n_gates, -1)
    for gate, cache in enumerate(caches):
        assert set(np.flatnonzero(resident[gate])) == set(cache), gate


# --- HOBBIT's weights, fitted on a trace ---


def test_hobbit_weights_lower_the_penalty():
    trace, arena = Trace.read(SMALL_TRACE), int(Trace.read(SMALL_TRACE).model.full_bytes * 0.5)
    weights = fit_weights(trace, simulate, shares=(0.5,))
    assert sum(weights.values()) == pytest.approx(1, abs=1e-3) and set(weights) == {
        "lru",
        "lfu",
        "lhu",
        "fld",
    }
    fitted = simulate(trace, "hobbit", arena, **weights).miss_penalty
    for other in ({}, *({name: float(name == only) for name in weights} for only in weights)):
        assert fitted <= simulate(trace, "hobbit", arena, **other).miss_penalty * (1 + 1e-6)
    assert sum(Hobbit.defaults[n] for n in weights) == pytest.approx(1, abs=1e-3)
    # the time is over: nothing is tried
    assert fit_weights(trace, None, until=0.0) == {name: Hobbit.defaults[name] for name in weights}


def test_the_penalty_is_the_models_own():
    """Thresholds from its own scores, and what its own low versions weigh: both are
    kept, and both are what the fit was for.
    """
    recording, calls = random_recording(n_tokens=24, n_gates=2), []

    def penalty(trace, policy, arena, cost, **weights):
        calls.append((cost.t1, cost.t2, cost.low))
        result = simulate(trace, policy, arena, cost=cost, **weights)
        assert (
            result.miss_penalty
            == simulate(
                trace, policy, arena, cost=cost, **weights | {"actual": False, "t1": cost.t1}
            ).miss_penalty
        )
        return result

    options = Hobbit.fit(recording, FitOptions(low_cost=0.9, replay=penalty))
    t1, t2 = thresholds(recorded_unimportance(recording))
    assert (t1, t2) != (T1, T2) and set(calls) == {(t1, t2, 0.9)}
    assert (options["t1"], options["t2"], options["low_cost"]) == (t1, t2, 0.9)
    assert sum(float(options[name]) for name in ("lru", "lfu", "lhu", "fld")) == pytest.approx(
        1, abs=1e-3
    )


def test_hobbit_needs_events():
    with pytest.raises(OptionError, match="empty"):
        fit_weights(Trace.read(SMALL_TRACE).slice(0, 0), simulate)


# --- the learned score ---

MODEL = TraceHeader(
    "none", 2, tuple(TensorInfo(g, g, m, 16, 5000) for g in range(4) for m in (2, 1, 3))
)


def trace_of(events, model=MODEL):
    return Trace(model, events, np.zeros(len(events), bool))


def walk(n_tokens, seed=0):
    """A hidden state that goes round: the router's probabilities tell what comes,
    recency does not.
    """
    rng = np.random.default_rng(seed)
    favourites = np.random.default_rng(7).normal(size=(24, 4, 16)).astype(np.float32) * 2
    events, state = [], 0
    for _ in range(n_tokens):
        state = (state + 1) % 24 if rng.random() < 0.95 else int(rng.integers(24))
        for g in range(4):
            logits = favourites[state, g] + rng.normal(size=16).astype(np.float32) * 0.1
            probs = (np.exp(logits) / np.exp(logits).sum())[None]
            ids = np.argsort(-probs, axis=1)[:, :2].astype(np.int32)
            events.append(GateEvent(g, ids, np.take_along_axis(probs, ids, axis=1), probs))
    return trace_of(events)


@pytest.fixture(scope="module")
def fitted():
    return fit_score(walk(2000))


def test_next_use_by_its_definition():
    uses = (np.random.default_rng(0).random((60, 5)) < 0.2).astype(np.float32)
    got = next_use(uses, 0.7)
    for t in range(60):
        for e in range(5):
            later = np.flatnonzero(uses[t + 1 :, e])
            assert got[t, e] == pytest.approx(0.7 ** later[0] if later.size else 0, abs=1e-6)


def test_fewer_tokens_than_features():
    """A short text of a model with many experts in few layers: what is kept of a
    layer's state is no wider than there are tokens.
    """
    trace = random_recording(n_tokens=70, n_gates=8, n_experts=128, n_used=4).trace()
    section = fit_score(trace)
    assert section["project"].shape[::2] == (8, 256) and all(
        np.isfinite(array).all() for array in section.values()
    )


def test_a_prompt_takes_room_from_the_layers_behind_it():
    """They come again after all of its tokens; one decoded token later all layers are a
    token apart at most.
    """
    policy, rng = Score(CacheShape(4, 16, 2, 30.0), weights="generic"), np.random.default_rng(0)

    def run(n_tokens, gates, decode=False):
        for gate in gates:
            ids = np.argsort(rng.random((n_tokens, 16)), axis=1)[:, :2].astype(np.int32)
            policy.update(
                GateEvent(
                    gate,
                    ids,
                    np.full(ids.shape, 0.5, np.float32),
                    np.full((n_tokens, 16), 1 / 16, np.float32),
                    decode=decode,
                )
            )

    run(1, range(4), decode=True)
    run(40, range(2))
    # the third has selected when this is looked at
    assert policy.priorities[:3].max() < policy.priorities[3:].min()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_learns_what_recency_cannot_know(fitted, share):
    trace, arena = walk(600, seed=1), int(MODEL.full_bytes * share)
    lru, generic, best = (
        simulate(trace, name, arena).hit_rate for name in ("lru", "score", "belady")
    )
    learned = simulate(trace, "score", arena, weights=fitted).hit_rate
    assert (learned - lru) / (best - lru) > 0.6 and learned > generic + 0.05


def test_refuses_weights(fitted):
    with pytest.raises(OptionError, match="weights are for"):
        get_policy("score")(CacheShape(3, 16, 2, 8), weights=fitted)


def test_refuses_traces():
    with pytest.raises(OptionError, match="at least 64 tokens"):
        fit_score(walk(10))
    events = random_events(4 * 70, CacheShape(4, 16, 2, 8))
    for wrong in (
        [GateEvent(e.gate, e.ids, e.weights) for e in events],
        random_events(4 * 70, CacheShape(4, 16, 2, 8), n_tokens=2),
        [*events[1:], events[0]],
    ):
        with pytest.raises(OptionError, match="token by token"):
            fit_score(trace_of(wrong))


def test_the_demo_models_weights_beat_the_generic_ones():
    trace = Trace.read(SMALL_TRACE)
    for share in (0.25, 0.5, 0.75):
        arena = int(trace.model.full_bytes * share)
        generic, ours = (
            simulate(trace, "score", arena, weights=w).hit_rate for w in ("generic", None)
        )
        assert ours > generic + 0.005


# --- the registry ---


def test_names():
    assert (
        {
            "auto",
            "fate",
            "fate-lossy",
            "edgemoe",
            "edgemoe-lossy",
            "hobbit",
            "hobbit-lossy",
            "hobbit-jetson",
            "promoe",
        }
        <= set(PRESETS)
        <= set(strategy_names())
    )
    assert (
        {"lru", "lfu", "decay", "arc", "edgemoe", "hobbit", "lru-layer", "score"}
        <= set(policy_names(live=True))
        == set(policy_names()) - {"belady"}
    )
    assert (
        get_strategy("score+gate").predictor is get_predictor("gate")
        and get_strategy("hobbit+none").predictor is None
    )
    assert get_strategy(own := Strategy("own", "", policy=get_policy("lfu"))) is own
    for wrong in ("magic", "lru+magic", "magic+gate", "belady+gate"):
        with pytest.raises(OptionError):
            get_strategy(wrong)


def test_register_ten_lines():
    """The example of docs/guides/policy.md, as it stands there."""
    text = (ROOT / "docs" / "guides" / "policy.md").read_text()
    example = re.search(r"```python\n(.*?)\nwith ", text, re.S).group(1)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    try:
        exec(example, {})
        policy = get_policy("recent")(SHAPE)
        for event in random_events(9):
            policy.update(event)
        assert policy.priorities.any() and "recent" in policy_names(live=True)
    finally:
        POLICIES.pop("recent", None)


def test_register_takes_every_part_of_a_strategy():
    """One name for each kind; `replace` takes it from another part of the same kind."""
    policy, predictor = (
        type("Mine", (Policy,), {"name": "mine"}),
        type("Mine", (Predictor,), {"name": "mine"}),
    )
    preset = Strategy("mine", "a user's own", policy=policy, predictor=predictor)
    try:
        for part, known in ((policy, POLICIES), (predictor, PREDICTORS), (preset, PRESETS)):
            assert moeoff.register(part) is part is known["mine"]
            with pytest.raises(OptionError, match="not taken, got 'mine'"):
                moeoff.register(part)
        assert get_policy("mine") is policy and get_predictor("mine") is predictor
        assert (
            get_strategy("mine") is preset
            and get_strategy("mine+mine").predictor is predictor
            and strategy_names().count("mine") == 1
        )
        assert (
            register(type("Other", (Predictor,), {"name": "mine"}), replace=True)
            is get_predictor("mine")
            is not predictor
        )
    finally:
        for known in (POLICIES, PREDICTORS, PRESETS):
            known.pop("mine", None)


@pytest.mark.parametrize("name", ["", "lru", "arc", "none"])
def test_register_refuses(name):
    with pytest.raises(OptionError, match="not taken"):
        register(type("Mine", (Policy,), {"name": name}))
    with pytest.raises(OptionError, match="expected a subclass of Policy"):
        register(dict)


def test_unknown_names():
    with pytest.raises(
        OptionError,
        match="unknown policy 'fifo', expected one of lru, lfu, decay, .*, lru-layer, score",
    ):
        get_policy("fifo")
    with pytest.raises(
        OptionError,
        match="unknown predictor 'magic', expected one of activation-path, gate, stacked, ",
    ):
        get_predictor("magic")


def test_a_resize_keeps_each_layers_order():
    """The layer that is about to select, too: what it used last stays last to go."""
    policy = get_policy("lru-layer")(SHAPE)
    for event in random_events(20):
        policy.update(event)
    before = policy.priorities.argsort(axis=1, kind="stable")
    policy.resize(SHAPE.capacity)
    np.testing.assert_array_equal(policy.priorities.argsort(axis=1, kind="stable"), before)
