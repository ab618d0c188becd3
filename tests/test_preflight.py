"""No file ends the process: whatever a header says, the model runs or there is one sentence about it."""

from __future__ import annotations

import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.arch_models import write_model
from helpers.damaged_runs import damaged_runs
from helpers.files import DEMO
from moeoff.errors import ModelError
from moeoff.gguf.file import ModelFile
from moeoff.gguf.layout import Layout
from moeoff.gguf.preflight import preflight

U32, F32 = 4, 6
SIZES = {U32: "I", F32: "f"}
INTS = [0, 1, 3, 33, 513, 1 << 31, (1 << 32) - 1]
FLOATS = [0.0, -1.0, 1e30, float("nan"), float("inf")]
RUN = ("-p", "Hi", "-n", "2", "-c", "64", "--no-warm", "--no-profile", "--no-experts", "-t", "1")


def numbers() -> dict[str, tuple[int, int]]:
    """Key -> where its value is in the demo model's file, and its type, of each hyperparameter and token that is one number."""
    with ModelFile(DEMO) as model:
        header, found = model.header(), {}
        for key, raw in model.metadata.items():
            (kind,) = struct.unpack_from("<I", raw)
            if kind in SIZES and not key.startswith("general."):
                name = struct.pack("<Q", len(key)) + key.encode()
                found[key] = header.index(name + raw) + len(name) + 4, kind
    return found


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copy(DEMO, tmp_path / "model.gguf"))


def check(model: Path, patches: list[tuple[int, bytes]]) -> list[int]:
    """Exit codes; each run ended well, or with one sentence."""
    codes = []
    for (at, data), (code, text) in zip(patches, damaged_runs(model, patches, "run", "-m", str(model), *RUN), strict=True):
        assert code in (0, 1), f"{data.hex()} at {at}: exit code {code}: {text}"
        assert len(text.splitlines()) == 1, f"{data.hex()} at {at}: {text}"
        assert code == 0 or text.startswith("Error: "), text
        codes.append(code)
    return codes


@pytest.mark.parametrize("key", numbers())
def test_no_value_ends_the_process(model, key):
    at, kind = numbers()[key]
    codes = check(model, [(at, struct.pack("<" + SIZES[kind], value)) for value in (INTS if kind == U32 else FLOATS)])
    if key.startswith("qwen2moe.") and key.endswith(("_count", "embedding_length")):
        assert 1 in codes


def test_what_one_architecture_asserts_while_it_computes(writer, folder):
    path = write_model(writer, folder, "deepseek2", "F32")
    layout = Layout.read(path)
    preflight(layout)
    for values in ({"attention.temperature_scale": 0.1, "attention.temperature_length": 0}, {"rope.dimension_count": 4096}):
        with pytest.raises(ModelError, match=f"{[*values][-1]} is {[*values.values()][-1]}, expected"):
            preflight(replace(layout, hparams=layout.hparams | values))


@pytest.mark.slow
def test_fuzz(model):
    """Numbers, and bytes anywhere in the header."""
    places, rng = list(numbers().values()), random.Random(7)
    with ModelFile(DEMO) as file:
        end = file.data_start
    patches = []
    for _ in range(400):
        at, kind = rng.choice(places)
        patches.append((at, struct.pack("<" + SIZES[kind], rng.choice(INTS) if kind == U32 else rng.choice(FLOATS))))
    patches += [(rng.randrange(end - 8), rng.randbytes(rng.choice((1, 4, 8)))) for _ in range(400)]
    check(model, patches)
