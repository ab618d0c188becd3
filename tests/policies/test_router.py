"""The routers choose what the models' gates choose, for every gating function of
llama.cpp.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from helpers.arch_models import (
    ARCHITECTURES,
    N_EXPERT,
    OPTIONS,
    ROUTED_OUTSIDE,
    WITHOUT_BLOCK,
    decode,
    open_moeoff,
    run,
    tokens,
    write_model,
)
from helpers.logits import Stock
from helpers.models import write_one_expert_model
from moeoff import Llama
from moeoff.experts.convert import convert
from moeoff.experts.verify import verify
from moeoff.gguf.file import ModelFile
from moeoff.gguf.model_index import ModelIndex
from moeoff.routing.router import SIGMOID, SOFTMAX, SOFTMAX_WEIGHT, SQRT_SOFTPLUS, Router, Rows
from shape_model import SHAPES, shape_model


def layers_of(model: Llama) -> list[int]:
    layers = {t.gate: t.layer for t in model.engine.buffer.tensors}
    return [layers[g] for g in sorted(layers)]


def test_fresh_gate_control(demo):
    """In decode, all gates of the demo model: 100 %."""
    events = []
    with Llama(demo, gate_input=True, n_ctx=256) as model:
        router = Router.read(ModelIndex.read(demo), layers_of(model), model.engine.buffer.gating)
        model.set_gate_callback(events.append)
        model.eval(model.tokenize(b"Natalia sold 48 clips in April and half as many in May."))
        for token in model.tokenize(b"How many clips did she sell altogether?", add_bos=False):
            model.eval([token])
        model.engine.buffer.drain()
    assert router.gating == SOFTMAX and len(events) > 12 * 10
    for event in events:
        np.testing.assert_array_equal(
            np.sort(router.choose(event.gate, event.gate_input)), np.sort(event.ids)
        )
        probs = router.probs(event.gate, event.gate_input)
        np.testing.assert_allclose(
            np.take_along_axis(probs, event.ids, axis=1), event.weights, rtol=1e-4
        )


def test_gemmas_routers_norm_the_stream_themselves(tmp_path):
    """The routers' inputs are reported, and between two of them stand their own scales,
    not the norms of the experts.
    """
    path, events = tmp_path / "model.gguf", []
    shape_model(SHAPES["gemma-4-26b-a4b"].cut(layers=6, shrink=8), path)
    with Llama(str(path), gate_input=True, n_ctx=256, verbose=False) as model:
        router = Router.read(ModelIndex.read(path), layers_of(model), model.engine.buffer.gating)
        model.set_gate_callback(events.append)
        model.eval(model.tokenize(b"Natalia sold 48 clips in April."))
        model.engine.buffer.drain()
    assert {event.gate for event in events} == set(range(6))
    for event in events:
        np.testing.assert_array_equal(
            np.sort(router.choose(event.gate, event.gate_input)), np.sort(event.ids)
        )
    with ModelFile(path) as file:
        scales = [file.rows(f"blk.{layer}.ffn_gate_inp.scale", 0, 1)[0] for layer in (2, 3)]
    weight, bias = router.ahead(2, 3, True)
    assert bias is None
    np.testing.assert_allclose(weight, router.weights[3] * scales[1] / scales[0], rtol=1e-5)


@pytest.mark.parametrize("lazy", [False, True])
def test_one_expert(tmp_path, lazy):
    """Llama.cpp's bits, from the model and from a sidecar, and a router of one row."""
    path, options = tmp_path / "model.gguf", OPTIONS
    write_one_expert_model(path)
    with ModelFile(path) as file:
        assert (
            len(file.tensors["blk.0.ffn_up_exps.weight"].shape) == 2
            and len(file.tensors["blk.0.ffn_gate_inp.weight"].shape) == 1
        )
    convert(path, tiers="Q8_0")
    assert verify(tmp_path / "model.experts.gguf").n_slices == 9
    with contextlib.closing(Stock(str(path), **options)) as stock:
        expected = run(stock)
    events = []
    for tier in ("original", "Q8_0"):
        with Llama(str(path), expert_memory="1G", tier=tier, gate_input=True, **options) as model:
            model.set_gate_callback(events.append)
            np.testing.assert_array_equal(run(model), expected)
            router = Router.read(
                ModelIndex.read(path), layers_of(model), model.engine.buffer.gating, lazy=lazy
            )
            model.engine.buffer.drain()
    assert router.weights[0].shape == (1, 256) and router.n_experts == 1 and events
    for event in events:
        np.testing.assert_array_equal(router.choose(event.gate, event.gate_input), event.ids)


