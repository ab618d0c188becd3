"""scripts/faults/faults.py in short, and what makes its damage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from damaged import KINDS
from helpers.files import ROOT

FOLDER = ROOT / "scripts" / "faults"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc on this machine")


def run(*args: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "faults.py"), *args],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("nth --most 2", marks=needs_cc),
        pytest.param("disk", marks=needs_cc),
        "kill --kills 160",
        "files --only model --only model,_served --count 400 --seed 2",
        "http",
        "advisories",
    ],
)
def test_holds(command):
    """Words of --only have _ for a space."""
    run(*(word.replace("_", " ") for word in command.split()))


@needs_cc
@pytest.mark.slow
def test_a_fault_that_is_not_mended_is_found():
    """A flag of the native code that hides a failed read would look like this: without
    --verify-reads, wrong bytes are not told.
    """
    code = """
import common
common.preload()
common.import_all()
import nth_fault
nth_fault.SCENARIOS["decode"] = [(common.Call.READ, common.Kind.WRONG, 0)], nth_fault.with_open_model(strategy="lru")
(outcome,), *_ = nth_fault.sweep("decode", 1)
print(outcome.problems)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "n = 1: the failed read was not told" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.slow
def test_damaged_files(tmp_path: Path):
    """Files of all kinds, of each at least a pipe, and some models that are refused or
    answer.
    """
    run("files", "--count", "2", "--seed", "2", "--json", str(tmp_path / "x.json"))
    (table,) = json.loads((tmp_path / "x.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == list(KINDS)
    run(
        *"files --only model --first 1000 --count 60 --seed 2 --json".split(),
        str(tmp_path / "x.json"),
    )
    (table,) = json.loads((tmp_path / "x.json").read_text())["tables"]
    n_files, n_refused, n_accepted, _ = map(int, table["rows"][0][1:])
    assert n_files == 60 and n_refused > 20 and n_accepted > 3


@pytest.mark.slow
def test_a_model_object(tmp_path: Path):
    """Interrupted, abandoned, in several threads: the seed draws some of each."""
    run("objects", "--count", "32", "--seed", "673", "--json", str(tmp_path / "objects.json"))
    (table,) = json.loads((tmp_path / "objects.json").read_text())["tables"]
    assert sorted(row[0] for row in table["rows"]) == ["abandon", "interrupt", "threads"]


@pytest.mark.slow
def test_what_ends_a_worker_is_a_finding(tmp_path: Path):
    """A signal, a hang and memory beyond the bound; the cases behind it go on."""
    code = """
import os, common
common.CPU_DEADLINE = 4  # a machine may take most of a second for the pages of case 5
bound = common.status_bytes() + (40 << 20)
def check(n):
    if n == 1:
        os.kill(os.getpid(), 11)
    while n == 3:
        pass
    held = bytearray(80 << 20) if n == 5 else None
    return "accepted", ""
for case in common.in_workers(lambda: check, range(7), memory=bound):
    print(case.n, case.outcome, *case.problem.split()[:3])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=300
    )
    cases = {}
    for line in done.stdout.splitlines():
        n, outcome, *problem = line.split()
        cases[n] = outcome, problem
    assert list(cases) == [*"0123456"], done.stdout + done.stderr
    assert {n for n, (_, problem) in cases.items() if problem} == {"1", "3", "5"}
    assert (
        cases["1"][0] == cases["3"][0] == "ended"
        and cases["3"][1][0] == "hangs:"
        and cases["5"][1][1:] == ["MiB", "of"]
    )
