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
from helpers.gate_events import random_recording
from moeoff.measure.job import Job, Measurement, Sample
from moeoff.measure.statistics import Estimate
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
