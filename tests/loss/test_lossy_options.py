"""Lossy options given by hand: the same wherever a model is opened and in the
simulator; each has an effect or is refused.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import moeoff
from helpers.files import PROSE, SMALL_TRACE
from helpers.refusals import parse_options, refusals, refused
from moeoff import OptionError
from moeoff.budget.loss_contract import Candidate, LossContract
from moeoff.cli.main import main
from moeoff.experts.convert import convert
from moeoff.experts.profile import Profile
from moeoff.experts.sidecar import ExpertSource
from moeoff.gguf.model_index import ModelIndex
from moeoff.options import Config
from moeoff.policies import PRESETS
from moeoff.precision import INT4, LOSSLESS, LOWEST, Precision


@pytest.fixture(scope="module")
def model(demo, tmp_path_factory) -> str:
    """The demo model with a sidecar of every tier that is asked for here, which nobody
    changes.
    """
    path = str(shutil.copy(demo, tmp_path_factory.mktemp("tiers") / "model.gguf"))
    convert(path, tiers="Q4_0,Q2_0,Q2_K")
    return path


def test_what_they_make():
    assert Precision.pop({"t1": None}) is None
    precision = Precision.pop({"t1": 0.6, "t2": 0.9, "low_tier": "Q2_0"})
    assert (precision.t1, precision.t2, precision.low_tier, precision.prefill_low_fraction) == (
        0.6,
        0.9,
        "Q2_0",
        0,
    )
    skipping = Precision.pop({"t2": 0.9})  # nothing is read low: T1 follows
    assert (skipping.t1, skipping.t2, skipping.uses_low) == (0.9, 0.9, False)


@pytest.mark.parametrize("given, code, words", refusals("Precision.pop"))
def test_what_they_cannot_make(given, code, words):
    with refused(code, words):
        Precision.pop(parse_options(given))


@pytest.mark.parametrize("given, code, words", refusals("Config"))
def test_what_a_strategy_has_no_use_for(demo, given, code, words):
    with refused(code, words):
        Config.make(demo, **parse_options(given))


def test_stride_reaches_the_predictor(demo):
    assert Config.make(demo, strategy="promoe").strategy.options == {"stride": 2}
    assert Config.make(demo, strategy="promoe", stride=1).strategy.options == {"stride": 1}
    assert Config.make(demo, strategy="lru+learned", stride=2).strategy.options == {"stride": 2}
    assert PRESETS["promoe"].options == {"stride": 2}, "the preset itself stays"


def test_thresholds_on_the_command_line(model, invoke):
    """run and eval give up what was asked for and say so; p acts in prompts, T1 and T2
    where tokens are decoded.
    """
    options = ("-m", model, "--expert-memory", "6M", "--low-tier", "Q2_0")
    done = invoke(
        "run",
        *options,
        *"-p Once -n 12 --temp 0 --json --t1 0.4 --t2 0.7 --strategy hobbit".split(),
    )
    stats = json.loads(done.stdout)["stats"]
    assert stats["served_low"] > 0 and stats["skipped"] > 0, done.stderr
    done = invoke(
        "eval",
        *options,
        "--text",
        str(PROSE),
        *"--ctx 64 --chunks 2 --prefill-low-fraction 0.5 --json".split(),
    )
    result = json.loads(done.stdout)
    assert (
        result["served_low"] > 0 == result["skipped"]
        and result["precision"]["prefill_low_fraction"] == 0.5
        and result["kl"] is not None
    )
    weighed = [json.loads(invoke("eval", *options, "--text", str(PROSE), "--ctx", "8", "--chunks", "2", "--t1", "0.4", "--t2", "0.7", "--json", *flags).stdout)
               for flags in ((), ("--weigh-prompts",))]  # fmt: skip
    assert [(w["served_low"] > 0, w["skipped"] > 0) for w in weighed] == [
        (False, False),
        (True, True),
    ]


def test_a_bound_that_was_measured_without_the_sidecar(model, tmp_path, invoke):
    index, tried = ModelIndex.read(model), Candidate("original", 0.1, 0.1, 0.5, 0.5, 0.1, 0.9)
    profile = str(tmp_path / "profile.npz")
    Profile.write(profile, index, {"precision": LossContract(0, 0, 1, 1, 1, (tried,)).to_section()})
    done = invoke("run", model, "--profile", profile, "--max-loss", "1%", "-p", "x", "-n", "1")
    assert (
        done.returncode == 0
        and "measured without Q4_0, Q2_0, Q2_K: repeat calibrate --max-loss" in done.stderr
    )


def test_tiers_by_their_bits(model):
    """Q4_0, Q2_0 and Q2_K; a model in four bits needs no tier of four, and has no lower
    one among them.
    """
    index = ModelIndex.read(model)
    source = ExpertSource.make(index, tier=INT4, low_tier=LOWEST)
    assert (source.tier, source.low(LOWEST, index).tier) == ("Q4_0", "Q2_0")
    in_four = replace(
        index,
        experts={
            name: replace(span, nbytes=span.nbytes // 2) for name, span in index.experts.items()
        },
    )
    assert ExpertSource.make(in_four, False, INT4) == ExpertSource()
    with pytest.raises(OptionError, match="no lower precision of four bits"):
        ExpertSource().low(INT4, in_four)


@pytest.mark.parametrize(
    "strategy, tiers",
    [("fate-lossy", "Q4_0,Q2_K"), ("hobbit-lossy", "Q4_0"), ("hobbit-jetson", "Q2_K")],
)
def test_a_preset_names_the_command_that_makes_its_tiers(strategy, tiers, demo, tmp_path, invoke):
    """Where there is no sidecar; and where there is one without them, whose tiers stay."""
    model = str(shutil.copy(demo, tmp_path / "model.gguf"))
    done = invoke("run", model, "--strategy", strategy, "-p", "x")
    assert (
        done.returncode == 1
        and f"moeoff convert {model} --tiers {tiers} makes one" in done.stderr
        and "Traceback" not in done.stderr
    )
    if strategy == "fate-lossy":
        convert(model, tiers="Q5_0")
        done = invoke("run", model, "--strategy", strategy, "-p", "x")
        command = f"moeoff convert {model} --tiers Q5_0,{tiers} --force"
        assert (
            done.returncode == 1
            and f"no tier int4; there are Q5_0, original; {command} makes one" in done.stderr
        )
        for words in (
            command.split()[1:],
            ["run", model, "--strategy", strategy, "-p", "x", "-n", "1"],
        ):
            assert invoke(*words).returncode == 0


def test_hobbits_lossy_presets(demo, model, tmp_path, invoke):
    """§5: its thresholds by naming the preset, which is as good as asking for them one
    by one; those of a calibration, where there is one. A bound of the loss is another
    way to ask.
    """
    options = (
        *"--expert-memory 6M --strategy hobbit-jetson -p Once -n 12 --temp 0 --json".split(),
    )
    stats = json.loads(invoke("run", model, *options).stdout)["stats"]
    assert stats["served_low"] > 0
    for strategy, asked, tier in (
        ("hobbit-jetson", LOWEST, "Q2_0"),
        ("hobbit-lossy", INT4, "Q4_0"),
    ):
        config = Config.make(model, strategy=strategy)
        assert config.precision == Precision(0.6, 0.9, low_tier=asked, weigh_prompts=True)
        profile = tmp_path / f"{strategy}.npz"
        Profile.write(
            profile,
            ModelIndex.read(model),
            {"thresholds": {"t1": np.array(0.7), "t2": np.array(0.95)}},
        )
        for path, thresholds in ((profile, (0.7, 0.95)), (False, (0.6, 0.9))):
            with moeoff.Llama(
                model, strategy=strategy, profile=path, expert_memory="6M", n_ctx=64
            ) as llm:
                assert llm.engine.quality.precision == Precision(
                    *thresholds, low_tier=tier, weigh_prompts=True
                )
    with moeoff.Llama(
        model, strategy="hobbit-lossy", t2=0.9, profile=profile, expert_memory="6M", n_ctx=64
    ) as llm:
        assert llm.engine.quality.precision == Precision(0.9, 0.9)
    assert Config.make(demo, strategy="hobbit-jetson", precision=LOSSLESS).precision is LOSSLESS
    lossy = {
        name for name, s in PRESETS.items() if s.precision is not LOSSLESS or s.tier is not None
    }
    assert lossy == {"fate-lossy", "edgemoe-lossy", "hobbit-lossy", "hobbit-jetson"}


def test_fates_preset_with_four_and_two_bits(demo, model, invoke):
    """§4.5 by name: what `fate` computes with, all of it in four bits, and in prompts
    in two; what it has mispredicted in four (§5.3 is the low-end PC's).
    """
    prompt = (
        "The quick brown fox jumps over the lazy dog, and then it sleeps until the evening comes."
    )
    options = (
        "-m",
        model,
        *"--expert-memory 3M --raw --temp 0 --json --warm off -p".split(),
        prompt,
    )
    fate, lossy = (
        json.loads(invoke("run", *options, "--strategy", name, "-n", "16").stdout)["stats"]
        for name in ("fate", "fate-lossy")
    )
    assert (fate["tier"], lossy["tier"]) == ("original", "Q4_0") and fate[
        "low_bytes_read"
    ] == 0 < lossy["low_bytes_read"]
    config = Config.make(demo, strategy="fate-lossy")
    assert config.precision == Precision(prefill_low_fraction=0.25, low_tier=LOWEST)
    assert replace(
        config.strategy, name="fate", summary="", precision=LOSSLESS, tier=None
    ) == replace(PRESETS["fate"], summary="")


def test_edgemoes_widths(demo, invoke, tmp_path):
    """§3.2 by name: a plan's widths for all experts, where a sidecar has them; another
    tier, and the model's own, can still be asked for.
    """
    model = str(shutil.copy(demo, tmp_path / "model.gguf"))
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps({"default": "Q4_0", "layers": {"0": {"default": "Q2_0", "3": "Q4_0"}}})
    )
    options = (
        "-m",
        model,
        *"--expert-memory 6M --strategy edgemoe-lossy -p Once -n 8 --temp 0 --json".split(),
    )
    done = invoke("run", *options)
    assert (
        done.returncode == 1
        and "tier bits needs a sidecar" in done.stderr
        and "Traceback" not in done.stderr
    )
    convert(model, tiers="Q4_0", bits=str(plan))
    runs = [
        json.loads(invoke("run", *options, *flags).stdout)["stats"]
        for flags in ((), ("--tier", "Q4_0"), ("--tier", "original"))
    ]
    assert [stats["tier"] for stats in runs] == ["bits", "Q4_0", "original"]
    assert replace(PRESETS["edgemoe-lossy"], name="edgemoe", summary="", tier=None) == replace(
        PRESETS["edgemoe"], summary=""
    )


def test_the_simulator_prices_misses_by_them():
    def penalty(*options):
        done = CliRunner().invoke(
            main,
            [
                "simulate",
                str(SMALL_TRACE),
                *"--strategy hobbit --memory 50% --json".split(),
                *options,
            ],
        )
        assert done.exit_code == 0, done.output
        return [row["miss_penalty_per_token"] for row in json.loads(done.output)["results"]]

    usual, none, cheap = penalty(), penalty("--t1", "1", "--t2", "1"), penalty("--low-cost", "0.1")
    assert penalty("--t1", "0.6", "--t2", "0.9", "--low-cost", "0.25") == usual
    assert all(a > b > c for a, b, c in zip(none, usual, cheap))
