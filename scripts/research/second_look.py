"""A second prediction of the next layer's experts, from its attention's input, which
this layer's experts have just made.

usage: second_look.py recall -m MODEL --calib FILE ... --valid FILE ...   what each look names of the experts that a cache lacks
       second_look.py lead -m MODEL --text FILE [--depths 0,1024,4096]    the time between the second look and the router
       second_look.py gain -m MODEL --calib FILE ... --valid FILE ... --attention MS   tokens per second with each look, simulated

The first look is the `gate` predictor's: the next router on this layer's gate input.
The second is the next router on the residual stream, normed as the router's input is,
without what attention adds. Both as they are, and fitted: a ridge regression of the
router's logits on the same input, for each layer, from the calibration texts. Page:
docs/results/cache-policies.md.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from helpers import ggml_api
from helpers.eval_callback import WithCallback
from moeoff import Llama
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp import native
from moeoff.measure.profile_fit import fit as fit_profile
from moeoff.measure.record import LENGTH, record, sequences
from moeoff.policies import CacheShape, FitOptions, get_policy, get_predictor
from moeoff.policies.score import fit_score
from moeoff.routing.recording import Recording
from moeoff.routing.router import Router
from moeoff.system.disk import probe
from moeoff.system.machine import n_cores
from results import HELP, ResultsFile

EPSILON = 1e-6  # of the norm
ALPHAS = (1.0, 10.0, 100.0, 1000.0, 10000.0)  # of the ridge, times the mean square of an input
HELD = 5  # every so many-th token decides between them
BATCH = 64  # tokens of a recorded batch
SHARES = (0.3, 0.45, 0.6)  # of the experts in memory
FILE = click.Path(exists=True, dir_okay=False)
MODEL = click.option("-m", "--model", required=True, type=FILE)
TEXTS = [
    click.option("--calib", multiple=True, required=True, type=FILE),
    click.option("--valid", multiple=True, required=True, type=FILE),
    click.option("--tokens", default=12288, show_default=True, help="Of calibration."),
    click.option("--decode-tokens", default=3072, show_default=True, help="Of validation."),
]
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)


class Watched(WithCallback, Llama):
    """Keep the residual stream behind each layer, and the times at which layers and
    routers end.

    Attributes:
        streams: [n_tokens, n_embd] float16 arrays of each layer, one for each batch.
        ends: (layer, is_router, time in seconds) of nodes; None keeps streams in their
            place.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.streams: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self.ends: list[tuple[int, bool, float]] | None = None
        super().__init__(*args, **kwargs)
        self.streams.clear()

    def _watch(self, node: int, ask: bool, _user: object) -> bool:
        tensor = ggml_api.Tensor.from_address(node)
        name, _, layer = tensor.name.decode().partition("-")
        is_router = name == "ffn_moe_logits"
        if name != "l_out" and not (is_router and self.ends is not None):
            return not ask
        if not ask and self.ends is not None:
            self.ends.append((int(layer), is_router, time.perf_counter()))
        elif not ask:
            self.streams[int(layer)].append(
                np.clip(ggml_api.matrix(tensor), -65504, 65504).astype(np.float16)
            )
        return True


@dataclass
class Looks:
    """A recording, and what each look sees of it.

    Attributes:
        streams: [n_gates] float16 [n_tokens, n_embd] of the residual stream before
            attention; gate 0 has none.
    """

    recording: Recording
    streams: list[np.ndarray | None] = field(repr=False)

    def first(self, gate: int) -> np.ndarray:
        """The input [n_tokens, n_embd] float32 of the gate before."""
        assert self.recording.inputs is not None
        return self.recording.inputs[:, gate - 1].astype(np.float32)

    def second(self, gate: int) -> np.ndarray:
        """The normed residual stream [n_tokens, n_embd] float32, scaled as the router's
        input is.
        """
        stream, norm = self.streams[gate], self.recording.router.norms[gate]
        assert stream is not None and norm is not None
        x = stream.astype(np.float32)
        normed: np.ndarray = (
            x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + EPSILON) * norm[0]
        )
        return normed

    def logits(self, gate: int) -> np.ndarray:
        """Return the router's logits [n_tokens, n_experts]."""
        assert self.recording.inputs is not None
        return self.recording.router.logits(gate, self.recording.inputs[:, gate].astype(np.float32))


