"""`moeoff inspect`: what the headers say must be what the loaded model says."""

import compileall
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import moeoff
import results
from cgroup import disk_cgroup
from grow_model import Growth, grow_model
from helpers.files import DEMO, PROSE
from moeoff.budget import compute_probe
from moeoff.budget.dry_load import dry_load, memory_sizes
from moeoff.budget.inspection import examine, speed
from moeoff.budget.plan import expected_bytes
from moeoff.engine.explanation import explain
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.job import BenchTest, Job
from moeoff.measure.run import Grid
from moeoff.system import cgroup
from moeoff.system.memory import MIB


def test_json(invoke, demo):
    done = invoke("inspect", demo, "--json", "--probe", "off")
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    assert report["architecture"] == "qwen2moe" and report["n_layer"] == report["n_moe_layer"] == 12
    assert report["n_expert"] == 32
    assert report["n_expert_used"] == 4
    assert report["n_expert_shared"] == 1
    assert report["n_ctx_train"] == 256
    assert (
        sum(kind["nbytes"] * kind["count"] for kind in report["slices"]) == report["expert_bytes"]
    )
    assert report["token_bytes"] * 8 == report["expert_bytes"]
    assert {(kind["matrix"], kind["type"], kind["count"]) for kind in report["slices"]} == {
        (m, "Q8_0", 384) for m in ("gate", "up", "down")
    }
    assert report["disk"] is None and report["ctx_size"] == 256
    items = (
        "process",
        "host_weight",
        "row_cache",
        "extra",
        "kv",
        "compute",
        "work",
        "output",
        "reserve",
        "arena_floor",
    )
    assert 0 <= report["floor_bytes"] - sum(report[f"{item}_bytes"] for item in items) < MIB
    assert all(report[f"{item}_bytes"] > 0 for item in items)
    assert report["embedding_bytes"] == 0 < report["row_table_bytes"] < report["dense_bytes"]
    assert all(row["tps"] is None for row in report["budgets"])


def test_text(demo, moeoff_command):
    done = moeoff_command("inspect", demo, "-c", "1024", "--memory", "130M")
    text = " ".join(done.stdout.split())
    row = (
        r"130 MiB is enough at a context of 1024: \d+% of the experts in memory, at most \S+"
        r" tokens/s; at a depth of 1,024 tokens \d+%, \S+ tokens/s"
    )
    assert re.search(row, text), text
    assert done.returncode == 0
    assert done.stderr.startswith("context of 1024 tokens: the model was trained for 256")
    assert done.stderr.count("\n") == 1
    for words in (
        "qwen2moe, 12 layers",
        "32 a layer, top-4, 1 shared",
        "context of 1024",
        "smallest --memory",
        "100%",
        "MB/s",
        "at a depth of 1,024 tokens",
        "Measured now: computing a token takes",
        "attention to 1,024 tokens",
    ):
        assert words in text, words


def test_what_is_chosen_is_explained(demo, invoke):
    """By inspect before a model is loaded, by a model and a server of themselves.
    Inspect says what a server chooses otherwise, and why one cannot be.
    """
    choices = json.loads(invoke("inspect", demo, "--explain", "--json", "-ub", "64").stdout)
    assert "80% of what is available" in choices["memory"]
    assert choices["micro-batch"].startswith("64 tokens: as given")
    assert choices["strategy"].startswith("auto: nothing to do, all experts fit")
    assert choices["prefetching"] == "none: all experts fit"
    with moeoff.Llama(demo, expert_memory="4M", n_ctx=256, strategy="fate") as llm:
        reasons, stats = explain(llm.engine), llm.stats()
    assert f"{stats.micro_batch} tokens: {stats.micro_batch_reason};" in reasons["micro-batch"]
    assert reasons["I/O threads"].startswith(f"{stats.io_threads} read")
    assert reasons["experts"] == "4.00 MiB in memory of 18 MiB"
    assert reasons["strategy"].startswith("fate: ")
    assert reasons["prefetching"] == "by gate"
    server = moeoff.Server(
        demo, port=0, expert_memory="4M", n_ctx=256, parallel=2, kv_disk=0
    ).explain()
    assert reasons.keys() < server.keys()
    assert server["slots"].startswith("answers at a time: 2,")
    assert server["on disk"].startswith("none")
    assert choices["serve"].keys() == {
        "memory",
        "context",
        "slots",
        "prompt cache",
        "on disk",
    }
    assert choices["serve"]["slots"].startswith("answers at a time: 4,")


def test_numbers_are_those_of_the_loaded_model(demo):
    plan = dry_load(ModelIndex.read(demo), 1000)
    with moeoff.Llama(demo, expert_memory="1G", n_ctx=1000) as llm:
        assert plan.arena_floor == llm.engine.buffer.arena_floor
        assert plan.arena_full == llm.engine.buffer.arena_full
        assert (plan.weights, plan.state) == (memory_sizes(llm).weights, memory_sizes(llm).state)


