"""Trials of lossy rules that moeoff does not have, beside skipping: what a missing,
light expert costs that is added one layer later, or read in part.

usage: late_experts.py -m MODEL --text FILE ... [--windows 24] [--share 0.34]

- skip: a missing expert whose weight is below τ is left out (`--max-loss`).
- defer: it is read, and added to the residual stream one layer later (KTransformers,
  deferred experts). The last layer waits.
- slices: the upper bits of a Q8_0 expert are read, and the lower ones when it is
  missing with a larger weight (SliceMoE, arXiv 2512.12990).
- copies: as slices, but low versions are files of their own, as HOBBIT has them: what
  becomes heavy is read whole.
- tier: all experts are the upper bits, as a tier of a sidecar is: more fit. Skipping
  and slices as above.

Every layer has an LRU cache of a share of its experts, and tokens are decided one by
one, in decode. The graph is llama.cpp's; numbers are changed where its nodes end. Page:
docs/results/loss.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from helpers import ggml_api
from helpers.eval_callback import WithCallback
from moeoff import Llama
from moeoff.gguf.file import ModelFile
from moeoff.gguf.quantize import dequantize
from moeoff.measure.perplexity import Reference, evaluate, read_windows
from moeoff.measure.statistics import interval
from results import HELP, ResultsFile

CTX = 256


@dataclass(frozen=True)
class Rule:
    """A rule for missing experts of low weight.

    Attributes:
        lightest: Weight below which an expert is skipped.
        light: Weight below which it is deferred, or served by its upper bits.
        bits: Number of upper bits that are read; 0: the expert is deferred.
        copies: Whether the low version has a file of its own.
        base: Bits of an expert that is read whole.
    """

    lightest: float = 0.0
    light: float = 0.0
    bits: int = 0
    copies: bool = False
    base: int = 8

    @property
    def whole(self) -> float:
        """Bytes of an expert, of its eight bits': a block of 32 has a scale of 16 bits
        beside them.
        """
        return (self.base * 32 + 16) / (8 * 32 + 16)

    @property
    def part(self) -> float:
        """The same of its upper bits."""
        return (self.bits * 32 + 16) / (8 * 32 + 16)


class Cache:
    """A layer's experts, the least recently used first; sizes in experts."""

    def __init__(self, capacity: float):
        self._capacity, self._used, self._sizes = capacity, 0.0, OrderedDict[int, float]()

    def size(self, expert: int) -> float:
        return self._sizes.get(expert, 0.0)

    def use(self, expert: int, size: float) -> None:
        """Hold so much of an expert, or more if it is there."""
        size = max(size, self.size(expert))
        self._used += size - self._sizes.pop(expert, 0.0)
        self._sizes[expert] = size
        while self._used > self._capacity:
            self._used -= self._sizes.popitem(last=False)[1]


