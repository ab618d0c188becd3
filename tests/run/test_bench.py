"""`moeoff bench`: real runs of the demo model, every form of output parsed by somebody
else, stock beside it.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from helpers.budgets import named
from helpers.files import PROSE
from moeoff import Llama
from moeoff.cli.bench import _read_axis, numbers
from moeoff.errors import OptionError
from moeoff.llamacpp import native
from moeoff.measure import worker
from moeoff.measure.job import (
    STOCK,
    BenchTest,
    Job,
    Measurement,
    Sample,
    TokenStream,
    default_text,
    read_text_or_default,
)
from moeoff.measure.rows import OUTPUT_FORMATS, PLAIN_NAME, STOCK_NAME, ceiling_share, rows
from moeoff.measure.run import KILLED_TEXT, Grid, drop_from_page_cache, limit_around, measure
from moeoff.options import TABLE
from moeoff.system.cgroup import memory_cgroup, unavailable
from moeoff.system.disk import cached_bytes
from moeoff.system.memory import cgroup_limit
from speed import Bench, cold, prompt_then_tokens, take_turns


@pytest.fixture(scope="module")
def small(invoke, grown) -> int:
    """MiB in which about a tenth of the grown model's experts stay."""
    return named(
        invoke("bench", "-m", grown, "-p", "16", "-n", "8", "-r", "1", "--memory", "1M").stdout
    )


@pytest.fixture(scope="module")
def quick(grown, small) -> tuple[str, ...]:
    return "-m", grown, "-p", "16", "-n", "8", "-r", "2", "--memory", f"{small}M"


def job(model: str, *tests: BenchTest, engine: str = "moeoff", **more) -> Job:
    """A job of one repetition, with its options among the others, as a test has it."""
    fields = {"repetitions": 1, "warm_up": False, "probe_seconds": 0}
    ours = {name: more.pop(name) for name in [*more] if name in Job.__dataclass_fields__}
    return Job(model, engine, more, tests, **fields | ours)


def measured(invoke, *args: str) -> list[dict[str, Any]]:
    done = invoke("bench", *args, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rows_and_their_table(invoke, quick, small):
    measurements = measured(invoke, *quick, "--strategy", "lru,auto")
    for row in measurements:
        assert len(row["samples_ts"]) == 2
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert 0 <= row["hit_rate"] <= 1 and row["mb_per_token"] > 0 and 0 < row["ceiling_share"]
        assert row["peak_rss"] < row["memory"] == small << 20
        assert row["n_prompt"] in (0, 16) and row["model_n_params"] > 1e6
    table = "".join(OUTPUT_FORMATS["md"]([measurements[:2], measurements[2:]]))
    lines = table.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        *("memory", "strategy", "test", "t/s", "MB/tok", "hits")
    ]
    assert [line.split("|")[3].strip() for line in lines[2:6]] == ["pp16", "tg8"] * 2
    assert [line.split("|")[2].strip() for line in lines[2:6]] == ["lru"] * 2 + ["auto"] * 2
    assert "\nmodel: qwen2moe 12 x 32" in table and max(map(len, lines[:6])) <= 80
    assert len({len(line) for line in lines[:6]}) == 1  # columns stand below each other
    # as many as the disk is fastest with
    assert len(re.findall(r"^mode: .* direct reads by \d+ I/O threads", table, re.MULTILINE)) == 2


def test_forms_for_programs(demo):
    """One measurement, written in each form, is read back by somebody else."""
    measured = measure(job(demo, BenchTest(16, 0), memory=200 << 20, n_ctx=256, warm_up=True))
    written = rows(measured, 200 << 20)

    def text(name: str) -> str:
        return "".join(OUTPUT_FORMATS[name]([written, written]))

    read = [*csv.DictReader(io.StringIO(text("csv"))), *json.loads(text("json"))]
    assert len(read) == 4
    for row in read:
        assert row["test"] == "pp16"
        assert float(row["avg_ts"]) == pytest.approx(written[0]["avg_ts"])
        assert float(row["stddev_ts"]) == 0
        assert int(row["memory"]) == 200 << 20


def test_values_between_commas_and_ranges():
    assert numbers("512,128") == [512, 128]
    assert numbers("1-4") == [1, 2, 3, 4]
    assert numbers("128-1024*2") == [128, 256, 512, 1024]
    assert numbers("0-4096+2048,7") == [0, 2048, 4096, 7]
    assert _read_axis(TABLE["n_gpu_layers"], "all,1-3,-1") == [-1, 1, 2, 3, -1]


