"""How well each predictor foresees the next experts, on text: docs/results/predictors.md.

usage: predictors.py -m MODEL --calib FILE --valid FILE [--tokens N] [--hidden N]

Fits on the calibration texts and reports on the validation texts, each of which may be several. What a prediction costs is measured by bench_driver.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import baselines  # noqa: F401  registers them
from eval_callback import WithCallback, node_name, node_values
from moeoff.calibrate.profile_fit import cap_hidden, fit
from moeoff.calibrate.record import LENGTH, record, recordable, sequences
from moeoff.gate_event import GateEvent
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import PREDICTORS, FitOptions, get_predictor
from moeoff.policies.base import top_k
from moeoff.policies.fate import CrossLayerGate, best_above
from moeoff.policies.recording import Recording
from results import HELP, ResultsFile

# what is compared: a name for the table, the predictor, its options
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("gate, raw", "gate", {"norm": False}),
    ("gate, next norm", "gate", {"norm": True}),
    ("gate (calibrated)", "gate", {}),
    ("stacked, 2 ahead", "stacked", {"p": 2}),
    ("stacked, 3 ahead", "stacked", {"p": 3}),
    *((name, name, {}) for name in PREDICTORS if name not in ("gate", "stacked")),
    ("learned, stride 2", "learned", {"stride": 2}),
]
# experts that can be read between two gates: Fate's n, of k; the first is the reference machine's disk
BUDGETS = (0.4, 2, 4)


class Watched(WithCallback):
    """Keeps what the attention of each layer reads: the node attn_norm-N."""

    def __init__(self, *args, **kwargs):
        self.attention: dict[int, list[np.ndarray]] | None = None
        super().__init__(*args, **kwargs)

    def _watch(self, node: int, ask: bool, _user: object) -> bool:
        if self.attention is None:
            return not ask
        name = node_name(node)
        if not name.startswith("attn_norm-") or not name.removeprefix("attn_norm-").isdigit():
            return not ask
        if not ask:
            self.attention.setdefault(int(name.removeprefix("attn_norm-")), []).append(node_values(node).reshape(-1, self.n_embd()))
        return True


def read(path: str, calib: Sequence[str], valid: Sequence[str], n_calib: int, n_valid: int, n_positions: int) -> tuple[Any, ...]:
    """Two recordings, and of the first n_positions tokens of the second what each attention read, [n_layers, n, n_embd]."""
    model_index = ModelIndex.read(path)
    with recordable(model_index, Watched) as (llm, router):
        first = record(llm, sequences(llm, calib, n_calib), router, Path(path).name)
        pieces = sequences(llm, valid, n_valid)
        second = record(llm, pieces, router, Path(path).name)
        llm.attention = {}
        some = [piece for i, piece in enumerate(pieces) if i * LENGTH < n_positions]
        third = record(llm, some, router, Path(path).name)
        attention = np.stack([np.concatenate(llm.attention[layer]) for layer in sorted({t.layer for t in llm.engine.buffer.tensors})])
    assert attention.shape[1] == third.n_tokens
    return model_index, first, second, third, attention


def control(path: str, text: Sequence[str], n_tokens: int) -> tuple[int, int]:
    """The gates' own inputs, as the events of decoding carry them, through our routers: routings that agree as sets, and all."""
    right = total = 0
    with recordable(ModelIndex.read(path)) as (llm, router):
        events = []
        llm.set_gate_callback(events.append)
        for piece in sequences(llm, text, n_tokens):
            llm.reset()
            for token in piece:
                llm.eval([token])
        llm.engine.buffer.drain()
    for e in events:
        same = (np.sort(router.choose(e.gate, e.gate_input), axis=1) == np.sort(e.ids, axis=1)).all(axis=1)
        right, total = right + int(same.sum()), total + len(same)
    return right, total


