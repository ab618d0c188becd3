"""Scripts of research: the papers' claims and ours, on made-up routing whose answers are known and on the demo model; speeds in rounds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import paper_figures
import papers
import results
import speed
from cgroup import unavailable
from helpers.files import PROSE
from helpers.gate_events import random_recording
from moeoff.bench import Job, Measurement, prompt_then_tokens
from moeoff.bench.job import Sample
from moeoff.policies import PREDICTORS
from moeoff.policies.precision import Precision
from moeoff.sidecar.convert import convert
from moeoff.sidecar.profile import profile_path
from paper_figures import FIGURES, PROMPT, Data


def made_up(ids, starts=None):
    """Routing as given [n_tokens, n_gates, k]: nothing else of the recording means anything."""
    n = len(ids)
    recording = random_recording(n_tokens=n, n_gates=ids.shape[1], n_used=ids.shape[2])
    starts = np.arange(n) % 64 == 0 if starts is None else starts
    recording = replace(
        recording, ids=ids.astype(np.int32), weights=np.tile(np.linspace(0.7, 0.3, ids.shape[2], dtype=np.float32), (*ids.shape[:2], 1)), starts=starts
    )
    return Data(None, recording, recording, {})


def test_one_path_is_all_paths():
    same = made_up(np.tile(np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]]), (2 * PROMPT, 1, 1)))
    assert paper_figures.edgemoe_4(same).ours.startswith("100.0 %") and paper_figures.edgemoe_4(same).holds
    found = paper_figures.hobbit_10(same)
    assert found.ours.startswith("100.0 % (chance 25.0 %); at least one: 100.0 %") and found.holds
    assert paper_figures.fate_9(same).ours.endswith(f"25.0 % of the experts active in {PROMPT} tokens")


def test_even_routing_holds_nothing():
    rng = np.random.default_rng(0)
    even = made_up(np.argsort(rng.random((4 * PROMPT, 4, 8)), axis=2)[:, :, :2])
    assert not paper_figures.edgemoe_4(even).holds and not paper_figures.hobbit_10(even).holds and not paper_figures.hobbit_10b(even).holds
    assert not paper_figures.fate_9(even).holds  # 2 of 8 experts, the least popular: about their share
    assert paper_figures.promoe_5(even).holds


def test_what_two_layers_tell():
    """The third layer is a function of the two before: alone each says nothing, together everything."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 2, (2, 4096))
    ids = np.stack([a, b, 2 + (a ^ b)], axis=1)[:, :, None]
    found = paper_figures.edgemoe_8(made_up(np.concatenate([ids, ids + 4], axis=2)))
    none, one, two = (float(part.rstrip(" %").strip()) for part in found.ours.split(" knowing")[0].replace("%", "").split(","))
    assert two > 99 and none < 60 and one < 60


def test_ratios_are_of_each_round():
    rows = []

    class Results:
        def table(self, name, title, columns):
            return self

        def row(self, *cells):
            rows.append(cells)

    speeds = {"Fate": [10.0, 12.0, 11.0], "LoD": [5.0, 4.0, 5.0], "EAP": [10.0, 12.0, 11.0]}
    papers.ratios(Results(), "x", "x", speeds | {"LRU": [None, 1.0, 2.0], "EdgeMoE": [3.0, 2.0, None]}, {"LRU by layer": [100.0], "ProMoE": [250.0]})
    found = {row[2]: row[4:] for row in rows}
    assert len(found) == 4
    assert found["lossless, EdgeMoE over its cache with LRU and no preloading (EdgeMoE / LRU)"] == ("2.00", "yes")  # of the round that both ended
    assert found["prompts, ProMoE over LRU (ProMoE / LRU by layer)"] == ("2.50", "yes")
    assert found["with prefetching and cache, over load on demand (Fate / LoD)"] == ("2.20 (2.00 to 3.00)", "yes")
    assert found["the same, lossless (Fate / EAP)"] == ("1.00 (1.00 to 1.00)", "no")