def test_each_budget_keeps_more(demo):
    report = examine(demo, probe_disk=False)
    shares = [(row.resident_share, row.full_resident_share) for row in report.budgets]
    assert shares == sorted(set(shares)) and all(full <= short for short, full in shares)
    assert report.budgets[0].memory_bytes - report.floor_bytes < MIB
    assert report.budgets[-1].resident_share == 1


def test_every_command_names_the_same_needs(demo, moeoff_command):
    """The number that inspect says is the one that doctor and refusals say, of the same
    context, and it is enough.
    """
    # a process that compiles what it imports is larger
    compileall.compile_dir(Path(moeoff.__file__).parent, quiet=1)
    needed = (
        json.loads(moeoff_command("inspect", demo, "--json", "--probe", "off").stdout)[
            "floor_bytes"
        ]
        // MIB
    )
    assert f"needs {needed} MiB at a context of 256" in moeoff_command("doctor", "-m", demo).stdout
    asked = ("-m", demo, "--memory", f"{needed - 1}M", "-n", "8")
    for command in (("run", *asked, "-p", "x"), ("bench", *asked, "-p", "8", "-r", "1")):
        done = moeoff_command(*command)
        text = " ".join((done.stdout + done.stderr).split())
        assert (
            f"this model needs {needed} MiB" in text
            and "at 256 tokens" in text
            and done.returncode == 1
        ), text
    done = moeoff_command("run", "-m", demo, "--memory", f"{needed}M", "-n", "8", "-p", "x")
    assert done.returncode == 0 and "| context 256 | memory" in done.stderr, done.stderr


def test_bench_has_the_context_of_a_run(demo):
    grids = [Grid(Job(demo, tests=(BenchTest(n, 0),)), {}) for n in (300, 8)]
    assert [grid.n_ctx for grid in grids] == [512, 256]


def test_speed():
    assert speed(0, 1e6, 0.25) == 4
    assert speed(1000, 1e6, 1e-6) == pytest.approx(1000, rel=0.01) and speed(1000, 1e6, 0.01) < 100
    assert speed(100, 1e6, 1e-3) > speed(900, 1e6, 1e-3)


def _cells(name, table):
    result = next(t for t in results.read(name)["tables"] if t["name"] == table)
    for row in result["rows"]:
        yield (
            row[0],
            {
                column: float(number[0])
                for column, cell in zip(result["columns"], row)
                if (number := re.match(r"[\d.]+", cell))
            },
        )


def test_speeds_that_were_measured_are_told_from_their_bytes():
    """Speeds of docs/results follow from the bytes that a token read, the disk's rate
    and the time with everything in memory.
    """
    checked = 0
    rows = dict(_cells("time", "ceiling"))
    for row in rows.values():
        told = speed(1.0, row["disk / bytes missed"], 1 / row["in memory"])
        assert told == pytest.approx(row["reached"], rel=0.25)
        checked += 1
    assert checked == 3


def test_misses_that_were_measured_are_told_from_the_share():
    """Misses of docs/results: replays of the demo model's text, and of published
    models' answers, whose first uses of an expert are misses, too.
    """
    for name, table, strategy, choice in (("cache-policies", None, "score", 8), ("published-traces", "qwen3-30b-a3b", "score", 128 / 8),
                                          ("published-traces", "gemma-4-26b-a4b", "score", 128 / 8)):  # fmt: skip
        for result in (t for t in results.read(name)["tables"] if table in (None, t["name"])):
            row = next((row for row in result["rows"] if row[0].startswith(strategy)), None)
            for column, cell in zip(result["columns"][1:], row[1:] if row else ()):
                missed = 1 - float(re.match(r"[\d.]+", cell)[0]) / 100
                assert expected_bytes(1.0, float(column.split()[0]) / 100, choice) == pytest.approx(
                    missed, abs=0.09
                ), (result["name"], column)


def test_one_budget(demo, invoke):
    """It has a row of its own; of one below the needs what those are."""
    done = invoke("inspect", demo, "--memory", "6G", "--probe", "off")
    assert re.findall(r"^(\d+)M +100% +100%$", done.stdout, re.MULTILINE)[-1] == "6144", done.stdout
    done = invoke("inspect", demo, "--memory", "50M", "--probe", "off")
    assert re.search(r"50M  +does not fit", done.stdout) and re.search(
        r"50 MiB is too small at a context of 256: needs \d+ MiB", done.stdout
    ), done.stdout


@pytest.mark.cgroup
@pytest.mark.skipif(cgroup.unavailable() is not None, reason=str(cgroup.unavailable()))
def test_a_disk_with_a_bound_is_told_with_it(demo):
    with disk_cgroup(demo, 8 * MIB) as group:
        done = group.run(
            [sys.executable, "-m", "moeoff.cli", "inspect", demo, "--json"],
            capture_output=True,
            text=True,
        )
    assert json.loads(done.stdout)["disk"]["bytes_per_second"] == pytest.approx(8 * MIB, rel=0.3), (
        done.stderr
    )


