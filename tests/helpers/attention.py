"""FLASH_ATTN_EXT by itself: one op of random numbers, computed by our kernels and by
ggml's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from helpers import ggml_api
from helpers.ggml_api import Backend, Context, cpu_buffer_type, quantized, read, write
from moeoff.gguf.quantize import type_from_name
from moeoff.llamacpp import native
from moeoff.llamacpp.llama import api

# with --attention f32 the demo model's heads of 32 numbers, which four vectors of
# AVX-512 do not divide
DEMO_IN_F32 = (
    native.attention_kernels() == 1 and "AVX512 = 1" not in api.llama_print_system_info().decode()
)
MASKS = ("none", "causal", "padded", "window", "random")


@dataclass(frozen=True)
class Shape:
    """The shape of an op: heads of dk and dv numbers, n_group query heads for each
    KV head.
    """

    dk: int
    dv: int
    n_kv_heads: int
    n_group: int
    n_tokens: int
    n_kv: int
    n_streams: int = 1
    k: str = "F16"
    v: str = "F16"
    mask: str = "causal"
    max_bias: float = 0
    softcap: float = 0
    sinks: bool = False
    style: str = "normal"

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.n_group


def numbers(rng: np.random.Generator, shape: tuple[int, ...], style: str) -> np.ndarray:
    """float32 of a shape: normal, large, with heavy tails, with halves' subnormals, or
    with zeros of both signs.
    """
    x = rng.standard_normal(shape, np.float32)
    if style == "large":
        return x * 8
    if style == "heavy":
        # halves, too
        return np.clip(x * np.exp(2 * rng.standard_normal(shape, np.float32)), -6e4, 6e4)
    if style == "tiny":
        return np.ldexp(x, -rng.integers(0, 20, shape))
    if style == "zeros":
        return np.where(rng.random(shape) < 0.2, np.copysign(np.float32(0), x), x)
    return x


def mask_of(shape: Shape, rng: np.random.Generator) -> np.ndarray | None:
    """float16 [n_streams, n_tokens, n_kv]"""
    if shape.mask == "none":
        return None
    size = (shape.n_streams, shape.n_tokens, shape.n_kv)
    if shape.mask == "random":
        return np.where(rng.random(size) < 0.2, -np.inf, rng.standard_normal(size)).astype(
            np.float16
        )
    n_padded = (
        int(rng.integers(0, min(shape.n_kv - shape.n_tokens + 1, 300)))
        if shape.mask == "padded"
        else 0
    )
    distance = (shape.n_kv - n_padded - shape.n_tokens + np.arange(shape.n_tokens))[
        :, None
    ] - np.arange(shape.n_kv)
    hidden = (distance < 0) | (distance > 100) if shape.mask == "window" else distance < 0
    bias = -np.abs(distance) if shape.max_bias else 0
    return np.broadcast_to(np.where(hidden, -np.inf, bias).astype(np.float16), size)


class Attention:
    """An op with its operands, in memory."""

    def __init__(
        self,
        shape: Shape,
        rng: np.random.Generator,
        with_products: bool = False,
        in_f32: bool = False,
    ):
        """with_products: also the way without flash attention, over a transposed V.
        in_f32: what our kernels add up.
        """
        self.shape, self._backend = shape, Backend()
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(Context(24, 2))
            stack.callback(self._backend.close)
            s, scale = shape, shape.dk**-0.5
            types = [type_from_name(name) for name in (s.k, s.v)]
            q = context.tensor(ggml_api.F32, s.dk, s.n_heads, s.n_tokens, s.n_streams)
            k, v = (
                context.tensor(type, d, s.n_kv_heads, s.n_kv, s.n_streams)
                for type, d in zip(types, (s.dk, s.dv))
            )
            if in_f32:
                assert native.attend_in_f32(k, s.dk, s.dv)
            values = {q: numbers(rng, (s.n_streams, s.n_tokens, s.n_heads, s.dk), s.style)}
            for tensor, type, d in zip((k, v), types, (s.dk, s.dv)):
                x = numbers(rng, (1, s.n_streams * s.n_kv * s.n_kv_heads, d), s.style)
                values[tensor] = (
                    x.astype(np.float16) if type == ggml_api.F16 else quantized(x, type)
                )
            mask = sinks = None
            masked = mask_of(s, rng)
            if masked is not None:
                mask = context.tensor(ggml_api.F16, s.n_kv, s.n_tokens, 1, s.n_streams)
                values[mask] = masked
            if s.sinks:
                sinks = context.tensor(ggml_api.F32, s.n_heads)
                values[sinks] = 2 * rng.standard_normal(s.n_heads, np.float32)
            by_head = [context.permute(tensor, 0, 2, 1, 3) for tensor in (q, k, v)]
            self._out = context.flash_attn(
                *by_head, mask, sinks, scale=scale, max_bias=s.max_bias, softcap=s.softcap
            )
            self._graph = context.graph(self._out)
            if with_products:
                transposed = context.tensor(types[1], s.n_kv, s.dv, s.n_kv_heads, s.n_streams)
                values[transposed] = (
                    values[v].reshape(s.n_streams, s.n_kv, s.n_kv_heads, s.dv).transpose(0, 2, 3, 1)
                )
                weights = context.soft_max(context.mul_mat(by_head[1], by_head[0]), mask, scale)
                self._products = context.graph(context.mul_mat(transposed, weights))
            context.allocate(cpu_buffer_type())
            for tensor, x in values.items():
                write(tensor, x)
            self.operands = values[q], values[k], values[v]
            self._stack = stack.pop_all()

    def __enter__(self) -> Attention:
        return self

    def __exit__(self, *_exc) -> None:
        self._stack.close()

    def compute(self, n_threads: int, ours: bool) -> None:
        with kernels(ours):
            assert self._backend.compute(self._graph, n_threads) == ggml_api.SUCCESS

    def work_size(self, n_threads: int) -> int:
        return ggml_api.work_size(self._graph, n_threads)

    def compute_products(self, n_threads: int) -> None:
        assert self._backend.compute(self._products, n_threads) == ggml_api.SUCCESS

    def bits(self, n_threads: int, ours: bool) -> np.ndarray:
        """uint32 [n_streams * n_tokens, n_heads * dv] of the output, which is filled
        with other bits before.
        """
        size = (self.shape.n_streams * self.shape.n_tokens, self.shape.n_heads * self.shape.dv)
        write(self._out, np.full(size, 0x7FBADBAD, np.uint32))
        self.compute(n_threads, ours)
        return read(self._out, size)


@contextlib.contextmanager
def kernels(ours: bool) -> Iterator[None]:
    """Attention by our kernels or by ggml's."""
    native.use_attention_kernels(ours)
    try:
        yield
    finally:
        native.use_attention_kernels(True)