def test_a_lazy_router_keeps_no_weights(demo):
    model_index = ModelIndex.read(demo)
    eager, lazy = (
        Router.read(model_index, [3, 4, 5], SOFTMAX, 32, lazy=lazy) for lazy in (False, True)
    )
    assert (
        lazy.n_gates == 3
        and lazy.n_experts == 32
        and lazy.knows(2)
        and lazy.weights[1] is not lazy.weights[1]
    )
    for gate in range(3):
        np.testing.assert_array_equal(lazy.weights[gate], eager.weights[gate])
    for source, target in ((0, 1), (0, 2)):
        for scores, expected in zip(
            lazy.ahead(source, target, True), eager.ahead(source, target, True)
        ):
            assert (scores is None and expected is None) or np.array_equal(scores, expected)


@pytest.mark.parametrize("n_cols", [64, 2048, 33])
def test_products_of_rows(n_cols):
    """Within what Q8_0 rounds; rows that are no whole blocks exactly. Any number of
    vectors, strided ones too.
    """
    rng = np.random.default_rng(n_cols)
    weight, x = (
        rng.standard_normal((24, n_cols), np.float32),
        rng.standard_normal((10, n_cols), np.float32)[::2],
    )
    rows = Rows(weight)
    assert (rows.nbytes < 0.3 * weight.nbytes) == (n_cols != 33)
    exact = x @ weight.T
    np.testing.assert_allclose(
        rows.product(x), exact, atol=1e-4 if n_cols == 33 else 0.03 * exact.std()
    )
    assert rows.product(x[:0]).shape == (0, 24)


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a not in WITHOUT_BLOCK | ROUTED_OUTSIDE]
)
def test_fresh_gate_control_of_every_architecture(architecture, writer, folder):
    """ids are the model's, and probabilities of the chosen in the proportions of the
    model's weights.
    """
    path = write_model(writer, folder, architecture, "F32")
    events, text = [], tokens(24)
    with open_moeoff(path, gate_input=True, flash_attn=False) as model:
        router = Router.read(ModelIndex.read(path), layers_of(model), model.engine.buffer.gating)
        model.set_gate_callback(events.append)
        decode(model, text, 0)
        model.engine.buffer.drain()
    assert {event.gate for event in events} == set(range(router.n_gates))
    for event in events:
        gate, ids = event.gate, event.ids
        assert ids.shape[1] == router.n_used[gate]
        if router.tables[gate] is not None:
            assert not router.knows(gate)
            np.testing.assert_array_equal(ids, router.tables[gate][text[-len(ids) :]])
        else:
            np.testing.assert_array_equal(
                np.sort(router.choose(gate, event.gate_input)), np.sort(ids)
            )
        mine = np.take_along_axis(router.probs(gate, event.gate_input), ids, axis=1)
        if architecture == "gpt-oss":  # no sum over the others in it, but the same proportions
            assert router.gating == SOFTMAX_WEIGHT
        np.testing.assert_allclose(
            mine / mine.sum(axis=1, keepdims=True),
            event.weights / event.weights.sum(axis=1, keepdims=True),
            rtol=2e-3,
        )


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in WITHOUT_BLOCK])
def test_logits_of_events(architecture, writer, folder, tmp_path):
    """The gate chooses by them, whether or not the block has computed them itself."""
    path = write_model(writer, folder, architecture, "F32")
    events = []
    with open_moeoff(path, trace=str(tmp_path / "run.trace"), flash_attn=False) as model:
        router = Router.read(ModelIndex.read(path), layers_of(model), model.engine.buffer.gating)
        n_experts = {t.gate: t.ne[2] for t in model.engine.buffer.tensors}
        model.set_gate_callback(events.append)
        decode(model, tokens(24), 0)
        model.engine.buffer.drain()
    assert {event.gate for event in events} == set(range(router.n_gates))
    for event in events:
        gate = event.gate
        if event.logits is None:
            # its chunks are chosen by their experts' logits
            assert architecture == "grovemoe" and n_experts[gate] < N_EXPERT
            continue
        assert event.logits.shape == (len(event.ids), n_experts[gate]) and event.row_step == 1
        np.testing.assert_allclose(event.probs, router.gated(event.logits))
        if router.tables[gate] is None:
            chosen = router.select(gate, event.logits if architecture == "llama4" else event.probs)
            np.testing.assert_array_equal(
                np.sort(chosen[:, : event.ids.shape[1]]), np.sort(event.ids)
            )


