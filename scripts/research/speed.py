"""Measurements of the house: contenders in interleaved rounds, each run cold, in a
process of its own, on the same tokens. `moeoff bench --rounds N --cold` is the user's
form; this script adds a slow disk, rivals, given answers, meters and data files.

usage: speed.py memory  -m MODEL --text FILE [--limits 1400,1100,800] [--stock]
                        [--strategies auto --max-loss 1% --no-in-memory] [--answer]
                        [--rival bmoe-cli]                real-sizes.md (root)
       speed.py kernels -m MODEL --text FILE [--stock-library FOLDER]
                                                          kernels.md
       speed.py depths  -m MODEL --text FILE [--depths 0,4096] [--limit 6656]
                        [--no-in-memory] [--no-repack]    long-contexts.md (root)
       speed.py time    -m MODEL --text FILE [--limits 1400,1100,800] [--answer]
                                                          time.md (root)
       speed.py before  -m MODEL --text FILE --checkout FOLDER [--limits 1400,1100,0]
                                                          against an earlier one (root)

A run is a `moeoff.measure.job.Job`: a prompt in one piece, then tokens one by one. A
model on tmpfs stays in memory. --disk bounds the disk's rate (root). A profile of
`moeoff calibrate` beside the model is used. Ratios are to the first contender of the
same group.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]

from cgroup import disk_cgroup
from moeoff.budget.dry_load import dry_load
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp.llama import StockLlama
from moeoff.measure.job import (
    STOCK,
    BenchTest,
    Job,
    Measurement,
    Sample,
    TokenStream,
    rates,
    read_text_or_default,
)
from moeoff.measure.rounds import Spread, interleaved, ratios_of
from moeoff.measure.rows import rows
from moeoff.measure.run import KILLED_TEXT, drop_files, measure
from moeoff.system.cgroup import memory_cgroup
from moeoff.system.console import note
from moeoff.system.machine import n_cores
from results import HELP, ResultsFile, machine, spread
from time_parts import Ceiling, other_parts, read_parts, token_parts

BASELINES = str(ROOT / "scripts" / "papers" / "baselines.py")
BESIDE = "time_parts.py", "ggml_attention.py"
METER, GGML_ATTENTION = (str(Path(__file__).with_name(name)) for name in BESIDE)
EVERYTHING = 1 << 40  # expert_memory that holds all
IN_MEMORY = "all in memory"  # a group of contenders
TIMEOUT = 900.0  # seconds of a run
PEAK, SHARE = "peak_rss_bytes", "resident_share"  # of a process, at its end
RIVAL = "BigMoeOnEdge"
RIVAL_OPTIONS = "--overlap --io-threads 4 --dense-weights anon"  # lossless, as its pages advise
RIVAL_LANES = 4  # of RIVAL_OPTIONS
RIVAL_PROCESS = 16 << 20  # bytes beside weights, KV cache and computing
PLAIN_MAP = "stock, memory map, plain kernels"
THRASHES = 300.0  # of stock llama.cpp in a memory limit, where it may never end
COLUMNS = {
    "experts in memory": (SHARE, "{:.0%}"),
    "hits": ("hit_rate", "{:.0%}"),
    "MB/token": ("mb_per_token", "{:.1f}"),
    "stall": ("stall_share", "{:.0%}"),
    "prefetched/token": ("prefetched_per_token", "{:.1f}"),
    "of these used": ("prefetch_precision", "{:.0%}"),
    "of those in time": ("in_time", "{:.0%}"),
    "served low": ("low", "{:.1%}"),
    "skipped": ("skipped", "{:.1%}"),
    "CPU ms/token": ("cpu_ms_per_token", "{:.1f}"),
    "driver ms": ("driver_ms_per_token", "{:.2f}"),
}


# rounds


def prompt_then_tokens(n_prompt: int, n_gen: int, depth: int = 0) -> tuple[BenchTest, BenchTest]:
    """Return the tests of a prompt and of the answer after it, at an untimed context
    depth of `depth` tokens.
    """
    return BenchTest(n_prompt, 0, depth), BenchTest(0, n_gen, depth + n_prompt, continues=True)


@dataclass(frozen=True)
class Comparison:
    """A job's test over the rounds that ended.

    Attributes:
        figures: Figures of `rates` and `in_time`, and PEAK and SHARE of the process.
        ratio: Speed over that of the first job in the same round; None if no round has
            both.
        error: Reason of a round that did not end, or "".
    """

    name: str
    test: BenchTest
    figures: dict[str, Spread]
    ratio: Spread | None
    error: str
    measurements: list[Measurement]


Turn = Callable[[int], Measurement]  # of a round, from 0


Name = TypeVar("Name", str, tuple[str, str])


def rounds_of(turns: Mapping[Name, Turn], rounds: int) -> dict[Name, list[Measurement]]:
    """Measure all contenders in each round; the others go on if one fails."""
    measured: dict[Name, list[Measurement]] = {name: [] for name in turns}
    for index, name in interleaved(turns, rounds):
        measured[name].append(turns[name](index))
        tell(name if isinstance(name, str) else ", ".join(name), index, measured[name][-1])
    return measured


def take_turns(turns: Mapping[str, Turn], rounds: int) -> list[Comparison]:
    return summarize(rounds_of(turns, rounds))


def unless_failed(turn: Turn) -> Turn:
    """Return a turn that is not tried again once it has failed."""
    failed: list[Measurement] = []

    def again(index: int) -> Measurement:
        if not failed and (result := turn(index)).error:
            failed.append(result)
        return failed[0] if failed else result

    return again


def in_time(samples: Sequence[Sample]) -> dict[str, float]:
    """in_time: of the prefetched slices that were used, the share that compute did not
    wait for; where a meter has counted reads.
    """
    useful = sum(s.counters.get("prefetch_useful", 0) for s in samples)
    if not useful or not all(s.parts for s in samples):
        return {}
    return {
        "in_time": max(
            1 - sum(s.parts.get("reads_waited_prefetch", 0) for s in samples) / useful, 0.0
        )
    }


def summarize(by_name: Mapping[str, list[Measurement]]) -> list[Comparison]:
    """Return a comparison for each test of each contender, measured in the same
    rounds.
    """
    first = next(iter(by_name.values()), [])
    out = []
    for name, measurements in by_name.items():
        for i, test in enumerate(measurements[0].job.tests):
            of_rounds = [
                rates(m.of(i))
                | in_time(m.of(i))
                | {key: m.closed[key] for key in (PEAK, SHARE) if m.closed.get(key)}
                for m in measurements
                if not m.error
            ]
            figures = {
                key: Spread.over([row[key] for row in of_rounds if key in row])
                for key in dict.fromkeys(itertools.chain(*of_rounds))
            }
            ratios = ratios_of(first, measurements, i)
            error = next((m.error for m in measurements if m.error), "")
            out.append(
                Comparison(
                    name,
                    test,
                    figures,
                    Spread.over(ratios) if ratios else None,
                    error,
                    measurements,
                )
            )
    return out


def drop(job: Job) -> None:
    """Drop a job's files from the page cache, and report what stayed."""
    for remark in drop_files(job):
        note(remark)


