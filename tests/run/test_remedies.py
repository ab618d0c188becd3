"""The way out of an error: in Python's terms from the library, with flags from the
command line.
"""

import re
from pathlib import Path

import click

import moeoff
from moeoff.cli.main import main
from moeoff.cli.options import sentence
from moeoff.errors import ContextError, MoeoffError, OptionError


def test_both_sides_name_options_and_what_would_do():
    error = OptionError(
        "`expert_memory` is too little",
        hint={"memory": 314_572_801, "n_ctx": 512, "force": True, "output": ...},
    )
    assert (
        str(error)
        == "expert_memory is too little: give memory=314572801, or n_ctx=512, or force=True, or"
        " output=..."
    )
    assert (
        sentence(error)
        == "--expert-memory is too little: give --memory 301M, or --ctx-size 512, or --force, or"
        " --output OUTPUT"
    )
    assert str(MoeoffError("no way out")) == sentence(MoeoffError("no way out")) == "no way out"
    assert sentence(ContextError(10, 8)).endswith(
        "shorten it, or increase the context: give --ctx-size N"
    )


def test_a_way_out_is_one_that_the_command_has():
    error = OptionError("too little", hint={"memory": 1 << 20, "n_ctx": 512})
    with click.Context(main.commands["eval"]):
        assert sentence(error) == "too little: give --memory 1M"
    with click.Context(main.commands["run"]):
        assert sentence(error) == "too little: give --memory 1M, or --ctx-size 512"


def test_as_it_was_typed(invoke, demo):
    """Flags as the person wrote them, and no word of Python."""
    done = invoke("run", "-m", demo, "-p", "x", "-c", "7")
    assert (
        done.stderr
        == "Error: -c: expected at least 8 tokens, or 0 for the model's trained length, got 7\n"
    )
    done = invoke("serve", demo, "--memory=50M", "--", "--jinja")
    assert re.search(r": give --memory \d+M(, or --ctx-size \d+)?\n$", done.stderr), done.stderr


def test_no_flag_in_an_error_of_the_library():
    flag = re.compile(r"raise \w+Error\([^)]*[ (]--[a-z]", re.DOTALL)
    root = Path(moeoff.__file__).parent  # its router is started by the command line alone
    guilty = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.parent.name != "cli" and path.name != "router.py" and flag.search(path.read_text())
    ]
    assert not guilty
