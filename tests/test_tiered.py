"""Three places for experts on a simulated clock: by hand, against the other simulators, and what must follow from more memory or a faster link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeoff import BudgetError, OptionError
from moeoff.gate_event import GateEvent
from moeoff.simulate.bandwidths import Bandwidths
from moeoff.simulate.device_experts import DeviceExperts
from moeoff.simulate.simulator import simulate
from moeoff.simulate.tiered import LowVersions, TieredBuffer, replay
from moeoff.simulate.trace import Model, TensorInfo, Trace

# one matrix of 5000 bytes, two layers of four experts; a byte takes 4 ns from disk, 2 over the link, 1 on the CPU, a tenth on the device
ONE = Model("one", 1, tuple(TensorInfo(g, g, 0, 4, 5000) for g in range(2)))
SPEEDS = Bandwidths(disk=0.25, link=0.5, device=10, host=1, device_tokens=2, host_tokens=2, layer_us=3)
DISK, LINK, DEVICE, HOST, LAYER = 20_000, 10_000, 500, 5_000, 3_000
FULL = ONE.full_bytes
SLOT = ONE.tensors[0].slot_bytes


def event(gate, *experts, weights=None):
    """A token for each."""
    ids = np.array([[e] for e in experts], np.int32)
    return GateEvent(gate, ids, np.ones(ids.shape, np.float32) if weights is None else np.array(weights, np.float32))


def took(buffer, *events):
    times = []
    for e in events:
        before = buffer.now
        buffer.compute(e)
        times.append(buffer.now - before)
    return times


def test_centric_by_hand():
    """Disk, link and device one after the other; then the device alone; a second expert takes the place of the first."""
    buffer = TieredBuffer(ONE, SPEEDS, 2 * 5000, 4 * SLOT, "centric")  # a slot in each layer
    e = event(0, 1)
    assert took(buffer, e, event(0, 1)) == [DISK + LINK + DEVICE + LAYER, DEVICE + LAYER]
    assert (e.n_hit, e.n_miss) == (0, 1)
    assert took(buffer, event(0, 2), event(0, 1)) == [DISK + LINK + DEVICE + LAYER, LINK + DEVICE + LAYER]  # 1 is still in host memory
    result = buffer.result()
    assert (result.device, result.host, result.disk, result.uploads) == (1, 1, 2, 3)
    assert (result.up_bytes, result.read_bytes, result.wait_ns) == (15_000, 10_000, 2 * (DISK + LINK) + LINK)


def test_cooperative_by_hand():
    """The CPU computes what is not there, and has sent it by the next time; then both compute at once."""
    buffer = TieredBuffer(ONE, SPEEDS, 2 * 5000, FULL, "cooperative")
    assert took(buffer, event(0, 1)) == [HOST + LAYER]
    assert buffer.result().uploads == 0  # on its way
    assert took(buffer, event(1, 0), event(0, 1)) == [HOST + LAYER, DEVICE + LAYER]
    assert took(buffer, event(0, 1, 3)) == [max(DEVICE, HOST) + LAYER]
    result = buffer.result()
    assert (result.device, result.host, result.disk, result.wait_ns, result.read_bytes) == (2, 3, 0, 0, 0)


def test_a_prefetch_by_hand():
    """What was sent ahead is not waited for; what comes late is waited for by the rest; what is not chosen is given up."""
    buffer = TieredBuffer(ONE, SPEEDS, 4 * 5000, FULL, "centric")
    assert took(buffer, event(0, 0)) == [LINK + DEVICE + LAYER]
    assert buffer.prefetch(1, [2, 3]) == 2
    assert took(buffer, event(0, 0)) == [DEVICE + LAYER]
    assert took(buffer, event(1, 2)) == [LINK - DEVICE - LAYER + DEVICE + LAYER]
    assert buffer.result().uploads == 2 and buffer.residency().tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert buffer.prefetch(1, [3], limit=0) == 0


def test_prompts_by_hand():
    """Four tokens of one expert take a processor as long as two; more experts than slots are the CPU's."""
    buffer = TieredBuffer(ONE, SPEEDS, 2 * 5000, FULL, "centric")
    assert took(buffer, event(0, 1, 1, 1, 1)) == [LINK + 2 * DEVICE + LAYER]
    assert took(buffer, event(0, 0, 1, 2)) == [3 * HOST + LAYER]
    assert (buffer.result().n_tokens, buffer.result().decoded, buffer.result().decode_ns) == (7, 0, 0)
    small = TieredBuffer(ONE, SPEEDS, 2 * 5000, 2 * SLOT, "cpu")  # two slices at a time, four are needed
    assert took(small, event(0, 0, 1, 2, 3)) == [4 * DISK + HOST + LAYER]