def cold(job: Job, timeout: float) -> Turn:
    """Return a turn in a process of its own, with a cold page cache.

    Args:
        timeout: Seconds after which the run has failed.
    """

    def turn(_index: int) -> Measurement:
        drop(job)
        return measure(job, timeout=timeout)

    return turn


# the driver


def tell(name: str, index: int, result: Measurement) -> None:
    text = result.error or ", ".join(
        f"{test.name} {rates(result.of(i)).get('tps', 0):.2f} tok/s"
        for i, test in enumerate(result.job.tests)
    )
    Console(stderr=True).print(f"round {index + 1}: {name}: {text}", style="dim")


def table(
    results: ResultsFile, name: str, title: str, groups: Mapping[str, Sequence[Comparison]]
) -> None:
    """Write a row for each contender of each group: speeds with their range, ratios to
    the group's first contender, and medians of reads and waits.
    """
    head = [
        "",
        "contender",
        "prompt tok/s",
        "ratio",
        "of max(computing, reading)",
        "tok/s",
        "ratio ",
        *COLUMNS,
        "of ceiling",
        "peak RSS, MiB",
        "rounds",
    ]
    lines = []
    whole = in_memory_speed(groups)
    for group, comparisons in groups.items():
        contenders: dict[str, list[Comparison]] = {}
        for comparison in comparisons:
            contenders.setdefault(comparison.name, []).append(comparison)
        for i, (prompt, decode) in enumerate(contenders.values()):
            if not decode.figures:
                lines.append([group, decode.name, decode.error, *[""] * (len(head) - 3)])
                continue
            overlaps = [
                share
                for m in prompt.measurements
                if not m.error
                and m.closed.get("disk_bytes_per_second")
                and (share := rows(m, 0)[0]["ceiling_share"])
            ]
            cells = [
                spread(prompt.figures["tps"]),
                spread(prompt.ratio) if i and prompt.ratio else "",
                f"{statistics.median(overlaps):.0%}" if overlaps else "",
            ]
            cells += [
                spread(decode.figures["tps"]),
                spread(decode.ratio) if i and decode.ratio else "",
            ]
            cells += [
                form.format(decode.figures[key].median) if key in decode.figures else ""
                for key, form in COLUMNS.values()
            ]
            ceilings = [
                share
                for m in decode.measurements
                if not m.error and (share := ceiling(m, whole)) is not None
            ]
            cells.append(f"{statistics.median(ceilings):.0%}" if ceilings else "")
            peak = decode.figures.get(PEAK)
            cells.append(spread([size / 2**20 for size in peak], "{:.0f}") if peak else "")
            failed = sum(bool(m.error) for m in decode.measurements)
            cells.append(str(len(decode.measurements) - failed) if failed else "")
            lines.append([group, decode.name, *cells])
    told = [i for i in range(len(head)) if any(line[i] not in ("", "0.0%") for line in lines)]
    out = results.table(name, title, [head[i].strip() for i in told])
    for line in lines:
        out.row(*(line[i] for i in told))