class Score:
    """Of one predictor: hits, widened hits, whole routings, by gate."""

    def __init__(self, n_gates: int):
        self.seen, self.hit, self.wide, self.whole = (np.zeros(n_gates) for _ in range(4))

    def add(self, gate: int, scores: np.ndarray, ids: np.ndarray) -> None:
        found = np.isin(ids, top_k(scores[:1], len(ids))[0]).mean()
        self.seen[gate] += 1
        self.hit[gate] += found
        self.wide[gate] += np.isin(ids, best_above(scores[:1])[0]).mean()
        self.whole[gate] += found == 1

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = np.where(self.seen, self.seen, np.nan)
        return self.hit / n, self.wide / n, self.whole / n


def decode(recording: Recording, events: list[GateEvent], name: str, arrays, ahead: int, **options) -> Score:
    """Replays a decode; of several predictions for a gate the one made `ahead` gates before counts."""
    n = recording.router.n_gates
    predictor, score, waiting = get_predictor(name)(recording.router, arrays, **options), Score(n), {}
    for i, event in enumerate(events):
        t = i // n
        if event.gate == 0:
            waiting = {key: value for key, value in waiting.items() if key[0] == 0}
            if recording.starts[t]:
                predictor.reset_sequence()
                waiting.clear()
            if predictor.wants_tokens:
                waiting |= {(p.gate, 0): p.scores.copy() for p in predictor.begin(recording.tokens[t : t + 1])}
        key = (event.gate, 0 if predictor.wants_tokens and (event.gate, 0) in waiting else ahead)
        if key in waiting:
            score.add(event.gate, waiting[key], event.ids[0])
        for p in predictor.observe(event):
            waiting[p.gate, (p.gate - event.gate) % n] = p.scores.copy()
    return score


def number(x: float) -> str:
    return "" if np.isnan(x) else f"{100 * x:.1f}"


def table(results: ResultsFile, name: str, title: str, head: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]) -> None:
    said = results.table(name, title, ["", *head])
    for label, cells in rows:
        said.row(label, *cells)


def positions(results: ResultsFile, recording: Recording, attention: np.ndarray) -> None:
    """Fate's Table 1."""
    router, n, used = recording.router, recording.router.n_gates, recording.used()
    x = recording.inputs.astype(np.float32)
    places = {
        "1: attention input of i+1": lambda i: attention[i + 1],
        "2: gate input of i": lambda i: x[:, i],
        "3: attention input of i": lambda i: attention[i],
    }
    paper = {"1": ("93.05", "83.99", ">99.6"), "2": ("88.83", "78.79", ">99.6"), "3": ("83.84", "76.94", ">99.6")}
    batches = np.array_split(np.arange(recording.n_tokens), np.flatnonzero(recording.starts)[1:])
    rows = []
    for name, of in places.items():
        cosine, recall, prefill = [], [], []
        for i in range(n - 1):
            a, b = of(i), x[:, i + 1]
            cosine.append(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).mean())
            top = top_k(router.logits(i + 1, a), router.n_used[i + 1])
            recall.append(np.take_along_axis(used[:, i + 1], top, axis=1).mean())
            for batch in batches:
                true = used[batch, i + 1].any(axis=0)
                prefill.append(true[np.unique(top[batch])].sum() / true.sum())
        deep = slice(1, None)
        cells = [number(np.mean(cosine)), number(np.mean(recall)), number(np.mean(prefill)), number(np.mean(cosine[deep])), number(np.mean(recall[deep]))]
        rows.append((name, [*cells, *paper[name[0]]]))
    head = ["cosine", "decode", "prefill of 256", "cosine, layers 2 on", "decode, layers 2 on", "Fate: cosine", "decode", "prefill"]
    table(results, "fate-table-1", "Fate's Table 1: %, raw inputs through the router of layer i+1", head, rows)