@pytest.mark.slow
@pytest.mark.perf
def test_speeds_are_those_of_a_run(moeoff_command, tmp_path):
    """On this machine's disk, within a quarter: a model of 1.6 GiB with two thirds, two
    fifths and a fifth of its experts in memory, as inspect says.
    """
    from gguf import GGMLQuantizationType

    model = tmp_path / "grown.gguf"
    grow_model(DEMO, model, Growth(16, 16, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q8_0))
    for budget in ("1330M", "1045M", "760M"):
        report = moeoff_command("inspect", str(model), "--memory", budget, "--json")
        told = next(row for row in json.loads(report.stdout)["budgets"] if row["asked"])
        done = moeoff_command(
            "bench",
            str(model),
            "--memory",
            budget,
            *"-p 0 -n 96 -r 3 -o json --text".split(),
            str(PROSE),
        )
        (row,) = json.loads(done.stdout)
        assert told["tps"] == pytest.approx(row["avg_ts"], rel=0.25), (budget, done.stdout)
        assert told["resident_share"] == pytest.approx(
            int(re.search(r"(\d+)% of the experts fit", row["mode"])[1]) / 100, abs=0.03
        )


def test_probe(demo):
    report = examine(demo)
    # it reads for two seconds
    assert report.disk.bytes_per_second > 0 and report.disk.seconds > 1.5
    assert report.disk.block_bytes >= max(kind.nbytes for kind in report.slices)
    assert report.compute_seconds > 0
    assert all(a.tps <= b.tps for a, b in itertools.pairwise(report.budgets))
    assert report.attention_seconds > 0 and all(row.full_tps < row.tps for row in report.budgets)


def test_attention_is_timed_over_the_whole_context(demo):
    index = ModelIndex.read(demo)
    short, long = (
        compute_probe.attention_seconds(index, n_ctx, {"flash_attn": True}, 1, 0.1)
        for n_ctx in (1024, 16384)
    )
    assert 4 * short < long
    # other ops than flash attention's
    assert compute_probe.attention_seconds(index, 1024, {}, 1, 0.0) is None


def test_a_full_context_lends_the_experts_nothing(grown):
    report = examine(grown, ctx_size=1024, probe_disk=False)
    bounded = [row for row in report.budgets if row.resident_share < 1]
    assert len(bounded) >= 2
    for row in bounded:
        lent = (row.resident_share - row.full_resident_share) * report.arena_full_bytes
        # all but a short conversation's
        assert lent == pytest.approx(report.kv_bytes * (1024 - 192) / 1024, rel=0.02), row


def test_computing_is_reckoned_type_by_type(demo, monkeypatch):
    """Each type of weights at its own rate, whatever share of a model's first layers it
    has: attention in Q8_0 is twice as quick as experts in MXFP4.
    """
    rates, shown = {"fast": 4e9, "slow": 1e9}, {}

    def times(groups, _n_tokens, _n_threads, _seconds):
        shown.update((products[0][0], sum(size for *_, size in products)) for products in groups)
        return [shown[products[0][0]] / rates[products[0][0]] for products in groups]

    monkeypatch.setattr(
        compute_probe,
        "_products",
        lambda _: [("fast", 1, 1, 1 << 22)] * 512 + [("slow", 1, 1, 1 << 20)] * 999,
    )
    monkeypatch.setattr(compute_probe, "_times", times)
    assert compute_probe.token_seconds(ModelIndex.read(demo), 1, 0.0) == pytest.approx(
        (512 << 22) / 4e9 + (999 << 20) / 1e9
    )
    assert sum(shown.values()) <= compute_probe._uncached_bytes()


def test_what_is_timed_lies_in_the_middle_of_a_model(demo):
    """The first layers of some are dense, and wide."""
    index = ModelIndex.read(demo)
    odd = {
        name: replace(span, type=-1) if name.startswith(("blk.0.", "blk.11.")) else span
        for name, span in (index.dense | index.experts).items()
    }
    index = replace(
        index,
        dense={n: s for n, s in odd.items() if n in index.dense},
        experts={n: s for n, s in odd.items() if n in index.experts},
    )
    kinds = [kind for kind, *_ in compute_probe._products(index)]
    assert -1 in kinds and -1 not in kinds[: len(kinds) * 3 // 4]


def test_split(demo, tmp_path, invoke):
    from helpers.models import split_model

    parts = split_model(demo, tmp_path, 3)
    split = json.loads(invoke("inspect", str(parts[0]), "--json", "--probe", "off").stdout)
    whole = json.loads(invoke("inspect", demo, "--json", "--probe", "off").stdout)
    assert len(split["files"]) == 3
    same = set(whole) - {"files", "budgets", "process_bytes", "floor_bytes", "available_bytes"}
    assert {key: split[key] for key in same} == {key: whole[key] for key in same}
