"""Two versions of every expert: the rule against a brute-force one, the kernel against ggml's own on the version that was decided,
and whole runs that replay bit for bit and do not depend on timing."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ggml_api import F32, I32, Backend, Context, cpu_buffer_type, quantized, read, write
from hypothesis import given
from hypothesis import strategies as st
from logits import assert_bit_equal, greedy_logits
from test_kernel import N_COLS, N_EXPERT, N_ROWS, N_USED, Plain

import moeoff
from moeoff import OptionError, hooks
from moeoff.buffer import ExpertBuffer
from moeoff.cache import Event, Shape, create
from moeoff.convert import convert
from moeoff.errors import MoeoffError
from moeoff.memory import slot_bytes
from moeoff.plan import Pools
from moeoff.precision import Precision
from moeoff.predict import Prediction
from moeoff.prefetch import Prefetcher
from moeoff.quantize import type_from_name
from moeoff.trace import Trace

HIGH, LOW, SKIP = hooks.HIGH, hooks.LOW, hooks.SKIP
Q8_0, Q4_0, Q4_K, Q2_K, F16 = (type_from_name(name) for name in ("Q8_0", "Q4_0", "Q4_K", "Q2_K", "F16"))
MATRICES = ("up", "gate")


@pytest.fixture
def backend():
    backend = Backend()
    yield backend
    backend.close()


class Block:
    """A MoE block of two matrices in a file, each expert in two versions, and the same in memory for ggml's own kernel.

    Args:
        n_slots, n_low: the arenas in slots of the largest slice of their version.
    """

    def __init__(self, path, rng, high=Q8_0, low=Q4_0, n_slots=6, n_low=6, **options):
        self.types = (high, low)
        self._context = Context()
        self.buffer = ExpertBuffer(**options)
        self.tensors, self.plain, sources = [], [], {HIGH: [], LOW: []}
        with open(path, "wb") as file:
            for _ in MATRICES:
                weights = rng.standard_normal((N_EXPERT, N_ROWS, N_COLS), np.float32)
                data = [quantized(weights, type) for type in self.types]
                self.plain.append([Plain(d, type) for d, type in zip(data, self.types)])
                for version in (HIGH, LOW):
                    sources[version].append([])
                    for row in data[version]:
                        file.write(b"\xff" * 96)
                        sources[version][-1].append(hooks.Source(0, self.types[version], file.tell(), row.nbytes))
                        file.write(row.tobytes())
        self.tensors = [self._context.tensor(high, N_COLS, N_ROWS, N_EXPERT, name=f"blk.0.ffn_{m}_exps.weight") for m in MATRICES]
        with self.buffer.loading():
            self._context.allocate(hooks.buffer_type())
        assert hooks.add_file(self.buffer.handle, str(path).encode()) == 0
        for i in range(len(MATRICES)):
            self.buffer.set_sources(i, sources[HIGH][i])
            self.buffer.set_low_sources(i, sources[LOW][i])
        self.slots = [slot_bytes(s[0][0].nbytes) for s in (sources[HIGH], sources[LOW])]
        self.buffer.start(n_slots * self.slots[HIGH], n_low * self.slots[LOW])
        self.events = []
        self.buffer.set_gate_callback(self.events.append)

    def close(self):
        stats = self.buffer.stats()
        assert stats.low_arena_committed <= stats.low_arena_bytes
        assert stats.arena_committed - stats.low_arena_committed <= stats.arena_bytes - stats.low_arena_bytes
        assert stats.arena_peak <= stats.arena_bytes
        self.buffer.close()
        self._context.close()
        for pair in self.plain:
            for plain in pair:
                plain.__exit__()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.close()

    def resident(self, low: bool) -> np.ndarray:
        """[n_expert] bool: all matrices are there."""
        mask = sum(1 << hooks.MATRICES.index(m) for m in MATRICES)
        return self.buffer.residency(low=low)[0] == mask


class Graph:
    """One graph's gate node and matrix ops, for some number of tokens."""

    def __init__(self, block: Block, n_tokens: int):
        self.block, self.n_tokens = block, n_tokens
        n = len(MATRICES)
        self._context = Context(16 + 3 * n, 3 + 3 * n)
        self._rows = self._context.tensor(F32, N_COLS, 1, n_tokens)
        self._ids = self._context.tensor(I32, N_USED, n_tokens)
        self._weights = self._context.tensor(F32, 1, N_USED, n_tokens)
        node = self._context.gate_node(block.tensors[0], self._ids, self._weights)
        self._outs = [self._context.mul_mat_id(t, self._rows, self._ids) for t in block.tensors]
        self._plain_outs = [[self._context.mul_mat_id(p.tensor, self._rows, self._ids) for p in pair] for pair in block.plain]
        self._gate, self._ops = self._context.graph(node), self._context.graph(*self._outs)
        self._plain = self._context.graph(*[out for pair in self._plain_outs for out in pair])
        self._context.allocate(cpu_buffer_type())

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self._context.close()

    def choose(self, rng) -> None:
        """Random rows, experts (some much more popular than others) and weights (some of them equal)."""
        write(self._rows, rng.standard_normal((self.n_tokens, 1, N_COLS), np.float32))
        scores = rng.gumbel(size=(self.n_tokens, N_EXPERT)) + rng.exponential(1.5, N_EXPERT)
        self.ids = np.argsort(-scores, axis=1)[:, :N_USED].astype(np.int32)
        self.weights = np.sort(rng.dirichlet(np.ones(N_USED), self.n_tokens).astype(np.float32))[:, ::-1].copy()
        if rng.random() < 0.3:
            self.weights[:, 1:] = self.weights[:, 1:2]
        if rng.random() < 0.5:  # a router need not list the largest first
            self.weights = np.ascontiguousarray(self.weights[:, ::-1])
        write(self._ids, self.ids)
        write(self._weights, self.weights)

    def speak(self, backend) -> np.ndarray | None:
        """Runs the gate node; the event's versions."""
        assert backend.compute(self._gate, 2) == 0
        self.block.buffer.drain()
        self.block.buffer.check()
        event = self.block.events[-1]
        np.testing.assert_array_equal(event.ids, self.ids)
        return event.versions

    def compute(self, backend, versions: np.ndarray, n_threads: int = 2) -> None:
        """Runs the matrix ops: each row is what ggml's own kernel gives for the version that was decided."""
        assert backend.compute(self._plain, n_threads) == 0 and backend.compute(self._ops, n_threads) == 0
        shape = (self.n_tokens, N_USED, N_ROWS)
        for out, pair in zip(self._outs, self._plain_outs):
            expected = np.zeros(shape, np.uint32)
            for version in (HIGH, LOW):
                expected[versions == version] = read(pair[version], shape)[versions == version]
            np.testing.assert_array_equal(read(out, shape), expected)