def test_smaller_copies():
    """An absent expert of little weight comes as a copy or not at all, and is not kept; one that is there serves as it is."""
    two = replace(ONE, n_used=2)
    buffer = TieredBuffer(two, SPEEDS, 8 * 5000, FULL, "centric", low=LowVersions(0.6, 0.9, 0.25))
    pair = GateEvent(0, np.array([[0, 1]], np.int32), np.array([[0.8, 0.2]], np.float32))
    assert took(buffer, pair) == [LINK + LINK // 4 + DEVICE // 4 + LAYER]
    assert took(buffer, pair) == [LINK // 4 + DEVICE // 4 + LAYER]  # the device has computed with the other meanwhile
    assert took(buffer, GateEvent(0, pair.ids, np.array([[0.95, 0.05]], np.float32))) == [DEVICE + LAYER]
    result = buffer.result()
    assert (result.low, result.skipped, result.uploads, result.up_bytes) == (2, 1, 3, 7500)
    with pytest.raises(OptionError, match="smaller copies"):
        TieredBuffer(two, SPEEDS, 8 * 5000, FULL - 1, "centric", low=LowVersions(0.6, 0.9, 0.25))


MODEL = Model("random", 2, tuple(TensorInfo(g, g, m, 16, 50_000 + 16_000 * (m == 3)) for g in range(3) for m in (2, 1, 3)))
FAST = Bandwidths(layer_us=2)


def random_trace(n=600, seed=0):
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(16, 0.4), 3)
    events = []
    for i in range(n):
        ids = rng.choice(16, (1, 2), replace=False, p=popular[i % 3] * 0.9 + 0.1 / 16).astype(np.int32)
        events.append(GateEvent(i % 3, ids, rng.random((1, 2)).astype(np.float32)))
    return Trace(MODEL, events, np.arange(n) == 0)


@pytest.mark.parametrize("policy", ["lru", "score", "lru-layer"])
def test_without_a_device_it_is_the_simulator(policy):
    """With slices of one size: what is in memory does not depend on how long reads take."""
    even = replace(MODEL, tensors=tuple(replace(t, nbytes=50_000) for t in MODEL.tensors))
    trace = replace(random_trace(), model=even)
    arena = even.full_bytes // 3
    buffer_hits = []
    expected = simulate(trace, policy, arena, events=True)
    for speeds in (FAST, replace(FAST, disk=0.1)):
        result = replay(trace, policy, speeds, 0, arena, "cpu")
        buffer_hits.append((result.host, result.read_bytes))
        assert result.device == result.uploads == 0 and result.read_bytes == expected.bytes_read
    assert buffer_hits[0] == buffer_hits[1]


@pytest.mark.parametrize("policy", ["lru", "score"])
@pytest.mark.parametrize("mode", ["cooperative", "centric"])
def test_more_is_never_slower(mode, policy):
    """More of the device, of host memory, of the link; and the counts add up."""
    trace = random_trace()
    base = {"vram_bytes": MODEL.full_bytes // 3, "arena_bytes": MODEL.full_bytes // 2, "speeds": FAST}

    def run(**change):
        result = replay(trace, policy, mode=mode, **base | change)
        assert result.device + result.host + result.disk == 2 * 600 and 0 <= result.wait_ns < result.ns
        return result

    usual = run()
    assert run() == usual
    for change in ({"vram_bytes": MODEL.full_bytes // 2}, {"arena_bytes": MODEL.full_bytes}, {"speeds": replace(FAST, link=4 * FAST.link)},
                   {"speeds": replace(FAST, disk=4 * FAST.disk)}):  # fmt: skip
        assert run(**change).ns < 1.002 * usual.ns
    everything = run(vram_bytes=MODEL.full_bytes, arena_bytes=MODEL.full_bytes)
    assert everything.read_bytes == 0 and everything.to_dict()["on_device"] > 0.9 and everything.ns < 0.8 * usual.ns


def test_the_device_pays_where_its_link_is_fast():
    """Cooperative beats the CPU alone in every case; centric only where the link is faster than the CPU computes."""
    trace = random_trace()
    share, full = MODEL.full_bytes // 2, MODEL.full_bytes

    def speed(mode, speeds):
        return replay(trace, "score", speeds, share, full, mode).decode_tps

    slow = replace(FAST, link=1.0)
    assert speed("cooperative", FAST) > speed("cpu", FAST) and speed("cooperative", slow) > speed("cpu", slow)
    assert speed("centric", slow) < speed("cpu", slow) and speed("centric", replace(FAST, link=400)) > speed("cpu", FAST)


def test_a_device_and_memory_together_read_less():
    """What the device holds leaves host memory first: the two add up."""
    trace = random_trace(1200)
    third = MODEL.full_bytes // 3
    alone = replay(trace, "score", FAST, 0, third, "cpu")
    both = replay(trace, "score", FAST, third, third, "cooperative")
    assert both.read_bytes < 0.6 * alone.read_bytes


def test_slots_by_brute_force():
    """moeoff-device-slots.cpp's rules, one expert at a time."""
    rng = np.random.default_rng(2)
    slots, heat, last, step = DeviceExperts(1, 8, 3), [0.0] * 8, [0] * 8, 0
    held: list[int] = []
    priority = rng.integers(0, 3, 8).astype(np.float32)

    def warm(e):
        return heat[e] * 2 ** (-(step - last[e]) / 180)

    for _ in range(400):
        step += 1
        chosen = rng.choice(8, 2, replace=False, p=np.array([8, 7, 6, 5, 4, 3, 2, 1]) / 36)
        if rng.random() < 0.1:
            priority = rng.integers(0, 3, 8).astype(np.float32)
        for e in chosen:
            heat[e], last[e] = warm(e) + 1, step
        slots.use(0, chosen)
        needed = np.isin(np.arange(8), chosen)
        for e in chosen.tolist():
            if e in held:
                continue
            victim = min((h for h in held if not needed[h]), key=lambda h: (priority[h], warm(h), h), default=None) if len(held) == 3 else None
            gives_way = victim is not None and (priority[e] > priority[victim] or (priority[e] == priority[victim] and warm(e) > warm(victim) + 1))
            expected = len(held) < 3 or gives_way
            assert slots.take(e, priority, needed, forced=False) == expected
            if expected:
                held = [h for h in held if h != victim] + [e]
                slots.finish(e)
        assert sorted(np.flatnonzero(slots.served)) == sorted(held)


@pytest.mark.parametrize("change, words", [({"link": 0}, "link of a simulated machine"), ({"layer_us": -1}, "layer_us of a simulated machine")])
def test_speeds_are_positive(change, words):
    with pytest.raises(OptionError, match=words):
        replace(SPEEDS, **change)


def test_refused():
    with pytest.raises(BudgetError, match="holds fewer of them than a gate selects"):
        TieredBuffer(MODEL, FAST, 100_000, MODEL.full_bytes, "centric")
    with pytest.raises(BudgetError, match="no room for an expert of each layer"):
        TieredBuffer(MODEL, FAST, 100_000, MODEL.full_bytes, "cooperative")
    with pytest.raises(OptionError, match="one of cooperative, centric, cpu"):
        TieredBuffer(MODEL, FAST, 100_000, MODEL.full_bytes, "best")