@pytest.mark.parametrize(
    "bad",
    [
        ("-p", "x"),
        ("--strategy", "nonsense"),
        ("--text", "missing.txt"),
        ("-t", "0"),
        ("--memory", "1M"),
        ("-fa", "2"),
    ],
)
def test_nonsense_is_one_sentence(invoke, bad):
    done = invoke("bench", "-r", "1", *bad)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "int()" not in said and "unpack" not in said  # Python's own words for it


def test_depth_and_one_table_for_several_memories(invoke):
    done = invoke(
        *"bench -p 0 -n 4 -d 0,64 -r 1 --memory 200M,250M --no-warmup -o json".split(),
    )
    assert done.returncode == 0, done.stderr
    assert [(row["test"], row["memory"] >> 20) for row in json.loads(done.stdout)] == [
        *(("tg4", 200), ("tg4 @ d64", 200), ("tg4", 250), ("tg4 @ d64", 250))
    ]


def test_same_tokens_for_every_engine(demo):
    test = BenchTest(32, 4)
    for asked in (
        job(demo, test, n_ctx=256, memory=200 << 20),
        job(demo, test, engine=STOCK, n_ctx=256, use_mmap=True, n_threads=2),
    ):
        result = measure(asked)
        assert not result.error and [sample.n_tokens for sample in result.samples] == [36]


def test_a_text_is_fed_on_and_begins_again():
    class Letters:
        def tokenize(self, text, add_bos=True, special=False):
            return list(text)

        def token_bos(self):
            return 0

    stream = TokenStream(Letters(), "abcde", adds_bos=True)
    assert stream.take(3, first=True) == [0, *b"bc"] and stream.take(4) == [*b"deab"]
    assert len(default_text()) > 100_000


def test_a_process_that_fails_says_why(demo):
    result = measure(Job(demo, options={"memory": 1 << 20}, tests=(BenchTest(1, 0),)))
    assert "too small" in result.error and not result.samples
    (row,) = rows(result, 1 << 20)
    assert row["avg_ts"] is None and row["error"] == result.error
    result.closed["cgroup_peak_bytes"] = 1 << 20  # known of any process that had a limit
    assert rows(result, 1 << 20)[0]["error"] == result.error
    assert (
        "not finished after"
        in measure(
            Job(demo, options={"n_ctx": 512}, tests=(BenchTest(0, 512),), repetitions=1000),
            timeout=2.0,
        ).error
    )


def test_time_limit_cuts_a_test_short(demo):
    result = measure(job(demo, BenchTest(0, 4000), n_ctx=4096, repetitions=3, seconds=0.2))
    assert len(result.samples) == 1 and 0 < result.samples[0].n_tokens < 4000
    assert rows(result, 0)[0]["error"].startswith("cut off after")


def test_ceiling_is_the_longer_of_both():
    def sample(seconds: float, bytes_read: int, stalled: float) -> Sample:
        return Sample(0, 10, seconds, counters={"bytes_read": bytes_read, "stall_seconds": stalled})

    # computing 1.5 s, reading 1 s
    assert ceiling_share([sample(2.0, 1000, 0.5)], 1000.0) == pytest.approx(0.75)
    assert ceiling_share([sample(2.0, 1800, 0.5)], 1000.0) == pytest.approx(0.9)
    # a disk that gave the run more than it gave beside it: never more than all of what
    # there is
    fast, slow = sample(1.0, 3000, 0.5), sample(3.0, 3000, 2.0)
    assert ceiling_share([fast], 1000.0) == 1
    # reading 6000 bytes in 2 of 4 s, computing 1.5 s
    assert ceiling_share([fast, slow], 1000.0) == pytest.approx(0.5)


