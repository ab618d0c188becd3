"""Reading and writing GGUF: what llama.cpp's parser accepts and nothing else, exact copies, and errors that leave nothing behind."""

import random
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader
from mutants import mutate

from helpers.files import DEMO
from helpers.gguf_api import Header, read_header
from moeoff.errors import ModelError, WriteError
from moeoff.gguf.file import ModelFile, ModelWriter, Tensor, pack, pack_array
from moeoff.gguf.quantize import type_from_name

FORMATS = "BbHhIif?xxQqd"  # by GGUF type; strings and arrays have none


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
    with pytest.raises(WriteError, match="exists"), ModelWriter(tmp_path / "x.gguf", metadata, tensors):
        pass
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]


def as_llama_cpp_has_it(path) -> Header:
    """Of our reader. Strings end at their first zero, as C's do; tensors of one name up to there are one."""
    with ModelFile(path) as file:
        values, tensors = {}, {}
        for key, raw in file.metadata.items():
            (kind,) = struct.unpack_from("<I", raw)
            if kind == 9:
                value = (kind, *struct.unpack_from("<IQ", raw, 4))
            elif kind == 8:
                value = (kind, raw[12:].split(b"\0")[0])
            else:
                value = (kind, bytes([raw[4] != 0]) if kind == 7 else raw[4:])
            values[key.encode("utf-8", "surrogateescape").split(b"\0")[0]] = value
        for name, tensor in file.tensors.items():
            shape = (*reversed(tensor.shape), 1, 1, 1)[:4]
            tensors[name.encode("utf-8", "surrogateescape").split(b"\0")[0]] = (tensor.type, shape, file.offset(name), tensor.n_bytes)
        return Header(values, tensors)


@pytest.fixture
def path(tmp_path):
    """A file with a value of every type, arrays of them, and tensors of several types and shapes."""
    metadata = {"general.architecture": pack("qwen3moe"), "general.alignment": pack(64)}
    for kind, form in enumerate(FORMATS):
        if form != "x":
            metadata[f"scalar.{kind}"] = struct.pack("<I" + form, kind, 1)
            metadata[f"array.{kind}"] = struct.pack("<IIQ5" + form, 9, kind, 5, 0, 1, 2, 3, 4)
    metadata["strings"] = pack_array(["one", "", "three"])
    shapes = [(3,), (4, 32), (2, 3, 64), (2, 2, 2, 256)]
    tensors = [Tensor(f"tensor.{name}", shape, type_from_name(name)) for name, shape in zip(("F32", "Q8_0", "Q4_0", "Q4_K"), shapes)]
    with ModelWriter(tmp_path / "model.gguf", metadata, tensors, alignment=64) as writer:
        for tensor in tensors:
            writer.write(np.zeros(tensor.n_bytes, np.uint8))
    return tmp_path / "model.gguf"


def test_all_types_are_read(path):
    assert as_llama_cpp_has_it(path) == read_header(path)


def test_damaged_headers(path, tmp_path):
    """Thousands of files with something wrong in them: the same are refused, and of the others the same is read."""
    good, rng, mutant, seen = path.read_bytes(), random.Random(7), tmp_path / "mutant.gguf", [0, 0]
    with ModelFile(path) as file:
        size = file.data_start
    for number in range(4000):
        data = mutate(good[:size], rng) + good[size:]
        mutant.write_bytes(data)
        theirs = read_header(mutant)
        if theirs and any(offset + n_bytes > len(data) for _, _, offset, n_bytes in theirs.tensors.values()):
            theirs = None  # the parser does not look whether the tensors are there
        try:
            ours = as_llama_cpp_has_it(mutant)
        except ModelError as error:
            assert theirs is None, f"mutant {number}: llama.cpp reads it: {error}"
            assert "\n" not in str(error) and str(mutant) in str(error)
        else:
            assert ours == theirs, f"mutant {number}"
        seen[theirs is not None] += 1
    assert min(seen) > 500, seen


@pytest.mark.parametrize("architecture", [b"qwen\xff", "qwen3\u00e9".encode()])
def test_a_copy_keeps_bytes_that_are_no_text(architecture, tmp_path):
    raw = struct.pack("<IQ", 8, len(architecture)) + architecture
    key, name = (b"a\xfe").decode("utf-8", "surrogateescape"), (b"t\xfe").decode("utf-8", "surrogateescape")
    for source, out in ((None, "a.gguf"), ("a.gguf", "b.gguf")):
        if source:
            with ModelFile(tmp_path / source) as file:
                metadata, tensors = file.metadata, list(file.tensors.values())
        else:
            metadata, tensors = {"general.architecture": raw, key: pack(1)}, [Tensor(name, (2, 4), 0)]
        with ModelWriter(tmp_path / out, metadata, tensors) as writer:
            writer.write(np.zeros(32, np.uint8))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert as_llama_cpp_has_it(tmp_path / "b.gguf") == read_header(tmp_path / "b.gguf")
