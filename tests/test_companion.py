"""A model through its companion: lossless with keep, the requantized stock file's logits with any other tier; and refusals."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arch_models import ARCHITECTURES, find_writer, open_moeoff, open_stock, run, write_model
from split_model import split_model
from stock import Stock, assert_bit_equal, greedy_logits

import moeoff
from moeoff import ModelError, OptionError, ReadError
from moeoff.companion import Companion, companion_path, hash64
from moeoff.container import ModelFile, ModelWriter, pack
from moeoff.convert import convert
from moeoff.layout import Layout
from moeoff.quantize import dequantize, quantize, type_name

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 2
OPTIONS = {"n_ctx": 64, "n_threads": 2, "logits_all": True, "expert_memory": 1 << 30}


def requantized(model: str | Path, out: Path, types: dict[str, int]) -> Path:
    """The model with these types for these tensors, made by `quantize` from whole tensors."""
    with ModelFile(model) as file:
        tensors = [replace(t, type=types.get(t.name, t.type)) for t in file.tensors.values()]
        with ModelWriter(out, file.metadata, tensors, file.alignment, file.version) as writer:
            for tensor in tensors:
                same = tensor.type == file.tensors[tensor.name].type
                writer.write(file.data(tensor.name) if same else quantize(file.rows(tensor.name), tensor.type))
    return out


def types_of(companion: str, tier: str, expert: int = 0) -> dict[str, int]:
    return {name: s.type for (name, e, t), s in Companion(companion).slices.items() if t == tier and e == expert}


def stock_logits(path) -> np.ndarray:
    stock = Stock(str(path), n_ctx=64, logits_all=True)
    logits = greedy_logits(stock, PROMPT, 8)
    stock.close()
    return logits


def companion_logits(path, **options) -> np.ndarray:
    with moeoff.Llama(str(path), **OPTIONS | options) as llm:
        logits = greedy_logits(llm, PROMPT, 8)
    return logits


@pytest.fixture
def model(demo, tmp_path) -> str:
    """A copy of the demo model, alone in its folder."""
    return shutil.copy(demo, tmp_path / "model.gguf")


def test_keep_is_lossless_and_found(model):
    expected = stock_logits(model)
    made = convert(model, tiers="keep,Q4_0")
    assert made.path == companion_path(model)
    with moeoff.Llama(model, **OPTIONS | {"verify_reads": True}) as llm:
        assert_bit_equal(greedy_logits(llm, PROMPT, 8), expected)
    # it was the companion that was read: damage there is noticed
    slice_ = Companion(made.path).slices["blk.0.ffn_up_exps.weight", 0, "keep"]
    for expert in range(32):
        damage(made.path, Companion(made.path).slices["blk.0.ffn_up_exps.weight", expert, "keep"].offset + slice_.nbytes // 2)
    with moeoff.Llama(model, **OPTIONS | {"verify_reads": True}) as llm:
        with pytest.raises(ReadError, match="not the ones that were converted"):
            greedy_logits(llm, PROMPT, 1)
    assert_bit_equal(companion_logits(model, experts=False), expected)
    lower = companion_logits(model, tier="q4_0")
    assert not np.array_equal(lower, expected)


def damage(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("tier", ["Q2_0", "Q4_0", "MXFP4", "F16", "twin", "Q4_K"])
def test_a_tier_is_the_requantized_stock_file(model, tmp_path, tier):
    made = convert(model, tiers=tier)
    out = requantized(model, tmp_path / "stock.gguf", types_of(made.path, tier))
    assert_bit_equal(companion_logits(model, tier=tier), stock_logits(out))
    assert_bit_equal(companion_logits(model), stock_logits(model))  # without keep the model itself is the high tier


def test_grown_model(grown, tmp_path):
    """Slices of many pages, in the K-quants' blocks."""
    made = convert(grown, output=tmp_path / "grown.experts.gguf", tiers="keep,Q2_K")
    expected = stock_logits(grown)
    assert_bit_equal(companion_logits(grown, experts=made.path, verify_reads=True), expected)
    assert_bit_equal(companion_logits(grown, experts=made.path, expert_memory="4M"), expected)
    out = requantized(grown, tmp_path / "stock.gguf", types_of(made.path, "Q2_K"))
    assert set(map(type_name, types_of(made.path, "Q2_K").values())) == {"Q2_K"}
    assert_bit_equal(companion_logits(grown, experts=made.path, tier="Q2_K", verify_reads=True), stock_logits(out))