def record_looks(
    model: str, texts: Sequence[Sequence[str]], n_tokens: Sequence[int]
) -> list[Looks]:
    """Record several groups of texts, so many tokens of each group."""
    model_index, out = ModelIndex.read(model), []
    with contextlib.closing(
        Watched(
            model_index.files[0],
            gate_input=True,
            n_ctx=LENGTH,
            n_batch=BATCH,
            n_ubatch=BATCH,
            verbose=False,
        )
    ) as llm:
        layer_of = {t.gate: t.layer for t in llm.engine.buffer.tensors}
        layers = [layer_of[gate] for gate in sorted(layer_of)]
        router = Router.read(
            model_index, layers, llm.engine.buffer.gating, llm.engine.buffer.priorities.shape[1]
        )
        for group, n in zip(texts, n_tokens):
            recording = record(
                llm, sequences(llm, group, n), router, Path(model).name, limit=1 << 34
            )
            streams = [
                np.concatenate(llm.streams.pop(layer - 1)) if gate else None
                for gate, layer in enumerate(layers)
            ]
            llm.streams.clear()
            out.append(Looks(recording, streams))
    return out


def ridge(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Weights [n_inputs + 1, n_outputs] that predict `residual` from x and 1; what is
    held out decides how much they are shrunk.
    """
    x = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
    held = np.arange(len(x)) // LENGTH % HELD == HELD - 1
    values, vectors = np.linalg.eigh(x[~held].T @ x[~held])
    moment, scale = vectors.T @ (x[~held].T @ residual[~held]), float(values.mean()) / len(values)
    turned = x[held] @ vectors
    errors = [
        np.square(
            turned @ (moment / (np.maximum(values, 0) + alpha * scale)[:, None]) - residual[held]
        ).sum()
        for alpha in ALPHAS
    ]
    alpha = ALPHAS[int(np.argmin(errors))] * scale
    weights: np.ndarray = np.linalg.solve(
        x.T @ x + alpha * np.eye(x.shape[1], dtype=np.float32), x.T @ residual
    )
    return weights


def look_scores(calibration: Looks, valid: Looks) -> dict[str, list[np.ndarray | None]]:
    """Scores [n_tokens, n_experts] of each look for each gate of the validation text."""
    router = valid.recording.router
    out: dict[str, list[np.ndarray | None]] = {
        name: [None] for name in ("first", "first, fitted", "second", "second, fitted")
    }
    for gate in range(1, router.n_gates):
        ahead = router.ahead(gate - 1, gate, True)
        weight, bias = router.weights[gate], router.bias[gate]
        assert ahead is not None and weight is not None
        target = calibration.logits(gate)
        for name, (w, b), see in (
            ("first", ahead, Looks.first),
            ("second", (weight, bias), Looks.second),
        ):
            learned, x = see(calibration, gate), see(valid, gate)
            moved = 0 if b is None else b
            plain, fitted = x @ w.T + moved, ridge(learned, target - (learned @ w.T + moved))
            out[name].append(plain)
            out[f"{name}, fitted"].append(plain + x @ fitted[:-1] + fitted[-1])
    return out


def learned_scores(calibration: Recording, valid: Recording) -> list[np.ndarray | None]:
    """The same of the `learned` predictor one layer ahead."""
    sections = fit_profile(calibration, FitOptions(hidden=128), only=["learned"], compare=False)
    predictor, n = (
        get_predictor("learned")(valid.router, sections["learned"], stride=1),
        valid.router.n_gates,
    )
    out = np.zeros((n, valid.n_tokens, valid.router.n_experts), np.float32)
    for i, event in enumerate(valid.events()):
        for p in predictor.observe(event):
            out[p.gate, i // n] = p.scores[0]
    return [None, *out[1:]]


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """[n_tokens, n_experts] bool: the k highest of each row."""
    out = np.zeros(scores.shape, bool)
    np.put_along_axis(out, np.argpartition(scores, -k, axis=1)[:, -k:], True, axis=1)
    return out


def absent(recording: Recording, share: float, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """[n_tokens, n_gates, n_experts] bool: what the cache of `auto` lacks when each
    router selects, without prefetches.
    """
    trace = recording.trace()
    cache_bytes = int(share * trace.model.full_bytes)
    policy = get_policy("score")(CacheShape.of(trace.model, cache_bytes), weights=weights)
    arena = native.Simulation(trace.model.tensors, cache_bytes)
    out = np.zeros((trace.n_tokens, trace.model.n_gates, recording.router.n_experts), bool)
    for i, event in enumerate(trace.events):
        out[i // trace.model.n_gates, event.gate] = arena.residency[event.gate] == 0
        arena.take(event.ids, event.weights, policy.priorities, 0.0, gate=event.gate, decode=True)
        policy.update(event)
    return out


def options(*more: Any) -> Any:
    def decorate(function: Any) -> Any:
        for option in more[::-1]:
            function = option(function)
        return function

    return decorate


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("recall")
@options(MODEL, *TEXTS, JSON)
def recall(
    model: str,
    calib: Sequence[str],
    valid: Sequence[str],
    tokens: int,
    decode_tokens: int,
    json_file: str | None,
) -> None:
    """Measure each look's recall, of all experts and of those that the cache lacks."""
    calibration, held = record_looks(model, [calib, valid], [tokens, decode_tokens])
    recording = held.recording
    used, k, n = recording.used(), max(recording.router.n_used), recording.router.n_gates
    scores = look_scores(calibration, held)
    scores = {"first, learned": learned_scores(calibration.recording, recording), **scores}
    named = {
        name: np.stack([top(s, k) for s in of[1:] if s is not None], axis=1)
        for name, of in scores.items()
    }
    lacks = {
        share: absent(recording, share, fit_score(calibration.recording.trace(8192)))[:, 1:]
        for share in SHARES
    }
    used, first = used[:, 1:], named["first"]
    with ResultsFile(json_file) as results:
        title = (
            f"{Path(model).name}, {recording.n_tokens:,} tokens, {n - 1} layers: % named at k of"
            " the experts that routers selected"
        )
        columns = [
            c
            for share in SHARES
            for c in (
                f"missing at {share:.0%}",
                "of these, not by the first",
                "used, of what it adds",
                "dropped rightly",
            )
        ]
        table = results.table("recall", title, ["look", "all", "from layer 2", *columns])
        for name, of in named.items():
            cells = [(of & used).sum() / used.sum(), (of & used)[:, 1:].sum() / used[:, 1:].sum()]
            for share in SHARES:
                missing, adds, drops = (
                    used & lacks[share],
                    of & ~first & lacks[share],
                    first & ~of & lacks[share],
                )
                cells += [
                    (of & missing).sum() / missing.sum(),
                    (of & missing & ~first).sum() / (missing & ~first).sum(),
                ]
                cells += [
                    (adds & used).sum() / max(adds.sum(), 1),
                    (drops & ~used).sum() / max(drops.sum(), 1),
                ]
            table.row(name, *(f"{100 * cell:.1f}" for cell in cells))
        table = results.table(
            "misses",
            "Experts for each token: missing, named by the first look, and not named",
            ["in memory", "missing", "named", "not named"],
        )
        for share in SHARES:
            missing = used & lacks[share]
            table.row(
                f"{share:.0%}",
                *(
                    f"{values.sum() / len(used):.2f}"
                    for values in (missing, missing & first, missing & ~first)
                ),
            )


@main.command("lead")
@options(MODEL, click.option("--text", required=True, type=FILE), click.option("--depths", default="0,1024,4096", show_default=True),
         click.option("--disk", default=400, show_default=True, help="MB/s of another disk."), JSON)  # fmt: skip
def lead(model: str, text: str, depths: str, disk: int, json_file: str | None) -> None:
    """The time between the end of a layer's experts and the next router, by context
    length, and what disks read in it.
    """
    lengths, n_decoded = [int(depth) for depth in depths.split(",")], 24
    with (
        ResultsFile(json_file) as results,
        contextlib.closing(Watched(model, n_ctx=max(lengths) + n_decoded + 2, flash_attn=True, n_threads=n_cores(),
                                   n_threads_batch=n_cores(), expert_memory="1T", verbose=False)) as llm,
    ):  # fmt: skip
        slice_bytes = max(t.nbytes for t in llm.engine.buffer.tensors)
        here = probe(model, slice_bytes).bytes_per_second
        columns = [
            "context",
            "lead, ms",
            f"slices at {disk} MB/s",
            f"slices at this disk's {here / 1e6:.0f} MB/s",
            "a token, ms",
        ]
        table = results.table(
            "lead", f"{Path(model).name}, slices of {slice_bytes / 2**20:.2f} MiB", columns
        )
        tokens = llm.tokenize(Path(text).read_bytes())
        for length in lengths:
            llm.reset()
            llm.ends = []
            llm.eval(tokens[: max(length, 1)])
            leads, times = [], []
            for token in tokens[length + 1 : length + 1 + n_decoded]:
                llm.ends.clear()
                started = time.perf_counter()
                llm.eval([token])
                times.append(time.perf_counter() - started)
                ended = {layer: t for layer, is_router, t in llm.ends if not is_router}
                leads += [
                    t - ended[layer - 1]
                    for layer, is_router, t in llm.ends
                    if is_router and layer - 1 in ended
                ]
            ms = 1e3 * float(np.median(leads))
            slices = [f"{ms / 1e3 * rate / slice_bytes:.2f}" for rate in (disk * 1e6, here)]
            table.row(f"{length:,}", f"{ms:.2f}", *slices, f"{1e3 * np.median(times):.0f}")


# --- what the looks would gain ---

N_MATRICES = 3
LOOK_MS = 0.1  # from an event to its reads
WARM = 256  # tokens before those that count
PAYS = 0.5  # useful share of what is read, at least (moeoff.engine.prefetcher)


@dataclass(frozen=True)
class Way:
    """Looks before a layer, by the names of their scores; empty: none.

    Attributes:
        pays: Useful share of what the first, and the second, reads, at least; more than
            1: it reads nothing.
    """

    first: str = ""
    second: str = ""
    pays: tuple[float, float] = (PAYS, PAYS)


WAYS = {
    "no prediction": Way(),
    "first": Way("first"),
    "first, 70 % useful": Way("first", pays=(0.7, 0)),
    "first, 80 % useful": Way("first", pays=(0.8, 0)),
    "first, fitted": Way("first, fitted"),
    "first, fitted, 70 % useful": Way("first, fitted", pays=(0.7, 0)),
    "both": Way("first", "second"),
    "both, second fitted": Way("first", "second, fitted"),
    "both, 70 % useful": Way("first", "second, fitted", (0.7, 0.7)),
    "second gives up only": Way("first", "second, fitted", (PAYS, 2.0)),
    "second alone": Way("", "second, fitted"),
    "first, then knowing": Way("first", "knowing"),
    "knowing": Way("knowing"),
}


@dataclass(frozen=True)
class Machine:
    """Times of a token, ms: of a layer's attention, its router and experts, and of all
    layers' end; and of a slice, read alone.
    """

    attention: float
    experts: float
    head: float
    slice: float


class Pipeline:
    """A token's way through the layers, beside a disk that reads one slice at a time:
    first what routers selected, then what was predicted.

    Args:
        policy: Its priorities decide about evictions; the caller updates it.
        capacity: Number of experts that fit in memory.

    Attributes:
        now: Time in ms.
        n_read: Number of slices read.
    """

    def __init__(self, recording: Recording, machine: Machine, policy: Any, capacity: int):
        n, e = recording.router.n_gates, recording.router.n_experts
        self._machine, self._policy, self._capacity = machine, policy, capacity
        # held: slices in memory
        self._has_slot, self._held = np.zeros((n, e), bool), np.zeros((n, e), np.int8)
        self._wanted, self._predicted = np.zeros((n, e), bool), np.zeros((n, e), bool)
        self._demand, self._ahead = deque[tuple[int, int]](), deque[tuple[int, int]]()
        self._reading: tuple[int, int] | None = None
        self._free_at = self.now = 0.0
        self.n_read = 0

    def _next(self) -> bool:
        """Begin the next read; False if there is none."""
        for queue in (self._demand, self._ahead):
            while queue:
                at = queue[0]
                if not self._has_slot[at] or self._held[at] == N_MATRICES:
                    queue.popleft()
                    continue
                if queue is self._demand:
                    queue.rotate(-1)  # matrix by matrix
                self._reading = at
                return True
        return False

    def _run(self, until: float) -> None:
        """Let the disk read until this time."""
        while True:
            if self._reading is None:
                if self._free_at > until or not self._next():
                    self._free_at = max(self._free_at, min(until, self.now))
                    return
                self._free_at += self._machine.slice
            if self._free_at > until:
                return
            at, self._reading = self._reading, None
            self.n_read += 1
            if self._has_slot[at] and self._held[at] < N_MATRICES:
                self._held[at] += 1

    def advance(self, ms: float) -> None:
        """Let so much time pass."""
        self._run(self.now + ms)
        self.now += ms
        self._free_at = max(self._free_at, self.now) if self._reading is None else self._free_at

    def _take_slot(self, at: tuple[int, int], is_demand: bool) -> bool:
        if self._has_slot[at]:
            return True
        if self._has_slot.sum() >= self._capacity:
            keep = ~self._has_slot | self._wanted | self._predicted
            if keep.all():
                if not is_demand:
                    return False
                keep = ~self._has_slot | self._wanted
            victim = np.unravel_index(
                np.argmin(np.where(keep, np.inf, self._policy.priorities)), keep.shape
            )
            self._has_slot[victim], self._held[victim] = False, 0
            self._predicted[victim] = False
        self._has_slot[at] = True
        return True

    def predict(
        self, gate: int, experts: np.ndarray, max_rank: int, limit: float, replaces: bool
    ) -> int:
        """Protect and queue what a look names; returns the slices queued.

        Args:
            experts: likeliest first.
            replaces: what an earlier look queued, and this one does not name, is given
                up.
        """
        if replaces:
            self._drop(gate, experts)
        self._predicted[gate, experts[self._has_slot[gate, experts]]] = True
        queued = 0
        for e in experts[:max_rank].tolist():
            missing = N_MATRICES - int(self._held[gate, e])
            if (
                missing
                and queued < limit
                and (gate, e) not in self._ahead
                and self._take_slot((gate, e), False)
            ):
                self._predicted[gate, e] = True
                self._ahead.append((gate, e))
                queued += missing
        return queued

    def _drop(self, gate: int, kept: np.ndarray) -> None:
        names = set(kept.tolist())
        for at in [at for at in self._ahead if at[0] == gate and at[1] not in names]:
            self._ahead.remove(at)
        gone = self._predicted[gate].copy()
        gone[kept] = False
        self._predicted[gate, gone] = False

    def select(self, gate: int, ids: np.ndarray) -> None:
        """Queue what the router selected and memory lacks, and give up the rest of what
        was predicted.
        """
        self._drop(gate, ids)
        self._wanted[gate, ids] = True
        for e in ids.tolist():
            if self._held[gate, e] < N_MATRICES:
                self._take_slot((gate, e), True)
                self._demand.append((gate, e))

    def compute(self, gate: int, ids: np.ndarray) -> None:
        """Compute each product as the slices come, resident experts first."""
        each = self._machine.experts / (N_MATRICES * len(ids))
        for m in range(N_MATRICES):
            left = ids.tolist()
            while left:
                ready = [e for e in left if self._held[gate, e] > m]
                if ready:
                    left.remove(ready[0])
                    self.advance(each)
                else:
                    self._run(self.now)  # begins a read
                    self.advance(max(self._free_at - self.now, 0.0) + 1e-9)
        self._wanted[gate, ids] = self._predicted[gate, ids] = False


def useful_places(
    scores: np.ndarray, used: np.ndarray, lacks: np.ndarray, k: int, pays: float
) -> int:
    """Return how many of a prediction's first places are useful if absent. All
    [n_tokens, n_experts].
    """
    order = np.argsort(-scores, axis=1)[:, :k]
    missing, hit = (np.take_along_axis(of, order, axis=1) for of in (lacks, used))
    share = (missing & hit).sum(axis=0) / np.maximum(missing.sum(axis=0), 1)
    return int(np.logical_and.accumulate(share >= pays).sum())


def pipeline_speed(way: Way, scores: Mapping[str, np.ndarray], recording: Recording, machine: Machine, share: float, policy: Any,
                   lacks: np.ndarray, n_tokens: int) -> tuple[float, float]:  # fmt: skip
    """Tokens per second, and slices read for each token, after the first tokens.

    Args:
        scores: [n_gates, n_tokens, n_experts] by name.
        lacks: as of `absent`.
    """
    n, e, k = recording.router.n_gates, recording.router.n_experts, max(recording.router.n_used)
    used, most = recording.used(), float(k * N_MATRICES)
    looks = {
        place: scores[name]
        for place, name in (("first", way.first), ("second", way.second))
        if name
    }
    paying = {
        place: [0] + [useful_places(of[g], used[:, g], lacks[:, g], k, pays) for g in range(1, n)]
        for (place, of), pays in zip(looks.items(), way.pays if way.first else way.pays[1:])
    }
    line, events = (
        Pipeline(recording, machine, policy, int(share * n * e)),
        recording.events(0, n_tokens, inputs=False),
    )
    credit = earned = 0.0
    started, begun, read, misses = 0.0, 0.0, 0, most / 2
    for i, event in enumerate(events):
        t, gate = divmod(i, n)
        if gate == 0:
            if t:
                token, of_slice = line.now - begun, machine.slice
                earned = max(token / n / of_slice - misses, 0.0)
            begun, missed = line.now, 0
            if t == WARM:
                started, read = line.now, line.n_read
        line.advance(machine.attention)
        ids = event.ids[0]
        missed += int((N_MATRICES - line._held[gate, ids]).sum())
        line.select(gate, ids)
        credit = min(credit + earned, most)
        if "first" in looks and gate + 1 < n:
            best = np.argsort(-looks["first"][gate + 1][t])[:k]
            credit -= line.predict(gate + 1, best, paying["first"][gate + 1], int(credit), False)
        line.compute(gate, ids)
        policy.update(event)
        if "second" in looks and gate + 1 < n:
            best = np.argsort(-looks["second"][gate + 1][t])[:k]
            line.predict(gate + 1, best, paying["second"][gate + 1], most, True)
        if gate == n - 1:
            line.advance(machine.head)
            misses += 0.4 * (missed / n - misses)
    return 1e3 * (n_tokens - WARM) / (line.now - started), (line.n_read - read) / (n_tokens - WARM)


@main.command("gain")
@options(MODEL, *TEXTS, JSON,
         click.option("--share", "shares", multiple=True, type=float, default=[0.45], show_default=True, help="Of the experts in memory."),
         click.option("--attention", "attentions", multiple=True, type=float, default=[0.3, 2.0], show_default=True, help="ms of a layer."),
         click.option("--experts", default=4.5, show_default=True, help="ms of a layer, without waiting."),
         click.option("--head", default=6.0, show_default=True, help="ms of a token, behind the layers."),
         click.option("--slice-mib", type=float, default=0.0, help="Of a slice, in the place of the model's."),
         click.option("--disk", "disks", multiple=True, type=int, default=[400], show_default=True, help="MB/s."))  # fmt: skip
def gain(model: str, calib: Sequence[str], valid: Sequence[str], tokens: int, decode_tokens: int, json_file: str | None, shares: Sequence[float],
         attentions: Sequence[float], experts: float, head: float, slice_mib: float, disks: Sequence[int]) -> None:  # fmt: skip
    """Simulated speed with each look, and with ones that know what the router will
    select.
    """
    calibration, held = record_looks(model, [calib, valid], [tokens, decode_tokens])
    recording, weights = held.recording, fit_score(calibration.recording.trace(8192))
    e = recording.router.n_experts
    of_look = {name: np.stack([np.zeros((recording.n_tokens, e), np.float32) if s is None else s for s in of])
               for name, of in look_scores(calibration, held).items()}  # fmt: skip
    of_look["knowing"] = recording.used().transpose(1, 0, 2).astype(np.float32)
    slice_bytes = slice_mib * 2**20 or max(t.nbytes for t in recording.model.tensors)
    with ResultsFile(json_file) as results:
        title = (
            f"{Path(model).name}, simulated: tok/s, ratio to the first look, slices read for each"
            " token"
        )
        columns = [
            f"{share:.0%}, attention {attention} ms, {disk} MB/s"
            for share in shares
            for attention in attentions
            for disk in disks
        ]
        rows: dict[str, list[str]] = {name: [] for name in WAYS}
        for share in shares:
            lacks = absent(recording, share, weights)
            for attention in attentions:
                for disk in disks:
                    machine, speeds = (
                        Machine(attention, experts, head, slice_bytes / disk / 1e3),
                        {},
                    )
                    for name, way in WAYS.items():
                        policy = get_policy("score")(
                            CacheShape.of(recording.model, int(share * recording.model.full_bytes)),
                            weights=weights,
                        )
                        speeds[name] = pipeline_speed(
                            way,
                            of_look,
                            recording,
                            machine,
                            share,
                            policy,
                            lacks,
                            recording.n_tokens,
                        )
                    for name, (tps, read) in speeds.items():
                        rows[name].append(f"{tps:.2f}, {tps / speeds['first'][0]:.3f}, {read:.1f}")
        table = results.table("gain", title, ["look", *columns])
        for name, cells in rows.items():
            table.row(name, *cells)


if __name__ == "__main__":
    main()
