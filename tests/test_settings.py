"""Settings: found beside the model or in the cache folder, filled in where the user said nothing, refused where they do not belong."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest

import moeoff
from helpers.files import DEMO
from moeoff.companion import beside
from moeoff.companion.settings import Choice, Settings, Tuning, settings_path
from moeoff.engine.config import Config
from moeoff.errors import ModelError
from moeoff.gguf.layout import Layout
from moeoff.machine import machine_name

MIB = 1 << 20


@pytest.fixture
def model(tmp_path) -> str:
    return str(shutil.copy(DEMO, tmp_path / "model.gguf"))


def tuning(memory: int = 2048 * MIB, machine: str | None = None, **values) -> Tuning:
    choices = {name: Choice(value, "measured") for name, value in (values or {"strategy": "lru", "n_lanes": 2}).items()}
    return Tuning(memory, machine or machine_name(), "2026-01-02", choices)


def write(model: str, *tunings: Tuning) -> str:
    for one in tunings:
        Settings.write(settings_path(model), Layout.read(model), one)
    return settings_path(model)


def test_a_running_model_takes_them(model):
    write(model, tuning())
    with moeoff.Llama(model, memory=2048 * MIB, n_ctx=256) as llm:
        assert llm.strategy.name == "lru" and llm.n_lanes == 2
        assert llm.settings_summary == "tuned 2026-01-02 for 2.00 GiB: strategy lru (measured); 2 I/O workers (measured)"


def test_what_the_user_says_comes_first(model):
    write(model, tuning())
    with moeoff.Llama(model, memory=2048 * MIB, n_ctx=256, strategy="score") as llm:
        assert llm.strategy.name == "score" and llm.n_lanes == 2
    with moeoff.Llama(model, memory=2048 * MIB, n_ctx=256, settings=False) as llm:
        assert llm.strategy.name == "auto" and llm.n_lanes == 4 and llm.settings_summary == ""


def test_every_option_that_may_be_chosen_arrives(model):
    chosen = tuning(strategy="score", profile=False, n_lanes=3, n_ubatch=128, type_k="q8_0", type_v="q8_0", max_loss=0.01)
    assert "type_v" not in Config.make(model).tuned(chosen).llama_cpp  # quantized values need flash attention
    config = Config.make(model, flash_attn=True).tuned(chosen)
    assert config.strategy.name == "score" and config.profile is False and config.n_lanes == 3 and config.max_loss == 0.01
    assert config.llama_cpp["n_ubatch"] == 128 and config.llama_cpp["type_k"] == config.llama_cpp["type_v"] == 8  # GGML_TYPE_Q8_0


def test_options_with_a_meaning_for_others_keep_them(model):
    assert "n_ubatch" not in Config.make(model, n_batch=64).open_options
    assert "max_loss" not in Config.make(model, tier="keep").open_options
    assert "profile" in Config.make(model, profile=True).open_options  # the command's default: what is there
    assert "profile" not in Config.make(model, profile=False).open_options


@pytest.mark.parametrize("repeatable", [{"trace": "a.trace"}, {"replay": "a.trace"}, {"deterministic": True}])
def test_a_run_that_repeats_takes_nothing_that_changes_its_text(model, repeatable):
    """It may differ by budget, and by machine."""
    chosen = tuning(n_lanes=3, n_ubatch=128, type_k="q8_0", type_v="q8_0", max_loss=0.01)
    config = Config.make(model, flash_attn=True, **repeatable).tuned(chosen)
    assert config.n_lanes == 3 and config.max_loss is None and set(config.llama_cpp) == {"flash_attn"}


def test_nearest_budget(model):
    path = write(model, tuning(2048 * MIB), tuning(4096 * MIB, strategy="score"), tuning(4096 * MIB, strategy="auto"))
    found = Settings.read(path, Layout.read(model))
    assert [t.memory for t in found.tunings] == [2048 * MIB, 4096 * MIB]  # the later one for the same budget
    assert found.best(2300 * MIB, machine_name())[0].memory == 2048 * MIB
    assert found.best(5000 * MIB, machine_name())[0].choices["strategy"].value == "auto"
    nothing, why = found.best(9000 * MIB, machine_name())
    assert nothing is None and "tuned for 2.00 GiB, 4.00 GiB, not for 8.79 GiB" in why


def test_what_lies_on_gpus_has_settings_of_its_own(model):
    with_gpu = replace(tuning(strategy="score"), devices="-ngl 99 --vram 8.00 GiB")
    found = Settings.read(write(model, tuning(), with_gpu), Layout.read(model))
    assert len(found.tunings) == 2
    assert found.best(2048 * MIB, machine_name())[0] == tuning()
    assert found.best(2048 * MIB, machine_name(), with_gpu.devices)[0] == with_gpu
    assert with_gpu.summary.startswith("tuned 2026-01-02 for 2.00 GiB with -ngl 99 --vram 8.00 GiB: ")
    nothing, why = found.best(2048 * MIB, machine_name(), "-ngl 99")
    assert nothing is None
    assert why == "tuned without a GPU, with -ngl 99 --vram 8.00 GiB, not with -ngl 99: defaults are used; run moeoff tune with the same options"


def test_another_machine(model):
    write(model, tuning(machine="1 cores of something else"))
    with moeoff.Llama(model, memory=2048 * MIB, n_ctx=256) as llm:
        assert llm.strategy.name == "auto" and "another machine" in llm.settings_summary


def test_another_model_is_refused(model, tmp_path):
    path = write(model, tuning())
    fields = json.loads(open(path).read())
    fields["source"] = 1
    with open(path, "w") as file:
        json.dump(fields, file)
    with pytest.raises(ModelError, match="of another model"):
        moeoff.Llama(model, memory=2048 * MIB, n_ctx=256)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"moeoff_settings": 1}', '{"moeoff_settings": 99}', "choices", "memory", "option"])
def test_damage_is_one_sentence(model, damage):
    path = write(model, tuning())
    fields = json.loads(open(path).read())
    if damage == "choices":
        fields["tunings"][0]["choices"] = [1]
    elif damage == "memory":
        fields["tunings"][0]["memory"] = -5
    elif damage == "option":
        fields["tunings"][0]["choices"]["rm"] = {"value": 1, "reason": ""}
    with open(path, "w") as file:
        file.write(json.dumps(fields) if damage in ("choices", "memory", "option") else damage)
    with pytest.raises(ModelError, match="settings|version 99"):
        Settings.read(path, Layout.read(model))


def test_beside_a_model_that_cannot_be_written_to(model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = Layout.read(model)
    monkeypatch.setattr(beside.os, "access", lambda path, mode: False)
    path = beside.writable_path(settings_path(model), layout, "settings", "json")
    assert path.startswith(str(tmp_path / "cache")) and os.path.isdir(os.path.dirname(path))
    Settings.write(path, layout, tuning())
    assert Settings.find(layout).path == path


def test_the_command_says_so(moeoff_command, model):
    write(model, tuning())
    done = moeoff_command("run", "-m", model, "-p", "2 + 3 =", "-n", "2", "--memory", "2G")
    assert done.returncode == 0, done.stderr
    assert "tuned 2026-01-02 for 2.00 GiB: strategy lru" in done.stderr
    done = moeoff_command("run", "-m", model, "-p", "2 + 3 =", "-n", "2", "--memory", "2G", "--no-settings")
    assert "tuned" not in done.stderr
