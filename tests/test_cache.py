"""Cache policies: one contract for all, brute-force references, the papers' formulas, and what an update costs."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from helpers.files import ROOT
from helpers.gate_events import SHAPE, random_events, update_cost
from moeoff import OptionError
from moeoff.cache import POLICIES, Policy, Shape, create, get_policy, names, register
from moeoff.cache.arc import quotas
from moeoff.cache.importance import MissCost, thresholds, unimportance
from moeoff.gate_event import GateEvent


@pytest.mark.parametrize("name", names())
class TestContract:
    def test_writes_into_the_given_table(self, name):
        table = np.zeros((3, 8), np.float32)
        policy = create(name, SHAPE, table)
        events = random_events(60)
        policy.prepare(events)
        for event in events:
            policy.update(event)
            assert policy.priorities is table and np.isfinite(table).all()
        assert name == "lru" or table.any()

    def test_deterministic(self, name):
        tables = []
        for _ in range(2):
            policy = create(name, SHAPE, seed=3)
            events = random_events(90)
            policy.prepare(events)
            for i, event in enumerate(events):
                if i % 30 == 0:
                    policy.reset_sequence()
                policy.update(event)
            tables.append(policy.priorities.copy())
        assert (tables[0] == tables[1]).all()

    def test_a_new_text_forgets_everything_or_nothing(self, name):
        """A policy is about one text, and then starts afresh, or about all."""
        before, after = random_events(60), random_events(45, seed=1)

        def table(*parts, reset):
            policy = create(name, SHAPE)
            policy.prepare([event for part in parts for event in part])
            for i, part in enumerate(parts):
                if i and reset:
                    policy.reset_sequence()
                for event in part:
                    policy.update(event)
            return policy.priorities

        found, afresh, continued = table(before, after, reset=True), table(after, reset=False), table(before, after, reset=False)
        forgets = create(name, SHAPE).options.get("sequence", False)
        assert np.array_equal(found, afresh if forgets else continued)
        assert not forgets or not np.array_equal(afresh, continued)

    def test_refuses_a_table_of_another_shape(self, name):
        assert create(name, SHAPE).priorities.shape == (3, 8) and create(name, SHAPE).priorities.dtype == np.float32
        with pytest.raises(OptionError, match=r"a table of \(8, 3\) does not fit"):
            create(name, SHAPE, np.zeros((8, 3), np.float32))

    def test_batches_and_missing_probabilities(self, name):
        policy = create(name, SHAPE)
        events = [GateEvent(e.gate, e.ids, e.weights) for e in random_events(12, n_tokens=5)]
        policy.prepare(events)
        for event in events:
            policy.update(event)
        assert np.isfinite(policy.priorities).all()

    def test_options_of_a_calibration_and_of_a_precision(self, name):
        kind = get_policy(name)
        assert kind.profile_options({}) == {}
        assert set(kind.precision_options(0.5)) <= set(kind.defaults)

    def test_unknown_option(self, name):
        with pytest.raises(OptionError, match="unknown option 'colour'"):
            create(name, SHAPE, colour=1)

    def test_a_resized_buffer_keeps_what_was_learned(self, name):
        """As a policy of the new capacity would go on: nothing but the capacity tells them apart once the old is forgotten."""
        before, after = random_events(60), random_events(3000, seed=1)
        policies = [create(name, Shape(3, 8, 2, capacity)) for capacity in (22, 6)]
        for policy in policies:
            policy.prepare(before + after)
            for event in before:
                policy.update(event)
        policies[0].resize(6)
        assert policies[0].shape == policies[1].shape
        for policy in policies:
            for event in after:
                policy.update(event)
        np.testing.assert_allclose(policies[0].priorities, policies[1].priorities, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("n_tokens", [1, 3])
    def test_updates_say_whether_the_table_changed(self, name, n_tokens):
        """What is not published must not differ from what was: an update that returns False has left the table alone."""
        shape = Shape(24, 8, 2, 90)
        policy = create(name, shape)
        events = random_events(24 * 6, shape, n_tokens=n_tokens)
        events = [event for i, event in enumerate(events) if i % 31 != 30]  # llama.cpp may leave out a layer
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
        """20 us for each event at 64 x 256 experts, 8 used; the best of several rounds, because others use the machine too."""
        assert update_cost(name) < 20e-6


def of_sequences(events, sequences):
    return [replace(event, sequences=np.array(sequences, np.int32)) for event in events]


@pytest.mark.parametrize("name", ["lfu", "hobbit"])
@pytest.mark.parametrize("unnamed", [False, True])
def test_a_sequence_takes_its_counts_with_it(name, unnamed):
    """What is left is what a policy would know that had never seen it; with none left, what a new one knows."""
    alone, both = random_events(60, seed=1), random_events(30, n_tokens=3)
    both = of_sequences(both, [2, 0, 2])
    alone = alone if unnamed else of_sequences(alone, [0])  # events of sequence 0 alone need not say so
    policy = create(name, SHAPE, lru=0, fld=0) if name == "hobbit" else create(name, SHAPE)
    without = create(name, SHAPE, **(policy.options if name == "hobbit" else {}))
    for event in alone[:30] + both + alone[30:]:
        policy.update(event)
        if event.sequences is not None and len(event.sequences) == 3:
            event = replace(event, ids=event.ids[1:2], weights=event.weights[1:2], sequences=None)
        without.update(event)
    assert not np.allclose(policy.priorities, without.priorities)
    policy.reset_sequence(1)  # nothing is of it
    policy.reset_sequence(2)
    np.testing.assert_allclose(policy.priorities, without.priorities, rtol=1e-4, atol=1e-4)
    for event in of_sequences(random_events(30, seed=3), [2]):
        policy.update(event)
    policy.reset_sequence(0)
    only = create(name, SHAPE, **(policy.options if name == "hobbit" else {}))
    for event in random_events(30, seed=3):
        only.update(event)
    np.testing.assert_allclose(policy.priorities, only.priorities, rtol=1e-4, atol=1e-4)
    policy.reset_sequence(2)
    assert not policy.priorities.any()


@pytest.mark.parametrize("name", names())
def test_a_server_with_one_conversation_is_like_a_program_with_one(name):
    """Whatever slot it is in."""
    tables = []
    for sequence in (None, 3):
        policy = create(name, SHAPE)
        events = random_events(90)
        policy.prepare(events)
        for i, event in enumerate(events):
            if i % 30 == 0:
                policy.reset_sequence(sequence or 0)
            policy.update(event if sequence is None else replace(event, sequences=np.full(1, sequence, np.int32)))
        tables.append(policy.priorities)
    np.testing.assert_array_equal(*tables)


def test_hobbit_keeps_the_latest_use_of_the_sequences_that_go_on():
    policy = create("hobbit", Shape(1, 4, 1, 2), lru=1.0, lfu=0.0, lhu=0.0, fld=0.0)
    for sequence, expert in ((0, 0), (1, 1), (1, 2), (0, 2), (1, 3)):
        policy.update(GateEvent(0, np.array([[expert]]), np.ones((1, 1), np.float32), sequences=np.array([sequence])))
    assert policy.priorities[0].tolist() == [2, 3, 5, 6]
    policy.reset_sequence(1)
    assert policy.priorities[0].tolist() == [2, 0, 5, 0]


def test_lfu_counts_within_a_sequence():
    policy, model = create("lfu", SHAPE), create("lfu-model", SHAPE)
    for p in (policy, model):
        for event in random_events(30):
            p.update(event)
        p.reset_sequence()
    assert not policy.priorities.any() and model.priorities.sum() == 60


def test_decay_orders_as_the_definition_does():
    policy, counts = create("decay", SHAPE, rate=0.1), np.zeros((3, 8))
    for event in random_events(2000):  # long enough for the increment to be scaled back
        policy.update(event)
        counts[event.gate, event.ids[0]] += 1
        if event.gate == 2:
            counts *= 0.9
    scale = policy.priorities.max() / counts.max()
    assert np.allclose(policy.priorities, counts * scale, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("printed", [False, True])
def test_edgemoe_by_the_formula(printed):
    policy, f, s = create("edgemoe", SHAPE, printed=printed), np.zeros((3, 8)), 3
    for event in random_events(50):
        policy.update(event)
        f[event.gate, event.ids[0]] += 1
        now = (event.gate + 1) % s  # the layer that evicts next
        for i in range(s):
            distance = ((s - i + now) if printed else (i - now + s)) % s
            assert np.allclose(policy.priorities[i], f[i] / (distance or s))


def test_hobbit_by_equation_3():
    w = {"lru": 0.3, "lfu": 0.2, "lhu": 0.4, "fld": 0.1}
    policy = create("hobbit", SHAPE, **w)
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
    policy = create("hobbit", Shape(1, 4, 2, 2), lru=0, lfu=0.3, lhu=0.7, fld=0, t1=0.5, **options)
    for ids, weights, versions in events:
        versions = None if versions is None else np.array([versions], np.uint8)
        policy.update(GateEvent(0, np.array([ids], np.int32), np.array([weights], np.float32), versions=versions))
    return policy.priorities[0]


def test_hobbit_counts_what_was_served_in_high_precision():
    """H is the frequency of high-precision usage (HOBBIT §3.4): a resident expert is served high however unimportant, a low or a skipped one is not."""
    events = [([0, 1], [0.9, 0.1], [0, 0]), ([0, 2], [0.6, 0.4], [0, 1]), ([3, 0], [0.8, 0.2], [0, 2]), ([0, 1], [0.9, 0.1], None)]
    served = np.array([3, 2, 0, 1])  # of 4, 2, 1 and 1 uses; without versions all were high
    np.testing.assert_allclose(hobbit_of(events, actual=True), 0.3 * np.array([4, 2, 1, 1]) + 0.7 * served, rtol=1e-6)


def test_a_lossless_run_counts_what_needs_high_precision():
    """Nothing is served low, and every use is a high one: H then counts the uses that T1 would have wanted so."""
    events = [([0, 1], [0.9, 0.1], None), ([0, 2], [0.6, 0.4], None), ([3, 0], [0.8, 0.2], None)]
    np.testing.assert_allclose(hobbit_of(events), 0.3 * np.array([3, 1, 1, 1]) + 0.7 * np.array([2, 0, 0, 1]), rtol=1e-6)


def test_hobbit_keeps_both_fitted_weights():
    """What a calibration found is what a lossy run uses: no part of it gives way to another formula."""
    kind = get_policy("hobbit")
    fitted = {"hobbit": {"lru": 0.1, "lfu": 0.2, "lhu": 0.6, "fld": 0.1}}
    policy = create("hobbit", SHAPE, profile=fitted, **kind.precision_options(0.7))
    assert {name: policy.options[name] for name in fitted["hobbit"]} == fitted["hobbit"] and policy.options["t1"] == 0.7


def test_unimportance_by_brute_force():
    rng = np.random.default_rng(5)
    weights = rng.dirichlet(np.ones(6), 200).astype(np.float32) * rng.uniform(0.5, 2, (200, 1)).astype(np.float32)
    weights[::3, 2] = weights[::3, 4]
    weights[7] = 0
    for n_scale in (None, 4):
        for row, found in zip(weights, unimportance(weights, n_scale)):
            ranked = sorted(range(6), key=lambda k: (-row[k], k))
            total = sum(float(row[k]) for k in ranked[:n_scale])
            for i, k in enumerate(ranked):
                assert found[k] == pytest.approx(sum(float(row[j]) for j in ranked[:i]) / total if total else 0, abs=1e-6)


def test_thresholds_leave_the_shares_of_the_paper():
    """Of 1,000 uses spread evenly, two thirds and 30 % as on Mixtral; where half of the scores are 0, T1 lies above them."""
    scores = np.random.default_rng(0).permutation(np.linspace(0, 1, 1001))
    t1, t2 = thresholds(scores)
    assert (t1, t2) == pytest.approx((0.67, 0.97), abs=2e-3)
    top_2 = np.concatenate([np.zeros(500), np.linspace(0.5, 1, 500)])
    t1, t2 = thresholds(top_2)
    assert np.mean(top_2 <= t1) == pytest.approx(0.67, abs=2e-3) and np.mean((top_2 > t1) & (top_2 <= t2)) == pytest.approx(0.3, abs=2e-3)
    assert thresholds(np.zeros(9)) == (0, 0) and thresholds(scores, 1, 0) == (1, 1)
    with pytest.raises(OptionError, match="thresholds need scores"):
        thresholds(np.zeros(0))


def test_unimportance_and_miss_cost():
    weights = np.array([[0.1, 0.6, 0.3]])
    assert np.allclose(unimportance(weights), [[0.9, 0.0, 0.6]])
    assert MissCost().decoded(np.array([[0.04, 0.5, 0.2, 0.26]])).tolist() == [[0.0, 1.0, 0.25, 1.0]]
    assert MissCost(0.4, 0.7, 0.5).decoded(np.array([[0.04, 0.5, 0.2, 0.26]])).tolist() == [[0.0, 1.0, 0.0, 0.5]]
    prompt = GateEvent(0, np.array([[0, 1], [0, 2], [0, 3], [2, 3]]), np.full((4, 2), 0.5, np.float32))
    assert MissCost(low=0.5, prompt_low=0.5).of(prompt, 5).tolist() == [1, 0.5, 0.5, 1, 0]  # chosen by 3, 1, 2 and 2 tokens; of equals the first
    for wrong in ({"t1": 0.8, "t2": 0.5}, {"low": 2}, {"prompt_low": -1}):
        with pytest.raises(OptionError, match="a miss costs by"):
            MissCost(**wrong)


def test_quotas_favour_shallow_layers():
    assert quotas(Shape(6, 10, 2, 48), 3) == [10, 10, 10, 6, 6, 6]
    assert quotas(Shape(6, 10, 2, 25), 3) == [10, 10, 5, 0, 0, 0]
    assert quotas(Shape(6, 10, 2, 100), 3) == [10] * 6


class BruteARC:
    """Megiddo and Modha's figure 4, word for word, for one layer."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def replace(self, x):
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p) or not self.t2):
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


