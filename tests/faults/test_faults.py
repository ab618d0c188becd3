"""The scripts of scripts/faults in short, and what makes their damage."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from damaged import fields, mutate_header
from helpers.files import DEMO, ROOT
from moeoff.gguf.file import ModelFile

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
def test_trouble_with_the_disk():
    """Slow, full, read-only, refused direct reads, a model that is cut."""
    run("disk")


@pytest.mark.parametrize("kills", [8, pytest.param(160, marks=pytest.mark.slow)])
def test_kills(kills):
    run("kill", "--kills", str(kills))


def test_damage(tmp_path: Path):
    run("damaged", "--no-named", "--headers", "200", "--runs", "9", "--beside", "30", "--seed", "2", "--json", str(tmp_path / "damaged.json"))
    (table,) = json.loads((tmp_path / "damaged.json").read_text())["tables"]
    n_files, n_refused, n_accepted, _ = next(map(int, row[1:]) for row in table["rows"] if row[0] == "numbers, run")
    assert n_files > 80 and n_refused > 20 and n_accepted > 20


@pytest.mark.slow
def test_more_damage():
    run("damaged", "--headers", "5000", "--runs", "300", "--beside", "500", "--seed", "3")


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
        header = model.header()
    places = fields(header)
    first, second = ([mutate_header(header, places, rng) for _ in range(200)] for rng in (random.Random(5), random.Random(5)))
    assert first == second and len({m.what for m in first}) > 50
