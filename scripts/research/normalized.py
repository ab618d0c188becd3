"""What leaving out costs a model whose weights are normalized over the chosen experts: docs/results/loss.md.

usage: normalized.py -m DEMO.gguf --text FILE --tau 0.2            shares of what a token's experts weigh
       normalized.py -m DEMO.gguf --text FILE --tau 0.1 --as-is    the model's own weights: the same rules where their sum tells something
       normalized.py -m DEMO.gguf --text FILE --tau 0.1 --as-is --types Q4_0,Q2_0    what weighs more than a second threshold in low precision

A weight is then a share: an expert of a share below tau weighs little beside the token's others, and what the others weigh could make up for it. The
rules are those of `Precision.tau`, with and without scaling what is left to the sum of all, with and without keeping the first; or, with a low precision,
with a second threshold below tau, between which and tau what is missing is served low.

The reference model (qwen2moe, which does not normalize) is computed in numpy, so that all of that can be changed; its weights are divided by their sum, and
each layer's experts take the mean of those sums as a factor, since they were trained with it. That is a model of its own: its own lossless run is what losses
are against. Decisions are those of `moeoff.calibrate.precision_search`, each token as if it were decoded alone behind a simulated cache, which a test compares
with the native ones.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from moeoff.calibrate.perplexity import n_scored, open_model, read_windows
from moeoff.calibrate.statistics import Estimate, Scores, divergence, interval, log_probs, upper_loss
from moeoff.gguf.file import ModelFile
from moeoff.gguf.quantize import dequantize, quantize, row_bytes, type_from_name
from precision import BESIDE, beside_curve
from results import HELP, ResultsFile

KEPT_BY_TOKEN = 0.98  # of a count of uses, as in the native simulated cache
FILE = click.Path(exists=True, dir_okay=False)

# (layer, ids [n, n_used] best first, weights [n, n_used]) -> weights of what is served high, and low; 0 in both of what is left out
Decide = Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Rule:
    """What is missing and weighs less than tau is left out.

    Attributes:
        renormalized: the weights that are left are scaled to the sum of all.
        keeps_first: the expert of the largest weight is never left out.
        low_from: what is missing and weighs at least this, but less than tau, is served in low precision.
        low_room: share of the memory that low versions have; the rest is for the others.
    """

    tau: float = 0.0
    renormalized: bool = False
    keeps_first: bool = False
    low_from: float = math.inf
    low_room: float = 0.0

    def __str__(self) -> str:
        more = (", first kept" if self.keeps_first else "") + (", renormalized" if self.renormalized else "")
        more += f", low from {self.low_from:g} in {self.low_room:.0%} of the memory" if self.low_from < self.tau else ""
        return f"τ {self.tau:g}{more}"


class SimulatedCache:
    """A share of one layer's experts: those of the highest decayed counts of uses, brought in as tokens use them."""

    def __init__(self, n_expert: int, share: float):
        self.room, self._count, self._unit, self.inside = int(share * n_expert + 0.5), [0.0] * n_expert, 1.0, set[int]()

    def use(self, ids: Sequence[int], is_read: Iterable[bool]) -> None:
        """A token has used these; those that is_read leaves out are not brought in."""
        for e in ids:
            self._count[e] += self._unit
        for e, read in zip(ids, is_read, strict=True):
            if not read or e in self.inside:
                continue
            if len(self.inside) >= self.room:
                victim = min((v for v in self.inside if v not in ids), key=lambda v: (self._count[v], v), default=None)
                if victim is None:
                    continue
                self.inside.remove(victim)
            self.inside.add(e)
        self._unit /= KEPT_BY_TOKEN