@pytest.mark.parametrize("name", ["score", "hobbit", "edgemoe"])
def test_events_that_wait_lose_nothing(name):
    """After a whole token, what a policy knows is the same whether it took the gates one by one or several at once."""
    shape = Shape(24, 8, 2, 90)
    found = []
    for group in (1, 3):
        policy = create(name, shape)
        policy.group = group
        for n_tokens in (1, 4, 1):
            for event in random_events(24 * 5, shape, n_tokens=n_tokens):
                policy.update(event)
        for event in random_events(10, shape, seed=1):  # a text that ends within a token, and within a group
            policy.update(event)
        if name == "score":
            policy.reset_sequence()
        for event in random_events(24, shape, seed=2):
            policy.update(event)
        found.append(policy.priorities.copy())
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_arcs_quotas_follow_the_buffer():
    """Both ways: a smaller buffer leaves the layer as many experts as its new quota, the latest; a larger one lets it keep more."""
    policy = create("arc", Shape(2, 8, 1, 12), shallow=0)

    def use(experts):
        for expert in experts:
            for gate in (0, 1):
                policy.update(GateEvent(gate, np.array([[expert]], np.int32), np.ones((1, 1), np.float32)))
        return [set(np.flatnonzero(row > -1)) for row in policy.priorities]

    assert use([0, 1, 2, 3, 4, 5]) == [{0, 1, 2, 3, 4, 5}] * 2
    policy.resize(4)
    assert policy.quotas == [2, 2] and [set(np.flatnonzero(row > -1)) for row in policy.priorities] == [{4, 5}] * 2
    assert use([6, 7, 6, 7]) == [{6, 7}] * 2
    policy.resize(8)
    assert all({6, 7} < kept and len(kept) == 4 for kept in use([0, 1, 0, 1]))


