"""A computed prompt is only gone on from where it means the same: by the model, and
with the options, that it was computed with.
"""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from helpers.attention import DEMO_IN_F32
from moeoff.engine import prompt
from moeoff.engine.engine import Engine
from moeoff.engine.opening import plan
from moeoff.engine.prompt import state_identity
from moeoff.experts.convert import convert
from moeoff.gguf.model_index import ModelIndex
from moeoff.options import Config, ServerOptions
from moeoff.server.prompts_on_disk import identity
from moeoff.system import machine

OPTIONS = {"n_ctx": 256, "expert_memory": "4M"}
OTHERS = {
    "positions": {"rope_freq_base": 5000},
    "positions' scale": {"rope_freq_scale": 0.5},
    "precision": {"tau": 0.3},
    "tier": {"tier": "Q4_0"},
    "cache": {"type_k": "q8_0"},
    "micro-batch": {"n_ubatch": 64},
} | ({"attention": {"attention": "f32"}} if DEMO_IN_F32 else {})


@pytest.fixture(scope="module")
def model(demo, tmp_path_factory) -> str:
    path = shutil.copy(demo, tmp_path_factory.mktemp("identity") / "model.gguf")
    convert(path, tiers="Q4_0")
    return path


@pytest.fixture(scope="module")
def changed(model, tmp_path_factory) -> str:
    """A copy by the same name, with other weights in one tensor."""
    path = shutil.copy(model, tmp_path_factory.mktemp("changed") / "model.gguf")
    span = next(span for name, span in ModelIndex.read(path).dense.items() if "attn_q" in name)
    data = np.memmap(path, np.uint8, "r+", span.offset, span.nbytes)
    data[:] = data[::-1].copy()
    return path


def test_servers(model, changed):
    """Their context is as long as memory allows, and changes a state only with factors
    for positions that depend on it.
    """

    def of(
        path: str = model, long_factors: bool = False, args: tuple[str, ...] = (), **options
    ) -> bytes:
        server = {name: options.pop(name) for name in ("kv_unified", "parallel") if name in options}
        engine = Engine(plan(Config.make(path, **{"expert_memory": "4M"} | options)))
        if long_factors:
            engine.model_index.dense["rope_factors_long.weight"] = None
        return identity(engine, ServerOptions.make(args=args, **server), [path])

    same = of()
    assert {
        of(memory="1G", expert_memory=None),
        of(n_ctx=512),
        of(strategy="lru"),
        of(parallel=2),
        of(args=("--log-file", "x")),
    } == {same}
    others = [of(changed), of(draft=changed), of(kv_unified=False), of(args=("--control-vector", "x.gguf")), of(long_factors=True, n_ctx=256),
              of(long_factors=True, n_ctx=512), *(of(**other) for other in OTHERS.values())]  # fmt: skip
    assert len({same, *others}) == 1 + len(others)


def test_threads_count_where_they_share_positions(model):
    """ggml's threads add up a token's attention to halves in an order that their number
    decides.
    """

    def of(**options) -> bytes:
        return state_identity(Engine(plan(Config.make(model, **OPTIONS | options))))

    assert of(n_threads=2) != of(n_threads=3)
    for options in ({"flash_attn": False}, {"type_k": "q8_0"}, {"type_v": "q8_0"}):
        assert of(n_threads=2, **options) == of(n_threads=3, **options)


def test_another_build_or_level_is_another_computation(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        (folder / "high").mkdir(parents=True)
        for name in ("libggml-base.so", "libggml-cpu.so", "libllama.so", "high/libggml-cpu.so"):
            (folder / name).write_text(name)
    (folders[1] / "libllama.so").write_text("another")
    (folders[2] / "high/libggml-cpu.so").write_text("another")

    plain, high = (
        [machine.libraries_digest(folder, level) for folder in folders] for level in (None, "high")
    )
    assert plain[0] == plain[2] != plain[1] and len({*plain, *high}) == 5


def test_the_identity_has_the_build(model, monkeypatch):
    def of() -> bytes:
        return state_identity(Engine(plan(Config.make(model, **OPTIONS))))

    before = of()
    monkeypatch.setattr(prompt, "build_identity", lambda: ("another", "AVX2 = 0"))
    assert of() != before


def test_a_model_that_was_written_to(model):
    def of() -> bytes:
        return state_identity(Engine(plan(Config.make(model, **OPTIONS))))

    states, state = {of()}, os.stat(model)
    # the old time does not make it the old file
    for mtime in (state.st_mtime_ns + 1, state.st_mtime_ns):
        os.utime(model, ns=(state.st_atime_ns, mtime))
        states.add(of())
    assert len(states) == 3