def in_memory_speed(groups: Mapping[str, Sequence[Comparison]]) -> float | None:
    """Return tokens per second with everything in memory, None if not measured."""
    return next(
        (
            c.figures["tps"].median
            for c in groups.get(IN_MEMORY, ())
            if c.test.n_gen and c.figures and not is_stock(c)
        ),
        None,
    )


def ceiling(result: Measurement, in_memory: float | None) -> float | None:
    """Return the share of the ceiling that was reached, None without the disk's rate.

    The ceiling is the lower one of the speed in memory and the disk's rate over the
    missed bytes; without a speed in memory, max(computing, reading).
    """
    disk = result.closed.get("disk_bytes_per_second")
    if not disk:
        return None
    return (
        rows(result, 0)[1]["ceiling_share"]
        if in_memory is None
        else Ceiling.of(result.of(1), in_memory, disk).reached
    )


@dataclass
class Bench:
    """A command's model, text and sizes; `job` makes its contenders.

    Attributes:
        answer: what all decode in the place of the text (`Job`).
        depth: tokens before the prompt.
    """

    model: str
    text: str
    n_prompt: int
    n_decode: int
    rounds: int = 5
    probe_seconds: float = 0.0
    answer: tuple[int, ...] | None = None
    depth: int = 0

    def job(self, limit: int | None = None, **options: Any) -> Job:
        """`moeoff.Llama` with these options, in a memory cgroup of `limit` bytes."""
        n_ctx = max(1024, self.depth + self.n_prompt + self.n_decode)
        options = {
            "n_ctx": n_ctx,
            "flash_attn": True,
            "n_threads": n_cores(),
            "n_threads_batch": n_cores(),
        } | options
        tests = prompt_then_tokens(self.n_prompt, self.n_decode, self.depth)
        return Job(
            self.model,
            options=options,
            tests=tests,
            repetitions=1,
            warm_up=False,
            text=self.text,
            answer=self.answer,
            probe_seconds=self.probe_seconds,
            limit_bytes=limit,
            registers=(BASELINES,),
        )

    def stock(self, limit: int | None = None, **options: Any) -> Job:
        return replace(self.job(limit, **options), engine=STOCK, probe_seconds=0.0)

    def turns(self, jobs: Mapping[str, Job], timeout: float = TIMEOUT) -> dict[str, Turn]:
        return {name: cold(job, timeout) for name, job in jobs.items()}

    def compare(self, jobs: Mapping[str, Job], timeout: float = TIMEOUT) -> list[Comparison]:
        return take_turns(self.turns(jobs, timeout), self.rounds)

    def prompt(self) -> str:
        """Return the prompt for a program that tokenizes it itself."""
        llm = StockLlama(self.model, vocab_only=True, verbose=False)
        n, bos = self.n_prompt, llm.adds_bos()
        tokens = TokenStream(llm, read_text_or_default(self.text), bos).take(n, first=True)
        while llm.tokenize(text := llm.detokenize(tokens[bos:n]), add_bos=bos) != tokens[:n]:
            n -= 1
        if n < self.n_prompt:  # the last ones are a part of a character or of a longer token
            raise click.ClickException(
                f"{self.text}: expected {self.n_prompt} tokens that other programs find in their"
                f" text, got {n}; use --n-prompt {n}"
            )
        return text.decode()

    def answering(self, limit: int) -> Bench:
        """Return a bench whose contenders decode the model's own greedy answer.

        An uncounted run in a memory cgroup finds the answer. Contenders that are not
        bit-identical then still decode the same tokens.
        """
        job = replace(
            self.job(limit << 20, memory=within(limit), strategy="lru"),
            tests=prompt_then_tokens(self.n_prompt, self.n_decode),
            answer=(),
        )
        drop(job)
        result = measure(replace(job, probe_seconds=0.0), timeout=TIMEOUT)
        if result.error:
            raise click.ClickException(
                f"the answer that all are to decode was not found: {result.error}"
            )
        return replace(self, answer=tuple(result.closed["answer"]))