def decide(graph: Graph, t1, t2, share, blind) -> np.ndarray:
    """The rule in numpy, from what is resident now: [n_tokens, n_used]."""
    t1, t2, share = np.float32(t1), np.float32(t2), float(np.float32(share))
    ids, wish = graph.ids, np.full(N_EXPERT, HIGH)
    if len(ids) == 1:
        order = sorted(range(N_USED), key=lambda k: (-graph.weights[0, k], k))
        total = np.float32(0)
        for k in order:
            total = np.float32(total + graph.weights[0, k])
        before = np.float32(0)
        for rank, k in enumerate(order):
            s = np.float32(before / total)
            wish[ids[0, k]] = HIGH if s <= t1 or rank == 0 else LOW if s <= t2 else SKIP
            before = np.float32(before + graph.weights[0, k])
    else:
        experts, counts = np.unique(ids, return_counts=True)
        unpopular = sorted(zip(counts, -experts))[: math.floor(share * len(experts))]
        wish[[-e for _, e in unpopular]] = LOW
    if not blind:
        high, low = graph.block.resident(False), graph.block.resident(True)
        wish = np.where(high, HIGH, np.where((wish == SKIP) & low, LOW, wish))
    return wish[ids]


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("types", [(Q8_0, Q4_0), (Q4_K, Q2_K), (F16, Q8_0)], ids=["Q8_0-Q4_0", "Q4_K-Q2_K", "F16-Q8_0"])
def test_rule_and_kernel(types, blind, tmp_path, backend):
    """Decisions equal a brute-force rule's, and results the stock kernel's on the versions decided, in arenas that evict all the time."""
    rng = np.random.default_rng(1)
    seen = np.zeros(3, int)
    with Block(tmp_path / "experts", rng, *types, n_slots=8, n_low=6) as block:
        for n_tokens in (1, 2, 9):
            with Graph(block, n_tokens) as graph:
                for i in range(400 if n_tokens == 1 else 60):
                    t1, t2 = sorted(rng.choice([0, 0.2, 0.5, 0.8, 1], 2))
                    share = rng.choice([0, 0.25, 0.4, 1])
                    block.buffer.set_rule(t1, t2, share, blind=blind)
                    graph.choose(rng)
                    before = block.buffer.stats()
                    expected = decide(graph, t1, t2, share, blind)
                    versions = graph.speak(backend)
                    if versions is None:
                        assert t1 == 1 and share == 0
                        versions = np.full_like(graph.ids, HIGH, np.uint8)
                    np.testing.assert_array_equal(versions, expected)
                    graph.compute(backend, versions, n_threads=1 + i % 3)
                    after = block.buffer.stats()
                    assert after.served_low - before.served_low == (versions == LOW).sum()
                    assert after.skipped - before.skipped == (versions == SKIP).sum()
                    assert after.expert_uses - before.expert_uses == versions.size
                    seen += np.bincount(versions.ravel(), minlength=3)
        stats = block.buffer.stats()
        assert (seen > 20).all() and stats.evictions > 50 and 0 < stats.low_bytes_read < stats.bytes_read


