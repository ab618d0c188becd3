"""scripts/faults/faults.py in short, and what makes its damage."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from damaged import KINDS
from helpers.files import DEMO, ROOT
from helpers.servers import Served
from moeoff.gguf.file import ModelFile
from mutants import RECIPES, Header, fields

FOLDER = ROOT / "scripts" / "faults"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc on this machine")


def run(*args: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "faults.py"), *args], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("nth --only load --only convert --most 1", marks=needs_cc),
        pytest.param("nth --most 2", marks=[needs_cc, pytest.mark.slow]),
        pytest.param("disk", marks=[needs_cc, pytest.mark.slow]),
        "kill --kills 2 --only run_--trace",
        pytest.param("kill --kills 160", marks=pytest.mark.slow),
        "places --only run --only inspect --only convert --every 30",
        pytest.param("places --only serve --every 61", marks=pytest.mark.slow),
        pytest.param("files --only model --only served --count 400 --seed 2", marks=pytest.mark.slow),
        "http --only path_tricks --only without_the_key --only other_origins --only huge_bodies",
        pytest.param("http", marks=pytest.mark.slow),
        "advisories",
    ],
)
def test_holds(command):
    """Words of --only have _ for a space."""
    run(*(word.replace("_", " ") for word in command.split()))


@needs_cc
def test_trouble_with_the_disk():
    run(
        "disk",
        *(
            word
            for case in ("direct reads are refused", "replaced while it runs", "cut between two reads", "full while it is converted")
            for word in ("--only", case)
        ),
    )


@needs_cc
def test_a_fault_that_is_not_mended_is_found():
    """A flag of the native code that hides a failed read would look like this: without --verify-reads, wrong bytes are not told."""
    code = """
import common
common.preload()
common.import_all()
import nth_fault
nth_fault.SCENARIOS["decode"] = [(common.Call.READ, common.Kind.WRONG, 0)], nth_fault.kept_open(strategy="lru")
(found,), *_ = nth_fault.sweep("decode", (), 1, 1)
print(found.problems)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "n = 1: the failed read was not told" in done.stdout, done.stdout + done.stderr


def test_damaged_files(tmp_path: Path):
    """Of all kinds: a pipe at least, which is no file; and some models that are refused or answer."""
    run("files", "--count", "2", "--seed", "2", "--json", str(tmp_path / "x.json"))
    (table,) = json.loads((tmp_path / "x.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == list(KINDS)
    run("files", "--only", "model", "--first", "1000", "--count", "60", "--seed", "2", "--json", str(tmp_path / "x.json"))
    (table,) = json.loads((tmp_path / "x.json").read_text())["tables"]
    n_files, n_refused, n_accepted, _ = map(int, table["rows"][0][1:])
    assert n_files == 60 and n_refused > 20 and n_accepted > 3


def test_a_model_object(tmp_path: Path):
    """Interrupted, abandoned, in several threads: the seed draws some of each."""
    run("objects", "--count", "32", "--seed", "673", "--json", str(tmp_path / "objects.json"))
    (table,) = json.loads((tmp_path / "objects.json").read_text())["tables"]
    assert sorted(row[0] for row in table["rows"]) == ["abandon", "interrupt", "threads"]


def test_fields_are_where_they_say():
    with ModelFile(DEMO) as model:
        header, names, keys = model.header(), list(model.tensors), list(model.metadata)
        offsets = [model.offset(name) - model.data_start for name in names]
    found = fields(header)
    text = {(f.kind, f.name): header[f.at : f.at + f.size] for f in found}
    assert [int.from_bytes(text["offset", name], "little") for name in names] == offsets
    assert all(f.at + f.size <= len(header) for f in found) and {f.name for f in found} >= set(names) | set(keys)


def test_a_seed_makes_the_same_mutants():
    with ModelFile(DEMO) as model:
        header = Header(model.header())
    for _, recipe in RECIPES.values():
        first, second = ([recipe(header, random.Random(f"5:{n}")) for n in range(60)] for _ in range(2))
        assert first == second and len({m.what for m in first}) > 10


def test_a_header_in_parts_is_the_header():
    with ModelFile(DEMO) as model:
        whole, keys = model.header(), list(model.metadata)
    header = Header(whole)
    assert list(header.pairs) == keys and header.mutant("", {}).apply(whole) == whole


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
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=300)
    found = {}
    for line in done.stdout.splitlines():
        n, outcome, *problem = line.split()
        found[n] = outcome, problem
    assert list(found) == [*"0123456"], done.stdout + done.stderr
    assert {n for n, (_, problem) in found.items() if problem} == {"1", "3", "5"}
    assert found["1"][0] == found["3"][0] == "ended" and found["3"][1][0] == "hangs:" and found["5"][1][1:] == ["MiB", "of"]


def test_allowed_origins(demo):
    """The one that asks is named, and no other."""
    with Served(demo, expert_memory="4M", n_ctx=256, parallel=1, cors=("https://a.example", "https://b.example")) as server:
        for origin, allowed in (("https://a.example", True), ("https://b.example", True), ("https://c.example", False), ("https://a.exampl", False)):
            found = httpx.get(f"{server.url}/health", headers={"Origin": origin}, timeout=300).headers.get("access-control-allow-origin")
            assert found == (origin if allowed else None)
