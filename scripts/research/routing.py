"""Routing without the model's computation: replays of traces, predictors' recall, and
how closely the synthetic models route like the published ones.

usage: routing.py hits TRACE ... [--strategy ...]    hit rates of `moeoff simulate`
       routing.py shapes [SHAPE ...]                 the synthetic models' own answers
       routing.py record -m MODEL --out DIR --text NAME=FILE
       routing.py fit --trace FILE --out WEIGHTS.npz
       routing.py predictors -m MODEL --calib FILE --valid FILE

Pages: docs/results/cache-policies.md and shapes.md. A shape's routing is measured on a
copy with all layers, experts, widths and routers, whose experts have few hidden values:
the copy answers the prompt of the published traces greedily.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / name) for name in ("", "models", "papers")]

import baselines  # noqa: F401  registers them
from moeoff import Llama
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.profile_fit import fit as fit_profile
from moeoff.measure.record import record, recordable, sequences
from moeoff.policies import PREDICTORS, FitOptions, get_predictor, policy_names
from moeoff.policies.base import top_k
from moeoff.policies.replay import compare, simulate
from moeoff.routing.event import GateEvent
from moeoff.routing.recording import Recording
from moeoff.routing.route_trace import read_trace
from moeoff.routing.router import Router
from moeoff.routing.trace import TensorInfo, Trace
from moeoff.system.memory import parse_size
from results import HELP, ResultsFile
from shape_model import ANSWER, NEAREST, SHAPES, shape_model

TRACES = ROOT / "tests" / "data" / "route-traces"
PUBLISHED = {
    name: TRACES / f"{name}.csv.gz" for name in ("qwen3-30b-a3b", "gemma-4-26b-a4b", "gpt-oss-120b")
}
COMPARED = (12, 24, 36)
TOUCHED = 128  # tokens
PIECE = 256  # tokens of a text, where texts take turns
# of the published traces
PROMPT = b"Explain how a mixture-of-experts model decides which experts handle each token."
# the next gate's choice by this layer's input, as the source of the traces measured it
# on real weights; of the others it has none
RECALL = {"qwen3-30b-a3b": 0.886}
# of a model of which it has no trace: as the token before, and the next gate's recall,
# of all experts used, in %; of Flash-Next's there is nothing, so the nearest model's
# are wanted
TOLD = dict.fromkeys(("qwen3.6-35b-a3b", "qwen3.8-flash-next"), ("35.4", "80.7"))
HIDDEN = 32  # values of each expert in the copies
# of a copy: others on the machine hardly slow one thread
ALONE: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
FILE = click.Path(exists=True, dir_okay=False)


@dataclass(frozen=True)
class AnswerRouting:
    """Statistics of an answer that is decoded token by token; shares from 0 to 1.

    Attributes:
        repeats: Share of a token's experts that the token before used in the layer.
        lru: Hit rates from an empty buffer with COMPARED of the experts in memory, all
            of one size.
        touched: Share of the experts that the first TOUCHED tokens use.
        weights: [n_used] mean weights, the largest first; their sum is 1.
        own_list, prompt_list: Share of the selections among the n_used experts that the
            answer, or its prompt, selected most often in the layer.
        recall: Share of each gate's experts that its router selects for the input of
            the gate before; None if unknown.
    """

    repeats: float
    lru: tuple[float, ...]
    touched: float
    weights: np.ndarray
    own_list: float
    prompt_list: float
    recall: float | None = None


def heaviest(trace: Trace, n_used: int) -> Trace:
    """Return the trace with each token's n_used experts of the largest weights, scaled
    to a sum of 1.
    """

    def of(event: GateEvent) -> GateEvent:
        order = np.argsort(-event.weights, axis=1, kind="stable")[:, :n_used]
        weights = np.take_along_axis(event.weights, order, axis=1)
        return replace(
            event,
            ids=np.take_along_axis(event.ids, order, axis=1),
            weights=weights / weights.sum(axis=1, keepdims=True),
        )

    return Trace(
        replace(trace.model, n_used=n_used), [of(event) for event in trace.events], trace.starts
    )


def measure_answer(trace: Trace, recall: float | None = None) -> AnswerRouting:
    """Measure the answer in a trace of one prompt and one answer."""
    answer, model = trace.decoded(), trace.model
    n, e, k = model.n_gates, model.n_experts, model.n_used
    ids = np.stack([event.ids[0] for event in answer.events]).reshape(-1, n, k)
    weights = np.stack([event.weights[0] for event in answer.events]).reshape(ids.shape)
    # experts of one size each: some layers' types are larger than others', which says
    # nothing about routing
    even = replace(model, tensors=tuple(TensorInfo(g, g, 0, e, 4096) for g in range(n)))
    cold = Trace(even, answer.events, answer.starts)
    prompt = np.zeros((n, e), np.int64)
    for event in trace.events:
        if not event.decode:
            np.add.at(prompt[event.gate], event.ids.ravel(), 1)

    def named(counts: np.ndarray) -> float:
        lists = np.argsort(-counts, axis=1, kind="stable")[:, :k]
        seen = counts.any(axis=1)  # the last layer sees one token of a prompt, or none
        return float((ids[:, :, :, None] == lists[None, :, None, :]).any(3)[:, seen].mean())

    return AnswerRouting(
        float((ids[1:, :, :, None] == ids[:-1, :, None, :]).any(3).mean()),
        tuple(simulate(cold, "lru", even.full_bytes * share // 100).hit_rate for share in COMPARED),
        float(np.mean([len(np.unique(ids[:TOUCHED, g])) for g in range(n)]) / e),
        np.sort(weights, axis=2)[:, :, ::-1].mean(axis=(0, 1)) / weights.sum(axis=2).mean(),
        named(answer.counts()),
        named(prompt),
        recall,
    )


def answer(
    path: str | Path, trace: str | Path, n_tokens: int, prompt: bytes = PROMPT
) -> tuple[Trace, float]:
    """Return a model's greedy answer, as `run --trace` has it, and the gates' recall.

    Args:
        trace: Path for the trace; an existing file is replaced.
    """
    Path(trace).unlink(missing_ok=True)
    model_index = ModelIndex.read(path)
    inputs: list[list[np.ndarray]] = []

    def take(event: GateEvent) -> None:
        if event.decode and event.gate_input is not None:
            inputs[-1].append(event.gate_input[0])

    options = ALONE | {"expert_memory": "1T", "trace": str(trace)}
    with Llama(str(path), gate_input=True, **options) as llm:
        gating, tokens = llm.engine.buffer.gating, llm.tokenize(prompt)
        llm.eval(tokens)
        llm.engine.buffer.drain()
        llm.set_gate_callback(take)
        for _ in range(n_tokens):
            inputs.append([])
            llm.eval([llm.sample(temp=0.0)])
            llm.engine.buffer.drain()
    recorded = Trace.read(trace)
    return recorded, recall(model_index, recorded, np.array(inputs, np.float32), gating)


def recall(model_index: ModelIndex, trace: Trace, inputs: np.ndarray, gating: int) -> float:
    """Return the share of each gate's experts that its router selects for the input of
    the gate before.

    Args:
        inputs: [n_tokens, n_gates, n_embd].
    """
    layers = [
        t.layer
        for t in sorted({t.gate: t for t in trace.model.tensors}.values(), key=lambda t: t.gate)
    ]
    router = Router.read(model_index, layers, gating)
    ids = np.stack([event.ids[0] for event in trace.decoded().events]).reshape(
        len(inputs), len(layers), -1
    )
    chosen = [router.choose(gate, inputs[:, gate - 1]) for gate in range(1, len(layers))]
    return float(
        np.mean(
            [
                (ids[:, gate, :, None] == named[:, None, :]).any(2).mean()
                for gate, named in enumerate(chosen, 1)
            ]
        )
    )


def shape_answers(names: Sequence[str], keep: str | None) -> Iterator[tuple[str, Trace, float]]:
    """Yield names, traces and recall of copies of shapes with few hidden values."""
    for name in names:
        with tempfile.TemporaryDirectory(dir=keep) as folder:
            path, file = Path(folder) / "model.gguf", Path(keep or folder) / f"{name}.trace"
            shape_model(SHAPES[name].cut(hidden=HIDDEN), path)
            _, n_tokens = target_of(name)
            yield name, *answer(path, file, n_tokens)


def target_of(name: str) -> tuple[str | None, int]:
    """Return the published trace that a shape follows, or None, and the answer's
    length in tokens.
    """
    published = name if name in PUBLISHED else NEAREST.get(name)
    return published, 64 if published == "gpt-oss-120b" else 128


def percent(values: Any) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in values)


def cells(routing: AnswerRouting, recall: float | None) -> list[str]:
    lists = [f"{100 * routing.own_list:.1f}", f"{100 * routing.prompt_list:.1f}"]
    weights = " ".join(f"{weight:.3f}".removeprefix("0") for weight in routing.weights)
    return [
        f"{100 * routing.repeats:.1f}",
        percent(routing.lru),
        f"{100 * routing.touched:.1f}",
        weights,
        "" if recall is None else f"{100 * recall:.1f}",
        *lists,
    ]


HEAD = ["as the token before %", "LRU hits %", f"touched in {TOUCHED} tokens %"]
HEAD += ["mean weights", "next gate's recall %", "by the answer's list %", "by the prompt's list %"]


@click.group(help=__doc__)
def main() -> None:
    pass


# --- answers: the published traces, and the synthetic models' own ---


@main.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE ...")
@click.option("--strategy", default=",".join(policy_names()), help="Default: every policy.")
@click.option("--memory", default="6%,12%,18%,24%,36%", show_default=True)
@click.option("--decoded", is_flag=True, help="As of `moeoff simulate`.")
@click.option("--mixed", "mixes", is_flag=True, help="Also pieces of the traces in turn.")
@JSON
def hits(
    traces: Sequence[str],
    strategy: str,
    memory: str,
    decoded: bool,
    mixes: bool,
    json_file: str | None,
) -> None:
    """Write a table of hit rates for each trace, as `moeoff simulate` replays it."""
    sizes, names = memory.split(","), strategy.split(",")
    texts = {Path(path).name.split(".")[0]: read_trace(path) for path in traces}
    texts = {name: trace.decoded() if decoded else trace for name, trace in texts.items()}
    texts |= {"mixed": mixed(list(texts.values()))} if mixes else {}
    with ResultsFile(json_file) as results:
        for text, trace in texts.items():
            arenas = [parse_size(size, trace.model.full_bytes) for size in sizes]
            replays = compare(trace, names, arenas)
            title = f"{text}, {trace.n_tokens:,} tokens: hit rate %"
            columns = ["strategy", *(size.replace("%", " %") for size in sizes)]
            table = results.table(text, title, columns)
            for name in dict.fromkeys(replay.policy for replay in replays):
                rates = (replay.hit_rate for replay in replays if replay.policy == name)
                table.row(name, *(f"{100 * rate:.1f}" for rate in rates))


@main.command()
@click.argument("names", nargs=-1, metavar="[SHAPE ...]")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, exists=True),
    help="Leave the traces here, as SHAPE.trace.",
)
@JSON
def shapes(names: Sequence[str], keep: str | None, json_file: str | None) -> None:
    """Compare the shapes' own answers (reached) with the traces (wanted)."""
    with ResultsFile(json_file) as results:
        title = (
            f"Routing of an answer; LRU with {' / '.join(map(str, COMPARED))} % of the experts in"
            " memory, from an empty buffer"
        )
        table = results.table("answers", title, ["", "", *HEAD])
        for name, trace, next_recall in shape_answers(names or list(ANSWER), keep):
            source = target_of(name)[0]
            if source is None:
                repeats, told_recall = TOLD[name]
                table.row(name, "reached", *cells(measure_answer(trace), next_recall))
                table.row("", "wanted", repeats, "", "", "", told_recall, "", "")
                continue
            goal = read_trace(PUBLISHED[source])
            table.row(
                name,
                "reached",
                *cells(measure_answer(heaviest(trace, goal.model.n_used)), next_recall),
            )
            table.row(
                "" if source == name else source,
                "wanted",
                *cells(measure_answer(goal), RECALL.get(source)),
            )