def metered(job: Job) -> Job:
    return replace(job, registers=(*job.registers, METER), meter="time_parts:TimeMeter")


def within(limit: int) -> int:
    """--memory in a cgroup of so many MiB."""
    return int(limit * 0.95) << 20


@click.group(help=__doc__)
def main() -> None:
    pass


Tables = Callable[[ResultsFile, Mapping[str, Sequence[Comparison]]], None]


def workload(
    title: str,
    n_prompt: int = 64,
    n_decode: int = 128,
    probe_seconds: float = 0.0,
    options: Sequence[Any] = (),
    more_tables: Tables | None = None,
) -> Callable[..., Any]:
    """Make a command of a function that compares contenders and returns the comparisons
    by group.
    """

    def decorate(run: Callable[..., Mapping[str, Sequence[Comparison]]]) -> click.Command:
        def command(
            model: str,
            text: str,
            rounds: int,
            n_prompt: int,
            n_decode: int,
            disk: int | None,
            json_file: str | None,
            **more: Any,
        ) -> None:
            context, slowed = click.get_current_context(), ""
            if disk:
                context.with_resource(disk_cgroup(model, disk * 10**6)).enter()
                slowed += f", disk {disk} MB/s"
            print(f"{machine()}; {n_prompt} + {n_decode} tokens, {rounds} rounds{slowed}")
            groups = run(Bench(model, text, n_prompt, n_decode, rounds, probe_seconds), **more)
            with ResultsFile(json_file) as results:
                table(results, run.__name__, title, groups)
                if more_tables is not None:
                    more_tables(results, groups)

        common = [
            click.option(
                "-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False)
            ),
            click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False)),
            click.option("--rounds", default=5, show_default=True),
            click.option("--n-prompt", default=n_prompt, show_default=True),
            click.option("--n-decode", default=n_decode, show_default=True),
            click.option("--disk", type=int, metavar="MB/S", help="No faster than this."),
            click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP),
        ]
        for option in [*common, *options][::-1]:
            command = option(command)
        return main.command(run.__name__, help=run.__doc__)(command)

    return decorate


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


ANSWER = click.option(
    "--answer",
    is_flag=True,
    help="All decode the model's own greedy answer to the text's beginning, not the text.",
)
LIMITS = click.option(
    "--limits",
    default="1400,1100,800",
    show_default=True,
    help="MiB of memory cgroups; --memory is 5 % below.",
)


# the contenders


