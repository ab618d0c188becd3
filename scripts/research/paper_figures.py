"""The papers' figures about routing itself, on any model and text: what each says of its models, and what is so here. Times nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeoff.calibrate.bit_allocation import _expert
from moeoff.gguf.model_index import ModelIndex, parse_tensor_name
from moeoff.gguf.quantize import dequantize
from moeoff.policies import get_predictor
from moeoff.policies.base import top_k
from moeoff.policies.hobbit import T1, T2, recorded_unimportance, thresholds
from moeoff.policies.recording import Recording
from moeoff.simulate.simulator import simulate

PROMPT = 256  # tokens of a prompt: Fate measures 128 to 512
SAMPLE = 512  # tokens whose experts' outputs are computed


@dataclass(frozen=True)
class Found:
    """One claim beside what was measured.

    Attributes:
        claim: what the paper reports, on its models.
        ours: the same of this model and text.
        holds: whether the paper's statement is true here.
    """

    paper: str
    figure: str
    what: str
    claim: str
    ours: str
    holds: bool


@dataclass(frozen=True)
class Data:
    """train is what `sections` of a profile were learned from, held what figures are about."""

    model_index: ModelIndex
    train: Recording
    held: Recording
    sections: dict[str, dict[str, np.ndarray]]

    @property
    def k(self) -> int:
        return self.held.router.n_used[1]


FIGURES: list[Callable[[Data], Found]] = []


def figure(paper: str, figure: str, what: str, claim: str) -> Callable[[Callable[[Data], tuple[str, bool]]], Callable[[Data], Found]]:
    """Makes a figure of a function that tells what is so here, and whether the claim holds."""

    def decorate(measure: Callable[[Data], tuple[str, bool]]) -> Callable[[Data], Found]:
        @functools.wraps(measure)
        def found(d: Data) -> Found:
            ours, holds = measure(d)
            return Found(paper, figure, what, claim, ours, bool(holds))

        FIGURES.append(found)
        return found

    return decorate


def percent(*values: float) -> str:
    """One number, or mean and range of several."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f} %"
    return f"{100 * np.mean(values):.1f} % ({100 * min(values):.1f} to {100 * max(values):.1f})"


@figure("Fate", "9", "tokens that the 30 % least popular experts of a prompt serve", "15 % in layer 6; 55.9 of 60 experts active")
def fate_9(d: Data) -> tuple[str, bool]:
    """How few tokens the unpopular experts of a prompt serve."""
    shares, active = [], []
    for g in range(d.held.model.n_gates):
        of_layer = []
        for start in range(0, d.held.n_tokens - PROMPT + 1, PROMPT):
            count = np.sort(np.bincount(d.held.ids[start : start + PROMPT, g].ravel(), minlength=d.held.router.n_experts))
            count = count[count > 0]
            of_layer.append(count[: int(0.3 * len(count))].sum() / count.sum())
            active.append(len(count) / d.held.router.n_experts)
        shares.append(float(np.mean(of_layer)))
    ours = f"{percent(*shares)} by layer; {percent(float(np.mean(active)))} of the experts active in {PROMPT} tokens"
    return ours, np.mean(shares) <= 0.15


@figure("EdgeMoE", "4", "tokens on the 20 % most frequent activation paths", "more than 99 %")
def edgemoe_4(d: Data) -> tuple[str, bool]:
    """Paths of the first experts of all layers, and of three layers in a row."""

    def covered(paths: np.ndarray) -> float:
        counts = np.array(sorted(Counter(map(bytes, np.ascontiguousarray(paths, np.int32))).values(), reverse=True))
        return counts[: max(round(0.2 * len(counts)), 1)].sum() / counts.sum()

    first = _first(d.held)
    whole = covered(first)
    three = [covered(first[:, g : g + 3]) for g in range(d.held.model.n_gates - 2)]
    ours = f"{percent(whole)} over all layers, {percent(*three)} over three in a row (each token's heaviest experts)"
    return ours, whole > 0.99


@figure("EdgeMoE", "8", "the likeliest expert is the right one", "up to 87.1 % for one pair; about even knowing none")
def edgemoe_8(d: Data) -> tuple[str, bool]:
    """What knowing the experts of no, one and two layers before tells of the next: of the heaviest experts, on text that was not counted."""
    train, held = _first(d.train), _first(d.held)
    e, right = d.held.router.n_experts, np.zeros(3)
    best = 0.0
    for g in range(2, d.held.model.n_gates):
        for known in range(3):
            keys, held_keys = (_key(part[:, g - known : g], e) for part in (train, held))
            table = np.zeros((e**known, e))
            np.add.at(table, (keys, train[:, g]), 1)
            popular = np.bincount(train[:, g], minlength=e) / len(train)
            likeliest = (table + popular).argmax(axis=1)
            right[known] += (likeliest[held_keys] == held[:, g]).mean() / (d.held.model.n_gates - 2)
            if known == 2:
                seen = table.sum(axis=1)
                best = max(best, (table.max(axis=1) / np.maximum(seen, 1))[seen >= 20].max(initial=0))
    ours = f"{percent(right[0])}, {percent(right[1])}, {percent(right[2])} knowing none, one and two layers; at most {percent(best)} for one pair"
    return ours, right[2] > right[1] > right[0]