def test_gating_functions_differ(writer, folder):
    """The graphs tell them: a new architecture needs no line here."""
    gatings = {}
    for architecture in ("qwen3moe", "glm4moe", "gpt-oss", "deepseek4", "llama4"):
        path = write_model(writer, folder, architecture, "F32")
        with open_moeoff(path) as model:
            gatings[architecture] = model.engine.buffer.gating
        path.unlink()
    assert gatings == {
        "qwen3moe": SOFTMAX,
        "glm4moe": SIGMOID,
        "gpt-oss": SOFTMAX_WEIGHT,
        "deepseek4": SQRT_SOFTPLUS,
        "llama4": SIGMOID,
    }


@pytest.mark.parametrize("gating", [SOFTMAX, SIGMOID, SQRT_SOFTPLUS])
def test_the_selection_bias_is_added_to_probabilities(gating):
    """Where the choice is made before the function, there is none."""
    rng = np.random.default_rng(0)
    weight, bias, x = (
        rng.normal(size=shape).astype(np.float32) for shape in ((6, 4), (6,), (50, 4))
    )
    router = Router([weight], [2], gating=gating, selection_bias=[bias])
    logits = x @ weight.T
    chosen = router.choose(0, x)
    np.testing.assert_array_equal(
        chosen, np.argsort(-(router.gated(logits) + bias), axis=1, kind="stable")[:, :2]
    )
    assert (chosen != np.argsort(-(logits + bias), axis=1, kind="stable")[:, :2]).any()
    early = Router([weight], [2], gating=gating, selection_bias=[bias], by_logits=True)
    np.testing.assert_array_equal(
        early.choose(0, x), np.argsort(-logits, axis=1, kind="stable")[:, :2]
    )


def test_groups_by_brute_force():
    """DeepSeek V3: only the best groups by their two best experts take part, the
    selection bias counts for the choice alone.
    """
    rng = np.random.default_rng(3)
    n_experts, n_groups, n_groups_used, k = 32, 8, 3, 6
    bias = rng.normal(0, 0.1, n_experts).astype(np.float32)
    router = Router(
        [rng.normal(size=(n_experts, 16)).astype(np.float32)],
        [k],
        SIGMOID,
        None,
        [bias],
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )
    x = rng.normal(size=(50, 16)).astype(np.float32)
    probs = router.probs(0, x)
    np.testing.assert_allclose(probs, 1 / (1 + np.exp(-(x @ router.weights[0].T))), rtol=1e-5)
    for row, chosen in zip(probs, router.select(0, probs)):
        biased = [float(p) for p in row + bias]
        size = n_experts // n_groups
        worth = {g: sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_groups)}
        best = sorted(worth, key=worth.get)[-n_groups_used:]
        allowed = [e for e in range(n_experts) if e // size in best]
        assert list(chosen) == sorted(allowed, key=lambda e: -biased[e])[:k]


def test_ahead_with_the_next_norm():
    """A stream that does not change between two layers is routed by the next layer
    exactly as if it had been there.
    """
    rng = np.random.default_rng(4)
    weights = [rng.normal(size=(N_EXPERT, 12)).astype(np.float32) for _ in range(2)]
    norms = [
        (rng.uniform(0.5, 2, 12).astype(np.float32), rng.normal(size=12).astype(np.float32))
        for _ in range(2)
    ]
    router = Router(
        weights, [2, 2], bias=[None, rng.normal(size=N_EXPERT).astype(np.float32)], norms=norms
    )
    stream = rng.normal(size=(7, 12)).astype(np.float32)
    inputs = [stream * w + b for w, b in norms]
    folded, bias = router.ahead(0, 1, True)
    np.testing.assert_allclose(inputs[0] @ folded.T + bias, router.logits(1, inputs[1]), atol=1e-4)
    raw, raw_bias = router.ahead(0, 1, False)
    np.testing.assert_array_equal(raw, weights[1])
    np.testing.assert_array_equal(raw_bias, router.bias[1])


def test_a_norm_of_zeros_gives_finite_weights():
    norms = [(np.array([0, 1e-9, 1], np.float32), None), (np.ones(3, np.float32), None)]
    router = Router([np.ones((4, 3), np.float32)] * 2, [1, 1], norms=norms)
    folded, bias = router.ahead(0, 1, True)
    assert np.isfinite(folded).all() and np.abs(folded).max() <= 16 and bias is None
