"""The papers' figures about routing itself, on any model and text: what each says of
its models, and what is so here. Times nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import baselines  # noqa: F401  registers them
import verdicts
from moeoff.gguf.model_index import ModelIndex, parse_tensor_name
from moeoff.gguf.quantize import dequantize
from moeoff.measure.bit_allocation import _expert
from moeoff.measure.statistics import Estimate
from moeoff.policies import FitOptions, Predictor, get_predictor
from moeoff.policies.base import recall, top_k
from moeoff.policies.fate import CrossLayerGate, proportional_boundary
from moeoff.policies.hobbit import (
    LOW_COST,
    T1,
    T2,
    WEIGHT_NAMES,
    MissCost,
    recorded_unimportance,
    thresholds,
)
from moeoff.policies.replay import simulate
from moeoff.routing.recording import Recording
from moeoff.routing.trace import Trace
from verdicts import CLOSE, OPPOSITE, REPRODUCED, of_values, verdict, weakest

PROMPT = 256  # tokens of a prompt: Fate measures 128 to 512
SAMPLE = 512  # tokens whose experts' outputs are computed


@dataclass(frozen=True)
class Figure:
    """One claim beside what was measured.

    Attributes:
        claim: what the paper reports, on its models.
        ours: the same of this model and text.
        verdict: of `verdicts.RULES`, by rule.
        cause: where it is not as the paper says, what an experiment found.
    """

    paper: str
    figure: str
    what: str
    claim: str
    ours: str
    verdict: str
    cause: str = ""


@dataclass(frozen=True, eq=False)
class Data:
    """train is what `sections` of a profile were learned from, held what figures are
    about.
    """

    model_index: ModelIndex
    train: Recording
    held: Recording
    sections: dict[str, dict[str, np.ndarray]]

    @property
    def k(self) -> int:
        return self.held.router.n_used[1]


FIGURES: list[Any] = []  # functions of a `Data`, each with its `paper`


def figure(
    paper: str, figure: str, what: str, claim: str
) -> Callable[[Callable[[Data], tuple[str, ...]]], Callable[[Data], Figure]]:
    """Makes a figure of a function that tells what is so here, the verdict, and a cause
    if one was measured.
    """

    def decorate(measure: Callable[[Data], tuple[str, ...]]) -> Callable[[Data], Figure]:
        @functools.wraps(measure)
        def measured(d: Data) -> Figure:
            return Figure(paper, figure, what, claim, *measure(d))

        measured.paper = paper
        FIGURES.append(measured)
        return measured

    return decorate


def percent(*values: float) -> str:
    """Format one number, or mean and range of several, as percentages."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f} %"
    return f"{100 * np.mean(values):.1f} % ({100 * min(values):.1f} to {100 * max(values):.1f})"


@figure(
    "Fate",
    "Table 1",
    "accuracy of the next layer's gate in decode, at k and above the 75th percentile",
    "78.8 %, 97.2 %",
)
def fate_1(d: Data) -> tuple[str, str]:
    """Measure the recall by layer on held-out text."""
    at_k, wide = recalls(d)
    chance = d.k / d.held.router.n_experts
    claims = ((0.7879, at_k, chance), (0.9715, wide, 0.25))
    both = [verdict(claim, of_values(values), floor, perfect=1) for claim, values, floor in claims]
    return (
        f"{percent(*at_k)}, {percent(*wide)} by layer; chance {percent(chance)}, 25.0 %",
        weakest(both),
    )


@functools.lru_cache(maxsize=1)
def recalls(d: Data) -> tuple[list[float], list[float]]:
    """Return the recall of the gate before each layer but the first, at k and at a
    quarter of the experts.
    """
    arrays, router, used = (
        CrossLayerGate.fit(d.held),
        d.held.router,
        d.held.used()[d.held.input_tokens],
    )
    wide = []
    for target in range(1, router.n_gates):
        weight, bias = router.ahead(target - 1, target, bool(arrays["next_norm"][target]))
        logits = d.held.inputs[:, target - 1].astype(np.float32) @ weight.T + (
            0 if bias is None else bias
        )
        wide.append(
            recall(
                router.selection(target, router.gated(logits)),
                used[:, target],
                round(router.n_experts / 4),
            )
        )
    return np.maximum(arrays["recall_raw"], arrays["recall_norm"])[1:].tolist(), wide