@figure("HOBBIT", "5a", "Pearson's r of ‖G(x)‖ and ‖G(x) E(x)‖", "0.99")
def hobbit_5a(d: Data) -> tuple[str, bool]:
    """Pearson's r of an expert's gate weight and the length of what it adds, of each layer with its own deviation."""
    found = []
    rng = np.random.default_rng(0)
    kept = rng.choice(len(d.held.kept), min(SAMPLE, len(d.held.kept)), replace=False)
    for g, layer in enumerate(t.layer for t in _one_each(d.held)):
        x = d.held.inputs[kept, g].astype(np.float32)
        weights, lengths = [], []
        spans = {parse_tensor_name(name).matrix_name: span for name, span in d.model_index.experts.items() if parse_tensor_name(name).layer == layer}
        for expert in range(d.held.router.n_experts):
            row, place = np.nonzero(d.held.ids[d.held.kept[kept], g] == expert)
            if len(row):
                weight = d.held.weights[d.held.kept[kept[row]], g, place]
                weights.append(weight)
                lengths.append(weight * np.linalg.norm(_expert({name: _slice(d.model_index, span, expert) for name, span in spans.items()}, x[row]), axis=1))
        found.append(float(np.corrcoef(np.concatenate(weights), np.concatenate(lengths))[0, 1]))
    ours = f"{np.mean(found):.2f} ({min(found):.2f} to {max(found):.2f}) by layer"
    return ours, np.mean(found) > 0.9


@figure("HOBBIT", "5b", "experts in high and low precision and skipped, T1 0.6 and T2 0.9", "67, 30 and 3 %")
def hobbit_5b(d: Data) -> tuple[str, bool]:
    s = recorded_unimportance(d.held)
    high, low = (s <= T1).mean(), ((s > T1) & (s <= T2)).mean()
    t1, t2 = thresholds(s)
    ours = f"{100 * high:.0f}, {100 * low:.0f} and {100 * (1 - high - low):.0f} %; the paper's shares need T1 {t1:.2f}, T2 {t2:.2f}"
    return ours, abs(high - 0.67) < 0.05 and abs(low - 0.3) < 0.05


@figure("HOBBIT", "7", "the first expert of the next 1, 2, 3 layers is predicted from this layer's input", "96 %, about 90 %, about 90 %")
def hobbit_7(d: Data) -> tuple[str, bool]:
    """Inputs of gates some layers apart, and whether the later gate finds its first expert on the earlier input."""
    r, first, held_inputs = d.held.router, _first(d.held)[d.held.kept], d.held.inputs
    cosines, right = [], []
    for ahead in (1, 2, 3):
        cosine, hit = [], []
        for g in range(1, d.held.model.n_gates - ahead):  # HOBBIT's figure leaves no layer out; the first reads embeddings
            a, b = held_inputs[:, g].astype(np.float32), held_inputs[:, g + ahead].astype(np.float32)
            cosine.append(((a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1) + 1e-9)).mean())
            weight, bias = r.ahead(g, g + ahead, True)
            logits = a @ weight.T + (0 if bias is None else bias)
            hit.append((np.asarray(logits).argmax(axis=1) == first[:, g + ahead]).mean())
        cosines.append(float(np.mean(cosine)))
        right.append(float(np.mean(hit)))
    ours = f"{', '.join(f'{100 * x:.0f} %' for x in right)}; cosine {', '.join(f'{x:.2f}' for x in cosines)}"
    return ours, right[0] > 0.9 and right[2] > 0.85


@figure("HOBBIT", "10a", "the first expert of a token serves the next one, too", "clearly above the chance of 25 %; at least one of two: above 46 %")
def hobbit_10(d: Data) -> tuple[str, bool]:
    """Experts of one token that the next one uses, beside chance."""
    used, k, e = d.held.used(), d.k, d.held.router.n_experts
    after = np.flatnonzero(~d.held.starts[1:]) + 1
    first = _first(d.held)
    again = float(np.mean([used[after, g, first[after - 1, g]].mean() for g in range(d.held.model.n_gates)]))
    some = float((used[after] & used[after - 1]).any(axis=2).mean())
    chance = 1 - np.prod([(e - k - i) / (e - i) for i in range(k)])
    ours = f"{percent(again)} (chance {percent(k / e)}); at least one: {percent(some)} (chance {percent(float(chance))})"
    return ours, again > 1.2 * k / e and some > chance


