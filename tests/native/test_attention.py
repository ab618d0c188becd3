"""Attention by our kernels against ggml's FLASH_ATTN_EXT: the same bits, whatever the
shape, the mask, the types of K and V and the number of threads.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

import moeoff
from helpers.attention import MASKS, Attention, Shape, kernels
from helpers.files import DEMO, ROOT
from helpers.ggml_api import F16, Context
from helpers.logits import Stock, assert_bit_equal, greedy_logits
from moeoff.llamacpp import native
from moeoff.llamacpp.llama import api

# MLA's last; with AVX2 others, too, which four vectors of eight divide
HEADS = [(64, 64), (128, 128), (256, 256), (192, 128), (192, 192), (576, 512)]
N_CASES = int(os.environ.get("MOEOFF_ATTENTION_CASES", 100))  # of each kind; a proof takes 10,000
# the fewest and the most tokens, the most KV heads
KINDS = {"a token": (1, 1, 2), "few tokens": (2, 9, 2), "a prompt": (64, 100, 1)}


def has_kernels() -> bool:
    system = api.llama_print_system_info().decode()
    return "AVX2 = 1" in system and "FMA = 1" in system and "F16C = 1" in system


def random_shape(kind: str, rng: np.random.Generator) -> Shape:
    fewest, most, n_kv_heads = KINDS[kind]
    dk, dv = (
        HEADS[rng.integers(len(HEADS))]
        if most < 64 or rng.random() < 0.2
        else HEADS[rng.integers(2)]
    )
    n_tokens = int(rng.integers(fewest, most + 1))
    types = (
        rng.choice(["F16", "Q8_0", "Q4_0", "BF16"], 2)
        if most < 64 and rng.random() < 0.4
        else ["F16", "F16"]
    )
    mask = str(rng.choice(MASKS))
    return Shape(
        dk,
        dv,
        n_kv_heads=int(rng.integers(1, n_kv_heads + 1)),
        n_group=int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16] if most < 64 else [1, 2, 4])),
        n_tokens=n_tokens,
        n_kv=n_tokens + int(rng.integers(600) if rng.random() < 0.3 else rng.integers(500, 700)),
        n_streams=2 if rng.random() < 0.15 else 1,
        k=str(types[0]),
        v=str(types[1]),
        mask=mask,
        max_bias=8 if mask != "none" and rng.random() < 0.2 else 0,
        softcap=30 if rng.random() < 0.15 else 0,
        sinks=bool(rng.random() < 0.2),
        style=str(rng.choice(["normal", "large", "heavy", "tiny", "zeros"])),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_ggml(kind):
    for seed in range(N_CASES):
        rng = np.random.default_rng(seed)
        shape, n_threads = random_shape(kind, rng), int(rng.integers(1, 6))
        with Attention(shape, rng) as attention:
            expected, computed = (attention.bits(n_threads, ours) for ours in (False, True))
        same = expected == computed
        assert same.all(), (
            f"seed {seed}, {shape} on {n_threads} threads: {(~same).sum()} of {same.size} differ"
        )
        assert np.isfinite(expected.view(np.float32)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_work_area_serves_fewer_threads_than_planned(kind):
    """OpenMP may give fewer: the work area for n threads is large enough for every
    smaller number.
    """
    for seed in range(N_CASES):
        rng = np.random.default_rng(seed)
        shape = random_shape(kind, rng)
        with Attention(shape, rng) as attention:
            sizes = [attention.work_size(n_threads) for n_threads in range(1, 65)]
        assert sizes == sorted(sizes), f"seed {seed}, {shape}"


def test_fewer_threads_than_planned(tmp_path):
    """20 threads are planned and OpenMP gives 12, which take larger parts of the query
    rows.
    """
    program = tmp_path / "fewer.py"
    program.write_text(
        "import numpy as np\nimport moeoff\n"
        "from helpers.attention import Attention, Shape\nfrom helpers.files import DEMO\n"
        "with Attention(Shape(128, 128, 4, 8, 20, 256), np.random.default_rng(0)) as a:\n"
        "    assert (a.bits(20, True) == a.bits(20, False)).all()\n"
        "threads = {'n_threads': 20, 'n_threads_batch': 20}\n"
        "with moeoff.Llama(DEMO, n_ctx=256, expert_memory='3M', **threads) as llm:\n"
        "    llm.eval(list(range(300, 400)))\n    llm.eval([300])\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "12", "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, program], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_kernels_are_those_of_this_processor():
    """A kernel that does not pass the comparison before its first use would only be
    slow.
    """
    # without FP16 tried emulated alone: refused, they are only slow
    emulated = "AVX512 = 1" in api.llama_print_system_info().decode()
    assert native.attention_kernels() in ({1, -1} if emulated else {int(has_kernels())})
    with kernels(False):
        assert native.attention_kernels() == 0


def test_which_heads_have_sums_in_f32():
    with Context(1, 1) as context:
        k = context.tensor(F16, 128, 1, 8)
        assert [
            native.attend_in_f32(k, *heads) for heads in ((128, 128), (128, 40), (40, 128))
        ] == [has_kernels(), False, False]


@pytest.mark.skipif(not has_kernels(), reason="no kernels for this processor")
def test_our_kernels_are_what_is_compared():
    """One that differs in a bit would be noticed: a weighted mean of 4,096 values in
    f16, which ours must get as wrong as ggml.
    """
    shape = Shape(128, 128, 1, 8, 1, 4096, mask="none")
    with Attention(shape, np.random.default_rng(0)) as attention:
        one, two = (attention.bits(n_threads, True) for n_threads in (1, 2))
        assert not np.array_equal(one, two)  # the threads share the positions, as ggml's do
        assert [
            np.array_equal(attention.bits(n, False), bits) for n, bits in ((1, one), (2, two))
        ] == [True, True]


@pytest.mark.skipif(not has_kernels(), reason="no kernels for this processor")
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_sums_in_f32_are_more_exact(n_tokens):
    """A mean of 4,096 values, against one of float64: ggml rounds the sum to f16 after
    each of them.
    """
    shape = Shape(64, 128, 2, 4, n_tokens, 4096, mask="none")
    errors = []
    for in_f32 in (False, True):
        with Attention(shape, np.random.default_rng(0), in_f32=in_f32) as attention:
            out = attention.bits(2, True).view(np.float32).reshape(n_tokens, 2, 4, 128)
            q, k, values = attention.operands
        q, k, values = (
            x.astype(np.float64)
            for x in (
                q.reshape(n_tokens, 2, 4, 64),
                k.reshape(4096, 2, 64),
                values.reshape(4096, 2, 128),
            )
        )
        scores = np.einsum("tgrd,pgd->tgrp", q, k) / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact = np.einsum("tgrp,pgd->tgrd", weights / weights.sum(-1, keepdims=True), values)
        errors.append(float(np.abs(out - exact).max() / np.abs(exact).max()))
    assert errors[0] > 1e-3 and errors[1] < 1e-5, errors


@pytest.mark.parametrize("cache, n_tokens, threads", [
    ("F16", 600, (1, 2)),
    pytest.param("Q8_0", 600, (1, 2), marks=pytest.mark.slow),
    pytest.param("F16", 4096, (1, 2, 4), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_deep_text_has_stocks_logits(cache, n_tokens, threads):
    """A prompt and decoded tokens behind many others, where ggml's threads share a
    token's positions; by our kernels and by ggml's.
    """
    from moeoff.gguf.quantize import type_from_name

    tokens, kv = list(np.random.default_rng(0).integers(40, 250, n_tokens)), type_from_name(cache)
    for n_threads in threads:
        options = {
            "n_ctx": 2 * n_tokens,
            "n_batch": 512,
            "logits_all": True,
            "verbose": False,
            "n_threads": n_threads,
            "n_threads_batch": n_threads,
        }
        options |= {"flash_attn": True, "type_k": kv, "type_v": kv}
        with kernels(False), contextlib.closing(Stock(str(DEMO), **options)) as stock:
            expected = greedy_logits(stock, tokens, 6)
        with moeoff.Llama(str(DEMO), expert_memory=1 << 30, **options) as llm:
            assert_bit_equal(greedy_logits(llm, tokens, 6), expected)
