"""Names: of tensors, of a split model's files, of a companion's slices."""

import contextlib

import pytest

from helpers.ggml_api import F32, Context
from moeoff import ModelError, native
from moeoff.companion.file import companion_path, parse_slice_name, slice_name
from moeoff.engine.expert_buffer import ExpertBuffer
from moeoff.gguf.split_name import SplitName, model_stem
from moeoff.gguf.tensor_name import MATRICES, TensorRole, is_expert, parse_block_name, parse_tensor_name

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
    """What one takes for routed experts the other does, with the same layer and matrix."""
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
            assert (info.name.decode(), info.layer, info.matrix) == (name, NAMES[name].layer, NAMES[name].matrix)
    assert is_expert(name) == (name in NAMES)
    if name in NAMES:
        assert parse_tensor_name(name) == NAMES[name] and parse_tensor_name(name).matrix_name == MATRICES[NAMES[name].matrix]
    else:
        with pytest.raises(ModelError, match=f"^{name}: not a name that"):
            parse_tensor_name(name)


def test_matrices_are_the_native_ones():
    assert MATRICES == native.MATRICES


def test_tensors_of_layers():
    assert parse_block_name("blk.12.attn_q.weight") == (12, "attn_q.weight")
    assert parse_block_name("token_embd.weight") is None and parse_block_name("blk.attn_q.weight") is None


def test_split_names():
    name = SplitName.parse("a/b-00002-of-00003/m-00002-of-00012.gguf")
    assert name == SplitName("a/b-00002-of-00003/m", 2, 12)
    assert name.part(1) == "a/b-00002-of-00003/m-00001-of-00012.gguf" and len(name.parts) == 12 and name.parts[1] == "a/b-00002-of-00003/m-00002-of-00012.gguf"
    for other in ("m.gguf", "m-2-of-3.gguf", "m-00001-of-00003", "-00001-of-00003.gguf", "m-00001-of-00003.gguf.part"):
        assert SplitName.parse(other) is None


def test_what_lies_beside_a_model_is_named_after_it():
    assert model_stem("a/m.gguf") == model_stem("a/m-00001-of-00003.gguf") == "a/m"
    assert model_stem("a/m-00002-of-00003.gguf") == "a/m-00002-of-00003"
    assert companion_path("a/m-00001-of-00003.gguf") == "a/m.experts.gguf"


def test_slice_names():
    assert parse_slice_name(slice_name("blk.0.ffn_up_exps.weight", 31, "Q4_0")) == ("blk.0.ffn_up_exps.weight", 31, "Q4_0")
    assert parse_slice_name("blk.0.ffn_up_exps.weight") is None
