"""The papers' systems and their baselines as strategies, and what each paper claims of one over another. Runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moeoff.engine.strategy import Strategy, get_strategy
from results_file import ResultsFile

CLEARLY = 1.01  # of a ratio
HEAD = ("paper", "figure", "what", "the paper's claim", "here", "holds")
INT4, INT2 = "int4", "int2"  # tiers of the companion, as the user names them

Speeds = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Contender:
    """Attributes:
    strategy: by name; its predictor, if it has one, always reads ahead, as in the papers.
    changes: fields of the strategy that differ.
    tier: INT4 where all experts are in it; None: the model's own precision.
    precision: t1, t2, p (of a prompt) and mispredicted, as `bench_worker.py` takes them; what they serve low is INT2.
    """

    strategy: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tier: str | None = None
    precision: Mapping[str, Any] = field(default_factory=dict)

    def made(self) -> Strategy:
        return replace(get_strategy(self.strategy), ab_tested=False, **self.changes)

    def options(self, tiers: Mapping[str, str]) -> dict[str, Any] | None:
        """Of `bench_worker.py`; None if a tier that it needs is not there."""
        needed = {self.tier} - {None} | ({INT2} if self.precision else set())
        if not needed <= set(tiers):
            return None
        options = {"strategy": self.strategy, "ab_tested": False, **self.changes, **self.precision}
        options |= {"tier": tiers[self.tier]} if self.tier else {}
        return options | ({"low": tiers[INT2]} if self.precision else {})


_STEPS = {"eager": False, "serial": True}  # each matrix asks for its experts itself, and computes when all are there
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
    "Fate, int4 and int2": Contender("fate", tier=INT4, precision={"p": 0.25, "mispredicted": True}),
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
    "ProMoE, + preemption": Contender("promoe", {"serial": True}),
    "ProMoE": Contender("promoe"),
}
STOCK, STOCK_LIMITED = "stock llama.cpp", "stock llama.cpp, as little memory"


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
    Ratio("ProMoE", "13", "early preemption", "no number in the text", "ProMoE, + preemption", "ProMoE, + prefetch"),
    Ratio("ProMoE", "13", "reordered inference", "no number in the text", "ProMoE", "ProMoE, + preemption"),
    Ratio("ProMoE", "12", "all of them", "1.35 (transformers)", "ProMoE", "ProMoE, base"),
)


def ratios(results: ResultsFile, name: str, title: str, speeds: Speeds, prompts: Speeds | None = None) -> None:
    """A row for each claim whose contenders ran: the median of the rounds' ratios and their range. Its direction holds if every round is faster by `CLEARLY`.

    Args:
        speeds, prompts: of each contender, one for each round; None: that round failed.
    """
    table = results.table(name, title, [*HEAD[:-1], "direction holds"])
    for r in RATIOS:
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
