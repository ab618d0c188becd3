"""Routing of published models as others recorded it, and of our shapes beside it: docs/results/cache-policies.md, predictors.md and shapes.md.

usage: routing.py published                 every cache policy on the published traces, and what names their experts beforehand
       routing.py shapes [SHAPE ...]        the shapes' own answers beside the traces: reached, and wanted
       routing.py policies MODEL=FILE ...   every cache policy on a shape's own answer: traces that `shapes --keep DIR` has left
       routing.py turns SHAPE --keep DIR    what the prompts and answers of a conversation read, turn by turn: a replay
       routing.py idle SHAPE --keep DIR     the same of runs, with and without reading ahead while a prompt is waited for

A shape's routing is measured on a copy with all layers, experts, widths and routers, whose experts have few hidden values: it answers the prompt of the published
traces greedily, with a trace.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "models")]

import baselines  # noqa: F401  registers them
from moeoff import Llama
from moeoff.gate_event import GateEvent
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import PRESETS, get_policy, policy_names
from moeoff.policies.router import Router
from moeoff.simulate import read_trace, simulate
from moeoff.trace import TensorInfo, Trace
from results import HELP, ResultsFile
from shape_model import ANSWER, NEAREST, SHAPES, shape_model

TRACES = ROOT / "tests" / "data" / "route-traces"
PUBLISHED = {name: TRACES / f"{name}.csv.gz" for name in ("qwen3-30b-a3b", "gemma-4-26b-a4b", "gpt-oss-120b")}
SHARES = (6, 12, 18, 24, 36)  # per cent of the experts in memory
COMPARED = (12, 24, 36)
TOUCHED = 128  # tokens
PROMPT = b"Explain how a mixture-of-experts model decides which experts handle each token."  # of the published traces
# the next gate's choice by this layer's input, as the source of the traces measured it on real weights; of the others it has none
RECALL = {"qwen3-30b-a3b": 0.886}
HIDDEN = 32  # values of each expert in the copies
ALONE: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}  # of a copy: others on the machine hardly slow one thread
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)


@dataclass(frozen=True)
class AnswerRouting:
    """Statistics of an answer that is decoded token by token; shares and rates from 0 to 1.

    Attributes:
        repeats: of a token's experts, those of the token before, in the same layer.
        lru: hit rates with COMPARED of the experts in memory, all of one size, from an empty buffer.
        touched: experts that the first TOUCHED tokens use.
        weights: [n_used] mean, the largest first; their sum is 1.
        own_list, prompt_list: share of the choices that are among the n_used experts which the answer, or its prompt, chose most often in that layer.
        recall: of each gate's experts, those its router would choose for the input of the gate before; None where it is not known.
    """

    repeats: float
    lru: tuple[float, ...]
    touched: float
    weights: np.ndarray
    own_list: float
    prompt_list: float
    recall: float | None = None


def answer_of(trace: Trace) -> Trace:
    """Its decoded events, as a run of their own."""
    events = [event for event in trace.events if event.decode]
    starts = np.zeros(len(events), bool)
    starts[:1] = True
    return Trace(trace.model, events, starts)


def heaviest(trace: Trace, n_used: int) -> Trace:
    """The trace as if only so many experts of each token had been used: those of the largest weights, which then have a sum of 1."""

    def of(event: GateEvent) -> GateEvent:
        order = np.argsort(-event.weights, axis=1, kind="stable")[:, :n_used]
        weights = np.take_along_axis(event.weights, order, axis=1)
        return replace(event, ids=np.take_along_axis(event.ids, order, axis=1), weights=weights / weights.sum(axis=1, keepdims=True))

    return Trace(replace(trace.model, n_used=n_used), [of(event) for event in trace.events], trace.starts)


def measure_answer(trace: Trace, recall: float | None = None) -> AnswerRouting:
    """Statistics of the answer in a trace of one prompt and one answer."""
    answer, model = answer_of(trace), trace.model
    n, e, k = model.n_gates, model.n_experts, model.n_used
    ids = np.stack([event.ids[0] for event in answer.events]).reshape(-1, n, k)
    weights = np.stack([event.weights[0] for event in answer.events]).reshape(ids.shape)
    # experts of one size each: some layers' types are larger than others', which says nothing about routing
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


# --- shapes ---


def answer(path: str | Path, trace: str | Path, n_tokens: int, prompt: bytes = PROMPT) -> tuple[Trace, float]:
    """A model's greedy answer, as `run --trace` has it, and the next gate's recall.

    Args:
        trace: where its trace is kept; a file that is there is replaced.
    """
    Path(trace).unlink(missing_ok=True)
    model_index = ModelIndex.read(path)
    inputs: list[list[np.ndarray]] = []

    def take(event: GateEvent) -> None:
        if event.decode and event.gate_input is not None:
            inputs[-1].append(event.gate_input[0])

    options = ALONE | {"expert_memory": "1T", "trace": str(trace)}
    with Llama(str(path), gate_input=True, **options) as llm:
        tokens = llm.tokenize(prompt)
        llm.eval(tokens)
        llm.engine.buffer.drain()
        llm.set_gate_callback(take)
        for _ in range(n_tokens):
            inputs.append([])
            llm.eval([llm.sample(temp=0.0)])
            llm.engine.buffer.drain()
    recorded = Trace.read(trace)
    return recorded, recall(model_index, recorded, np.array(inputs, np.float32))


def recall(model_index: ModelIndex, trace: Trace, inputs: np.ndarray) -> float:
    """Of each gate's experts, those its router would choose for the input of the gate before.

    Args:
        inputs: [n_tokens, n_gates, n_embd].
    """
    layers = [t.layer for t in sorted({t.gate: t for t in trace.model.tensors}.values(), key=lambda t: t.gate)]
    router = Router.read(model_index, layers)
    ids = np.stack([event.ids[0] for event in answer_of(trace).events]).reshape(len(inputs), len(layers), -1)
    chosen = [router.choose(gate, inputs[:, gate - 1]) for gate in range(1, len(layers))]
    return float(np.mean([(ids[:, gate, :, None] == named[:, None, :]).any(2).mean() for gate, named in enumerate(chosen, 1)]))


def shape_answers(names: Sequence[str], keep: str | None) -> Iterator[tuple[str, Trace, float]]:
    """Answers of copies of shapes with few hidden values."""
    for name in names:
        with tempfile.TemporaryDirectory(dir=keep) as folder:
            path, file = Path(folder) / "model.gguf", Path(keep or folder) / f"{name}.trace"
            shape_model(SHAPES[name].cut(hidden=HIDDEN), path)
            _, n_tokens = wanted(name)
            yield name, *answer(path, file, n_tokens)


def wanted(name: str) -> tuple[str, int]:
    """The published trace that a shape follows, and the tokens of its answer."""
    published = name if name in PUBLISHED else NEAREST[name]
    return published, 64 if published == "gpt-oss-120b" else 128


def percent(values: Any) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in values)


def cells(found: AnswerRouting, recall: float | None) -> list[str]:
    lists = [f"{100 * found.own_list:.1f}", f"{100 * found.prompt_list:.1f}"]
    weights = " ".join(f"{weight:.3f}".removeprefix("0") for weight in found.weights)
    return [f"{100 * found.repeats:.1f}", percent(found.lru), f"{100 * found.touched:.1f}", weights, "" if recall is None else f"{100 * recall:.1f}", *lists]


HEAD = [
    "as the token before %",
    "LRU hits %",
    f"touched in {TOUCHED} tokens %",
    "mean weights",
    "next gate's recall %",
    "by the answer's list %",
    "by the prompt's list %",
]


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@JSON
def published(json_file: str | None) -> None:
    """Every cache policy on the published traces, and what names their experts beforehand."""
    with ResultsFile(json_file) as results:
        replay(results, {name: read_trace(path) for name, path in PUBLISHED.items()})
        said = results.table("named", "Of the experts that an answer chooses, % that are named beforehand, as many as are used", ["by", *PUBLISHED])
        found = [measure_answer(read_trace(path)) for path in PUBLISHED.values()]
        for title, field in (("the token before", "repeats"), ("the answer's most used", "own_list"), ("the prompt's most used", "prompt_list")):
            said.row(title, *(f"{100 * getattr(each, field):.1f}" for each in found))


def replay(results: ResultsFile, traces: dict[str, Trace]) -> None:
    """A table for each trace: hit rates of its answer, from an empty buffer."""
    for name, trace in traces.items():
        trace = answer_of(trace)
        has_probs = trace.events[0].probs is not None
        title = f"{name}, {trace.n_tokens} tokens of an answer, {trace.model.n_used} experts used: hit rate %"
        said = results.table(name, title, ["strategy", *(f"{share} %" for share in SHARES)])
        for policy in policy_names():
            if policy == "static":
                continue  # it knows other text of the model, which there is not
            options: dict[str, Any] = {"weights": "generic"} if policy == "score" else {}
            of = [preset.name for preset in PRESETS.values() if preset.policy == policy and preset.precision.lossless and preset.name != policy]
            label = f"{policy} ({', '.join(of)})" if of else policy
            label += ", of the chosen experts' weights alone" if get_policy(policy).wants_probs and not has_probs else ""
            arenas = [trace.model.full_bytes * share // 100 for share in SHARES]
            said.row(label, *(f"{100 * simulate(trace, policy, arena, **options).hit_rate:.1f}" for arena in arenas))


@main.command()
@click.argument("names", nargs=-1, metavar="[SHAPE ...]")
@click.option("--keep", type=click.Path(file_okay=False, exists=True), help="Leave the traces here, as SHAPE.trace.")
@JSON
def shapes(names: Sequence[str], keep: str | None, json_file: str | None) -> None:
    """The shapes' own answers beside the traces: reached, and wanted."""
    with ResultsFile(json_file) as results:
        title = f"Routing of an answer; LRU with {' / '.join(map(str, COMPARED))} % of the experts in memory, from an empty buffer"
        said = results.table("answers", title, ["", "", *HEAD])
        for name, trace, found in shape_answers(names or list(ANSWER), keep):
            source = wanted(name)[0]
            goal = read_trace(PUBLISHED[source])
            said.row(name, "reached", *cells(measure_answer(heaviest(trace, goal.model.n_used)), found))
            said.row("" if source == name else source, "wanted", *cells(measure_answer(goal), RECALL.get(source)))


