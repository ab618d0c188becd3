"""What a person gives up by hand: the same options wherever a model is opened, and in the simulator; each does something, or is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from helpers.files import PROSE, SMALL_TRACE
from moeoff import OptionError
from moeoff.cli.main import main
from moeoff.experts.convert import convert
from moeoff.options import Config
from moeoff.policies import PRESETS
from moeoff.precision import LOSSLESS, Precision

NAMES = ("--t1", "--t2", "--prefill-low-fraction", "--mispredicted-low", "--stride", "--low-tier")


@pytest.fixture(scope="module")
def model(demo, tmp_path_factory) -> str:
    """The demo model with a sidecar of every tier that is asked for here, which nobody changes."""
    path = str(shutil.copy(demo, tmp_path_factory.mktemp("tiers") / "model.gguf"))
    convert(path, tiers=["Q4_0", "Q2_0", "Q2_K"])
    return path


@pytest.mark.parametrize("command", ["run", "serve", "eval", "report"])
def test_the_same_everywhere(command):
    said = CliRunner().invoke(main, [command, "--help-all"]).output
    assert all(name in said for name in NAMES), command


def test_what_they_make():
    assert Precision.pop({"t1": None}) is None
    found = Precision.pop({"t1": 0.6, "t2": 0.9, "low_tier": "Q2_0"})
    assert (found.t1, found.t2, found.low_tier, found.prefill_low_fraction) == (0.6, 0.9, "Q2_0", 0)
    skipping = Precision.pop({"t2": 0.9})  # nothing is read low: T1 follows
    assert (skipping.t1, skipping.t2, skipping.uses_low) == (0.9, 0.9, False)
    for wrong, why in (
        ({"t1": 0.6}, "needs a tier of the sidecar"),
        ({"prefill_low_fraction": 0.25}, "needs a tier of the sidecar"),
        ({"t1": 0.9, "t2": 0.6, "low_tier": "Q2_0"}, "0 <= t1 <= t2"),
        ({"low_tier": "Q2_0"}, "none of them is given"),
        ({"mispredicted_low": True}, "needs a tier of the sidecar"),
        ({"mispredicted_low": True, "t1": 0.5, "low_tier": "Q2_0"}, "no use for t1 and t2"),
        ({"weigh_prompts": True}, "weighs by t1 and t2"),
        ({"weigh_prompts": True, "t1": 0.5, "prefill_low_fraction": 0.5, "low_tier": "Q2_0"}, "in the place of prefill_low_fraction"),
    ):
        with pytest.raises(OptionError, match=why):
            Precision.pop(wrong)


def test_stride_reaches_the_predictor(demo):
    assert Config.make(demo, strategy="promoe").strategy.options == {"stride": 2}
    assert Config.make(demo, strategy="promoe", stride=1).strategy.options == {"stride": 1}
    assert Config.make(demo, strategy="lru+learned", stride=2).strategy.options == {"stride": 2}
    assert PRESETS["promoe"].options == {"stride": 2}, "the preset itself stays"
    for strategy, stride, why in (("auto", 2, "no stride to choose"), ("lru", 1, "no stride to choose"), ("promoe", 3, "one of 1, 2, not 3")):
        with pytest.raises(OptionError, match=why):
            Config.make(demo, strategy=strategy, stride=stride)


def test_refused_beside_a_bound(invoke):
    done = invoke("run", "-p", "x", "--t2", "0.9", "--max-loss", "1%")
    assert done.returncode == 1 and "give no other" in done.stderr


def test_thresholds_on_the_command_line(model, invoke):
    """run and eval give up what was asked for and say so; p acts in prompts, T1 and T2 where tokens are decoded."""
    options = ("-m", model, "--expert-memory", "6M", "--low-tier", "Q2_0")
    done = invoke("run", *options, "-p", "Once", "-n", "12", "--temp", "0", "--json", "--t1", "0.4", "--t2", "0.7", "--strategy", "hobbit")
    stats = json.loads(done.stdout)["stats"]
    assert stats["served_low"] > 0 and stats["skipped"] > 0, done.stderr
    done = invoke("eval", *options, "--text", str(PROSE), "--ctx", "64", "--chunks", "2", "--prefill-low-fraction", "0.5", "--json")
    found = json.loads(done.stdout)
    assert found["served_low"] > 0 == found["skipped"] and found["precision"]["prefill_low_fraction"] == 0.5 and found["kl"] is not None
    weighed = [json.loads(invoke("eval", *options, "--text", str(PROSE), "--ctx", "8", "--chunks", "2", "--t1", "0.4", "--t2", "0.7", "--json", *given).stdout)
               for given in ((), ("--weigh-prompts",))]  # fmt: skip
    assert [(w["served_low"] > 0, w["skipped"] > 0) for w in weighed] == [(False, False), (True, True)]


def test_hobbits_jetson(demo, model, invoke):
    """§5: its thresholds and two bits by naming the preset, which is as good as asking for them one by one; a bound of the loss is another way to ask."""
    options = ("--expert-memory", "6M", "--strategy", "hobbit-jetson", "-p", "Once", "-n", "12", "--temp", "0", "--json")
    done = invoke("run", demo, *options)
    assert done.returncode == 1 and "needs a sidecar" in done.stderr and "Traceback" not in done.stderr
    stats = json.loads(invoke("run", model, *options).stdout)["stats"]
    assert stats["served_low"] > 0
    config = Config.make(demo, strategy="hobbit-jetson")
    assert config.precision == Precision(0.6, 0.9, low_tier="Q2_K", weigh_prompts=True)
    assert Config.make(demo, strategy="hobbit-jetson", precision=LOSSLESS).precision is LOSSLESS
    assert all(s.precision is LOSSLESS and s.tier is None for name, s in PRESETS.items() if name not in ("hobbit-jetson", "fate-lossy", "edgemoe-lossy"))
    with pytest.raises(OptionError, match="give no other"):
        Config.make(demo, strategy="hobbit-jetson", max_loss="1%")


def test_fates_preset_with_two_bits(demo, model, invoke):
    """§4.5 and §5.3 by name: what `fate` computes with, and two bits in prompts and where it has mispredicted."""
    prompt = "The quick brown fox jumps over the lazy dog, and then it sleeps until the evening comes."
    options = ("-m", model, "--expert-memory", "3M", "--raw", "--temp", "0", "--json", "--warm", "off", "-p", prompt)
    low = [
        json.loads(invoke("run", *options, "--strategy", name, "-n", n).stdout)["stats"]["low_bytes_read"]
        for name, n in (("fate", "16"), ("fate-lossy", "1"), ("fate-lossy", "16"))
    ]
    assert low[0] == 0 < low[1] < low[2]  # in the prompt, and more in decode
    found = Config.make(demo, strategy="fate-lossy")
    assert found.precision == Precision(prefill_low_fraction=0.25, mispredicted_low=True, low_tier="Q2_K")
    assert replace(found.strategy, name="fate", summary="", precision=LOSSLESS, vram_mode="") == replace(PRESETS["fate"], summary="", vram_mode="")


def test_edgemoes_widths(demo, invoke, tmp_path):
    """§3.2 by name: a plan's widths for all experts, where a sidecar has them; another tier, and the model's own, can still be asked for."""
    model = str(shutil.copy(demo, tmp_path / "model.gguf"))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"default": "Q4_0", "layers": {"0": {"default": "Q2_0", "3": "Q4_0"}}}))
    options = ("-m", model, "--expert-memory", "6M", "--strategy", "edgemoe-lossy", "-p", "Once", "-n", "8", "--temp", "0", "--json")
    done = invoke("run", *options)
    assert done.returncode == 1 and "tier bits needs a sidecar" in done.stderr and "Traceback" not in done.stderr
    convert(model, tiers=["Q4_0"], bits=str(plan))
    found = [json.loads(invoke("run", *options, *given).stdout)["stats"] for given in ((), ("--tier", "Q4_0"), ("--tier", "original"))]
    assert [stats["tier"] for stats in found] == ["bits", "Q4_0", "original"]
    assert replace(PRESETS["edgemoe-lossy"], name="edgemoe", summary="", tier=None) == replace(PRESETS["edgemoe"], summary="")
    with pytest.raises(OptionError, match="give no other"):
        Config.make(demo, strategy="edgemoe-lossy", max_loss="1%")


def test_fates_quantization(model, invoke):
    """§4.5 and §5.3: int4 for all experts, int2 for the unpopular ones of a prompt, and in decode for what was not there in time."""
    options = ("-m", model, "--expert-memory", "3M", "--strategy", "fate", "--tier", "Q4_0", "--low-tier", "Q2_0", "--raw", "--temp", "0", "--json")
    prompt = "The quick brown fox jumps over the lazy dog, and then it sleeps until the evening comes."

    def low_bytes(*given):
        done = invoke("run", *options, "--warm", "off", "-p", prompt, *given)  # what an earlier run had in low precision is not read anew
        assert done.returncode == 0, done.stderr
        stats = json.loads(done.stdout)["stats"]
        assert stats["tier"] == "Q4_0" and stats["skipped"] == 0
        return stats["low_bytes_read"]

    in_prompt, in_decode = low_bytes("-n", "1", "--prefill-low-fraction", "0.25"), low_bytes("-n", "24", "--t1", "0")
    assert in_prompt > 0 and in_decode > 0
    assert low_bytes("-n", "1", "--prefill-low-fraction", "0.75") > 1.5 * in_prompt  # p acts in the prompt
    assert low_bytes("-n", "1", "--t1", "0") == 0  # and T1 in decode alone


def test_only_what_was_mispredicted(model, invoke):
    """Fate §5.3 on a model: some of decode is served low, less than where every miss is, and no prompt is."""
    options = ("-m", model, "--expert-memory", "6M", "--strategy", "fate", "--low-tier", "Q2_0", "--raw", "--temp", "0", "--json")

    def served_low(*given, n=48):
        done = invoke("run", *options, "--warm", "off", "-p", "The quick brown fox jumps over the lazy dog.", "-n", str(n), *given)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["stats"]["served_low"]

    assert 0 < served_low("--mispredicted-low") < served_low("--t1", "0")
    assert served_low("--mispredicted-low", n=1) == 0
    for given, why in (
        (("--strategy", "auto"), "does not always predict"),
        (("--strategy", "lru"), "does not always predict"),
        (("--deterministic",), "depends on time"),
    ):
        done = invoke("run", *options, "-p", "x", "--mispredicted-low", *given)
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr


def test_the_simulator_prices_misses_by_them():
    def penalty(*options):
        done = CliRunner().invoke(main, ["simulate", str(SMALL_TRACE), "--strategy", "hobbit", "--memory", "50%", "--json", *options])
        assert done.exit_code == 0, done.output
        return [row["miss_penalty_per_token"] for row in json.loads(done.output)["results"]]

    usual, none, cheap = penalty(), penalty("--t1", "1", "--t2", "1"), penalty("--low-cost", "0.1")
    assert penalty("--t1", "0.6", "--t2", "0.9", "--low-cost", "0.25") == usual
    assert all(a > b > c for a, b, c in zip(none, usual, cheap))