def shares(results: ResultsFile, groups: Mapping[str, Sequence[Comparison]]) -> None:
    """Write the last strategy's decode speed over others' of the same round."""
    decodes = {
        (group, RIVAL if is_rival(c) else c.name): c.measurements
        for group, comparisons in groups.items()
        for c in comparisons
        if c.test.n_gen
    }
    others = {
        "of moeoff in memory": (IN_MEMORY, "lru"),
        "of llama.cpp in memory": (IN_MEMORY, "stock, repacked kernels"),
        "of --no-repack in memory": (IN_MEMORY, "stock, plain kernels"),
        "times llama.cpp's memory map": (None, PLAIN_MAP),
        f"times {RIVAL}": (None, RIVAL),
        "times lru": (None, "lru"),
    }
    out = results.table("shares", "Decode speed over others'", ["memory", "", *others])
    for group in (group for group in groups if group != IN_MEMORY):
        name = next(c.name for c in reversed(groups[group]) if not is_rival(c) and not is_stock(c))
        cells = []
        for where, other in others.values():
            theirs = decodes.get((where or group, other), [])
            ratios = ratios_of(theirs, decodes[group, name], 1)
            cells.append(spread(Spread.over(ratios)) if ratios else "")
        out.row(group, name, *cells)


def is_stock(comparison: Comparison) -> bool:
    return comparison.measurements[0].job.engine == STOCK


def is_rival(comparison: Comparison) -> bool:
    return comparison.name.startswith(RIVAL)


@workload(
    "Decode speed in memory limits",
    64,
    256,
    1.0,
    [
        LIMITS,
        click.option("--strategies", default="lru,auto", show_default=True),
        click.option(
            "--max-loss",
            metavar="PERCENT",
            help="Also the last strategy within this bound, which calibrate --max-loss measured.",
        ),
        click.option(
            "--stock",
            is_flag=True,
            help="Stock llama.cpp in the cgroups, too: it thrashes, and decodes 8 tokens.",
        ),
        click.option(
            "--rival",
            type=click.Path(exists=True, dir_okay=False),
            help="BigMoeOnEdge's bmoe-cli, too; all decode the model's own answer.",
        ),
        ANSWER,
        click.option(
            "--in-memory/--no-in-memory",
            default=True,
            help="Also with everything in memory, and stock likewise.",
        ),
    ],
    shares,
)
def memory(
    bench: Bench,
    limits: str,
    strategies: str,
    max_loss: str | None,
    stock: bool,
    rival: str | None,
    answer: bool,
    in_memory: bool,
) -> dict[str, list[Comparison]]:
    """Measure in memory cgroups, and in memory beside stock llama.cpp."""
    if answer or rival:
        bench = bench.answering(max(numbers(limits)))
    groups, short = dict[str, dict[str, Turn]](), replace(bench, n_decode=8)
    for limit in numbers(limits):
        names = strategies.split(",")
        jobs = {name: bench.job(limit << 20, memory=within(limit), strategy=name) for name in names}
        if max_loss:
            jobs[f"{names[-1]}, --max-loss {max_loss}"] = replace(
                jobs[names[-1]], options={**jobs[names[-1]].options, "max_loss": max_loss}
            )
        turns = bench.turns(jobs)
        if rival:
            turns |= rival_turn(bench, rival, limit)
        if stock:
            maps = {
                "stock, memory map": short.stock(limit << 20, use_mmap=True),
                PLAIN_MAP: short.stock(limit << 20, use_mmap=True, use_extra_bufts=False),
            }
            turns |= {
                name: unless_failed(turn) for name, turn in bench.turns(maps, THRASHES).items()
            }
        groups[f"{limit} MiB"] = turns
    if in_memory:
        jobs = {
            "stock, plain kernels": bench.stock(use_mmap=False, use_extra_bufts=False),
            "stock, repacked kernels": bench.stock(use_mmap=False),
            "lru": bench.job(expert_memory=EVERYTHING, strategy="lru"),
        }
        groups[IN_MEMORY] = bench.turns(jobs)
    measured = rounds_of(
        {(group, name): turn for group, turns in groups.items() for name, turn in turns.items()},
        bench.rounds,
    )
    return {
        group: summarize({name: measured[group, name] for name in turns})
        for group, turns in groups.items()
    }


@workload(
    "Everything in memory, a prompt and then tokens one by one",
    512,
    128,
    options=[
        click.option(
            "--stock-library",
            type=click.Path(exists=True, file_okay=False),
            metavar="FOLDER",
            help="Stock's libraries, of a checkout without patches to ggml's kernels.",
        )
    ],
)
def kernels(bench: Bench, stock_library: str | None) -> dict[str, list[Comparison]]:
    """Compare stock llama.cpp's plain and default kernels with ours, which are
    bit-identical to the plain ones.
    """
    library = {"LLAMA_CPP_LIB_PATH": stock_library} if stock_library else {}
    jobs = {
        "stock, plain kernels": bench.stock(use_mmap=False, use_extra_bufts=False),
        "stock, repacked kernels": bench.stock(use_mmap=False),
    }
    jobs = {name: replace(job, environment=library) for name, job in jobs.items()}
    return {"": bench.compare(jobs | {"moeoff": bench.job(expert_memory=EVERYTHING)})}


