"""The weights of a shape: random, but with routing like a trained model's. scripts/shape_model.py writes them.

How the routing comes about, and which number in `Scales` turns which screw:

- The residual stream begins as the token's embedding, drawn at random. So a token's experts depend on the token.
- The first n_embd / 32 channels hold a constant, as "massive activations" do in trained models. Queries and keys are one fixed
  vector read from it, turned by RoPE, plus a little of the rest: attention falls with the distance D as D ** -`recency`, and is
  a running mean of the recent past. Values do not read the constant. So attention adds a part that drifts slowly, which makes
  neighbouring tokens share experts.
- Experts are random functions of the stream; they add what is new in each layer. Attention and feed-forward add `attention` and
  `feed_forward` times the stream's size, so that gate inputs of neighbouring layers have about the same cosine everywhere; what
  comes before the second gate adds `first` times, since the first layers of trained models are hard to predict.
- A router's rows are random directions, other ones in every layer: logits of deviation `logits`. Of their variance `skew` ** 2
  is a constant of each expert (read from the constant channels, or the router's bias where the architecture has one): popularity.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moeoff.gguf.file import Tensor
from moeoff.gguf.quantize import quantize
from moeoff.gguf.tensor_name import parse_block_name
from random_blocks import Pools
from shape_table import Shape

__all__ = ["Scales", "Weights"]

_CONSTANT = 4.0  # of the constant channels, in units of the embedding's deviation
_SEEN = 0.25  # the constant, as the router and the experts see it
_CONTENT = 0.3  # of queries and keys, against the fixed vector
_LOGITS = 4.0  # deviation of the model's output
_HEADSTART = 16.0  # logit of the tokenizer's tokens against unused ones
_N_CONTROL = 3  # of the demo model's tokens, the first
_SHARED = 0.4  # of the variance that a feed-forward network with shared experts adds, what they add


@dataclass(frozen=True)
class Scales:
    """What routing depends on; the module's text says how. mean_size: of attention's mean against a single value, an estimate."""

    attention: float = 0.28
    feed_forward: float = 0.18
    first: float = 2.0
    recency: float = 1.0
    logits: float = 1.5
    skew: float = 0.3
    mean_size: float = 0.5


class Weights:
    """Makes a shape's tensors. n_tokens: of the tokenizer; the rows of unused tokens are zero, since they are never read."""

    def __init__(self, shape: Shape, scales: Scales, seed: int, n_tokens: int):
        self._shape, self._scales, self._seed, self._n_tokens = shape, scales, seed, n_tokens
        self._n_constant = max(round(shape.n_embd / 1024), 1) * 32
        self._n_content = shape.n_embd - self._n_constant
        # a block for every slice to begin at, and as much of a slice without repetition as is quick to make
        n_values = max(256 * 3 * shape.n_layer * shape.n_expert, min(shape.ff * shape.n_embd, 1 << 24), 1 << 20)
        self._pools = Pools(seed, 1 << (n_values - 1).bit_length())
        self._nearness = scales.recency * math.log(shape.rope_base)  # logit of a token for itself
        self._sizes = self._stream_sizes()
        self._hidden, self._weight_norm = self._expert_sizes()

    def pieces(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """A tensor's bytes, uint8; a piece is valid until the next is asked for."""
        layer, name = parse_block_name(tensor.name) or (-1, tensor.name)
        part, _, kind = name.partition(".")
        rng = self._rng(name, layer)
        if len(tensor.shape) == 1 or kind == "bias":
            values = self._vector(part, kind, layer, tensor.shape, rng)
            yield values.astype(np.float32).reshape(-1).view(np.uint8)
        elif part in ("token_embd", "output"):
            rows = self._embedding(rng) if part == "token_embd" else self._output(rng)
            yield quantize(rows, tensor.type).reshape(-1)
            yield np.zeros(tensor.n_bytes // tensor.shape[0] * (tensor.shape[0] - len(rows)), np.uint8)
        elif part in ("attn_q", "attn_k", "attn_v", "attn_kv_a_mqa", "attn_q_a", "attn_q_b", "ffn_gate_inp"):
            for rows, times in self._matrix(part, layer, rng):
                yield np.tile(quantize(rows, tensor.type).reshape(-1), times)
        else:
            n_slices = tensor.shape[0] if len(tensor.shape) == 3 else 1
            yield from self._pools.slices(tensor.type, tensor.n_bytes // n_slices, n_slices, self._deviation(part, layer))

    def _rng(self, name: str, layer: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(name.encode()), layer + 1]))

    # --- sizes ---

    def _stream_sizes(self) -> list[tuple[float, float]]:
        """Of each layer, the residual stream's deviation before attention and before feed-forward; and once more at the end."""
        sizes, size = [], 1.0
        for layer in range(self._shape.n_layer + 1):
            middle = size * math.hypot(1, self._scales.attention)
            sizes.append((size, middle))
            size = middle * math.hypot(1, self._update(layer))
        return sizes

    def _update(self, layer: int) -> float:
        """What a feed-forward network adds, against the stream."""
        return self._scales.first if layer == self._shape.n_dense else self._scales.feed_forward

    def _expert_sizes(self) -> tuple[float, float]:
        """Root mean squares, drawn at random: of a hidden unit, and the root of the summed squares of a token's expert weights."""
        shape, rng = self._shape, self._rng("sizes", -1)
        gate, up = rng.standard_normal((2, 100_000))
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1) if shape.arch == "gpt-oss" else gate / (1 + np.exp(-gate)) * up
        logits = rng.standard_normal((4096, shape.n_expert)) * self._scales.logits
        probs = 1 / (1 + np.exp(-logits)) if shape.gating == "sigmoid" else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        weights = np.sort(probs, axis=1)[:, -shape.n_used :]
        if shape.norm_weights or shape.gating == "softmax of the selected":
            weights = weights / weights.sum(1, keepdims=True)
        return float(np.sqrt((hidden**2).mean())), shape.weights_scale * float(np.sqrt((weights**2).sum(1).mean()))

    def _deviation(self, part: str, layer: int) -> float:
        """Of the values of a matrix without structure."""
        shape = self._shape
        size, middle = self._sizes[layer]
        if part in ("attn_k_b", "attn_v_b"):
            return shape.mla.kv_rank**-0.5
        if part == "attn_output":
            return self._scales.attention * size / (self._scales.mean_size * math.sqrt(shape.n_head * shape.v_head))
        if not part.startswith("ffn_down"):
            return self._n_content**-0.5
        out = self._update(layer) * middle / self._hidden
        if part == "ffn_down":
            return out / math.sqrt(shape.ff_dense)
        if part == "ffn_down_shexp":
            return out * math.sqrt(_SHARED / (shape.n_shared * shape.ff))
        return out * math.sqrt((1 - _SHARED if shape.n_shared else 1) / shape.ff) / self._weight_norm

    def _key_size(self) -> float:
        """Of each value of the fixed vector, so that a token's logit for itself is what `recency` asks for."""
        shape = self._shape
        gain = 1.0
        if shape.yarn:  # llama.cpp makes attention sharper for stretched contexts
            gain = (1 + (shape.yarn.log_mul if shape.mla else 0.1) * math.log(shape.yarn.factor)) ** 2
        return math.sqrt(self._nearness * math.sqrt(shape.qk_head) / (shape.rot * gain))

    # --- vectors ---

    def _vector(self, part: str, kind: str, layer: int, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal(dims)
        size, middle = self._sizes[layer]
        if kind == "bias":
            if part == "ffn_gate_inp":
                return self._scales.skew * self._scales.logits * noise
            factors = {"exp_probs_b": 0.02, "attn_output": 0.02 * size, "ffn_down_exps": 0.1 * self._update(layer) * middle}
            return factors.get(part, 0.05) * noise
        if part == "attn_sinks":
            return self._nearness - 1 + 0.5 * noise
        if part in ("attn_q_norm", "attn_k_norm"):
            return np.full(dims, self._key_size() * math.hypot(1, _CONTENT))
        if part == "output_norm":
            return self._norm(self._sizes[-1][0], 1.0, noise)
        if part == "attn_norm":
            return self._norm(size, 1.0, noise)
        if part in ("ffn_norm", "post_attention_norm"):
            return self._norm(middle, _SEEN, noise)
        return np.ones(dims)

    def _norm(self, size: float, constant: float, noise: np.ndarray) -> np.ndarray:
        """Weights that give a stream of this size a deviation of 1, and the constant channels this value."""
        root = math.sqrt(size**2 + _CONSTANT**2 * self._n_constant / self._shape.n_embd)
        weights = root / size * (1 + 0.05 * noise)
        weights[: self._n_constant] = root / _CONSTANT * constant
        return weights

    # --- matrices with structure: rows float32, and how often they follow each other ---

    def _reading(self, n_rows: int, rng: np.random.Generator, size: float = 1.0) -> np.ndarray:
        """Rows that read the stream but for its constant, with results of deviation `size`."""
        rows = rng.standard_normal((n_rows, self._shape.n_embd), np.float32) * np.float32(size * self._n_content**-0.5)
        rows[:, : self._n_constant] = 0
        return rows

    def _keys(self, layer: int, n_rows: int, size: float) -> np.ndarray:
        """Rows that make the fixed vector, its last `rot` values in each head of qk_head rotated ones, and a little of the content."""
        rng = self._rng("keys", layer)
        rows = self._reading(n_rows, rng, _CONTENT * size)
        fixed = rng.choice(np.array([-size, size]), n_rows)
        if not self._shape.mla:
            fixed[np.arange(n_rows) % self._shape.head >= self._shape.rot] = 0
        rows[:, : self._n_constant] = (fixed / self._n_constant)[:, None]
        return rows

    def _matrix(self, part: str, layer: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
        shape = self._shape
        if part == "ffn_gate_inp":
            yield self._router(rng), 1
        elif part == "attn_v":
            yield self._reading(shape.n_head_kv * shape.head, rng), 1
        elif shape.mla:
            yield from self._latent(part, layer, rng)
        else:
            keys = self._keys(layer, shape.n_head_kv * shape.head, 1.0 if shape.qk_norm else self._key_size())
            if part == "attn_k":
                yield keys, 1
            else:
                for rows in np.split(keys, shape.n_head_kv):
                    yield rows, shape.n_head // shape.n_head_kv

    def _latent(self, part: str, layer: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
        """The matrices of latent attention; a head's rotated part is its end, and all heads share the rotated key."""
        shape, mla, size = self._shape, self._shape.mla, self._key_size()
        if part == "attn_kv_a_mqa":
            yield np.concatenate([self._reading(mla.kv_rank, rng), self._keys(layer, shape.rot, size)]), 1
        elif part == "attn_q":
            yield np.concatenate([self._reading(mla.nope, rng, _CONTENT), self._keys(layer, shape.rot, size)]), shape.n_head
        elif part == "attn_q_a":
            yield np.concatenate([self._keys(layer, shape.rot, 1.0), self._reading(mla.q_rank - shape.rot, rng)]), 1
        else:
            head = rng.standard_normal((shape.qk_head, mla.q_rank), np.float32) * np.float32(_CONTENT * mla.q_rank**-0.5)
            head[mla.nope :] = size * np.eye(shape.rot, mla.q_rank, dtype=np.float32)
            yield head, shape.n_head

    def _router(self, rng: np.random.Generator) -> np.ndarray:
        shape, scales = self._shape, self._scales
        rows = self._reading(shape.n_expert, rng, scales.logits * math.sqrt(1 - scales.skew**2))
        if shape.arch != "gpt-oss":  # which has a bias for it
            popularity = rng.standard_normal(shape.n_expert) * scales.skew * scales.logits
            rows[:, : self._n_constant] = (popularity / (_SEEN * self._n_constant))[:, None]
        return rows

    def _embedding(self, rng: np.random.Generator) -> np.ndarray:
        rows = rng.standard_normal((self._n_tokens, self._shape.n_embd), np.float32)
        rows[:, : self._n_constant] = _CONSTANT
        return rows

    def _output(self, rng: np.random.Generator) -> np.ndarray:
        rows = self._reading(self._n_tokens, rng, _LOGITS)
        # Byte pairs are numbered in the order of their frequency: tokens sampled from this are about as frequent as in text.
        offset = _HEADSTART - np.log(np.arange(self._n_tokens) + 20)
        offset[:_N_CONTROL] = -_HEADSTART  # an answer never ends by itself
        rows[:, : self._n_constant] = (offset / self._n_constant)[:, None]
        return rows