@figure(
    "Fate",
    "4.4",
    "hits with all experts of the first layers there, and in the others those above the 75th"
    " percentile",
    "99.08 %",
)
def fate_shallow(d: Data) -> tuple[str, str]:
    """Measure the hit rate with a proportional number of first layers, and one more.

    The paper's text has layers 0 to 3 of 24, its rule three.
    """
    n, wide = d.held.model.n_gates, recalls(d)[1]
    few = proportional_boundary(n)
    hits = {shallow: [1.0] * shallow + wide[shallow - 1 :] for shallow in (few, few + 1)}
    ours = ", ".join(
        f"{percent(float(np.mean(of_layers)))} with {shallow}"
        for shallow, of_layers in hits.items()
    )
    floor = (few + (n - few) / 4) / n
    return f"{ours} of {n} layers", verdict(0.9908, of_values(hits[few]), floor, perfect=1)


@figure(
    "Fate", "9", "tokens that the 30 % least popular experts of a prompt serve", "15 % in layer 6"
)
def fate_9(d: Data) -> tuple[str, str]:
    """Measure the share of tokens that the unpopular experts of a prompt serve.

    With even use that is the experts' share.
    """
    shares, active = [], []
    for g in range(d.held.model.n_gates):
        of_layer = []
        for start in range(0, d.held.n_tokens - PROMPT + 1, PROMPT):
            count = np.sort(
                np.bincount(
                    d.held.ids[start : start + PROMPT, g].ravel(), minlength=d.held.router.n_experts
                )
            )
            count = count[count > 0]
            of_layer.append(count[: int(0.3 * len(count))].sum() / count.sum())
            active.append(len(count) / d.held.router.n_experts)
        shares.append(float(np.mean(of_layer)))
    ours = (
        f"{percent(*shares)} by layer, of {percent(float(np.mean(active)))} of the experts in"
        f" {PROMPT} tokens; even use: 30 %"
    )
    return ours, verdict(0.15, of_values(shares), 0.3)


def counts(paths: np.ndarray) -> np.ndarray:
    """Return the count of each distinct path among [n_tokens, n_layers], descending."""
    return np.sort(np.unique(paths, axis=0, return_counts=True)[1])[::-1]


def shuffled(paths: np.ndarray) -> np.ndarray:
    """Permute each layer's experts independently, so that paths are unconnected."""
    return np.random.default_rng(0).permuted(paths, axis=0)


@figure(
    "EdgeMoE",
    "4",
    "tokens on the most frequent paths of two layers, as many as are 20 % of those that unconnected"
    " layers take",
    "more than 99 %, of all layers",
)
def edgemoe_4(d: Data) -> tuple[str, str, str]:
    """Compare the paths of each token's heaviest experts with shuffled layers.

    20 % of the paths that occur, as the paper counts, are fewer the more layers are
    connected, and over all layers hardly a path occurs twice.
    """
    first = _first(d.held)

    def covered(paths: np.ndarray) -> tuple[float, float]:
        ours, chance = counts(paths), counts(shuffled(paths))
        n = max(round(0.2 * len(chance)), 1)
        return float(ours[:n].sum() / len(paths)), float(chance[:n].sum() / len(paths))

    two, floors = zip(*(covered(first[:, g : g + 2]) for g in range(first.shape[1] - 1)))
    whole, floor = (
        float(c[: max(round(0.2 * len(c)), 1)].sum() / len(first))
        for c in (counts(first), counts(shuffled(first)))
    )
    ours = f"{percent(*two)} by pair of layers; unconnected {percent(float(np.mean(floors)))}"
    ours += (
        f"; as the paper counts, over all {first.shape[1]} layers: {percent(whole)}, unconnected"
        f" {percent(floor)}"
    )
    both = [
        verdict(0.99, of_values(two), float(np.mean(floors))),
        verdict(0.99, Estimate(whole, None, None), floor),
    ]
    cause = (
        f"{percent(float((counts(first) == 1).sum() / len(first)))} of the tokens have a path of"
        " their own"
    )
    return (
        ours,
        both[0] if both[0] == both[1] else f"{both[0]} (by pair); {both[1]} (as the paper counts)",
        cause,
    )