def test_lossless_by_default(tmp_path, backend):
    """With low versions there, but no rule, events have no decisions and everything is served high."""
    rng = np.random.default_rng(2)
    with Block(tmp_path / "experts", rng) as block, Graph(block, 5) as graph:
        for _ in range(20):
            graph.choose(rng)
            assert graph.speak(backend) is None
            graph.compute(backend, np.zeros_like(graph.ids))
        stats = block.buffer.stats()
        assert stats.served_low == stats.skipped == stats.low_bytes_read == stats.low_arena_committed == 0


def test_forced_decisions(tmp_path, backend):
    """Recorded decisions beat rule and residency; when they do not suffice for an event, the rule is back."""
    rng = np.random.default_rng(3)
    with Block(tmp_path / "experts", rng) as block, Graph(block, 1) as one, Graph(block, 4) as many:
        for graph in (one, many, one):
            for _ in range(10):
                graph.choose(rng)
                version_of = rng.integers(0, 3, N_EXPERT).astype(np.uint8)
                assert block.buffer.force(version_of[graph.ids].ravel()) == graph.ids.size
                np.testing.assert_array_equal(graph.speak(backend), version_of[graph.ids])
                assert block.buffer.force() == 0
                graph.compute(backend, version_of[graph.ids])
        assert block.buffer.force(bytes([SKIP])) == 1
        many.choose(rng)
        versions = many.speak(backend)
        assert block.buffer.force() == 0
        assert versions is None or not versions.any()
        many.compute(backend, np.zeros_like(many.ids))
        with pytest.raises(OptionError, match="decision 1 is 3"):
            block.buffer.force(bytes([0, 3]))


def test_two_graphs_in_the_same_block(tmp_path, backend):
    """Each graph's ops get what its own gate event decided, though another event of the same gate came between."""
    rng = np.random.default_rng(4)
    with Block(tmp_path / "experts", rng, n_slots=16, n_low=16) as block, Graph(block, 3) as a, Graph(block, 3) as b:
        different = 0
        for _ in range(10):
            a.choose(rng)
            b.choose(rng)
            version_of = rng.integers(0, 3, (2, N_EXPERT)).astype(np.uint8)
            block.buffer.force(version_of[0][a.ids].ravel())
            block.buffer.force(version_of[1][b.ids].ravel())
            first, second = a.speak(backend), b.speak(backend)
            different += len(set(a.ids.ravel()) & set(b.ids.ravel()))
            a.compute(backend, first)
            b.compute(backend, second)
        assert different > 10


