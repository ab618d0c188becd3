"""Reading and writing GGUF: what llama.cpp's parser accepts and nothing else, exact
copies, names, old files, and errors that leave nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import struct
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, replace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader
from llama_cpp import llama_cpp

from helpers.arch_models import write_model
from helpers.files import DEMO
from helpers.ggml_api import F32, Context
from model_writer import ModelWriter
from moeoff.engine.buffer import ExpertBuffer
from moeoff.errors import ModelError, WriteError
from moeoff.experts.sidecar import parse_slice_name, sidecar_path, slice_name
from moeoff.gguf import file as reader
from moeoff.gguf import preflight
from moeoff.gguf.file import FileState, ModelFile, Tensor
from moeoff.gguf.model_index import (
    EMBEDDING,
    MATRICES,
    OUTPUT,
    ModelIndex,
    SplitName,
    TensorRole,
    is_expert,
    model_stem,
    parse_block_name,
    parse_tensor_name,
)
from moeoff.gguf.quantize import is_computed, row_bytes, type_from_name, type_name
from moeoff.llamacpp import native
from moeoff.llamacpp.llama import _log as llama_log
from moeoff.llamacpp.llama import lib
from mutants import mutate

# --- llama.cpp's own parser, through its C interface ---


class _InitParams(Structure):
    """struct gguf_init_params { bool no_alloc; struct ggml_context ** ctx; };"""

    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


def _function(name: str, result, *arguments):
    function = getattr(lib, "gguf_" + name)
    function.restype = result
    function.argtypes = arguments
    return function


_init_from_file = _function("init_from_file", c_void_p, c_char_p, _InitParams)
_free = _function("free", None, c_void_p)
_data_offset = _function("get_data_offset", c_size_t, c_void_p)
_n_kv = _function("get_n_kv", c_int64, c_void_p)
_key = _function("get_key", c_char_p, c_void_p, c_int64)
_kv_type = _function("get_kv_type", c_int, c_void_p, c_int64)
_val_data = _function("get_val_data", c_void_p, c_void_p, c_int64)
_val_str = _function("get_val_str", c_char_p, c_void_p, c_int64)
_arr_type = _function("get_arr_type", c_int, c_void_p, c_int64)
_arr_n = _function("get_arr_n", c_size_t, c_void_p, c_int64)
_n_tensors = _function("get_n_tensors", c_int64, c_void_p)
_tensor_name = _function("get_tensor_name", c_char_p, c_void_p, c_int64)
_tensor_offset = _function("get_tensor_offset", c_size_t, c_void_p, c_int64)
_tensor_type = _function("get_tensor_type", c_int, c_void_p, c_int64)
_tensor_size = _function("get_tensor_size", c_size_t, c_void_p, c_int64)
_tensor_ne = _function("get_tensor_ne", POINTER(c_int64), c_void_p, c_int64)

_silence = llama_cpp.llama_log_callback(lambda *_: None)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Header:
    """values: type and bytes of a scalar or string, type of elements and their number
    of an array, by key. tensors: type, shape with the row length first, offset in the
    file and bytes, by name. Names and keys end at their first zero.
    """

    values: dict[bytes, tuple]
    tensors: dict[bytes, tuple[int, tuple[int, ...], int, int]]


def read_header(path: str | os.PathLike) -> Header | None:
    """None: refused. What the parser says about it is not shown."""
    llama_cpp.llama_log_set(_silence, None)
    try:
        handle = _init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    finally:
        llama_cpp.llama_log_set(llama_log, None)  # as moeoff.llamacpp has it
    if not handle:
        return None
    try:
        values = {_key(handle, i): _value(handle, i) for i in range(_n_kv(handle))}
        begin = _data_offset(handle)
        tensors = {
            _tensor_name(handle, i): (
                _tensor_type(handle, i),
                tuple(_tensor_ne(handle, i)[:4]),
                begin + _tensor_offset(handle, i),
                _tensor_size(handle, i),
            )
            for i in range(_n_tensors(handle))
        }
        return Header(values, tensors)
    finally:
        _free(handle)


def _value(handle: int, i: int) -> tuple:
    kind = _kv_type(handle, i)
    if kind == _ARRAY:
        return kind, _arr_type(handle, i), _arr_n(handle, i)
    if kind == _STRING:
        return kind, _val_str(handle, i)
    return kind, ctypes.string_at(_val_data(handle, i), _SIZES[kind])


# --- tests ---

FORMATS = "BbHhIif?xxQqd"  # by GGUF type; strings and arrays have none


def test_copy_is_exact(tmp_path):
    with ModelFile(DEMO) as model:
        with ModelWriter(
            tmp_path / "copy.gguf", model.metadata, list(model.tensors.values()), model.alignment
        ) as writer:
            for name in model.tensors:
                writer.write(model.data(name))
        theirs = {tensor.name: tensor for tensor in GGUFReader(DEMO).tensors}
        assert list(theirs) == list(model.tensors)
        for name, tensor in model.tensors.items():
            assert (
                tensor.shape == tuple(reversed(theirs[name].shape))
                and tensor.type == theirs[name].tensor_type
            )
    assert (tmp_path / "copy.gguf").read_bytes() == DEMO.read_bytes()


def test_cut_while_it_is_open(tmp_path, monkeypatch):
    """An error and no signal; also where that happens between the file's size and its
    header.
    """
    path = tmp_path / "cut.gguf"
    path.write_bytes(DEMO.read_bytes())
    with ModelFile(path) as file:
        name = list(file.tensors)[-1]
        os.truncate(path, file.data_start)
        for read in (file.data, file.rows):
            with pytest.raises(ModelError, match=f"truncated at byte .* inside {re.escape(name)}"):
                read(name, 0, 1)
        os.truncate(path, 100)
        with pytest.raises(ModelError, match="truncated at byte .* inside the header"):
            file.header()
    path.write_bytes(DEMO.read_bytes())
    of = FileState.of
    monkeypatch.setattr(FileState, "of", lambda status: (os.truncate(path, 1000), of(status))[1])
    with pytest.raises(ModelError, match="truncated at byte .* inside the header"):
        ModelFile(path)


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    with ModelFile(DEMO) as file:
        name = "blk.3.ffn_down_exps.weight"
        whole = file.data(name)
        assert whole.nbytes == file.tensors[name].n_bytes
        for start, stop in ((0, 0), (3, 70), (len(whole) - 2, len(whole) + 5), (9, 4)):
            assert np.array_equal(file.data(name, start, stop), whole[start:stop])
            assert np.array_equal(file.rows(name, start, stop), file.rows(name)[start:stop])


def test_cut_short_is_an_error(tmp_path):
    whole = DEMO.read_bytes()
    for n in [0, 3, 24, 30, 1000, 60_000, 200_000, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:n])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            ModelFile(tmp_path / "cut.gguf")
    with pytest.raises(ModelError, match="absent"):
        ModelFile(tmp_path / "absent.gguf")


def test_more_than_four_dimensions_are_refused(tmp_path):
    tensors = [Tensor("a", (2, 1, 1, 1, 4), T.F32)]
    with ModelWriter(tmp_path / "x.gguf", {"general.architecture": "none"}, tensors) as writer:
        writer.write(np.zeros(32, np.uint8))
    with pytest.raises(ModelError, match="'a' has 5 dimensions, expected at most 4"):
        ModelFile(tmp_path / "x.gguf")


def test_writer_leaves_nothing_on_errors(tmp_path):
    tensors = [Tensor("a", (2, 8), T.F32), Tensor("b", (8,), T.F32)]
    metadata = {"general.architecture": "none"}
    with (
        pytest.raises(ModelError, match="2 tensors"),
        ModelWriter(tmp_path / "x.gguf", metadata, tensors) as writer,
    ):
        writer.write(np.zeros(40, np.uint8))
    with pytest.raises(KeyboardInterrupt), ModelWriter(tmp_path / "x.gguf", metadata, tensors):
        raise KeyboardInterrupt
    with (
        pytest.raises(ModelError, match="24 more"),
        ModelWriter(tmp_path / "x.gguf", metadata, tensors) as writer,
    ):
        writer.write(np.zeros(40, np.uint8))
        writer.write(np.zeros(40, np.uint8))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.gguf").write_bytes(b"precious")
    with (
        pytest.raises(WriteError, match="exists"),
        ModelWriter(tmp_path / "x.gguf", metadata, tensors),
    ):
        pass
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]


def as_llama_cpp_has_it(path) -> Header:
    """Return our reader's header in llama.cpp's form: strings end at their first zero,
    as in C, and tensors with equal names up to there are one.
    """
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
            tensors[name.encode("utf-8", "surrogateescape").split(b"\0")[0]] = (
                tensor.type,
                shape,
                file.offset(name),
                tensor.n_bytes,
            )
        return Header(values, tensors)


@pytest.fixture
def path(tmp_path):
    """A file with a value of every type, arrays of them, and tensors of several types
    and shapes.
    """
    metadata = {"general.architecture": "qwen3moe", "general.alignment": 64}
    for kind, form in enumerate(FORMATS):
        if form != "x":
            metadata[f"scalar.{kind}"] = struct.pack("<I" + form, kind, 1)
            metadata[f"array.{kind}"] = struct.pack("<IIQ5" + form, 9, kind, 5, 0, 1, 2, 3, 4)
    metadata["strings"] = ["one", "", "three"]
    shapes = [(3,), (4, 32), (2, 3, 64), (2, 2, 2, 256)]
    tensors = [
        Tensor(f"tensor.{name}", shape, type_from_name(name))
        for name, shape in zip(("F32", "Q8_0", "Q4_0", "Q4_K"), shapes)
    ]
    with ModelWriter(tmp_path / "model.gguf", metadata, tensors, alignment=64) as writer:
        for tensor in tensors:
            writer.write(np.zeros(tensor.n_bytes, np.uint8))
    return tmp_path / "model.gguf"


def test_all_types_are_read(path):
    assert as_llama_cpp_has_it(path) == read_header(path)


def test_damaged_headers(path, tmp_path):
    """Files with something wrong in them: the same are refused, and of the others the
    same is read.
    """
    good, rng, mutant, seen = path.read_bytes(), random.Random(7), tmp_path / "mutant.gguf", [0, 0]
    with ModelFile(path) as file:
        size = file.data_start
    for number in range(1500):
        data = mutate(good[:size], rng) + good[size:]
        mutant.write_bytes(data)
        theirs = read_header(mutant)
        if theirs and any(
            offset + n_bytes > len(data) for _, _, offset, n_bytes in theirs.tensors.values()
        ):
            theirs = None  # the parser does not look whether the tensors are there
        try:
            ours = as_llama_cpp_has_it(mutant)
        except ModelError as error:
            assert theirs is None, f"mutant {number}: llama.cpp reads it: {error}"
            assert "\n" not in str(error) and str(mutant) in str(error)
        else:
            assert ours == theirs, f"mutant {number}"
        seen[theirs is not None] += 1
    assert min(seen) > 150, seen


@pytest.mark.parametrize("architecture", [b"qwen\xff", "qwen3\u00e9".encode()])
def test_a_copy_keeps_bytes_that_are_no_text(architecture, tmp_path):
    raw = struct.pack("<IQ", 8, len(architecture)) + architecture
    key, name = (
        (b"a\xfe").decode("utf-8", "surrogateescape"),
        (b"t\xfe").decode("utf-8", "surrogateescape"),
    )
    for source, out in ((None, "a.gguf"), ("a.gguf", "b.gguf")):
        if source:
            with ModelFile(tmp_path / source) as file:
                metadata, tensors = file.metadata, list(file.tensors.values())
        else:
            metadata, tensors = {"general.architecture": raw, key: 1}, [Tensor(name, (2, 4), 0)]
        with ModelWriter(tmp_path / out, metadata, tensors) as writer:
            writer.write(np.zeros(32, np.uint8))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert as_llama_cpp_has_it(tmp_path / "b.gguf") == read_header(tmp_path / "b.gguf")


# --- names: of tensors, of a split model's files, of a sidecar's slices; and numbers,
# as gguf-py has them ---


NAMES = {
    "blk.0.ffn_up_exps.weight": TensorRole(0, False, 1),
    "blk.11.ffn_gate_exps.weight": TensorRole(11, False, 2),
    "blk.3.ffn_gate_up_exps.weight": TensorRole(3, False, 0),
    "blk.407.ffn_down_exps.weight": TensorRole(407, False, 3),
    "blk.2.ffn_down_chexps.weight": TensorRole(2, True, 3),
}
OTHERS = [
    "blk.0.ffn_up.weight",
    "blk.0.ffn_up_shexp.weight",
    "blk.0.ffn_norm_exps.weight",  # arctic's norm before its experts
    "blk.0.ffn_up_exps.bias",
    "blk.0.ffn_up_exps.weight.1",
    "blk.0.ffn_up_exps.scale",
    "blk.x.ffn_up_exps.weight",
    "output.weight",
]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_python_and_native_agree(name):
    """Both sides find the same routed experts, with the same layer and matrix."""
    buffer, context, info = ExpertBuffer(), Context(), native.TensorInfo()
    with contextlib.closing(buffer), contextlib.closing(context):
        context.tensor(F32, 32, 4, 2, name=name)
        with buffer.loading():
            try:
                context.allocate(native.buffer_type())
            except AssertionError:
                assert name not in NAMES
        assert native.n_tensors(buffer.handle) == (name in NAMES)
        if name in NAMES:
            native.tensor(buffer.handle, 0, info)
            assert (info.name.decode(), info.layer, info.matrix) == (
                name,
                NAMES[name].layer,
                NAMES[name].matrix,
            )
    assert is_expert(name) == (name in NAMES)
    if name in NAMES:
        assert (
            parse_tensor_name(name) == NAMES[name]
            and parse_tensor_name(name).matrix_name == MATRICES[NAMES[name].matrix]
        )
    else:
        with pytest.raises(ModelError, match=f"^{name}: expected a name such as"):
            parse_tensor_name(name)


def test_names_and_numbers_are_gguf_pys():
    """Those that the reader has of its own, since importing gguf-py takes longer than
    to read a header.
    """
    assert (
        gguf.GGUF_MAGIC == int.from_bytes(reader.MAGIC, "little")
        and gguf.GGUF_VERSION in reader.VERSIONS
    )
    assert reader.DEFAULT_ALIGNMENT == gguf.GGUF_DEFAULT_ALIGNMENT
    assert {reader.UINT32: "UINT32", reader.STRING: "STRING", reader.ARRAY: "ARRAY"}.items() <= {
        kind.value: kind.name for kind in gguf.GGUFValueType
    }.items()
    assert set(reader.FORMATS) | {reader.STRING, reader.ARRAY} == {
        kind.value for kind in gguf.GGUFValueType
    }
    for code, form in reader.FORMATS.items():
        assert gguf.GGUFValueType(code).name == np.dtype(form).name.upper()
    for type, (n_values, n_bytes) in gguf.GGML_QUANT_SIZES.items():
        assert type_name(type) == type.name
        # Q8_1, which no file holds, is 40 bytes there and 36 in ggml
        assert not is_computed(type) or row_bytes(type, n_values) == n_bytes
    names = {f"{name.format(bid=7)}.weight" for name in gguf.TENSOR_NAMES.values()}
    experts = {f"blk.7.ffn_{matrix}_exps.weight" for matrix in MATRICES} | {
        f"blk.7.ffn_{matrix}_chexps.weight" for matrix in ("up", "gate", "down")
    }
    assert {name for name in names if is_expert(name)} == experts and {EMBEDDING, OUTPUT} <= names


def test_tensors_of_layers():
    assert parse_block_name("blk.12.attn_q.weight") == (12, "attn_q.weight")
    assert (
        parse_block_name("token_embd.weight") is None
        and parse_block_name("blk.attn_q.weight") is None
    )


def test_split_names():
    name = SplitName.parse("a/b-00002-of-00003/m-00002-of-00012.gguf")
    assert name == SplitName("a/b-00002-of-00003/m", 2, 12)
    assert (
        name.part(1) == "a/b-00002-of-00003/m-00001-of-00012.gguf"
        and len(name.parts) == 12
        and name.parts[1] == "a/b-00002-of-00003/m-00002-of-00012.gguf"
    )
    for other in (
        "m.gguf",
        "m-2-of-3.gguf",
        "m-00001-of-00003",
        "-00001-of-00003.gguf",
        "m-00001-of-00003.gguf.part",
    ):
        assert SplitName.parse(other) is None


def test_what_lies_beside_a_model_is_named_after_it():
    assert model_stem("a/m.gguf") == model_stem("a/m-00001-of-00003.gguf") == "a/m"
    assert model_stem("a/m-00002-of-00003.gguf") == "a/m-00002-of-00003"
    assert sidecar_path("a/m-00001-of-00003.gguf") == "a/m.experts.gguf"


def test_slice_names():
    assert parse_slice_name(slice_name("blk.0.ffn_up_exps.weight", 31, "Q4_0")) == (
        "blk.0.ffn_up_exps.weight",
        31,
        "Q4_0",
    )
    assert parse_slice_name("blk.0.ffn_up_exps.weight") is None


def test_a_tensor_for_each_expert_is_refused():
    """Mixtral's files until April 2024."""
    index = ModelIndex.read(DEMO)
    span = next(iter(index.dense.values()))
    with pytest.raises(ModelError, match="an old file with a tensor for each expert"):
        replace(index, dense=index.dense | {"blk.0.ffn_gate.0.weight": span}).require_experts()


# --- values that one architecture asserts: scripts/faults/damaged.py tries every header
# ---


def test_what_one_architecture_asserts_while_it_computes(writer, folder):
    path = write_model(writer, folder, "deepseek2", "F32")
    index = ModelIndex.read(path)
    preflight.preflight(index)
    for values in (
        {"attention.temperature_scale": 0.1, "attention.temperature_length": 0},
        {"rope.dimension_count": 4096},
    ):
        with pytest.raises(
            ModelError, match=f"{[*values][-1]} is {[*values.values()][-1]}, expected"
        ):
            preflight.preflight(replace(index, hparams=index.hparams | values))
