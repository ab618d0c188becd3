"""The quality contract: measured on this very model, kept at any budget, refused for any other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from requantize_experts import requantize_experts

import moeoff
from moeoff import ModelError, OptionError
from moeoff.contract import SECTION, Candidate, Contract, parse_loss
from moeoff.convert import convert
from moeoff.evaluate import Reference, evaluate, read_windows
from moeoff.evaluation import open_model
from moeoff.layout import Layout
from moeoff.negotiation import negotiate
from moeoff.precision import Precision
from moeoff.profile import Profile, profile_path
from moeoff.quality import Estimate
from moeoff.quantize import type_from_name

OPTIONS = {"n_threads": 1, "expert_memory": 1 << 26, "flash_attn": True}


@pytest.fixture(scope="module")
def measured(demo, text, tmp_path_factory):
    """A copy of the demo model with a companion and a contract, alone in its folder; and what was negotiated."""
    model = shutil.copy(demo, tmp_path_factory.mktemp("model") / "model.gguf")
    convert(model, tiers="Q4_0")
    return model, negotiate(model, [text], 0.03, tokens=2560, **OPTIONS)


def test_parse_loss():
    assert (parse_loss("1%"), parse_loss("0.5 %".replace(" ", "")), parse_loss("0.02"), parse_loss(0.03)) == pytest.approx((0.01, 0.005, 0.02, 0.03))
    for bad in ("", "x", "0", "-1%", "100%", "nan", 0.0, 1):
        with pytest.raises(OptionError, match="not a loss"):
            parse_loss(bad)


def candidate(t1, share, high, cost, decode=True) -> Candidate:
    same = Estimate(0.0, 0.0, 0.0)
    return Candidate(t1, 1.0, share, decode, Estimate(0.0, -high, high), same, same, cost, 0.5, 0.0)


def test_chooses_the_cheapest_within_the_bound():
    c = [
        candidate(1.0, 1.0, 0.05, 0.5, decode=False),
        candidate(1.0, 0.5, 0.01, 0.7, decode=False),
        candidate(0.5, 1.0, 0.004, 0.3),  # cheapest, but its share loses too much in batches
        candidate(0.5, 0.5, 0.02, 0.4),  # too much in decode
        candidate(0.7, 0.5, 0.009, 0.6),
        candidate(0.9, 0.0, 0.001, 0.8),
    ]
    contract = Contract("Q4_0", 7, 8, 10, 100, 64, tuple(c))
    assert contract.choose(0.01) is c[4]
    assert contract.choose(0.005) is c[5]
    assert contract.choose(0.0005) is None
    assert contract.choose(0.06) is c[2]
    assert contract.promise(0.0005).precision.lossless
    assert contract.promise(0.01).precision == Precision(0.7, 1.0, 0.5, "Q4_0")
    assert Contract.from_section(contract.to_section()) == contract
    unsure = replace(c[5], loss=Estimate(0.0, None, None))
    assert Contract("Q4_0", 7, 8, 10, 100, 64, (unsure,)).choose(0.5) is None


def test_negotiated(measured, text):
    """What the profile says of the chosen precision is what an evaluation finds, as if nothing were resident."""
    model, done = measured
    chosen = done.chosen
    assert chosen is not None and chosen.loss.high <= 0.03 and chosen.low > 0.3 and chosen.cost < 0.8
    assert done.path == profile_path(model)
    n_tokens, ctx = done.contract.n_tokens, done.contract.ctx
    precision = Precision(chosen.t1, chosen.t2, chosen.share, "Q4_0")
    with open_model(model, ctx, **OPTIONS) as llm:
        windows = read_windows(llm, [text], ctx, done.contract.n_windows)
        reference = Reference.record(llm, windows, "decode")
    with reference:
        with open_model(model, ctx, precision=precision, deterministic=True, tier="keep", **OPTIONS) as llm:
            blind = evaluate(llm, windows, reference, mode="decode").quality()
            served = llm.stats()
        # with memory for everything, and experts that were used before, less is given up
        with open_model(model, ctx, max_loss=0.03, **OPTIONS) as llm:
            warm = evaluate(llm, windows, reference, mode="decode").quality()
            stats = llm.stats()
    assert blind.n_tokens == n_tokens
    assert (blind.loss.value, blind.kl.value) == pytest.approx((chosen.loss.value, chosen.kl.value), abs=1e-6)
    assert stats.served_low < served.served_low and stats.expert_uses == served.expert_uses
    assert warm.kl.value < blind.kl.value
    assert (stats.max_loss, stats.estimated_loss) == (0.03, max(chosen.loss.value, 0.0))
    assert "bound 3.00%" in stats.receipt


def test_candidates_lose_more_the_more_they_give_up(measured):
    decode = [c for c in measured[1].contract.candidates if c.decode]
    low_only = sorted((c for c in decode if c.t2 == 1 and c.share == decode[0].share), key=lambda c: c.low)
    assert len(low_only) >= 2 and [c.kl.value for c in low_only] == sorted(c.kl.value for c in low_only)
    for c in decode:
        assert c.low + c.skipped <= 0.75 + 1e-9  # the first of four is never touched
        assert c.cost == pytest.approx(1 - c.skipped - c.low * (1 - 18 / 34))  # Q4_0 and Q8_0 blocks


def test_lossless_unless_asked(measured):
    model, _ = measured
    with moeoff.Llama(model, n_ctx=64, **OPTIONS) as llm:
        assert llm.precision.lossless and llm.promise is None
        llm.eval([10, 300, 500])
        assert llm.stats().served_low == 0 and llm.stats().max_loss is None
    with moeoff.Llama(model, n_ctx=64, max_loss="0.0001%", **OPTIONS) as llm:  # nothing was measured to lose so little
        assert llm.precision.lossless and llm.stats().max_loss == pytest.approx(1e-6)


def test_refusals(measured, demo, text, tmp_path):
    model, done = measured
    bare = shutil.copy(demo, tmp_path / "bare.gguf")
    with pytest.raises(OptionError, match="moeoff calibrate -m .*bare.gguf"):
        moeoff.Llama(str(bare), max_loss="1%", **OPTIONS)
    with pytest.raises(OptionError, match="no companion with lower precision"):
        negotiate(bare, [text], 0.01, **OPTIONS)
    other = tmp_path / "other.gguf"
    requantize_experts(demo, other, type_from_name("Q5_0"))
    convert(other, tiers="Q4_0")
    shutil.copy(done.path, profile_path(other))
    with pytest.raises(ModelError, match="another model"):
        moeoff.Llama(str(other), max_loss="1%", **OPTIONS)
    # the same model, another companion
    convert(bare, tiers="Q2_0")
    shutil.copy(done.path, profile_path(bare))
    with pytest.raises(OptionError, match="another companion"):
        moeoff.Llama(str(bare), max_loss="1%", **OPTIONS)
    with pytest.raises(OptionError, match="bare.gguf has none now"):
        moeoff.Llama(str(bare), max_loss="1%", experts=False, **OPTIONS)
    with pytest.raises(OptionError, match="give no other"):
        moeoff.Llama(model, max_loss="1%", tier="Q4_0", **OPTIONS)
    with pytest.raises(OptionError, match="at least 8"):
        negotiate(model, [text], 0.01, tokens=600, **OPTIONS)
    assert np.array_equal(Profile.find(Layout.read(model)).section(SECTION)["t1"], done.contract.to_section()["t1"])  # still there


def test_command(measured, text, moeoff_command):
    model, done = measured
    ask = ["run", "-m", model, "-p", "Natalia sold", "--raw", "-n", "8", "--temp", "0", "-t", "1", "--no-warm", "--json"]
    answer = json.loads(moeoff_command(*ask, "--max-loss", "3%", "--deterministic").stdout)
    assert answer["stats"]["served_low"] > 0 and answer["stats"]["max_loss"] == 0.03
    assert json.loads(moeoff_command(*ask).stdout)["stats"]["served_low"] == 0
    common = ["eval", "-m", model, "--text", text, "--ctx", "64", "--chunks", "3", "-t", "1", "--mode", "decode", "--json", "--max-loss", "3%"]
    found = {flag: json.loads(moeoff_command(*common, *flag).stdout) for flag in ((), ("--deterministic",))}
    assert 0 < found[()]["served_low"] < found["--deterministic",]["served_low"]
    assert found["--deterministic",]["kl"]["value"] > 0 and found[()]["precision"]["t1"] == done.chosen.t1
    refused = moeoff_command(*ask, "--max-loss", "much")
    assert refused.returncode == 1 and "not a loss" in refused.stderr