@figure(
    "EdgeMoE",
    "8",
    "the likeliest expert is the right one, knowing the two layers before",
    "87.1 % for one pair",
)
def edgemoe_8(d: Data) -> tuple[str, str]:
    """Measure the prediction's accuracy on held-out text, beside knowing nothing.

    The paper's figure is the frequency after one pair.
    """
    right, best = known_layers(d)
    means = right.mean(axis=0)
    ours = (
        f"{percent(means[2])} on the average, {percent(means[1])} knowing one layer,"
        f" {percent(means[0])} none; {percent(best)} after the pair that tells most"
    )
    return ours, verdict(0.871, of_values(right[:, 2] - right[:, 0] + means[0]), float(means[0]))


@figure("EdgeMoE", "8", "knowing none, all experts are about as likely", "about even")
def edgemoe_8_even(d: Data) -> tuple[str, str]:
    """The likeliest expert's share as a multiple of an even one."""
    right, _ = known_layers(d)
    times = right[:, 0] * d.held.router.n_experts
    even = of_values(times).value
    return (
        f"the likeliest has {percent(float(right[:, 0].mean()))}, {even:.1f} times an even share",
        REPRODUCED if even < 1 + CLOSE else OPPOSITE,
    )


@functools.lru_cache(maxsize=1)
def known_layers(d: Data) -> tuple[np.ndarray, float]:
    """[n_gates - 2, 3] how often the likeliest of the heaviest experts is right,
    knowing none, one and two layers before; and the largest share after a pair that
    occurred 20 times or more.
    """
    train, held = _first(d.train), _first(d.held)
    e, right = d.held.router.n_experts, np.zeros((d.held.model.n_gates - 2, 3))
    best = 0.0
    for g in range(2, d.held.model.n_gates):
        for known in range(3):
            keys, held_keys = (_key(part[:, g - known : g], e) for part in (train, held))
            table = np.zeros((e**known, e))
            np.add.at(table, (keys, train[:, g]), 1)
            popular = np.bincount(train[:, g], minlength=e) / len(train)
            likeliest = (table + popular).argmax(axis=1)
            right[g - 2, known] = (likeliest[held_keys] == held[:, g]).mean()
            if known == 2:
                seen = table.sum(axis=1)
                best = max(
                    best, (table.max(axis=1) / np.maximum(seen, 1))[seen >= 20].max(initial=0)
                )
    return right, float(best)


@figure(
    "EdgeMoE",
    "13",
    "hits of its cache over LRU's, without preloading",
    "above FIFO, LRU and LFU, no number in the text",
)
def edgemoe_13(d: Data) -> tuple[str, str, str]:
    """Compare hit rates by text, with the paper's tenth of the experts and a quarter,
    and without each part of the score.
    """
    texts = by_text(d.held)
    shares = (0.1, 0.25)

    def hits(name: str, share: float) -> np.ndarray:
        return np.array(
            [simulate(text, name, int(share * text.model.full_bytes)).hit_rate for text in texts]
        )

    more = [of_values(hits("edgemoe", share) - hits("lru", share)) for share in shares]
    ours = ", ".join(
        f"{verdicts.text(r.map(lambda x: 100 * x), '{:.1f}')} points with {share:.0%}"
        for r, share in zip(more, shares)
    )
    parts = [
        of_values(hits(name, 0.25) - hits("lru", 0.25)).map(lambda x: 100 * x)
        for name in ("lfu", "edgemoe-printed")
    ]
    cause = (
        f"with 25%, frequency alone: {verdicts.text(parts[0], '{:.1f}')}; the distance as printed:"
        f" {verdicts.text(parts[1], '{:.1f}')}"
    )
    return (
        ours.replace("%", " %"),
        weakest([verdict(None, r, 0.0) for r in more]),
        cause.replace("%", " %"),
    )


