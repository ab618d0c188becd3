"""Two versions of every expert in an expert buffer: the rule against a brute-force one,
the kernel against ggml's own on the version that was decided, and the eviction order of
a pool.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.ggml_api import F32, I32, Context, cpu_buffer_type, quantized, read, write
from helpers.kernels import N_COLS, N_EXPERT, N_ROWS, N_USED, CpuTensor
from helpers.waiting import wait_until
from moeoff import OptionError
from moeoff.engine.buffer import ExpertBuffer
from moeoff.errors import MoeoffError
from moeoff.gguf.quantize import type_from_name
from moeoff.llamacpp import native
from moeoff.policies.hobbit import unimportance
from moeoff.precision import Precision
from moeoff.system.memory import slot_bytes

HIGH, LOW, SKIP = native.HIGH, native.LOW, native.SKIP
Q8_0, Q4_0, Q4_K, Q2_K, F16 = (
    type_from_name(name) for name in ("Q8_0", "Q4_0", "Q4_K", "Q2_K", "F16")
)
MATRICES = ("up", "gate")


class Block:
    """A MoE block of two matrices in a file, each expert in two versions, and the same
    in memory for ggml's own kernel.

    Args:
        n_slots, n_low: the arenas in experts.
    """

    def __init__(self, path, rng, high=Q8_0, low=Q4_0, n_slots=3, n_low=3, **options):
        self.types = (high, low)
        self._context = Context()
        self.buffer = ExpertBuffer(**options)
        self.tensors, self.plain, sources = [], [], {HIGH: [], LOW: []}
        with open(path, "wb") as file:
            for _ in MATRICES:
                weights = rng.standard_normal((N_EXPERT, N_ROWS, N_COLS), np.float32)
                data = [quantized(weights, type) for type in self.types]
                self.plain.append([CpuTensor(d, type) for d, type in zip(data, self.types)])
                for version in (HIGH, LOW):
                    sources[version].append([])
                    for row in data[version]:
                        file.write(b"\xff" * 96)
                        sources[version][-1].append(
                            native.Source(0, self.types[version], file.tell(), row.nbytes)
                        )
                        file.write(row.tobytes())
        self.tensors = [
            self._context.tensor(high, N_COLS, N_ROWS, N_EXPERT, name=f"blk.0.ffn_{m}_exps.weight")
            for m in MATRICES
        ]
        with self.buffer.loading():
            self._context.allocate(native.buffer_type())
        assert native.add_file(self.buffer.handle, str(path).encode()) == 0
        for i in range(len(MATRICES)):
            self.buffer.set_sources(i, sources[HIGH][i])
            self.buffer.set_sources(i, sources[LOW][i], low=True)
        self.slots = [
            len(MATRICES) * slot_bytes(s[0][0].nbytes) for s in (sources[HIGH], sources[LOW])
        ]
        self.buffer.start(n_slots * self.slots[HIGH], n_low * self.slots[LOW])
        self.events = []
        self.buffer.set_gate_callback(self.events.append)

    def close(self):
        stats = self.buffer.stats()
        assert stats.low_arena_committed <= stats.low_cache_bytes
        assert (
            stats.arena_committed - stats.low_arena_committed
            <= stats.cache_bytes - stats.low_cache_bytes
        )
        assert stats.arena_peak <= stats.cache_bytes
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
        mask = sum(1 << getattr(native, f"MATRIX_{m.upper()}") for m in MATRICES)
        return self.buffer.residency(low=low)[0] == mask


class Graph:
    """One graph's gate node and matrix ops, for some number of tokens."""

    def __init__(self, block: Block, n_tokens: int):
        self.block, self.n_tokens = block, n_tokens
        n = len(MATRICES)
        self._context = Context(16 + 3 * n, 3 + 3 * n)
        self._rows = self._context.tensor(F32, N_COLS, 1, n_tokens)
        self.id_tensor = self._context.tensor(I32, N_USED, n_tokens)
        self._weights = self._context.tensor(F32, 1, N_USED, n_tokens)
        node = self._context.gate_node(block.tensors[0], self.id_tensor, self._weights)
        self._outs = [
            self._context.mul_mat_id(t, self._rows, self.id_tensor) for t in block.tensors
        ]
        self._plain_outs = [
            [self._context.mul_mat_id(p.tensor, self._rows, self.id_tensor) for p in pair]
            for pair in block.plain
        ]
        self._gate, self._ops = self._context.graph(node), self._context.graph(*self._outs)
        self._plain = self._context.graph(*[out for pair in self._plain_outs for out in pair])
        self._context.allocate(cpu_buffer_type())

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self._context.close()

    def choose(self, rng) -> None:
        """Random rows, experts (some much more popular than others) and weights (some
        of them equal).
        """
        write(self._rows, rng.standard_normal((self.n_tokens, 1, N_COLS), np.float32))
        scores = rng.gumbel(size=(self.n_tokens, N_EXPERT)) + rng.exponential(1.5, N_EXPERT)
        self.ids = np.argsort(-scores, axis=1)[:, :N_USED].astype(np.int32)
        self.weights = np.sort(rng.dirichlet(np.ones(N_USED), self.n_tokens).astype(np.float32))[
            :, ::-1
        ].copy()
        if rng.random() < 0.3:
            self.weights[:, 1:] = self.weights[:, 1:2]
        if rng.random() < 0.1:  # without a sum every expert is important
            self.weights[:] = 0
        if rng.random() < 0.5:  # a router need not list the largest first
            self.weights = np.ascontiguousarray(self.weights[:, ::-1])
        write(self.id_tensor, self.ids)
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
        """Runs the matrix ops: each row is what ggml's own kernel gives for the version
        that was decided.
        """
        assert (
            backend.compute(self._plain, n_threads) == 0
            and backend.compute(self._ops, n_threads) == 0
        )
        shape = (self.n_tokens, N_USED, N_ROWS)
        for out, pair in zip(self._outs, self._plain_outs):
            expected = np.zeros(shape, np.uint32)
            for version in (HIGH, LOW):
                expected[versions == version] = read(pair[version], shape)[versions == version]
            np.testing.assert_array_equal(read(out, shape), expected)


