"""How long this CPU computes on a token of a model: some of its layers' products, with weights of one byte repeated, timed by ggml itself, type by type; and
its attention to the tokens before it. What llama.cpp does between these is left out: it is little beside the weights of a model that is worth offloading.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MoeoffError
from ..gguf.model_index import ModelIndex, TensorSpan
from ..llamacpp import native
from ..llamacpp.compute_thread import uninterrupted
from ..llamacpp.threads import bound_pool
from ..system.memory import available
from .dry_load import LONGEST, planned_model

_BYTES = 96 << 20  # of weights, at least
_MOST_BYTES = 512 << 20
_CACHED_BYTES = 16 << 20  # where many tokens share them, so that reading them takes no time

_Product = tuple[int, int, int, int]  # type, columns, rows, bytes of a matrix


def _uncached_bytes() -> int:
    """Of weights, so many that no cache of the CPU holds them, as none holds a model's."""
    try:
        cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        largest = int(cache.removesuffix("K")) << 10
    except (OSError, ValueError):  # there is none, or it is not said
        largest = 0
    return min(max(_BYTES, largest), _MOST_BYTES, max(_BYTES, available() // 8))


def token_seconds(model_index: ModelIndex, n_threads: int, seconds: float = 1.0, n_tokens: int = 1) -> float:
    """Seconds of computing that a token takes, once everything is in memory.

    Of each type of weights the shortest of what was tried for `seconds`, by its bytes.

    Args:
        n_tokens: that a matrix is multiplied with at once.
    """
    products = _products(model_index)
    every = sum(nbytes for *_, nbytes in products)
    timed = _uncached_bytes() if n_tokens == 1 else _CACHED_BYTES
    groups: list[list[_Product]] = []  # of each type, those that are timed
    wholes: list[float] = []  # times what these are
    for kind in {kind for kind, *_ in products}:
        of_kind = [product for product in products if product[0] == kind]
        total = sum(nbytes for *_, nbytes in of_kind)
        groups.append(_first(of_kind, timed * total // every))
        wholes.append(total / sum(nbytes for *_, nbytes in groups[-1]))
    times = _times(groups, n_tokens, n_threads, seconds)
    return sum(best * whole for best, whole in zip(times, wholes)) / n_tokens


@uninterrupted
def attention_seconds(model_index: ModelIndex, n_ctx: int, keywords: Mapping[str, Any], n_threads: int, seconds: float = 0.5) -> float | None:
    """Seconds that a token's attention takes behind n_ctx others, all layers together; None: it has no flash attention, and other ways are not timed."""
    with planned_model(model_index.without_nextn(), min(n_ctx, LONGEST), keywords) as llm, bound_pool(n_threads) as pool:
        best: float = native.time_attention(llm.context_handle, n_threads, pool, _uncached_bytes(), seconds)
    if best < 0:
        raise MoeoffError("no memory to time a token's attention")
    return best * max(n_ctx / LONGEST, 1.0) or None


def _first(products: Sequence[_Product], nbytes: int) -> list[_Product]:
    """The first of these products, about as many bytes of weights. At least one."""
    first, total = [products[0]], products[0][-1]
    for product in products[1:]:
        if (total := total + product[-1]) > nbytes:
            break
        first.append(product)
    return first


def _times(groups: Sequence[Sequence[_Product]], n_tokens: int, n_threads: int, seconds: float) -> list[float]:
    """Of each group the shortest time, in seconds."""
    listed = [(group, *product[:3]) for group, products in enumerate(groups) for product in products]
    columns = [(kind * len(listed))(*column) for kind, column in zip((ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64), zip(*listed))]
    best = (ctypes.c_double * len(groups))()
    with bound_pool(n_threads) as pool:  # as a run has them, next to other programs, too
        if native.time_products(*columns, len(listed), len(groups), n_tokens, n_threads, pool, seconds, best) != 0:
            raise MoeoffError("no memory to time what a token computes with")
    return list(best)


def _products(model_index: ModelIndex) -> list[_Product]:
    """The matrices that a token is multiplied with, layer by layer from the middle of the model, whose first layers may be of another kind."""

    def matrices(span: TensorSpan) -> list[_Product]:
        used = min(model_index.n_expert_used, span.shape[2]) if span.name in model_index.experts else span.shape[2]
        return [(span.type, span.shape[0], span.shape[1], span.slice_bytes)] * used

    read_by_row = model_index.row_tables
    weights = {**model_index.dense, **model_index.experts}
    spans = [span for name, span in weights.items() if name not in read_by_row and span.shape[1] > 1]
    layers: dict[str, list[TensorSpan]] = {}
    for span in spans:
        layers.setdefault(span.name.split(".")[1] if span.name.startswith("blk.") else "", []).append(span)
    output = layers.pop("", [])
    from_the_middle = [layer for _, layer in sorted(enumerate(layers.values()), key=lambda numbered: abs(numbered[0] - len(layers) // 2))]
    out = [product for layer in from_the_middle for span in layer for product in matrices(span)]
    return out + [product for span in output for product in matrices(span)]