@figure("HOBBIT", "5a", "Pearson's r of ‖G(x)‖ and ‖G(x) E(x)‖", "0.99")
def hobbit_5a(d: Data) -> tuple[str, str]:
    """Pearson's r of an expert's gate weight and the length of what it adds, of each
    layer with its own deviation.
    """
    correlations = []
    rng = np.random.default_rng(0)
    sample = rng.choice(
        len(d.held.input_tokens), min(SAMPLE, len(d.held.input_tokens)), replace=False
    )
    for g, layer in enumerate(t.layer for t in _one_each(d.held)):
        x = d.held.inputs[sample, g].astype(np.float32)
        weights, lengths = [], []
        spans = {
            parse_tensor_name(name).matrix_name: span
            for name, span in d.model_index.experts.items()
            if parse_tensor_name(name).layer == layer
        }
        for expert in range(d.held.router.n_experts):
            row, place = np.nonzero(d.held.ids[d.held.input_tokens[sample], g] == expert)
            if len(row):
                weight = d.held.weights[d.held.input_tokens[sample[row]], g, place]
                weights.append(weight)
                lengths.append(
                    weight
                    * np.linalg.norm(
                        _expert(
                            {
                                name: _slice(d.model_index, span, expert)
                                for name, span in spans.items()
                            },
                            x[row],
                        ),
                        axis=1,
                    )
                )
        correlations.append(
            float(np.corrcoef(np.concatenate(weights), np.concatenate(lengths))[0, 1])
        )
    ours = f"{np.mean(correlations):.2f} ({min(correlations):.2f} to {max(correlations):.2f})"
    return f"{ours} by layer", verdict(0.99, of_values(correlations), 0.0, perfect=1)


@figure(
    "HOBBIT",
    "5b",
    "experts in high and low precision and skipped, T1 0.6 and T2 0.9",
    "67, 30 and 3 %; 34, 60 and 6 % of those that are not a token's first",
)
def hobbit_5b(d: Data) -> tuple[str, str]:
    """A token's first expert is always high, and half of Mixtral's experts are; what is
    left compares.
    """
    s = recorded_unimportance(d.held)
    high, low = (s <= T1).mean(), ((s > T1) & (s <= T2)).mean()
    of_others = [float(share) / (1 - 1 / d.k) for share in (high - 1 / d.k, low, 1 - high - low)]
    t1, t2 = thresholds(s)
    ours = (
        f"{100 * high:.0f}, {100 * low:.0f} and {100 * (1 - high - low):.0f} %;"
        f" {', '.join(f'{100 * share:.0f}' for share in of_others)} % of the others"
    )
    all_three = [
        verdict(claim, Estimate(share, None, None), 0.0)
        for claim, share in zip((0.34, 0.6, 0.06), of_others)
    ]
    return f"{ours}; the paper's shares need T1 {t1:.2f}, T2 {t2:.2f}", weakest(all_three)