def test_prefetch_by_version(tmp_path, backend):
    """A prefetch counts as useful if the gate chose that version, and is given up if it chose the other."""
    rng = np.random.default_rng(5)
    with Block(tmp_path / "experts", rng, n_slots=16, n_low=16) as block, Graph(block, 1) as graph:
        buffer = block.buffer

        def settle():
            for _ in range(2000):
                if buffer.stats().reads == settle.reads:
                    return
                ctypes.CDLL(None).usleep(1000)
            raise AssertionError("the lanes do not come to rest")

        graph.choose(rng)
        settle.reads = 2 * N_USED
        assert buffer.prefetch(0, graph.ids[0].tolist(), low=True) == 2 * N_USED
        settle()
        assert block.resident(True).sum() == N_USED and not block.resident(False).any()
        buffer.force(np.full(N_USED, LOW, np.uint8))
        graph.compute(backend, graph.speak(backend))
        stats = buffer.stats()
        assert (stats.prefetch_issued, stats.prefetch_useful, stats.demand_misses, stats.reads) == (2 * N_USED, 2 * N_USED, 0, 2 * N_USED)

        buffer.clear()
        settle.reads = 4 * N_USED
        assert buffer.prefetch(0, graph.ids[0].tolist()) == 2 * N_USED
        settle()
        buffer.force(np.full(N_USED, LOW, np.uint8))  # the other version
        graph.compute(backend, graph.speak(backend))
        stats = buffer.stats()
        assert (stats.prefetch_useful, stats.demand_misses) == (2 * N_USED, 2 * N_USED)
        assert block.resident(False).sum() == N_USED  # passed over, but resident all the same

        buffer.prefetch_cancel()
        assert buffer.prefetch(0, range(N_EXPERT), low=True) == 2 * (N_EXPERT - N_USED)  # the others are served high


def test_low_versions_of_resident_experts_go_first(tmp_path, backend):
    """What is resident in high precision does not need its low version: of a full low pool that one is evicted."""
    rng = np.random.default_rng(6)
    with Block(tmp_path / "experts", rng, n_slots=16, n_low=2 * N_USED) as block, Graph(block, 1) as graph:
        buffer = block.buffer

        def use(ids, version):
            graph.ids = np.array([ids], np.int32)
            write(graph._ids, graph.ids)
            buffer.force(np.full(N_USED, version, np.uint8))
            graph.compute(backend, graph.speak(backend))

        graph.choose(rng)
        use([0, 1, 2], LOW)
        use([2, 3, 4], HIGH)  # 2 was used last
        assert block.resident(True).nonzero()[0].tolist() == [0, 1, 2]
        use([0, 1, 5], LOW)
        assert block.resident(True).nonzero()[0].tolist() == [0, 1, 5]


def test_native_refusals(tmp_path):
    with Block(tmp_path / "experts", np.random.default_rng(7), n_slots=4, n_low=4) as block:
        buffer = block.buffer
        for rule in [(0.5, 0.4), (-0.1, 1), (0, 1.1), (0, 1, 1.5), (math.nan, 1)]:
            with pytest.raises(OptionError, match="0 <= t1 <= t2 <= 1"):
                buffer.set_rule(*rule)
        assert buffer.low_arena_floor == 2 * block.slots[LOW] and buffer.low_arena_full == len(MATRICES) * N_EXPERT * block.slots[LOW]
        buffer.set_rule(0, 1)
        for low in (0, 2 * block.slots[LOW] - 1):
            with pytest.raises(MoeoffError, match="for low versions is below the floor"):
                buffer.set_arena_bytes(4 * block.slots[HIGH], low)
        buffer.set_rule(0, 0)  # skips, and needs no low versions
        buffer.set_arena_bytes(4 * block.slots[HIGH], 0)
        with pytest.raises(OptionError, match="needs low versions"):
            buffer.set_rule(0, 1)
        with pytest.raises(OptionError, match="no such versions"):
            buffer.prefetch(0, [0], low=True)


