"""The way out of an error: in Python's terms from the library, with flags from the command line."""

import re
from pathlib import Path

import pytest

import moeoff
from moeoff.cli.errors import REMEDIES, sentence
from moeoff.errors import ContextError, MoeoffError, OptionError, Remedy

FACTS = {"needed": 314_572_801, "n_ctx": 512, "model": "m.gguf", "tier": "Q2_K", "max_loss": 0.01}


@pytest.mark.parametrize("remedy", Remedy)
def test_both_sides_say_every_remedy(remedy):
    error = OptionError("too little", remedy, **FACTS)
    assert str(error).startswith("too little: ") and "--" not in str(error)
    assert sentence(error).startswith("too little: ") and "{" not in sentence(error)
    assert error.remedy is remedy and error.facts == FACTS


def test_sizes_and_losses_as_people_write_them():
    assert "--memory 301M or more" in sentence(MoeoffError("x", Remedy.MORE_MEMORY, **FACTS))
    assert "--max-loss 1%" in sentence(MoeoffError("x", Remedy.MEASURE_LOSS, **FACTS))
    assert sentence(ContextError(10, 8)).endswith("larger -c")
    assert set(REMEDIES) == set(Remedy)


def test_no_flag_in_an_error_of_the_library():
    flag = re.compile(r"raise \w+Error\([^)]*[ (]--[a-z]", re.DOTALL)
    root = Path(moeoff.__file__).parent
    guilty = [str(path.relative_to(root)) for path in root.rglob("*.py") if path.parent.name != "cli" and flag.search(path.read_text())]
    assert not guilty