def decide(graph: Graph, t1, t2, share, blind, by_weight) -> np.ndarray:
    """The rule in numpy, from what is resident now: [n_tokens, n_used]."""
    t1, t2, share = np.float32(t1), np.float32(t2), float(np.float32(share))
    ids, wish = graph.ids, np.full(N_EXPERT, HIGH)
    if by_weight:
        least = np.full(N_EXPERT, np.inf, np.float32)
        np.minimum.at(least, ids, unimportance(graph.weights))
        wish = np.where(least <= t1, HIGH, np.where(least <= t2, LOW, SKIP))
    else:
        experts, counts = np.unique(ids, return_counts=True)
        unpopular = sorted(zip(counts, -experts))[: math.floor(share * len(experts))]
        wish[[-e for _, e in unpopular]] = LOW
    if not blind:
        high, low = graph.block.resident(False), graph.block.resident(True)
        wish = np.where(high, HIGH, np.where((wish == SKIP) & low, LOW, wish))
    return wish[ids]


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("types", [(Q8_0, Q4_0), (Q4_K, Q2_K), pytest.param((F16, Q8_0), marks=pytest.mark.slow)],
                         ids=["Q8_0-Q4_0", "Q4_K-Q2_K", "F16-Q8_0"])  # fmt: skip
def test_rule_and_kernel(types, blind, tmp_path, backend):
    """Decisions equal a brute-force rule's, and results the stock kernel's on the
    versions decided, in arenas that evict all the time.
    """
    rng = np.random.default_rng(1)
    seen = np.zeros(3, int)
    with Block(tmp_path / "experts", rng, *types, n_slots=4, n_low=3) as block:
        for n_tokens in (1, 2, 9):
            with Graph(block, n_tokens) as graph:
                for i in range(200 if n_tokens == 1 else 40):
                    t1, t2 = sorted(rng.choice([0, 0.2, 0.5, 0.8, 1], 2))
                    share = rng.choice([0, 0.25, 0.4, 1])
                    weighed = t1 < 1 and share == 0  # a prompt, too
                    block.buffer.set_precision(
                        Precision(t1, t2, share, "low", weigh_prompts=weighed), blind=blind
                    )
                    decodes = rng.random() < (0.8 if n_tokens == 1 else 0.3)
                    block.buffer.set_batch_kind(decode=decodes)
                    graph.choose(rng)
                    before = block.buffer.stats()
                    expected = decide(graph, t1, t2, share, blind, decodes or weighed)
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
        assert (
            (seen > 20).all()
            and stats.evictions > 50
            and 0 < stats.low_bytes_read < stats.bytes_read
        )


