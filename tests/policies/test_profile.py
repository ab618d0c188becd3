"""Profiles: what one command writes stays when another writes; another model's, a
damaged or a later one is refused.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers.files import read_only
from helpers.processes import soft_limit
from moeoff.errors import ModelError, WriteError
from moeoff.experts.profile import VERSION, Profile, profile_output, profile_path
from moeoff.gguf.model_index import ModelIndex
from mutants import mutate


@pytest.fixture
def model_index(demo, tmp_path) -> ModelIndex:
    return ModelIndex.read(shutil.copy(demo, tmp_path / "model.gguf"))


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(3, 4)).astype(np.float16), "b": rng.integers(0, 9, 5)}


def same(section, expected) -> bool:
    return section.keys() == expected.keys() and all(
        np.array_equal(section[k], expected[k]) and section[k].dtype == expected[k].dtype
        for k in expected
    )


def test_name():
    assert profile_path("a/m.gguf") == "a/m.profile.npz"
    assert profile_path("a/m-00001-of-00003.gguf") == "a/m.profile.npz"


def test_sections_of_others_stay(model_index):
    path = profile_path(model_index.files[0])
    assert Profile.find(model_index) is None
    Profile.write(path, model_index, {"one": arrays(1), "two": arrays(2)}, {"tokens": 7})
    Profile.write(path, model_index, {"two": {"c": np.ones(2)}, "three": arrays(3)}, {"bits": 4})
    merged = Profile.find(model_index)
    assert merged.path == path and merged.sections == ["one", "three", "two"]
    assert same(merged.section("one"), arrays(1)) and same(merged.section("three"), arrays(3))
    assert same(merged.section("two"), {"c": np.ones(2)})  # replaced whole
    assert merged.section("four") is None
    assert merged.info == {"tokens": 7, "bits": 4}
    assert [name for name in os.listdir(os.path.dirname(path)) if "part" in name] == []


def test_another_model_is_refused(model_index, tmp_path):
    path = profile_path(model_index.files[0])
    Profile.write(path, model_index, {"one": arrays(1)})
    span = next(iter(model_index.experts.values()))
    changed = tmp_path / "trained-further.gguf"
    shutil.copy(model_index.files[0], changed)
    # all of one tensor: a model trained further differs everywhere
    with open(changed, "r+b") as file:
        file.seek(span.offset)
        file.write(os.urandom(span.nbytes))
    other = ModelIndex.read(changed)
    for attempt in (
        lambda: Profile.read(path, other),
        lambda: Profile.write(path, other, {"two": arrays(2)}),
    ):
        with pytest.raises(
            ModelError,
            match=r"was made of another model \(model.gguf\), not of .*trained-further.gguf",
        ):
            attempt()
    assert Profile.read(path, model_index).sections == ["one"]


def test_a_renamed_model_keeps_its_profile(model_index, tmp_path):
    path = profile_path(model_index.files[0])
    Profile.write(path, model_index, {"one": arrays(1)})
    moved = shutil.move(model_index.files[0], tmp_path / "other-name.gguf")
    shutil.move(path, profile_path(moved))
    assert Profile.find(ModelIndex.read(moved)).sections == ["one"]


def test_another_version_is_refused(model_index):
    path = profile_path(model_index.files[0])
    Profile.write(path, model_index, {"one": arrays(1)})
    with np.load(path) as file:
        found = dict(file)
    header = json.loads(found["moeoff"].tobytes()) | {"version": VERSION + 1}
    np.savez(path, **found | {"moeoff": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    with pytest.raises(
        ModelError,
        match=f"expected profile version {VERSION}, got {VERSION + 1}: run moeoff calibrate again",
    ):
        Profile.find(model_index)


def test_damage_is_one_sentence(model_index):
    """Or changes nothing."""
    path, rng = profile_path(model_index.files[0]), random.Random(0)
    sections = {"one": {"a": np.arange(10_000)}, "two": arrays(1)}
    Profile.write(path, model_index, sections)
    whole, n_refused = Path(path).read_bytes(), 0
    others = (
        {"x": np.array([{}], object), "moeoff": b"{}"},
        {"x": np.arange(3)},
        {"moeoff": b"[1]"},
    )
    for n in range(200):
        if n < len(others):
            np.savez(
                path,
                **{
                    k: np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v
                    for k, v in others[n].items()
                },
            )
        else:
            Path(path).write_bytes(mutate(whole, rng) if n > len(others) else b"")
        try:
            profile = Profile.read(path, model_index)
            assert all(same(profile.section(name), sections[name]) for name in profile.sections)
        except ModelError as error:
            assert str(error).startswith(path) and "\n" not in str(error)
            n_refused += 1
        else:
            assert n > len(others)
    assert n_refused > 100


def test_missing(model_index, tmp_path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        Profile.read(tmp_path / "nowhere.npz", model_index)


def test_nothing_half_written(model_index):
    """A limit in the middle leaves the old file, and no other file."""
    path = profile_path(model_index.files[0])
    Profile.write(path, model_index, {"one": arrays(1)})
    noise = np.random.default_rng(0).normal(size=10_000)
    with (
        soft_limit(resource.RLIMIT_FSIZE, 20_000),
        pytest.raises(WriteError, match="File too large"),
    ):
        Profile.write(path, model_index, {"two": {"a": noise}})
    assert Profile.find(model_index).sections == ["one"]
    assert sorted(os.listdir(os.path.dirname(path))) == ["model.gguf", "model.profile.npz"]


def test_objects_are_not_written(model_index):
    with pytest.raises(TypeError, match="expected arrays of numbers"):
        Profile.write(
            profile_path(model_index.files[0]), model_index, {"one": {"a": np.array([{}], object)}}
        )
    assert Profile.find(model_index) is None


def test_beside_a_model_that_cannot_be_written_to(
    model_index, monkeypatch, tmp_path, tmp_path_factory
):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with read_only(tmp_path):
        path = profile_output(model_index)
    assert path.startswith(str(cache)) and os.path.isdir(os.path.dirname(path))
    Profile.write(path, model_index, {"one": arrays(1)})
    assert Profile.find(model_index).path == path
