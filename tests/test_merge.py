"""Old files, with a tensor for each expert: what is said about them, and that they run once they are merged."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moeoff
from helpers.files import DEMO
from moeoff.gguf.file import ModelFile, ModelWriter
from moeoff.gguf.layout import Layout
from moeoff.gguf.merge import merge, merged_path
from split_experts import split

MOEOFF = str(Path(sys.executable).with_name("moeoff"))


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    path = tmp_path_factory.mktemp("old") / "old.gguf"
    split(DEMO, path)
    return path


def rewritten(old, path, change):
    """A copy with other tensors: `change` gets each one and its bytes, and returns them or None."""
    with ModelFile(old) as file:
        found = [pair for name, tensor in file.tensors.items() if (pair := change(tensor, file.data(name).reshape(-1))) is not None]
        with ModelWriter(path, file.metadata, [tensor for tensor, _ in found], file.alignment) as writer:
            for _, data in found:
                writer.write(data)
    return path


@pytest.mark.parametrize("command", [["run", "-p", "x", "-m"], ["inspect"], ["convert"], ["serve", "-m"]])
def test_the_command_to_merge_is_named(old, command):
    done = subprocess.run([MOEOFF, *command, str(old)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == f"Error: {old}: an old file with a tensor for each expert, which llama.cpp no longer reads: moeoff merge {old}"


def test_merged_it_is_the_model_and_runs(old):
    done = subprocess.run([MOEOFF, "merge", str(old)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{merged_path(old)}: 1152 experts' tensors in 36, ")
    with ModelFile(DEMO) as want, ModelFile(merged_path(old)) as got:
        assert {t.name: t for t in want.tensors.values()} == {t.name: t for t in got.tensors.values()}
        assert all(np.array_equal(want.data(name), got.data(name)) for name in want.tensors)
        assert want.metadata == got.metadata
    texts = []
    for model in (str(DEMO), merged_path(old)):
        with moeoff.Llama(model, expert_memory="4M") as llm:
            texts.append(llm.create_completion("How many apples?", max_tokens=12, temperature=0)["choices"][0]["text"])
    assert texts[0] == texts[1] and texts[0]


def test_what_is_there_is_not_replaced_unasked(old, tmp_path):
    target = tmp_path / "new.gguf"
    target.write_bytes(b"mine")
    with pytest.raises(moeoff.OptionError, match="exists already: give force=True"):
        merge(old, target)
    assert target.read_bytes() == b"mine"
    merge(old, target, force=True)
    assert len(Layout.read(target).experts) == 36
    with pytest.raises(moeoff.OptionError, match="the model itself"):
        merge(old, old, force=True)


def test_experts_that_do_not_belong_together(old, tmp_path):
    gone = rewritten(old, tmp_path / "gone.gguf", lambda tensor, data: None if tensor.name == "blk.3.ffn_up.7.weight" else (tensor, data))
    with pytest.raises(moeoff.ModelError, match=r"blk\.3\.ffn_up has experts .*, expected 0 to 30"):
        merge(gone)
    f32 = 0

    def other(tensor, data):
        if tensor.name != "blk.3.ffn_up.7.weight":
            return tensor, data
        return type(tensor)(tensor.name, tensor.shape, f32), np.zeros(int(np.prod(tensor.shape)) * 4, np.uint8)

    with pytest.raises(moeoff.ModelError, match="differ in shape or type"):
        merge(rewritten(old, tmp_path / "other.gguf", other))
    assert not Path(merged_path(tmp_path / "other.gguf")).exists()


def test_a_file_of_today_has_nothing_to_merge():
    with pytest.raises(moeoff.ModelError, match="nothing to merge"):
        merge(DEMO, "/nowhere/new.gguf")