@workload(
    "A prompt, and then tokens one by one, behind others",
    512,
    32,
    options=[
        click.option(
            "--depths",
            default="0,1024,4096,16384",
            show_default=True,
            help="Tokens that they are behind.",
        ),
        click.option(
            "--limit",
            type=int,
            metavar="MIB",
            help="Also in a memory cgroup; --memory is 5 % below.",
        ),
        click.option("--in-memory/--no-in-memory", default=True, help="With everything in memory."),
        click.option(
            "--no-repack",
            is_flag=True,
            help="Stock keeps the weights' layout: with AMX and MLA models it aborts otherwise.",
        ),
    ],
)
def depths(
    bench: Bench, depths: str, limit: int | None, in_memory: bool, no_repack: bool
) -> dict[str, list[Comparison]]:
    """Measure at context depths. In memory: stock llama.cpp with and without flash
    attention, ours bit-identical to it and with sums in f32. In a limit, with a context
    for the deepest: ours with llama.cpp's attention and with our own.
    """
    stock, out, hours = "stock, plain kernels" if no_repack else "stock", {}, 16 * TIMEOUT
    n_ctx = max(numbers(depths)) + bench.n_prompt + bench.n_decode
    for depth in numbers(depths):
        deep, jobs = replace(bench, depth=depth), dict[str, Job]()
        if in_memory:
            jobs = {
                stock: deep.stock(use_mmap=False, use_extra_bufts=not no_repack),
                f"{stock}, -fa off": deep.stock(
                    use_mmap=False, use_extra_bufts=not no_repack, flash_attn=False
                ),
                "moeoff": deep.job(expert_memory=EVERYTHING),
                "moeoff, f32": deep.job(expert_memory=EVERYTHING, attention="f32"),
            }
        if limit:
            job = deep.job(limit << 20, memory=within(limit), n_ctx=n_ctx)
            jobs["llama.cpp's attention"] = metered(
                replace(job, registers=(*job.registers, GGML_ATTENTION))
            )
            jobs[f"moeoff in {limit} MiB"] = metered(job)
        out[f"behind {depth:,}"] = deep.compare(jobs, hours)
    return out


def time_tables(results: ResultsFile, groups: Mapping[str, Sequence[Comparison]]) -> None:
    """Write a column of medians over the rounds for each group."""
    decodes = {
        group: next(c for c in comparisons if c.test.n_gen) for group, comparisons in groups.items()
    }
    samples = {
        group: [m.of(1) for m in decode.measurements if not m.error and m.of(1)]
        for group, decode in decodes.items()
    }
    samples = {group: rounds for group, rounds in samples.items() if rounds}

    def medians(
        parts: Callable[[Sequence[Sample]], Mapping[str, Any]],
    ) -> dict[str, dict[str, Any]]:
        of = {group: [parts(each) for each in rounds] for group, rounds in samples.items()}
        names = dict.fromkeys(name for rounds in of.values() for each in rounds for name in each)
        return {
            name: {
                group: [each[name] for each in rounds if name in each]
                for group, rounds in of.items()
            }
            for name in names
        }

    totals = {
        group: statistics.median(sum(token_parts(each).values()) for each in rounds)
        for group, rounds in samples.items()
    }
    out = results.table("token", "Where a token's time goes: ms, and share", ["", *samples])
    for name, values in medians(token_parts).items():
        middles = {group: statistics.median(rounds) for group, rounds in values.items()}
        out.row(name, *(f"{ms:.2f}, {ms / totals[group]:.0%}" for group, ms in middles.items()))
    out.row("a token", *(f"{total:.2f}" for total in totals.values()))
    out = results.table("beside", "Beside it, for each token: ms, and sleeps", ["", *samples])
    for name, values in medians(other_parts).items():
        out.row(name, *(f"{statistics.median(rounds):.2f}" for rounds in values.values()))
    out = results.table(
        "reads",
        "Reads of a token: number; MB; mean ms in the queue, and on the disk",
        ["", *samples],
    )
    for name, values in medians(read_parts).items():
        forms = "{:.1f}", "{:.2f} MB", "{:.2f}", "{:.2f}"
        out.row(
            name,
            *(
                "; ".join(
                    form.format(statistics.median(of)) for form, of in zip(forms, zip(*rounds))
                )
                for rounds in values.values()
            ),
        )
    out = results.table(
        "ceiling",
        "Speed and ceiling, tok/s",
        ["", "in memory", "disk / bytes missed", "ceiling", "reached", "of ceiling"],
    )
    in_memory = next(
        (
            decode.figures["tps"].median
            for group, decode in decodes.items()
            if group == IN_MEMORY and decode.figures
        ),
        None,
    )
    for group, rounds in samples.items():
        disks = [
            m.closed.get("disk_bytes_per_second")
            for m in decodes[group].measurements
            if not m.error
        ]
        if group == IN_MEMORY or in_memory is None or not all(disks):
            continue
        ceilings = [Ceiling.of(each, in_memory, disk) for each, disk in zip(rounds, disks)]
        middle = [
            statistics.median(values)
            for values in zip(
                *((c.in_memory, c.disk, min(c.in_memory, c.disk), c.tps) for c in ceilings)
            )
        ]
        out.row(
            group,
            *(f"{value:.2f}" for value in middle),
            f"{statistics.median(c.reached for c in ceilings):.0%}",
        )


