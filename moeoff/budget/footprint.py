"""What a model will take in memory, told before it is loaded: nothing but its headers and its vocabulary is read.

Weights, slices and slots are exact; caches and buffers are what llama.cpp plans (`moeoff.budget.dry_load`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError
from ..gguf.layout import Layout
from ..gguf.quantize import type_name
from ..gguf.tensor_name import EMBEDDING, parse_tensor_name
from ..memory import rss, slot_bytes
from .dry_load import MemorySizes, TensorOverrides, dry_load, embedding_on_disk
from .memory_plan import Needs, Plan

DEFAULT_CTX = 4096  # tokens, where the user names none and the model was trained for as many
MAX_CTX = (1 << 31) - 1  # llama.cpp counts positions in 32 bits
_LIBRARIES = 16 << 20  # llama.cpp and numpy take this much more once a model is loaded
_PROCESS = 64 << 20  # the usual size of a process without the model


@dataclass(frozen=True)
class SliceKind:
    """Slices that look alike: `count` of them, each one matrix of one expert in `nbytes` bytes."""

    matrix: str
    type: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Footprint:
    """Bytes, at a context of `n_ctx` tokens.

    Attributes:
        planned: caches, buffers and weights outside the experts, as llama.cpp plans them.
        embedding: of the weights, the token embedding.
        on_disk: the token embedding, where its rows are read from disk; it is not among the weights then.
        process: Python and the libraries, as resident in this process now.
        arena_floor, arena_full: the smallest arena for experts, and the one that holds all of them.
        token_bytes: slices that one token uses.
        kept: of a server, prompts outside the context, samplers, and other files.
    """

    n_ctx: int
    planned: MemorySizes
    embedding: int
    on_disk: int
    process: int
    arena_floor: int
    arena_full: int
    token_bytes: int
    kept: int = 0

    @classmethod
    def of(cls, layout: Layout, n_ctx: int, keywords: Mapping[str, Any] | None = None, overrides: TensorOverrides = (), *, n_sequences: int = 1,
           kept: int = 0, nextn: bool = False) -> Footprint:  # fmt: skip
        """Of a model opened with these options of llama_cpp.Llama, by default those of the command line.

        Args:
            n_sequences: that share the context.
            nextn: drafts are made with the model's next-token layers.

        Raises:
            OptionError: a context that llama.cpp cannot count.
            ModelError: llama.cpp cannot load the model.
        """
        if not 0 < n_ctx <= MAX_CTX:
            raise OptionError(f"a context of {n_ctx} tokens is impossible: it lies between 1 and {MAX_CTX}")
        layout = layout if nextn else layout.without_nextn()
        kinds = slice_kinds(layout)
        embedding, on_disk = layout.dense.get(EMBEDDING), embedding_on_disk(layout, overrides)
        return cls(
            n_ctx=n_ctx,
            planned=dry_load(layout, n_ctx, {"flash_attn": True} if keywords is None else keywords, overrides, n_sequences, nextn),
            embedding=embedding.nbytes - on_disk if embedding else 0,
            on_disk=on_disk,
            process=rss(),
            arena_floor=2 * max((slot_bytes(kind.nbytes) for kind in kinds), default=0),
            arena_full=sum(slot_bytes(kind.nbytes) * kind.count for kind in kinds),
            kept=kept,
            token_bytes=sum(span.nbytes // max(span.shape[2], 1) * min(layout.n_expert_used, span.shape[2]) for span in layout.experts.values()),
        )

    def needs(self, process: int | None = None) -> Needs:
        """What is not for experts, in a process of another size than this one, if given."""
        p = self.planned
        return Needs(self.process if process is None else process, p.weights, p.state, p.compute, p.work, p.outputs, self.n_ctx, self.on_disk, self.kept)

    @property
    def fixed(self) -> int:
        """Everything but the experts."""
        return self.needs().total

    @property
    def floor(self) -> int:
        """The smallest budget that should do."""
        return self.fixed + self.arena_floor

    def resident_share(self, budget: int) -> float:
        """Share of the experts that stay in memory within a budget; 0 below the floor."""
        if budget < self.floor:
            return 0.0
        return min(1.0, (budget - self.fixed) / self.arena_full) if self.arena_full else 1.0


def expected_bytes(nbytes: float, resident: float) -> float:
    """Bytes that a token reads of `nbytes` that it uses, if this share of the experts is resident: tokens come back to their experts,
    and misses (1 - resident) squared, as the reference model has them under LRU."""
    return nbytes * max(1.0 - resident, 0.0) ** 2


def usual_share(size: Footprint, budget: int | None, arena: int | None) -> float:
    """Share of the experts that stay in memory within a budget of the process, or within an arena, in a process of the usual size: the
    same for the same bound, so that what is decided by it can be repeated."""
    return replace(size, process=_PROCESS).resident_share(budget) if budget is not None else min(1.0, (arena or 0) / size.arena_full)


def require_room(size: Footprint, budget: int) -> None:
    """Before anything is loaded: llama.cpp would first clear the whole KV cache, and be killed for it.

    Counts this process as it is, so that nothing is refused that would fit; `Plan.divide` has the last word once the model is loaded.

    Raises:
        BudgetError: weights, caches, buffers and the experts' floor exceed the budget; says what would fit.
    """
    if budget < size.floor - size.planned.work:  # ordinary experts would need more of it than those in an expert buffer
        # what is named as enough must be: with what the libraries will still allocate
        Plan.divide(budget, size.needs(size.process + _LIBRARIES), size.arena_floor, size.arena_full)


def slice_kinds(layout: Layout) -> list[SliceKind]:
    """The sizes slices come in, most frequent first."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for span in layout.experts.values():
        role, n_expert = parse_tensor_name(span.name), max(span.shape[2], 1)
        counts[role.matrix_name + (" (chexps)" if role.chunk else ""), span.type, span.nbytes // n_expert] += n_expert
    return [SliceKind(matrix, type_name(kind), nbytes, n) for (matrix, kind, nbytes), n in counts.most_common()]
