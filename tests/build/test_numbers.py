"""Numbers of README.md and the guides have sources that say the same."""

from __future__ import annotations

import pytest

import numbers_of_pages as numbers


@pytest.mark.parametrize("page", numbers.PAGES)
def test_every_number_has_its_source(page):
    assert numbers.wrong(page, numbers.prose(page), numbers.SOURCES.get(page, {})) == []


def test_what_is_not_so_is_found():
    """Another speed, a number from nowhere, a constant that has changed, a phrase that is gone."""
    page = "README.md"
    text, sources = numbers.prose(page), numbers.SOURCES[page]
    speed = next(phrase for phrase in sources if "6.60" in phrase)
    faster = text.replace("moeoff 6.60", "moeoff 6.71"), {phrase.replace("6.60", "6.71"): source for phrase, source in sources.items()}
    assert numbers.wrong(page, *faster) == [f"README.md: 6.71 of {speed.replace('6.60', '6.71')!r} is not in data/real-qwen3.json"]
    (found,) = numbers.wrong(page, text + " It is 3 % faster.", sources)
    assert found.startswith("README.md: no source of 3 in")
    (found,) = numbers.wrong(page, text, sources | {"a context of 1,024": "moeoff/memory.py: DEFAULT_SHARE = 0.9"})
    assert "no longer has 'DEFAULT_SHARE = 0.9'" in found
    assert numbers.wrong(page, text, sources | {"ten times as fast": "data real-qwen3"}) == ["README.md: nothing says 'ten times as fast' any more"]


def test_a_value_is_compared_to_the_digits_that_are_printed():
    assert numbers.is_in("0.08", [0.0833]) and numbers.is_in("7.0", [7.04]) and numbers.is_in("1,024", [1024.0])
    assert not numbers.is_in("0.09", [0.0833]) and not numbers.is_in("7.1", [7.04]) and not numbers.is_in("7.00", [7.04])
