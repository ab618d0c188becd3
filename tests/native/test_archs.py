"""Every MoE architecture of llama.cpp gives the same logits, bit for bit, from an arena
that cannot hold its experts.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.arch_models import (
    ARCHITECTURES,
    N_EXPERT,
    N_STEPS,
    ROUTED_OUTSIDE,
    WITHOUT_BLOCK,
    WITHOUT_MEMORY,
    Watcher,
    expert_layers,
    open_moeoff,
    open_stock,
    run,
    write_model,
    write_models,
)
from helpers.attention import kernels
from helpers.files import ROOT
from moeoff.budget.compute_probe import attention_seconds
from moeoff.gguf.model_index import ModelIndex

PAGE = ROOT / "docs" / "reference" / "architectures.md"
# Models by architecture, as llama.cpp's converters name examples.
NAMES = {
    "afmoe": "Trinity",
    "arctic": "Snowflake Arctic",
    "bailingmoe": "Ling-lite",
    "bailingmoe2": "Ling-mini-2.0, sarvam-30b",
    "bailingmoe3": "Ling-3.0-tiny, Ling-3.0-flash",
    "cohere2moe": "North-Mini-Code-1.0",
    "dbrx": "DBRX",
    "deepseek": "DeepSeek-MoE-16B",
    "deepseek2": "DeepSeek-V2-Lite, DeepSeek-V3, DeepSeek-R1, GLM-4.7-Flash",
    "deepseek32": "DeepSeek-V3.2-Exp",
    "deepseek4": "DeepSeek-V4-Flash",
    "dots1": "dots.llm1",
    "ernie4_5-moe": "ERNIE-4.5-21B-A3B",
    "exaone-moe": "K-EXAONE-236B-A23B",
    "gemma4": "gemma-4-26B-A4B",
    "glm-dsa": "GLM-5.2",
    "glm4moe": "GLM-4.5-Air, GLM-4.6, Solar-Open-100B",
    "glm5-next": "GLM-5.3-Flash",
    "gpt-oss": "gpt-oss-20b, gpt-oss-120b",
    "granitemoe": "Granite-3.1-3B-A800M",
    "grok": "Grok-1",
    "grovemoe": "GroveMoE",
    "hunyuan-moe": "Hunyuan-A13B",
    "hy_v3": "Hy3",
    "hy_v4": "Hy4-preview",
    "kimi-k3": "Kimi-K3",
    "kimi-linear": "Kimi-Linear-48B-A3B",
    "laguna": "Laguna-XS.2, Laguna-S-2.1",
    "lfm2moe": "LFM2-8B-A1B",
    "llada-moe": "LLaDA-MoE-7B-A1B",
    "llama": "Mixtral 8x7B, Mixtral 8x22B",
    "llama4": "Llama-4-Scout, Llama-4-Maverick",
    "maple": "Maple-preview",
    "mellum": "Mellum2-12B-A2.5B",
    "mimo2": "MiMo-V2.5",
    "minimax-01": "MiniMax-Text-01, MiniMax-M1",
    "minimax-m2": "MiniMax-M2",
    "minimax-m3": "MiniMax-M3",
    "olmoe": "OLMoE-1B-7B",
    "phimoe": "Phi-3.5-MoE",
    "qwen2moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen35moe": "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
    "qwen3moe": "Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B",
    "qwen3next": "Qwen3-Next-80B-A3B",
    "qwen3vlmoe": "Qwen3-VL-30B-A3B",
    "qwen4exp": "Qwen3.8-Flash-Next",
    "rnd1": "RND1-Base",
    "smallthinker": "SmallThinker-4B-A0.6B",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("F32", marks=pytest.mark.slow),
        pytest.param("Q8_0", marks=pytest.mark.slow),
        "4-bit",
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_stock(architecture, kind, writer, folder):
    path = write_model(writer, folder, architecture, kind)
    with kernels(False), open_stock(path) as stock:  # attention by ggml, too
        expected = run(stock)
    assert np.isfinite(expected.view(np.float32)).all()
    assert len(np.unique(expected, axis=0)) > N_STEPS  # the model does react to its input
    for floor in (False, True):
        # the gate node with all its sources, and with those it needs
        told = {"gate_input": True, "trace": str(path.with_suffix(".trace"))} if floor else {}
        with open_moeoff(path, floor=floor, **told) as model:
            np.testing.assert_array_equal(run(model, gives_back=not floor), expected)
            buffer = model.engine.buffer
            stats, n_gates = buffer.stats(), buffer.priorities.shape[0]
        assert stats.arena_peak <= stats.cache_bytes
        if architecture in WITHOUT_BLOCK:
            assert (stats.reads, stats.gate_events) == (0, 0)
            continue
        n_graphs = (1 if architecture in WITHOUT_MEMORY else 2) + N_STEPS
        assert stats.gate_events == n_gates * n_graphs
        # some of these random routers use so few experts that an arena of two holds
        # most of what they need
        if floor:
            assert stats.evictions > n_graphs // 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if name not in WITHOUT_BLOCK]
)
def test_a_large_batch(architecture, writer, folder):
    """A large batch's experts are computed 512 tokens at a time, each read once, with
    the bits of all at once.
    """
    path, n = write_model(writer, folder, architecture, "4-bit"), 1100
    large = {"n_ctx": 1280, "n_batch": 1280, "n_ubatch": 1280}
    with kernels(False), open_stock(path, **large) as stock:
        expected = run(stock, n, 1)
    with open_moeoff(path, **large) as model:
        np.testing.assert_array_equal(run(model, n, 0), expected[:n])
        stats = model.engine.buffer.stats()
    if len(expert_layers(path)) > 1:  # else the arena does not hold a layer
        assert stats.reads <= sum(info.ne[2] for info in model.engine.buffer.tensors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_is_timed(architecture, writer, folder):
    """Whatever heads, windows, sinks and caches a graph has, from its header alone."""
    seconds = attention_seconds(
        ModelIndex.read(write_model(writer, folder, architecture, "F32")),
        300,
        {"flash_attn": True},
        2,
        0.0,
    )
    # which has no flash attention
    assert seconds is None if architecture == "grok" else seconds > 0


@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if name not in WITHOUT_BLOCK]
)
def test_gate_events(architecture, writer, folder):
    """Events come in the order of the graph, with the ids that its matrix ops read and
    the operand of the router.
    """
    path = write_model(writer, folder, architecture, "F32")
    events = []
    with open_moeoff(path, cls=Watcher, gate_input=True) as model:
        model.set_gate_callback(events.append)
        run(model, 17, 3)
        model.engine.buffer.drain()
        blocks, tensors = model.blocks, model.engine.buffer.tensors
    gate_of = {info.name.decode(): info.gate for info in tensors}
    layer_of = {info.gate: info.layer for info in tensors}
    assert [event.gate for event in events] == [gate_of[block.tensors[0]] for block in blocks]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    layers = expert_layers(path)
    per_layer = len(layer_of) // len(layers)
    assert [event.layer for event in events] == [
        layer for layer in layers for _ in range(per_layer)
    ] * 4
    for event, block in zip(events, blocks):
        assert {layer_of[gate_of[name]] for name in block.tensors} == {event.layer}
        assert event.ids.shape == event.weights.shape
        np.testing.assert_array_equal(event.ids, block.ids)
        assert np.isfinite(event.weights).all() and event.weights.any()
        n_slices = len(np.unique(event.ids)) * len(block.tensors)
        assert event.n_hit + event.n_miss == n_slices
        if architecture in ROUTED_OUTSIDE:
            assert event.gate_input is None
        else:
            np.testing.assert_array_equal(
                event.gate_input.view(np.uint32), block.router_input.view(np.uint32)
            )


def test_two_gates_per_layer(writer, folder):
    """grovemoe calls the MoE block again in each layer, for its chunk experts."""
    path = write_model(writer, folder, "grovemoe", "F32")
    events = []
    with open_moeoff(path) as model:
        model.set_gate_callback(events.append)
        run(model, 5, 0)
        model.engine.buffer.drain()
        tensors = model.engine.buffer.tensors
        assert model.engine.buffer.priorities.shape == (4, N_EXPERT)
    names = {
        gate: [info.name.decode() for info in tensors if info.gate == gate] for gate in range(4)
    }
    second = [gate for gate in names if all("chexps" in name for name in names[gate])]
    assert len(second) == 2 and all(len(names[gate]) == 3 for gate in names)
    assert [event.layer for event in events] == [0, 0, 1, 1]
    assert [event.gate in second for event in events] == [False, True, False, True]
    assert len({event.gate for event in events}) == 4


def page() -> str:
    remarks = dict.fromkeys(
        WITHOUT_MEMORY, "diffusion: the logits of one step; commands refuse it"
    ) | dict.fromkeys(WITHOUT_BLOCK, "its experts are never read")
    names = sorted({*ARCHITECTURES, "gemma4"})
    assert set(NAMES) <= set(names)
    lines = [f"| `{name}` | {NAMES.get(name, '')} | {remarks.get(name, '')} |" for name in names]
    return f"""# Architectures

Written by `make test-archs`, which runs a small random model of each architecture of llama.cpp that has routed experts. In an expert cache that cannot hold them, all
logits equal those of stock llama.cpp bit for bit: with experts in F32, Q8_0, and Q4_K or Q4_0. `gemma4` has a test of its own. The models are examples of each
architecture. No published file of them has been run.

| `general.architecture` | models | |
|---|---|---|
{chr(10).join(lines)}
"""


@pytest.mark.archs
def test_the_page_lists_them():
    """`make test-archs` writes it anew where a pin has brought others, and fails once."""
    is_current = PAGE.read_text() == page()
    PAGE.write_text(page())
    assert is_current, f"{PAGE} was not what is tested here, and has been written anew"


@pytest.mark.slow
def test_the_list_is_complete(writer, folder):
    """Writes everything: 1.6 GB."""
    write_models(writer, folder)
    names = [
        path.name.removesuffix("-moe.gguf")
        for path in folder.glob("*-moe.gguf")
        if expert_layers(path)
    ]
    assert sorted(names) == sorted(ARCHITECTURES)
    dense = [path.name for path in folder.glob("*-dense.gguf") if expert_layers(path)]
    assert dense == []
