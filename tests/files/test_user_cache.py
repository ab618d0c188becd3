"""A measurement is found again where all that it depends on is the same, and nowhere
else.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.checkpoint import Checkpoint
from moeoff.system.user_cache import CacheEntry


@dataclass(frozen=True)
class Facts:
    n: int
    rate: float
    reason: str


FACTS = Facts(3, 0.5, "measured")
ARRAYS = {"a": np.arange(6, dtype=np.int32).reshape(2, 3)}
LAYOUTS = {"a": ("i", (2, 3))}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_entry_is_of_what_it_depends_on(cache):
    entry = CacheEntry("facts.json", model="a", threads=2)
    assert entry.load(Facts) is None
    entry.save(FACTS)
    assert CacheEntry("facts.json", threads=2, model="a").load(Facts) == FACTS
    for other in ({"model": "b", "threads": 2}, {"model": "a", "threads": 4}, {"model": "a"}):
        assert CacheEntry("facts.json", **other).load(Facts) is None
    assert CacheEntry("others.json", model="a", threads=2).load(Facts) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"n": 3}',
        '{"n": 3.0, "rate": 0.5, "reason": ""}',
        '{"n": true, "rate": 0.5, "reason": ""}',
        "[" * 10_000,
    ],
)
def test_damaged_facts_are_none(cache, text):
    entry = CacheEntry("facts.json")
    entry.path().write_text(text)
    assert entry.load(Facts) is None


def test_arrays(cache):
    entry = CacheEntry("arrays.npz", model="a")
    assert entry.load_arrays(LAYOUTS, 1000) is None
    entry.save_arrays(**ARRAYS)
    np.testing.assert_array_equal(entry.load_arrays(LAYOUTS, 1000)["a"], ARRAYS["a"])
    assert (
        entry.load_arrays(LAYOUTS, 10) is None
        and entry.load_arrays({"a": ("i", (3, 2))}, 1000) is None
    )
    entry.path().write_bytes(b"damaged")
    assert entry.load_arrays(LAYOUTS, 1000) is None


def test_without_a_folder_nothing_is_saved(cache):
    cache.write_text("a file")
    entry = CacheEntry("facts.json")
    entry.save(FACTS)
    entry.save_arrays(**ARRAYS)
    assert (
        entry.load(Facts) is None
        and entry.load_arrays(LAYOUTS, 1000) is None
        and cache.read_text() == "a file"
    )


def test_a_checkpoint_of_other_options_has_no_parts(demo, cache):
    """An interrupted calibration goes on with what the same model measured with the
    same options.
    """
    model_index, options = ModelIndex.read(demo), {"n_threads": 2, "rope_freq_base": 0.0}

    def parts(options: dict, **depends) -> bool:
        return Checkpoint(model_index, options, **depends).load("part") is not None

    Checkpoint(model_index, options, tier="q4_0").save("part", ARRAYS)
    assert parts(options, tier="q4_0")
    assert not parts(options | {"rope_freq_base": 5000.0}, tier="q4_0")
    assert not parts(options, tier="q4_0"), "the earlier one's are removed"
    Checkpoint(model_index, options, tier="q4_0").save("part", ARRAYS)
    assert not parts(options, tier="q2_0")
