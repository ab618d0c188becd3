"""llama.cpp's plan before a model is loaded agrees with the loaded model, for all
options and architectures.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

import moeoff
from helpers.arch_models import write_model
from helpers.logits import Stock
from moeoff.budget.dry_load import (
    context_sizes,
    dry_load,
    dry_load_whole,
    memory_sizes,
    planned_model,
)
from moeoff.budget.plan import MemoryPlan
from moeoff.engine.opening import plan
from moeoff.errors import BudgetError, ModelError, OptionError
from moeoff.gguf.model_index import ModelIndex
from moeoff.options import Config
from moeoff.system.memory import MIB

# two families of weights need two work areas
SLACK = 1 << 20


def compare(path: str, **options) -> tuple[MemoryPlan, MemoryPlan]:
    """Planned, and taken; the two are close."""
    config = Config.make(
        path, expert_memory="1G", warm=False, profile=False, experts=False, **options
    )
    planned = dry_load(ModelIndex.read(path), config.n_ctx, config.keywords)
    with moeoff.Llama(config) as llm:
        measured = memory_sizes(llm)
    assert planned.state == measured.state and planned.outputs == measured.outputs
    assert abs(planned.weights - measured.weights) < 64 << 10  # alignment
    assert abs(planned.compute - measured.compute) < SLACK
    model_index, n_ubatch = (
        ModelIndex.read(path),
        min(config.n_ctx, *(options.get(name, 512) for name in ("n_batch", "n_ubatch"))),
    )
    # ggml's, of the rows of each expert; the expert buffer's is shorter
    table = 8 * model_index.n_expert * n_ubatch * model_index.n_expert_used
    assert measured.work - SLACK < planned.work < measured.work + table + SLACK
    return planned, measured


def test_a_draft_model_with_experts_has_them_in_memory(grown):
    """And so its blocks are computed at once, however many tokens a batch has."""
    keywords = {"flash_attn": False, "n_batch": 1024, "n_ubatch": 1024}
    planned = dry_load_whole(ModelIndex.read(grown), 1024, keywords)
    with contextlib.closing(Stock(grown, n_ctx=1024, **keywords)) as llm:
        assert abs(planned.compute - context_sizes(llm.ctx).compute) < SLACK


OPTIONS = [
    {"n_ctx": 100},
    {"n_ctx": 1000, "flash_attn": True},
    {"n_ctx": 4096, "flash_attn": True, "n_ubatch": 64},
    {"n_ctx": 4096, "n_batch": 2048, "n_ubatch": 1024},
    {"n_ctx": 1024, "flash_attn": True, "type_k": "q8_0", "type_v": "q4_0"},
    {"n_ctx": 1024, "type_k": "q4_0"},
    {"n_ctx": 1024, "flash_attn": True, "type_k": "f32", "type_v": "bf16"},
    {"n_ctx": 512, "logits_all": True, "n_batch": 64},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(demo, options):
    compare(demo, **options)


def test_types_and_batches_change_what_is_planned(demo):
    model_index = ModelIndex.read(demo)
    plain = dry_load(model_index, 4096, {"flash_attn": True})
    # Q8_0, Q4_0
    small = dry_load(model_index, 4096, {"flash_attn": True, "type_k": 8, "type_v": 2})
    assert small.state == plain.state // 2 * 34 // 64 + plain.state // 2 * 18 // 64
    assert (
        dry_load(model_index, 4096, {"flash_attn": True, "n_ubatch": 64}).compute
        < plain.compute / 2
    )
    assert dry_load(model_index, 4096, {"flash_attn": False}).compute > plain.compute


# sliding windows, recurrent layers of several kinds, latent attention, indexers, none
# at all
ARCHITECTURES = [
    "gpt-oss",
    "mimo2",
    "qwen3next",
    "kimi-linear",
    "lfm2moe",
    "minimax-01",
    "deepseek2",
    "glm-dsa",
    "deepseek4",
    "llada-moe",
    "llama4",
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture, writer, folder):
    path = str(write_model(writer, folder, architecture, "4-bit"))
    for more in (
        {},
        {"swa_full": False, "n_ubatch": 32},
        {"flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
    ):
        try:
            compare(path, **{"n_ctx": 512, "n_batch": 64, "n_ubatch": 64, **more})
        except moeoff.ModelError as error:
            # rows that are no whole blocks, or no flash attention
            assert "type_k" in more and "cannot load it" in str(error)


def test_what_is_longer_than_llama_cpp_should_plan(demo):
    model_index = ModelIndex.read(demo)
    exact, told = dry_load(model_index, 1 << 18, {}), dry_load(model_index, 1 << 20, {})
    assert (
        told.state == 4 * exact.state
        and told.weights == exact.weights
        and told.outputs == exact.outputs
    )


def test_an_error_with_a_planned_model_is_not_llama_cpps(demo):
    with pytest.raises(OptionError, match="mine"), planned_model(ModelIndex.read(demo), 32, {}):
        raise OptionError("mine")
    with (
        pytest.raises(ModelError, match="llama.cpp cannot load it"),
        planned_model(ModelIndex.read(demo), 32, {}) as llm,
    ):
        llm.new_context(n_ctx=1 << 31)


@pytest.mark.parametrize("architecture, n_sequences", [("qwen3next", 64), ("gpt-oss", 1)])
def test_the_way_out_of_a_refusal_is_open(architecture, n_sequences, writer, folder, monkeypatch):
    """Also where a part of the state is as large however short the context is."""
    # a process that does not grow between one try and the next, as this one does
    monkeypatch.setattr("moeoff.budget.dry_load.rss", lambda: 0)
    path = str(write_model(writer, folder, architecture, "4-bit"))
    options = {
        "expert_memory": "1G",
        "warm": False,
        "profile": False,
        "experts": False,
        "n_ubatch": 8,
        "flash_attn": True,
    }
    long, short = (
        plan(Config.make(path, n_ctx=n, **options), n_sequences=n_sequences).memory.floor
        for n in (1 << 15, 1 << 13)
    )
    del options["expert_memory"]
    with pytest.raises(BudgetError) as caught:
        plan(
            Config.make(path, n_ctx=1 << 15, memory=(long + short) // 2, **options),
            n_sequences=n_sequences,
        )
    ways_out = caught.value.hint
    plan(
        Config.make(path, n_ctx=1 << 15, memory=ways_out["memory"], **options),
        n_sequences=n_sequences,
    )
    assert 1 << 13 <= ways_out["n_ctx"] < 1 << 15
    plan(
        Config.make(path, n_ctx=ways_out["n_ctx"], memory=(long + short) // 2, **options),
        n_sequences=n_sequences,
    )
    with pytest.raises(BudgetError) as caught:
        plan(Config.make(path, n_ctx=1 << 15, memory=8 * MIB, **options), n_sequences=n_sequences)
    assert "n_ctx" not in caught.value.hint


def test_smaller_types_fit_where_larger_do_not(demo, moeoff_command):
    """The budget between what a context takes in F16 and in Q4_0."""
    model_index = ModelIndex.read(demo)
    sizes = (
        dry_load(model_index, 1 << 17, {"flash_attn": True, **types})
        for types in ({}, {"type_k": 2, "type_v": 2})
    )
    # as the command is, and not as this process that has run many tests
    large, small = (replace(size, process=80 * MIB) for size in sizes)
    between = (large.floor + small.floor) // 2
    assert large.floor - small.floor > 256 * MIB
    command = [
        "run",
        "-m",
        demo,
        "-p",
        "x",
        "-n",
        "1",
        "-c",
        str(1 << 17),
        "--memory",
        str(between),
    ]
    refused = moeoff_command(*command)
    assert refused.returncode == 1 and "too small" in refused.stderr
    done = moeoff_command(*command, "-ctk", "q4_0", "-ctv", "q4_0")
    assert done.returncode == 0, done.stderr