def test_ratios_are_to_the_first_contender_of_the_same_round(capsys):
    """Rounds in which one failed count for neither; a contender that never ended says why."""
    job = Job("model.gguf", tests=prompt_then_tokens(8, 4), probe_seconds=0)

    def turn(seconds):
        times = iter(seconds)

        def measured(_index):
            if (s := next(times)) is None:
                return Measurement(job, error="it broke")
            return Measurement(job, samples=[Sample(0, 8, s), Sample(1, 4, 2 * s)])

        return measured

    turns = {"base": turn([1.0, 2.0, 4.0]), "twice": turn([0.5, None, 2.0]), "never": turn([None, None, None])}
    found = speed.take_turns(turns, 3)
    with results.ResultsFile(None) as file:
        speed.table(file, "x", "x", {"a group": found})
        rows = {row[1]: dict(zip(file.tables[0].columns, row, strict=True)) for row in file.tables[0].rows}
    assert rows["twice"]["prompt tok/s"] == "10.00 (4.00 to 16.00)" and rows["twice"]["tok/s"] == "2.50 (1.00 to 4.00)"
    assert rows["twice"]["ratio"] == "2.00" and rows["base"]["ratio"] == ""
    assert rows["never"]["prompt tok/s"] == "it broke"


def test_contenders_are_strategies():
    names = {name for ratio in papers.RATIOS for name in (ratio.fast, ratio.slow)}
    assert names - set(papers.CONTENDERS) == {papers.STOCK_LIMITED}
    for name, contender in papers.CONTENDERS.items():
        strategy = contender.made()
        assert not strategy.ab_tested and strategy.predictor in (None, *PREDICTORS), name
    assert papers.CONTENDERS["HOBBIT, int2"].options({"int4": "Q4_0"}) is None
    fate = papers.CONTENDERS["Fate, int4 and int2"]
    precision = Precision(prefill_low_fraction=0.25, mispredicted_low=True, tier="Q2_0")
    assert fate.options({"int4": "Q4_0", "int2": "Q2_0"}) == {"strategy": fate.made(), "tier": "Q4_0", "precision": precision}


def test_promoes_ablation_adds_one_part_at_a_time():
    steps = [papers.CONTENDERS[name].made() for name in ("ProMoE, base", "ProMoE, + prefetch", "ProMoE")]
    parts = [(s.policy, s.predictor, s.options.get("stride"), s.eager) for s in steps]
    assert parts == [
        ("lru-layer", None, None, False),
        ("lru-layer", "learned", 2, False),
        ("lru-layer", "learned", 2, True),
    ]


def test_pairs_in_the_papers_order():
    ours = dict(zip(papers.HEADLINES, (9.0, 5.0, 4.0, 3.0, 2.0)))
    assert papers.agreeing_pairs(ours) == (10, 10)
    assert papers.agreeing_pairs({pair: -ratio for pair, ratio in ours.items()}) == (0, 10)
    ours[("ProMoE", "static")] = 6.0  # above the second and the third
    assert papers.agreeing_pairs(ours) == (8, 10)
    assert {name for pair in papers.HEADLINES for name in pair} <= set(papers.device_contenders())


@pytest.mark.slow
def test_quick_on_a_device(monkeypatch, tmp_path):
    """Every contender and ratio in a data file; with a slow bus, keeping experts beats sending all of them."""
    monkeypatch.setattr(papers, "_data", lambda model, text, quick: DATA.setdefault("d", papers.collect(papers_demo(), tuple(papers.TEXTS), 2048, 16)))
    done = CliRunner().invoke(papers.main, ["device", "--quick", "--layer-us", "1", "--json", str(tmp_path / "x.json")], catch_exceptions=False)
    assert done.exit_code == 0
    tables = {table["name"]: table["rows"] for table in json.loads((tmp_path / "x.json").read_text())["tables"]}
    assert [row[0] for row in tables["device-contenders"]] == list(papers.device_contenders())
    assert len(tables["device-order"]) == len(papers.HEADLINES) + 1
    ratio = {row[2].split(" (")[-1]: float(row[4]) for row in tables["device-ratios"]}
    assert ratio["Fate / LoD)"] > 1.02 and ratio["Fate, int4 / LoD)"] > ratio["Fate / LoD)"]


