"""How like a trained model's a model's routing is: locality, popularity and predictability on a text, and whether its numbers stay sane.

Made for scripts/shape_model.py's random models; the demo model, which was trained, is what to compare with. Tokens are teacher
forced in sequences of 256.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeoff import Llama
from moeoff.calibrate.record import LENGTH, record, sequences
from moeoff.errors import MoeoffError
from moeoff.gguf.layout import Layout
from moeoff.predict.recording import Recording
from moeoff.predict.router import Router
from moeoff.simulate import simulate
from moeoff.simulate.trace import Model, TensorInfo
from results_file import HELP, ResultsFile

__all__ = ["SHARES", "Routing", "measure"]

SHARES = (25, 50, 75)  # per cent of the experts in memory


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


def measure(path: str, text: str, n_tokens: int, n_batch: int = LENGTH, **options) -> Routing:
    """Evaluates about n_tokens of a text.

    Args:
        options: of `moeoff.Llama`, e.g. memory.

    Raises:
        MoeoffError: as Llama; and for an output that is not finite.
    """
    layout = Layout.read(path)
    with Llama(path, n_ctx=LENGTH, n_batch=n_batch, gate_input=True, **({"expert_memory": "1T"} if "memory" not in options else {}) | options) as model:
        layers = [next(t.layer for t in model.expert_buffer.tensors if t.gate == g) for g in range(1 + max(t.gate for t in model.expert_buffer.tensors))]
        router = Router.read(layout, layers)
        recording = record(model, sequences(model, [text], n_tokens), router, Path(path).name)
        model.decode_batch([int(t) for t in recording.tokens[:16]], 0)
        logits = model.batch_logits(16).copy()
    if not np.isfinite(logits).all():
        raise MoeoffError(f"{path}: the output is not finite")
    return routing(recording, logits)


def routing(recording: Recording, logits: np.ndarray) -> Routing:
    ids, router = recording.ids, recording.router
    n_used = ids.shape[2]
    # experts of one size each: some layers' types are larger than others', which says nothing about routing
    model = Model(recording.model.name, n_used, tuple(TensorInfo(g, g, 0, router.n_experts, 4096) for g in range(router.n_gates)))
    trace = replace(recording, model=model, probs=None).trace()
    counts = np.sort(trace.counts(), axis=None)[::-1].cumsum() / ids.size
    follows = ~recording.starts[1:]
    same = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(3).mean(2)[follows]
    cosine, recall = [], []
    inputs = recording.inputs
    for gate in range(1, router.n_gates):
        before, here = (inputs[:, g].astype(np.float32) for g in (gate - 1, gate))
        cosine.append(float(np.mean((before * here).sum(1) / (np.linalg.norm(before, axis=1) * np.linalg.norm(here, axis=1)))))
        guess = router.choose(gate, before)
        recall.append(float((ids[: len(guess), gate, :, None] == guess[:, None, :]).any(2).mean()))
    known = logits[:, : _n_known(logits)]
    return Routing(
        n_used / router.n_experts,
        tuple(simulate(trace, "lru", model.full_bytes * share // 100).hit_rate for share in SHARES),
        tuple(float(counts[len(counts) * share // 100 - 1]) for share in SHARES),
        same.mean(0),
        np.array(cosine),
        np.array(recall),
        float((recording.weights.max(2) / recording.weights.sum(2)).mean()),
        float(np.abs(inputs).max()),
        float(known.std(1).mean()),
    )


def _n_known(logits: np.ndarray) -> int:
    """Unused tokens of a shape's vocabulary come last, and have all the same logit."""
    same = np.ptp(logits[:, ::-1], axis=0) == 0
    return logits.shape[1] - int(np.argmin(same)) if same[0] else logits.shape[1]


def percent(values) -> str:
    return " / ".join(f"{100 * value:.0f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", metavar="NAME=MODEL.gguf")
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=LENGTH, help="smaller for a model with a large vocabulary")
    parser.add_argument("--memory", help="of the process; default: all experts in memory")
    parser.add_argument("--json", help=HELP)
    args = parser.parse_args()
    done = {}
    options = {"memory": args.memory} if args.memory else {}
    try:
        for name, _, path in (model.partition("=") for model in args.model):
            done[name] = measure(path, args.text, args.tokens, args.batch, **options)
    except (MoeoffError, OSError) as error:
        sys.exit(f"bench_routing: {error}")
    with ResultsFile(args.json) as results:
        head = [
            "model",
            "experts a token %",
            "LRU hits %",
            "most popular %",
            "as the token before %",
            "next gate's recall %",
            "cosine",
            "largest weight",
            "gate input",
            "logits",
        ]
        table = results.table(
            "routing",
            f"Routing, {args.tokens:,} tokens in sequences of {LENGTH}; hit rates with {percent(s / 100 for s in SHARES)} % of the experts in memory",
            head,
        )
        for name, r in done.items():
            table.row(
                name, f"{100 * r.chosen:.1f}", percent(r.lru), percent(r.popular), f"{100 * r.overlap.mean():.0f}", f"{100 * r.recall.mean():.0f}",
                f"{r.cosine.mean():.2f}", f"{r.top:.2f}", f"{r.largest:.0f}", f"{r.logits:.1f}",
            )  # fmt: skip
        for key, title in (("overlap", "Experts as the token before, %, by gate"), ("recall", "Next gate's recall, %, by gate from the second")):
            table = results.table(key, title, ["model", "1", "2", "3", "4", "5 to 8", "9 to 16", "17 to 32", "33 on"])
            for name, r in done.items():
                parts = np.split(getattr(r, key), [1, 2, 3, 4, 8, 16, 32])
                table.row(name, *(f"{100 * part.mean():.0f}" if len(part) else "" for part in parts))


if __name__ == "__main__":
    main()