def test_arc_keeps_what_arc_keeps():
    shape = Shape(1, 12, 1, 5)
    policy, brute = create("arc", shape, shallow=0), BruteARC(5)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        expert = int(rng.zipf(1.5)) % 12 if rng.random() < 0.7 else int(rng.integers(12))
        policy.update(GateEvent(0, np.array([[expert]]), np.ones((1, 1), np.float32)))
        brute.use(expert)
        assert set(np.flatnonzero(policy.priorities[0] >= 0)) == set(brute.t1) | set(brute.t2)


def test_register_ten_lines():
    """The example of docs/guides/strategies.md, as it stands there."""
    import re

    text = (ROOT / "docs" / "guides" / "strategies.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    try:
        exec(example, {})
        policy = create("mru", SHAPE)
        for event in random_events(9):
            policy.update(event)
        assert policy.priorities.any() and "mru" in names(live=True)
    finally:
        POLICIES.pop("mru", None)


@pytest.mark.parametrize("name", ["", "lru", "lfu-model", "on-demand", "none"])
def test_register_refuses(name):
    with pytest.raises(OptionError, match="not taken"):
        register(type("Mine", (Policy,), {"name": name}))
    with pytest.raises(OptionError, match="not a subclass of moeoff.cache.Policy"):
        register(dict)


def test_unknown_policy():
    with pytest.raises(OptionError, match="unknown policy 'fifo'; there are: lru, lru-layer, lfu, .*, lfu-model, "):
        get_policy("fifo")
