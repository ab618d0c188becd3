"""A model through its sidecar: lossless with its tier "original", the requantized stock
file's logits with any other tier; and refusals.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

import moeoff
from helpers import ggml_api
from helpers.arch_models import ARCHITECTURES, open_moeoff, open_stock, run, write_model
from helpers.eval_callback import WithCallback
from helpers.files import ROOT, flip_bit
from helpers.kernels import CpuTensor, Op
from helpers.logits import assert_bit_equal, greedy_logits, stock_logits
from helpers.models import rewritten, split_model
from moeoff import ModelError, OptionError, ReadError
from moeoff.experts.convert import convert
from moeoff.experts.sidecar import FORMAT_VERSION, ExpertSource, Sidecar, sidecar_path
from moeoff.gguf.file import ModelFile
from moeoff.gguf.model_index import ModelIndex, parse_tensor_name
from moeoff.gguf.quantize import quantize, type_name
from mutants import mutate

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 2
OPTIONS = {"n_ctx": 64, "n_threads": 2, "logits_all": True, "expert_memory": 1 << 30}


def types_of(sidecar: str, tier: str, expert: int = 0) -> dict[str, int]:
    return {
        name: s.type
        for (name, e, t), s in Sidecar(sidecar).slices.items()
        if t == tier and e == expert
    }


def sidecar_logits(path, **options) -> np.ndarray:
    with moeoff.Llama(str(path), **OPTIONS | options) as llm:
        logits = greedy_logits(llm, PROMPT, 8)
    return logits


@pytest.fixture
def model(demo, tmp_path) -> str:
    """A copy of the demo model, alone in its folder."""
    return shutil.copy(demo, tmp_path / "model.gguf")


def test_names_of_the_format(model):
    """Those that docs/reference/sidecar.md lists, which files of this format version
    have: another name is another version.
    """
    listed = set(
        re.findall(
            r"^\| `(moeoff\.[\w.]+)`",
            (ROOT / "docs/reference/sidecar.md").read_text(),
            re.MULTILINE,
        )
    )
    reader = gguf.GGUFReader(convert(model, tiers="original,Q4_0").path)
    names = {name for name in reader.fields if name.startswith("moeoff.")}
    assert names == listed and (FORMAT_VERSION, "moeoff.sidecar.tiers" in names) == (2, True)
    assert len(reader.tensors) == 2 * 12 * 32 * 3
    # an expert's matrices lie side by side, as the graph wants them
    first = [tensor.name for tensor in reader.tensors[:3]]
    assert first == [
        f"blk.0.ffn_{matrix}_exps.weight.0.original" for matrix in ("up", "gate", "down")
    ]


@pytest.fixture(scope="module")
def expected(demo) -> np.ndarray:
    """The demo model's logits by llama.cpp."""
    return stock_logits(demo, PROMPT, 8, 64)


def test_keep_is_lossless_and_found(model, expected):
    made = convert(model, tiers="original,Q4_0")
    assert made.path == sidecar_path(model)
    with moeoff.Llama(model, **OPTIONS | {"verify_reads": True}) as llm:
        assert_bit_equal(greedy_logits(llm, PROMPT, 8), expected)
    # it was the sidecar that was read: damage there is noticed
    slice_ = Sidecar(made.path).slices["blk.0.ffn_up_exps.weight", 0, "original"]
    for expert in range(32):
        flip_bit(
            made.path,
            Sidecar(made.path).slices["blk.0.ffn_up_exps.weight", expert, "original"].offset
            + slice_.nbytes // 2,
        )
    with moeoff.Llama(model, **OPTIONS | {"verify_reads": True}) as llm:
        with pytest.raises(ReadError, match="not the ones that were converted"):
            greedy_logits(llm, PROMPT, 1)
    assert_bit_equal(sidecar_logits(model, experts=False), expected)
    lower = sidecar_logits(model, tier="q4_0")
    assert not np.array_equal(lower, expected)


