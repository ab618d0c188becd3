"""Rerouting: what it costs in quality, what it spares, and what becomes of answers and of text that is written freely.

usage: bench_rerouting.py cache   -m MODEL --text FILE [--share 0.05 ...] [--resident 0.25 ...]
       bench_rerouting.py live    -m MODEL --text FILE --memory 1045M,760M [--share 0.05 ...] [--max-loss 1%] [--disk MB/S]
       bench_rerouting.py simulator -m MODEL --text FILE [--share 0.05 ...] [--resident 0.25 ...]
       bench_rerouting.py answers -m MODEL --questions FILE.jsonl [--share 0.05 ...]
       bench_rerouting.py free    -m MODEL --text FILE [--share 0.05 ...]

cache: behind a simulated cache, in batches, as calibrate prices it. live: token by token, cold, with what is resident in truth; the rules in turn, each with
the model opened anew; --disk slows the disk (root). simulator: what `moeoff simulate --reroute` finds on a lossless trace, beside what a run reads. answers: greedy answers to questions with a number at their end, behind a simulated cache that holds half. free:
text drawn at temperature 1 behind the same cache, and what the lossless model thinks of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import Console

from cgroup import disk_cgroup
from moeoff import Llama
from moeoff.budget.precision import Precision
from moeoff.budget.statistics import interval
from moeoff.calibrate.drift import lost, score, write_freely
from moeoff.calibrate.perplexity import Reference, evaluate, open_model, read_windows
from moeoff.calibrate.rerouting_search import ReroutingEvaluator
from moeoff.companion.file import KEEP
from moeoff.gguf.layout import Layout
from moeoff.memory import format_size, parse_size
from moeoff.simulate.rerouting import Rerouting
from moeoff.simulate.simulator import simulate
from moeoff.simulate.trace import Trace
from results_file import HELP, ResultsFile
from timing import drop_from_page_cache

MODEL = click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
TEXT = click.option("--text", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False))
SHARE = click.option("--share", "shares", multiple=True, type=float, default=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3), show_default=True, help="λ.")
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
WINDOWS = click.option("--windows", default=32, show_default=True, help="Of each text.")
REROUTES = Precision(reroute=1.0, resident=1.0)  # opens a model that can
QUALITY = ["loss (95 %)", "KL", "same top"]
console = Console(stderr=True)


@click.group()
def main() -> None:
    """See the top of the file."""


def ctx_of(model: str) -> int:
    return min(512, Layout.read(model).n_ctx_train or 512)


@contextlib.contextmanager
def slowed(model: str, disk: int | None) -> Iterator[None]:
    """This process reads the model no faster than so many MB/s."""
    if disk is None:
        yield
        return
    with disk_cgroup(model, disk * 10**6) as group:
        group.enter()
        yield


def quality(q) -> list[str]:
    return [interval(q.loss, "{:+.2%}"), f"{q.kl.value:.4f}", f"{q.top1.value:.1%}"]


@main.command()
@MODEL
@TEXT
@SHARE
@click.option("--skip", "skips", multiple=True, type=float, default=(1.0,), show_default=True, help="T: what lies beyond it is skipped if it is absent.")
@click.option("--resident", multiple=True, type=float, default=(0.25, 0.5, 0.75), show_default=True)
@WINDOWS
@JSON
def cache(
    model: str, text: Sequence[str], shares: Sequence[float], skips: Sequence[float], resident: Sequence[float], windows: int, json_file: str | None
) -> None:
    ctx = ctx_of(model)
    with open_model(model, ctx, precision=REROUTES, deterministic=True, flash_attn=True, profile=False) as llm, ResultsFile(json_file) as results:
        evaluator = ReroutingEvaluator(llm, read_windows(llm, text, ctx, windows), KEEP, 1.0)
        with evaluator.reference() as reference:
            for share in resident:
                columns = ["λ", "T", "misses, of lossless", "rerouted", "skipped", *QUALITY]
                table = results.table(f"cache-{share:g}", f"{share:.0%} of each layer's experts in a simulated cache", columns)
                for reroute, skip in itertools.product(shares, skips):
                    c = evaluator.measure(reference, reroute, skip, skip, share)
                    table.row(f"{reroute:g}", f"{skip:g}", f"{c.cost:.2f}", f"{c.rerouted:.1%}", f"{c.skipped:.1%}", *quality(c))


@main.command()
@MODEL
@TEXT
@click.option("--memory", required=True)
@SHARE
@click.option("--max-loss", help="Also what the model's contract finds within this.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--windows", default=8, show_default=True, help="Of each text.")
@click.option("--disk", type=int, metavar="MB/S", help="No faster than this.")
@JSON
def live(model: str, text: Sequence[str], memory: str, shares: Sequence[float], max_loss: str | None, rounds: int, windows: int, disk: int | None,
         json_file: str | None) -> None:  # fmt: skip
    ctx = ctx_of(model)
    rules: dict[str, dict] = {"lossless": {}} | {f"λ {share:g}": {"precision": Precision(reroute=share)} for share in shares}
    if max_loss:
        rules[f"--max-loss {max_loss}"] = {"max_loss": max_loss}
    common = {"flash_attn": True, "n_batch": ctx, "n_ubatch": ctx}
    with open_model(model, ctx, profile=False, **common) as llm:
        parts = read_windows(llm, text, ctx, windows)
        reference = Reference.record(llm, parts, "decode")
    with reference, ResultsFile(json_file) as results, slowed(model, disk):
        for budget in map(parse_size, memory.split(",")):
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in rules}
            last = {}
            for index in range(rounds):
                for name, options in rules.items():
                    console.print(f"{format_size(budget)}, round {index + 1}: {name}", style="dim")
                    drop_from_page_cache(model)
                    with open_model(model, ctx, memory=budget, **common, **options) as llm:
                        found = evaluate(llm, parts, reference, mode="decode").quality()
                        stats = llm.stats()
                    rows[name].append((stats.gen_tps, stats.bytes_read / 1e6 / (stats.prompt_tokens + stats.gen_tokens)))
                    last[name] = found, stats
            columns = ["", "tok/s", "times lossless", "MB/token", "given up", *QUALITY]
            table = results.table(f"live-{budget >> 20}", f"{format_size(budget)}, {rounds} rounds, medians", columns)
            for name, found in rows.items():
                ratios = [here[0] / there[0] for here, there in zip(found, rows["lossless"])]
                speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                numbers = [f"{statistics.median(column):.1f}" for column in zip(*found)]
                q, stats = last[name]
                given_up = stats.precision_summary.partition(" (")[0] or "nothing"
                table.row(name, numbers[0], speed, numbers[1], given_up, *quality(q))


@main.command()
@MODEL
@TEXT
@SHARE
@click.option("--resident", multiple=True, type=float, default=(0.25, 0.5, 0.75), show_default=True)
@click.option("--strategy", multiple=True, default=("lru", "score"), show_default=True)
@WINDOWS
@JSON
def simulator(model: str, text: Sequence[str], shares: Sequence[float], resident: Sequence[float], strategy: Sequence[str], windows: int,
              json_file: str | None) -> None:  # fmt: skip
    ctx = ctx_of(model)
    rules = [0.0, *shares]
    with tempfile.TemporaryDirectory() as folder, ResultsFile(json_file) as results:

        def read(arena: int, name: str, share: float, **options: Any) -> tuple[int, int]:
            """Bytes that a run reads, and how many it reroutes."""
            drop_from_page_cache(model)
            with open_model(model, ctx, expert_memory=arena, strategy=name, precision=Precision(reroute=share), profile=False, **options) as llm:
                evaluate(llm, read_windows(llm, text, ctx, windows), mode="decode")
                return llm.stats().bytes_read, llm.stats().rerouted

        path = os.path.join(folder, "trace")
        read(1 << 40, "lru", 0.0, trace=path)
        trace = Trace.read(path)
        by_logits = any(note.get("routers_choose_by") == "logits" for note in trace.notes)
        for name in strategy:
            columns = ["resident", "λ", "live: bytes, of lossless", "rerouted", "simulated: bytes, of lossless", "rerouted"]
            table = results.table(f"simulator-{name}", f"{name}, {windows} windows of {ctx} tokens of each text, half of each token by token", columns)
            for room in resident:
                arena = int(room * trace.model.full_bytes)
                live = [read(arena, name, share) for share in rules]
                simulated = [simulate(trace, name, arena, rerouting=Rerouting(share, by_logits=by_logits)) for share in rules]
                uses = sum(event.ids.size for event in trace.events if len(event.ids) == 1)
                for share, (n_bytes, n), found in zip(rules[1:], live[1:], simulated[1:]):
                    beside = [
                        f"{n_bytes / live[0][0]:.2f}",
                        f"{n / uses:.1%}",
                        f"{found.bytes_read / simulated[0].bytes_read:.2f}",
                        f"{found.rerouted / uses:.1%}",
                    ]
                    table.row(f"{room:.0%}", f"{share:g}", *beside)


@main.command()
@MODEL
@click.option("--questions", required=True, type=click.Path(exists=True, dir_okay=False), help="JSON lines with question and answer.")
@click.option("--n", default=100, show_default=True)
@SHARE
@JSON
def answers(model: str, questions: str, n: int, shares: Sequence[float], json_file: str | None) -> None:
    with open(questions, encoding="utf-8") as file:
        asked = [json.loads(line) for line in itertools.islice(file, n)]
    with Llama(model, n_ctx=512, precision=REROUTES, deterministic=True, flash_attn=True, profile=False) as llm, ResultsFile(json_file) as results:

        def number(question: str) -> str:
            prompt = f"User: {question}\nAssistant:"
            text = llm(prompt, max_tokens=512 - len(llm.tokenize(prompt.encode())) - 1, temperature=0, stop=["\nUser:"])["choices"][0]["text"]
            found = re.search(r"The answer is\s+(-?[\d,.]*\d)", text)
            return found[1].replace(",", "") if found else ""

        llm.use_precision(Precision())
        lossless = [number(item["question"]) for item in asked]
        table = results.table("answers", f"{len(asked)} questions, greedy, half of the experts in a simulated cache", ["λ", "right", "as lossless"])
        right = [item["answer"].rpartition("####")[2].strip().replace(",", "") for item in asked]
        for share in (0.0, *shares):
            llm.use_precision(Precision(reroute=share, resident=0.5))
            found = [number(item["question"]) for item in asked] if share else lossless
            table.row(f"{share:g}", *(f"{sum(a == b for a, b in zip(found, expected))}" for expected in (right, lossless)))


@main.command()
@MODEL
@TEXT
@SHARE
@click.option("--tokens", default=2048, show_default=True)
@JSON
def free(model: str, text: Sequence[str], shares: Sequence[float], tokens: int, json_file: str | None) -> None:
    ctx = ctx_of(model)
    with open_model(model, ctx, precision=REROUTES, deterministic=True, flash_attn=True, profile=False) as llm, ResultsFile(json_file) as results:
        parts = read_windows(llm, text, ctx)[:: max(len(text), 1)][: max(tokens // ctx, 2)]
        columns = ["λ", "lost on its own text (95 %)", "perplexity of the text", "bits of entropy of the experts", "rerouted", "4-grams repeated"]
        table = results.table("free", f"{len(parts)} texts of {ctx} tokens, half of the experts in a simulated cache", columns)
        for share in (0.0, *shares):
            llm.use_precision(Precision(reroute=share, resident=0.5) if share else Precision())
            written = write_freely(llm, parts)
            llm.use_precision(Precision())
            by_lossless = score(llm, written)
            perplexity = math.exp(-by_lossless.mean())
            cells = [f"{perplexity:.2f}", f"{written.entropy:.2f}", f"{written.rerouted:.1%}", f"{written.repeated:.1%}"]
            table.row(f"{share:g}", interval(lost(written, by_lossless), "{:+.2%}"), *cells)


if __name__ == "__main__":
    main()