class Caches:
    """A rule behind the simulated caches of all layers, empty when a text begins.

    Args:
        share: of the experts, that fit into the memory.
        low_size: bytes of an expert in low precision, of its own.

    Attributes:
        misses, low_misses, skipped, uses: of the tokens decided.
    """

    def __init__(self, rule: Rule, n_layers: int, n_expert: int, share: float, low_size: float = 1.0):
        self.rule = rule
        rooms = share * (1 - rule.low_room), share * rule.low_room / low_size
        self._layers, self._low_layers = ([SimulatedCache(n_expert, room) for _ in range(n_layers)] for room in rooms)
        self.misses = self.low_misses = self.skipped = self.uses = 0

    def follow(self, layer: int, ids: np.ndarray) -> None:
        """Tokens of a prompt, of which nothing is left out."""
        for chosen in ids.tolist():
            self._layers[layer].use(chosen, itertools.repeat(True, len(chosen)))

    def decide(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cache, low_cache, rule = self._layers[layer], self._low_layers[layer], self.rule
        heavy = weights >= np.float32(rule.tau)
        if rule.keeps_first:
            heavy[:, 0] = True
        served = np.empty(ids.shape, bool)
        for t, (chosen, enough) in enumerate(zip(ids.tolist(), heavy.tolist(), strict=True)):
            here = [e in cache.inside for e in chosen]
            served[t] = is_read = [a or b for a, b in zip(here, enough, strict=True)]
            self.misses += sum(is_read) - sum(here)
            cache.use(chosen, is_read)
        low = ~served & (weights >= np.float32(rule.low_from))
        for chosen, is_low in zip(ids.tolist(), low.tolist(), strict=True) if rule.low_from < rule.tau else ():
            self.low_misses += sum(is_read and e not in low_cache.inside for e, is_read in zip(chosen, is_low, strict=True))
            low_cache.use(chosen, is_low)
        self.skipped, self.uses = self.skipped + int((~served & ~low).sum()), self.uses + served.size
        kept = np.where(served, weights, np.float32(0))
        if rule.renormalized:
            kept *= weights.sum(axis=1, keepdims=True) / np.maximum(kept.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return kept, np.where(low, weights, np.float32(0))


@dataclass
class Past:
    """Keys, values [n, n_head, head] and choice [n, n_used] of a prompt in each layer."""

    keys: list[np.ndarray]
    values: list[np.ndarray]
    ids: list[np.ndarray]


class NumpyModel:
    """A qwen2moe model in float32.

    Attributes:
        factors: [n_layers], that the experts' outputs take.
        low_size: bytes of an expert in low precision, of its own.
    """

    def __init__(self, path: str, normalized: bool, types: Sequence[str] = ()):
        """types: of the experts, and of their low version; without, they are as they are, and the low version is the same."""
        with ModelFile(path) as model:
            if model.value("general.architecture") != "qwen2moe":
                raise click.UsageError(f"{path}: is no qwen2moe model, which this computes")
            self._w = {name: model.rows(name).reshape(tensor.shape) for name, tensor in model.tensors.items()}
            get = {key: model.value(f"qwen2moe.{key}") for key in ("block_count", "attention.head_count", "attention.head_count_kv", "rope.freq_base")}
            self.n_used, self._eps = int(model.value("qwen2moe.expert_used_count")), float(model.value("qwen2moe.attention.layer_norm_rms_epsilon"))
        self.n_layers, self._n_head, self._base = int(get["block_count"]), int(get["attention.head_count"]), float(get["rope.freq_base"])
        if get["attention.head_count_kv"] != self._n_head:
            raise click.UsageError(f"{path}: shares keys among heads, which this does not compute")
        self.n_expert = len(self._w["blk.0.ffn_gate_inp.weight"])
        self.normalized, self.factors, self.low_size = normalized, np.ones(self.n_layers, np.float32), 1.0
        self._low = self._w
        if types:
            experts = {name: w for name, w in self._w.items() if "_exps." in name}
            high, low = ({name: _in_type(w, type_from_name(of)) for name, w in experts.items()} for of in types)
            self._w, self._low = self._w | high, low
            sizes = [sum(row_bytes(type_from_name(of), w.shape[-1]) * w.shape[-2] for w in experts.values()) for of in types]
            self.low_size = sizes[1] / sizes[0]

    def compute(self, tokens: Sequence[int], past: Past | None = None, decide: Decide | None = None) -> tuple[np.ndarray, Past]:
        """Logits [n, n_vocab] of tokens behind a past, and the past of those behind them."""
        begin = len(past.ids[0]) if past else 0
        x = self._w["token_embd.weight"][np.asarray(tokens)]
        after = Past([], [], [])
        angles = np.arange(begin, begin + len(x))[:, None, None] * self._base ** (-np.arange(0, 1, 2 / (x.shape[1] // self._n_head)))
        turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        for layer in range(self.n_layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"), turn, past, after)
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            x = x + self._shared(layer, h) + self._experts(layer, h, after, decide)
        return self._norm(x, "output_norm") @ self._w["output.weight"].T, after

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(self._eps)) * self._w[f"{name}.weight"]

    def _attention(self, layer: int, h: np.ndarray, turn: tuple[np.ndarray, np.ndarray], past: Past | None, after: Past) -> np.ndarray:
        w, name, n = self._w, f"blk.{layer}.attn_", len(h)
        q, k, v = ((h @ w[f"{name}{c}.weight"].T + w[f"{name}{c}.bias"]).reshape(n, self._n_head, -1) for c in "qkv")
        q, k = (_rotated(rows, *turn) for rows in (q, k))
        after.keys.append(k)
        after.values.append(v)
        if past:
            k, v = np.concatenate([past.keys[layer], k]), np.concatenate([past.values[layer], v])
        scores = np.einsum("nhd,mhd->hnm", q, k, optimize=True) / np.float32(np.sqrt(q.shape[2]))
        scores[:, np.arange(n)[:, None] + len(k) - n < np.arange(len(k))] = -np.inf
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        scores /= scores.sum(axis=2, keepdims=True)
        return np.einsum("hnm,mhd->nhd", scores, v, optimize=True).reshape(n, -1) @ w[f"{name}output.weight"].T

    def _shared(self, layer: int, h: np.ndarray) -> np.ndarray:
        w, name = self._w, f"blk.{layer}.ffn_"
        gate = 1 / (1 + np.exp(-(h @ w[f"{name}gate_inp_shexp.weight"].reshape(-1, 1))))
        return gate * _ffn(h, *(w[f"{name}{m}_shexp.weight"] for m in ("gate", "up", "down")))

    def _experts(self, layer: int, h: np.ndarray, after: Past, decide: Decide | None) -> np.ndarray:
        w, name = self._w, f"blk.{layer}.ffn_"
        probs = np.exp(log_probs(h @ w[f"{name}gate_inp.weight"].T))
        ids = np.argsort(-probs, axis=1, kind="stable")[:, : self.n_used]
        weights = np.take_along_axis(probs, ids, axis=1)
        after.ids.append(ids)
        if self.normalized:
            weights = weights / weights.sum(axis=1, keepdims=True)
        out = np.zeros_like(h)
        for served, experts in zip(decide(layer, ids, weights) if decide else (weights,), (w, self._low)):
            matrices = [experts[f"{name}{m}_exps.weight"] for m in ("gate", "up", "down")]
            for e in np.unique(ids[served > 0]):
                rows, slots = np.nonzero((ids == e) & (served > 0))
                out[rows] += served[rows, slots, None] * _ffn(h[rows], *(m[e] for m in matrices))
        return self.factors[layer] * out


def mean_sums(model: NumpyModel, windows: Sequence[Sequence[int]]) -> np.ndarray:
    """[n_layers] mean of what a token's weights sum to."""
    sums: list[list[np.ndarray]] = [[] for _ in range(model.n_layers)]

    def look(layer: int, _: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sums[layer].append(weights.sum(axis=1))
        return weights, np.zeros_like(weights)

    for tokens in windows:
        model.compute(tokens, decide=look)
    return np.array([np.concatenate(of_layer).mean() for of_layer in sums], np.float32)


def _ffn(h: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = h @ gate.T
    return (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T


def _in_type(w: np.ndarray, type: int) -> np.ndarray:
    rows = w.reshape(-1, w.shape[-1])
    return dequantize(quantize(rows, type, search=True), type, rows.shape).reshape(w.shape)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE over halves of each head (neox)."""
    a, b = np.split(x, 2, axis=2)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


@dataclass
class Found:
    """A rule behind caches, window by window.

    Attributes:
        nll, kl: [n_windows, n_scored].
        misses, low_misses, skipped, uses: of all of them.
    """

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray
    misses: int = 0
    low_misses: int = 0
    skipped: int = 0
    uses: int = 0


def measure(
    model: NumpyModel, windows: Sequence[Sequence[int]], rules: Sequence[Rule], shares: Sequence[float]
) -> tuple[np.ndarray, dict[tuple[float, Rule], Found], dict[float, int]]:
    """The lossless nll [n_windows, n_scored]; what was found by share of the experts in the cache and rule; lossless misses by share.

    As `moeoff.calibrate.perplexity.evaluate` measures, mode "simulated": the first half of each window is a prompt.
    """
    n_ctx, n = len(windows[0]), len(windows)
    first, scored = n_ctx // 2, n_scored(n_ctx)
    lossless = np.empty((n, scored))
    found = {(share, rule): Found(np.empty((n, scored)), np.empty((n, scored)), np.empty((n, scored), bool)) for share in shares for rule in rules}
    misses = dict.fromkeys(shares, 0)
    for i, tokens in enumerate(windows):
        _, past = model.compute(tokens[:first])

        def run(caches: Caches, past: Past = past, tokens: Sequence[int] = tokens) -> np.ndarray:
            for layer, ids in enumerate(past.ids[:-1]):  # no prediction of the prompt is wanted: its last layer is not computed
                caches.follow(layer, ids)
            return log_probs(model.compute(tokens[first:-1], past, caches.decide)[0])

        targets = np.arange(scored), np.asarray(tokens[first + 1 :])
        for share in shares:
            caches = Caches(Rule(), model.n_layers, model.n_expert, share)
            reference = run(caches)
            misses[share] += caches.misses
            lossless[i] = -reference[targets]
            for rule in rules:
                caches, of = Caches(rule, model.n_layers, model.n_expert, share, model.low_size), found[share, rule]
                logp = run(caches)
                of.nll[i], of.kl[i], of.same[i] = -logp[targets], divergence(reference, logp), logp.argmax(axis=1) == reference.argmax(axis=1)
                for name in ("misses", "low_misses", "skipped", "uses"):
                    setattr(of, name, getattr(of, name) + getattr(caches, name))
        print(f"  window {i + 1} of {n}", end="\r", file=sys.stderr, flush=True)
    return lossless, found, misses


def percent(estimate: Estimate) -> str:
    return interval(estimate, "{:+.2%}").replace("%", " %")


@click.command(help=__doc__)
@click.option("-m", "--model", required=True, type=FILE)
@click.option("--text", multiple=True, required=True, type=FILE)
@click.option("--windows", default=30, show_default=True, help="Of each text.")
@click.option("--tau", "taus", multiple=True, type=float, required=True, help="On the scale of the weights.")
@click.option(
    "--resident", "shares", multiple=True, type=float, default=(0.25, 0.34, 0.5), show_default=True, help="Share of each layer's experts in the cache."
)
@click.option("--as-is", is_flag=True, help="Weights as the model has them, not normalized.")
@click.option("--types", metavar="HIGH,LOW", help="With a second threshold, experts in these types: rules with low precision in the place of the others.")
@click.option("--low-from", "seconds", multiple=True, type=float, default=(0.7, 0.85), show_default=True, help="Second thresholds, of tau.")
@click.option("--low-room", "rooms", multiple=True, type=float, default=(0.1, 0.2), show_default=True, help="Shares of the memory for low versions.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(
    model: str,
    text: Sequence[str],
    windows: int,
    taus: Sequence[float],
    shares: Sequence[float],
    as_is: bool,
    types: str | None,
    seconds: Sequence[float],
    rooms: Sequence[float],
    json_file: str | None,
) -> None:
    with open_model(model, 256, n_threads=1) as llm:
        read = read_windows(llm, text, 256, windows)
    tokens = [window.tokens for window in read]
    computed = NumpyModel(model, normalized=not as_is, types=types.split(",") if types else ())
    if not as_is:
        computed.factors = mean_sums(NumpyModel(model, normalized=False), tokens[:: len(tokens) // len(text)])
    # of shares the largest is never below 1 / n_used
    firsts = {tau: (False,) if computed.normalized and tau <= 1 / computed.n_used else (False, True) for tau in taus}
    rules = [Rule(tau, renormalized, first) for tau in taus for first in firsts[tau] for renormalized in (False, True)]
    if types:
        rules = [rule for tau in taus for rule in (Rule(tau), *(Rule(tau, low_from=second * tau, low_room=room) for second in seconds for room in rooms))]
    with ResultsFile(json_file) as results:
        lossless, found, misses = measure(computed, tokens, rules, shares)
        kind = "as they are" if as_is else "normalized"
        for share in shares:
            title = f"Weights {kind}, {share:.0%} of each layer's experts in the cache: lossless perplexity {np.exp(lossless.mean()):.1f}"
            compared = BESIDE if types else "more loss than without either (95 %)"
            columns = ["rule", "bytes, of lossless", "left out", "loss (95 %)", "upper bound", "KL", "same top token", compared]
            table = results.table(f"{kind.replace(' ', '-')}-{share:g}", title, columns)
            cost = {rule: (found[share, rule].misses + computed.low_size * found[share, rule].low_misses) / misses[share] for rule in rules}
            curve = [(cost[rule], found[share, rule].nll) for rule in rules if rule == Rule(rule.tau)]
            for rule in rules:
                of = found[share, rule]
                loss = Scores(of.nll, lossless, of.kl, of.same).quality().distance
                beside = beside_curve(curve, cost[rule], of.nll) if types else Estimate.mean(of.nll - found[share, Rule(rule.tau)].nll)
                bound = f"{upper_loss(loss.loss, len(tokens)):+.2%}".replace("%", " %")
                cells = (
                    f"{cost[rule]:.3f}",
                    f"{of.skipped / of.uses:.1%}",
                    percent(loss.loss),
                    bound,
                    f"{loss.kl.value:.4f}",
                    f"{loss.top1.value:.1%}",
                )
                table.row(str(rule), *cells, percent(beside) if beside and rule != Rule(rule.tau) else "")


if __name__ == "__main__":
    main()
