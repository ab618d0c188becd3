"""MUL_MAT_ID on experts that an expert buffer serves from a file, against ggml's own on
the same bytes in memory: equal bit for bit, whatever is resident.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from helpers.ggml_api import (
    ABORTED,
    F32,
    activation_type,
    has_cpu_kernel,
    quantizable_types,
    quantized,
    random_experts,
)
from helpers.kernels import N_COLS, N_EXPERT, N_ROWS, N_USED, NONE, BufferTensor, CpuTensor, Op
from moeoff.errors import ReadError
from moeoff.gguf.quantize import type_from_name
from moeoff.llamacpp import native

TYPES = quantizable_types()
Q8_0, Q4_K = type_from_name("Q8_0"), type_from_name("Q4_K")
# where the processor has them
ROW_KERNELS = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "Q4_0", "IQ4_NL", "MXFP4", "Q5_0", "Q8_0")


def pair(
    tmp_path: Path, type: int, rng: np.random.Generator, **options
) -> tuple[CpuTensor, BufferTensor]:
    shape = options.get("shape", (N_COLS, N_ROWS))
    data = random_experts(type, (N_EXPERT, *shape[::-1]), rng)
    return CpuTensor(data, type, shape), BufferTensor(
        tmp_path / "experts", list(data), [type] * N_EXPERT, **options
    )


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name, tmp_path, backend):
    if not has_cpu_kernel(TYPES[name]):
        pytest.skip(f"ggml-cpu has no vec_dot for {name}")
    rng = np.random.default_rng(TYPES[name])
    plain, reserved = pair(tmp_path, TYPES[name], rng)
    with plain, reserved:
        for n_tokens in (1, 7, 8, 9, 64):
            with Op(plain, reserved, n_tokens=n_tokens) as op:
                for n_threads in (1, 2, 3, 4):
                    for _ in range(3):
                        op.assert_equal(backend, rng, n_threads)
        stats = reserved.buffer.stats()
        assert stats.evictions > 50
        assert stats.demand_hits > 0 and stats.demand_misses > stats.evictions
        assert stats.arena_peak <= stats.cache_bytes == 3 * reserved.slot


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
    assert {
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q8_0",
        "Q2_K",
        "Q6_K",
        "IQ1_S",
        "IQ4_XS",
        "TQ1_0",
        "MXFP4",
    } <= set(TYPES)
    # F32, F16, Q8_0, Q8_K and more
    assert len({activation_type(t) for t in TYPES.values() if has_cpu_kernel(t)}) >= 4


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


SMALL = [(512, n_rows) for n_rows in (1, 2, 3, 5, 11, 34)]
# from 1024 rows on a single token's are dealt in chunks of 64, too
LARGER = [(256, 1), (256, 7), (512, 65), (768, 130), (256, 1027), (2048, 258)]


@pytest.mark.parametrize(
    "shape",
    [*SMALL, (96, 23), *(pytest.param(shape, marks=pytest.mark.slow) for shape in LARGER)],
    ids=str,
)
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_rows_that_four_does_not_divide(name, shape, tmp_path, backend):
    """By one to four threads, of one token and of several: also a thread's share of
    less than four rows, columns that four do not divide, and rows of an odd number of
    blocks.
    """
    if shape[0] < 256 and name.endswith("_K"):
        return
    rng = np.random.default_rng(shape[1])
    plain, reserved = pair(tmp_path, TYPES[name], rng, shape=shape)
    with plain, reserved:
        for n_tokens in (1, 3, 22):
            with Op(plain, reserved, n_tokens=n_tokens) as op:
                for n_threads in (1, 2, 3, 4):
                    for _ in range(5 if shape in LARGER else 1):
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
            with Op(
                plain,
                reserved,
                n_tokens=n_tokens,
                n_rows_in=n_rows_in,
                padded_ids=padded_ids,
                padded_rows=padded_rows,
            ) as op:
                for n_threads in (1, 2, 4):
                    op.assert_equal(backend, rng, n_threads)
        assert reserved.buffer.stats().evictions > 0


@pytest.mark.parametrize(
    "names",
    [("Q8_0", "Q4_K", "F16"), ("F32", "BF16", "IQ2_XXS", "Q4_1"), ("F16", "F16", "Q5_K")],
    ids="-".join,
)
@pytest.mark.parametrize("n_none", [0, 2, N_EXPERT - 1])
def test_mixed_types_and_none(names, n_none, tmp_path, backend):
    """Experts of several types in one tensor: each row is what a plain tensor of its
    expert's type gives; none gives 0.
    """
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((N_EXPERT, N_ROWS, N_COLS), np.float32)
    types = [TYPES[name] for name in names]
    type_of = np.array([types[e % len(types)] for e in range(N_EXPERT)])
    type_of[rng.choice(np.arange(1, N_EXPERT), n_none, replace=False)] = NONE
    data = {t: quantized(weights, t) for t in types}
    slices = [None if t == NONE else data[t][e] for e, t in enumerate(type_of)]
    assert len({activation_type(t) for t in types}) >= 2
    with contextlib.ExitStack() as stack:
        plains = [stack.enter_context(CpuTensor(data[t], t)) for t in data]
        reserved = stack.enter_context(
            BufferTensor(tmp_path / "experts", slices, type_of.tolist(), n_slots=2)
        )
        for n_tokens in (1, 8, 40):
            for n_rows_in in (1, N_USED):
                with Op(*plains, reserved, n_tokens=n_tokens, n_rows_in=n_rows_in) as op:
                    for n_threads in (1, 2, 4):
                        row_types = type_of[op.choose(rng)]
                        expected = np.zeros(op.out_shape, np.uint32)
                        for i, t in enumerate(data):
                            out = op.compute(backend, i, n_threads)
                            expected[row_types == t] = out[row_types == t]
                        np.testing.assert_array_equal(
                            op.compute(backend, len(plains), n_threads), expected
                        )
        # one expert has room, and some tokens have none
        assert (reserved.buffer.stats().evictions > 0) == (n_none < N_EXPERT - 1)


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


def test_resizing_with_classes_of_different_sizes(tmp_path, backend):
    """Slots of one size give their bytes to another size and back."""
    rng = np.random.default_rng(11)
    types = [F32, Q4_K] * (N_EXPERT // 2)
    weights = rng.standard_normal((N_EXPERT, N_ROWS, N_COLS), np.float32)
    data = {t: quantized(weights, t) for t in set(types)}
    slices = [data[t][e] for e, t in enumerate(types)]
    with (
        CpuTensor(data[F32], F32) as f32,
        CpuTensor(data[Q4_K], Q4_K) as q4_k,
        BufferTensor(tmp_path / "experts", slices, types, n_slots=2) as reserved,
    ):
        with Op(f32, q4_k, reserved, n_tokens=12) as op:
            for n_slots in (2, 4.5, 2.25, 3, 2, 8):
                reserved.buffer.set_cache_bytes(int(n_slots * reserved.slot))
                for _ in range(4):
                    is_f32 = op.choose(rng) % 2 == 0
                    expected = np.where(
                        is_f32[:, :, None], op.compute(backend, 0), op.compute(backend, 1)
                    )
                    np.testing.assert_array_equal(op.compute(backend, 2), expected)
                    stats = reserved.buffer.stats()
                    assert stats.arena_committed <= stats.cache_bytes


def test_cancelled(tmp_path, backend):
    """A cancelled product ends without the missing experts and without an error; then
    all is as before.
    """
    rng = np.random.default_rng(14)
    plain, reserved = pair(tmp_path, Q8_0, rng, n_slots=2)
    buffer = reserved.buffer
    with plain, reserved, Op(plain, reserved, n_tokens=16, n_used=N_EXPERT) as op:
        backend.set_abort_callback(native.should_abort, buffer.handle)
        op.choose(rng)
        for n_threads in (1, 2, 4):
            native.set_cancelled(buffer.handle, True)
            op.compute(backend, 1, n_threads, status=ABORTED)
            native.set_cancelled(buffer.handle, False)
            buffer.check()
            assert not native.should_abort(buffer.handle)
            op.assert_equal(backend, rng, n_threads)


@pytest.mark.parametrize("direct_io", [True, False])
def test_read_error_and_recovery(direct_io, tmp_path, backend):
    """A file cut off under the buffer ends the graph with a message; once it is whole
    again, so are the results.
    """
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
            assert any(f"at offset {offset} " in str(error.value) for offset in offsets), str(
                error.value
            )
            assert not native.should_abort(buffer.handle)
            buffer.check()  # taken: nothing is left
        assert buffer.stats().read_errors >= 3

        reserved.path.write_bytes(content)
        for n_threads in (1, 2, 4):
            op.assert_equal(backend, rng, n_threads)
        assert not native.should_abort(buffer.handle)
        stats = buffer.stats()
        assert stats.arena_committed <= stats.cache_bytes
