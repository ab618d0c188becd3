"""Cache policies on recorded text, and how like a trained model's a model's routing is: docs/results/cache-policies.md and shapes.md.

usage: policies.py record  -m MODEL --out DIR --text math=FILE --text code=FILE      traces of teacher-forced decoding
       policies.py table   --trace math=FILE --trace code=FILE [--calibration FILE]  every policy on every trace, and on all of them in turn
       policies.py papers  --trace math=FILE --trace code=FILE                       EdgeMoE's Fig. 13 and HOBBIT's Fig. 18 on this model
       policies.py fit     --trace FILE --trace FILE --out WEIGHTS.npz               the learned score; HOBBIT's weights are printed
       policies.py routing demo=MODEL shape=MODEL --text FILE                        locality, popularity and predictability of the routing

Traces are replayed by `moeoff.simulate`: the same arguments give the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import baselines  # noqa: F401  registers them
from moeoff import Llama
from moeoff.calibrate.record import LENGTH, record, recordable, sequences
from moeoff.errors import ModelError, MoeoffError
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import policy_names
from moeoff.policies.recording import Recording
from moeoff.simulate import simulate
from moeoff.trace import TensorInfo, Trace, TraceHeader
from results import HELP, ResultsFile

PIECE = 256  # tokens of a text, where texts take turns
SHARES = (25, 50, 75)  # per cent of the experts in memory
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)


def named(_ctx: Any, _option: Any, texts: Sequence[str]) -> dict[str, str]:
    if not all("=" in text for text in texts):
        raise click.BadParameter("NAME=FILE is wanted")
    return dict(text.split("=", 1) for text in texts)


def traces(command: Any) -> Any:
    for option in (
        JSON,
        click.option("--from", "start", default=0, show_default=True, help="Tokens of each trace that are left out before."),
        click.option("--tokens", default=1536, show_default=True, help="Of each trace."),
        click.option("--shares", default="10,25,50,75,90", show_default=True, help="Per cent of the experts in memory."),
        click.option("--trace", "paths", multiple=True, required=True, callback=named, metavar="NAME=FILE"),
    ):
        command = option(command)
    return command


def parts(paths: Mapping[str, str], start: int, tokens: int) -> dict[str, Trace]:
    read = {name: Trace.read(path) for name, path in paths.items()}
    return {name: t.slice(start * t.model.n_gates, (start + tokens) * t.model.n_gates) for name, t in read.items()}


def mixed(traces: Sequence[Trace]) -> Trace:
    """Pieces of the traces in turn: the domain switches all the time."""
    n = PIECE * traces[0].model.n_gates
    longest = max(len(t.events) for t in traces)
    return Trace.join([t.slice(i, i + n) for i in range(0, longest, n) for t in traces if i < len(t.events)])


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("record")
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--text", "texts", multiple=True, required=True, callback=named, metavar="NAME=FILE")
@click.option("--tokens", default=4096, show_default=True, help="Of each text.")
@click.option("--ctx", "n_ctx", default=256, show_default=True, help="Tokens of a sequence.")
def record_traces(model: str, out: Path, texts: Mapping[str, str], tokens: int, n_ctx: int) -> None:
    """A trace for each text: tokens fed one by one, in sequences spread over the file, so that few tokens still are many documents."""
    out.mkdir(parents=True, exist_ok=True)
    for name, path in texts.items():
        file = out / f"{name}.trace"
        file.unlink(missing_ok=True)
        text, n_seq = Path(path).read_bytes(), max(tokens // n_ctx, 1)
        with Llama(model, expert_memory="100G", n_ctx=n_ctx, n_threads=1, trace=file) as llm:
            for i in range(n_seq):
                piece = text[len(text) * i // n_seq :][: 12 * n_ctx].decode("utf-8", "ignore").encode()
                llm.reset()
                for token in llm.tokenize(piece, add_bos=False)[:n_ctx]:
                    llm.eval([token])
        print(f"{file}: {file.stat().st_size} bytes", file=sys.stderr)


@main.command()
@click.option("--trace", "paths", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def fit(paths: Sequence[str], out: Path) -> None:
    """What the package's score and HOBBIT policies have learned."""
    from moeoff.policies.hobbit import fit_weights
    from moeoff.policies.score import fit_score

    trace = mixed([Trace.read(path) for path in paths])
    np.savez_compressed(out, **fit_score(trace))
    print(f"{out}: {out.stat().st_size} bytes; hobbit: {fit_weights(trace, simulate, max_events=3 * 1024 * trace.model.n_gates)}")