@pytest.mark.parametrize(
    "tier",
    [
        "MXFP4",
        "auto",
        *(
            pytest.param(tier, marks=pytest.mark.slow)
            for tier in ("Q2_K", "F16", "Q2_0", "Q4_0", "Q4_K")
        ),
    ],
)
def test_a_tier_is_the_requantized_stock_file(model, expected, tmp_path, tier):
    made = convert(model, tiers=tier)
    stands_in = tier == "Q2_K"  # the rows hold none of its blocks
    assert not stands_in or set(map(type_name, types_of(made.path, tier).values())) == {"Q2_0"}
    out = rewritten(model, tmp_path / "stock.gguf", types=types_of(made.path, tier))
    assert_bit_equal(sidecar_logits(model, tier=tier), stock_logits(out, PROMPT, 8, 64))
    # without an original tier the model itself is the high tier
    assert_bit_equal(sidecar_logits(model), expected)


@pytest.mark.slow
def test_grown_model(grown, tmp_path):
    """Slices of many pages, in the K-quants' blocks."""
    made = convert(grown, output=tmp_path / "grown.experts.gguf", tiers="original,Q2_K")
    expected = stock_logits(grown, PROMPT, 8, 64)
    assert_bit_equal(sidecar_logits(grown, experts=made.path, verify_reads=True), expected)
    assert_bit_equal(sidecar_logits(grown, experts=made.path, expert_memory="4M"), expected)
    out = rewritten(grown, tmp_path / "stock.gguf", types=types_of(made.path, "Q2_K"))
    assert set(map(type_name, types_of(made.path, "Q2_K").values())) == {"Q2_K"}
    assert_bit_equal(
        sidecar_logits(grown, experts=made.path, tier="Q2_K", verify_reads=True),
        stock_logits(out, PROMPT, 8, 64),
    )


def test_split_model(demo, expected, tmp_path):
    parts = split_model(demo, tmp_path, 3)
    made = convert(parts[0], tiers="original")
    assert made.path == str(tmp_path / "model.experts.gguf")
    assert_bit_equal(sidecar_logits(parts[0], verify_reads=True), expected)
    # the same model in one file: the sidecar serves both
    Sidecar(made.path).check_belongs(ModelIndex.read(demo))


class Products(WithCallback, moeoff.Llama):
    """Notes every product with experts: name, rows float32 [n_tokens, n_rows_in,
    n_cols], ids [n_tokens, n_used], result's bits.
    """

    def __init__(self, *args, **kwargs):
        self.products: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
        super().__init__(*args, **kwargs)
        self.products.clear()

    def _watch(self, node: int, ask: bool, _user: object) -> bool:
        tensor = ggml_api.Tensor.from_address(node)
        if ggml_api.op_name(tensor) != b"MUL_MAT_ID":
            return not ask
        if not ask:
            experts, rows, ids = (tensor.src[i].contents for i in range(3))
            self.products.append(
                (
                    experts.name.decode(),
                    ggml_api.cube(rows),
                    ggml_api.matrix(ids),
                    ggml_api.cube(tensor).view(np.uint32),
                )
            )
        return True


def test_mixed_types_in_a_layer(model, tmp_path):
    """Each expert as its plan says, and computed as stock computes it.

    Stock cannot hold such a tensor. But with the rows and ids that a product really
    had, stock's own product with a tensor of one type gives the rows of the experts
    that have that type: each row of the result must be that one, bit for bit. Between
    the products everything is llama.cpp's.
    """
    plan = {
        "default": "Q4_0",
        "layers": {
            "0": {"0": "Q2_0", "1": "F16", "default": "Q8_0"},
            "3": "MXFP4",
            "5": {"31": "original"},
        },
    }
    for layer in (4, 6):  # neighbours differ
        plan["layers"][str(layer)] = {
            str(e): ("Q2_0", "F16", "MXFP4", "original")[e % 4] for e in range(32)
        }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    made = convert(model, bits=tmp_path / "plan.json")
    slices = Sidecar(made.path).slices
    for (name, expert, tier), s in slices.items():
        by = plan["layers"].get(str(parse_tensor_name(name).layer), {})
        want = by if isinstance(by, str) else by.get(str(expert), by.get("default", "Q4_0"))
        assert tier == "bits" and type_name(s.type) == {"original": "Q8_0"}.get(want, want)

    with Products(
        model, tier="bits", verify_reads=True, **OPTIONS | {"expert_memory": "4M"}
    ) as llm:
        greedy_logits(llm, PROMPT, 4)
        products = llm.products
    assert len({name for name, *_ in products}) == 36
    types_seen = set()
    backend = ggml_api.Backend()
    with ModelFile(model) as source:
        for name, rows, ids, result in products:
            tensor = source.tensors[name]
            type_of = np.array([slices[name, expert, "bits"].type for expert in range(32)])[ids]
            expected = np.zeros_like(result)
            for type in np.unique(type_of).tolist():
                data = (
                    source.data(name) if type == tensor.type else quantize(source.rows(name), type)
                )
                with CpuTensor(data.reshape(32, -1), type, tensor.shape[:0:-1]) as plain:
                    with Op(
                        plain, n_tokens=len(ids), n_rows_in=rows.shape[1], n_used=ids.shape[1]
                    ) as op:
                        op.give(rows, ids)
                        expected[type_of == type] = op.compute(backend, 0)[type_of == type]
            types_seen.add(frozenset(map(type_name, np.unique(type_of).tolist())))
            np.testing.assert_array_equal(result, expected, err_msg=name)
    backend.close()
    assert frozenset(["Q2_0", "F16", "MXFP4", "Q8_0"]) in types_seen


