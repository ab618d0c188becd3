"""Measurement of this CPU's computing time for a token of a model.

ggml times matrix products of some layers with constant weights, for each type, and
attention to earlier tokens. Other operations take little time in large models.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from ..errors import MoeoffError
from ..gguf.model_index import ModelIndex, TensorSpan
from ..llamacpp import native
from ..llamacpp.compute_thread import uninterrupted
from ..llamacpp.threads import bound_pool
from ..system.memory import available
from .dry_load import LONGEST, planned_model

_BYTES = 96 << 20  # minimum bytes of weights
_MOST_BYTES = 512 << 20
_CACHED_BYTES = 16 << 20  # if many tokens share the weights, so that reading takes no time

_Product = tuple[int, int, int, int]  # type, columns, rows, bytes of a matrix


def _uncached_bytes() -> int:
    """Return bytes of weights that exceed all CPU caches, as a model's do."""
    try:
        cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        largest = int(cache.removesuffix("K")) << 10
    except (OSError, ValueError):  # no such cache
        largest = 0
    return min(max(_BYTES, largest), _MOST_BYTES, max(_BYTES, available() // 8))


def token_seconds(
    model_index: ModelIndex, n_threads: int, seconds: float = 1.0, n_tokens: int = 1
) -> float:
    """Return a token's computing time in seconds, with all weights in memory.

    For each type the shortest time measured in `seconds` is scaled by its bytes.

    Args:
        n_tokens: Number of tokens per product.
    """
    products = _products(model_index)
    every = sum(nbytes for *_, nbytes in products)
    timed = _uncached_bytes() if n_tokens == 1 else _CACHED_BYTES
    groups: list[list[_Product]] = []  # timed products of each type
    factors: list[float] = []  # bytes of the type over timed bytes
    for kind in {kind for kind, *_ in products}:
        of_kind = [product for product in products if product[0] == kind]
        sums = list(accumulate(nbytes for *_, nbytes in of_kind))
        n_timed = max(sum(nbytes <= timed * sums[-1] // every for nbytes in sums), 1)
        groups.append(of_kind[:n_timed])
        factors.append(sums[-1] / sums[n_timed - 1])
    times = _times(groups, n_tokens, n_threads, seconds)
    return sum(best * factor for best, factor in zip(times, factors)) / n_tokens


@uninterrupted
def attention_seconds(
    model_index: ModelIndex,
    n_ctx: int,
    keywords: Mapping[str, Any],
    n_threads: int,
    seconds: float = 0.5,
) -> float | None:
    """Return a token's attention time in seconds at a context of n_ctx tokens.

    None for models without flash attention, as other kernels are not timed.
    """
    with (
        planned_model(model_index.without_nextn(), min(n_ctx, LONGEST), keywords) as llm,
        bound_pool(n_threads) as pool,
    ):
        best: float = native.time_attention(
            llm.context_handle, n_threads, pool, _uncached_bytes(), seconds
        )
    if best < 0:
        raise MoeoffError("no memory to time a token's attention")
    return best * max(n_ctx / LONGEST, 1.0) or None


def _times(
    groups: Sequence[Sequence[_Product]], n_tokens: int, n_threads: int, seconds: float
) -> list[float]:
    listed = [
        (group, *product[:3]) for group, products in enumerate(groups) for product in products
    ]
    types = (ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
    columns = [(kind * len(listed))(*column) for kind, column in zip(types, zip(*listed))]
    best = (ctypes.c_double * len(groups))()
    with bound_pool(n_threads) as pool:  # pinned as in a run
        if (
            native.time_products(
                *columns, len(listed), len(groups), n_tokens, n_threads, pool, seconds, best
            )
            != 0
        ):
            raise MoeoffError("no memory to time a token's products")
    return list(best)


def _products(model_index: ModelIndex) -> list[_Product]:
    """List a token's products, layer by layer from the middle of the model outwards.

    The first layers may be of another kind.
    """

    def matrices(span: TensorSpan) -> list[_Product]:
        used = (
            min(model_index.n_expert_used, span.shape[2])
            if span.name in model_index.experts
            else span.shape[2]
        )
        return [(span.type, span.shape[0], span.shape[1], span.slice_bytes)] * used

    row_tables = model_index.row_tables
    layers: dict[str, list[TensorSpan]] = defaultdict(list)
    for name, span in {**model_index.dense, **model_index.experts}.items():
        if name not in row_tables and span.shape[1] > 1:
            layers[name.split(".")[1] if name.startswith("blk.") else ""].append(span)
    output = layers.pop("", [])
    middle = len(layers) // 2
    ordered = sorted(enumerate(layers.values()), key=lambda numbered: abs(numbered[0] - middle))
    spans = chain(*(layer for _, layer in ordered), output)
    return [product for span in spans for product in matrices(span)]