def ahead(d: Data, by: int) -> tuple[list[float], list[float], list[float]]:
    """Apply each gate to the input of `by` layers before, and compare by layer.

    Returns:
        The share of tokens with the same first expert, the share whose predicted first
        expert is selected, and the cosine of both inputs.
    """
    r, first, used, x = (
        d.held.router,
        _first(d.held)[d.held.input_tokens],
        d.held.used()[d.held.input_tokens],
        d.held.inputs,
    )
    exact, among, cosine = [], [], []
    for g in range(1, d.held.model.n_gates - by):  # the first reads embeddings
        a, b = x[:, g].astype(np.float32), x[:, g + by].astype(np.float32)
        cosine.append(
            float(
                (
                    (a * b).sum(axis=1)
                    / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1) + 1e-9)
                ).mean()
            )
        )
        weight, bias = r.ahead(g, g + by, True)
        best = np.asarray(a @ weight.T + (0 if bias is None else bias)).argmax(axis=1)
        exact.append(float((best == first[:, g + by]).mean()))
        among.append(float(used[np.arange(len(best)), g + by, best].mean()))
    return exact, among, cosine


@figure(
    "HOBBIT",
    "7",
    "the first expert of the next 1, 2, 3 layers is predicted from this layer's input",
    "96 %, about 90 %, about 90 %",
)
def hobbit_7(d: Data) -> tuple[str, str]:
    """The paper does not say which of two it counts: the same expert, or that what is
    predicted first is among those selected.
    """
    e, distances = d.held.router.n_experts, [ahead(d, by) for by in (1, 2, 3)]
    exact, among, cosine = ([np.mean(part[i]) for part in distances] for i in range(3))
    ours = (
        f"{', '.join(f'{100 * x:.1f}' for x in exact)} % the same;"
        f" {', '.join(f'{100 * x:.1f}' for x in among)} % among the selected; cosine"
        f" {', '.join(f'{x:.2f}' for x in cosine)}"
    )
    of_both, claims = [], list(zip((0.96, 0.9, 0.9), distances))
    for i, floor in enumerate((1 / e, d.k / e)):
        of_each = [verdict(claim, of_values(part[i]), floor, perfect=1) for claim, part in claims]
        of_both.append(weakest(of_each))
    return ours, (
        of_both[0]
        if of_both[0] == of_both[1]
        else f"{of_both[0]} (the same); {of_both[1]} (among the selected)"
    )


@figure(
    "HOBBIT",
    "10a",
    "the first expert of a token serves the next one, too",
    "clearly above the chance of 25 %; at least one of two: above 46 %",
)
def hobbit_10(d: Data) -> tuple[str, str]:
    """Experts of one token that the next one uses, as multiples of chance."""
    used, k, e = d.held.used(), d.k, d.held.router.n_experts
    after = np.flatnonzero(~d.held.starts[1:]) + 1
    first = _first(d.held)
    again = np.array(
        [used[after, g, first[after - 1, g]].mean() for g in range(d.held.model.n_gates)]
    )
    some = (used[after] & used[after - 1]).any(axis=2).mean(axis=0)
    chance = float(1 - np.prod([(e - k - i) / (e - i) for i in range(k)]))
    ours = (
        f"{percent(float(again.mean()))} (chance {percent(k / e)}); at least one:"
        f" {percent(float(some.mean()))} (chance {percent(chance)})"
    )
    return ours, weakest(
        [verdict(None, of_values(again / (k / e))), verdict(None, of_values(some / chance))]
    )


@figure(
    "HOBBIT",
    "10b",
    "texts have experts of their own",
    "frequencies differ from sequence to sequence",
)
def hobbit_10b(d: Data) -> tuple[str, str]:
    """Compare a text's correlation between its halves with that between texts."""
    halves = []
    used, number = d.held.used(), np.cumsum(d.held.starts) - 1
    for i in range(number[-1] + 1):
        rows = np.flatnonzero(number == i)
        halves.append(
            [
                used[part].sum(axis=0).ravel()
                for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :])
            ]
        )
    own = np.array([np.corrcoef(a, b)[0, 1] for a, b in halves])
    others = np.array(
        [
            np.mean([np.corrcoef(a, halves[j][1])[0, 1] for j in range(len(halves)) if j != i])
            for i, (a, _) in enumerate(halves)
        ]
    )
    more = of_values(own - others)
    return (
        (
            f"r {own.mean():.2f} within a text, {others.mean():.2f} between; by text"
            f" {verdicts.text(more)} more ({len(halves)} texts)"
        ),
        verdict(None, more, 0.0),
    )


