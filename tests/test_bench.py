"""`moeoff bench`: real runs of the demo model, every form of output parsed by somebody else, stock beside it."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import sys

import pytest

from moeoff.bench import grid as grids
from moeoff.bench.cgroup import memory_cgroup, unavailable
from moeoff.bench.formats import TABLE
from moeoff.bench.grid import Grid
from moeoff.bench.job import STOCK, BenchTest, Job, Sample
from moeoff.bench.process import drop_from_page_cache, measure
from moeoff.bench.row import STOCK_NAME, ceiling_share, rows
from moeoff.bench.text import TokenStream, usual_text
from moeoff.cli.bench import numbers
from moeoff.errors import OptionError

QUICK = ("-p", "16", "-n", "8", "-r", "2", "--memory", "120M")  # of the grown model: about a fifth of its experts


@pytest.fixture(scope="module")
def table(moeoff_command, grown) -> str:
    done = moeoff_command("bench", "-m", grown, *QUICK, "--strategy", "lru,auto", "-pg", "16,8", "-oe", "jsonl")
    assert done.returncode == 0, done.stderr
    return done.stdout + "\0" + done.stderr


def test_table(table):
    lines = table.split("\0")[0].splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        *("model", "size", "params", "threads", "memory", "strategy", "test", "t/s", "MB/token", "hit rate", "stalled", "disk MB/s", "of ceiling", "peak RSS")
    ]
    assert [line.split("|")[7].strip() for line in lines[2:8]] == ["pp16", "tg8", "pp16+tg8"] * 2
    assert [line.split("|")[6].strip() for line in lines[2:8]] == ["lru"] * 3 + ["auto"] * 3
    assert len({len(line) for line in lines[:8]}) == 1  # columns stand below each other
    assert sum(line.startswith("mode: ") for line in lines) == 2 and "direct reads by 4 I/O workers" in table


def test_rows(table):
    for line in table.split("\0")[1].splitlines():
        row = json.loads(line)
        assert len(row["samples_ts"]) == 2 and row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert 0 <= row["hit_rate"] <= 1 and row["mb_per_token"] > 0 and 0 < row["ceiling_share"]
        assert row["peak_rss"] < row["memory"] == 120 << 20
        assert row["n_prompt"] in (0, 16) and row["model_n_params"] > 1e6


@pytest.mark.parametrize("form", ["csv", "json", "jsonl", "sql"])
def test_forms_for_programs(moeoff_command, form):
    done = moeoff_command("bench", "-p", "16", "-n", "0", "-r", "1", "--memory", "120M", "-o", form)
    assert done.returncode == 0, done.stderr
    if form == "csv":
        found = list(csv.DictReader(io.StringIO(done.stdout)))
    elif form == "json":
        found = json.loads(done.stdout)
    elif form == "jsonl":
        found = [json.loads(line) for line in done.stdout.splitlines()]
    else:
        with sqlite3.connect(":memory:") as database:
            database.row_factory = sqlite3.Row
            database.executescript(done.stdout)
            found = [dict(row) for row in database.execute(f"SELECT * FROM {TABLE}")]
    (row,) = found
    assert row["test"] == "pp16" and float(row["avg_ts"]) > 0 and float(row["stddev_ts"]) == 0 and int(row["memory"]) == 120 << 20


def test_values_between_commas_and_ranges():
    assert numbers(1)("512,128") == [512, 128]
    assert numbers(1)("1-4") == [1, 2, 3, 4]
    assert numbers(1)("128-1024*2") == [128, 256, 512, 1024]
    assert numbers(0)("0-4096+2048,7") == [0, 2048, 4096, 7]


@pytest.mark.parametrize("bad", [("-p", "x"), ("-p", "0", "-n", "0"), ("-pg", "5"), ("--memory", "lots"), ("--strategy", "nonsense"), ("-m", "missing.gguf"),
                                 ("--text", "missing.txt"), ("-t", "0"), ("--memory", "1M"), ("-fa", "2"), ("-c", "64", "-p", "512")])  # fmt: skip
def test_nonsense_is_one_sentence(moeoff_command, bad):
    done = moeoff_command("bench", "-r", "1", *bad)
    assert done.returncode != 0 and "Traceback" not in done.stderr + done.stdout


def test_depth_and_one_table_for_several_memories(moeoff_command, tmp_path):
    picture = tmp_path / "speed.svg"
    done = moeoff_command("bench", "-p", "0", "-n", "4", "-d", "0,64", "-r", "1", "--memory", "110M,150M", "--no-warmup", "-o", "json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert [(row["test"], row["memory"] >> 20) for row in json.loads(done.stdout)] == [*(("tg4", 110), ("tg4 @ d64", 110), ("tg4", 150), ("tg4 @ d64", 150))]
    assert picture.read_text().count("<svg") == 1


def test_same_tokens_for_every_engine(demo):
    jobs = [Job(demo, engine, {"n_ctx": 256, **options}, (BenchTest(32, 4),), 1, False, probe_seconds=0)
            for engine, options in (("moeoff", {"memory": 120 << 20}), (STOCK, {"use_mmap": True, "n_threads": 2}))]  # fmt: skip
    for job in jobs:
        done = measure(job)
        assert not done.error and [sample.n_tokens for sample in done.samples] == [36]


def test_a_text_is_fed_on_and_begins_again():
    class Letters:
        def tokenize(self, text, add_bos=True, special=False):
            return list(text)

        def token_bos(self):
            return 0

    stream = TokenStream(Letters(), "abcde", adds_bos=True)
    assert stream.take(3, first=True) == [0, *b"bc"] and stream.take(4) == [*b"deab"]
    assert len(usual_text()) > 100_000


def test_a_process_that_fails_says_why(demo):
    done = measure(Job(demo, options={"memory": 1 << 20}, tests=(BenchTest(1, 0),)))
    assert "too small" in done.error and not done.samples
    (row,) = rows(done, 1 << 20)
    assert row.avg_ts is None and row.error == done.error
    assert "not finished after" in measure(Job(demo, options={"n_ctx": 512}, tests=(BenchTest(0, 512),), repetitions=1000), timeout=2.0).error


def test_time_limit_cuts_a_test_short(demo):
    done = measure(Job(demo, options={"n_ctx": 4096}, tests=(BenchTest(0, 4000),), repetitions=3, warm_up=False, seconds=0.2, probe_seconds=0))
    assert len(done.samples) == 1 and 0 < done.samples[0].n_tokens < 4000
    assert rows(done, 0)[0].error.startswith("cut off after")


def test_ceiling_is_the_longer_of_both():
    assert ceiling_share([Sample(0, 10, 2.0, bytes_read=1000, stall_seconds=0.5)], 1000.0) == pytest.approx(0.75)  # computing 1.5 s, reading 1 s
    assert ceiling_share([Sample(0, 10, 2.0, bytes_read=1800, stall_seconds=0.5)], 1000.0) == pytest.approx(0.9)
    # a disk that gave the run more than it gave beside it: never more than all of what there is
    fast, slow = Sample(0, 10, 1.0, bytes_read=3000, stall_seconds=0.5), Sample(0, 10, 3.0, bytes_read=3000, stall_seconds=2.0)
    assert ceiling_share([fast], 1000.0) == 1
    assert ceiling_share([fast, slow], 1000.0) == pytest.approx(0.5)  # reading 6000 bytes in 2 of 4 s, computing 1.5 s


def test_stock_beside_it(moeoff_command, grown):
    done = moeoff_command("bench", "-m", grown, *QUICK, "--compare-stock", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["strategy"] for row in found] == ["auto", "auto", STOCK_NAME, STOCK_NAME]
    where = "in a cgroup of 120 MiB" if unavailable() is None else "no limit around it"
    assert all(where in row["mode"] for row in found), found
    assert found[2]["avg_ts"] > 0 and "memory map" in found[2]["mode"]


def test_nothing_is_found_in_the_page_cache(grown):
    """Stock would run from what others have read, as if it had no limit."""

    def cached() -> bool:
        with open(grown, "rb") as file:
            try:
                return os.preadv(file.fileno(), [bytearray(4096)], 50 << 20, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                return False

    with open(grown, "rb") as file:
        file.read()
    if not cached():
        pytest.skip("this file system does not tell what is cached")
    drop_from_page_cache(grown)
    assert not cached()


@pytest.mark.cgroup
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_stock_inside_a_cgroup(grown):
    """As in a container that is hardly larger than the budget: both run as they are, and say in how much memory."""
    command = [sys.executable, "-m", "moeoff.cli", "bench", "-m", grown, *QUICK, "--compare-stock", "-o", "json"]
    with memory_cgroup(126 << 20) as group:
        done = group.run(command, capture_output=True, text=True, timeout=300)
    rows = json.loads(done.stdout)
    assert all("in this container's 126 MiB" in row["mode"] for row in rows), done.stderr
    assert rows[0]["avg_ts"] > 0 and rows[-1]["strategy"] == STOCK_NAME


def test_stock_without_the_right_to_make_a_cgroup(monkeypatch, demo):
    monkeypatch.setattr(grids, "unavailable", lambda: "no memory cgroup can be made here: Permission denied")
    grid = Grid(demo, (BenchTest(8, 0),), {"memory": ["120M"]}, {}, 1, False, compare_stock=True)
    ours, theirs = grid.jobs()
    assert ours[0].limit_bytes is theirs[0].limit_bytes is None and "Permission denied" in theirs[2]
    monkeypatch.setattr(grids, "cgroup_limit", lambda: 125 << 20)  # as inside a container of about this size
    assert all("in this container's 125 MiB" in note for _, _, note in grid.jobs())


def test_agrees_with_the_statistics_of_a_run(grown, moeoff_command, tmp_path):
    """The tokens per second that `run` tells, but for another text and a busy machine's noise (scripts/bench/bench_agreement.py measures the rest)."""
    stats = tmp_path / "stats.json"
    how = ("-m", grown, "--memory", "120M")
    done = moeoff_command("run", *how, "--raw", "-p", "The heron", "-n", "96", "--ignore-eos", "--temp", "0", "--stats-json", str(stats))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(moeoff_command("bench", *how, "-p", "0", "-n", "96", "-r", "2", "-o", "json").stdout)
    assert 0.5 < row["avg_ts"] / json.loads(stats.read_text())["gen_tps"] < 2


def test_empty_text(tmp_path):
    from moeoff.bench.text import read_text

    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(OptionError, match="holds no text"):
        read_text(tmp_path / "empty.txt")
