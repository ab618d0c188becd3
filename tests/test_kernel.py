"""MUL_MAT_ID on experts that an expert buffer serves from a file, against ggml's own on the same bytes in memory: equal
bit for bit, whatever is resident."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ggml_api import (
    ABORTED,
    F16,
    F32,
    I32,
    SUCCESS,
    Backend,
    Context,
    activation_type,
    cpu_buffer_type,
    has_cpu_kernel,
    quantizable_types,
    quantized,
    random_experts,
    read,
    write,
)
from moeoff import native
from moeoff.engine.expert_buffer import ExpertBuffer
from moeoff.errors import MoeoffError, ReadError
from moeoff.gguf.quantize import type_from_name
from moeoff.memory import slot_bytes

N_COLS, N_ROWS, N_EXPERT, N_USED = 512, 48, 8, 3
TYPES = quantizable_types()
Q8_0, Q4_K = type_from_name("Q8_0"), type_from_name("Q4_K")
NONE = -1


class Reserved:
    """One tensor of experts in an expert buffer, its slices scattered over a file.

    Args:
        slices: the bytes of each expert, None for "none".
        types: of each expert; the tensor is declared with the first.
        n_slots: the arena in slots of the largest slice.
    """

    def __init__(self, path: Path, slices: list, types: list[int], n_slots: float = 3, shape=(N_COLS, N_ROWS), **options):
        self.path = path
        self.shape = shape
        self.slot = max(slot_bytes(s.nbytes) for s in slices if s is not None)
        self.sources = []
        with open(path, "wb") as file:
            for i, data in enumerate(slices):
                if data is None:
                    self.sources.append(native.Source(-1, NONE, 0, 0))
                    continue
                file.write(b"\xff" * (32 * (2 * i + 1)))  # a multiple of 32, never of a page; what lies between is no weight
                file.write(b"\xff" * (-file.tell() % 32))
                self.sources.append(native.Source(0, types[i], file.tell(), data.nbytes))
                file.write(data.tobytes())
        self.buffer = ExpertBuffer(**options)
        self._context = Context()
        self.tensor = self._context.tensor(types[0], *shape, len(slices), name="blk.0.ffn_up_exps.weight")
        with self.buffer.loading():
            self._context.allocate(native.buffer_type())
        assert native.n_tensors(self.buffer.handle) == 1
        assert native.add_file(self.buffer.handle, str(path).encode()) == 0
        self.buffer.set_sources(0, self.sources)
        assert self.buffer.arena_floor == 2 * self.slot
        assert self.buffer.arena_full == sum(slot_bytes(s.nbytes) for s in slices if s is not None)
        self.buffer.start(int(n_slots * self.slot))

    def __enter__(self) -> Reserved:
        return self

    def __exit__(self, *_exc) -> None:
        stats = self.buffer.stats()
        assert stats.arena_committed <= stats.arena_bytes
        self.buffer.close()
        self._context.close()


class Plain:
    """The same experts in a CPU buffer."""

    def __init__(self, data: np.ndarray, type: int, shape=(N_COLS, N_ROWS)):
        self.shape = shape
        self._context = Context()
        self.tensor = self._context.tensor(type, *shape, len(data))
        self._context.allocate(cpu_buffer_type())
        write(self.tensor, data)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_exc) -> None:
        self._context.close()


class Op:
    """MUL_MAT_ID of one or more tensors of experts with the same rows and ids.

    Args:
        n_rows_in: rows of the right operand for each token: 1, or one for each of the token's experts.
        padded_ids: ids are a view of the first columns of [n_tokens, n_expert], as a top-k of argsort gives them.
        padded_rows: the right operand is a view of the second half of rows twice as long.
    """

    def __init__(
        self,
        *experts: Plain | Reserved,
        n_tokens: int,
        n_rows_in: int = 1,
        padded_ids: bool = False,
        padded_rows: bool = False,
        n_used: int = N_USED,
    ):
        n_cols, n_rows = experts[0].shape
        self.out_shape = (n_tokens, n_used, n_rows)
        self.rows_shape = (n_tokens, n_rows_in, 2 * n_cols if padded_rows else n_cols)
        self.ids_shape = (n_tokens, N_EXPERT if padded_ids else n_used)
        self.n_used = n_used
        self._context = Context(4 + len(experts), len(experts))
        self._rows = self._context.tensor(F32, *self.rows_shape[::-1])
        self._ids = self._context.tensor(I32, *self.ids_shape[::-1])
        ids = self._context.view_2d(self._ids, n_used, n_tokens, 4 * N_EXPERT) if padded_ids else self._ids
        rows = self._rows
        if padded_rows:
            rows = self._context.view_3d(rows, n_cols, n_rows_in, n_tokens, 8 * n_cols, 8 * n_cols * n_rows_in, 4 * n_cols)
        self._outputs = [self._context.mul_mat_id(e.tensor, rows, ids) for e in experts]
        self._graphs = [self._context.graph(out) for out in self._outputs]
        self._context.allocate(cpu_buffer_type())

    def __enter__(self) -> Op:
        return self

    def __exit__(self, *_exc) -> None:
        self._context.close()

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """New random rows, and new experts: each token's are distinct, and some are chosen much more often."""
        write(self._rows, rng.standard_normal(self.rows_shape, np.float32) * np.float32(3))
        popularity = rng.exponential(1.5, N_EXPERT)
        scores = rng.gumbel(size=(self.ids_shape[0], N_EXPERT)) + popularity
        ids = np.argsort(-scores, axis=1)[:, : self.ids_shape[1]].astype(np.int32)
        write(self._ids, ids)
        return ids[:, : self.n_used]

    def give(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """These rows and experts instead of random ones."""
        write(self._rows, rows)
        write(self._ids, ids)

    def compute(self, backend: Backend, i: int, n_threads: int = 2, status: int = SUCCESS) -> np.ndarray:
        """uint32 bits [n_tokens, n_used, n_rows] of the i-th tensor's result."""
        write(self._outputs[i], np.full(self.out_shape, 0x7FBADBAD, np.uint32))  # a NaN where nothing is written
        assert backend.compute(self._graphs[i], n_threads) == status
        return read(self._outputs[i], self.out_shape)

    def assert_equal(self, backend: Backend, rng: np.random.Generator, n_threads: int = 2) -> None:
        """All tensors give the same for new random rows and experts."""
        self.choose(rng)
        expected = self.compute(backend, 0, n_threads)
        assert not np.isnan(expected.view(np.float32)).any()
        for i in range(1, len(self._graphs)):
            np.testing.assert_array_equal(self.compute(backend, i, n_threads), expected)


def pair(tmp_path: Path, type: int, rng: np.random.Generator, **options) -> tuple[Plain, Reserved]:
    shape = options.get("shape", (N_COLS, N_ROWS))
    data = random_experts(type, (N_EXPERT, *shape[::-1]), rng)
    return Plain(data, type, shape), Reserved(tmp_path / "experts", list(data), [type] * N_EXPERT, **options)


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name, tmp_path, backend):
    if not has_cpu_kernel(TYPES[name]):
        pytest.skip(f"ggml-cpu has no vec_dot for {name}")
    rng = np.random.default_rng(TYPES[name])
    plain, reserved = pair(tmp_path, TYPES[name], rng)
    with plain, reserved:
        for n_tokens in (1, 7, 8, 9, 64):
            with Op(plain, reserved, n_tokens=n_tokens) as op:
                for n_threads in (1, 2, 4):
                    for _ in range(3):
                        op.assert_equal(backend, rng, n_threads)
        stats = reserved.buffer.stats()
        assert stats.evictions > 50
        assert stats.demand_hits > 0 and stats.demand_misses > stats.evictions
        assert stats.arena_peak <= stats.arena_bytes == 3 * reserved.slot


