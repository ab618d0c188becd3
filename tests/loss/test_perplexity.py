"""moeoff eval: llama-perplexity's numbers, KL and agreement beside the lossless model,
in bounded memory.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moeoff
from helpers.attention import DEMO_IN_F32
from helpers.files import ROOT
from helpers.logits import Stock
from moeoff import OptionError
from moeoff.experts.convert import convert
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.perplexity import (
    Reference,
    Window,
    evaluate,
    evaluate_model,
    n_scored,
    open_model,
    read_windows,
)
from moeoff.measure.statistics import Estimate, Scores, divergence, log_probs, student

CTX = 64


@pytest.fixture(scope="module")
def sidecar(demo, tmp_path_factory) -> str:
    return convert(
        demo, output=tmp_path_factory.mktemp("experts") / "demo.experts.gguf", tiers="Q4_0,Q2_0"
    ).path


def opened(model, **options):
    return open_model(
        model, CTX, expert_memory=1 << 26, n_threads=1, **({"experts": False} | options)
    )


def test_agrees_with_stock_logits(demo, text):
    """Perplexity from stock llama.cpp's logits on the same windows, in both modes."""
    stock = Stock(demo, n_ctx=CTX, logits_all=True, n_threads=1, n_threads_batch=1)
    with opened(demo) as llm:
        windows = read_windows(llm, [text], CTX, 3)
        assert len(windows) == 3 and windows[1].tokens == tuple(
            llm.tokenize(Path(text).read_bytes())[CTX : 2 * CTX]
        )
        got = {mode: evaluate(llm, windows, mode=mode) for mode in ("prefill", "decode")}
    for mode, scores in got.items():
        for window, nll in zip(windows, scores.nll):
            stock.reset()
            batches = (
                [window.tokens]
                if mode == "prefill"
                else [window.tokens[: CTX // 2], *([t] for t in window.tokens[CTX // 2 :])]
            )
            for batch in batches:
                stock.eval(list(batch))
            expected = -log_probs(stock.scores[: CTX - 1])[np.arange(CTX - 1), window.tokens[1:]][
                CTX // 2 :
            ]
            assert len(expected) == n_scored(CTX)
            # stock asked for the logits of the whole window: the last layer's sums have
            # another shape, so not bit for bit
            np.testing.assert_allclose(nll, expected, atol=2e-4)
    stock.close()


def test_reference(demo, text, sidecar):
    with opened(demo) as llm:
        windows = read_windows(llm, [text], CTX, 6)
        assert len({w.text for w in windows}) == 1
        with Reference.record(llm, windows) as reference:
            same = evaluate(llm, windows, reference).quality()
            assert same.loss == Estimate(0, 0, 0) and same.top1 == Estimate(1, 1, 1)
            assert abs(same.kl.value) < 1e-6
            assert evaluate(llm, windows).kl is None
            got = {}
            for tier in ("Q4_0", "Q2_0"):
                with opened(demo, experts=sidecar, tier=tier) as lossy:
                    got[tier] = evaluate(lossy, windows, reference).quality()
    assert 1e-4 < got["Q4_0"].kl.low < got["Q4_0"].kl.high < got["Q2_0"].kl.low
    assert got["Q4_0"].top1.value > got["Q2_0"].top1.value


def test_batches_smaller_than_a_window(demo, text):
    """Without flash attention, which rounds as a batch is large."""
    with opened(demo, flash_attn=False) as llm:
        windows = read_windows(llm, [text], CTX, 2)
        whole = evaluate(llm, windows)
    with moeoff.Llama(
        demo,
        n_ctx=CTX,
        n_batch=24,
        n_ubatch=24,
        logits_all=True,
        n_threads=1,
        experts=False,
        flash_attn=False,
    ) as llm:
        np.testing.assert_allclose(evaluate(llm, windows).nll, whole.nll, atol=2e-3)


def test_wrong_use(demo, text, tmp_path):
    (tmp_path / "short.txt").write_text("Hello")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with opened(demo) as llm:
        for name, message in (
            ("short.txt", "expected at least a window"),
            ("binary", "not UTF-8"),
            ("absent", "cannot be read"),
        ):
            with pytest.raises(OptionError, match=message):
                read_windows(llm, [tmp_path / name], CTX)
        with pytest.raises(OptionError, match="mode: expected one of"):
            evaluate(llm, [Window((1,) * CTX, 0)], mode="x")
        with pytest.raises(OptionError, match="exceed the context"):
            evaluate(llm, [Window((1,) * 1024, 0)])


# --- the command ---


def test_command(demo, text, sidecar, invoke):
    common = ["eval", "-m", demo, "--text", text, "--ctx", str(CTX), "--chunks", "4", "-t", "1"]
    done = invoke(*common, "--json", "--experts", "none")
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    assert plain["n_windows"] == 4 and plain["n_tokens"] == 4 * n_scored(CTX) and "kl" not in plain
    done = invoke(
        *common,
        "--text",
        text,
        "--experts",
        sidecar,
        "--tier",
        "q4_0",
        "--json",
        "--mode",
        "decode",
    )
    lossy = json.loads(done.stdout)
    assert lossy["n_windows"] == 8 and [t["n_windows"] for t in lossy["texts"]] == [4, 4]
    assert lossy["texts"][0]["kl"] == lossy["texts"][1]["kl"]
    assert lossy["kl"]["low"] <= lossy["kl"]["value"] <= lossy["kl"]["high"]
    table = invoke(*common, "--experts", sidecar, "--tier", "Q4_0")
    assert table.returncode == 0 and "loss (95 %)" in table.stdout and "tok/s" in table.stderr
    for arguments, message in (
        (["--tier", "Q8_0", "--experts", sidecar], "no tier Q8_0"),
        (["--tier", "Q8_0", "--experts", "none"], "needs a sidecar"),
        (["--memory", "10M"], "too small"),
    ):
        done = invoke(*common, *arguments)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_what_a_preset_gives_up_is_measured(demo, text, tmp_path):
    """It brings its precision and its tier by its name: the options alone are lossless.
    Low versions are not those of the tier.
    """
    sidecar = convert(demo, output=tmp_path / "x.experts.gguf", tiers="Q2_K,Q4_0").path
    result = evaluate_model(
        demo,
        [text],
        ctx=CTX,
        chunks=3,
        mode="decode",
        strategy="fate-lossy",
        n_threads=1,
        experts=sidecar,
        expert_memory=1 << 21,
    )
    assert result.quality.kl.value > 1e-4 and result.quality.loss is not None
    assert result.stats.tier == "Q4_0" and 0 < result.stats.served_low < result.stats.expert_uses
    assert (
        "all experts in Q4_0, " in result.stats.precision_summary
        and "in low precision" in result.stats.precision_summary
    )


@pytest.mark.parametrize(
    "options", [*[{"attention": "f32"}] * DEMO_IN_F32, {"type_k": "q8_0", "type_v": "q8_0"}]
)
def test_other_sums_and_caches_are_compared_with_f16(demo, text, options):
    result = evaluate_model(demo, [text], ctx=CTX, chunks=3, mode="decode", n_threads=1, **options)
    assert 0 < result.quality.kl.value < 1e-3 and result.precision.lossless


def test_weights_that_are_no_numbers(demo, text, tmp_path, invoke):
    """A router of NaN: a sentence, and no perplexity."""
    model = shutil.copy(demo, tmp_path / "nan.gguf")
    router = ModelIndex.read(demo).dense["blk.4.ffn_gate_inp.weight"]
    with open(model, "r+b") as file:
        file.seek(router.offset)
        file.write(np.full(router.nbytes // 4, np.nan, np.float32).tobytes())
    done = invoke(
        "eval",
        "-m",
        str(model),
        "--text",
        text,
        "--ctx",
        str(CTX),
        "--chunks",
        "1",
        "--experts",
        "none",
    )
    assert (
        done.returncode == 1
        and "nan.gguf: computes NaN" in done.stderr
        and not done.stdout
        and "Traceback" not in done.stderr
    )


@pytest.mark.slow
def test_stays_within_its_budget(grown, text, tmp_path, moeoff_command):
    out = convert(grown, output=tmp_path / "grown.experts.gguf", tiers="Q2_K").path
    common = [
        "eval",
        "-m",
        grown,
        "--text",
        text,
        "--chunks",
        "2",
        "--ctx",
        "256",
        "--experts",
        out,
        "--tier",
        "Q2_K",
        "--json",
    ]
    refused = moeoff_command(*common, "--memory", "60M")
    floor = int(re.search(r"give --memory (\d+)M", refused.stderr)[1])
    done = moeoff_command(*common, "--memory", f"{floor + 24}M")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["cache_bytes"] < result["budget_bytes"] == (floor + 24) << 20
    assert result["peak_rss_bytes"] <= result["budget_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("ctx", [256, 512])
def test_agrees_with_llama_perplexity(ctx, demo, text, moeoff_command):
    """The same four digits, and the same standard error. One sequence a batch (-b); its
    default puts several side by side. Kernels for repacked weights, which some
    processors have for this model's types, round differently.
    """
    program = subprocess.run(
        [sys.executable, ROOT / "scripts/build/fork.py", "perplexity"],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    path = program.stdout.splitlines()[-1]
    options = [
        "-m",
        demo,
        "-f",
        text,
        "-c",
        str(ctx),
        "-b",
        str(ctx),
        "-ub",
        str(ctx),
        "-t",
        "2",
        "--no-repack",
    ]
    theirs = subprocess.run([path, *options], check=True, capture_output=True, text=True)
    value, error = map(
        float, re.search(r"PPL = ([\d.]+) \+/- ([\d.]+)", theirs.stderr + theirs.stdout).groups()
    )
    ours = json.loads(
        moeoff_command(
            "eval", "-m", demo, "--text", text, "--ctx", str(ctx), "--experts", "none", "--json"
        ).stdout
    )
    assert f"{ours['perplexity']:.4f}" == f"{value:.4f}"
    assert ours["perplexity_error"] == pytest.approx(error, rel=1e-4)


def test_log_probs_and_divergence():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (7, 50)).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(log_probs(logits), np.log(p), atol=1e-5)
    q = log_probs(rng.normal(0, 5, (7, 50)).astype(np.float32))
    np.testing.assert_allclose(
        divergence(log_probs(logits), q), (p * (np.log(p) - q)).sum(axis=1), rtol=1e-5
    )
    assert not divergence(q, q).any()


def test_intervals_cover():
    """95 % of intervals contain the truth, for few windows too."""
    rng = np.random.default_rng(1)
    for n, exact in ((2, 12.706), (5, 2.776), (10, 2.262), (30, 2.045)):
        assert student(n) == pytest.approx(exact, rel=2e-4)
        hits = 0
        for _ in range(2000):
            window_effect = rng.normal(0, 1, (n, 1))  # tokens of a window have something in common
            e = Estimate.mean(3 + window_effect + rng.normal(0, 1, (n, 20)))
            hits += e.low <= 3 <= e.high
        assert 0.93 < hits / 2000 < 0.97
    assert Estimate.mean(np.ones((1, 5))) == Estimate(1.0, None, None)


def test_quality_of_known_scores():
    reference = np.full((4, 10), 2.0)
    scores = Scores(
        reference + 0.01, reference, np.full((4, 10), 0.25), np.arange(40).reshape(4, 10) % 2 == 0
    )
    q = scores.quality()
    assert q.perplexity == pytest.approx(math.exp(2.01))
    assert (q.loss.value, q.loss.low, q.loss.high) == pytest.approx((math.expm1(0.01),) * 3)
    assert (q.kl.value, q.top1.value, q.n_tokens, q.n_windows) == pytest.approx((0.25, 0.5, 40, 4))
    assert scores.quality(slice(0, 1)).loss.low is None
    nearly = (
        Scores(scores.nll, reference, scores.kl, np.arange(40).reshape(4, 10) > 0).quality().top1
    )
    assert nearly.high == 1 > nearly.value  # a share's interval ends there
