"""scripts/faults/damaged.py in short, and what its generator makes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from mutants import fields, mutate_header

from helpers.files import DEMO, ROOT
from moeoff.gguf.file import ModelFile

SCRIPT = str(ROOT / "scripts" / "faults" / "damaged.py")


def run(*args: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr


def test_some():
    run("--no-named", "--headers", "400", "--runs", "17", "--beside", "60", "--seed", "2")


@pytest.mark.slow
def test_many():
    run("--headers", "5000", "--runs", "300", "--beside", "500", "--seed", "3")


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