class Trial(WithCallback, Llama):
    """Applies a rule to decoded tokens.

    Attributes:
        rule: None: lossless, caches see nothing.
        read, late: bytes in experts, of decoded tokens: all, and of those that are
            added one layer later.
        n_chosen: experts that routers chose for them.
    """

    def __init__(self, path: str, share: float, **options: Any):
        self.rule: Rule | None = None
        self._decodes = False
        super().__init__(path, n_ctx=CTX, n_batch=CTX, n_ubatch=CTX, logits_all=True, deterministic=True, flash_attn=True, expert_memory="1T",
                         verbose=False, **options)  # fmt: skip
        tensors = {t.layer: t for t in self.engine.buffer.tensors}
        self._n_experts, self._last = next(iter(tensors.values())).ne[2], max(tensors)
        self._share, self._layers = share, sorted(tensors)
        self._upper: dict[int, dict[tuple[int, int], list[np.ndarray]]] = {}  # by bits
        self.start(None)

    def start(self, rule: Rule | None) -> None:
        self.rule, self.read, self.late, self.n_chosen = rule, 0.0, 0.0, 0
        self._caches = {layer: Cache(self._share * self._n_experts) for layer in self._layers}
        self._deferred: dict[int, np.ndarray] = {}
        self._input: np.ndarray | None = None
        for bits in () if rule is None else (rule.bits, rule.base):
            if 0 < bits < 8 and bits not in self._upper:
                self._upper[bits] = upper_bits(self.model_path, bits)

    def decode_batch(self, tokens: Sequence[int], start: int, *more: Any) -> None:
        self._decodes = start >= CTX // 2
        super().decode_batch(tokens, start, *more)

    def _watch(self, node: int, ask: bool, _user: object) -> bool:
        tensor = ggml_api.Tensor.from_address(node)
        name, _, layer = tensor.name.decode().partition("-")
        names = (
            "ffn_moe_weighted",
            "l_out",
            "ffn_norm" if self.rule and (self.rule.bits or self.rule.base < 8) else "",
        )
        if self.rule is None or name not in names or not layer.isdigit():
            return not ask
        if ask:
            return True
        if name == "ffn_norm":
            self._input = ggml_api.matrix(tensor)
        elif name == "l_out":
            if (late := self._deferred.pop(int(layer) - 1, None)) is not None:
                rows(tensor)[0, -len(late) :] += late  # the last layer may compute fewer tokens
        else:
            self._decide(int(layer), tensor)
        return True

    def _decide(self, layer: int, tensor: ggml_api.Tensor) -> None:
        product = tensor.src[0].contents
        weights, ids = (
            ggml_api.cube(tensor.src[1].contents)[:, :, 0],
            ggml_api.matrix(product.src[2].contents),
        )
        cache, rule = self._caches[layer], self.rule
        assert rule is not None
        out = rows(tensor)
        if not self._decodes:
            for row in ids.tolist():
                for expert in row:
                    cache.use(expert, rule.whole)
            return
        parts: list[tuple[int, int, int]] = []
        is_late = np.zeros(ids.shape, bool)
        late = np.zeros((len(ids), out.shape[2]), np.float32)
        self.n_chosen += ids.size
        for t, (row, of_row) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for k, (expert, weight) in enumerate(zip(row, of_row, strict=True)):
                held, bits = cache.size(expert), rule.base
                if (
                    held >= rule.whole
                    or weight >= rule.light
                    or (weight >= rule.lightest and layer == self._last and not rule.bits)
                ):
                    self.read += rule.whole - (
                        held if not rule.copies or held >= rule.whole else 0.0
                    )
                    cache.use(expert, rule.whole)
                elif not held and weight < rule.lightest:
                    out[t, k] = 0.0
                    continue
                elif rule.bits:
                    self.read += max(rule.part - held, 0.0)
                    cache.use(expert, rule.part)
                    bits = rule.bits
                else:
                    self.read += rule.whole
                    self.late += rule.whole
                    cache.use(expert, rule.whole)
                    is_late[t, k] = True
                if bits < 8:
                    parts.append((t, k, bits))
        for t, k, bits in parts:
            out[t, k] = weights[t, k] * self._part(layer, int(ids[t, k]), bits, t)
        for t, k in np.argwhere(is_late):
            late[t] += out[t, k]
            out[t, k] = 0.0
        self._deferred[layer] = late

    def _part(self, layer: int, expert: int, bits: int, token: int) -> np.ndarray:
        """Output [n_embd] of an expert's upper bits."""
        assert self._input is not None
        x = self._input[token]
        gate, up, down = self._upper[bits][layer, expert]
        h = gate @ x
        out: np.ndarray = down @ (h / (1 + np.exp(-h)) * (up @ x))
        return out


def rows(tensor: ggml_api.Tensor) -> np.ndarray:
    """The numbers themselves of a dense F32 tensor, [ne2, ne1, ne0]."""
    shape = tensor.ne[2], tensor.ne[1], tensor.ne[0]
    return np.ctypeslib.as_array(
        (ctypes.c_float * math.prod(shape)).from_address(tensor.data)
    ).reshape(shape)


