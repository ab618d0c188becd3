"""Products of four rows at a time against ggml's vec_dot, row by row: the same bits,
whatever the rows and the column hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from ctypes import POINTER, c_float, c_int, c_size_t, c_void_p
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import moeoff
from fork import Fork, cache_root, patched_tree, pinned_sdist
from grow_model import Growth, grow_model
from helpers import ggml_api
from helpers.files import DEMO, ROOT
from helpers.ggml_api import Context, activation_type, cpu_buffer_type, quantized, write
from helpers.logits import Stock, assert_bit_equal, greedy_logits
from moeoff.engine.buffer import ExpertBuffer
from moeoff.gguf.file import ModelFile
from moeoff.gguf.model_index import is_expert
from moeoff.gguf.quantize import row_bytes, type_from_name
from moeoff.llamacpp import native
from moeoff.llamacpp.llama import api

# weights
UNITS = {
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
    "Q3_K": 256,
    "Q2_K": 256,
    "Q4_0": 64,
    "IQ4_NL": 64,
    "MXFP4": 64,
    "Q5_0": 64,
    "Q8_0": 64,
}
TYPES = {name: type_from_name(name) for name in UNITS}

# void (*)(int n, float s[4], const void * rows, size_t stride, const void * column)
FourRows = ctypes.CFUNCTYPE(None, c_int, POINTER(c_float), c_void_p, c_size_t, c_void_p)
# void (*)(int n, float * const s[4], const void * rows, size_t stride, const void *
# const columns[4])
FourColumns = ctypes.CFUNCTYPE(
    None, c_int, POINTER(c_void_p), c_void_p, c_size_t, POINTER(c_void_p)
)
FUZZ = ROOT / "scripts" / "build" / "fuzz_row_kernels.sh"
AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
# encoded otherwise, AVX-VNNI's dpbusd
AVX2_VNNI_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512vl", "-mavx512vnni")


@pytest.fixture(scope="module", autouse=True)
def tables_of_ggml_cpu() -> None:
    """They are made at the first use of a backend or of a kernel; without them
    vec_dot's scales are 0.
    """
    native.row_kernel(TYPES["Q4_K"])


def types_with_kernels() -> set[str]:
    """Return the types with kernels for the processor of this build."""
    text = api.llama_print_system_info().decode()
    built = {
        item.split("=")[0].split(":")[-1].strip()
        for item in text.split("|")
        if item.strip().endswith("= 1")
    }
    if built >= {"AVX512", "AVX512_VNNI", "F16C"}:
        return set(TYPES)
    if built >= {"AVX2", "FMA", "F16C"}:
        return set(TYPES) - {"Q5_0"}
    if "DOTPROD" in built:
        return {"Q4_K", "Q6_K", "IQ4_NL", "MXFP4"} | (set() if "SVE" in built else {"Q4_0"})
    return set()


def expected_products(type: int, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float32 [n_x, n_rows] by vec_dot: rows uint8 [n_rows, bytes of a row], x float32
    [n_x, n_cols].
    """
    out = np.empty((len(x), len(rows)), np.float32)
    for i, column in enumerate(x):
        converted = ggml_api.from_float(activation_type(type), column)
        for r, row in enumerate(rows):
            ggml_api.vec_dot(
                type, x.shape[1], out[i, r:].ctypes.data, row.ctypes.data, converted.ctypes.data
            )
    return out


def products(type: int, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), len(rows)), np.float32)
    assert (
        native.row_products(
            type, rows.ctypes.data, len(rows), x.shape[1], x.ctypes.data, len(x), out.ctypes.data
        )
        == 0
    )
    return out


def random_rows(name: str, n_rows: int, n_cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]: any bits at all, bytes that are all alike in each
    block, or weights of numbers.
    """
    shape = (n_rows, row_bytes(TYPES[name], n_cols))
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(0, 256, shape, np.uint8)
    if kind == 1:
        block = row_bytes(TYPES[name], 256 if "K" in name else 32)
        return np.repeat(
            rng.choice(
                np.array([0x00, 0x01, 0x7B, 0x80, 0xFF], np.uint8), (n_rows, shape[1] // block)
            ),
            block,
            axis=1,
        )
    weights = rng.standard_normal((1, n_rows, n_cols), np.float32) * np.float32(
        rng.choice([1e-8, 1e-4, 1.0, 1e4])
    )
    return quantized(weights, TYPES[name]).reshape(shape)


def random_columns(n: int, n_cols: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [n, n_cols] of any size, with zeros, and some with infinite ones and such
    that are no numbers.
    """
    x = rng.standard_normal((n, n_cols), np.float32) * np.float32(
        rng.choice([0.0, 1e-38, 1e-6, 1.0, 1e30])
    )
    x[rng.random(x.shape) < 0.1] = 0
    x[rng.random(x.shape) < 0.1] *= 100
    if rng.random() < 0.2:
        x[rng.integers(n), rng.integers(n_cols, size=3)] = rng.choice(
            np.array([np.nan, np.inf, -np.inf], np.float32), 3
        )
    return x


