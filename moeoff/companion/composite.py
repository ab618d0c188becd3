"""Several tiers of a companion seen as one, in which each expert has a tier of its own: to try plans without writing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..gguf.layout import TensorSpan
from ..gguf.tensor_name import parse_tensor_name
from .file import Companion, Slice
from .tiers import BITS

__all__ = ["CompositeCompanion"]


class CompositeCompanion(Companion):
    """A companion with one tier, "bits": what `convert --bits` would make of a plan.

    Args:
        companion: has the tiers.
        default: tier of experts that are not mentioned, and of chunk experts.
        others: tiers by (layer, expert).
    """

    def __init__(self, companion: Companion, default: str, others: Mapping[tuple[int, int], str]):
        self.__dict__.update(companion.__dict__)
        self._companion, self._default, self._others = companion, default, others
        self.tiers = [BITS]

    def sources(self, span: TensorSpan, tier: str) -> Iterator[Slice]:
        where = parse_tensor_name(span.name)
        chosen = [self._default if where.chunk else self._others.get((where.layer, e), self._default) for e in range(span.shape[2])]
        by_tier = {name: list(self._companion.sources(span, name)) for name in set(chosen)}
        return (by_tier[name][expert] for expert, name in enumerate(chosen))
