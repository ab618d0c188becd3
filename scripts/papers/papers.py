"""The papers' claims and ours: each figure and table that can be had on a CPU machine,
its claim, ours, and a verdict by rule. docs/results/papers.md

usage: papers.py [-m MODEL] [--text FILE ...] [--quick]     a table for each paper: their figures about routing, and their systems on a simulated machine

It repeats exactly. --quick takes few tokens: minutes become seconds, and the numbers
rough.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import baselines
import verdicts
from device_simulator import (
    AS_NAMED,
    BY_ID,
    NEVER,
    POPULAR,
    PROMPTS,
    Bandwidths,
    DeviceResult,
    Execution,
    LowVersions,
    on_device,
)
from moeoff.experts.convert import convert
from moeoff.experts.profile import Profile
from moeoff.gguf.model_index import ModelIndex, parse_tensor_name
from moeoff.measure.bit_allocation import BitsPlan, Planner
from moeoff.measure.perplexity import evaluate_model
from moeoff.measure.statistics import Estimate
from moeoff.policies import PRESETS, Predictor, Strategy, get_strategy
from moeoff.policies.base import StrategyPart
from moeoff.policies.fate import proportional_boundary
from moeoff.policies.hobbit import recorded_unimportance, thresholds
from paper_figures import FIGURES, Data
from results import HELP, ResultsFile, machine
from verdicts import NOT_TESTABLE, REPRODUCED

TEXTS = [str(ROOT / "tests" / "data" / name) for name in ("prose.txt", "prose-2.txt", "code.txt")]
INT4, INT2 = "int4", "int2"
BITS = {"fp32": 32.0, "fp16": 16.0, INT4: 4.5, INT2: 2.25}  # of a weight: Q4_0's and Q2_0's
ROUND = 256  # tokens of held-out text that a round decodes, and of a prompt
EVERYTHING = 1 << 40  # expert_memory that holds all


# the papers' systems and their baselines


@dataclass(frozen=True)
class Contender:
    """Attributes:
    paper: what the paper says that it is, and where. strategy: ours, by name; its
    predictor, if it has one, always reads ahead, as in the papers. differs: what is not
    as the paper says. changes: fields of the strategy that differ. execution: what the
    system does beside its strategy. by_layer: each layer has a room of its own. bits:
    of the experts. low: bits of what is served in low precision, and the fields of
    `LowVersions`; "paper" in the place of T1 and T2: by the paper's shares. widths:
    each expert has a width of its own (EdgeMoE §3.2). whole_layers: the device has the
    experts of the first layers, and no others.
    """

    paper: str
    strategy: str
    differs: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    execution: Execution = Execution()
    by_layer: bool = False
    bits: str = "fp16"
    low: tuple[str, Mapping[str, Any]] | None = None
    widths: bool = False
    whole_layers: bool = False

    def made(self) -> Strategy:
        return replace(get_strategy(self.strategy), ab_tested=False, **self.changes)


# an expert that is missing is sent when it is its turn
SERIAL = Execution(eager=False, reordered=NEVER, chunked=False, order=BY_ID)
NAMED = replace(SERIAL, order=AS_NAMED)
FATE = replace(SERIAL, reordered=PROMPTS, order=POPULAR)
EDGEMOE = Execution(eager=True, reordered=NEVER, chunked=False)
HOBBIT = Execution(eager=True, reordered=NEVER, chunked=False)
AHEAD = {"options": {"stride": 2}, "bounded": False}  # of ProMoE's parts
IN_TURN = replace(SERIAL, predict_us=200)  # ProMoE §4.2
SHIPPED = "moeoff"
# lossless ones, by machine
BESIDE = {"Fate": "Fate, lossless", "HOBBIT": "HOBBIT, lossless", "ProMoE": "ProMoE"}
STEP = "a miss is sent when its expert is computed, in the experts' order"
CONTENDERS = {
    "LoD": Contender("keeps no expert, sends each when it is routed to (§5.1)", "on-demand", "-", execution=NAMED),
    "Fate, prefetching": Contender("LoD with §4.3 (§5.4)", "fate", "-", {"keep": False, "policy": None}, FATE),
    "Fate, lossless": Contender("prefetching and cache (§5.4)", "fate", "L is 2 of 12 layers, in proportion", {}, FATE, True),
    "EAP": Contender("Fate's cache; the expert path of one layer (§5.1)", "eap", "its prompts in the order of the tokens, as §4.3 says of others", {}, NAMED, True),
    "EAP, int4": Contender("the same cache; its precision is not said", "eap", "int4, so that the comparison is of the prefetching", {}, NAMED, True, INT4),
    "Fate": Contender("int4 in the cache and over the link, of a prompt's experts a quarter in int2 (§4.5); the high-end PC", "fate",
                      "Q4_0 and Q2_0 in the place of HQQ", {}, FATE, True, INT4, (INT2, {"prefill": 0.25})),
    "IO-EXP": Contender("sends what is activated; caches nothing (§4.1, §4.2)", "on-demand", "4 experts a layer in the place of 1", {"eager": True}, EDGEMOE, bits="fp32"),
    "IO-QEXP": Contender("the same in int4", "on-demand", "Q4_0 in the place of MoQE", {"eager": True}, EDGEMOE, bits=INT4),
    "EdgeMoE, Q": Contender("IO-EXP with a width for each expert (§4.4)", "on-demand", "Q4_0 and Q2_0 at a loss of 5 %", {"eager": True}, EDGEMOE,
                            bits=INT4, widths=True),
    "EdgeMoE, Q+P": Contender("with preloading (§4.4)", "edgemoe", "-", {"keep": False, "policy": None, "fill": False},
                              EDGEMOE, bits=INT4, widths=True),
    "EdgeMoE": Contender("with the expert buffer (§4.4)", "edgemoe", "-", {}, EDGEMOE, bits=INT4, widths=True),
    "Mixtral-offloading": Contender("LRU, the next layer's gate (§5.1; ProMoE §8)", "lru+gate", STEP, {}, NAMED, True),
    "HOBBIT, no prefetching": Contender("Float16 without §3.3 (§5.5.2)", "hobbit", "-", {"predictor": None}, HOBBIT),
    "HOBBIT, lossless": Contender("Float16 without §3.2 (§5.5.1)", "hobbit", "-", {}, HOBBIT),
    "HOBBIT, mixed, no prefetching": Contender("Float16+Int4 without §3.3", "hobbit", "-", {"predictor": None}, HOBBIT, low=(INT4, {"paper": True})),
    "HOBBIT": Contender("Float16+Int4 (§5.1)", "hobbit", "T1 and T2 by the paper's shares of this model's experts; copies are not kept", {}, HOBBIT,
                        low=(INT4, {"paper": True})),
    "HOBBIT, both sides": Contender("the CPU computes with what is missing (§4, §5.4)", "hobbit", "what is missing is not sent afterwards", {},
                                    replace(HOBBIT, cooperative=True), low=(INT4, {"paper": True})),
    "llama.cpp, both sides": Contender("layers on the GPU, the others on the CPU (§4)", "lru", "-", {}, replace(HOBBIT, cooperative=True), whole_layers=True),
    "static": Contender("a fixed set of experts (§7.1)", "static", f"{STEP}; what is loaded goes first", {}, SERIAL),
    "LRU": Contender("LRU in each layer, no prefetching: `base` (§7.3)", "lru", STEP, {}, SERIAL, True),
    "+ prefetch": Contender("base with prefetching (§7.3)", "lru+learned", "-", AHEAD,
                             IN_TURN, True),
    "+ chunked prefetch": Contender("in three chunks (§5.1)", "lru+learned", "-", AHEAD,
                                     replace(IN_TURN, chunked=True), True),
    "+ early preemption": Contender("misses are sent when the gate has chosen (§5.2)", "lru+learned", "-", AHEAD,
                                    Execution(reordered=NEVER, order=BY_ID, predict_us=200), True),
    "ProMoE": Contender("what is there is computed first (§5.3)", "lru+learned", "-", AHEAD,
                          Execution(order=BY_ID, predict_us=200), True),
    SHIPPED: Contender("none: the default of `moeoff run`", "auto", "always predicts", {}),
}  # fmt: skip


# their machines


@dataclass(frozen=True)
class Machine:
    """A device as a paper describes it. How long a layer takes without its experts
    follows from what the paper says of waiting.

    Attributes:
        link, device: GB/s, 85 % of data sheets.
        host: of what a processor computes with; HOBBIT's takes 5 ms for an expert of
            Mixtral (§5.4).
        shares: of the experts' bytes in the contender's precision, what the device
            holds.
        says: where the paper says how long it waits.
        layer: nanoseconds, from those of sending and of computing all that a token
            selects in a layer, and of sending what is missed of it.
    """

    link: float
    device: float
    bits: str
    shares: tuple[float, float]
    says: str
    layer: Callable[[float, float, float], float]
    host: float = 70.0

    def bandwidths(self, nbytes: float, n_used: int, missed: float) -> Bandwidths:
        """nbytes: of an expert in the paper's precision; missed: of those that a token
        selects in a layer, the share that LRU by layer misses with half of them.
        """
        send, compute = nbytes / self.link, n_used * nbytes / self.device
        return Bandwidths(
            self.link,
            self.device,
            self.host,
            max(self.layer(n_used * send, compute, missed * n_used * send), 1.0) / 1000,
        )


MACHINES = {
    "Fate": Machine(0.85 * 16, 0.85 * 936, "fp16", (0.25, 0.5), "RTX 3090, PCIe 3.0 x16; a layer computes 13 ms, an expert is sent in 6 (§3.2)",
                    lambda send, compute, missed: send / 4 * 13 / 6 - compute),
    "EdgeMoE": Machine(0.85 * 0.55, 0.85 * 59.7, "fp32", (0.1, 0.25), "Jetson TX2, SSD; IO-EXP takes 3.2 to 3.9 times as long as with all in memory (§2.2)",
                       lambda send, compute, missed: (send + compute - 3.55 * compute) / 2.55),
    "EdgeMoE, hard disk": Machine(0.85 * 0.05, 0.85 * 59.7, "fp32", (0.1, 0.25), "the same with a hard disk of 50 MB/s (§4.2)",
                                  lambda send, compute, missed: (send / 11 + compute - 3.55 * compute) / 2.55),
    "HOBBIT": Machine(0.85 * 32, 0.85 * 1008, "fp16", (0.25, 0.5), "RTX 4090, PCIe 4.0; loading on demand is 85.5 % of the time (Fig. 3a)",
                      lambda send, compute, missed: send / 0.855 - send - compute),
    "ProMoE": Machine(0.85 * 32, 0.85 * 1008, "fp16", (0.25, 0.5), "RTX 4090, PCIe 4.0, llama.cpp; with half of the experts LRU waits 79.0 % (Fig. 4)",
                      lambda send, compute, missed: missed / 0.79 - missed - compute),
    "ProMoE, transformers": Machine(0.85 * 32, 0.85 * 1008, "fp16", (0.25, 0.5), "the same, transformers; LRU waits 60.4 % (§2.3)",
                                    lambda send, compute, missed: missed / 0.604 - missed - compute),
}  # fmt: skip


# their claims


@dataclass(frozen=True)
class Ratio:
    """A claim about speed: of one contender over another.

    Attributes:
        claim: the paper's factor, or the ends of its range; None: no number.
        says: how the paper puts it.
        fast, slow: names of `CONTENDERS`, or stock.
        prompt: of prompts; False: of decoding.
        on: of `MACHINES`, if not the paper's first.
    """

    paper: str
    figure: str
    what: str
    claim: float | tuple[float, float] | None
    says: str
    fast: str
    slow: str
    prompt: bool = False
    on: str = ""


RATIOS = (
    Ratio("Fate", "11", "prompts, over load on demand", 4.5, "up to 4.5", "Fate", "LoD", True),
    Ratio("Fate", "11", "prompts, over EAP", 1.9, "up to 1.9", "Fate", "EAP, int4", True),
    Ratio(
        "Fate",
        "11",
        "prompts, over EAP, lossless",
        1.9,
        "up to 1.9, with int2",
        "Fate, lossless",
        "EAP",
        True,
    ),
    Ratio("Fate", "12", "decode, over load on demand", 4.1, "up to 4.1", "Fate", "LoD"),
    Ratio("Fate", "12", "decode, over EAP", 2.2, "up to 2.2", "Fate", "EAP, int4"),
    Ratio(
        "Fate",
        "12",
        "decode, over EAP, lossless",
        2.2,
        "up to 2.2, in int4",
        "Fate, lossless",
        "EAP",
    ),
    Ratio(
        "Fate",
        "14",
        "prefetching, over load on demand",
        1.3,
        "1.3 on average",
        "Fate, prefetching",
        "LoD",
    ),
    Ratio("Fate", "14", "with cache, over load on demand", 2.0, "up to 2", "Fate, lossless", "LoD"),
    Ratio("Fate", "14", "with quantization, over load on demand", 3.7, "up to 3.7", "Fate", "LoD"),
    Ratio(
        "EdgeMoE", "11", "a token, over IO-EXP", (2.63, 3.01), "2.63 to 3.01", "EdgeMoE", "IO-EXP"
    ),
    Ratio(
        "EdgeMoE",
        "11",
        "a token, over IO-EXP, from a hard disk",
        (4.49, 4.76),
        "4.49 to 4.76",
        "EdgeMoE",
        "IO-EXP",
        on="EdgeMoE, hard disk",
    ),
    Ratio(
        "EdgeMoE", "11", "a token, over IO-QEXP", (1.35, 1.5), "1.35 to 1.5", "EdgeMoE", "IO-QEXP"
    ),
    Ratio(
        "EdgeMoE",
        "16",
        "a width for each expert",
        2.01,
        "2.01 (0.789 s, 0.392 s)",
        "EdgeMoE, Q",
        "IO-EXP",
    ),
    Ratio(
        "EdgeMoE", "16", "preloading", 1.29, "1.29 (0.392 s, 0.305 s)", "EdgeMoE, Q+P", "EdgeMoE, Q"
    ),
    Ratio(
        "EdgeMoE", "16", "expert buffer", 1.24, "1.24 (0.305 s, 0.245 s)", "EdgeMoE", "EdgeMoE, Q+P"
    ),
    Ratio(
        "HOBBIT",
        "14d",
        "decode, over Mixtral-offloading",
        (3.21, 3.29),
        "3.21 and 3.29",
        "HOBBIT",
        "Mixtral-offloading",
    ),
    Ratio(
        "HOBBIT",
        "14d",
        "prompts, over Mixtral-offloading",
        (2.04, 2.17),
        "51 and 54 % less",
        "HOBBIT",
        "Mixtral-offloading",
        True,
    ),
    Ratio(
        "HOBBIT",
        "15",
        "decode, experts on both sides, over llama.cpp's layers on both",
        (1.31, 1.42),
        "1.31 and 1.42",
        "HOBBIT, both sides",
        "llama.cpp, both sides",
    ),
    Ratio(
        "HOBBIT",
        "16",
        "its low precision",
        (1.19, 1.57),
        "1.19 to 1.57",
        "HOBBIT",
        "HOBBIT, lossless",
    ),
    Ratio(
        "HOBBIT",
        "17b",
        "prefetching, lossless",
        1.01,
        "1.01 (Mixtral)",
        "HOBBIT, lossless",
        "HOBBIT, no prefetching",
    ),
    Ratio(
        "HOBBIT",
        "17b",
        "prefetching, in mixed precision",
        1.05,
        "1.05",
        "HOBBIT",
        "HOBBIT, mixed, no prefetching",
    ),
    Ratio("ProMoE", "11", "decode, over LRU", 1.09, "1.09 on average, up to 1.17", "ProMoE", "LRU"),
    Ratio(
        "ProMoE",
        "11",
        "decode, over static",
        1.49,
        "1.49 on average, up to 1.79",
        "ProMoE",
        "static",
    ),
    Ratio(
        "ProMoE",
        "11",
        "prompts, over LRU",
        2.12,
        "2.12 on average, up to 2.22",
        "ProMoE",
        "LRU",
        True,
    ),
    Ratio(
        "ProMoE",
        "11",
        "prompts, over static",
        1.36,
        "1.36 on average, up to 1.75",
        "ProMoE",
        "static",
        True,
    ),
    Ratio(
        "ProMoE",
        "12",
        "decode, prefetching alone, over LRU",
        None,
        "no number",
        "+ prefetch",
        "LRU",
        on="ProMoE, transformers",
    ),
    Ratio(
        "ProMoE",
        "12",
        "decode, chunks",
        None,
        "no number",
        "+ chunked prefetch",
        "+ prefetch",
        on="ProMoE, transformers",
    ),
    Ratio(
        "ProMoE",
        "12",
        "decode, early preemption",
        None,
        "no number",
        "+ early preemption",
        "+ chunked prefetch",
        on="ProMoE, transformers",
    ),
    Ratio(
        "ProMoE",
        "12",
        "decode, reordered inference",
        None,
        "no number",
        "ProMoE",
        "+ early preemption",
        on="ProMoE, transformers",
    ),
    Ratio(
        "ProMoE",
        "12",
        "decode, all of them",
        1.35,
        "1.35",
        "ProMoE",
        "LRU",
        on="ProMoE, transformers",
    ),
    Ratio(
        "ProMoE",
        "12",
        "prompts, with early preemption",
        1.27,
        "1.27",
        "+ early preemption",
        "LRU",
        True,
        "ProMoE, transformers",
    ),
    Ratio(
        "ProMoE",
        "12",
        "prompts, all of them",
        2.39,
        "2.39",
        "ProMoE",
        "LRU",
        True,
        "ProMoE, transformers",
    ),
)
UNTESTED = {  # what of their evaluation has no row, and why
    "Fate": [
        ("Table 1", "the positions 1 and 3 before the gate, and prompts", "gate events have the gate's input alone; a prompt's batch selects nearly all experts"),
        ("11, 12", "the low-end PC: 1.8 and 1.5 in prompts, 2.3 and 1.6 in decode", "how long its layers take is not said"),
        ("7, 13", "accuracy by layer, decode by memory budget", "pictures without numbers; by layer stands with Table 1, two budgets with 12"),
        ("10, Tables 2, 3", "accuracy on MMLU, GSM8K, HumanEval", "the demo model solves none of them; losses stand below"),
    ],
    "EdgeMoE": [
        ("10, 12, Table 2", "memory, latency of a sample and storage of Switch Transformers", "encoder-decoder models are outside llama.cpp"),
        ("11", "Raspberry Pi 4B: 4.49 to 5.43 over IO-EXP; over STI: 1.11 to 2.78", "the rate of its card is not said; STI is not here"),
        ("14, 15", "latency by memory budget and by tolerated loss", "pictures without numbers; two budgets stand with 11"),
    ],
    "HOBBIT": [
        ("14a, b", "over llama.cpp and MoE-Infinity on a Jetson Orin: 13.0, 18.9 and 3.64, 9.93", "a machine of theirs; MoE-Infinity is not here"),
        ("15", "over Fiddler", "it is not here"),
        ("17a", "the cost of stacked gates", "a picture without numbers"),
        ("Table 3", "accuracy on GSM8K and TruthfulQA", "the demo model solves none of them; losses stand below"),
    ],
    "ProMoE": [
        ("10", "over static and LRU in the authors' transformers", "their own code; Fig. 11 and 12 stand above"),
        (
            "10, 11",
            "over offloading and unified memory: 2.20 (up to 3.21) in prompts, 2.07 (up to 5.02) in decode",
            "means over baselines that are not here",
        ),
        ("13 to 24", "by cache rate, batch size and bits of a weight", "machines and models of theirs; two cache rates stand with 11 and 12"),
    ],
}  # fmt: skip
PAPERS = ("Fate", "EdgeMoE", "HOBBIT", "ProMoE")


# their systems on the simulated machines


class Runs:
    """The rounds of each contender on each machine, computed at first use.

    A round is a part of the held-out text.

    Args:
        widths: [n_gates, n_experts] of EdgeMoE's plan, as shares of its upper width.
    """

    def __init__(
        self,
        d: Data,
        widths: np.ndarray,
        n_rounds: int,
        announce: Callable[[str], None] = lambda what: None,
    ):
        self._d, self._widths, self._announce = d, widths, announce
        self._profile = profile_of(d)
        self.parts = [
            d.held.part(i * ROUND, (i + 1) * ROUND)
            for i in range(min(n_rounds, d.held.n_tokens // ROUND))
        ]
        self._known: dict[tuple[Any, ...], list[DeviceResult]] = {}
        self._missed: float | None = None

    def missed(self) -> float:
        """Return the share of a token's experts that LRU by layer misses with half of
        the experts on the device.
        """
        if self._missed is None:
            rounds = self._run("LRU", Bandwidths(), 0.5, False, None)
            self._missed = sum(r.host for r in rounds) / sum(r.host + r.device for r in rounds)
        return self._missed

    def of(
        self,
        name: str,
        on: str,
        share: float,
        prompt: bool = False,
        predictor: type[Predictor] | None = None,
    ) -> list[DeviceResult]:
        """Return the results of each round.

        Args:
            name: Contender, a key of `CONTENDERS`.
            on: Machine, a key of `MACHINES`.
            share: Share of the experts on the device.
            prompt: Whether prompts are processed instead of decoding.
            predictor: Predictor instead of the contender's own.
        """
        key = (name, on, share, prompt, predictor)
        if key not in self._known:
            self._announce(
                f"{name} on {on}'s machine,"
                f" {share:.0%}{', prompts' if prompt else ''}{f', {predictor.name}' if predictor else ''}"
            )
            m = MACHINES[on]
            speeds = m.bandwidths(
                WEIGHTS
                * len(self._d.held.model.tensors)
                / self._d.held.model.n_gates
                * BITS[m.bits]
                / 8,
                self._d.k,
                self.missed(),
            )
            self._known[key] = self._run(name, speeds, share, prompt, predictor)
        return self._known[key]

    def _run(
        self,
        name: str,
        speeds: Bandwidths,
        share: float,
        prompt: bool,
        predictor: type[Predictor] | None,
    ) -> list[DeviceResult]:
        c, strategy = CONTENDERS[name], CONTENDERS[name].made()
        if predictor is not None:  # as far ahead
            own = strategy.predictor.defaults | strategy.options
            strategy = replace(
                strategy,
                predictor=predictor,
                options={name: own[name] for name in predictor.defaults if name in own},
                share=0.0,
            )
        low = None
        if c.low is not None:
            bits, fields = c.low
            if "paper" in fields:
                fields = dict(zip(("t1", "t2"), thresholds(recorded_unimportance(self._d.train))))
            low = LowVersions(BITS[bits] / BITS[c.bits], **fields)
        out = []
        for part in self.parts:
            tensors = tuple(
                replace(t, nbytes=round(WEIGHTS * BITS[c.bits] / 8)) for t in part.model.tensors
            )
            part = replace(part, model=replace(part.model, tensors=tensors))
            baselines.Oracle.text = part
            # room for what is computed with, and for nothing else
            held = share if strategy.keep else max(share, 0.1)
            out.append(
                on_device(
                    part, strategy, self._d.model_index, speeds, share=held, by_layer=c.by_layer, whole_layers=c.whole_layers, execution=c.execution, low=low,
                    widths=self._widths if c.widths else None, profile=self._profile, tokens=ROUND, prompt=ROUND // 2 if prompt else 0,
                )
            )  # fmt: skip
        if strategy.predictor is not None and not prompt and not any(r.ahead for r in out):
            raise AssertionError(f"{name} predicts, and nothing is sent ahead")
        return out


WEIGHTS = 1 << 21  # of a matrix of an expert; only the machine's proportions count


def on_simulated(r: Ratio, runs: Runs) -> tuple[str, str, str]:
    """Return our ratios, the verdict, and the causes that an experiment found where
    they are not as claimed.
    """
    on = r.on or r.paper
    shares, ratios, outcomes, causes = MACHINES[on].shares, [], [], []
    for share in shares:
        fast, slow = (runs.of(name, on, share, r.prompt) for name in (r.fast, r.slow))
        ratios.append(verdicts.ratio([x.tps for x in fast], [x.tps for x in slow]))
        reachable = verdicts.ratio([unwaited(x) for x in fast], [x.tps for x in slow]).value
        outcomes.append(verdicts.verdict(r.claim, ratios[-1], reachable=reachable))
    for share, verdict in zip(shares, outcomes):
        if verdict != REPRODUCED:
            causes.append(f"{share:.0%}: {cause(r, on, share, runs)}")
    ours = ", ".join(f"{verdicts.text(x)} with {share:.0%}" for x, share in zip(ratios, shares))
    return (
        f"{r.fast} / {r.slow}: {ours}",
        (
            outcomes[0]
            if outcomes[0] == outcomes[1]
            else ", ".join(f"{s} with {share:.0%}" for s, share in zip(outcomes, shares))
        ),
        "; ".join(causes),
    )


def unwaited(result: DeviceResult) -> float:
    """Tokens per second, had it never waited."""
    return 1e9 * result.n_tokens / (result.ns - result.stall_ns)


def cause(r: Ratio, on: str, share: float, runs: Runs) -> str:
    """The ratio if the faster one never waited, which it cannot exceed; and with a
    predictor that is always right.
    """
    fast, slow = (runs.of(name, on, share, r.prompt) for name in (r.fast, r.slow))
    out = (
        "without any waiting"
        f" {verdicts.ratio([unwaited(x) for x in fast], [x.tps for x in slow]).value:.2f}"
    )
    if not r.prompt and CONTENDERS[r.fast].made().predictor is not None:
        right = runs.of(r.fast, on, share, predictor=baselines.Oracle)
        out += (
            ", always predicted right"
            f" {verdicts.ratio([x.tps for x in right], [x.tps for x in slow]).value:.2f}"
        )
    return out


def collect(model: str, texts: tuple[str, ...], tokens: int, hidden: int) -> Data:
    """Record one pass over the texts; every fifth sequence is held out."""
    from moeoff.measure.profile_fit import fit
    from moeoff.measure.record import record, recordable, sequences
    from moeoff.policies import FitOptions
    from moeoff.policies.replay import simulate

    model_index = ModelIndex.read(model)
    with recordable(model_index) as (llm, router):
        recording = record(llm, sequences(llm, texts, tokens), router, Path(model).name)
    train, held = (recording.take(part) for part in recording.split(0.2))
    options = FitOptions(hidden=hidden, replay=simulate)  # HOBBIT's weights are fitted on replays
    # as the papers' systems have it, whether it helps or not
    learned = {"popularity", "gate", "path", "pairs", "first", "tokens", "learned"}
    sections = fit(train, options, only=learned, compare=False) | fit(
        train, options, only={"hobbit"}
    )
    # the fitted one: `shallow`
    sections["shallow"] = {"shallow": np.array([proportional_boundary(router.n_gates)])}
    return Data(model_index, train, held, sections)


def profile_of(d: Data) -> Profile:
    return Profile(
        "",
        {
            f"{section}/{name}": array
            for section, named in d.sections.items()
            for name, array in named.items()
        },
        {},
    )


# quality


def planned_widths(model: str, texts: Sequence[str], tokens: int) -> tuple[np.ndarray, BitsPlan]:
    """EdgeMoE's plan at a loss of 5 % (§4.1), and its widths as shares of the upper
    one.
    """
    with Planner(
        model,
        texts,
        types=["Q4_0", "Q2_0"],
        ctx=256,
        tokens=tokens,
        n_threads=2,
        expert_memory=EVERYTHING,
    ) as plans:
        plan, index = plans.plan(0.05), plans.model_index
    # a plan whose lower type fits everywhere has no importance and no low experts
    upper = BITS[{"Q4_0": INT4, "Q2_0": INT2}[plan.upper]] / BITS[INT4]
    layers = sorted({parse_tensor_name(name).layer for name in index.experts})
    widths = np.full((len(layers), index.n_expert), upper)
    for layer, expert in plan.low:
        widths[layers.index(layer), expert] = BITS[INT2] / BITS[INT4]
    return widths, plan


def loss_text(loss: Estimate | None) -> str:
    return "" if loss is None else verdicts.text(loss, "{:+.1%}").replace("%", " %")


def losses(
    model: str, texts: Sequence[str], windows: int, t1: float, t2: float, plan: BitsPlan
) -> list[tuple[str, str]]:
    """Perplexity of the lossy presets over the model's own, as `moeoff eval` measures
    it of runs that repeat.
    """
    out = []
    with tempfile.TemporaryDirectory(prefix="moeoff-papers-") as folder:
        bits = Path(folder, "bits.json")
        bits.write_text(plan.to_json())
        experts = convert(
            model, output=Path(folder, "tiers.experts.gguf"), tiers="Q4_0,Q2_0", bits=bits
        ).path
        for strategy in (s for s in PRESETS.values() if s.tier or not s.precision.lossless):
            by_weight = strategy.precision.t1 < 1
            for share in (0.25, 0.5) if by_weight else (1.0,):
                precision = (
                    replace(strategy.precision, t1=t1, t2=t2, resident=share)
                    if by_weight
                    else strategy.precision
                )
                measured = evaluate_model(model, texts, ctx=256, chunks=windows, mode="simulated" if by_weight else "prefill", strategy=strategy, precision=precision,
                                       experts=experts, profile=False, deterministic=True, n_threads=2)  # fmt: skip
                out.append(
                    (
                        strategy.name
                        + (f", {share:.0%} of each layer's experts there" if by_weight else ""),
                        loss_text(measured.quality.loss),
                    )
                )
    name = (
        f"{plan.lower} for {len(plan.low)} of {plan.n_experts} experts, {plan.upper} for the"
        " others: edgemoe-lossy's plan"
    )
    return [*out, (name, f"{loss_text(plan.quality.loss)}, of the text that it was planned on")]


# the commands


HEAD = ("figure", "what", "the paper", "here", "verdict", "looked for the cause")


@click.command(help=__doc__)
@click.option(
    "-m", "--model", type=click.Path(exists=True, dir_okay=False), help="Default: the demo model."
)
@click.option(
    "--text",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Default: the tests' prose and code.",
)
@click.option("--quick", is_flag=True, help="Few tokens.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str | None, text: tuple[str, ...], quick: bool, json_file: str | None) -> None:
    """A table for each paper: claim, like with like, result, verdict, cause."""
    from moeoff.system.files import demo_model

    began = time.monotonic()

    def announce(what: str) -> None:
        print(f"  {(time.monotonic() - began) / 60:.0f} min: {what}", file=sys.stderr, flush=True)

    model, texts = model or demo_model(), text or tuple(TEXTS)
    announce("one pass over the texts, and what the predictors learn")
    d = collect(model, texts, 3072 if quick else 12288, 64 if quick else 128)
    announce("EdgeMoE's widths")
    widths, plan = planned_widths(model, texts[1:] or texts, 4096 if quick else 16384)
    runs = Runs(d, widths, 2 if quick else 8, announce)
    print(
        f"{machine()}; {Path(d.model_index.files[0]).name}, {d.train.n_tokens:,} tokens learned"
        f" from, {d.held.n_tokens:,} held out, {len(runs.parts)} rounds"
    )
    counted: dict[str, dict[str, str]] = {}
    with ResultsFile(json_file) as results:
        for paper in PAPERS:
            table = results.table(paper.lower(), paper, HEAD)
            of_rows = counted.setdefault(paper, {})

            def row(figure: str, what: str, claim: str, ours: str, verdict: str, why: str) -> None:
                table.row(figure, what, claim, ours, verdict, why)  # noqa: B023  called at once
                of_rows[ours or what] = verdict  # noqa: B023

            for measured in FIGURES:
                if measured.paper == paper:
                    announce(measured.__name__)
                    f = measured(d)
                    row(f.figure, f.what, f.claim, f.ours, f.verdict, f.cause)
            for r in (r for r in RATIOS if r.paper == paper):
                row(r.figure, r.what, r.says, *on_simulated(r, runs))
            for figure, what, why in UNTESTED[paper]:
                row(figure, what, "", "", NOT_TESTABLE, why)
        table = results.table(
            "verdicts", "How often which", ["paper", *verdicts.RULES, verdicts.SPLIT]
        )
        kinds = (*verdicts.RULES, verdicts.SPLIT)
        for paper, of_rows in counted.items():  # a measurement beside two figures counts once
            outcomes = [verdicts.counted(verdict) for verdict in of_rows.values()]
            table.row(paper, *(str(outcomes.count(kind)) for kind in kinds))
        shipped(results, runs)
        contenders(results, runs)
        announce("losses")
        table = results.table(
            "losses",
            "Perplexity over the model's own, on text that no widths were planned on",
            ["served", "loss (95 %)"],
        )
        for line in losses(
            model, texts[:1], 4 if quick else 24, *thresholds(recorded_unimportance(d.train)), plan
        ):
            table.row(*line)
    announce("done")


def named(part: type[StrategyPart] | None, none: str = "none") -> str:
    return none if part is None else part.name


def shipped(results: ResultsFile, runs: Runs) -> None:
    """Write a table of moeoff's default beside each paper's system, on its machine."""
    title = "Decode with moeoff's default: times the paper's lossless system, and times LRU"
    columns = ["", "share", "times the paper's system", "times LRU"]
    table = results.table("shipped", title, columns)
    for on, system in BESIDE.items():
        for share in MACHINES[on].shares:
            ours, theirs, lru = (
                [r.tps for r in runs.of(name, on, share)] for name in (SHIPPED, system, "LRU")
            )
            ratios = (verdicts.text(verdicts.ratio(ours, tps)) for tps in (theirs, lru))
            table.row(system, f"{share:.0%}", *ratios)


def contenders(results: ResultsFile, runs: Runs) -> None:
    """Write the tables of the contenders, of the machines and of the speeds."""
    table = results.table(
        "contenders",
        "What the papers say they are, and ours",
        ["contender", "the paper", "ours", "what differs"],
    )
    for name, c in CONTENDERS.items():
        e = c.execution
        does = [
            (
                f"`{named(c.made().policy)}+{named(c.made().predictor)}`"
                if c.made().keep
                else f"`{named(c.made().predictor, 'nothing')}`, kept nowhere"
            ),
            c.bits,
        ]
        does += [f"and {c.low[0]}"] if c.low else []
        does += ["a width for each expert"] if c.widths else []
        does += ["a room for each layer"] if c.by_layer else []
        does += ["the first layers'"] if c.whole_layers else []
        does += ["not sent" if e.cooperative else "sent at once" if e.eager else "sent in turn"] + {
            NEVER: [],
            PROMPTS: ["prompts reordered"],
        }.get(e.reordered, ["reordered"])
        does += (["in chunks"] if e.chunked else []) + [f"prompts {e.order}"]
        table.row(name, c.paper, ", ".join(does), c.differs)
    table = results.table(
        "machines",
        "Their machines",
        ["machine", "as the paper says", "link, GB/s", "a layer without its experts, µs", "shares"],
    )
    for name, m in MACHINES.items():
        speeds = m.bandwidths(WEIGHTS * 3 * BITS[m.bits] / 8, runs._d.k, runs.missed())
        table.row(
            name,
            m.says,
            f"{speeds.link:.2f}",
            f"{speeds.layer_us:.0f}",
            " and ".join(f"{share:.0%}" for share in m.shares),
        )
    columns = [
        "machine",
        "contender",
        "share",
        "of",
        "tok/s",
        "of each round",
        "without any waiting",
        "sent, MB/token",
    ]
    table = results.table(
        "runs",
        "Tokens per second, the geometric mean of the rounds, and what of these they would be"
        " without waiting",
        columns,
    )
    for (name, on, share, prompt, predictor), rounds in sorted(
        runs._known.items(), key=lambda item: str(item[0][1:2] + item[0])
    ):
        tps, without = (
            np.exp(np.mean(np.log(values)))
            for values in ([r.tps for r in rounds], [unwaited(r) for r in rounds])
        )
        table.row(on, name + (", always predicted right" if predictor else ""), f"{share:.0%}", "prompts" if prompt else "decode", f"{tps:.5g}",
                  ", ".join(f"{r.tps:.5g}" for r in rounds), f"{without:.5g}", f"{sum(r.up_bytes for r in rounds) / sum(r.n_tokens for r in rounds) / 1e6:.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
