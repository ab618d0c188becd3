"""Reading and writing GGUF: exact copies, and errors that leave nothing behind."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader

from helpers.files import DEMO
from moeoff.errors import ModelError
from moeoff.gguf.file import ModelFile, ModelWriter, Tensor, pack


def test_copy_is_exact(tmp_path):
    with ModelFile(DEMO) as model:
        with ModelWriter(tmp_path / "copy.gguf", model.metadata, list(model.tensors.values()), model.alignment) as writer:
            for name in model.tensors:
                writer.write(model.data(name))
        theirs = {tensor.name: tensor for tensor in GGUFReader(DEMO).tensors}
        assert list(theirs) == list(model.tensors)
        for name, tensor in model.tensors.items():
            assert tensor.shape == tuple(reversed(theirs[name].shape)) and tensor.type == theirs[name].tensor_type
    assert (tmp_path / "copy.gguf").read_bytes() == DEMO.read_bytes()


def test_cut_short_is_an_error(tmp_path):
    whole = DEMO.read_bytes()
    for n in [0, 3, 24, 30, 1000, 60_000, 200_000, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:n])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            ModelFile(tmp_path / "cut.gguf")
    with pytest.raises(ModelError, match="absent"):
        ModelFile(tmp_path / "absent.gguf")


def test_writer_leaves_nothing_on_errors(tmp_path):
    tensors = [Tensor("a", (2, 8), T.F32), Tensor("b", (8,), T.F32)]
    metadata = {"general.architecture": pack("none")}
    with pytest.raises(ModelError, match="2 tensors"), ModelWriter(tmp_path / "x.gguf", metadata, tensors) as writer:
        writer.write(np.zeros(40, np.uint8))
    with pytest.raises(KeyboardInterrupt), ModelWriter(tmp_path / "x.gguf", metadata, tensors):
        raise KeyboardInterrupt
    with pytest.raises(ModelError, match="24 more"), ModelWriter(tmp_path / "x.gguf", metadata, tensors) as writer:
        writer.write(np.zeros(40, np.uint8))
        writer.write(np.zeros(40, np.uint8))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.gguf").write_bytes(b"precious")
    with pytest.raises(ModelError, match="exists"), ModelWriter(tmp_path / "x.gguf", metadata, tensors):
        pass
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]
