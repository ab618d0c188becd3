"""The papers' claims beside ours: each figure and table that can be had on a CPU machine, its claim, our ratio, and whether it holds here.

usage: papers.py figures [-m MODEL] [--text FILE ...]     what they say of routing, from one pass over text; times nothing
       papers.py clock [-m MODEL] [--text FILE ...]       speed of their systems and baselines on a simulated disk: repeats exactly
       papers.py live -m MODEL --text FILE [--rounds 3]   the same on this machine, interleaved, each run cold in a process of its own

--quick takes few tokens: minutes become seconds, and the numbers rough. `live` wants a profile of `moeoff calibrate` beside the model.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click

from paper_figures import FIGURES, Data, popularity_curves, score_curve
from results_file import HELP, ResultsFile
from timing import machine, measure

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [str(ROOT / "tests" / "data" / name) for name in ("prose.txt", "prose-2.txt", "code.txt")]
INT4 = 18 / 34  # bytes of Q4_0 beside Q8_0


@dataclass(frozen=True)
class Ratio:
    """A claim about speed: of one strategy over another.

    Attributes:
        claim: the paper's factor, as it reports it.
        fast, slow: names of `CONTENDERS`.
    """

    paper: str
    figure: str
    what: str
    claim: str
    fast: str
    slow: str


# what each contender is: a strategy, and whether its experts are in four bits (the papers' quantization)
CONTENDERS = {
    "LoD": ("on-demand", False),
    "LRU": ("lru", False),
    "LRU by layer": ("lru-layer", False),
    "static": ("static", False),
    "EAP": ("eap", False),
    "EAP, int4": ("eap", True),
    "Fate": ("fate", False),
    "Fate, int4": ("fate", True),
    "IO-QEXP": ("lru", True),
    "EdgeMoE": ("edgemoe", False),
    "EdgeMoE, int4": ("edgemoe", True),
    "Mixtral-offloading": ("lru+gate", False),
    "HOBBIT": ("hobbit", False),
    "HOBBIT, LRU": ("lru+stacked", False),
    "ProMoE": ("promoe", False),
}
RATIOS = (
    Ratio("Fate", "12", "decode, Fate over load on demand, int4 against full precision", "up to 4.1", "Fate, int4", "LoD"),
    Ratio("Fate", "12", "decode, Fate over EAP, both int4", "up to 2.2", "Fate, int4", "EAP, int4"),
    Ratio("Fate", "12", "the same, lossless", "", "Fate", "EAP"),
    Ratio("Fate", "14", "with prefetching and cache, over load on demand", "up to 2 by the cache, 1.3 by prefetching alone", "Fate", "LoD"),
    Ratio("EdgeMoE", "11", "per token, EdgeMoE over IO-EXP", "2.63 to 3.01", "EdgeMoE, int4", "LRU"),
    Ratio("EdgeMoE", "11", "per token, EdgeMoE over IO-QEXP", "1.35 to 1.5", "EdgeMoE, int4", "IO-QEXP"),
    Ratio("EdgeMoE", "13", "lossless, EdgeMoE over its cache with LRU and no preloading", "", "EdgeMoE", "LRU"),
    Ratio("HOBBIT", "14", "lossless, HOBBIT over LRU with the next layer's gate", "3.2 and 3.3, with its low precision", "HOBBIT", "Mixtral-offloading"),
    Ratio("HOBBIT", "18", "its cache over LRU, the same prefetching", "no speed; 4.7 to 8.7 % less miss penalty", "HOBBIT", "HOBBIT, LRU"),
    Ratio("ProMoE", "11", "decode, ProMoE over LRU", "1.09 on average, up to 1.17 (llama.cpp)", "ProMoE", "LRU by layer"),
    Ratio("ProMoE", "11", "decode, ProMoE over static", "1.49 on average, up to 1.79 (llama.cpp)", "ProMoE", "static"),
)
CLEARLY = 1.01  # of a ratio
HEAD = ["paper", "figure", "what", "the paper's claim", "here", "holds"]


def collect(model: str, texts: tuple[str, ...], tokens: int, hidden: int) -> Data:
    """One pass over the texts; every fifth of them is held out."""
    from moeoff import Llama
    from moeoff.calibrate.profile_fit import fit
    from moeoff.calibrate.record import LENGTH, batch_size, record, sequences
    from moeoff.gguf.layout import Layout
    from moeoff.predict import FitOptions
    from moeoff.predict.router import Router

    layout = Layout.read(model)
    embedding = layout.dense["token_embd.weight"].shape
    batch = batch_size(embedding[1], embedding[0])
    with Llama(model, gate_input=True, n_ctx=LENGTH, n_batch=batch, n_ubatch=batch, settings=False) as llm:
        layers = {t.gate: t.layer for t in llm.expert_buffer.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)], llm.expert_buffer.priorities.shape[1])
        recording = record(llm, sequences(llm, texts, tokens), router, Path(model).name)
    train, held = recording.split(0.2)
    sections = fit(recording.take(train), FitOptions(hidden=hidden), only={"popularity", "gate", "path", "pairs", "first", "tokens", "learned", "hobbit"})
    return Data(layout, recording.take(train), recording.take(held), sections)


def shared(command):
    for option in (
        click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP),
        click.option("--quick", is_flag=True, help="Few tokens."),
        click.option("--text", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Default: the tests' prose and code."),
        click.option("-m", "--model", type=click.Path(exists=True, dir_okay=False), help="Default: the demo model."),
    ):
        command = option(command)
    return command


@click.group(help=__doc__)
def main() -> None:
    """Each command prints a table of claims."""


@main.command()
@shared
@click.option("--plots", type=click.Path(file_okay=False), help="Folder for popularity and scores, as PNG and SVG.")
def figures(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, plots: str | None) -> None:
    """What the papers say of routing."""
    d = _data(model, text, quick)
    print(f"{machine()}; {Path(d.layout.files[0]).name}, {d.train.n_tokens:,} tokens counted, {d.held.n_tokens:,} held out")
    with ResultsFile(json_file) as results:
        table = results.table("figures", "The papers' figures about routing", HEAD)
        for figure in FIGURES:
            f = figure(d)
            table.row(f.paper, f.figure, f.what, f.claim, f.ours, "yes" if f.holds else "no")
    if plots:
        draw(d, Path(plots))


@main.command()
@shared
@click.option("--share", default=0.5, show_default=True, help="Of the experts in memory.")
@click.option("--read", default=0.125, show_default=True, help="Time of a slice's read, as a share of a layer's computing.")
def clock(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, share: float, read: float) -> None:
    """Speed on a simulated disk: no noise, and no computing in four bits, which takes the same time here."""
    from moeoff.calibrate.clock import on_clock
    from moeoff.companion.profile import Profile
    from moeoff.engine.strategy import get_strategy

    d = _data(model, text, quick)
    profile = Profile("", {f"{section}/{name}": array for section, named in d.sections.items() for name, array in named.items()}, {})
    print(f"simulated: {share:.0%} of the experts, a read takes {read:.3f} of a layer; {Path(d.layout.files[0]).name}")
    speeds, rows = {}, []
    for name, (strategy, small) in CONTENDERS.items():
        chosen = get_strategy(strategy)
        factor = INT4 if small else 1.0
        result, _ = on_clock(
            d.held,
            replace(chosen, ab_tested=False),
            d.layout,
            share=min(share / factor, 0.999),
            read=read * factor,
            profile=profile,
            tokens=96 if quick else 512,
        )
        speeds[name] = [1e9 * result.n_tokens / result.ns]
        rows.append((name, f"{result.hit_rate:.1%}", f"{result.stall_ns / result.ns:.0%}"))
        print(f"  {rows[-1]}", file=sys.stderr)
    with ResultsFile(json_file) as results:
        table = results.table("contenders", "Hits, and time in which nothing is computed", ["contender", "hits", "waiting"])
        for row in rows:
            table.row(*row)
        ratios(results, "clock", "Speed on a simulated disk", speeds)


@main.command()
@shared
@click.option("--rounds", default=3, show_default=True)
@click.option("--share", default=0.5, show_default=True, help="Of the experts in memory.")
@click.option("--io-workers", default=4, show_default=True, help="Of every contender.")
@click.option("--n-prompt", default=64, show_default=True)
@click.option("--n-decode", default=128, show_default=True)
@click.option("--tier", help="Of the companion beside the model, for the contenders in four bits, as Q4_0. Without it they are left out.")
@click.option("--stock/--no-stock", default=True, show_default=True, help="Stock llama.cpp beside them, on the same text, everything in its page cache.")
def live(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, rounds: int, share: float, io_workers: int, n_prompt: int,
         n_decode: int, tier: str | None, stock: bool) -> None:  # fmt: skip
    """On this machine: contenders in turn, so that what the machine does meets all of them."""
    from bench_strategies import arena_full

    if model is None or len(text) != 1:
        raise click.UsageError("live needs -m MODEL and one --text FILE")
    if quick:
        rounds, n_prompt, n_decode = 1, 16, 24
    arena = int(arena_full(model) * share)
    chosen = {name: how for name, how in CONTENDERS.items() if tier or not how[1]}
    print(f"{machine()}; {n_prompt} + {n_decode} tokens, {share:.0%} of the experts, {io_workers} I/O workers, {rounds} rounds")
    speeds: dict[str, list[float]] = {}
    for index in range(rounds):
        for name, (strategy, small) in chosen.items():
            options = {"strategy": strategy, "expert_memory": arena, "n_lanes": io_workers} | ({"tier": tier} if small else {})
            _note(speeds, name, index, measure("moeoff", model, text[0], n_prompt, n_decode, 600, **options))
        if stock:
            _note(speeds, "stock llama.cpp", index, measure("stock", model, text[0], n_prompt, n_decode, 600))
    with ResultsFile(json_file) as results:
        table = results.table("live-speeds", "Decoding, tok/s", ["contender", "median", "least", "most"])
        for name, found in speeds.items():
            table.row(name, *(f"{x:.1f}" for x in (statistics.median(found), min(found), max(found))))
        ratios(results, "live", "Speed on this machine", speeds)


def _note(speeds: dict[str, list[float]], name: str, index: int, row: dict) -> None:
    print(f"round {index + 1}: {name} {row.get('failed') or format(row['gen_tps'], '.2f')}", file=sys.stderr, flush=True)
    if "failed" not in row:
        speeds.setdefault(name, []).append(row["gen_tps"])


def ratios(results: ResultsFile, name: str, title: str, speeds: dict[str, list[float]]) -> None:
    """A row for each claim whose contenders ran: the median of the rounds' ratios and their range. Its direction holds if every round is faster by `CLEARLY`."""
    table = results.table(name, title, [*HEAD[:-1], "direction holds"])
    for r in RATIOS:
        if r.fast not in speeds or r.slow not in speeds:
            continue
        found = sorted(a / b for a, b in zip(speeds[r.fast], speeds[r.slow]))
        spread = f" ({found[0]:.2f} to {found[-1]:.2f})" if len(found) > 1 else ""
        table.row(
            r.paper,
            r.figure,
            f"{r.what} ({r.fast} / {r.slow})",
            r.claim or "-",
            f"{statistics.median(found):.2f}{spread}",
            "yes" if found[0] >= CLEARLY else "no",
        )


def draw(d: Data, folder: Path) -> None:
    """Fate 9 and ProMoE 5's popularity, and HOBBIT 5b's scores."""
    import numpy as np
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    popular, scores = figure.subplots(1, 2)
    for g, curve in enumerate(popularity_curves(d)):
        popular.plot(100 * np.arange(1, len(curve) + 1) / len(curve), 100 * curve, color="tab:blue", alpha=0.3 + 0.7 * g / d.held.model.n_gates)
    popular.set(xlabel="experts of a layer, the most used first, %", ylabel="of their uses, %", title="Popularity (Fate 9, ProMoE 5), a line for each layer")
    curve = score_curve(d)
    scores.step(curve, 100 * np.arange(1, len(curve) + 1) / len(curve), where="post")
    scores.set(xlabel="unimportance", ylabel="of selected experts, %", title="Unimportance (HOBBIT 5b)")
    for ending in ("png", "svg"):
        figure.savefig(folder / f"papers.{ending}", dpi=110)


def _data(model: str | None, text: tuple[str, ...], quick: bool) -> Data:
    from moeoff.paths import demo_model

    return collect(model or demo_model(), text or tuple(TEXTS), 3072 if quick else 12288, 64 if quick else 128)


if __name__ == "__main__":
    main()
