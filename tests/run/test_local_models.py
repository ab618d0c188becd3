"""Models that other programs have downloaded: found where those keep them, listed, and
run by a part of their name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.files import DEMO
from moeoff.errors import ModelError
from moeoff.gguf.local_models import find, local_models


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home folder without models, and no variables that lead elsewhere."""
    for name in (
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "LLAMA_CACHE",
        "OLLAMA_MODELS",
        "MOEOFF_MODELS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def put(path: Path, content: Path = DEMO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(content, path)
    return path


def put_in_ollama(folder: Path, manifest: str, digest: str) -> None:
    put(folder / "blobs" / digest.replace(":", "-"))
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    path = folder / "manifests" / manifest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": layers}))


def names() -> dict[str, str]:
    models = local_models()
    found = {model.name: model.place for model in models}
    assert len(found) == len(models)  # of a model in parts the first stands for all
    return found


def test_where_each_program_keeps_its_models(home, monkeypatch):
    hub = home / ".cache/huggingface/hub/models--unsloth--Qwen3-30B-A3B-GGUF"
    blob = put(hub / "blobs/abc")
    for revision in ("1", "2"):  # two revisions with the same file
        link = hub / f"snapshots/{revision}/Qwen3-30B-A3B-Q4_K_M.gguf"
        link.parent.mkdir(parents=True)
        link.symlink_to(blob)
    put(hub / "snapshots/1/mmproj-F16.gguf")
    put(home / ".cache/llama.cpp/ggml-org_gpt-oss-20b-GGUF_gpt-oss-20b-mxfp4.gguf")
    put(
        home
        / ".lmstudio/models/lmstudio-community/GLM-4.5-Air-GGUF/GLM-4.5-Air-Q4_K_M-00001-of-00002.gguf"
    )
    put(
        home
        / ".lmstudio/models/lmstudio-community/GLM-4.5-Air-GGUF/GLM-4.5-Air-Q4_K_M-00002-of-00002.gguf"
    )
    store = home / ".ollama/models"
    put_in_ollama(store, "registry.ollama.ai/library/qwen3/30b", "sha256:1")
    put_in_ollama(store, "hf.co/bartowski/OLMoE-GGUF/Q8_0", "sha256:2")
    (store / "manifests/registry.ollama.ai/library/qwen3/broken").write_text("{")
    put(home / "mine/deep/Mine.gguf")
    monkeypatch.setenv("MOEOFF_MODELS", str(home / "mine"))
    assert names() == {
        "unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M": "Hugging Face",
        "ggml-org_gpt-oss-20b-GGUF_gpt-oss-20b-mxfp4": "llama.cpp",
        "GLM-4.5-Air-Q4_K_M": "LM Studio",
        "qwen3:30b": "Ollama",
        "hf.co/bartowski/OLMoE-GGUF:Q8_0": "Ollama",
        "Mine": "MOEOFF_MODELS",
    }
    assert Path(find("gpt-OSS-20b")).name == "ggml-org_gpt-oss-20b-GGUF_gpt-oss-20b-mxfp4.gguf"
    assert find("qwen3:30b") == str(store / "blobs/sha256-1")
    with pytest.raises(
        ModelError,
        match=(
            "more than one model.*qwen3:30b.*Qwen3-30B-A3B|more than one"
            " model.*Qwen3-30B-A3B.*qwen3:30b"
        ),
    ):
        find("qwen3")


def test_variables_lead_to_other_folders(home, monkeypatch):
    put(home / "hf/hub/models--a--b/snapshots/1/b-Q8_0.gguf")
    put(home / "llama/c.gguf")
    put_in_ollama(home / "ollama", "registry.ollama.ai/library/d/latest", "sha256:1")
    assert names() == {}
    for variable, folder in {
        "HF_HOME": "hf",
        "LLAMA_CACHE": "llama",
        "OLLAMA_MODELS": "ollama",
    }.items():
        monkeypatch.setenv(variable, str(home / folder))
    assert list(names()) == ["a/b:Q8_0", "c", "d:latest"]


def test_listed_with_what_they_need(home, moeoff_command, monkeypatch):
    """Not those without routed experts, and no damaged file."""
    folder = home / "models"
    put(folder / "Demo.gguf")
    (folder / "Damaged.gguf").write_bytes(DEMO.read_bytes()[:1000])
    monkeypatch.setenv("MOEOFF_MODELS", str(folder))
    listed = moeoff_command("models", "--memory", "1G")
    assert listed.returncode == 0 and "Demo " in listed.stdout and "Damaged" not in listed.stdout
    assert "100%" in listed.stdout and "tokens/s" in listed.stdout
    small = json.loads(
        moeoff_command("models", "--memory", "50M", "--probe", "off", "--json").stdout
    )
    (model,) = small["models"]
    assert (model["name"], model["fits"], model["tps"]) == ("Demo", False, None)
    assert model["file_bytes"] == DEMO.stat().st_size and model["floor_bytes"] > 50 << 20
    assert sorted(path.name for path in folder.iterdir()) == ["Damaged.gguf", "Demo.gguf"]


def test_run_by_a_part_of_the_name(home, moeoff_command, monkeypatch):
    """Where several have it, the one with experts is meant."""
    put(home / "models/Some-MoE-7B.gguf")
    (home / "models/Some-MoE-0.5B.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("MOEOFF_MODELS", str(home / "models"))
    ran = moeoff_command("run", "some-moe", "-p", "Hello", "-n", "2")
    assert ran.returncode == 0 and "generated 2" in ran.stderr
    missing = moeoff_command("run", "other", "-p", "Hello")
    assert missing.returncode == 1
    assert "no model of this name is found; moeoff models lists others" in missing.stderr


def test_no_models(home, moeoff_command):
    none = moeoff_command("models")
    assert none.returncode == 1
    assert "moeoff run -hf" in none.stderr
    assert "Traceback" not in none.stderr
