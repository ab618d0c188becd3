"""How well each predictor foresees the next experts: the tables of docs/results/predictors.md.

usage: bench_predict.py accuracy --model M.gguf --calib FILE... --valid FILE... [--tokens N] [--valid-tokens N] [--decode-tokens N] [--hidden N]
       bench_predict.py cost --model M.gguf

`accuracy` fits on the calibration texts and reports on the validation texts. `cost` times one gate event of one token.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import moeoff
from eval_callback import WithCallback
from moeoff import native
from moeoff.calibrate.profile_fit import cap_hidden, fit
from moeoff.calibrate.record import LENGTH, batch_size, record, sequences
from moeoff.gate_event import GateEvent
from moeoff.gguf.layout import Layout
from moeoff.gguf.tensor_name import parse_tensor_name
from moeoff.predict import PREDICTORS, FitOptions, create, top_k, widened
from moeoff.predict.gate import CrossLayerGate
from moeoff.predict.recording import Recording
from moeoff.predict.router import Router
from results_file import HELP, ResultsFile

# what is compared: a name for the table, the predictor, its options
ROWS = [(name, name, {}) for name in PREDICTORS if name not in ("gate", "stacked")]
ROWS = [
    ("gate, raw", "gate", {"norm": False}),
    ("gate, next norm", "gate", {"norm": True}),
    ("gate (calibrated)", "gate", {}),
    ("stacked, 2 ahead", "stacked", {"p": 2}),
    ("stacked, 3 ahead", "stacked", {"p": 3}),
    *ROWS,
    ("learned, stride 2", "learned", {"stride": 2}),
]
# experts that can be read between two gates: Fate's n, of k; the first is the reference machine's disk
BUDGETS = (0.4, 2, 4)


class Watched(WithCallback):
    """Keeps what the attention of each layer reads: the node attn_norm-N."""

    def __init__(self, *args, **kwargs):
        lib = native.lib
        self._name = lib.ggml_get_name
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._bytes = lib.ggml_nbytes
        self._bytes.restype, self._bytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._get = lib.ggml_backend_tensor_get
        self._get.restype, self._get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.attention: dict[int, list[np.ndarray]] | None = None
        super().__init__(*args, **kwargs)

    def _watch(self, node: int, ask: bool, _user: object) -> bool:
        if self.attention is None:
            return not ask
        name = self._name(node).decode()
        if not name.startswith("attn_norm-") or not name.removeprefix("attn_norm-").isdigit():
            return not ask
        if not ask:
            data = np.empty(self._bytes(node) // 4, np.float32)
            self._get(node, data.ctypes.data, 0, data.nbytes)
            self.attention.setdefault(int(name.removeprefix("attn_norm-")), []).append(data.reshape(-1, self.n_embd()))
        return True


def read(path: Path, calib: list[Path], valid: list[Path], n_calib: int, n_valid: int, n_positions: int):
    """Two recordings, and of the first n_positions tokens of the second what each attention read, [n_layers, n, n_embd]."""
    layout = Layout.read(path)
    embedding = layout.dense["token_embd.weight"].shape
    batch = batch_size(embedding[1], embedding[0])
    with Watched(str(path), gate_input=True, n_ctx=LENGTH, n_batch=batch, n_ubatch=batch) as llm:
        layers = {t.gate: t.layer for t in llm.expert_buffer.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)])
        first = record(llm, sequences(llm, calib, n_calib), router, path.name)
        pieces = sequences(llm, valid, n_valid)
        second = record(llm, pieces, router, path.name)
        llm.attention = {}
        some = [piece for i, piece in enumerate(pieces) if i * LENGTH < n_positions]
        third = record(llm, some, router, path.name)
        attention = np.stack([np.concatenate(llm.attention[layer]) for layer in sorted(set(layers.values()))])
    assert attention.shape[1] == third.n_tokens
    return layout, first, second, third, attention


def control(recording: Recording) -> tuple[float, int]:
    """The gates' own inputs through our routers: share of experts, and of routings that differ, with their number."""
    right = wrong = 0
    for gate in range(recording.router.n_gates):
        x = recording.inputs[:, gate].astype(np.float32)
        chosen = np.sort(recording.router.choose(gate, x), axis=1)
        same = (chosen == np.sort(recording.ids[: len(x), gate], axis=1)).all(axis=1)
        right, wrong = right + int(same.sum()), wrong + int((~same).sum())
    return right / (right + wrong), wrong


def live_control(path: Path, text: list[Path], n_tokens: int) -> tuple[int, int]:
    """The same in decode, on inputs as the events carry them: routings that agree as sets, and all."""
    right = total = 0
    layout = Layout.read(path)
    with moeoff.Llama(str(path), gate_input=True, n_ctx=LENGTH) as llm:
        layers = {t.gate: t.layer for t in llm.expert_buffer.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)])
        events = []
        llm.set_gate_callback(events.append)
        for piece in sequences(llm, text, n_tokens):
            llm.reset()
            for token in piece:
                llm.eval([token])
        llm.expert_buffer.drain()
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
        self.wide[gate] += np.isin(ids, widened(scores[:1])[0]).mean()
        self.whole[gate] += found == 1

    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = np.where(self.seen, self.seen, np.nan)
        return self.hit / n, self.wide / n, self.whole / n


def decode(recording: Recording, events: list[GateEvent], name: str, arrays, ahead: int, **options) -> Score:
    """Replays a decode; of several predictions for a gate the one made `ahead` gates before counts."""
    n = recording.router.n_gates
    predictor, score, waiting = create(name, recording.router, arrays, **options), Score(n), {}
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


