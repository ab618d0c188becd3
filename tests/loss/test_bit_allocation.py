"""EdgeMoE's plans: bounds, order, tolerance; what is tried is what convert makes of the
plan.
"""

from __future__ import annotations

import json
import shutil

import pytest

from moeoff import OptionError
from moeoff.experts.convert import convert
from moeoff.experts.sidecar import ORIGINAL, CompositeSidecar, Sidecar
from moeoff.experts.tiers import read_plan
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.quantize import type_name
from moeoff.measure.bit_allocation import Planner, default_types
from moeoff.measure.perplexity import evaluate, open_model

OPTIONS = {"n_threads": 1, "expert_memory": 1 << 26}
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def planner(demo, text):
    with Planner(demo, [text], types=["Q4_0", "Q2_0"], ctx=64, tokens=768, **OPTIONS) as planner:
        yield planner


@pytest.fixture(scope="module")
def plan(planner):
    return planner.plan(TOLERANCE)


def test_default_types(demo, grown):
    assert default_types(ModelIndex.read(demo)) == ["Q5_0", "Q4_0", "Q2_0"]
    assert default_types(ModelIndex.read(grown)) == ["Q3_K", "Q2_K"]


@pytest.mark.slow
def test_plan(planner, plan):
    uniform = planner.uniform()
    assert list(uniform) == [ORIGINAL, "Q4_0", "Q2_0"]
    assert uniform["Q4_0"][1].loss.value <= TOLERANCE < uniform["Q2_0"][1].loss.value
    assert (plan.upper, plan.lower, plan.n_experts) == ("Q4_0", "Q2_0", 12 * 32)
    assert plan.quality.loss.value <= TOLERANCE
    assert 0 < len(plan.low) < plan.n_experts and len(set(plan.low)) == len(plan.low)
    assert uniform["Q2_0"][0] < plan.n_bytes < uniform["Q4_0"][0]
    per_expert = [uniform[name][0] // 384 for name in ("Q4_0", "Q2_0")]
    assert plan.n_bytes == per_expert[0] * (384 - len(plan.low)) + per_expert[1] * len(plan.low)
    # the least important come first, and one more would be too much for the bisection's
    # last trial
    rest = [plan.importance[key] for key in planner.experts if key not in set(plan.low)]
    assert max(plan.importance[key] for key in plan.low) <= min(rest)


@pytest.mark.slow
def test_the_converted_plan_is_what_was_tried(demo, planner, plan, tmp_path):
    model = shutil.copy(demo, tmp_path / "model.gguf")
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert len(read_plan(tmp_path / "plan.json", ModelIndex.read(model).experts).plan) == 1 + len(
        plan.low
    )
    made = convert(model, bits=tmp_path / "plan.json")
    assert made.tiers["bits"] == plan.n_bytes
    composite = CompositeSidecar(planner.sidecar, plan.upper, dict.fromkeys(plan.low, plan.lower))
    slices = Sidecar(made.path).slices
    for span in ModelIndex.read(model).experts.values():
        for expert, tried in enumerate(composite.sources(span, "bits")):
            assert slices[span.name, expert, "bits"].hash == tried.hash
    with open_model(model, 64, tier="bits", **OPTIONS) as llm:
        quality = evaluate(llm, planner.windows, planner.reference).quality()
    assert quality == plan.quality


@pytest.mark.slow
def test_one_type_is_enough_or_none_is(planner):
    everything = planner.plan(9.0)
    assert (everything.upper, everything.lower, everything.low) == ("Q2_0", "Q2_0", ())
    assert json.loads(everything.to_json()) == {"default": "Q2_0", "layers": {}}
    strict = planner.plan(1e-9)
    assert strict.quality.loss.value <= 1e-9 and strict.upper in (ORIGINAL, "Q4_0")


def test_a_type_that_needs_more_than_weights(grown, text):
    with pytest.raises(OptionError, match="needs an importance matrix"):
        Planner(grown, [text], types=["IQ1_S"])


def test_command(demo, text, tmp_path, invoke):
    model = shutil.copy(demo, tmp_path / "model.gguf")
    ask = [
        "calibrate",
        "-m",
        str(model),
        "--text",
        text,
        "--bits-plan",
        "--tolerance",
        "20%",
        "--types",
        "Q4_0,Q2_0",
        "--tokens",
        "1024",
        "-t",
        "1",
    ]
    done = invoke(*ask)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "model.bits.json"
    assert str(path) in done.stdout and "plan:" in done.stdout
    assert (
        type_name(read_plan(path, ModelIndex.read(model).experts).plan[None, None])
        == json.loads(path.read_text())["default"]
    )
    again = invoke(*ask)
    assert again.returncode == 1 and "exists" in again.stderr
    both = invoke(*ask, "--max-loss", "1%")
    assert both.returncode == 1 and "not both" in both.stderr