@main.command()
@click.argument("traces", nargs=-1, required=True, metavar="NAME=FILE ...")
@JSON
def policies(traces: Sequence[str], json_file: str | None) -> None:
    """Every cache policy on a shape's own answer."""
    with ResultsFile(json_file) as results:
        replay(results, {name: read_trace(path) for name, _, path in (trace.partition("=") for trace in traces)})


QUESTIONS = (
    "Explain how a mixture-of-experts model decides which experts handle each token, and why so few of them are needed.",
    "Write a short story about an old lighthouse keeper who finds a letter in a bottle on the first day of winter.",
    "In Python, how do I read a large CSV file line by line and sum the third column without loading it all into memory?",
    "What were the main causes of the French Revolution, and which of them do historians still argue about today?",
    "Give me a recipe for a vegetable soup for four people, with the amounts, the order of the steps and the times.",
)
ANSWERED = 96  # tokens
STILL = 0.3  # seconds without a read, after which nothing more is read ahead


def copy_of(name: str, folder: Path) -> str:
    """A shape's copy with few hidden values, which stays in the folder."""
    path = folder / f"{name}-{HIDDEN}.gguf"
    if not path.exists():
        shape_model(SHAPES[name].cut(hidden=HIDDEN), path)
    return str(path)


def turns_of(llm: Llama, before: Callable[[], Any] = lambda: None, after: Callable[[], Any] = lambda: None) -> None:
    """Greedy answers to QUESTIONS, one conversation. before and after are called around each prompt, after once more behind each answer."""
    for turn, question in enumerate(QUESTIONS):
        before()
        llm.eval(llm.tokenize(f"User: {question}\nAnswer:".encode(), add_bos=not turn))
        after()
        for _ in range(ANSWERED):
            llm.eval([llm.sample(temp=0.0)])
        after()