QUICK = ("qwen3moe", "llama4", "grovemoe", "gpt-oss")


@pytest.mark.parametrize(
    "architecture",
    [
        *QUICK,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ARCHITECTURES
            if name not in QUICK
        ),
    ],
)
def test_architectures(architecture, writer, folder):
    path = write_model(writer, folder, architecture, "F32")
    made = convert(path, tiers="original,Q4_K")
    with open_stock(path) as stock:
        expected = run(stock)
    for floor in (False, True):
        with open_moeoff(path, floor=floor, verify_reads=True) as model:
            np.testing.assert_array_equal(run(model), expected)
    out = rewritten(path, folder / "stock.gguf", types=types_of(made.path, "Q4_K"))
    with open_stock(out) as stock, open_moeoff(path, tier="Q4_K") as model:
        np.testing.assert_array_equal(run(model), run(stock))


# --- damage ---


@pytest.mark.parametrize(
    "n, seed, least", [(15, 1, 1), pytest.param(1000, 2, 101, marks=pytest.mark.slow)]
)
def test_fuzz_of_reading(model, n, seed, least):
    """Any damage: refused on opening, or noticed on reading, or the logits are as ever
    because nothing read was damaged.
    """
    made = convert(model, tiers="original,Q2_0")
    good = Path(made.path).read_bytes()
    begin = min(s.offset for s in Sidecar(made.path).slices.values())
    options = OPTIONS | {"verify_reads": True, "expert_memory": "4M", "n_ctx": 16}
    expected = {tier: sidecar_logits(model, tier=tier) for tier in ("original", "Q2_0")}
    rng, seen = random.Random(seed), dict.fromkeys(["refused", "noticed", "untouched"], 0)
    for i in range(n):
        # the header's damage has its own test: here mostly that of slices
        data = mutate(good, rng) if i % 5 == 0 else good[:begin] + mutate(good[begin:], rng)
        # also where the size does not tell
        data = data if i % 2 else data[: len(good)] + bytes(max(len(good) - len(data), 0))
        Path(made.path).write_bytes(data)
        tier = rng.choice(["original", "Q2_0"])
        try:
            with moeoff.Llama(model, tier=tier, **options) as llm:
                logits = greedy_logits(llm, PROMPT, 0)
        except ReadError as error:
            assert made.path in str(error) and "\n" not in str(error)
            seen["noticed"] += 1
        except ModelError as error:
            assert made.path in str(error) and "\n" not in str(error)
            seen["refused"] += 1
        else:
            assert_bit_equal(logits, expected[tier][: len(logits)])
            seen["untouched"] += 1
    assert min(seen.values()) >= least, seen


# --- refusals ---


def test_other_and_changed_models_are_refused(model, tmp_path):
    made = convert(model, tiers="original")
    with ModelFile(model) as source:
        name = next(n for n in source.tensors if "blk.7.ffn_down_exps" in n)
        offset, size = source.offset(name), source.tensors[name].n_bytes
    before = Path(model).read_bytes()
    noise = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    Path(model).write_bytes(before[:offset] + noise + before[offset + size :])
    with pytest.raises(ModelError, match="has changed since"):
        moeoff.Llama(model, **OPTIONS)
    Path(model).write_bytes(before)
    assert ExpertSource.make(ModelIndex.read(model)).repacked
    other = ModelIndex.read(
        rewritten(
            model, tmp_path / "other.gguf", types=dict.fromkeys(types_of(made.path, "original"), 2)
        )
    )
    with pytest.raises(ModelError, match="made of another model.gguf"):
        ExpertSource.make(other, made.path)
    shutil.copy(made.path, sidecar_path(other.files[0]))
    with pytest.raises(ModelError, match="experts='none'"):
        ExpertSource.make(other)
    assert ExpertSource.make(other, False).sidecar is None