def good_pred(results: ResultsFile, scores: dict[str, Score], k: int, n_gates: int) -> None:
    """ProMoE §4.1, nothing cached: FetchRate is the share of k experts that fits into the time until their gate."""
    rows = []
    for name, distance in (
        ("gate (calibrated)", 1),
        ("learned", 1),
        ("learned, stride 2", 2),
        ("blend", 1),
        ("token-table", n_gates),
        ("activation-path", 1),
        ("previous-token", 1),
    ):
        hit = scores[name].rows()[0]
        cells = []
        for n in BUDGETS:
            rate = np.full(n_gates, min(n / k, 1.0))  # reads of all layers share one disk: more time ahead is not more bandwidth
            if distance == n_gates:
                rate[0] = 0  # no time before the first gate
            product = np.where(np.isnan(hit), 0, hit) * rate
            cells.append(f"{100 * product.mean():.1f}")
        rows.append((name, [number(np.nanmean(hit)), *cells]))
    title = "GoodPred, % of all layers (a layer without a prediction counts 0)"
    table(results, "good-pred", title, ["accuracy", *(f"n = {n}" for n in BUDGETS)], rows)


TEXT = {"multiple": True, "required": True, "type": click.Path(exists=True, dir_okay=False)}


@click.command(help=__doc__)
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--calib", **TEXT)
@click.option("--valid", **TEXT)
@click.option("--tokens", default=36864, show_default=True, help="Of calibration.")
@click.option("--valid-tokens", default=18432, show_default=True)
@click.option("--decode-tokens", default=3072, show_default=True, help="Of these, replayed as they are decoded.")
@click.option("--position-tokens", default=3072, show_default=True, help="For Fate's Table 1.")
@click.option("--control-tokens", default=1536, show_default=True, help="Whose routing is computed again.")
@click.option("--hidden", default=128, show_default=True, help="Units of the learned predictor.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, calib: Sequence[str], valid: Sequence[str], tokens: int, valid_tokens: int, decode_tokens: int, position_tokens: int,
             control_tokens: int, hidden: int, json_file: str | None) -> None:  # fmt: skip
    model_index, first, second, some, attention = read(model, calib, valid, tokens, valid_tokens, position_tokens)
    n = first.router.n_gates
    print(f"fitted on {first.n_tokens:,} tokens, reported on {second.n_tokens:,}; hidden {hidden}, cap of this model {cap_hidden(model_index, first.router)}")
    right, total = control(model, valid, control_tokens)
    print(f"fresh-gate control, decode: {right:,} of {total:,} routings right ({100 * right / total:.3f} %)")
    whole = CrossLayerGate.fit(second)
    kinds = {"cosine": "cosine", "recall@k, raw": "recall_raw", "recall@k, next norm": "recall_norm", "recall at the 75th percentile": "recall_widened"}
    with ResultsFile(json_file) as results:
        rows = [(title, [f"{whole[key][g]:.3f}" for g in range(1, n)]) for title, key in kinds.items()]
        table(results, "cross-layer", f"The router of the next layer, {second.n_tokens:,} validation tokens", [f"layer {g}" for g in range(1, n)], rows)
        positions(results, some, attention)
        sections = fit(first, FitOptions(hidden=hidden), compare=False)
        next_norm = np.flatnonzero(sections["gate"]["next_norm"])[1:].tolist()
        print(f"\nshallow boundary L = {int(sections['shallow']['shallow'][0])}; next norm for layers {next_norm}")
        events, scores = second.events(0, decode_tokens), {}
        for title, name, options in ROWS:
            ahead = options.get("p", options.get("stride", 1))
            scores[title] = decode(second, events, name, sections.get(PREDICTORS[name].profile_section), ahead, **options)
        whats = {
            "recall": "recall at k, %, by layer; mean of the layers that are predicted",
            "recall-75": "recall at the 75th percentile of the scores, %, by layer",
            "whole": "whole routing right, %, by layer",
        }
        for which, (key, what) in enumerate(whats.items()):
            rows = [(title, [number(x) for x in [*s.rows()[which], np.nanmean(s.rows()[which])]]) for title, s in scores.items()]
            table(results, key, f"Decode, {decode_tokens:,} tokens: {what}", [str(g) for g in range(n)] + ["mean"], rows)
        good_pred(results, scores, first.router.n_used[0], n)


if __name__ == "__main__":
    main()