def converse(name: str, folder: Path) -> Trace:
    """The conversation of a shape's copy: its trace, which stays in the folder."""
    trace = folder / f"{name}-turns.trace"
    if not trace.exists():
        with Llama(copy_of(name, folder), expert_memory="1T", trace=str(trace), **ALONE) as llm:
            turns_of(llm)
    return read_trace(trace)


@main.command()
@click.argument("name", metavar="SHAPE")
@click.option("--keep", required=True, type=click.Path(file_okay=False, exists=True, path_type=Path), help="The trace is left here, or taken from here.")
@JSON
def turns(name: str, keep: Path, json_file: str | None) -> None:
    """What the prompts and answers of a conversation read, turn by turn."""
    trace = converse(name, keep)
    model, decoded = trace.model, np.array([event.decode for event in trace.events])
    begins = np.flatnonzero(np.diff(decoded.astype(int), prepend=1) == -1)
    parts = [
        part for first, end in zip(begins, [*begins[1:], len(decoded)]) for part in (slice(first, first + model.n_gates), slice(first + model.n_gates, end))
    ]
    chosen = np.array([len(np.unique(event.ids)) for event in trace.events])
    matrices = len(model.tensors) // model.n_gates

    def row(counts: np.ndarray) -> list[str]:
        """Of each prompt and answer, by layer; of answers for each token."""
        found = [counts[part].sum() / model.n_gates for part in parts]
        return [f"{prompt:.1f}, {answer / ANSWERED:.2f}" for prompt, answer in zip(found[::2], found[1::2])]

    with ResultsFile(json_file) as results:
        title = f"{name}: experts of a layer that a prompt reads, and a token of its answer"
        said = results.table("turns", title, ["in memory", "strategy", *(f"turn {n}" for n in range(1, len(begins) + 1))])
        said.row("", "chosen", *row(chosen))
        for share in COMPARED:
            for policy in ("lru", "lfu", "score", "belady"):
                done = simulate(trace, policy, model.full_bytes * share // 100, events=True)
                said.row(f"{share} %", policy, *row(chosen - done.event_hits / matrices))


@main.command()
@click.argument("name", metavar="SHAPE")
@click.option("--keep", required=True, type=click.Path(file_okay=False, exists=True, path_type=Path), help="The model is left here, or taken from here.")
@click.option("--strategy", default="auto", show_default=True)
@JSON
def idle(name: str, keep: Path, strategy: str, json_file: str | None) -> None:
    """What is read for prompts and answers in runs, with and without reads while a prompt is waited for."""
    path = copy_of(name, keep)
    with ResultsFile(json_file) as results:
        title = f"{name}, {strategy}: experts of a layer that are read for a prompt, for a token of its answer, and + before the prompt"
        said = results.table("idle", title, ["in memory", "while a prompt is waited for", *(f"turn {n + 1}" for n in range(len(QUESTIONS)))])
        for share in COMPARED:
            for watches in (False, True):
                said.row(f"{share} %", "experts are read" if watches else "nothing is read", *waiting(path, share, strategy, watches))


def waiting(path: str, share: int, strategy: str, watches: bool) -> list[str]:
    """One run of the conversation: of each turn what was read for its prompt and its answer, and before it."""
    counted: list[int] = []  # slices read before and for the prompt, and for the answer, turn by turn
    full = read_full(path)
    with Llama(path, expert_memory=full * share // 100, strategy=strategy, **ALONE) as llm:
        buffer = llm.engine.buffer
        each = len(buffer.tensors)  # slices of an expert in each layer

        def before() -> None:
            llm.reset_stats()
            if watches:
                llm.engine.idle()
                reads = -1
                while buffer.running and reads != (reads := buffer.stats().reads):
                    time.sleep(STILL)
            counted.append(buffer.stats().reads)
            llm.reset_stats()

        def after() -> None:
            buffer.drain()
            counted.append(buffer.stats().reads)
            llm.reset_stats()

        if watches:
            llm.engine.watch_prompts()
        turns_of(llm, before, after)
    found = np.array(counted).reshape(-1, 3) / each
    return [f"{prompt:.1f}, {answer / ANSWERED:.2f}" + (f" + {ahead:.1f}" if watches else "") for ahead, prompt, answer in found]


def read_full(path: str) -> int:
    """Bytes of an arena that holds all experts."""
    with Llama(path, expert_memory="1T", n_ctx=64, verbose=False) as llm:
        return llm.engine.buffer.arena_full


if __name__ == "__main__":
    main()
