"""The papers' headline ratios on a simulated GPU: their systems and baselines, from what the model's routers choose on text.

usage: papers_device.py [-m MODEL] [--text FILE ...] [--share 0.25]

Experts lie in host memory in 16 bits, or in four where the paper's do; a GPU holds some, and gets each of the others over PCIe before it
computes with it. The routing is the model's own, of held-out text, and the policies and predictors are those of `moeoff run`; times come
from a table of bandwidths (docs/guides/gpu.md), so that a run repeats exactly and needs no GPU. --quick takes few tokens.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from paper_contenders import CLEARLY, CONTENDERS, HEAD, RATIOS, Contender, Ratio
from papers import _data, shared
from results_file import ResultsFile

F16, Q4_0 = 2.0, 18 / 32  # bytes of a weight
# the papers' main results, and what each is here; of a range the middle
HEADLINES = {
    ("Fate, int4", "LoD"): 4.1,
    ("HOBBIT, mixed", "Mixtral-offloading"): 3.25,
    ("Fate, int4", "EAP, int4"): 2.2,
    ("ProMoE", "static"): 1.49,
    ("ProMoE", "LRU by layer"): 1.09,
}
MIXED = Ratio("HOBBIT", "14", "HOBBIT over LRU with the next layer's gate", "3.2 and 3.3", "HOBBIT, mixed", "Mixtral-offloading")
SYSTEMS = ("Fate", "HOBBIT", "ProMoE")


def ratios() -> list[Ratio]:
    """Claims about decoding whose contenders this device has: it knows one low precision, and no order of matrices."""
    known = {name for name, c in CONTENDERS.items() if not c.precision and not c.changes}
    return [*(r for r in RATIOS if r.paper in SYSTEMS and not r.prompt and {r.fast, r.slow} <= known), MIXED]


def contenders() -> dict[str, Contender]:
    """ "HOBBIT, mixed" serves absent experts of little weight in four bits."""
    return {name: CONTENDERS.get(name, CONTENDERS["HOBBIT"]) for r in ratios() for name in (r.fast, r.slow)}


def agreeing_pairs(found: dict[tuple[str, str], float]) -> tuple[int, int]:
    """Of the headlines' pairs, how many lie in the papers' order, and how many there are."""
    pairs = list(itertools.combinations(HEADLINES, 2))
    return sum((HEADLINES[a] > HEADLINES[b]) == (found[a] > found[b]) for a, b in pairs), len(pairs)


@click.command(help=__doc__)
@shared
@click.option("--share", default=0.25, show_default=True, help="Of the experts' bytes in 16 bits, what the GPU has for experts.")
@click.option("--expert-weights", type=int, help="Of each matrix of an expert: a grown model has its small one's routing. Default: the model's own.")
@click.option("--layer-us", default=None, type=float, help="What a layer takes beside its experts. Default: of the table.")
def main(
    model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None, share: float, expert_weights: int | None, layer_us: float | None
) -> None:
    from moeoff.cache.importance import thresholds, unimportance
    from moeoff.calibrate.clock import on_device
    from moeoff.companion.profile import Profile
    from moeoff.simulate.bandwidths import Bandwidths
    from moeoff.simulate.tiered import LowVersions

    d = _data(model, text, quick)
    speeds = Bandwidths() if layer_us is None else Bandwidths(layer_us=layer_us)
    profile = Profile("", {f"{section}/{name}": array for section, named in d.sections.items() for name, array in named.items()}, {})
    sizes = {math.prod(span.shape) // d.layout.n_expert for span in d.layout.experts.values()}
    if len(sizes) > 1:
        raise click.UsageError("the model's matrices of experts are of several shapes")
    n_weights = expert_weights or sizes.pop()
    t1, t2 = thresholds(np.concatenate([unimportance(d.train.weights[:, g]).ravel() for g in range(d.train.model.n_gates)]))
    print(
        f"simulated: {speeds}; {Path(d.layout.files[0]).name}, {d.held.n_tokens:,} tokens held out; {n_weights:,} weights a matrix; T1 {t1:.2f}, T2 {t2:.2f}",
        flush=True,
    )
    speed: dict[str, float] = {}
    with ResultsFile(json_file) as results:
        table = results.table("device-contenders", "A simulated GPU behind PCIe 4.0 x16", ["contender", "tok/s", "on the GPU", "sent, MB/token", "waiting"])
        for name, contender in contenders().items():
            each = Q4_0 if contender.tier else F16
            tensors = tuple(replace(t, nbytes=int(each * n_weights)) for t in d.held.model.tensors)
            held = replace(d.held, model=replace(d.held.model, tensors=tensors))
            result = on_device(
                held,
                contender.made(),
                d.layout,
                speeds,
                share=min(share * F16 / each, 1.0),
                low=LowVersions(t1, t2, Q4_0 / F16) if name == MIXED.fast else None,
                profile=profile,
                tokens=96 if quick else 512,
            )
            speed[name] = result.decode_tps
            row = result.to_dict()
            table.row(name, f"{speed[name]:.1f}", f"{row['on_device']:.1%}", f"{row['up_bytes_per_token'] / 1e6:.1f}", f"{row['waiting']:.0%}")
            print(f"  {name}", file=sys.stderr)
        table = results.table("device-ratios", "Ratios of speed", [*HEAD[:-1], "direction holds"])
        for r in ratios():
            ratio = speed[r.fast] / speed[r.slow]
            table.row(r.paper, r.figure, f"{r.what} ({r.fast} / {r.slow})", r.claim or "-", f"{ratio:.2f}", "yes" if ratio >= CLEARLY else "no")
        found = {pair: speed[pair[0]] / speed[pair[1]] for pair in HEADLINES}
        table = results.table("device-order", "The headline ratios in order", ["ratio", "the paper's", "its place", "here", "place here"])
        places = [sorted(values, reverse=True) for values in (HEADLINES.values(), found.values())]
        for pair, theirs in HEADLINES.items():
            table.row(" / ".join(pair), f"{theirs:.2f}", str(places[0].index(theirs) + 1), f"{found[pair]:.2f}", str(places[1].index(found[pair]) + 1))
        agree, n_pairs = agreeing_pairs(found)
        table.row("pairs in the papers' order", f"{n_pairs}", "", f"{agree}", "")


if __name__ == "__main__":
    main()