@given(*[st.integers(1, 1 << 30)] * 2, *[st.integers(0, 1 << 30)] * 3, st.floats(0.01, 0.99))
def test_pools_share_the_arena(floor, more, low_floor, low_more, extra, share):
    pools = Pools(floor, floor + more, low_floor, low_floor + low_more, share)
    arena = floor + low_floor + extra
    high, low = pools.split(arena)
    assert high + low <= arena and floor <= high <= pools.full and low_floor <= low <= pools.low_full
    if arena >= pools.full + pools.low_full:
        assert (high, low) == (pools.full, pools.low_full)
    elif high < pools.full and low < pools.low_full:
        assert high + low == arena


def test_the_penalty_enters_hobbits_priorities():
    """With B_l/B_h a use counts by what its miss would have cost (HOBBIT §3.4): the high ones 1, the low ones B_l/B_h."""
    policy = create("hobbit", Shape(1, 4, 2, 2), lru=0, lfu=0.45, lhu=0.45, fld=0, t1=0.5, low_cost=0.3)
    for ids, weights in (([0, 1], [0.9, 0.1]), ([0, 2], [0.6, 0.4]), ([3, 0], [0.8, 0.2])):
        policy.update(Event(0, np.array([ids], np.int32), np.array([weights], np.float32)))
    both = 0.45 + 0.45  # 0 is first twice and second once, 3 first, 1 and 2 second: unimportance 0 or above 0.5
    np.testing.assert_allclose(policy.priorities[0], both * np.array([2.3, 0.3, 0.3, 1.0]), rtol=1e-6)


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
        return hooks.Stats()


def test_prefetches_by_predicted_weight():
    """Predicted scores stand in for weights: what the rule would serve low is read low, what it would skip is not read."""
    scores = np.array([[0.0, 0.4, 0.1, 0.3, 0.2, 0.0, 0.0, 0.0]], np.float32)  # unimportance 0, 0.4, 0.7, 0.9
    rule = Precision(0.5, 0.8, 0.5, "Q4_0")
    lossy = [(1, [1, 3], False, 2), (1, [4, 2], False, 0), (1, [4], True, 1)]  # 4 and 2 are protected where they are resident
    for precision, expected in ((rule, lossy), (Precision(), [(1, [1, 3, 4, 2], False, 4)])):
        buffer = Recorder()
        prefetcher = Prefetcher(buffer, SimpleNamespace(), n_used=4, n_lanes=1, judged=False, rule=precision)
        prefetcher._credit = 8.0
        prefetcher._act([Prediction(1, scores)], single=True)
        assert buffer.prefetched == expected and prefetcher._credit == 8 - sum(n for *_, n in expected)
    buffer = Recorder()
    batch = np.array([[9, 8, 1, 0], [9, 8, 0, 1], [9, 1, 8, 0], [9, 1, 0, 8]], np.float32)
    Prefetcher(buffer, SimpleNamespace(), n_used=2, n_lanes=1, judged=False, rule=rule)._act([Prediction(0, batch)], single=False)
    assert buffer.prefetched == [(0, [0, 1], False, 2), (0, [2, 3], True, 2)]  # chosen by 4, 2, 1, 1 tokens


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"t1": 0.9, "t2": 0.5, "tier": "Q4_0"}, "t1 <= t2"),
        ({"t1": -1}, "t1"),
        ({"t1": math.nan}, "numbers"),
        ({"prefill_low_share": 2, "tier": "Q4_0"}, "between 0 and 1"),
        ({"low_share": 0}, "between 0 and 1"),
        ({"t1": 0.5}, "needs the name of a tier"),
    ],
)
def test_bad_precision(fields, words):
    with pytest.raises(OptionError, match=words):
        Precision(**fields)