@figure("HOBBIT", "10b", "texts have experts of their own", "frequencies differ from sequence to sequence")
def hobbit_10b(d: Data) -> tuple[str, bool]:
    """How much one text's frequencies say about itself, beside another text's."""
    number = np.cumsum(d.held.starts) - 1
    counts = np.stack([d.held.used()[number == i].sum(axis=0).ravel() for i in range(number[-1] + 1)]).astype(float)
    halves = []
    for i in range(number[-1] + 1):
        rows = np.flatnonzero(number == i)
        halves.append([d.held.used()[part].sum(axis=0).ravel() for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :])])
    own = [np.corrcoef(a, b)[0, 1] for a, b in halves]
    others = [np.corrcoef(halves[i][0], halves[j][1])[0, 1] for i in range(len(halves)) for j in range(len(halves)) if i != j]
    ours = f"r {np.mean(own):.2f} between the halves of a text, {np.mean(others):.2f} between texts ({len(counts)} texts)"
    return ours, np.mean(own) > np.mean(others) + 0.05


@figure("ProMoE", "5", "accesses to the 20 % most used experts; hits of LRU", "no number in the text: decoder-only models use their experts nearly evenly")
def promoe_5(d: Data) -> tuple[str, bool]:
    """Skew of the accesses, and what LRU makes of it with half of the experts."""
    counts = np.sort(d.held.popularity().astype(float), axis=1)[:, ::-1]
    top = counts[:, : round(0.2 * counts.shape[1])].sum(axis=1) / counts.sum(axis=1)
    trace = d.held.trace()
    rates = [simulate(trace, "lru", int(share * trace.model.full_bytes)).hit_rate for share in (0.25, 0.5, 0.75)]
    ours = f"{percent(*top)} by layer; LRU hits {', '.join(f'{100 * r:.0f} %' for r in rates)} with 25, 50, 75 % of the experts"
    return ours, np.mean(top) < 0.35


@figure("ProMoE", "8", "accuracy of token-based, skip-based and learned predictors", "58.3 %, 66.9 % (QW-2), 84.7 %; a stride costs 5 points")
def promoe_8(d: Data) -> tuple[str, bool]:
    """Accuracy of the three kinds of predictors, and what a stride of two costs the learned one."""
    found = {}
    for title, name, options in (("token", "token-table", {}), ("skip", "gate", {}), ("learned", "learned", {}), ("stride 2", "learned", {"stride": 2})):
        found[title] = _accuracy(d, get_predictor(name)(d.held.router, d.sections[get_predictor(name).profile_section], **options))
    ours = ", ".join(f"{title} {100 * value:.1f} %" for title, value in found.items())
    drop = found["learned"] - found["stride 2"]
    holds = found["learned"] > max(found["token"], found["skip"]) and drop < 0.08
    return f"{ours} (-{100 * drop:.1f})", holds


def _accuracy(d: Data, predictor) -> float:
    """Share of the selected experts among as many of the highest scores, of the layers that are predicted."""
    right = total = 0
    n, at = d.held.model.n_gates, {t: None for t in d.held.kept.tolist()}
    waiting: dict[int, np.ndarray] = {}
    for t in range(d.held.n_tokens):
        if t not in at:
            continue
        waiting |= {p.gate: p.scores[0].copy() for p in predictor.begin(d.held.tokens[t : t + 1])}
        for event in d.held.events(t, t + 1):
            if (found := waiting.pop(event.gate, None)) is not None:
                k = event.ids.shape[1]
                right, total = right + len(set(top_k(found[None], k)[0]) & set(event.ids[0])), total + k
            waiting |= {p.gate: p.scores[0].copy() for p in predictor.observe(event) if p.gate < n and p.gate > event.gate}
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
    return [next(t for t in recording.model.tensors if t.gate == g) for g in range(recording.model.n_gates)]


def _slice(model_index: ModelIndex, span, expert: int) -> np.ndarray:
    nbytes = span.nbytes // span.shape[2]
    with open(model_index.files[span.file], "rb") as file:
        file.seek(span.offset + expert * nbytes)
        return dequantize(file.read(nbytes), span.type, (span.shape[1], span.shape[0]))


def score_curve(d: Data) -> np.ndarray:
    """HOBBIT 5b's curve: all unimportance scores, sorted."""
    return np.sort(recorded_unimportance(d.held))


def popularity_curves(d: Data) -> np.ndarray:
    """Fate 9's and ProMoE 5's: [n_gates, n_experts] cumulative share of the accesses, the most used first."""
    counts = np.sort(d.held.popularity().astype(float), axis=1)[:, ::-1]
    return np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True)