@workload(
    "Decode speed in memory limits, with the meters of the tables below",
    64,
    256,
    1.0,
    [LIMITS, ANSWER, click.option("--strategy", default="auto", show_default=True)],
    more_tables=time_tables,
)
def time(bench: Bench, limits: str, strategy: str, answer: bool) -> dict[str, list[Comparison]]:
    """Measure where a token's time goes, in memory cgroups and in memory, and the share
    of the ceiling: the speed in memory, or the disk's rate over the missed bytes.
    """
    if answer:
        bench = bench.answering(max(numbers(limits)))
    jobs = {
        f"{limit} MiB": bench.job(limit << 20, memory=within(limit), strategy=strategy)
        for limit in numbers(limits)
    }
    jobs[IN_MEMORY] = bench.job(expert_memory=EVERYTHING, strategy=strategy)
    comparisons = bench.compare({name: metered(job) for name, job in jobs.items()})
    return {name: [c for c in comparisons if c.name == name] for name in jobs}


# contenders that are no plain jobs


@workload(
    "This checkout over an earlier one",
    256,
    options=[
        LIMITS,
        click.option("--strategy", default="auto", show_default=True),
        click.option(
            "--checkout",
            required=True,
            type=click.Path(exists=True, file_okay=False),
            help="The earlier one, set up with `make env`.",
        ),
    ],
)
def before(bench: Bench, limits: str, strategy: str, checkout: str) -> dict[str, list[Comparison]]:
    """`moeoff bench` of both, each with its own library, in a memory cgroup; a limit of
    0: everything in memory.
    """

    def turn(folder: str, program: str, limit: int) -> Turn:
        sizes = f"-p {bench.n_prompt} -n {bench.n_decode} -r 1 --no-warmup --strategy {strategy}"
        files = ["-m", os.path.abspath(bench.model), "--text", os.path.abspath(bench.text)]
        command = [program, "bench", *files, *sizes.split(), "-o", "json"]
        command += ["--memory", str(within(limit))] if limit else []
        return program_turn(bench, limit, command, from_rows, cwd=folder, env=clean)

    # the folder that it runs in is whose code it is
    out, clean = {}, {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    earlier, here = (
        os.path.join(os.path.abspath(checkout), ".venv/bin/moeoff"),
        os.path.join(os.path.dirname(sys.executable), "moeoff"),
    )
    for limit in numbers(limits):
        turns = {"before": turn(checkout, earlier, limit), "now": turn(str(ROOT), here, limit)}
        out[f"{limit} MiB" if limit else "all in memory"] = take_turns(turns, bench.rounds)
    return out


Reader = Callable[[Job, subprocess.CompletedProcess[str]], Measurement]


def program_turn(
    bench: Bench, limit: int, command: Sequence[str], read: Reader, **options: Any
) -> Turn:
    """Return a turn that runs another program cold, in a memory cgroup.

    Args:
        limit: Limit of the cgroup in MiB; 0 for none.
        read: Function that reads the measurement from the program's output.
        options: Keyword arguments of `subprocess.run`.
    """
    fixed = {"capture_output": True, "text": True, "errors": "replace", "timeout": TIMEOUT}

    def turn(_index: int) -> Measurement:
        drop(bench.job())
        with memory_cgroup(limit << 20 or EVERYTHING) as group:
            try:
                done = group.run(list(command), **fixed, **options)
            except subprocess.TimeoutExpired as error:
                return Measurement(bench.job(), error=f"not finished after {error.timeout:.0f} s")
        killed = done.returncode == -9
        return Measurement(bench.job(), error=KILLED_TEXT) if killed else read(bench.job(), done)

    return turn


def rival_turn(bench: Bench, program: str, limit: int) -> dict[str, Turn]:
    """Return BigMoeOnEdge's turn by its version and settings.

    BigMoeOnEdge takes the size of its cache alone: here what its other memory leaves of
    95 % of the limit. It inherits GOMP_SPINCOUNT from this process, and is no slower for it.
    """
    index, n_ctx = ModelIndex.read(bench.model), bench.job().options["n_ctx"]
    n_batch = min(bench.n_prompt, 512)
    plan = dry_load(index, n_ctx, {"flash_attn": True, "n_batch": n_batch, "n_ubatch": n_batch})
    lanes = RIVAL_LANES * max(span.slice_bytes for span in index.experts.values())
    rest = index.dense_bytes + plan.state + plan.computing + lanes + RIVAL_PROCESS
    settings = f"{RIVAL_OPTIONS} --ubatch {n_batch} --cache-mb {within(limit) - rest >> 20}"
    fixed = f"-c {n_ctx} -t {n_cores()} -n {bench.n_decode} --moe-stream --force-cache"
    command = [program, "-m", bench.model, "-p", bench.prompt(), *f"{fixed} {settings}".split()]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    turn = program_turn(bench, limit, [*command, "--csv", "/dev/stderr"], from_csv)
    return {f"{RIVAL} {version.stdout.strip()}, {settings}": turn}


def from_csv(job: Job, done: subprocess.CompletedProcess[str]) -> Measurement:
    """Read BigMoeOnEdge's metrics: a row for each decoded token, and a summary."""
    lines = done.stderr.splitlines()
    if done.returncode:
        return Measurement(job, error=lines[-1] if lines else f"exit code {done.returncode}")
    tokens = list(csv.DictReader(line for line in lines if re.match(r"step,|\d+,", line)))
    summary = dict(re.findall(r"(\w+)=(\S+)", re.search("^# summary.*", done.stderr, re.M)[0]))
    sizes = int(summary["n_prompt"]), len(tokens)
    if sizes != (job.tests[0].n_prompt, job.tests[1].n_gen):  # the end of the answer, for one
        return Measurement(job, error=f"ended after {sizes[0]} + {sizes[1]} tokens")
    ms, cpu_ms, mib = ([float(t[key]) for t in tokens] for key in ("wall_ms", "cpu_ms", "rss_mib"))
    samples = [
        Sample(0, sizes[0], float(summary["prefill_s"])),
        Sample(1, sizes[1], sum(ms) / 1e3, sum(cpu_ms) / 1e3),
    ]
    return Measurement(job, closed={PEAK: max(mib) * 2**20}, samples=samples)


def from_rows(job: Job, done: subprocess.CompletedProcess[str]) -> Measurement:
    """Read the output of `moeoff bench -o json`: a row for the prompt, and one for
    decoding.
    """
    lines = json.loads(done.stdout) if done.stdout.strip() else []
    if done.returncode:
        errors = (
            [row["error"] for row in lines if row.get("error")]
            or done.stderr.strip().splitlines()
            or [f"exit code {done.returncode}"]
        )
        return Measurement(job, error=errors[-1])
    sizes = [row["n_prompt"] + row["n_gen"] for row in lines]
    samples = [
        Sample(i, n, row["avg_ns"] / 1e9, n * row.get("cpu_ms_per_token", 0) / 1e3)
        for i, (n, row) in enumerate(zip(sizes, lines))
    ]
    return Measurement(job, closed={PEAK: lines[-1].get("peak_rss")}, samples=samples)


if __name__ == "__main__":
    main()