def test_rounds_of_configurations(demo, tmp_path):
    """Forwards, then backwards, each cold; medians, and ratios of the same round. A
    round that fails counts for neither.
    """
    model, order, cached = shutil.copy(demo, tmp_path / "model.gguf"), [], []
    seconds = {"lru": [1.0, 2.0, 4.0], "lfu": [0.5, None, 1.0]}

    def measured_once(job, _listener, _timeout):
        name = job.options["strategy"]
        order.append(name)
        cached.append(cached_bytes(job.model))
        Path(job.model).read_bytes()
        s = seconds[name][order.count(name) - 1]
        if s is None:
            return Measurement(job, error="it broke")
        return Measurement(job, samples=[Sample(0, 8, s)])

    job = Job(model, tests=(BenchTest(8, 0),), repetitions=1)
    grid = Grid(job, {"strategy": ["lru", "lfu"]}, cold=True, rounds=3)
    found = list(grid.run(measure=measured_once))
    assert order == ["lru", "lfu", "lfu", "lru", "lru", "lfu"] and cached == [0] * 6
    names = "samples_ts", "samples_ratio", "error"
    assert [[row[name] for name in names] for (row,) in found] == [
        [[8, 4, 2], [1, 1, 1], ""],
        [[16, 8], [2, 4], "it broke"],
    ]
    table = "".join(OUTPUT_FORMATS["md"](found, {"rounds"}))
    assert "12.00 (8.00 to 16.00)" in table and "3.00 (2.00 to 4.00)" in table
    (alone,) = Grid(job, {"strategy": ["lru"]}).jobs()
    assert alone[0].limit_bytes is None


def test_rounds_of_the_command(invoke, demo):
    options = "-p 8 -n 0 -r 1 --no-warmup --rounds 2 --cold --strategy lru,lfu".split()
    rows = measured(invoke, "-m", demo, *options)
    assert rows[0]["samples_ratio"] == [1, 1] and len(rows[1]["samples_ratio"]) == 2
    assert all(len(row["samples_ts"]) == 2 for row in rows)


@pytest.mark.slow
def test_jobs_in_rounds(grown, small, tmp_path):
    """Paired and in turn; an answer goes on behind its prompt; what a script registers
    is known, and what fails is a row that says so.
    """
    (tmp_path / "mine.py").write_text(
        "import moeoff\n\n\n@moeoff.register\nclass Mine(moeoff.policies.get_policy('lru')):\n   "
        " name = 'mine'\n"
    )
    common = {"registers": (str(tmp_path / "mine.py"),), "n_ctx": 256, "flash_attn": True}
    jobs = {
        name: job(grown, *prompt_then_tokens(16, 8), memory=memory, strategy=strategy, **common)
        for name, memory, strategy in (
            ("lru", f"{small}M", "lru"),
            ("mine", f"{small}M", "mine"),
            ("too small", "1M", "lru"),
        )
    }
    order = []

    def noted(name: str):
        return lambda index: order.append((index, name)) or cold(jobs[name], 300.0)(index)

    compared = take_turns({name: noted(name) for name in jobs}, 2)
    assert order == [
        (0, "lru"),
        (0, "mine"),
        (0, "too small"),
        (1, "too small"),
        (1, "mine"),
        (1, "lru"),
    ]
    assert [(row.name, row.test.name) for row in compared] == [
        (name, test) for name in jobs for test in ("pp16", "tg8 @ d16")
    ]
    for row in compared[:4]:
        assert not row.error
        assert row.figures["tps"].low <= row.figures["tps"].median <= row.figures["tps"].high
        assert row.figures["mb_per_token"].median > 0 and row.figures["hit_rate"].median < 1
        assert [sample.n_tokens for sample in row.measurements[0].samples] == [16, 8]
    assert compared[0].ratio == (1, 1, 1) and compared[2].ratio.low > 0
    assert "too small" in compared[4].error
    assert compared[4].ratio is None
    assert not compared[4].figures


@pytest.mark.slow
def test_a_prompt_that_another_program_tokenizes(demo):
    """The text's own tokens, as far as they end with a character."""
    llm = Llama(demo, n_ctx=256)
    tokens = TokenStream(llm, read_text_or_default(PROSE), llm.adds_bos()).take(62, first=True)
    prompt = Bench(demo, str(PROSE), 62, 8).prompt()
    assert llm.tokenize(prompt.encode(), add_bos=llm.adds_bos()) == tokens
    with pytest.raises(click.ClickException, match="use --n-prompt 62"):
        Bench(demo, str(PROSE), 64, 8).prompt()