def upper_bits(path: str, bits: int) -> dict[tuple[int, int], list[np.ndarray]]:
    """Gate, up and down matrices of each layer's experts, of Q8_0 weights whose lower
    bits are replaced by their middle.
    """
    out: dict[tuple[int, int], list[np.ndarray]] = {}
    step = 1 << (8 - bits)
    with ModelFile(path) as file:
        for name in ("gate", "up", "down"):
            for tensor in file.tensors.values():
                if not tensor.name.endswith(f"ffn_{name}_exps.weight"):
                    continue
                layer, (n_experts, n_rows, n_cols) = int(tensor.name.split(".")[1]), tensor.shape
                blocks = (
                    np.frombuffer(file.data(tensor.name).tobytes(), np.uint8).reshape(-1, 34).copy()
                )
                q = blocks[:, 2:].view(np.int8)
                q[:] = np.clip(np.floor_divide(q, step) * step + step // 2, -128, 127)
                values = dequantize(blocks.tobytes(), tensor.type, (n_experts, n_rows, n_cols))
                for expert in range(n_experts):
                    out.setdefault((layer, expert), []).append(values[expert])
    return out


@click.command(help=__doc__)
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--windows", default=24, show_default=True, help="Of each text.")
@click.option("--share", default=0.34, show_default=True, help="Of each layer's experts in memory.")
@click.option("--only", default="", help="Rules whose names have this.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(
    model: str, text: Sequence[str], windows: int, share: float, only: str, json_file: str | None
) -> None:
    rules = {"lossless": Rule()}
    rules |= {f"skip below {tau:g}": Rule(tau, tau) for tau in (0.06, 0.08, 0.1, 0.12, 0.16)}
    rules |= {f"defer below {tau:g}": Rule(0.0, tau) for tau in (0.06, 0.1, 0.16, 0.25)}
    rules |= {
        f"skip below {low:g}, defer below {high:g}": Rule(low, high)
        for low, high in ((0.08, 0.12), (0.1, 0.16))
    }
    for copies in (False, True):
        name = "copies" if copies else "slices"
        for low, high in (
            (0.0, 0.16),
            (0.06, 0.16),
            (0.08, 0.16),
            (0.1, 0.16),
            (0.1, 0.25),
            (0.12, 0.25),
        ):
            rules[f"{name} of 4 bits, skip below {low:g}, part below {high:g}"] = Rule(
                low, high, 4, copies
            )
    rules |= {
        f"tier of 4 bits, skip below {tau:g}": Rule(tau, tau, base=4)
        for tau in (0.0, 0.06, 0.08, 0.1, 0.12)
    }
    rules |= {f"tier of 4 bits, defer below {tau:g}": Rule(0.0, tau, base=4) for tau in (0.1, 0.16)}
    for low, high in ((0.0, 0.12), (0.08, 0.16)):
        rules[f"tier of 4 bits, slices of 2, skip below {low:g}, part below {high:g}"] = Rule(
            low, high, 2, base=4
        )
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(ResultsFile(json_file))
        llm = stack.enter_context(contextlib.closing(Trial(model, share)))
        texts = read_windows(llm, text, CTX, windows)
        reference = stack.enter_context(Reference.record(llm, texts, mode="simulated"))
        columns = [
            "rule",
            "bytes, of lossless",
            "of these one layer later",
            "loss (95 %)",
            "KL",
            "same top token",
        ]
        table = results.table(
            "late",
            f"{Path(model).name}, {len(texts)} windows, {share:.0%} of each layer's experts in"
            " memory",
            columns,
        )
        lossless = 0.0
        for name, rule in rules.items():
            if name != "lossless" and only not in name:
                continue
            llm.start(rule)
            q = evaluate(llm, texts, reference, mode="simulated").quality()
            lossless = lossless or llm.read
            assert q.loss is not None and q.kl is not None and q.top1 is not None
            table.row(
                name,
                f"{llm.read / lossless:.3f}",
                f"{llm.late / lossless:.3f}",
                interval(q.loss, "{:+.2%}"),
                f"{q.kl.value:.4f}",
                f"{q.top1.value:.1%}",
            )


if __name__ == "__main__":
    main()
