"""Models with published shapes: the table's sizes, and every shape, narrow and short, in the real library."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bench_routing import measure
from helpers.files import PROSE
from moeoff import Llama
from moeoff.errors import ModelError, OptionError, WriteError
from moeoff.gguf.file import ModelFile
from moeoff.gguf.quantize import dequantize, row_bytes, type_from_name
from random_blocks import Pools
from shape_model import find_shape, shape_model
from shape_table import SHAPES, tensors

# of the published files (MXFP4 for gpt-oss, Q4_0 for glm-4.5-air, else Q4_K_M): 10 ** 9 bytes, 10 ** 9 parameters
PUBLISHED = {
    "qwen3-30b-a3b": (18.56, 30.53),
    "gpt-oss-20b": (12.11, 20.9148),
    "gpt-oss-120b": (63.39, 116.83),
    "mixtral-8x7b": (28.45, 46.70),
    "deepseek-v2-lite": (10.36, 15.7065),
    "deepseek-v3": (404.4, 671.03),
    "glm-4.5-air": (60.3, 106.85),
    "olmoe-1b-7b": (4.21, 6.92),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_the_published_ones(name):
    plan = tensors(SHAPES[name])
    gigabytes, parameters = PUBLISHED[name]
    assert sum(math.prod(tensor.shape) for tensor in plan) / 1e9 == pytest.approx(parameters, rel=2e-4)
    assert sum(tensor.n_bytes for tensor in plan) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@pytest.fixture(scope="module", params=list(SHAPES))
def small(request, tmp_path_factory):
    """(shape, path) of every shape, eight times as narrow, with two layers of experts."""
    path = tmp_path_factory.mktemp("shapes") / "model.gguf"
    shape = SHAPES[request.param].cut(layers=SHAPES[request.param].n_dense + 2, shrink=8)
    shape_model(shape, path)
    yield shape, path
    path.unlink()


def test_decodes_with_finite_logits(small):
    shape, path = small
    chosen = []
    with Llama(str(path), expert_memory="1G", n_ctx=64, logits_all=True) as model:
        model.set_gate_callback(lambda event: chosen.append(event.ids.copy()))
        tokens = model.tokenize(PROSE.read_bytes()[:400])[:24]
        model.eval(tokens[:16])
        for token in tokens[16:]:
            model.eval([token])
        model.expert_buffer.drain()
        logits = model.scores[: len(tokens)]
        assert np.isfinite(logits).all()
        assert 1 < logits.std(axis=1).mean() < 20
    assert {ids.shape[1] for ids in chosen} == {shape.n_used}
    used = np.unique(np.concatenate([ids.ravel() for ids in chosen]))
    assert used.max() < shape.n_expert
    assert len(used) > shape.n_expert / 4  # the same experts for all tokens would be a few


def test_every_layer_and_expert_differs(small):
    _, path = small
    seen = set()
    with ModelFile(path) as model:
        for tensor in model.tensors.values():
            data = model.data(tensor.name)
            assert np.isfinite(model.rows(tensor.name, 0, 4)).all()
            if tensor.name.endswith("_exps.weight"):
                experts = [expert.tobytes() for expert in data.reshape(tensor.shape[0], -1)]
                assert len(set(experts)) == tensor.shape[0]
                assert seen.isdisjoint(experts)
                seen.update(experts)


def test_vocabulary_is_the_shapes(tmp_path):
    path = tmp_path / "model.gguf"
    shape_model(replace(SHAPES["deepseek-v2-lite"].cut(layers=2, shrink=8), n_vocab=5000), path)
    with Llama(str(path), expert_memory="1G", n_ctx=32) as model:
        assert model.n_vocab() == 5000
        text = b"The vocabulary is larger than the tokenizer's."
        assert model.detokenize(model.tokenize(text)) == text
        answer = model.create_completion("A sample", max_tokens=24, seed=1)
        assert answer["usage"]["completion_tokens"] == 24  # it never ends by itself
        assert "[unused" not in answer["choices"][0]["text"]


def test_a_seed_decides_every_byte(tmp_path):
    shape = SHAPES["qwen3-30b-a3b"].cut(layers=1, shrink=8)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        shape_model(shape, tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c
    with pytest.raises(WriteError):
        shape_model(shape, tmp_path / "a")


def test_experts_of_another_type(tmp_path):
    path = tmp_path / "model.gguf"
    shape_model(SHAPES["qwen3-30b-a3b"].cut(layers=1, shrink=8, expert_type="iq4_xs"), path)
    with ModelFile(path) as model:
        types = {tensor.name: tensor.type for tensor in model.tensors.values()}
    assert types["blk.0.ffn_down_exps.weight"] == type_from_name("IQ4_XS")
    assert types["blk.0.attn_q.weight"] == type_from_name("Q4_K")
    with pytest.raises(OptionError, match="IQ1_M"):
        shape_model(SHAPES["qwen3-30b-a3b"].cut(layers=1, shrink=8, expert_type="IQ1_M"), tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="blocks of 256"):
        shape_model(SHAPES["deepseek-v2-lite"].cut(layers=2, shrink=8, expert_type="Q3_K"), tmp_path / "other.gguf")


def test_refusals():
    with pytest.raises(OptionError, match="qwen3-30b-a3b"):
        find_shape("qwen")
    for layers in (3, 62):
        with pytest.raises(OptionError, match="4 to 61 layers"):
            SHAPES["deepseek-v3"].cut(layers=layers)
    with pytest.raises(OptionError, match="shrink"):
        SHAPES["deepseek-v3"].cut(shrink=0)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "MXFP4", "Q3_K", "IQ4_XS", "IQ2_XXS", "F16"])
@pytest.mark.parametrize("std", [1.0, 0.03])
def test_blocks_have_mean_and_deviation(name, std):
    type, pools = type_from_name(name), Pools(0, 1 << 18)
    data = np.concatenate([piece.copy() for piece in pools.slices(type, 512 * row_bytes(type, 256), 3, std)])
    values = dequantize(data, type, (3 * 512, 256))
    assert abs(values.mean()) < 0.02 * std
    assert values.std() == pytest.approx(std, rel=0.1)


@pytest.mark.slow
def test_routing_is_lifelike(tmp_path):
    """The demo model, which was trained, has 43 / 73 / 93 % of hits, 29 % of the token's experts before, 75 % recall."""
    path = tmp_path / "model.gguf"
    shape_model(SHAPES["qwen3-30b-a3b"].cut(layers=16, shrink=8), path)
    routing = measure(str(path), str(PROSE), 1024)
    assert 0.35 < routing.lru[0] < 0.65 < routing.lru[1] < routing.lru[2] < 0.97
    assert 0.6 < routing.recall[1:].mean() < 0.85
    assert routing.recall[0] < 0.45
    assert 0.1 < routing.top < 0.6
    assert routing.largest < 100


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_numbers_stay_sane_over_a_long_text(tmp_path, name):
    path, largest = tmp_path / "model.gguf", []
    shape_model(SHAPES[name].cut(layers=SHAPES[name].n_dense + 6, shrink=8), path)
    with Llama(str(path), expert_memory="1T", n_ctx=4096, n_batch=512, gate_input=True) as model:
        model.set_gate_callback(lambda event: largest.append(float(np.abs(event.gate_input).max())))
        tokens = (model.tokenize(PROSE.read_bytes()) * 8)[:4096]
        assert len(tokens) == 4096
        for at in range(0, 4096, 512):
            model.decode_batch(tokens[at : at + 512], at, first_output=at + 504)
            logits = model.batch_logits(8)
            assert np.isfinite(logits).all()
            assert np.abs(logits).max() < 100
        model.expert_buffer.drain()
    assert np.max(largest) < 100  # nan would fail, too
