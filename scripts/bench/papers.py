"""The papers' claims beside ours: each figure and table that can be had on a CPU machine, its claim, our ratio, and whether it holds here.

usage: papers.py figures [-m MODEL] [--text FILE ...]     what they say of routing, from one pass over text; times nothing
       papers.py clock [-m MODEL] [--text FILE ...]       speed of their systems and baselines on a simulated disk: repeats exactly
       papers.py live -m MODEL --text FILE [--rounds 3]   the same on this machine, interleaved, each run cold in a process of its own

--quick takes few tokens: minutes become seconds, and the numbers rough. `live` wants, beside the model, a profile of `moeoff calibrate` and a companion with
tiers for --int4 and --int2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from paper_contenders import CONTENDERS, HEAD, INT2, INT4, ratios
from paper_figures import FIGURES, Data, popularity_curves, score_curve
from results_file import HELP, ResultsFile
from timing import machine

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [str(ROOT / "tests" / "data" / name) for name in ("prose.txt", "prose-2.txt", "code.txt")]
INT4_BYTES = 18 / 34  # bytes of Q4_0 beside Q8_0


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

    d = _data(model, text, quick)
    profile = Profile("", {f"{section}/{name}": array for section, named in d.sections.items() for name, array in named.items()}, {})
    print(f"simulated: {share:.0%} of the experts, a read takes {read:.3f} of a layer; {Path(d.layout.files[0]).name}")
    speeds, rows = {}, []
    for name, contender in CONTENDERS.items():
        if contender.precision:
            continue  # the clock knows one size of slices
        factor = INT4_BYTES if contender.tier else 1.0
        result, _ = on_clock(
            d.held,
            contender.made(),
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
@click.option("--share", default=0.5, show_default=True, help="Of the experts in memory, in the model's own precision.")
@click.option("--io-workers", default=4, show_default=True, help="Of every contender.")
@click.option("--n-prompt", default=128, show_default=True)
@click.option("--n-decode", default=48, show_default=True)
@click.option("--int4", help="Tier of the companion beside the model for the contenders in four bits, as Q4_0. Without it they are left out.")
@click.option("--int2", help="Its tier for what is read in two bits, as Q2_K; likewise.")
@click.option("--stock/--no-stock", default=True, show_default=True, help="Stock llama.cpp beside them, on the same tokens.")
@click.option("--plots", type=click.Path(file_okay=False), help="Folder for a chart of speeds and ratios, as PNG and SVG.")
def live(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, rounds: int, share: float, io_workers: int, n_prompt: int,
         n_decode: int, int4: str | None, int2: str | None, stock: bool, plots: str | None) -> None:  # fmt: skip
    """On this machine: contenders in turn, so that what the machine does meets all of them."""
    import paper_live
    from bench_strategies import arena_full

    if model is None or len(text) != 1:
        raise click.UsageError("live needs -m MODEL and one --text FILE")
    if quick:
        rounds, n_prompt, n_decode = 1, 16, 24
    tiers = {name: tier for name, tier in ((INT4, int4), (INT2, int2)) if tier}
    run = paper_live.LiveRun(model, text[0], int(arena_full(model) * share), n_prompt, n_decode, io_workers, tiers, stock)
    print(f"{machine()}; {n_prompt} + {n_decode} tokens, {share:.0%} of the experts, {io_workers} I/O workers, {rounds} rounds")
    found = paper_live.run_rounds(run, rounds)
    with ResultsFile(json_file) as results:
        paper_live.tables(results, found)
    if plots:
        paper_live.draw(found, Path(plots))


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