def leave_out(graph: Graph, tau: float, blind: bool) -> np.ndarray:
    """The rule of `Precision.tau` in numpy, from what is resident now: [n_tokens,
    n_used]. Nothing is read between two of these events.
    """
    computed = np.zeros(N_EXPERT, bool) if blind else graph.block.resident(False)
    if len(graph.ids) == 1:
        computed[graph.ids[graph.weights >= np.float32(tau)]] = True
    else:
        computed[graph.ids] = True
    return np.where(computed[graph.ids], HIGH, SKIP)


@pytest.mark.parametrize("blind", [False, True])
def test_what_weighs_little_is_left_out(blind, tmp_path, backend):
    """In tokens that are decoded alone: the first expert has no privilege, a weight
    equal to tau is kept, and skipped experts are not read.
    """
    rng = np.random.default_rng(3)
    seen = np.zeros(3, int)
    with Block(tmp_path / "experts", rng, n_slots=4, n_low=0) as block:
        for n_tokens in (1, 4):
            with Graph(block, n_tokens) as graph:
                for _ in range(200 if n_tokens == 1 else 20):
                    graph.choose(rng)
                    tau = (
                        rng.choice([0.1, 0.3, 0.6, float(graph.weights[0, 1])]) or 0.1
                    )  # 0: lossless
                    block.buffer.set_precision(Precision(tau=tau), blind=blind)
                    expected = leave_out(graph, tau, blind)
                    before = block.buffer.stats()
                    versions = graph.speak(backend)
                    np.testing.assert_array_equal(versions, expected)
                    graph.compute(backend, versions)
                    after = block.buffer.stats()
                    assert after.skipped - before.skipped == (versions == SKIP).sum()
                    assert after.reads - before.reads <= 2 * len(
                        np.unique(graph.ids[versions == HIGH])
                    )
                    seen += np.bincount(versions.ravel(), minlength=3)
        assert seen[HIGH] > 100 and seen[SKIP] > 100 and not seen[LOW]


def test_unimportance_is_the_native_one_to_the_last_bit(tmp_path, backend):
    """A threshold that equals an expert's score keeps it high, the next smaller number
    does not.
    """
    rng = np.random.default_rng(6)
    with Block(tmp_path / "experts", rng) as block, Graph(block, 1) as graph:
        for _ in range(60):
            graph.choose(rng)
            scores = unimportance(graph.weights)[0]
            for score in scores[scores > 0]:
                for t1 in (score, np.nextafter(score, np.float32(0))):
                    block.buffer.set_precision(Precision(float(t1), low_tier="low"), blind=True)
                    np.testing.assert_array_equal(
                        graph.speak(backend)[0], np.where(scores <= t1, HIGH, LOW)
                    )