@main.command()
@traces
@click.option("--calibration", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Traces whose counts `static` gets.")
@click.option("--policies", help="Default: all of them.")
def table(paths: Mapping[str, str], shares: str, tokens: int, start: int, json_file: str | None, calibration: Sequence[str], policies: str | None) -> None:
    """Every policy on every text, and on all of them in turn."""
    counts = {"static": {"counts": Trace.join([Trace.read(path) for path in calibration]).counts()}} if calibration else {}
    read, sizes = parts(paths, start, tokens), [int(share) for share in shares.split(",")]
    with ResultsFile(json_file) as results:
        for name, trace in (read | {"mixed": mixed(list(read.values()))}).items():
            title = f"{name}, {trace.n_tokens:,} tokens: hit rate % / MB read per token / miss penalty per token / % of the gap between LRU and Belady"
            said = results.table(name, title, ["strategy", *(f"{size} %" for size in sizes)])
            arenas = [trace.model.full_bytes * size // 100 for size in sizes]
            ends = [(simulate(trace, "lru", arena).hit_rate, simulate(trace, "belady", arena).hit_rate) for arena in arenas]
            for policy in policies.split(",") if policies else policy_names():
                cells = []
                for arena, (lru, best) in zip(arenas, ends):
                    r = simulate(trace, policy, arena, **counts.get(policy, {}))
                    gap = 100 * (r.hit_rate - lru) / (best - lru)
                    cells.append(f"{100 * r.hit_rate:.1f} / {r.bytes_read / r.n_tokens / 1e6:.2f} / {r.miss_penalty / r.n_tokens:.1f} / {gap:.0f}")
                said.row(policy, *cells)


@main.command()
@traces
def papers(paths: Mapping[str, str], shares: str, tokens: int, start: int, json_file: str | None) -> None:
    """EdgeMoE's Fig. 13 (hit rates) and HOBBIT's Fig. 18 (penalties against random, resetting with each text or not)."""
    trace = mixed(list(parts(paths, start, tokens).values()))
    arenas = [trace.model.full_bytes * int(share) // 100 for share in shares.split(",")]
    head = ["policy", *(f"{share} %" for share in shares.split(","))]
    done = {name: [simulate(trace, name, arena) for arena in arenas] for name in ("random", "lru", "lfu", "lfu-model", "hobbit", "edgemoe", "edgemoe-printed")}
    done["hobbit-model"] = [simulate(trace, "hobbit", arena, sequence=False) for arena in arenas]
    with ResultsFile(json_file) as results:
        said = results.table("edgemoe-fig-13", "EdgeMoE, Fig. 13: hit rate %", head)
        for name in ("random", "lru", "lfu-model", "edgemoe", "edgemoe-printed"):
            said.row(name, *(f"{100 * r.hit_rate:.1f}" for r in done[name]))
        said = results.table("hobbit-fig-18a", "HOBBIT, Fig. 18 (a): miss penalty, random eviction = 1", head)
        for name in ("lru", "lfu", "hobbit"):
            said.row(name, *(f"{r.miss_penalty / base.miss_penalty:.3f}" for r, base in zip(done[name], done["random"])))
        for other in ("lru", "lfu"):
            said.row(f"hobbit against {other}", *(f"{100 * (r.miss_penalty / o.miss_penalty - 1):+.1f} %" for r, o in zip(done["hobbit"], done[other])))
        said = results.table("hobbit-fig-18b", "HOBBIT, Fig. 18 (b): hit rate %, counting since the text began, and for ever", head)
        for name in ("lfu", "hobbit"):
            said.row(name, *(f"{100 * r.hit_rate:.1f}, {100 * m.hit_rate:.1f}" for r, m in zip(done[name], done[f"{name}-model"])))


@dataclass(frozen=True)
class Routing:
    """Means over all gates but for those by layer; shares and rates from 0 to 1.

    Attributes:
        chosen: n_used / n_experts.
        lru, popular: hit rates with SHARES of the experts in memory: LRU, and the most used ones of this very text.
        overlap: of a token's experts with the token's before, by gate.
        cosine: of a gate's input with that of the gate before, by gate from the second.
        recall: of a gate's experts, those its router would choose for the input of the gate before, by gate from the second.
        top: mean of the largest expert weight's share of the sum.
        largest: absolute value of gate inputs.
        logits: standard deviation of the model's output over the tokens that it knows.
    """

    chosen: float
    lru: tuple[float, ...]
    popular: tuple[float, ...]
    overlap: np.ndarray
    cosine: np.ndarray
    recall: np.ndarray
    top: float
    largest: float
    logits: float


def measure_routing(path: str, text: str, n_tokens: int, **options: Any) -> Routing:
    """Evaluates about n_tokens of a text in sequences of LENGTH, teacher forced.

    Args:
        options: of `moeoff.Llama`, e.g. memory. Without memory all experts are held.

    Raises:
        MoeoffError: as Llama; and for an output that is not finite.
    """
    options = ({} if "memory" in options else {"expert_memory": "1T"}) | options
    with recordable(ModelIndex.read(path), **options) as (llm, router):
        recording = record(llm, sequences(llm, [text], n_tokens), router, Path(path).name)
        llm.decode_batch([int(t) for t in recording.tokens[:16]], 0)
        logits = llm.batch_logits(16).copy()
    if not np.isfinite(logits).all():
        raise ModelError(f"{path}: the output is not finite")
    return _routing(recording, logits)


def _routing(recording: Recording, logits: np.ndarray) -> Routing:
    ids, router = recording.ids, recording.router
    n_used = ids.shape[2]
    # experts of one size each: some layers' types are larger than others', which says nothing about routing
    model = TraceHeader(recording.model.name, n_used, tuple(TensorInfo(g, g, 0, router.n_experts, 4096) for g in range(router.n_gates)))
    trace = replace(recording, model=model, probs=None).trace()
    counts = np.sort(trace.counts(), axis=None)[::-1].cumsum() / ids.size
    same = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(3).mean(2)[~recording.starts[1:]]
    cosine, recall = [], []
    for gate in range(1, router.n_gates):
        before, here = (recording.inputs[:, g].astype(np.float32) for g in (gate - 1, gate))
        cosine.append(float(np.mean((before * here).sum(1) / (np.linalg.norm(before, axis=1) * np.linalg.norm(here, axis=1)))))
        guess = router.choose(gate, before)
        recall.append(float((ids[: len(guess), gate, :, None] == guess[:, None, :]).any(2).mean()))
    unknown = np.ptp(logits[:, ::-1], axis=0) == 0  # unused tokens of a shape's vocabulary come last, and have all the same logit
    known = logits[:, : logits.shape[1] - (int(np.argmin(unknown)) if unknown[0] else 0)]
    return Routing(
        n_used / router.n_experts,
        tuple(simulate(trace, "lru", model.full_bytes * share // 100).hit_rate for share in SHARES),
        tuple(float(counts[len(counts) * share // 100 - 1]) for share in SHARES),
        same.mean(0),
        np.array(cosine),
        np.array(recall),
        float((recording.weights.max(2) / recording.weights.sum(2)).mean()),
        float(np.abs(recording.inputs).max()),
        float(known.std(1).mean()),
    )


def percent(values: Any) -> str:
    return " / ".join(f"{100 * value:.0f}" for value in values)


@main.command()
@click.argument("models", nargs=-1, required=True, callback=named, metavar="NAME=MODEL...")
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--tokens", default=4096, show_default=True)
@click.option("--memory", help="Of the process. Default: all experts in memory.")
@JSON
def routing(models: Mapping[str, str], text: str, tokens: int, memory: str | None, json_file: str | None) -> None:
    """Made for random models (scripts/models); the demo model, which was trained, is what to compare with."""
    try:
        done = {name: measure_routing(path, text, tokens, **({"memory": memory} if memory else {})) for name, path in models.items()}
    except (MoeoffError, OSError) as error:
        raise click.ClickException(str(error)) from None
    head = ["model", "experts a token %", "LRU hits %", "most popular %", "as the token before %", "next gate's recall %", "cosine", "largest weight"]
    title = f"Routing, {tokens:,} tokens in sequences of {LENGTH}; hit rates with {percent(s / 100 for s in SHARES)} % of the experts in memory"
    with ResultsFile(json_file) as results:
        said = results.table("routing", title, [*head, "gate input", "logits"])
        for name, r in done.items():
            shares = [f"{100 * r.chosen:.1f}", percent(r.lru), percent(r.popular), f"{100 * r.overlap.mean():.0f}", f"{100 * r.recall.mean():.0f}"]
            said.row(name, *shares, f"{r.cosine.mean():.2f}", f"{r.top:.2f}", f"{r.largest:.0f}", f"{r.logits:.1f}")
        for key, title in (("overlap", "Experts as the token before, %, by gate"), ("recall", "Next gate's recall, %, by gate from the second")):
            said = results.table(key, title, ["model", "1", "2", "3", "4", "5 to 8", "9 to 16", "17 to 32", "33 on"])
            for name, r in done.items():
                pieces = np.split(getattr(r, key), [1, 2, 3, 4, 8, 16, 32])
                said.row(name, *(f"{100 * piece.mean():.0f}" if len(piece) else "" for piece in pieces))


if __name__ == "__main__":
    main()