def accuracy(args, results: ResultsFile) -> None:
    layout, calib, valid, some, attention = read(args.model, args.calib, args.valid, args.tokens, args.valid_tokens, args.position_tokens)
    n = calib.router.n_gates
    print(f"fitted on {calib.n_tokens:,} tokens, reported on {valid.n_tokens:,}; hidden {args.hidden}, cap of this model {cap_hidden(layout, calib.router)}")
    right, total = live_control(args.model, args.valid, args.control_tokens)
    print(f"fresh-gate control, decode: {right:,} of {total:,} routings right ({100 * right / total:.3f} %)")
    share, wrong = control(valid)
    print(f"fresh-gate control on inputs rounded to float16: {100 * share:.3f} %, {wrong} routings differ")
    whole = CrossLayerGate.fit(valid)
    layers = range(1, n)
    rows = [
        ("cosine", [f"{whole['cosine'][g]:.3f}" for g in layers]),
        ("recall@k, raw", [f"{whole['recall_raw'][g]:.3f}" for g in layers]),
        ("recall@k, next norm", [f"{whole['recall_norm'][g]:.3f}" for g in layers]),
        ("recall at the 75th percentile", [f"{whole['recall_widened'][g]:.3f}" for g in layers]),
    ]
    table(results, "cross-layer", f"The router of the next layer, {valid.n_tokens:,} validation tokens", [f"layer {g}" for g in layers], rows)
    positions(results, some, attention)
    sections = fit(calib, FitOptions(hidden=args.hidden))
    print(f"\nshallow boundary L = {int(sections['gate']['shallow'][0])}; next norm for layers {np.flatnonzero(sections['gate']['next_norm'])[1:].tolist()}")
    events = valid.events(0, args.decode_tokens)
    scores = {}
    for title, name, options in ROWS:
        ahead = options.get("p", options.get("stride", 1))
        scores[title] = decode(valid, events, name, sections.get(PREDICTORS[name].profile_section), ahead, **options)
    head = [str(g) for g in range(n)] + ["mean"]
    whats = {
        "recall": "recall at k, %, by layer; mean of the layers that are predicted",
        "recall-75": "recall at the 75th percentile of the scores, %, by layer",
        "whole": "whole routing right, %, by layer",
    }
    for which, (key, what) in enumerate(whats.items()):
        rows = [(title, [number(x) for x in [*s.rows()[which], np.nanmean(s.rows()[which])]]) for title, s in scores.items()]
        table(results, key, f"Decode, {args.decode_tokens:,} tokens: {what}", head, rows)
    good_pred(results, scores, calib.router.n_used[0], n)


def cost(args, results: ResultsFile) -> None:
    """Microseconds of an event of one token, its selection left out."""
    layout = Layout.read(args.model)
    layers = sorted({parse_tensor_name(name).layer for name in layout.experts})
    router = Router.read(layout, layers)
    rng = np.random.default_rng(0)
    n, e, k, d = router.n_gates, router.n_experts, router.n_used[0], router.weights[0].shape[1]
    t = 512
    ids = np.stack([[rng.permutation(e)[:k] for _ in range(n)] for _ in range(t)]).astype(np.int32)
    inputs = rng.standard_normal((t, n, d)).astype(np.float16)
    from moeoff.simulate.trace import Model, TensorInfo

    model = Model("", k, tuple(TensorInfo(g, g, 0, e, 1) for g in range(n)))
    made = Recording(model, router, rng.integers(0, 64, t).astype(np.int32), np.arange(t) == 0, ids, np.ones(ids.shape, np.float32), inputs, None)
    hidden = cap_hidden(layout, router)
    arrays = {}
    for s in (1, 2):
        there = np.arange(n) >= s
        arrays |= {f"first_{s}": rng.standard_normal((n, hidden, d)), f"first_bias_{s}": np.zeros((n, hidden)), f"there_{s}": there}
        arrays |= {f"second_{s}": rng.standard_normal((n, e, hidden)), f"second_bias_{s}": np.zeros((n, e))}
    sections = {"learned": arrays, "path": PREDICTORS["activation-path"].fit(made), "tokens": PREDICTORS["token-table"].fit(made)}
    weights = np.ones((n, 4), np.float32)
    prefixed = {f"{section}_{key}": array for section, named in sections.items() for key, array in named.items()}
    sections["blend"] = {"weights": weights, **prefixed}
    events = made.events(0, t)
    rows = []
    for title, name, options in ROWS:
        predictor = create(name, router, sections.get(PREDICTORS[name].profile_section), **options)
        best = np.inf
        for _ in range(5):
            started = time.perf_counter()
            for i, event in enumerate(events):
                if predictor.wants_tokens and event.gate == 0:
                    predictor.begin(made.tokens[i // n : i // n + 1])
                predictor.observe(event)
            best = min(best, (time.perf_counter() - started) / len(events))
        rows.append((title, [f"{1e6 * best:.1f}", f"{1e3 * best * n:.2f}"]))
    title = f"Python time of one gate event of one token: {n} gates, {e} experts, inputs of {d}; learned has {hidden} units"
    table(results, "cost", title, ["µs per gate", "ms per token"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("accuracy")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--calib", type=Path, nargs="+", required=True)
    p.add_argument("--valid", type=Path, nargs="+", required=True)
    p.add_argument("--tokens", type=int, default=36864)
    p.add_argument("--valid-tokens", type=int, default=18432)
    p.add_argument("--decode-tokens", type=int, default=3072)
    p.add_argument("--position-tokens", type=int, default=3072)
    p.add_argument("--control-tokens", type=int, default=1536)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--json", help=HELP)
    p = commands.add_parser("cost")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--json", help=HELP)
    args = parser.parse_args()
    with ResultsFile(args.json) as results:
        {"accuracy": accuracy, "cost": cost}[args.command](args, results)


if __name__ == "__main__":
    main()