def compare(name: str, n_products: int) -> None:
    rng = np.random.default_rng(TYPES[name])
    total = numbers = 0
    while total < n_products:
        n_rows, n_columns = rng.integers(1, 24), rng.integers(1, 10)
        # also an odd number of blocks
        n_cols = int(UNITS[name] // (1 if "K" in name else 2) * rng.integers(1, 14))
        rows, x = random_rows(name, n_rows, n_cols, rng), random_columns(n_columns, n_cols, rng)
        expected, computed = expected_products(TYPES[name], rows, x), products(TYPES[name], rows, x)
        same = (expected.view(np.uint32) == computed.view(np.uint32)) | (
            np.isnan(expected) & np.isnan(computed)
        )
        assert same.all(), f"{(~same).sum()} of {same.size} differ, {n_rows} rows of {n_cols}"
        total += expected.size
        numbers += int(np.isfinite(expected).sum())
    assert numbers > total / 3


@pytest.mark.parametrize("n_products", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", UNITS)
def test_bits_of_vec_dot(name, n_products):
    compare(name, n_products)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The fork's sources."""
    path, fork = tmp_path_factory.mktemp("sources") / "tree", Fork.load()
    patched_tree(fork, pinned_sdist(fork, cache_root()), path)
    return path


def fuzz(tree: Path, n_products: int, *flags: str, **environment: str) -> dict[str, str]:
    """Return what a build of the kernels with these compiler flags prints of each type.
    Its exit code says whether all are equal.
    """
    done = subprocess.run(
        ["bash", str(FUZZ), str(n_products), *flags],
        env=os.environ | {"TREE": str(tree)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "compiler, flags", [("g++", "-msse4.2"), ("aarch64-linux-gnu-g++", "-march=armv8-a")]
)
def test_a_processor_without_wide_registers_has_a_build(compiler, flags, tree):
    """The wheels' lowest levels, of what has kernels for others."""
    if not shutil.which(compiler) or (flags.startswith("-ms") and platform.machine() != "x86_64"):
        pytest.skip(f"needs {compiler}")
    ggml = tree / "vendor/llama.cpp/ggml"
    includes = [
        f"-I{folder}"
        for folder in (
            ggml / "include",
            ggml / "src",
            ggml / "src/ggml-cpu",
            ROOT / "llamacpp_patches/src/core",
        )
    ]
    for name in ("attention", "row-kernels"):
        source = ROOT / "llamacpp_patches/src/ggml-cpu" / f"moeoff-{name}.cpp"
        done = subprocess.run(
            [compiler, "-std=c++17", "-fsyntax-only", flags, *includes, source],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86"
)
def test_bits_of_vec_dot_with_avx2(tree):
    """Processors that have no more than AVX2; under the address and undefined-behaviour
    sanitizers.
    """
    assert {name.upper() for name in fuzz(tree, 3000, *AVX2_FLAGS, SANITIZE="1")} == set(TYPES) - {
        "Q5_0"
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86"
)
@pytest.mark.parametrize(
    "flags",
    [AVX2_FLAGS, AVX2_VNNI_FLAGS, ("-mavx",), ("-march=native",)],
    ids=["avx2", "avx2-vnni", "avx", "native"],
)
def test_tiled_products_are_exact(flags, tree):
    """ggml's tiled products, which prompts use: the sums of integers that the formats
    define, or vec_dot's, for 10,000 random shapes of each type.
    """
    if flags is AVX2_VNNI_FLAGS and "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs VNNI")
    lines = fuzz(tree, 10_000, *flags, PROGRAM="fuzz_tiled")
    assert len(lines) == (16 if flags in (AVX2_FLAGS, AVX2_VNNI_FLAGS) else 13)
    assert set(lines.values()) == {"10000 cases are equal"}


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86"
)
def test_tiled_products_stay_in_their_buffers(tree):
    """Under the address and undefined-behaviour sanitizers."""
    assert len(fuzz(tree, 200, *AVX2_FLAGS, PROGRAM="fuzz_tiled", SANITIZE="1")) == 16


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86"
)
def test_what_is_rounded_otherwise_is_refused(tree):
    """Without contraction q5_K's vec_dot rounds products that its kernel does not; a
    few products do not show it.
    """
    lines = fuzz(tree, 3000, *AVX2_FLAGS, "-ffp-contract=off")
    assert lines["q5_K"].startswith("refused") and not any(
        line.startswith("refused") for name, line in lines.items() if name != "q5_K"
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("instructions", ["dotprod", "dotprod+i8mm"])
def test_bits_of_vec_dot_on_arm(instructions, tree):
    """Emulated."""
    emulator = next(
        (name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)), None
    )
    if not (shutil.which("aarch64-linux-gnu-g++") and emulator):
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    environment = {
        "CC": "aarch64-linux-gnu-gcc",
        "CXX": "aarch64-linux-gnu-g++",
        "RUN": f"{emulator} -cpu max",
    }
    lines = fuzz(tree, 20_000, f"-march=armv8.2-a+{instructions}+fp16", **environment)
    assert {name.upper() for name in lines} == {
        "Q4_K",
        "Q6_K",
        "Q4_0",
        "IQ4_NL",
        "MXFP4",
    } and not any("refused" in line for line in lines.values())