@pytest.mark.slow
def test_quick(monkeypatch, tmp_path):
    """Every figure and every ratio, with its claim, in a data file."""
    monkeypatch.setattr(papers, "_data", lambda model, text, quick: DATA.setdefault("d", papers.collect(papers_demo(), tuple(papers.TEXTS), 2048, 16)))
    tables = {}
    for command, extra in (("figures", ("--plots", str(tmp_path))), ("clock", ())):
        done = CliRunner().invoke(papers.main, [command, "--quick", "--json", str(tmp_path / "x.json"), *extra], catch_exceptions=False)
        assert done.exit_code == 0
        tables[command] = json.loads((tmp_path / "x.json").read_text())["tables"][-1]["rows"]
    assert len(tables["figures"]) == len(FIGURES) and len(tables["clock"]) == len(
        [r for r in papers.RATIOS if not r.prompt and clocked(r.fast) and clocked(r.slow)]
    )
    assert all(cell for row in tables["figures"] for cell in row)
    assert (tmp_path / "papers.svg").stat().st_size > 5000 and (tmp_path / "papers.png").stat().st_size > 5000
    speed = {row[2].split(" (")[-1]: float(row[4]) for row in tables["clock"]}
    assert speed["Fate / LoD)"] > 1.5 and speed["Fate, int4 / LoD)"] > speed["Fate / LoD)"]


def clocked(name: str) -> bool:
    return name in papers.CONTENDERS and not papers.CONTENDERS[name].precision


DATA: dict[str, Data] = {}


def papers_demo():
    from moeoff.files import demo_model

    return demo_model()


@pytest.mark.parametrize("wrong", [["live"], ["live", "--quick"]])
def test_live_needs_a_model(wrong):
    done = CliRunner().invoke(papers.main, wrong)
    assert done.exit_code == 2 and "needs -m MODEL" in done.output


@pytest.mark.slow
def test_live(calibrated, tmp_path):
    """Every contender runs on a model, stock among them, and every claim has its ratio; those in low precision serve some low."""
    model = shutil.copy(calibrated[0], tmp_path / "model.gguf")
    shutil.copy(profile_path(calibrated[0]), profile_path(model))
    convert(model, tiers=["Q4_0", "Q2_0"])
    options = [
        "-m",
        str(model),
        "--text",
        str(PROSE),
        "--int4",
        "Q4_0",
        "--int2",
        "Q2_0",
        "--quick",
        "--json",
        str(tmp_path / "x.json"),
        "--plots",
        str(tmp_path),
    ]
    done = CliRunner().invoke(papers.main, ["live", *options], catch_exceptions=False)
    assert done.exit_code == 0
    contenders, found = (json.loads((tmp_path / "x.json").read_text())["tables"][i] for i in (0, 1))
    rows = {row[0]: dict(zip(contenders["columns"], row, strict=True)) for row in contenders["rows"]}
    ran = set(papers.CONTENDERS) | {papers.STOCK} | ({papers.STOCK_LIMITED} if unavailable() is None else set())
    assert all(float(rows[name]["tok/s"]) > 0 for name in ran), rows
    assert len(found["rows"]) == len([r for r in papers.RATIOS if {r.fast, r.slow} <= ran])
    assert float(rows["HOBBIT, int2"]["served low"].rstrip("%")) > 0 == float(rows["HOBBIT"]["served low"].rstrip("%"))
    assert float(rows["LoD"]["hits"].rstrip("%")) == 0 < float(rows["LRU"]["hits"].rstrip("%"))
    assert all((tmp_path / f"papers-live.{ending}").stat().st_size > 5000 for ending in ("png", "svg"))