@figure(
    "HOBBIT",
    "18a",
    "less miss penalty of its cache than of LRU and LFU",
    "4.7 to 8.7 % and 2.1 to 4.2 %",
)
def hobbit_18(d: Data) -> tuple[str, str]:
    """Compare miss penalties by text.

    A miss costs 1 in high precision, a quarter in low and nothing if it is skipped; the
    token's weights decide which.
    """
    cost = MissCost(*thresholds(recorded_unimportance(d.train)), LOW_COST)
    weights = {name: float(d.sections["hobbit"][name]) for name in WEIGHT_NAMES}
    ours, outcomes = [], []
    for share in (0.25, 0.5):
        paid = {}
        for name, options in (("hobbit", weights | {"t1": cost.t1}), ("lru", {}), ("lfu", {})):
            paid[name] = [
                simulate(
                    text, name, int(share * text.model.full_bytes), cost=cost, **options
                ).miss_penalty
                for text in by_text(d.held)
            ]
        less = [
            verdicts.ratio(paid["hobbit"], paid[name]).map(lambda x: 1 - x)
            for name in ("lru", "lfu")
        ]
        less = [Estimate(x.value, x.high, x.low) for x in less]
        ours.append(f"{', '.join(verdicts.text(x, '{:.1%}') for x in less)} with {share:.0%}")
        outcomes.append(
            [verdict(claim, x, 0.0) for claim, x in zip(((0.0469, 0.0868), (0.0213, 0.0419)), less)]
        )
    lru, lfu = map(weakest, zip(*outcomes))
    return "; ".join(ours).replace("%", " %"), (
        lru if lru == lfu else f"{lru} (over LRU); {lfu} (over LFU)"
    )


@figure(
    "HOBBIT", "18b", "hits of LFU that forgets with each text, over one that does not", "4.5 % more"
)
def hobbit_18b(d: Data) -> tuple[str, str]:
    """Compare hit rates over all texts in sequence."""
    trace = d.held.trace()
    more = {
        share: [
            simulate(trace, name, int(share * trace.model.full_bytes)).hit_rate
            for name in ("lfu", "lfu-model")
        ]
        for share in (0.25, 0.5)
    }
    ratios = {share: Estimate(own / model, None, None) for share, (own, model) in more.items()}
    ours = ", ".join(
        f"{100 * (x.value - 1):+.1f} % with {100 * share:.0f} %" for share, x in ratios.items()
    )
    return ours, weakest([verdict(1.045, x) for x in ratios.values()])


@figure(
    "ProMoE",
    "5",
    "accesses to the 20 % most used experts; hits of LRU",
    "nearly even, no number in the text",
)
def promoe_5(d: Data) -> tuple[str, str]:
    """Skew of the accesses as a multiple of even ones, and what LRU makes of it."""
    counts = np.sort(d.held.popularity().astype(float), axis=1)[:, ::-1]
    n = round(0.2 * counts.shape[1])
    top = counts[:, :n].sum(axis=1) / counts.sum(axis=1)
    trace = d.held.trace()
    rates = [
        simulate(trace, "lru", int(share * trace.model.full_bytes)).hit_rate
        for share in (0.25, 0.5, 0.75)
    ]
    ours = (
        f"{percent(*top)} by layer, even: {percent(n / counts.shape[1])}; LRU hits"
        f" {', '.join(f'{100 * r:.0f} %' for r in rates)} with 25, 50, 75 % of the experts"
    )
    return ours, (
        REPRODUCED if of_values(top / (n / counts.shape[1])).value < 1 + CLOSE else OPPOSITE
    )