@pytest.mark.perf
@pytest.mark.parametrize("name", ["MXFP4", "Q4_0", "IQ4_NL"])
def test_a_column_is_looked_at_in_little_time(name, kernels_on):
    """Prompts multiply 16 rows with each column: what is done for a column as a whole,
    once for them, takes less than converting it.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 2880), np.float32)

    def once() -> float:
        """CPU seconds of the columns, whatever the number of rows."""
        times = {}
        for n_rows in (16, 256):
            rows = quantized(
                rng.standard_normal((1, n_rows, x.shape[1]), np.float32), TYPES[name]
            ).reshape(n_rows, -1)
            for _ in range(20):
                began = time.thread_time()
                products(TYPES[name], rows, x)
                times[n_rows] = min(times.get(n_rows, 1.0), time.thread_time() - began)
        return times[16] - (times[256] - times[16]) * 16 / 240

    ours = once()
    native.use_row_kernels(False)
    assert ours < 2 * once()


def test_no_kernel_is_refused():
    """A kernel that does not pass the comparison before its first use would only be
    slow.
    """
    assert {name: native.row_kernel(number) for name, number in TYPES.items()} == {
        name: int(name in types_with_kernels()) for name in TYPES
    }
    assert {
        native.row_kernel(number) for number in range(-1, 64) if number not in TYPES.values()
    } == {0}


@pytest.mark.parametrize("name", UNITS)
def test_a_kernel_with_a_wrong_bit_is_refused(name):
    def kernel(n: int, s, rows: int, stride: int, column: int) -> None:
        for r in range(4):
            ggml_api.vec_dot(
                TYPES[name], n, ctypes.addressof(s.contents) + 4 * r, rows + r * stride, column
            )
        if wrong and n > UNITS[name]:
            bits = ctypes.cast(s, POINTER(ctypes.c_uint32))
            bits[3] ^= 1

    for wrong in (False, True):
        assert (
            native.row_kernel_agrees(
                TYPES[name], UNITS[name], ctypes.cast(FourRows(kernel), c_void_p), None
            )
            != wrong
        )


@pytest.mark.parametrize("name", ["Q4_0", "IQ4_NL", "MXFP4", "Q5_0", "Q8_0"])
def test_a_kernel_of_four_columns_with_a_wrong_bit_is_refused(name):
    def product(n: int, s: int, row: int, column: int) -> None:
        ggml_api.vec_dot(TYPES[name], n, s, row, column)

    def kernel(n: int, s, rows: int, stride: int, column: int) -> None:
        for r in range(4):
            product(n, ctypes.addressof(s.contents) + 4 * r, rows + r * stride, column)

    def four_columns(n: int, s, rows: int, stride: int, columns) -> None:
        for c in range(4):
            for r in range(4):
                product(
                    n,
                    s[c] + 4 * r,
                    rows + r * stride,
                    columns[0] if wrong and c == 3 else columns[c],
                )

    for wrong in (False, True):
        both = (
            ctypes.cast(FourRows(kernel), c_void_p),
            ctypes.cast(FourColumns(four_columns), c_void_p),
        )
        assert native.row_kernel_agrees(TYPES[name], UNITS[name], *both) != wrong


@pytest.mark.parametrize("n_rows", [1, 3, 4, 33, 130, 1024])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4", "Q8_0"])
def test_dense_products(name, n_rows, backend):
    """MUL_MAT with weights in a buffer of a model that has an expert buffer, and in any
    other.
    """
    rng = np.random.default_rng(n_rows)
    type = type_from_name(name)
    data = quantized(rng.standard_normal((1, n_rows, 512), np.float32), type)
    with contextlib.closing(ExpertBuffer()) as buffer, Context() as dense, Context() as plain:
        weights = [context.tensor(type, 512, n_rows) for context in (dense, plain)]
        with buffer.loading():
            dense.allocate(cpu_buffer_type())
            dense.adopt()
        plain.allocate(cpu_buffer_type())
        for tensor in weights:
            write(tensor, data)
        assert [ggml_api.is_dense(tensor) for tensor in weights] == [True, False]
        for n_columns in (1, 2, 5, 7, 8, 9):
            with Context(6, 2) as graphs:
                x = graphs.tensor(ggml_api.F32, 512, n_columns)
                outputs = [graphs.mul_mat(tensor, x) for tensor in weights]
                computed = [graphs.graph(out) for out in outputs]
                graphs.allocate(cpu_buffer_type())
                write(x, rng.standard_normal((n_columns, 512), np.float32))
                for n_threads in (1, 2, 3, 4):
                    for out in outputs:
                        write(out, np.full((n_columns, n_rows), 0x7FBADBAD, np.uint32))
                    for graph in computed:
                        assert backend.compute(graph, n_threads) == ggml_api.SUCCESS
                    numbers, expected = (ggml_api.read(out, (n_columns, n_rows)) for out in outputs)
                    np.testing.assert_array_equal(numbers, expected)


@pytest.fixture
def kernels_on():
    yield
    native.use_row_kernels(True)


def test_they_can_be_switched_off(kernels_on):
    native.use_row_kernels(False)
    assert {native.row_kernel(number) for number in TYPES.values()} == {0}
    for name in TYPES:
        compare(name, 100)
    native.use_row_kernels(True)
    assert {
        name for name, number in TYPES.items() if native.row_kernel(number)
    } == types_with_kernels()


def assert_stocks_bits(path: Path, threads: Iterable[int]) -> None:
    """A model's logits with stock llama.cpp, whose model has no expert buffer and uses
    vec_dot alone, with its experts in memory and from disk, with row kernels and
    without.
    """
    for n_threads in threads:
        options = {
            "n_ctx": 64,
            "logits_all": True,
            "verbose": False,
            "n_threads": n_threads,
            "n_threads_batch": n_threads,
            "flash_attn": n_threads % 2 == 0,
        }
        with contextlib.closing(Stock(str(path), **options)) as stock:
            expected = greedy_logits(stock, list(range(40, 60)), 6)
        for memory, is_on in ((1 << 30, True), (8 << 20, True), (8 << 20, False)):
            native.use_row_kernels(is_on)
            with moeoff.Llama(str(path), expert_memory=memory, **options) as llm:
                assert_bit_equal(greedy_logits(llm, list(range(40, 60)), 6), expected)
                assert (llm.stats().evictions > 0) == (memory == 8 << 20)


LARGER = [("Q4_K", "Q4_K"), ("MXFP4", "Q6_K"), ("Q4_0", "Q4_0"), ("IQ4_NL", "Q5_K"), ("Q3_K", "Q2_K"),
          *((name, "Q8_0") for name in ("F16", "BF16", "Q2_K", "Q6_K", "IQ4_XS"))]  # fmt: skip


@pytest.mark.parametrize(
    "experts, dense, n",
    [("MXFP4", "Q4_K", 2), *(pytest.param(*types, 4, marks=pytest.mark.slow) for types in LARGER)],
)
def test_models_give_stocks_bits(experts, dense, n, tmp_path, kernels_on):
    path = tmp_path / "model.gguf"
    # 2 is as small as rows of 256 weights allow: quantizing takes longest
    grow_model(DEMO, path, Growth(n, n, type_from_name(experts), type_from_name(dense)))
    assert_stocks_bits(path, (2, 3) if n == 2 else (1, 2, 3, 4))


def test_a_model_in_k_quants_gives_stocks_bits(grown, kernels_on):
    assert_stocks_bits(Path(grown), (2,))


@pytest.mark.slow
def test_a_model_of_mixed_types_gives_stocks_bits(tmp_path, kernels_on):
    """Types that differ from layer to layer, as llama-quantize chooses them."""
    grow_model(
        DEMO, tmp_path / "grown.gguf", Growth(4, 4, type_from_name("Q8_0"), type_from_name("Q8_0"))
    )
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, True
    assert (
        llama_cpp.llama_model_quantize(
            bytes(tmp_path / "grown.gguf"), bytes(tmp_path / "model.gguf"), params
        )
        == 0
    )
    with ModelFile(tmp_path / "model.gguf") as file:
        assert {tensor.type for name, tensor in file.tensors.items() if is_expert(name)} == {
            TYPES["Q4_K"],
            TYPES["Q6_K"],
        }
    assert_stocks_bits(tmp_path / "model.gguf", (1, 2, 3, 4))