def named(_ctx: Any, _option: Any, texts: Sequence[str]) -> dict[str, str]:
    if not all("=" in text for text in texts):
        raise click.BadParameter("NAME=FILE is wanted")
    return dict(text.split("=", 1) for text in texts)


# --- texts: the demo model's and grown models' ---


@main.command("record")
@click.option("-m", "--model", required=True, type=FILE)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--text", "texts", multiple=True, required=True, callback=named, metavar="NAME=FILE")
@click.option("--tokens", default=4096, show_default=True, help="Of each text.")
@click.option("--ctx", "n_ctx", default=256, show_default=True, help="Tokens of a sequence.")
def record_traces(model: str, out: Path, texts: Mapping[str, str], tokens: int, n_ctx: int) -> None:
    """Record a trace of each text, token by token, in sequences spread over the file,
    so that few tokens still cover many documents.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, path in texts.items():
        file = out / f"{name}.trace"
        file.unlink(missing_ok=True)
        text, n_seq = Path(path).read_bytes(), max(tokens // n_ctx, 1)
        with Llama(model, expert_memory="100G", n_ctx=n_ctx, n_threads=1, trace=file) as llm:
            for i in range(n_seq):
                piece = (
                    text[len(text) * i // n_seq :][: 12 * n_ctx].decode("utf-8", "ignore").encode()
                )
                llm.reset()
                for token in llm.tokenize(piece, add_bos=False)[:n_ctx]:
                    llm.eval([token])
        print(f"{file}: {file.stat().st_size} bytes", file=sys.stderr)


def mixed(traces: Sequence[Trace]) -> Trace:
    """Join pieces of the traces in turn, so that the domain switches all the time."""
    n = PIECE * traces[0].model.n_gates
    longest = max(len(t.events) for t in traces)
    return Trace.join(
        [t.slice(i, i + n) for i in range(0, longest, n) for t in traces if i < len(t.events)]
    )


@main.command()
@click.option("--trace", "paths", multiple=True, required=True, type=FILE)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def fit(paths: Sequence[str], out: Path) -> None:
    """Fit the package's score policy, and print HOBBIT's weights."""
    from moeoff.policies.hobbit import fit_weights
    from moeoff.policies.score import fit_score

    trace = mixed([Trace.read(path) for path in paths])
    np.savez_compressed(out, **fit_score(trace))
    print(
        f"{out}: {out.stat().st_size} bytes; hobbit:"
        f" {fit_weights(trace, simulate, max_events=3 * 1024 * trace.model.n_gates)}"
    )


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


def recall_by_gate(
    recording: Recording,
    events: list[GateEvent],
    name: str,
    arrays: Mapping[str, np.ndarray] | None,
    **options: Any,
) -> np.ndarray:
    """Return [n_gates] recall at k of a predictor, k being the experts that a token
    uses; nan without a prediction.

    Of several predictions for a gate the one counts that is made as far ahead as the
    options say.
    """
    n, ahead = recording.router.n_gates, options.get("p", options.get("stride", 1))
    predictor, waiting = get_predictor(name)(recording.router, arrays, **options), {}
    seen, hits = np.zeros(n), np.zeros(n)
    for i, event in enumerate(events):
        t = i // n
        if event.gate == 0:
            waiting = {key: value for key, value in waiting.items() if key[0] == 0}
            if recording.starts[t]:
                predictor.reset_sequence()
                waiting.clear()
            if predictor.wants_tokens:
                waiting |= {
                    (p.gate, 0): p.scores.copy()
                    for p in predictor.begin(recording.tokens[t : t + 1])
                }
        key = (event.gate, 0 if predictor.wants_tokens and (event.gate, 0) in waiting else ahead)
        if key in waiting:
            seen[event.gate] += 1
            hits[event.gate] += np.isin(
                event.ids[0], top_k(waiting[key][:1], event.ids.shape[1])[0]
            ).mean()
        for p in predictor.observe(event):
            waiting[p.gate, (p.gate - event.gate) % n] = p.scores.copy()
    return hits / np.where(seen, seen, np.nan)


@main.command()
@click.option("-m", "--model", required=True, type=FILE)
@click.option("--calib", multiple=True, required=True, type=FILE)
@click.option("--valid", multiple=True, required=True, type=FILE)
@click.option("--tokens", default=36864, show_default=True, help="Of calibration.")
@click.option("--decode-tokens", default=3072, show_default=True, help="Of validation.")
@click.option("--hidden", default=128, show_default=True, help="Units of the learned predictor.")
@JSON
def predictors(
    model: str,
    calib: Sequence[str],
    valid: Sequence[str],
    tokens: int,
    decode_tokens: int,
    hidden: int,
    json_file: str | None,
) -> None:
    """Fit on the calibration texts, and replay a decode of the validation texts."""
    with recordable(ModelIndex.read(model)) as (llm, router):
        learned, decoded = (
            record(llm, sequences(llm, texts, n), router, Path(model).name)
            for texts, n in ((calib, tokens), (valid, decode_tokens))
        )
    sections = fit_profile(learned, FitOptions(hidden=hidden), compare=False)
    events = decoded.events(0, decoded.n_tokens)
    with ResultsFile(json_file) as results:
        title = (
            f"Decode, {decoded.n_tokens:,} tokens: recall at k, %, by layer; mean of the layers"
            " that are predicted"
        )
        table = results.table("recall", title, ["", *map(str, range(router.n_gates)), "mean"])
        for title, name, options in ROWS:
            own = [sections.get(section.name, {}) for section in PREDICTORS[name].sections]
            arrays = {array: values for section in own for array, values in section.items()}
            recalls = recall_by_gate(decoded, events, name, arrays or None, **options)
            table.row(
                title,
                *("" if np.isnan(x) else f"{100 * x:.1f}" for x in [*recalls, np.nanmean(recalls)]),
            )


if __name__ == "__main__":
    main()
