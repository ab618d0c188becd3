"""The picture under an answer, in a terminal of 80 columns."""

import io
import json
import re

import numpy as np
from rich.console import Console

from helpers.terminal import STATS, Terminal, plain
from moeoff.cli.live import _Above, _bars

ASK = ["--temp", "0", "-n", "64", "--ignore-eos", "--expert-memory", "4M"]


def test_an_answer_is_drawn_under(tmp_path):
    file = tmp_path / "stats.json"
    with Terminal(*ASK, "--live", "--stats-json", str(file), "-p", "How many apples are there?", cache=tmp_path / "cache", columns=80) as terminal:
        shown = terminal.read_to(STATS)
        assert terminal.ended() == 0
    picture = shown[shown.rindex("layers") :]
    assert re.search(
        r"█.*hits +\d+% now, \d+% in this answer.*reads .* in flight, \d+ MB/s.*tokens .* tok/s, \d+ written.*memory .*, experts 4\.00 MiB", picture, re.S
    )
    stats = json.loads(file.read_text())
    assert abs(int(re.search(r"(\d+)% in this answer", picture)[1]) / 100 - stats["hit_rate"]) < 0.1
    assert max(map(len, picture.split("memory")[0].splitlines())) <= 80


def test_the_chat_draws_on_and_off(tmp_path):
    with Terminal(*ASK, cache=tmp_path / "cache") as terminal:
        terminal.ready()
        assert "in flight" not in terminal.ask("How many?")
        assert "are drawn from here on" in terminal.ask("/live")
        assert "in flight" in terminal.ask("How many?")
        terminal.ask("/live")
        assert "in flight" not in terminal.ask("How many?")


def test_what_is_written_stands_above_in_whole_rows():
    file = io.StringIO()
    above = _Above(Console(file=file, width=20, force_terminal=True))
    text = "The quick brown fox jumps over the lazy dog.\n\n    return [bold]x[/bold]\nlast"
    for i in range(0, len(text), 3):
        above.write(text[i : i + 3])
    rows = plain(file.getvalue()).split("\n")
    assert above.open == "last" and max(map(len, rows)) <= 20
    assert " ".join("".join(f"{row}\n" for row in rows).split()) == " ".join(text.split()[:-1])
    assert "    return " in "\n".join(rows)


def test_layers_that_found_all_or_nothing():
    assert _bars(np.array([[5, 0], [0, 5], [0, 0], [1, 1]])).plain.splitlines() == ["███             ", "███         ▄▄▄ ", "███         ███ "]
    assert {len(row) for row in _bars(np.ones((94, 2))).plain.splitlines()} == {47}