def test_forced_decisions(tmp_path, backend):
    """Recorded decisions beat rule and residency; when they do not suffice for an
    event, the rule is back.
    """
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
    """Each graph's ops get what its own gate event decided, though another event of the
    same gate came between.
    """
    rng = np.random.default_rng(4)
    with (
        Block(tmp_path / "experts", rng, n_slots=8, n_low=8) as block,
        Graph(block, 3) as a,
        Graph(block, 3) as b,
    ):
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
    """A prefetch counts as useful if the gate chose that version, and is given up if it
    chose the other.
    """
    rng = np.random.default_rng(5)
    with Block(tmp_path / "experts", rng, n_slots=8, n_low=8) as block, Graph(block, 1) as graph:
        buffer = block.buffer

        def settle():
            wait_until(lambda: buffer.stats().reads == settle.reads)

        graph.choose(rng)
        settle.reads = 2 * N_USED
        assert buffer.prefetch(0, graph.ids[0].tolist(), low=True) == 2 * N_USED
        settle()
        assert block.resident(True).sum() == N_USED and not block.resident(False).any()
        buffer.force(np.full(N_USED, LOW, np.uint8))
        graph.compute(backend, graph.speak(backend))
        stats = buffer.stats()
        assert (stats.prefetch_issued, stats.prefetch_useful, stats.demand_misses, stats.reads) == (
            2 * N_USED,
            2 * N_USED,
            0,
            2 * N_USED,
        )

        buffer.clear()
        settle.reads = 4 * N_USED
        assert buffer.prefetch(0, graph.ids[0].tolist()) == 2 * N_USED
        settle()
        buffer.force(np.full(N_USED, LOW, np.uint8))  # the other version
        graph.compute(backend, graph.speak(backend))
        stats = buffer.stats()
        assert (stats.prefetch_useful, stats.demand_misses) == (2 * N_USED, 2 * N_USED)
        assert block.resident(False).sum() == N_USED  # passed over, but resident all the same
        # the others are served high
        assert buffer.prefetch(0, range(N_EXPERT), low=True) == 2 * (N_EXPERT - N_USED)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_what_was_not_predicted_is_served_low(n_tokens, tmp_path, backend):
    """Fate §5.3: low versions serve those that are neither resident nor asked for by a
    prefetch, read or not, whatever their weight; where tokens are decoded, and not in a
    prompt.
    """
    rng = np.random.default_rng(8)
    seen, predicted_late = np.zeros(2, int), 0
    with (
        Block(tmp_path / "experts", rng, n_slots=4, n_low=3) as block,
        Graph(block, n_tokens) as graph,
    ):
        buffer = block.buffer
        buffer.set_precision(Precision(mispredicted_low=True, low_tier="low"))
        for i in range(300):
            buffer.set_batch_kind(decode=True)
            graph.choose(rng)
            guess = int(rng.choice(graph.ids[0]) if rng.random() < 0.7 else rng.integers(N_EXPERT))
            buffer.prefetch(0, [guess])
            high = block.resident(False)  # what the prefetch has evicted is gone
            late, high[guess] = not high[guess], True
            versions = graph.speak(backend)
            expected = np.where(high[graph.ids], HIGH, LOW)
            np.testing.assert_array_equal(versions, expected)
            graph.compute(backend, versions, n_threads=1 + i % 2)
            # given up, but perhaps being read: it would end between the next two
            # questions
            if late and guess not in graph.ids:
                buffer.prefetch(0, [guess])
                wait_until(lambda guess=guess: block.resident(False)[guess])
            seen += np.bincount(versions.ravel(), minlength=2)
            predicted_late += late and guess in graph.ids
            if i % 10 == 0:
                buffer.set_batch_kind(decode=False)
                graph.choose(rng)
                assert not graph.speak(backend).any()
                graph.compute(backend, np.zeros_like(graph.ids))
    assert (seen > 50).all() and predicted_late > 20


def test_native_refusals(tmp_path):
    with Block(tmp_path / "experts", np.random.default_rng(7), n_slots=2, n_low=2) as block:
        buffer = block.buffer
        assert (
            buffer.low_arena_floor == 2 * block.slots[LOW]
            and buffer.low_arena_full == N_EXPERT * block.slots[LOW]
        )
        buffer.set_precision(Precision(0, 1, low_tier="low"))
        for low in (0, 2 * block.slots[LOW] - 1):
            with pytest.raises(MoeoffError, match="for low versions is below the floor"):
                buffer.set_cache_bytes(2 * block.slots[HIGH], low)
        buffer.set_precision(Precision(0, 0))  # skips, and needs no low versions
        buffer.set_cache_bytes(2 * block.slots[HIGH], 0)
        for rule in ({"t1": 0.0}, {"mispredicted_low": True}):
            with pytest.raises(OptionError, match="need low versions"):
                buffer.set_precision(Precision(**rule, low_tier="low"))
        with pytest.raises(OptionError, match="neither thresholds nor the gates alone"):
            buffer.set_precision(Precision(mispredicted_low=True, low_tier="low"), blind=True)
        with pytest.raises(OptionError, match="no such gate, experts, or versions"):
            buffer.prefetch(0, [0], low=True)
