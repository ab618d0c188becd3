"""Scripts of research: the papers' claims and ours, on made-up routing whose answers
are known and on the demo model; speeds in rounds.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import paper_figures
import papers
import results
import speed
from baselines import EAP
from device_simulator import DeviceResult
from helpers.gate_events import random_recording
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.job import Job, Measurement, Sample
from moeoff.measure.profile_fit import fit
from moeoff.measure.statistics import Estimate
from moeoff.policies import PREDICTORS, FitOptions
from moeoff.policies.classic import LRU
from paper_figures import FIGURES, PROMPT, Data
from speed import prompt_then_tokens
from verdicts import (
    DIRECTION,
    LEVEL,
    NOT_TESTABLE,
    OPPOSITE,
    REPRODUCED,
    RULES,
    SPLIT,
    counted,
    ratio,
    verdict,
    weakest,
)

pytestmark = pytest.mark.slow  # tests of research scripts run in nightly


def made_up(ids, starts=None):
    """Routing as given [n_tokens, n_gates, k]: nothing else of the recording means
    anything.
    """
    n = len(ids)
    recording = random_recording(n_tokens=n, n_gates=ids.shape[1], n_used=ids.shape[2])
    starts = np.arange(n) % 64 == 0 if starts is None else starts
    recording = replace(
        recording,
        ids=ids.astype(np.int32),
        weights=np.tile(np.linspace(0.7, 0.3, ids.shape[2], dtype=np.float32), (*ids.shape[:2], 1)),
        starts=starts,
    )
    return Data(None, recording, recording, {})


def test_one_path_is_all_paths():
    """Every token takes the same: all the room that the statistics have."""
    same = made_up(np.tile(np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]]), (2 * PROMPT, 1, 1)))
    assert paper_figures.edgemoe_4(same).ours.startswith(
        "100.0 % (100.0 to 100.0) by pair of layers; unconnected 100.0 %; as the paper counts"
    )
    row = paper_figures.hobbit_10(same)
    assert (
        row.ours.startswith("100.0 % (chance 25.0 %); at least one: 100.0 %")
        and row.verdict == DIRECTION
    )
    assert f"of 25.0 % of the experts in {PROMPT} tokens" in paper_figures.fate_9(same).ours
    assert paper_figures.promoe_5(same).verdict == OPPOSITE


def test_paths_that_are_connected():
    """Each layer repeats the first one's choice, or has a choice of its own: only the
    first is more than its layers shuffled.
    """
    rng = np.random.default_rng(0)
    first = rng.choice(8, (8 * PROMPT, 1, 1), p=np.array([8, 4, 2, 1, 1, 1, 1, 1]) / 19)
    alone = rng.choice(8, (8 * PROMPT, 4, 1), p=np.array([8, 4, 2, 1, 1, 1, 1, 1]) / 19)

    def figure(ids):
        return paper_figures.edgemoe_4(made_up(np.concatenate([ids, (ids + 1) % 8], axis=2)))

    connected = figure(np.tile(first, (1, 4, 1)))
    assert (
        connected.ours.startswith("100.0 %")
        and connected.verdict == "reproduced (by pair); direction (as the paper counts)"
    )
    assert figure(alone).verdict == LEVEL


def test_even_routing_holds_nothing():
    rng = np.random.default_rng(0)
    even = made_up(np.argsort(rng.random((16 * PROMPT, 4, 8)), axis=2)[:, :, :2])
    verdicts = {
        f: getattr(paper_figures, f)(even).verdict
        for f in ("edgemoe_4", "hobbit_10", "hobbit_10b", "promoe_5", "edgemoe_8_even")
    }
    assert verdicts == {
        "edgemoe_4": LEVEL,
        "hobbit_10": LEVEL,
        "hobbit_10b": LEVEL,
        "promoe_5": REPRODUCED,
        "edgemoe_8_even": REPRODUCED,
    }
    # 2 of 8 experts, the least popular: about their share
    assert paper_figures.fate_9(even).verdict != REPRODUCED


def test_what_two_layers_tell():
    """The third layer is a function of the two before: alone each says nothing,
    together everything.
    """
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 2, (2, 4096))
    ids = np.stack([a, b, 2 + (a ^ b)], axis=1)[:, :, None]
    right, best = paper_figures.known_layers(made_up(np.concatenate([ids, ids + 4], axis=2)))
    assert (
        right.shape == (1, 3)
        and right[0, 2] > 0.99
        and right[0, 1] < 0.6
        and right[0, 0] < 0.6
        and best == 1
    )


@pytest.mark.parametrize(
    "claim, ours, expected",
    [
        (2.2, (1.85, 1.8, 1.9), REPRODUCED),  # 0.85 of 1.2 is within a third
        (2.2, (1.79, 1.7, 1.9), DIRECTION),
        (2.2, (2.9, 2.7, 3.1), DIRECTION),  # much more is not the same, either
        (2.2, (1.5, 0.99, 2.3), LEVEL),  # the interval holds 1
        (2.2, (1.01, 1.005, 1.015), LEVEL),
        (2.2, (0.8, 0.7, 0.9), OPPOSITE),
        ((2.6, 3.0), (2.8, 2.7, 2.9), REPRODUCED),  # between the ends
        ((2.6, 3.0), (2.1, 2.0, 2.2), REPRODUCED),  # 1.1 of 1.6
        ((2.6, 3.0), (2.0, 1.9, 2.1), DIRECTION),
        (None, (1.02, 1.015, 1.03), DIRECTION),
        (None, (1.005, 1.001, 1.009), LEVEL),
        (1.5, (1.4, None, None), REPRODUCED),  # one replay: its value
    ],
)
def test_verdicts_of_ratios(claim, ours, expected):
    assert verdict(claim, Estimate(*ours)) == expected


def test_verdicts_of_what_has_another_floor():
    """An accuracy above chance; a reduction; a share below an even one."""
    assert verdict(0.96, Estimate(0.72, 0.7, 0.74), 1 / 32) == REPRODUCED
    assert verdict(0.96, Estimate(0.72, 0.7, 0.74), 0.5) == DIRECTION
    assert verdict(0.15, Estimate(0.11, 0.09, 0.13), 0.3) == REPRODUCED
    assert verdict(0.15, Estimate(0.35, 0.33, 0.37), 0.3) == OPPOSITE
    assert verdict(0.9715, Estimate(0.912, 0.9, 0.92), 0.25) == REPRODUCED
    # 3.1 times the misses
    assert verdict(0.9715, Estimate(0.912, 0.9, 0.92), 0.25, perfect=1) == DIRECTION
    assert verdict(0.96, Estimate(0.953, 0.95, 0.96), 0.125, perfect=1) == REPRODUCED
    assert weakest([REPRODUCED, LEVEL, DIRECTION]) == LEVEL


def test_a_claim_above_what_the_machine_reaches_is_not_testable():
    assert verdict(2.2, Estimate(1.29, 1.28, 1.3), reachable=1.48) == NOT_TESTABLE
    assert verdict((1.35, 1.5), Estimate(1.23, 1.22, 1.24), reachable=1.36) == DIRECTION
    assert counted("direction with 25%, not testable here with 50%") == DIRECTION
    assert counted(NOT_TESTABLE) == NOT_TESTABLE


@pytest.mark.parametrize(
    "cell, as_one",
    [
        *((name, name) for name in RULES),
        ("reproduced with 25%, direction with 50%", DIRECTION),
        ("level with 25%, direction with 50%", LEVEL),
        ("direction (over LRU); reproduced (over LFU)", DIRECTION),
        ("opposite with 25%, direction with 50%", SPLIT),
        ("opposite with 25%, level with 50%", OPPOSITE),  # nowhere a gain
    ],
)
def test_a_row_counts_once(cell, as_one):
    assert counted(cell) == as_one


def test_contenders_run_on_their_machine(monkeypatch, recording, demo):
    """Each decodes and reads a prompt; one that predicts sends ahead, else what is
    compared is its cache alone.
    """
    # the fit wants several texts
    text = replace(recording.part(0, 256), starts=np.arange(256) % 64 == 0)
    learned = fit(text, FitOptions(hidden=8), only={"learned"}, compare=False)
    monkeypatch.setattr(papers, "ROUND", 16)
    runs = papers.Runs(Data(ModelIndex.read(demo), text, text, learned), np.ones((12, 32)), 1)
    for name, c in papers.CONTENDERS.items():
        for prompt in (False, True):
            (result,) = runs.of(name, "Fate", 0.5, prompt)
            assert result.n_tokens == (8 if prompt else 16) and result.device + result.host > 0, (
                name
            )
            assert (result.ahead > 0) == (c.made().predictor is not None), (name, prompt)
    monkeypatch.setattr(
        papers, "on_device", lambda *_, **__: DeviceResult(1, 1, 0, 1, 1, 0, 0, 1, 1, 0)
    )
    with pytest.raises(AssertionError, match="nothing is sent ahead"):
        runs.of("HOBBIT", "HOBBIT", 0.5)


def test_ratios_are_paired():
    """Rounds differ tenfold, each ratio hardly: the interval is of the ratios. Four
    rounds have none.
    """
    slow = [1.0, 10.0, 3.0, 5.0, 2.0]
    estimate = ratio([1.5 * x * e for x, e in zip(slow, (1.0, 1.01, 0.99, 1.0, 1.0))], slow)
    assert (
        estimate.value == pytest.approx(1.5, rel=1e-3)
        and 1.47 < estimate.low < estimate.high < 1.53
    )
    assert ratio(slow[:4], slow[:4]) == Estimate(1.0, None, None)


def test_ratios_are_to_the_first_contender_of_the_same_round(capsys):
    """Rounds in which one failed count for neither; a contender that never ended says
    why.
    """
    job = Job("model.gguf", tests=prompt_then_tokens(8, 4), probe_seconds=0)

    def turn(seconds):
        times = iter(seconds)

        def measured(_index):
            if (s := next(times)) is None:
                return Measurement(job, error="it broke")
            return Measurement(job, samples=[Sample(0, 8, s), Sample(1, 4, 2 * s)])

        return measured

    turns = {
        "base": turn([1.0, 2.0, 4.0]),
        "twice": turn([0.5, None, 2.0]),
        "never": turn([None, None, None]),
    }
    comparison = speed.take_turns(turns, 3)
    with results.ResultsFile(None) as file:
        speed.table(file, "x", "x", {"a group": comparison})
        rows = {
            row[1]: dict(zip(file.tables[0].columns, row, strict=True))
            for row in file.tables[0].rows
        }
    assert (
        rows["twice"]["prompt tok/s"] == "10.00 (4.00 to 16.00)"
        and rows["twice"]["tok/s"] == "2.50 (1.00 to 4.00)"
    )
    assert rows["twice"]["ratio"] == "2.00" and rows["base"]["ratio"] == ""
    assert rows["never"]["prompt tok/s"] == "it broke"


def test_contenders_are_strategies():
    assert {name for r in papers.RATIOS for name in (r.fast, r.slow)} == set(papers.CONTENDERS)
    for name, c in papers.CONTENDERS.items():
        strategy = c.made()
        assert not strategy.ab_tested and strategy.predictor in (None, *PREDICTORS.values()), name
        assert c.paper and "§" in c.paper + name + c.differs or c.bits != "fp16" or c.low, name


def test_a_baseline_lacks_what_its_paper_adds():
    """Issue by issue of the papers: ProMoE's parts one by one; nothing of them in what
    it and Fate are compared with; EdgeMoE's baselines keep nothing.
    """
    steps = [
        papers.CONTENDERS[name]
        for name in ("LRU", "+ prefetch", "+ chunked prefetch", "+ early preemption", "ProMoE")
    ]
    assert [
        (
            papers.named(c.made().predictor, None),
            c.execution.chunked,
            c.execution.eager,
            c.execution.reordered,
        )
        for c in steps
    ] == [
        (None, False, False, "never"),
        ("learned", False, False, "never"),
        ("learned", True, False, "never"),
        ("learned", True, True, "never"),
        ("learned", True, True, "always"),
    ]
    assert all(
        (c.made().policy, c.by_layer, c.execution.order) == (LRU, True, "by id") for c in steps
    )
    for name in ("LRU", "static", "EAP", "EAP, int4", "Mixtral-offloading", "LoD"):
        e = papers.CONTENDERS[name].execution
        assert not e.eager and not e.chunked and e.reordered == "never" and e.order != "popular", (
            name
        )
    assert not any(
        papers.CONTENDERS[name].made().keep
        for name in ("LoD", "IO-EXP", "IO-QEXP", "EdgeMoE, Q", "EdgeMoE, Q+P")
    )
    fate, eap = papers.CONTENDERS["Fate, lossless"], papers.CONTENDERS["EAP"]
    assert replace(
        fate.made(), name="", summary="", predictor=EAP, share=0.0, bounded=False, vram_mode="auto"
    ) == replace(eap.made(), name="", summary="")
    assert papers.CONTENDERS["EdgeMoE"].widths and not papers.CONTENDERS["IO-QEXP"].widths


def test_a_machine_waits_as_long_as_its_paper_says():
    """A layer's time follows from the paper's share of waiting, with none of what hides
    it.
    """
    nbytes, n_used = 12e6, 4
    for name, waiting, sent in (
        ("HOBBIT", 0.855, 4),
        ("ProMoE", 0.79, 1.5),
        ("EdgeMoE", 1 - 1 / 3.55, 4),
    ):
        m = papers.MACHINES[name]
        speeds = m.bandwidths(nbytes, n_used, 1.5 / n_used)
        send, compute = sent * nbytes / m.link, n_used * nbytes / m.device + 1000 * speeds.layer_us
        assert send / (send + compute) == pytest.approx(waiting, abs=0.01), name


def assert_computable(tables):
    """Each ratio, its interval and its verdict follow from the rounds of both
    contenders, and so do the ratios of the causes.
    """
    runs = {tuple(row[:4]): row[4:] for row in tables["runs"]}
    rows = {tuple(row[:3]): row[3:] for paper in papers.PAPERS for row in tables[paper.lower()]}
    for r in papers.RATIOS:
        ours, text, cause = rows[r.figure, r.what, r.says]
        on, of, verdicts = r.on or r.paper, "prompts" if r.prompt else "decode", []
        for share in papers.MACHINES[on].shares:
            fast, slow, right = (
                runs.get((on, name, f"{share:.0%}", of))
                for name in (r.fast, r.slow, f"{r.fast}, always predicted right")
            )
            estimate = ratio(*(list(map(float, row[1].split(", "))) for row in (fast, slow)))
            cell = (
                ours.removeprefix(f"{r.fast} / {r.slow}: ")
                .split(" with ")[len(verdicts)]
                .split("%, ")[-1]
            )
            expected = (
                [estimate.value]
                if estimate.low is None
                else [estimate.value, estimate.low, estimate.high]
            )
            assert [float(number) for number in re.findall(r"[\d.]+", cell)] == pytest.approx(
                expected, abs=0.0051
            ), (r, share)
            verdicts.append(verdict(r.claim, estimate, reachable=float(fast[2]) / float(slow[0])))
            why = dict(part.split(": ") for part in cause.split("; ") if part).get(f"{share:.0%}")
            assert (why is None) == (verdicts[-1] == REPRODUCED)
            for name, row, column in (
                ("without any waiting", fast, 2),
                ("always predicted right", right, 0),
            ):
                if why is not None and name in why:
                    number = float(why.partition(f"{name} ")[2].split(", ")[0])
                    assert number == pytest.approx(
                        float(row[column]) / float(slow[0]), abs=0.0051
                    ), (r, share, name)
        assert all(name in text for name in verdicts)


def assert_counted(tables):
    """Check the table of verdicts: a measurement beside two figures counts once."""
    for paper, *numbers in tables["verdicts"]:
        of_rows = {row[3] or row[1]: counted(row[4]) for row in tables[paper.lower()]}
        outcomes = list(of_rows.values())
        assert list(map(int, numbers)) == [outcomes.count(kind) for kind in (*RULES, SPLIT)], paper


def test_every_ratio_can_be_computed_from_the_data():
    tables = {table["name"]: table["rows"] for table in results.read("papers")["tables"]}
    assert_computable(tables)
    assert_counted(tables)


def test_all_of_it(tmp_path):
    """A table for each paper, with every figure and every ratio; each verdict is one of
    the rules', and what is not reproduced was looked into.
    """
    done = CliRunner().invoke(
        papers.main, ["--quick", "--json", str(tmp_path / "x.json")], catch_exceptions=False
    )
    assert done.exit_code == 0
    tables = {
        table["name"]: table["rows"]
        for table in json.loads((tmp_path / "x.json").read_text())["tables"]
    }
    for paper in papers.PAPERS:
        expected = [
            *(f for f in FIGURES if f.paper == paper),
            *(r for r in papers.RATIOS if r.paper == paper),
            *papers.UNTESTED[paper],
        ]
        assert len(tables[paper.lower()]) == len(expected)
    rows = [row for paper in papers.PAPERS for row in tables[paper.lower()]]
    assert all(counted(row[4]) in (*RULES, SPLIT) for row in rows)
    assert_computable(tables)
    assert_counted(tables)