def test_split_model(demo, tmp_path):
    parts = split_model(demo, tmp_path, 3)
    made = convert(parts[0], tiers="keep")
    assert made.path == str(tmp_path / "model.experts.gguf")
    assert_bit_equal(companion_logits(parts[0], verify_reads=True), stock_logits(parts[0]))
    shutil.copy(demo, tmp_path / "model.gguf")  # the same model in one file: the companion serves both
    with moeoff.Llama(str(tmp_path / "model.gguf"), **OPTIONS | {"verify_reads": True}):
        pass


def test_mixed_types_in_a_layer(model, tmp_path):
    """Each expert as its plan says; with experts of one type each, a router's row picks rows of the respective stock file."""
    plan = {"default": "Q4_0", "layers": {"0": {"0": "Q2_0", "1": "F16", "default": "Q8_0"}, "3": "MXFP4", "5": {"31": "keep"}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    made = convert(model, bits=tmp_path / "plan.json")
    slices = Companion(made.path).slices
    for (name, expert, tier), s in slices.items():
        layer = name.split(".")[1]
        by = plan["layers"].get(layer, {})
        want = by if isinstance(by, str) else by.get(str(expert), by.get("default", "Q4_0"))
        assert tier == "bits" and type_name(s.type) == {"keep": "Q8_0"}.get(want, want)
    # stock cannot mix types in a tensor, F16 can hold what they all stand for, but computes with it otherwise: so near, not equal
    with ModelFile(model) as source:
        mixed = {}
        for (name, expert, _), s in slices.items():
            whole = mixed.setdefault(name, source.rows(name).reshape(source.tensors[name].shape).copy())
            requantized_rows = quantize(whole[expert], s.type) if s.type != source.tensors[name].type else source.data(name).reshape(len(whole), whole.shape[1], -1)[expert]
            assert s.hash == hash64(np.ascontiguousarray(requantized_rows))  # the respective stock file's rows
            if s.type != source.tensors[name].type:
                whole[expert] = dequantize(quantize(whole[expert], s.type), s.type, whole[expert].shape)
        tensors = [replace(t, type=0) if t.name in mixed else t for t in source.tensors.values()]
        with ModelWriter(tmp_path / "f32.gguf", source.metadata, tensors) as writer:
            for t in tensors:
                writer.write(mixed[t.name].view(np.uint8) if t.name in mixed else source.data(t.name))
    got, near = companion_logits(model, tier="bits"), stock_logits(tmp_path / "f32.gguf")
    n = len(PROMPT)
    assert np.sqrt(((got - near)[:n] ** 2).mean()) < 0.03 * near[:n].std()


def test_plan_of_one_type_equals_the_tier(model, tmp_path):
    (tmp_path / "plan.json").write_text('{"default": "Q4_0"}')
    made = convert(model, tiers="Q4_0", bits=tmp_path / "plan.json")
    file = Companion(made.path)
    for (name, expert, tier), s in file.slices.items():
        assert s.hash == file.slices[name, expert, "Q4_0" if tier == "bits" else "bits"].hash
    assert_bit_equal(companion_logits(model, tier="bits"), companion_logits(model, tier="Q4_0"))


@pytest.mark.parametrize("architecture", ["qwen3moe", "llama4", "grovemoe", "gpt-oss"])
def test_architectures(architecture, tmp_path):
    compare_architecture(architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture, tmp_path):
    compare_architecture(architecture, tmp_path)


def compare_architecture(architecture: str, folder: Path) -> None:
    path = write_model(find_writer(), folder, architecture, "F32")
    made = convert(path, tiers="keep,Q4_K")
    with open_stock(path) as stock:
        expected = run(stock)
    for floor in (False, True):
        with open_moeoff(path, floor=floor, verify_reads=True) as model:
            np.testing.assert_array_equal(run(model), expected)
    out = requantized(path, folder / "stock.gguf", types_of(made.path, "Q4_K"))
    with open_stock(out) as stock, open_moeoff(path, tier="Q4_K") as model:
        np.testing.assert_array_equal(run(model), run(stock))
    shutil.rmtree(folder)


# --- refusals ---


def test_other_and_changed_models_are_refused(model, tmp_path):
    made = convert(model, tiers="keep")
    with ModelFile(model) as source:
        name = next(n for n in source.tensors if "blk.7.ffn_down_exps" in n)
        offset, size = source.offset(name), source.tensors[name].n_bytes
    before = Path(model).read_bytes()
    noise = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    Path(model).write_bytes(before[:offset] + noise + before[offset + size :])
    with pytest.raises(ModelError, match="has changed since"):
        moeoff.Llama(model, **OPTIONS)
    Path(model).write_bytes(before)
    with moeoff.Llama(model, **OPTIONS):
        pass
    other = requantized(model, tmp_path / "other.gguf", dict.fromkeys(types_of(made.path, "keep"), 2))
    with pytest.raises(ModelError, match="made of another model.gguf"):
        moeoff.Llama(str(other), experts=made.path, **OPTIONS)
    shutil.copy(made.path, companion_path(other))
    with pytest.raises(ModelError, match="--no-experts"):
        moeoff.Llama(str(other), **OPTIONS)
    with moeoff.Llama(str(other), experts=False, **OPTIONS):
        pass


def test_metadata_may_change(model, tmp_path):
    """A corrected chat template leaves the experts what they were."""
    made = convert(model, tiers="keep")
    with ModelFile(model) as source:
        with ModelWriter(tmp_path / "new.gguf", source.metadata | {"general.description": pack("x" * 5000)}, list(source.tensors.values())) as writer:
            for name in source.tensors:
                writer.write(source.data(name))
    with moeoff.Llama(str(tmp_path / "new.gguf"), experts=made.path, **OPTIONS):
        pass


def test_options(model, tmp_path):
    with pytest.raises(OptionError, match="needs a companion"):
        moeoff.Llama(model, tier="Q4_0", **OPTIONS)
    with pytest.raises(OptionError, match="verify_reads needs a companion"):
        moeoff.Llama(model, verify_reads=True, **OPTIONS)
    with pytest.raises(ModelError, match="cannot be read"):
        moeoff.Llama(model, experts=str(tmp_path / "absent.gguf"), **OPTIONS)
    with pytest.raises(ModelError, match="not a companion"):
        moeoff.Llama(model, experts=model, **OPTIONS)
    made = convert(model, tiers="Q4_0")
    with pytest.raises(OptionError, match="no tier Q2_0; there are Q4_0, keep"):
        moeoff.Llama(model, tier="Q2_0", **OPTIONS)
    with pytest.raises(OptionError, match="--tier Q4_0"):
        moeoff.Llama(model, experts=made.path, **OPTIONS)
    with moeoff.Llama(model, verify_reads=True, **OPTIONS) as llm:  # without keep: the model's own bytes, against the hashes
        greedy_logits(llm, PROMPT, 1)
        assert llm.expert_buffer.stats().read_errors == 0


def test_gguf_py_reads_it(model):
    from gguf import GGUFReader

    made = convert(model, tiers="keep,Q4_0")
    reader = GGUFReader(made.path)
    assert len(reader.tensors) == 2 * 12 * 32 * 3
    layout = Layout.read(model)
    with ModelFile(model) as source:
        for tensor in reader.tensors[::97]:
            name, expert, tier = tensor.name.rsplit(".", 2)
            rows = layout.experts[name].shape[1]
            original = source.data(name)[int(expert) * rows : (int(expert) + 1) * rows]
            assert tensor.data_offset % 4096 == 0
            if tier == "keep":
                assert np.array_equal(tensor.data.reshape(rows, -1), original)
    first = [t.name for t in reader.tensors[:3]]  # an expert's matrices lie side by side, as the graph wants them
    assert first == [f"blk.0.ffn_{m}_exps.weight.0.keep" for m in ("up", "gate", "down")]


def test_command_line(model, moeoff_command):
    done = moeoff_command("convert", model, "--tiers", "keep,Q2_K")
    assert done.returncode == 0 and "keep 9.56 MiB" in done.stdout
    assert "Q2_K cannot hold rows of 128: Q2_0 instead" in done.stderr
    done = moeoff_command("convert", model)
    assert done.returncode == 1 and "exists: give --force" in done.stderr
    path = companion_path(model)
    assert "intact" in moeoff_command("verify", path).stdout
    run_ = ["run", "-m", model, "-p", "Hello", "-n", "8", "--temp", "0", "--no-warm"]
    plain = moeoff_command(*run_, "--no-experts")
    assert plain.returncode == 0 and plain.stdout == moeoff_command(*run_, "--verify-reads").stdout
    assert moeoff_command(*run_, "--tier", "q2_k").returncode == 0
    s = next(iter(Companion(path).slices.values()))
    damage(path, s.offset + 5)
    done = moeoff_command("verify", path)
    assert done.returncode == 1 and "damaged in 1 of" in done.stderr and "blk.0.ffn_up_exps.weight.0.keep" in done.stderr
    assert moeoff_command("verify", path, "-m", os.devnull).returncode == 1
