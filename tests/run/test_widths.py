"""Output of commands fits a terminal of 80 columns, whole; and a shell completes the
values of options.
"""

from __future__ import annotations

import re

import click
import pytest
from click.shell_completion import ShellComplete

from helpers.files import DEMO, SMALL_TRACE
from moeoff.cli.calibrate import _print
from moeoff.cli.main import main
from moeoff.measure.rows import as_markdown
from moeoff.system.memory import available, format_size

COLUMNS = 80
M = str(DEMO)
WITH_MORE = [
    name
    for name, command in main.commands.items()
    if any("--help-all" in param.opts for param in command.params)
]


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} --help" for name in main.commands),
        *(f"{name} --help-all" for name in WITH_MORE),
        f"inspect {M} --probe off --memory 6G",
        f"inspect {M} -c 100000 --probe off --memory 500G",
        f"simulate {SMALL_TRACE} --strategy lfu,score",
        f"bench {M} -p 8 -n 8 -r 1 --no-warmup --memory 500G,110M",
    ],
)
def test_eighty_columns(invoke, command):
    done = invoke(*command.split())
    assert done.returncode == 0, done.stderr
    # a path is not broken
    long = [line for line in done.stdout.splitlines() if len(line) > COLUMNS and M not in line]
    assert not long and "…" not in done.stdout, long
    beyond = re.search(r"--memory 500.00 GiB is more than the \S+ GiB available here", done.stderr)
    assert bool(beyond) == ("500G" in command) and available() < 500 << 30


@pytest.mark.parametrize("name", WITH_MORE)
def test_help_shows_a_page_and_help_all_every_option(invoke, name):
    first, everything = invoke(name, "-h").stdout, invoke(name, "--help-all").stdout
    assert len(first.splitlines()) <= 48
    assert {"run", "serve", "bench", "eval", "calibrate"} <= set(WITH_MORE)
    for param in main.commands[name].params:
        if isinstance(param, click.Option) and not param.hidden:
            line = re.compile(rf"^  (\S+, )*{re.escape(max(param.opts, key=len))}\b", re.MULTILINE)
            assert line.search(everything) and bool(line.search(first)) == (
                not getattr(param, "group", "")
            ), param.name


def test_a_wide_table_is_folded_and_not_cut(capsys, monkeypatch):
    """calibrate's, of eight columns."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    columns = [
        "precision",
        "resident",
        "left out",
        "bytes",
        "loss (95 %)",
        "at most",
        "KL (95 %)",
        "same top",
    ]
    row = [
        "all in Q4_K, τ 0.0123",
        "50%",
        "12.3%",
        "88.0%",
        "+0.51% (+0.32% to +0.70%)",
        "+0.70% no",
        "0.0123 (0.0100 to 0.0140)",
        "98.1%",
    ]
    _print(
        "a-model-with-a-long-name.gguf, 8192 tokens scored; bytes: of the lossless model's",
        columns,
        [row],
    )
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= COLUMNS
    assert all(word in shown.split() for cell in row for word in cell.split())


def test_large_sizes_keep_the_columns():
    titles, rule = next(as_markdown([])).splitlines()
    assert len(titles) == len(rule) <= COLUMNS
    assert len(format_size(500 << 30)) <= titles.index("|", 1) - 3


def test_the_worker_names_the_flag_as_it_was_typed(invoke):
    for flag in ("-ctv", "--cache-type-v"):
        text = " ".join(
            invoke(
                "bench", M, "-p", "8", "-n", "0", "-r", "1", flag, "q4_0", "-fa", "off"
            ).stdout.split()
        )
        assert f"{flag} q4_0: needs flash attention" in text


@pytest.mark.parametrize(
    "words, begun, completed",
    [
        (["bench", "--strategy"], "promo", "promoe"),
        (["bench", "--strategy"], "lru,promo", "lru,promoe"),
        (["bench", "-ctk"], "q8_", "q8_0"),
        (["bench", "-fa"], "of", "off"),
        (["simulate", "--strategy"], "lfu,hob", "lfu,hobbit"),
        (["run", "--strategy"], "edg", "edgemoe"),
    ],
)
def test_values_are_completed(words, begun, completed):
    items = ShellComplete(main, {}, "moeoff", "_MOEOFF_COMPLETE").get_completions(words, begun)
    assert completed in [item.value for item in items]
