"""The papers' claims and ours: each figure and table that can be had on a CPU machine, its claim, our ratio, and whether it holds here. docs/results/papers.md

usage: papers.py figures [-m MODEL] [--text FILE ...]     what they say of routing, from one pass over text; times nothing
       papers.py clock   [-m MODEL] [--text FILE ...]     speed of their systems and baselines on a simulated disk: repeats exactly
       papers.py device  [-m MODEL] [--text FILE ...]     their headline ratios on a simulated GPU: repeats exactly
       papers.py live    -m MODEL --text FILE             speed on this machine, in interleaved rounds, each run cold in a process of its own

Without a command: figures, clock and device. --quick takes few tokens: minutes become seconds, and the numbers rough. `live` wants a profile of
`moeoff calibrate` at the model's side and a sidecar with tiers for --int4 and --int2.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

import baselines  # noqa: F401  registers them
import speed as driver
from cgroup import unavailable
from moeoff.bench import measure
from moeoff.bench.job import rates
from moeoff.policies import Strategy, get_strategy
from moeoff.policies.precision import Precision
from paper_figures import FIGURES, Data, popularity_curves, score_curve
from results import HELP, ResultsFile, machine

TEXTS = [str(driver.ROOT / "tests" / "data" / name) for name in ("prose.txt", "prose-2.txt", "code.txt")]
CLEARLY = 1.01  # of a ratio
HEAD = ("paper", "figure", "what", "the paper's claim", "here", "holds")
INT4, INT2 = "int4", "int2"  # tiers of the sidecar, as the user names them
INT4_SIZE = 18 / 34  # bytes of Q4_0 over those of Q8_0
F16, Q4_0 = 2.0, 18 / 32  # bytes of a weight

Speeds = Mapping[str, Sequence[float | None]]


# the papers' systems and their baselines


@dataclass(frozen=True)
class Contender:
    """Attributes:
    strategy: by name; its predictor, if it has one, always reads ahead, as in the papers.
    changes: fields of the strategy that differ.
    tier: INT4 where all experts are in it; None: the model's own precision.
    precision: fields of `Precision`; what it serves low is INT2.
    """

    strategy: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tier: str | None = None
    precision: Mapping[str, Any] = field(default_factory=dict)

    def made(self) -> Strategy:
        return replace(get_strategy(self.strategy), ab_tested=False, **self.changes)

    def options(self, tiers: Mapping[str, str]) -> dict[str, Any] | None:
        """Of `moeoff.Llama`; None if a tier that it needs is not there."""
        needed = {self.tier} - {None} | ({INT2} if self.precision else set())
        if not needed <= set(tiers):
            return None
        options: dict[str, Any] = {"strategy": self.made()} | ({"tier": tiers[self.tier]} if self.tier else {})
        return options | ({"precision": Precision(tier=tiers[INT2], **self.precision)} if self.precision else {})


_STEPS = {"eager": False}  # each matrix asks for its experts itself
CONTENDERS = {
    "LoD": Contender("on-demand"),
    "LoD, prefetching": Contender("fate", {"keep": False, "policy": None, **_STEPS}),
    "LRU": Contender("lru"),
    "LRU by layer": Contender("lru-layer"),
    "static": Contender("static"),
    "EAP": Contender("eap"),
    "EAP, int4": Contender("eap", tier=INT4),
    "Fate": Contender("fate"),
    "Fate, int4": Contender("fate", tier=INT4),
    "Fate, int4 and int2": Contender("fate", tier=INT4, precision={"prefill_low_fraction": 0.25, "mispredicted_low": True}),
    "IO-QEXP": Contender("lru", tier=INT4),
    "EdgeMoE": Contender("edgemoe"),
    "EdgeMoE, int4": Contender("edgemoe", tier=INT4),
    "EdgeMoE, int4, no preloading": Contender("edgemoe", {"predictor": None}, tier=INT4),
    "Mixtral-offloading": Contender("lru+gate"),
    "HOBBIT": Contender("hobbit"),
    "HOBBIT, int2": Contender("hobbit", precision={"t1": 0.6, "t2": 0.9}),
    "HOBBIT, LRU": Contender("lru+stacked"),
    "ProMoE, base": Contender("lru-layer", _STEPS),
    "ProMoE, + prefetch": Contender("promoe", _STEPS),
    "ProMoE": Contender("promoe"),
}
STOCK, STOCK_LIMITED = "stock llama.cpp", "stock llama.cpp, as little memory"


# their claims


@dataclass(frozen=True)
class Ratio:
    """A claim about speed: of one contender over another.

    Attributes:
        claim: the paper's factor, as it reports it.
        fast, slow: names of `CONTENDERS`, or stock.
        prompt: of prompts; False: of decoding.
    """

    paper: str
    figure: str
    what: str
    claim: str
    fast: str
    slow: str
    prompt: bool = False

    def of_rounds(self, speeds: Speeds) -> list[float]:
        """Sorted, of each round in which both ended."""
        return sorted(a / b for a, b in zip(speeds.get(self.fast, ()), speeds.get(self.slow, ())) if a and b)


RATIOS = (
    Ratio("Fate", "11", "prompts, Fate over load on demand", "up to 4.5", "Fate, int4 and int2", "LoD", True),
    Ratio("Fate", "11", "prompts, Fate over EAP, both int4", "up to 1.9", "Fate, int4 and int2", "EAP, int4", True),
    Ratio("Fate", "12", "decode, Fate over load on demand, int4 against full precision", "up to 4.1", "Fate, int4", "LoD"),
    Ratio("Fate", "12", "decode, Fate over EAP, both int4", "up to 2.2", "Fate, int4", "EAP, int4"),
    Ratio("Fate", "12", "the same, lossless", "", "Fate", "EAP"),
    Ratio("Fate", "14", "prefetching, over load on demand", "1.3 on average", "LoD, prefetching", "LoD"),
    Ratio("Fate", "14", "with prefetching and cache, over load on demand", "up to 2", "Fate", "LoD"),
    Ratio("Fate", "14", "with its quantization, too", "up to 3.7", "Fate, int4 and int2", "LoD"),
    Ratio("EdgeMoE", "11", "per token, EdgeMoE over IO-EXP", "2.63 to 3.01", "EdgeMoE, int4", "LRU"),
    Ratio("EdgeMoE", "11", "per token, EdgeMoE over IO-QEXP", "1.35 to 1.5", "EdgeMoE, int4", "IO-QEXP"),
    Ratio("EdgeMoE", "13", "lossless, EdgeMoE over its cache with LRU and no preloading", "", "EdgeMoE", "LRU"),
    Ratio("EdgeMoE", "16", "preloading", "1.29 (ST-base-8)", "EdgeMoE, int4", "EdgeMoE, int4, no preloading"),
    Ratio("HOBBIT", "14", "decode, HOBBIT over llama.cpp in as little memory", "13.0 and 18.9 (Jetson)", "HOBBIT, int2", STOCK_LIMITED),
    Ratio("HOBBIT", "14", "decode, HOBBIT over LRU with the next layer's gate", "3.2 and 3.3", "HOBBIT, int2", "Mixtral-offloading"),
    Ratio("HOBBIT", "14", "the same, lossless", "", "HOBBIT", "Mixtral-offloading"),
    Ratio("HOBBIT", "16", "its low precision", "1.19 to 1.57", "HOBBIT, int2", "HOBBIT"),
    Ratio("HOBBIT", "18", "its cache over LRU, the same prefetching", "no speed; 4.7 to 8.7 % less miss penalty", "HOBBIT", "HOBBIT, LRU"),
    Ratio("ProMoE", "11", "decode, ProMoE over LRU", "1.09 on average, up to 1.17 (llama.cpp)", "ProMoE", "LRU by layer"),
    Ratio("ProMoE", "11", "decode, ProMoE over static", "1.49 on average, up to 1.79 (llama.cpp)", "ProMoE", "static"),
    Ratio("ProMoE", "11", "prompts, ProMoE over LRU", "2.12 on average, up to 2.22 (llama.cpp)", "ProMoE", "LRU by layer", True),
    Ratio("ProMoE", "11", "prompts, ProMoE over static", "1.36 on average, up to 1.75 (llama.cpp)", "ProMoE", "static", True),
    Ratio("ProMoE", "13", "prefetching, in chunks", "no number in the text", "ProMoE, + prefetch", "ProMoE, base"),
    Ratio("ProMoE", "13", "early preemption", "no number in the text", "ProMoE", "ProMoE, + prefetch"),
    Ratio("ProMoE", "12", "all of them", "1.35 (transformers)", "ProMoE", "ProMoE, base"),
)


def ratios(results: ResultsFile, name: str, title: str, speeds: Speeds, prompts: Speeds | None = None, claims: Sequence[Ratio] = RATIOS) -> None:
    """A row for each claim whose contenders ran: the median of the rounds' ratios and their range. Its direction holds if every round is faster by `CLEARLY`.

    Args:
        speeds, prompts: of each contender, one for each round; None: that round failed.
    """
    table = results.table(name, title, [*HEAD[:-1], "direction holds"])
    for r in claims:
        found = r.of_rounds((prompts or {}) if r.prompt else speeds)
        if not found:
            continue
        spread = f" ({found[0]:.2f} to {found[-1]:.2f})" if len(found) > 1 else ""
        table.row(
            r.paper,
            r.figure,
            f"{r.what} ({r.fast} / {r.slow})",
            r.claim or "-",
            f"{statistics.median(found):.2f}{spread}",
            "yes" if found[0] >= CLEARLY else "no",
        )


def collect(model: str, texts: tuple[str, ...], tokens: int, hidden: int) -> Data:
    """One pass over the texts; every fifth of them is held out."""
    from moeoff.calibrate.profile_fit import fit
    from moeoff.calibrate.record import record, recordable, sequences
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.policies import FitOptions
    from moeoff.simulate import simulate

    model_index = ModelIndex.read(model)
    with recordable(model_index) as (llm, router):
        recording = record(llm, sequences(llm, texts, tokens), router, Path(model).name)
    train, held = recording.split(0.2)
    options = FitOptions(hidden=hidden, replay=simulate)  # HOBBIT's weights are fitted on replays
    sections = fit(recording.take(train), options, only={"popularity", "gate", "path", "pairs", "first", "tokens", "learned", "hobbit"})
    return Data(model_index, recording.take(train), recording.take(held), sections)


@functools.lru_cache(maxsize=1)
def _data(model: str | None, text: tuple[str, ...], quick: bool) -> Data:
    from moeoff.files import demo_model

    return collect(model or demo_model(), text or tuple(TEXTS), 3072 if quick else 12288, 64 if quick else 128)


def profile_of(d: Data) -> Any:
    from moeoff.sidecar.profile import Profile

    return Profile("", {f"{section}/{name}": array for section, named in d.sections.items() for name, array in named.items()}, {})


# the commands


@click.group(help=__doc__, invoke_without_command=True)
@click.option("--quick", is_flag=True, help="Few tokens.")
@click.pass_context
def main(ctx: click.Context, quick: bool) -> None:
    if ctx.invoked_subcommand is None:
        for command in (figures, clock, device):
            ctx.invoke(command, quick=quick)


def shared(command: Any) -> Any:
    for option in (
        click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP),
        click.option("--quick", is_flag=True, help="Few tokens."),
        click.option("--text", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Default: the tests' prose and code."),
        click.option("-m", "--model", type=click.Path(exists=True, dir_okay=False), help="Default: the demo model."),
    ):
        command = option(command)
    return command


@main.command()
@shared
@click.option("--plots", type=click.Path(file_okay=False), help="Folder for popularity and scores, as PNG and SVG.")
def figures(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, plots: str | None) -> None:
    """What the papers say of routing."""
    d = _data(model, text, quick)
    print(f"{machine()}; {Path(d.model_index.files[0]).name}, {d.train.n_tokens:,} tokens counted, {d.held.n_tokens:,} held out")
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
    from clock_simulators import on_clock

    d = _data(model, text, quick)
    print(f"simulated: {share:.0%} of the experts, a read takes {read:.3f} of a layer; {Path(d.model_index.files[0]).name}")
    speeds: dict[str, list[float | None]] = {}
    with ResultsFile(json_file) as results:
        table = results.table("contenders", "Hits, and time in which nothing is computed", ["contender", "hits", "waiting"])
        for name, contender in CONTENDERS.items():
            if contender.precision:
                continue  # the clock knows one size of slices
            size = INT4_SIZE if contender.tier else 1.0
            options = {"share": min(share / size, 0.999), "read": read * size, "profile": profile_of(d), "tokens": 96 if quick else 512}
            result, _ = on_clock(d.held, contender.made(), d.model_index, **options)
            speeds[name] = [1e9 * result.n_tokens / result.ns]
            table.row(name, f"{result.hit_rate:.1%}", f"{result.stall_ns / result.ns:.0%}")
        ratios(results, "clock", "Speed on a simulated disk", speeds)


# Of the simulated GPU: the papers' main results, and what each is here; of a range the middle.
HEADLINES = {
    ("Fate, int4", "LoD"): 4.1,
    ("HOBBIT, mixed", "Mixtral-offloading"): 3.25,
    ("Fate, int4", "EAP, int4"): 2.2,
    ("ProMoE", "static"): 1.49,
    ("ProMoE", "LRU by layer"): 1.09,
}
MIXED = Ratio("HOBBIT", "14", "HOBBIT over LRU with the next layer's gate", "3.2 and 3.3", "HOBBIT, mixed", "Mixtral-offloading")


def device_ratios() -> list[Ratio]:
    """Claims about decoding whose contenders the simulated GPU has: it knows one low precision, and no order of matrices."""
    known = {name for name, c in CONTENDERS.items() if not c.precision and not c.changes}
    return [*(r for r in RATIOS if r.paper in ("Fate", "HOBBIT", "ProMoE") and not r.prompt and {r.fast, r.slow} <= known), MIXED]


def device_contenders() -> dict[str, Contender]:
    """ "HOBBIT, mixed" serves absent experts of little weight in four bits."""
    return {name: CONTENDERS.get(name, CONTENDERS["HOBBIT"]) for r in device_ratios() for name in (r.fast, r.slow)}


def agreeing_pairs(found: dict[tuple[str, str], float]) -> tuple[int, int]:
    """Of the headlines' pairs, how many lie in the papers' order, and how many there are."""
    pairs = list(itertools.combinations(HEADLINES, 2))
    return sum((HEADLINES[a] > HEADLINES[b]) == (found[a] > found[b]) for a, b in pairs), len(pairs)


@main.command()
@shared
@click.option("--share", default=0.25, show_default=True, help="Of the experts' bytes in 16 bits, what the GPU has for experts.")
@click.option("--expert-weights", type=int, help="Of each matrix of an expert: a grown model has its small one's routing. Default: the model's own.")
@click.option("--layer-us", default=None, type=float, help="What a layer takes without its experts. Default: of the table.")
def device(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, share: float, expert_weights: int | None,
           layer_us: float | None) -> None:  # fmt: skip
    """Experts lie in host memory in 16 bits, or in four where the paper's do; a GPU holds some, and gets each of the others over PCIe before it computes
    with it. The routing is the model's own; times come from a table of bandwidths (docs/internals/gpu.md)."""
    from device_simulator import Bandwidths, LowVersions, on_device
    from moeoff.policies.hobbit import thresholds, unimportance

    d = _data(model, text, quick)
    speeds = Bandwidths() if layer_us is None else Bandwidths(layer_us=layer_us)
    sizes = {math.prod(span.shape) // d.model_index.n_expert for span in d.model_index.experts.values()}
    if len(sizes) > 1:
        raise click.UsageError("the model's matrices of experts are of several shapes")
    n_weights = expert_weights or sizes.pop()
    t1, t2 = thresholds(np.concatenate([unimportance(d.train.weights[:, g]).ravel() for g in range(d.train.model.n_gates)]))
    print(f"simulated: {speeds}; {Path(d.model_index.files[0]).name}, {d.held.n_tokens:,} tokens held out; {n_weights:,} weights a matrix; "
          f"T1 {t1:.2f}, T2 {t2:.2f}", flush=True)  # fmt: skip
    found: dict[str, float] = {}
    with ResultsFile(json_file) as results:
        table = results.table("device-contenders", "A simulated GPU behind PCIe 4.0 x16", ["contender", "tok/s", "on the GPU", "sent, MB/token", "waiting"])
        for name, contender in device_contenders().items():
            each = Q4_0 if contender.tier else F16
            tensors = tuple(replace(t, nbytes=int(each * n_weights)) for t in d.held.model.tensors)
            held = replace(d.held, model=replace(d.held.model, tensors=tensors))
            low = LowVersions(Q4_0 / F16, t1, t2) if name == MIXED.fast else None
            options = {"share": min(share * F16 / each, 1.0), "low": low, "profile": profile_of(d), "tokens": 96 if quick else 512}
            result = on_device(held, contender.made(), d.model_index, speeds, **options)
            found[name], on_gpu, sent = result.tps, result.device / (result.device + result.host), result.up_bytes / result.n_tokens / 1e6
            table.row(name, f"{found[name]:.1f}", f"{on_gpu:.1%}", f"{sent:.1f}", f"{result.stall_ns / result.ns:.0%}")
        ratios(results, "device-ratios", "Ratios of speed", {name: [tps] for name, tps in found.items()}, claims=device_ratios())
        table = results.table("device-order", "The headline ratios in order", ["ratio", "the paper's", "its place", "here", "place here"])
        ours = {pair: found[pair[0]] / found[pair[1]] for pair in HEADLINES}
        places = [sorted(values, reverse=True) for values in (HEADLINES.values(), ours.values())]
        for pair, theirs in HEADLINES.items():
            table.row(" / ".join(pair), f"{theirs:.2f}", str(places[0].index(theirs) + 1), f"{ours[pair]:.2f}", str(places[1].index(ours[pair]) + 1))
        agree, n_pairs = agreeing_pairs(ours)
        table.row("pairs in the papers' order", f"{n_pairs}", "", f"{agree}", "")


@main.command()
@shared
@click.option("--rounds", default=5, show_default=True)
@click.option("--share", default=0.5, show_default=True, help="Of the experts in memory, in the model's own precision.")
@click.option("--io-threads", default=4, show_default=True, help="Of every contender.")
@click.option("--n-prompt", default=128, show_default=True)
@click.option("--n-decode", default=48, show_default=True)
@click.option("--int4", help="Tier of the sidecar beside the model for the contenders in four bits, as Q4_0. Without it they are left out.")
@click.option("--int2", help="Its tier for what is read in two bits, as Q2_K; likewise.")
@click.option("--stock/--no-stock", default=True, show_default=True, help="Stock llama.cpp on the same tokens: in the page cache, and in LRU's memory.")
@click.option("--plots", type=click.Path(file_okay=False), help="Folder for a chart of speeds and ratios, as PNG and SVG.")
def live(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, rounds: int, share: float, io_threads: int, n_prompt: int,
         n_decode: int, int4: str | None, int2: str | None, stock: bool, plots: str | None) -> None:  # fmt: skip
    """On this machine: contenders in turn, so that what the machine does meets all of them."""
    if model is None or len(text) != 1:
        raise click.UsageError("live needs -m MODEL and one --text FILE")
    if quick:
        rounds, n_prompt, n_decode = 1, 16, 24
    bench = driver.Bench(model, text[0], n_prompt, n_decode, rounds)
    common = {"expert_memory": int(driver.arena_full(model) * share), "io_threads": io_threads}
    tiers = {name: tier for name, tier in ((INT4, int4), (INT2, int2)) if tier}
    offered = {name: contender.options(tiers) for name, contender in CONTENDERS.items()}
    jobs = {name: bench.job(**options, **common) for name, options in offered.items() if options is not None}
    if stock:
        jobs[STOCK] = bench.stock(use_mmap=True)
        if unavailable() is None:  # without repacked kernels, which would need the weights twice
            jobs[STOCK_LIMITED] = bench.stock(measure(jobs["LRU"]).closed["peak_rss_bytes"], use_mmap=True, use_extra_bufts=False)
    print(f"{machine()}; {n_prompt} + {n_decode} tokens, {share:.0%} of the experts, {io_threads} I/O threads, {rounds} rounds")
    found = bench.compare(jobs)
    prompts, speeds = ({one.name: [rates(m.of(test)).get("tps") for m in one.measurements] for one in found[test::2]} for test in range(2))
    with ResultsFile(json_file) as results:
        driver.table(results, "live-contenders", "The contenders, medians and ranges of the rounds", {"": found})
        ratios(results, "live", "Speed on this machine", speeds, prompts)
    if plots:
        draw_live(speeds, Path(plots))


def draw(d: Data, folder: Path) -> None:
    """Fate 9 and ProMoE 5's popularity, and HOBBIT 5b's scores."""
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


def draw_live(speeds: Speeds, folder: Path) -> None:
    """Bars of decode speed with each round as a point, and the ratios of decoding, on a scale where halving is as far from 1 as doubling."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    ended = {name: [x for x in values if x] for name, values in speeds.items() if any(values)}
    figure = Figure(figsize=(13, 0.28 * len(ended) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for at, (name, values) in enumerate(reversed(ended.items())):
        left.barh(at, statistics.median(values), color="tab:orange" if name.startswith("stock") else "tab:blue")
        left.plot(values, [at] * len(values), "k.", markersize=4)
    left.set_yticks(range(len(ended)), list(reversed(ended)))
    left.set(xlabel="tokens per second, decode: median, and every round", title="Contenders")
    rows = [(f"{r.paper} {r.figure}: {r.fast} / {r.slow}", values) for r in reversed(RATIOS) if not r.prompt and (values := r.of_rounds(speeds))]
    for at, (_, values) in enumerate(rows):
        right.plot(values, [at] * len(values), "-", color="tab:gray")
        right.plot([statistics.median(values)], [at], "o", color="tab:blue")
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    right.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=8)
    right.set(xlabel="times as fast: median and range", title="Ratios that the papers claim")
    for ending in ("png", "svg"):
        figure.savefig(folder / f"papers-live.{ending}", dpi=110)


if __name__ == "__main__":
    main()