def test_one_wrong_bit_is_noticed(tmp_path, backend):
    rng = np.random.default_rng(0)
    plain, reserved = pair(tmp_path, Q8_0, rng)
    with plain, reserved, Op(plain, reserved, n_tokens=8, n_used=N_EXPERT) as op:
        op.assert_equal(backend, rng)
        with open(reserved.path, "r+b") as file:
            file.seek(reserved.sources[5].offset + 1000)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        reserved.buffer.clear()
        ids = op.choose(rng)
        wrong = op.compute(backend, 0) != op.compute(backend, 1)
        assert wrong[ids == 5].any() and not wrong[ids != 5].any()


def test_the_list_of_types_is_not_empty_by_accident():
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q6_K", "IQ1_S", "IQ4_XS", "TQ1_0", "MXFP4"} <= set(TYPES)
    assert len({activation_type(t) for t in TYPES.values() if has_cpu_kernel(t)}) >= 4  # F32, F16, Q8_0, Q8_K and more


@pytest.mark.parametrize("shape", [(256, 1), (256, 15), (512, 64), (1024, 65), (256, 200)], ids=str)
@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_K", "IQ4_XS"])
def test_shapes(name, shape, tmp_path, backend):
    rng = np.random.default_rng(1)
    plain, reserved = pair(tmp_path, TYPES[name], rng, shape=shape)
    with plain, reserved:
        for n_tokens in (1, 40):
            with Op(plain, reserved, n_tokens=n_tokens) as op:
                for n_threads in (1, 2, 3):
                    op.assert_equal(backend, rng, n_threads)


