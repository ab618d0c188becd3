"""What commands print fits a terminal of 80 columns, whole; and a shell completes the values of options."""

from __future__ import annotations

import re

import pytest
from click.shell_completion import ShellComplete

from helpers.files import DEMO, SMALL_TRACE
from moeoff.cli.calibrate import _table
from moeoff.cli.main import main
from moeoff.measure.rows import as_markdown
from moeoff.system.memory import available, format_size

COLUMNS = 80
M = str(DEMO)


@pytest.mark.parametrize(
    "command",
    [
        *(f"{name} --help" for name in main.commands),
        f"inspect {M} --probe off --memory 6G",
        f"inspect {M} -c 100000 --probe off --memory 500G",
        f"simulate {SMALL_TRACE} --strategy lfu,score",
        f"bench {M} -p 8 -n 8 -r 1 --no-warmup --memory 500G,110M",
    ],
)
def test_eighty_columns(invoke, command):
    done = invoke(*command.split())
    assert done.returncode == 0, done.stderr
    long = [line for line in done.stdout.splitlines() if len(line) > COLUMNS and M not in line]  # a path is not broken
    assert not long and "…" not in done.stdout, long
    beyond = re.search(r"--memory 500G is more than the \S+ GiB that are available here", done.stderr)
    assert bool(beyond) == ("500G" in command) and available() < 500 << 30


def test_a_wide_table_is_folded_and_not_cut(capsys, monkeypatch):
    """calibrate's, of eight columns."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    columns = ["precision", "resident", "left out", "bytes", "loss (95 %)", "at most", "KL (95 %)", "same top"]
    row = ["all in Q4_K, τ 0.0123", "50%", "12.3%", "88.0%", "+0.51% (+0.32% to +0.70%)", "+0.70% no", "0.0123 (0.0100 to 0.0140)", "98.1%"]
    _table("a-model-with-a-long-name.gguf, 8192 tokens scored; bytes: of the lossless model's", columns, [row])
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= COLUMNS
    assert all(word in shown.split() for cell in row for word in cell.split())


def test_large_sizes_keep_the_columns():
    titles, rule = next(as_markdown([])).splitlines()
    assert len(titles) == len(rule) <= COLUMNS and len(format_size(500 << 30)) <= titles.index("|", 1) - 3


def test_the_worker_names_the_flag_as_it_was_typed(invoke):
    for flag in ("-ctv", "--cache-type-v"):
        said = " ".join(invoke("bench", M, "-p", "8", "-n", "0", "-r", "1", flag, "q4_0", "-fa", "off").stdout.split())
        assert f"{flag} q4_0: quantized values need flash attention" in said


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
    found = ShellComplete(main, {}, "moeoff", "_MOEOFF_COMPLETE").get_completions(words, begun)
    assert completed in [item.value for item in found]