def test_an_answer_of_its_own(demo):
    """The model's greedy answer, which others then decode, whoever they are; behind
    what is given the model goes on by itself.
    """
    asked = job(demo, *prompt_then_tokens(16, 8), n_ctx=256, answer=())
    result = measure(asked)
    assert [(sample.test, sample.n_tokens) for sample in result.samples] == [(0, 16), (1, 8)]
    with Llama(demo, n_ctx=256) as llm:
        llm.eval(TokenStream(llm, read_text_or_default(None), llm.adds_bos()).take(16, first=True))
        for token in result.closed["answer"]:
            assert token == llm.sample(temp=0.0)
            llm.eval([token])
        other = (int(np.argmin(llm.eval_logits[-1])), *result.closed["answer"][:2])
        llm.n_tokens = 16
        for token in other:
            llm.eval([token])
        goes_on = llm.sample(temp=0.0)
    answer = measure(replace(asked, answer=other)).closed["answer"]
    assert answer[:4] == [*other, goes_on] and len(answer) == 8
    assert measure(replace(asked, engine=STOCK, answer=other)).closed["answer"][:3] == [*other]


@pytest.mark.slow  # stock thrashes in the cgroup
def test_stock_beside_it(invoke, quick, small):
    measurements = measured(invoke, *quick, "--compare-stock")
    assert [row["strategy"] for row in measurements] == [
        "auto",
        "auto",
        STOCK_NAME,
        STOCK_NAME,
        PLAIN_NAME,
        PLAIN_NAME,
    ]
    where = f"in a cgroup of {small} MiB" if unavailable() is None else "no limit around it"
    assert all(where in row["mode"] for row in measurements), measurements
    assert "memory map, repacked kernels" in measurements[2]["mode"]
    assert "memory map, plain kernels" in measurements[4]["mode"]
    # which needs the weights twice
    assert measurements[4]["avg_ts"] > 0
    assert measurements[2]["avg_ts"] or measurements[2]["error"] == KILLED_TEXT


def test_what_stays_in_the_page_cache_is_reported(demo, tmp_path):
    """Stock would run from what others have read, as if it had no limit: what is mapped
    cannot be dropped.
    """
    path = shutil.copy(demo, tmp_path / "model.gguf")  # which no other process has mapped
    if not cached_bytes(path):
        pytest.skip("this system does not tell what is cached")
    grid = Grid(job(path, BenchTest(1, 0), n_threads=1), {"memory": ["400M"]}, compare_stock=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[: len(mapped) // 2 : mmap.PAGESIZE])
        modes = [row["mode"] for rows in grid.run() for row in rows]
    assert [
        bool(re.search(r"\d MiB of model.gguf were in the page cache", mode)) for mode in modes
    ] == [False, True, True]
    assert drop_from_page_cache(path) == "" and cached_bytes(path) == 0


@pytest.mark.cgroup
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_stock_inside_a_cgroup(quick, small):
    """As in a container that is hardly larger than the budget: both run as they are,
    and say in how much memory.
    """
    command = [sys.executable, "-m", "moeoff.cli", "bench", *quick, "--compare-stock", "-o", "json"]
    with memory_cgroup(small + 6 << 20) as group:
        done = group.run(command, capture_output=True, text=True, timeout=300)
    rows = json.loads(done.stdout)
    assert all(f"in this container's {small + 6} MiB" in row["mode"] for row in rows), done.stderr
    assert rows[0]["avg_ts"] > 0 and rows[-1]["strategy"] == PLAIN_NAME


@pytest.mark.parametrize(
    "own, why, expected",
    [
        (None, None, (120 << 20, "in a cgroup of 120 MiB")),
        (200 << 20, None, (120 << 20, "in a cgroup of 120 MiB")),
        (125 << 20, None, (None, "in this container's 125 MiB")),
        (None, "Permission denied", (None, "no limit around it: Permission denied")),
    ],
)
def test_the_limit_around_a_run(own, why, expected):
    assert limit_around(120 << 20, own, why) == expected


def test_stock_runs_in_the_same_limit(demo):
    jobs = Grid(Job(demo, tests=(BenchTest(8, 0),)), {"memory": ["120M"]}, compare_stock=True)
    found = [(job.engine, job.limit_bytes, note) for job, _, note in jobs.jobs()]
    around = limit_around(120 << 20, cgroup_limit(), unavailable())
    assert found == [(engine, *around) for engine in ("moeoff", STOCK, STOCK)]


def test_stock_computes_attention_itself(demo):
    """Our kernels serve every model of a process, stock llama.cpp's, too, unless they
    are turned off.
    """
    try:
        engine = worker._Engine(Job(demo, STOCK, {"n_ctx": 64}))
        assert native.attention_kernels() == 0
        engine.llm.close()
    finally:
        native.use_attention_kernels(True)


def test_empty_text(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(OptionError, match="holds no text"):
        read_text_or_default(tmp_path / "empty.txt")