@pytest.mark.parametrize("n_rows_in", [1, N_USED], ids=["broadcast", "per-expert"])
@pytest.mark.parametrize("padded_ids", [False, True], ids=["ids", "argsort-view"])
@pytest.mark.parametrize("padded_rows", [False, True], ids=["rows", "rows-view"])
@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_K"])
def test_operand_layouts(name, padded_rows, padded_ids, n_rows_in, tmp_path, backend):
    rng = np.random.default_rng(2)
    plain, reserved = pair(tmp_path, TYPES[name], rng)
    with plain, reserved:
        for n_tokens in (1, 8, 33):
            with Op(plain, reserved, n_tokens=n_tokens, n_rows_in=n_rows_in, padded_ids=padded_ids, padded_rows=padded_rows) as op:
                for n_threads in (1, 2, 4):
                    op.assert_equal(backend, rng, n_threads)
        assert reserved.buffer.stats().evictions > 0


@pytest.mark.parametrize("names", [("Q8_0", "Q4_K", "F16"), ("F32", "BF16", "IQ2_XXS", "Q4_1"), ("F16", "F16", "Q5_K")], ids="-".join)
@pytest.mark.parametrize("n_none", [0, 2])
def test_mixed_types_and_none(names, n_none, tmp_path, backend):
    """Experts of several types in one tensor: each row is what a plain tensor of its expert's type gives; none gives 0."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((N_EXPERT, N_ROWS, N_COLS), np.float32)
    types = [TYPES[name] for name in names]
    type_of = np.array([types[e % len(types)] for e in range(N_EXPERT)])
    type_of[rng.choice(np.arange(1, N_EXPERT), n_none, replace=False)] = NONE
    data = {t: quantized(weights, t) for t in types}
    slices = [None if t == NONE else data[t][e] for e, t in enumerate(type_of)]
    assert len({activation_type(t) for t in types}) >= 2
    with contextlib.ExitStack() as stack:
        plains = [stack.enter_context(Plain(data[t], t)) for t in data]
        reserved = stack.enter_context(Reserved(tmp_path / "experts", slices, type_of.tolist(), n_slots=2))
        for n_tokens in (1, 8, 40):
            for n_rows_in in (1, N_USED):
                with Op(*plains, reserved, n_tokens=n_tokens, n_rows_in=n_rows_in) as op:
                    for n_threads in (1, 2, 4):
                        row_types = type_of[op.choose(rng)]
                        expected = np.zeros(op.out_shape, np.uint32)
                        for i, t in enumerate(data):
                            out = op.compute(backend, i, n_threads)
                            expected[row_types == t] = out[row_types == t]
                        np.testing.assert_array_equal(op.compute(backend, len(plains), n_threads), expected)
        assert reserved.buffer.stats().evictions > 0


def test_only_none(tmp_path, backend):
    """A token whose experts are all "none"."""
    data = random_experts(Q8_0, (N_EXPERT, N_ROWS, N_COLS), np.random.default_rng(4))
    slices = [data[0]] + [None] * (N_EXPERT - 1)
    with Reserved(tmp_path / "experts", slices, [Q8_0] + [NONE] * (N_EXPERT - 1)) as reserved, Op(reserved, n_tokens=4) as op:
        for n_threads in (1, 4):
            ids = op.choose(np.random.default_rng(5))
            out = op.compute(backend, 0, n_threads)
            assert not out[ids != 0].any()
            assert out[ids == 0].any() == (ids == 0).any()


@pytest.mark.parametrize("options", [{"direct_io": False}, {"keep": False}, {"eager": False}, {"n_lanes": 1}, {"n_lanes": 16}], ids=str)
def test_options(options, tmp_path, backend):
    rng = np.random.default_rng(6)
    plain, reserved = pair(tmp_path, Q4_K, rng, **options)
    with plain, reserved, Op(plain, reserved, n_tokens=20) as op:
        for _ in range(20):
            op.assert_equal(backend, rng)
        stats = reserved.buffer.stats()
        if "keep" in options:
            assert stats.resident_slices == 0 and stats.demand_hits == 0
        if "direct_io" in options:
            assert stats.direct_reads == 0


@pytest.mark.parametrize("name", ["F32", "Q4_K"])
def test_two_slots(name, tmp_path, backend):
    """The smallest arena makes progress though one op needs every expert."""
    rng = np.random.default_rng(7)
    plain, reserved = pair(tmp_path, TYPES[name], rng, n_slots=2)
    with plain, reserved, Op(plain, reserved, n_tokens=64, n_used=N_EXPERT) as op:
        for n_threads in (1, 2, 4):
            for _ in range(10):
                op.assert_equal(backend, rng, n_threads)
        stats = reserved.buffer.stats()
        assert stats.evictions >= 30 * (N_EXPERT - 2) - 2
        assert stats.arena_peak == 2 * reserved.slot


def test_below_two_slots_is_refused(tmp_path):
    data = random_experts(Q8_0, (N_EXPERT, N_ROWS, N_COLS), np.random.default_rng(8))
    with Reserved(tmp_path / "experts", list(data), [Q8_0] * N_EXPERT) as reserved:
        with pytest.raises(MoeoffError, match="below the floor"):
            reserved.buffer.set_arena_bytes(2 * reserved.slot - 1)


def test_large_arena_reads_once(tmp_path, backend):
    rng = np.random.default_rng(9)
    plain, reserved = pair(tmp_path, Q8_0, rng, n_slots=N_EXPERT)
    with plain, reserved, Op(plain, reserved, n_tokens=64, n_used=N_EXPERT) as op:
        for _ in range(5):
            op.assert_equal(backend, rng)
        stats = reserved.buffer.stats()
        assert (stats.evictions, stats.reads, stats.resident_slices) == (0, N_EXPERT, N_EXPERT)
        assert stats.bytes_read == sum(source.nbytes for source in reserved.sources)
        assert (reserved.buffer.residency() == 1 << native.MATRICES.index("up")).all()


def test_resizing_between_computes(tmp_path, backend):
    rng = np.random.default_rng(10)
    plain, reserved = pair(tmp_path, F16, rng)
    buffer = reserved.buffer
    with plain, reserved, Op(plain, reserved, n_tokens=16) as op:
        for n_slots in (8, 2, 5, 3, 2, 6, 2, 8, 4):
            buffer.set_arena_bytes(n_slots * reserved.slot)
            assert buffer.stats().arena_committed <= n_slots * reserved.slot  # shrinking evicts at once
            for n_threads in (1, 2):
                op.assert_equal(backend, rng, n_threads)
                stats = buffer.stats()
                assert stats.arena_committed <= stats.arena_bytes == n_slots * reserved.slot
                assert stats.resident_slices <= n_slots


def test_resizing_with_classes_of_different_sizes(tmp_path, backend):
    """Slots of one size give their bytes to another size and back."""
    rng = np.random.default_rng(11)
    types = [F32, Q4_K] * (N_EXPERT // 2)
    weights = rng.standard_normal((N_EXPERT, N_ROWS, N_COLS), np.float32)
    data = {t: quantized(weights, t) for t in set(types)}
    slices = [data[t][e] for e, t in enumerate(types)]
    with Plain(data[F32], F32) as f32, Plain(data[Q4_K], Q4_K) as q4_k, Reserved(tmp_path / "experts", slices, types, n_slots=2) as reserved:
        with Op(f32, q4_k, reserved, n_tokens=12) as op:
            for n_slots in (2, 4.5, 2.25, 3, 2, 8):
                reserved.buffer.set_arena_bytes(int(n_slots * reserved.slot))
                for _ in range(4):
                    is_f32 = op.choose(rng) % 2 == 0
                    expected = np.where(is_f32[:, :, None], op.compute(backend, 0), op.compute(backend, 1))
                    np.testing.assert_array_equal(op.compute(backend, 2), expected)
                    stats = reserved.buffer.stats()
                    assert stats.arena_committed <= stats.arena_bytes


def test_after_clear_and_prefetch(tmp_path, backend):
    rng = np.random.default_rng(12)
    plain, reserved = pair(tmp_path, Q8_0, rng, n_slots=4)
    with plain, reserved, Op(plain, reserved, n_tokens=3) as op:
        for _ in range(20):
            reserved.buffer.prefetch(0, rng.choice(N_EXPERT, 4, replace=False).tolist())
            op.assert_equal(backend, rng)
            if rng.random() < 0.3:
                reserved.buffer.clear()
                assert reserved.buffer.stats().resident_slices <= 4
        assert reserved.buffer.stats().prefetch_issued > 0


@pytest.mark.parametrize("direct_io", [True, False])
def test_read_error_and_recovery(direct_io, tmp_path, backend):
    """A file cut off under the buffer ends the graph with a message; once it is whole again, so are the results."""
    rng = np.random.default_rng(13)
    plain, reserved = pair(tmp_path, Q8_0, rng, n_slots=2, direct_io=direct_io)
    buffer = reserved.buffer
    with plain, reserved, Op(plain, reserved, n_tokens=16, n_used=N_EXPERT) as op:
        op.assert_equal(backend, rng)
        assert not native.should_abort(buffer.handle)

        content = reserved.path.read_bytes()
        cut = reserved.sources[2].offset + 100  # experts 0 and 1 remain
        with open(reserved.path, "r+b") as file:
            file.truncate(cut)
        backend.set_abort_callback(native.should_abort, buffer.handle)
        for n_threads in (1, 2, 4):
            op.compute(backend, 1, n_threads, status=ABORTED)
            assert native.should_abort(buffer.handle)
            with pytest.raises(ReadError) as error:
                buffer.check()
            offsets = [str(s.offset) for s in reserved.sources[2:]]
            assert str(reserved.path) in str(error.value) and "truncated" in str(error.value)
            assert any(f"at offset {offset} " in str(error.value) for offset in offsets), str(error.value)
            assert not native.should_abort(buffer.handle)
            buffer.check()  # taken: nothing is left
        assert buffer.stats().read_errors >= 3

        reserved.path.write_bytes(content)
        for n_threads in (1, 2, 4):
            op.assert_equal(backend, rng, n_threads)
        assert not native.should_abort(buffer.handle)
        stats = buffer.stats()
        assert stats.arena_committed <= stats.arena_bytes