# --- a whole model ---

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 2
OPTIONS = {"n_ctx": 64, "n_threads": 2, "logits_all": True}
LOSSY = Precision(0.4, 0.8, 0.4, "Q4_0")


@pytest.fixture(scope="module")
def model(demo, tmp_path_factory) -> str:
    """The demo model (Q8_0) with a companion in Q4_0."""
    path = tmp_path_factory.mktemp("precision") / "model.gguf"
    shutil.copy(demo, path)
    convert(path, tiers="Q4_0")
    return str(path)


def logits(model, n=16, prompt=PROMPT, **options):
    with moeoff.Llama(model, **OPTIONS | {"expert_memory": "1M"} | options) as llm:
        out = greedy_logits(llm, prompt, n)
        return out, llm.stats()


def test_forced_low_is_the_low_model(model):
    """All experts forced low: bit for bit the model that runs with that tier alone. All high: the model itself."""
    tier, _ = logits(model, tier="Q4_0")
    own, _ = logits(model)
    assert (tier != own).any()
    n_uses = 12 * 4 * (len(PROMPT) + 16)
    for version, expected in ((LOW, tier), (HIGH, own)):
        with moeoff.Llama(model, expert_memory="1M", precision=Precision(tier="q4_0"), **OPTIONS) as llm:
            llm.expert_buffer.force(np.full(n_uses, version, np.uint8))
            assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)
            assert llm.expert_buffer.force() == 0
            assert llm.stats().served_low == (n_uses if version == LOW else 0)


def test_whole_prefill_low(model):
    """A share of 1 computes a prompt as the low tier would; decoding stays lossless."""
    tier, _ = logits(model, n=0, tier="Q4_0")
    low, stats = logits(model, n=0, precision=Precision(prefill_low_share=1, tier="Q4_0"))
    assert_bit_equal(low, tier)
    assert stats.served_low == stats.expert_uses == 12 * 4 * len(PROMPT)


def test_lossless_with_a_low_pool(model):
    own, _ = logits(model)
    with_pool, stats = logits(model, precision=Precision(tier="Q4_0"))
    assert_bit_equal(with_pool, own)
    assert stats.served_low == stats.skipped == 0 and stats.low_arena_bytes > 0 and stats.receipt == ""


@pytest.mark.parametrize("strategy", ["lru", "hobbit"])
def test_replay_is_bit_identical(strategy, model, tmp_path):
    """What a lossy run computed comes back from its trace, whatever is resident, prefetched or asked by the rule."""
    trace = tmp_path / "trace"
    recorded, stats = logits(model, precision=LOSSY, trace=trace, strategy=strategy)
    assert stats.served_low > 50 and stats.skipped > 10 and "low precision" in stats.receipt
    versions = np.frombuffer(Trace.read(trace).decisions(), np.uint8)
    assert np.bincount(versions).tolist() == [stats.expert_uses - stats.served_low - stats.skipped, stats.served_low, stats.skipped]
    elsewhere, _ = logits(model, precision=LOSSY, expert_memory="3M")
    assert (elsewhere != recorded).any()  # decisions depend on what is resident
    for memory, precision in (("700K", LOSSY), ("3M", LOSSY), ("12M", Precision(tier="Q4_0"))):
        again, replayed = logits(model, precision=precision, replay=trace, expert_memory=memory, strategy=strategy, n_lanes=1)
        assert_bit_equal(again, recorded)
        assert (replayed.served_low, replayed.skipped) == (stats.served_low, stats.skipped)