@figure(
    "ProMoE",
    "8",
    "accuracy of the token-based, skip-based and learned predictor",
    "58.3 %, 66.9 % (QW-2), 84.7 %",
)
def promoe_8(d: Data) -> tuple[str, str, str]:
    """The learned one's gain over the better of the others; and the same after less
    text.
    """
    accuracies = {}
    for title, name in (("token", "token-table"), ("skip", "gate"), ("learned", "learned")):
        accuracies[title] = _accuracy(
            d, get_predictor(name)(d.held.router, d.sections[get_predictor(name).sections[0].name])
        )
    other = np.maximum(accuracies["token"], accuracies["skip"])
    ours = (
        f"{', '.join(f'{title} {100 * np.mean(value[1:]):.1f} %' for title, value in accuracies.items())}"
        " without layer 0"
    )
    half = d.train.take(np.cumsum(d.train.starts) % 2 == 0)
    arrays = get_predictor("learned").fit(
        half, FitOptions(hidden=d.sections["learned"]["first_1"].shape[1])
    )
    less = _accuracy(d, get_predictor("learned")(d.held.router, arrays))
    cause = f"learned from half of the {d.train.n_tokens:,} tokens: {100 * np.mean(less[1:]):.1f} %"
    floor = float(np.mean(other[1:]))
    return (
        ours,
        verdict(
            floor + 0.847 - 0.669, of_values(accuracies["learned"][1:] - other[1:] + floor), floor
        ),
        cause,
    )


@figure("ProMoE", "4.4", "what a stride of two costs the learned predictor", "5 points")
def promoe_stride(d: Data) -> tuple[str, str]:
    """Compare accuracies in the layers that both strides predict."""
    one, two = (
        _accuracy(d, get_predictor("learned")(d.held.router, d.sections["learned"], stride=stride))[
            2:
        ]
        for stride in (1, 2)
    )
    return f"{100 * (one - two).mean():.1f} points", verdict(0.05, of_values(one - two), 0.0)


def by_text(recording: Recording) -> list[Trace]:
    number = np.cumsum(recording.starts) - 1
    return [recording.take(number == i).trace() for i in range(number[-1] + 1)]


def _accuracy(d: Data, predictor: Predictor) -> np.ndarray:
    """[n_gates] share of the selected experts among as many of the highest scores; 0
    where nothing is predicted.
    """
    n, tokens = d.held.model.n_gates, set(d.held.input_tokens.tolist())
    right, total = np.zeros(n), 0
    waiting: dict[int, np.ndarray] = {}
    for t in sorted(tokens):
        waiting |= {p.gate: p.scores[0].copy() for p in predictor.begin(d.held.tokens[t : t + 1])}
        for event in d.held.events(t, t + 1):
            k = event.ids.shape[1]
            if (scores := waiting.pop(event.gate, None)) is not None:
                right[event.gate] += len(set(top_k(scores[None], k)[0]) & set(event.ids[0])) / k
            waiting |= {
                p.gate: p.scores[0].copy() for p in predictor.observe(event) if p.gate > event.gate
            }
        total += 1
    return right / max(total, 1)


def _first(recording: Recording) -> np.ndarray:
    """[n_tokens, n_gates] the heaviest expert of each."""
    best = recording.weights.argmax(axis=2)[..., None]
    return np.take_along_axis(recording.ids, best, axis=2)[..., 0]


def _key(ids: np.ndarray, e: int) -> np.ndarray:
    out = np.zeros(len(ids), np.int64)
    for column in ids.T:
        out = out * e + column
    return out


def _one_each(recording: Recording):
    """A tensor of each gate, in order."""
    return [
        next(t for t in recording.model.tensors if t.gate == g)
        for g in range(recording.model.n_gates)
    ]


def _slice(model_index: ModelIndex, span, expert: int) -> np.ndarray:
    nbytes = span.nbytes // span.shape[2]
    with open(model_index.files[span.file], "rb") as file:
        file.seek(span.offset + expert * nbytes)
        return dequantize(file.read(nbytes), span.type, (span.shape[1], span.shape[0]))
