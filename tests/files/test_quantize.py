"""The quantizer: errors, bytes and refusals of every type that ggml writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given
from hypothesis import strategies as st

from helpers.ggml_api import SLOW_TO_QUANTIZE
from model_writer import quantize_chunks
from moeoff.errors import ModelError
from moeoff.gguf.quantize import dequantize, needs_imatrix, quantize, row_bytes, type_from_name

# Relative RMS error of quantizing normally distributed values, measured, rounded up.
RMS_ERROR = {
    "F32": 0, "F16": 0.0003, "BF16": 0.002, "Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.04,
    "Q5_0": 0.046, "Q5_1": 0.042, "Q4_K": 0.077, "Q4_0": 0.093, "Q4_1": 0.084, "IQ4_NL": 0.082,
    "IQ4_XS": 0.083, "NVFP4": 0.1, "MXFP4": 0.125, "Q3_K": 0.165, "IQ3_S": 0.18, "IQ3_XXS": 0.23,
    "Q2_K": 0.32, "IQ2_S": 0.29, "IQ2_XS": 0.33, "IQ2_XXS": 0.37, "IQ1_S": 0.53, "IQ1_M": 0.63,
    "Q2_0": 0.36,
}  # fmt: skip


def normal(n_rows: int, n_cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_rows, n_cols), dtype=np.float32)


def flat_imatrix(type: int, n_cols: int) -> np.ndarray | None:
    return np.ones(n_cols, np.float32) if needs_imatrix(type) else None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_TO_QUANTIZE))
        for name in RMS_ERROR
    ],
)
def test_round_trip_error(name):
    type, rows = type_from_name(name.lower()), normal(64, 512)
    data = quantize(rows, type, flat_imatrix(type, 512))
    assert data.dtype == np.uint8 and data.shape == (64, row_bytes(type, 512))
    error = dequantize(data, type, rows.shape) - rows
    assert np.sqrt((error**2).mean()) <= RMS_ERROR[name] * np.sqrt((rows**2).mean())


@given(
    st.sampled_from(["Q4_0", "Q4_K", "Q8_0", "IQ4_XS", "MXFP4", "IQ2_XXS"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_chunked_is_whole(name, sizes):
    type, rows = type_from_name(name), normal(sum(sizes), 256)
    imatrix = flat_imatrix(type, 256)
    ends = np.cumsum(sizes)
    chunks = [lambda a=end - size, b=end: rows[a:b] for size, end in zip(sizes, ends, strict=True)]
    pieces = list(quantize_chunks(chunks, type, imatrix))
    assert np.array_equal(np.concatenate(pieces), quantize(rows, type, imatrix))
    whole = dequantize(np.concatenate(pieces), type, rows.shape)
    assert all(
        np.array_equal(dequantize(p, type, (len(p), 256)), whole[e - len(p) : e])
        for p, e in zip(pieces, ends, strict=True)
    )


def searched(rows: np.ndarray, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Return rows after a round trip through Q2_0, whose scales are searched."""
    type = type_from_name("Q2_0")
    data = quantize(rows, type, imatrix)
    assert data.dtype == np.uint8 and data.shape == (len(rows), row_bytes(type, rows.shape[1]))
    return dequantize(data, type, rows.shape)


def test_searched_q2_0():
    """Nearly the error of every scale tried by brute force."""
    rows = normal(64, 512)
    blocks = rows.reshape(-1, 64)
    ours = ((searched(rows) - rows).reshape(-1, 64) ** 2).sum(axis=1)
    assert np.sqrt(ours.sum()) < 0.36 * np.sqrt((rows**2).sum())
    best = np.full(len(blocks), np.inf)
    for scale in np.linspace(-3, 3, 601)[:, None]:
        if scale != 0:
            best = np.minimum(
                best, ((np.clip(np.rint(blocks / scale), -1, 2) * scale - blocks) ** 2).sum(axis=1)
            )
    assert ours.sum() < 1.02 * best.sum()


def test_searched_q2_0_minds_the_importance():
    rows = normal(64, 512)
    weights = np.random.default_rng(1).exponential(size=512).astype(np.float32)
    error = lambda values: (weights * (values - rows) ** 2).sum()  # noqa: E731
    assert error(searched(rows, weights)) < 0.95 * error(searched(rows))
    assert np.array_equal(searched(rows, np.full(512, 4, np.float32)), searched(rows))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [0, 1e-44, 1e-20, 1e-6, 1, 1e4, 1e38])
def test_searched_q2_0_of_any_size(scale):
    rows = normal(3, 128) * np.float32(scale)
    values = searched(rows)
    assert np.isfinite(values).all()
    if 1e-6 <= scale <= 1e4:  # what F16 holds as a scale
        assert ((values - rows) ** 2).sum() < 0.2 * (rows**2).sum()
    exact = np.random.default_rng(2).integers(-1, 3, (4, 64)).astype(np.float32) * np.float32(-0.5)
    assert np.array_equal(searched(exact), exact)
    assert not searched(rows, np.zeros(128, np.float32)).any() and searched(rows[:0]).shape == (
        0,
        128,
    )


def test_threads_do_not_disturb_each_other():
    inputs = [
        (normal(20, 512), type_from_name(name))
        for name in RMS_ERROR
        if name not in SLOW_TO_QUANTIZE
    ]
    expected = [quantize(rows, type, flat_imatrix(type, 512)) for rows, type in inputs]
    with ThreadPoolExecutor(4) as pool:
        quantized = list(pool.map(lambda x: quantize(x[0], x[1], flat_imatrix(x[1], 512)), inputs))
    assert all(map(np.array_equal, quantized, expected))


def test_chunk_errors_come_through():
    def fail():
        raise KeyError("mine")

    chunks = quantize_chunks([lambda: normal(1, 32), fail, lambda: normal(1, 32)], T.Q8_0)
    assert len(next(chunks)) == 1
    with pytest.raises(KeyError, match="mine"):
        next(chunks)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: quantize(normal(2, 100), T.Q4_K), "256"),
        (lambda: quantize(normal(2, 256)[0], T.Q4_K), "n_rows"),
        (lambda: quantize(normal(2, 256), T.IQ2_XXS), "imatrix"),
        (lambda: quantize(normal(2, 256), T.Q8_0, np.ones(255)), "imatrix"),
        (lambda: quantize(normal(2, 256) / np.float32(0), T.Q8_0), "finite"),
        (lambda: quantize(normal(2, 256), T.Q8_K), "does not quantize"),
        (lambda: quantize(normal(2, 256), 4), "unknown"),
        (lambda: quantize(normal(2, 256), 99), "unknown"),
        (lambda: row_bytes(-1, 256), "unknown"),
        (lambda: dequantize(bytes(33), T.Q8_0, (1, 32)), "34"),
        (lambda: dequantize(bytes(36), T.Q8_1, (1, 32)), "floats"),
        (lambda: dequantize(b"", T.F32, ()), "row length"),
        (lambda: type_from_name("Q9_9"), "Q4_K"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_wrong_arguments(call, match):
    with pytest.raises(ModelError, match=match):
        call()