def test_a_trace_tells_low_reads(model, tmp_path):
    """Every read of a lossy run: which version it was for, as its size and the counters say too."""
    with moeoff.Llama(model, **OPTIONS, expert_memory="1M", precision=LOSSY, trace=tmp_path / "trace") as llm:
        greedy_logits(llm, PROMPT, 16)
        stats = settled(llm)
    trace = Trace.read(tmp_path / "trace")
    done = trace.reads[trace.reads["result"] == 0]
    low = done["version"] == LOW
    assert 20 < low.sum() < len(done) - 20 and trace.reads_lost == 0
    assert done["nbytes"][low].sum() == stats.low_bytes_read == trace.notes[-1]["low_bytes_read"]
    assert done["nbytes"].sum() == stats.bytes_read
    whole = np.array([t.nbytes for t in trace.model.tensors])[done["tensor"]]  # Q8_0: 34 bytes for 32 values, Q4_0: 18
    np.testing.assert_array_equal(done["nbytes"], np.where(low, whole * 18 // 34, whole))


def test_simulate_counts_low_reads(model, tmp_path, moeoff_command):
    """Per trace, and not at all where there are none."""
    for precision, name in ((LOSSY, "lossy"), (Precision(), "lossless")):
        logits(model, precision=precision, trace=tmp_path / name)
    lossy = Trace.read(tmp_path / "lossy").reads
    n_low = int(((lossy["version"] == LOW) & (lossy["result"] == 0)).sum())
    ask = ("--memory", "50%")
    assert n_low > 20 and f" reads ({n_low:,} of low versions), " in moeoff_command("simulate", str(tmp_path / "lossy"), *ask).stdout
    assert json.loads(moeoff_command("simulate", str(tmp_path / "lossy"), *ask, "--json").stdout)["recorded_reads"]["low"] == n_low
    assert "low versions" not in moeoff_command("simulate", str(tmp_path / "lossless"), *ask).stdout


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
    """Same text for any budget, number of lanes, policy or load of the machine; without the flag it is not."""
    expected, stats = logits(model, precision=LOSSY, deterministic=True)
    assert stats.served_low > 50 and stats.skipped > 10
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for options in ({"expert_memory": "700K", "n_lanes": 1}, {"expert_memory": "4M", "strategy": "hobbit"}, {"expert_memory": "12M", "n_lanes": 8}, {"n_threads": 1}):
            again, other = logits(model, precision=LOSSY, deterministic=True, **options)
            assert_bit_equal(again, expected)
            assert (other.served_low, other.skipped) == (stats.served_low, stats.skipped)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_more_precision_is_closer(model):
    """Thresholds that give up less change the logits less, and skipping everything that may be skipped most."""
    own, _ = logits(model, n=0)
    with moeoff.Llama(model, expert_memory="1M", precision=LOSSY, deterministic=True, **OPTIONS) as llm:
        distance = []
        for t1, t2 in ((1, 1), (0.8, 1), (0, 1), (0, 0)):
            llm.expert_buffer.set_rule(t1, t2, blind=True)
            llm.reset()
            for token in PROMPT:
                llm.eval([token])
            distance.append(float(np.abs(llm.scores[: len(PROMPT)] - own).mean()))
    assert distance[1] < distance[2] < distance[3]
    assert distance[0] < distance[1]


def settled(llm) -> hooks.Stats:
    """The counters once nothing is read any more."""
    buffer, last = llm.expert_buffer, None
    while last is None or last.reads < buffer.stats().reads:
        last = buffer.stats()
        time.sleep(0.3)
    return last


@pytest.fixture
def remembered(model, tmp_path, monkeypatch):
    """After a lossy run with room for everything: options of another, what was resident in both versions, and the warm start's file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = OPTIONS | {"warm": True, "precision": LOSSY, "deterministic": True}
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        expected = greedy_logits(llm, PROMPT, 16)
        residency = [llm.expert_buffer.residency(low=low) for low in (False, True)]
        assert llm.stats().low_bytes_read > 0
    (path,) = (tmp_path / "moeoff" / "warm").glob("*.npz")
    return options, residency, path, expected


def test_warm_start_with_low_versions(model, remembered):
    options, (high, low), _, expected = remembered
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        before = settled(llm)
        np.testing.assert_array_equal(llm.expert_buffer.residency(), high)
        np.testing.assert_array_equal(llm.expert_buffer.residency(low=True), low)
        assert before.low_bytes_read > 0 and before.prefetch_issued == 0
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)
        stats = llm.stats()
        assert stats.served_low > 50 and stats.demand_misses == 0 and stats.bytes_read == before.bytes_read


def test_warm_start_fills_smaller_arenas(model, remembered):
    """As far as each arena goes, and no further: nothing that was preloaded is evicted for something else of it."""
    options, (high, low), _, expected = remembered
    with moeoff.Llama(model, expert_memory="3M", **options | {"precision": replace(LOSSY, low_share=0.2)}) as llm:
        stats, buffer = settled(llm), llm.expert_buffer
        high_arena = stats.arena_bytes - stats.low_arena_bytes
        assert 0.9 * stats.low_arena_bytes < stats.low_arena_committed <= stats.low_arena_bytes
        assert 0.9 * high_arena < stats.arena_committed - stats.low_arena_committed <= high_arena
        assert stats.evictions == 0 and stats.reads == stats.resident_slices
        for now, then in ((buffer.residency(), high), (buffer.residency(low=True), low)):
            assert now.any() and not (now & ~then).any() and (now != then).any()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)


def test_warm_start_between_lossless_and_lossy(model, remembered):
    """A run without low versions takes the high ones alone, and what it leaves serves a lossy run as far as it goes."""
    options, (high, _), _, _ = remembered
    with moeoff.Llama(model, expert_memory="100M", warm=True, **OPTIONS) as llm:
        stats = settled(llm)
        np.testing.assert_array_equal(llm.expert_buffer.residency(), high)
        assert stats.low_bytes_read == 0
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        settled(llm)
        np.testing.assert_array_equal(llm.expert_buffer.residency(), high)
        assert not llm.expert_buffer.residency(low=True).any()


@pytest.mark.parametrize("low", [None, np.ones((3, 3), np.uint8)], ids=["before there were low versions", "of another shape"])
def test_warm_start_from_another_file(low, model, remembered):
    options, (high, _), path, expected = remembered
    np.savez_compressed(path, version=1, residency=high, **({} if low is None else {"low": low}))
    with moeoff.Llama(model, expert_memory="100M", **options) as llm:
        settled(llm)
        np.testing.assert_array_equal(llm.expert_buffer.residency(), high if low is None else np.zeros_like(high))
        assert not llm.expert_buffer.residency(low=True).any()
        assert_bit_equal(greedy_logits(llm, PROMPT, 16), expected)


def test_options_that_make_no_sense(model, demo):
    with pytest.raises(OptionError, match="low precision .* needs a companion"):
        moeoff.Llama(model, precision=LOSSY, experts=False)
    with pytest.raises(OptionError, match="no tier Q2_K below keep; there are: Q4_0"):
        moeoff.Llama(model, precision=Precision(0, 1, tier="Q2_K"))
    with pytest.raises(OptionError, match="on-demand.* own precision"):
        moeoff.Llama(model, precision=LOSSY, strategy="on-demand")


def test_memory_stays_below_the_budget_with_two_pools(grown, tmp_path):
    model = tmp_path / "model.gguf"
    shutil.copy(grown, model)
    convert(model, tiers="Q2_K")
    code = f"""
import moeoff
from moeoff.precision import Precision
with moeoff.Llama({str(model)!r}, memory="190M", n_ctx=512, n_threads=2, precision=Precision(0.3, 0.7, 0.3, "Q2_K")) as llm:
    for _ in llm.create_completion("The sun had set behind the hills. " * 8, max_tokens=40, temperature=0, stream=True):
        pass
    s = llm.stats()
    print(s.peak_rss_bytes, s.budget_bytes, s.low_arena_bytes, s.served_low, s.evictions)
    llm.set_memory("180M")
    high, low = llm.expert_buffer.stats().arena_bytes, llm.expert_buffer.stats().low_arena_bytes
    assert 0 < low < high < s.arena_bytes
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    peak, budget, low, served_low, evictions = map(int, done.stdout.split())
    assert peak <= budget == 190 << 20 and low > 0 and served_low > 0 and evictions > 0
