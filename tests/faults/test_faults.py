"""The scripts of scripts/faults in short, and what makes their damage."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from beside import BESIDE
from helpers.files import DEMO, ROOT
from moeoff.gguf.file import ModelFile
from mutants import RECIPES, Header, fields

FOLDER = ROOT / "scripts" / "faults"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc on this machine")


def run(name: str, *args: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *args], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_cc
def test_the_first_faults():
    """Of each kind, while a model is loaded and converted."""
    run("nth_fault", "--scenario", "load", "--scenario", "convert", "--most", "1")


@needs_cc
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["load", "convert", "close", "decode", "decode-verified", "prefetch", "resize", "calibrate"])
def test_more_faults(scenario):
    run("nth_fault", "--scenario", scenario, "--most", "2")


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


@needs_cc
@pytest.mark.parametrize(
    "only",
    [("direct reads are refused", "replaced while it runs", "cut between two reads", "full while it is converted"), pytest.param((), marks=pytest.mark.slow)],
)
def test_trouble_with_the_disk(only):
    """Slow, full, read-only, refused direct reads, a model that is cut."""
    run("disk", *(word for case in only for word in ("--only", case)))


def test_kills():
    run("kill", "--kills", "2", "--only", "convert --resume", "--only", "run --trace")


@pytest.mark.slow
def test_many_kills():
    run("kill", "--kills", "160")


@pytest.mark.slow
def test_damaged_numbers(tmp_path: Path):
    run("damaged", "--no-named", "--headers", "0", "--seed", "2", "--json", str(tmp_path / "damaged.json"))
    (table,) = json.loads((tmp_path / "damaged.json").read_text())["tables"]
    n_files, n_refused, n_accepted, _ = next(map(int, row[1:]) for row in table["rows"] if row[0] == "numbers, run")
    assert n_files > 80 and n_refused > 20 and n_accepted > 20


def test_damaged_headers(tmp_path: Path):
    run("damaged", "--no-named", "--no-values", "--headers", "60", "--runs", "3", "--seed", "2", "--json", str(tmp_path / "damaged.json"))
    (table,) = json.loads((tmp_path / "damaged.json").read_text())["tables"]
    n_files, n_refused, n_accepted, _ = (sum(int(row[i]) for row in table["rows"] if row[0].startswith("GGUF")) for i in range(1, 5))
    assert n_files == 60 and n_refused > 20 and n_accepted > 3


def test_files_beside_a_model(tmp_path: Path):
    """Of all kinds: a pipe at least, which is no file."""
    run("beside", "--count", "4", "--seed", "2", "--json", str(tmp_path / "beside.json"))
    (table,) = json.loads((tmp_path / "beside.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == list(BESIDE)


def test_a_model_object(tmp_path: Path):
    """Interrupted, abandoned, in several threads, forked, closed and forgotten, and with callbacks that raise: the seed draws some of each."""
    run("objects", "--count", "32", "--seed", "673", "--json", str(tmp_path / "objects.json"))
    (table,) = json.loads((tmp_path / "objects.json").read_text())["tables"]
    assert sorted(row[0] for row in table["rows"]) == ["abandon", "callback", "closed", "forgotten", "fork", "interrupt", "threads"]


def test_no_ordinary_files():
    run("places", "--only", "run", "--only", "inspect", "--only", "convert", "--every", "20")
    run("places", "--only", "serve", "--every", "61")


def test_known_advisories():
    run("advisories")


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