def test_metadata_may_change(model, tmp_path):
    """A corrected chat template leaves the experts what they were."""
    made = convert(model, tiers="original")
    Sidecar(made.path).check_belongs(
        ModelIndex.read(
            rewritten(model, tmp_path / "new.gguf", {"general.description": "x" * 5000})
        )
    )


def test_options(model, tmp_path):
    with pytest.raises(ModelError, match="not a sidecar"):
        moeoff.Llama(model, experts=model, **OPTIONS)
    made = convert(model, tiers="Q4_0")
    with pytest.raises(OptionError, match="no tier Q2_0; there are Q4_0, original"):
        moeoff.Llama(model, tier="Q2_0", **OPTIONS)
    with pytest.raises(OptionError, match="tier='Q4_0'"):
        moeoff.Llama(model, experts=made.path, **OPTIONS)
    # without an original tier: the model's own bytes, against the hashes
    with moeoff.Llama(model, verify_reads=True, **OPTIONS) as llm:
        greedy_logits(llm, PROMPT, 1)
        assert llm.engine.buffer.stats().read_errors == 0


def test_command_line(model, invoke):
    done = invoke("convert", str(model), "--tiers", "original,Q2_K")
    assert done.returncode == 0 and "original 9.56 MiB" in done.stdout
    assert "Q2_K cannot hold rows of 128: Q2_0 instead" in done.stderr
    done = invoke("convert", str(model))
    assert done.returncode == 1 and "exists: give --force" in done.stderr
    path = sidecar_path(model)
    assert "intact" in invoke("verify", str(path)).stdout
    s = next(iter(Sidecar(path).slices.values()))
    flip_bit(path, s.offset + 5)
    done = invoke("verify", str(path))
    assert (
        done.returncode == 1
        and "damaged in 1 of" in done.stderr
        and "blk.0.ffn_up_exps.weight.0.original" in done.stderr
    )
    assert invoke("verify", str(path), "-m", os.devnull).returncode == 1


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_convert_says_to_type_next(demo, invoke, tmp_path, beside):
    """It runs with what was made; and without it `run` says that it is there."""
    model = str(shutil.copy(demo, tmp_path / "a model.gguf"))
    elsewhere = [] if beside else ["-o", str(tmp_path / "experts.gguf")]
    command = shlex.split(
        invoke("convert", model, "--tiers", "original,Q4_0", *elsewhere)
        .stdout.splitlines()[-1]
        .removeprefix("next: ")
    )
    assert command == [
        "moeoff",
        "run",
        "-m",
        model,
        *([] if beside else ["--experts", elsewhere[1]]),
        "--tier",
        "Q4_0",
    ]
    done = invoke(*command[1:], "-p", "x", "-n", "2")
    assert (
        done.returncode == 0
        and "all experts in Q4_0" in done.stderr
        and "give --tier" not in done.stderr
    ), done.stderr
    done = invoke(*command[1:-2], "-p", "x", "-n", "2")
    assert (
        done.returncode == 0
        and "lossless, though the sidecar has Q4_0: give --tier Q4_0, or --max-loss" in done.stderr
    ), done.stderr
    assert invoke("convert", model, "--tiers", "original", "--force").stdout.endswith(
        f"next: moeoff run -m {shlex.quote(model)}\n"
    )


def test_a_sidecar_of_another_format_is_refused(demo, tmp_path):
    """For example the first format, in which the tier of the model's own bytes had
    another name.
    """
    path = convert(demo, output=tmp_path / "old.gguf", tiers="original").path
    key, data = b"moeoff.format_version", bytearray(Path(path).read_bytes())
    at = data.index(key) + len(key) + 4
    assert data[at] == FORMAT_VERSION
    data[at] = FORMAT_VERSION - 1
    Path(path).write_bytes(data)
    with pytest.raises(
        ModelError,
        match=(
            f"expected sidecar format {FORMAT_VERSION}, got {FORMAT_VERSION - 1}: convert the model"
            " again"
        ),
    ):
        Sidecar(path)
