"""How a memory budget is divided, and what to say when it cannot be."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BudgetError, Remedy
from ..memory import MIB, format_size

RESERVE = 16 * MIB  # for what cannot be measured before the first token: events and rows that wait, Python objects, sampler
_CTX_STEP = 256  # llama.cpp rounds contexts up to this


@dataclass(frozen=True)
class Needs:
    """What a loaded model takes beside its experts, in bytes, at a context of `n_ctx` tokens.

    Attributes:
        python: the process without the rest: interpreter, libraries, the app.
        weights: outside the experts, without what stays on disk.
        state: KV cache and recurrent state.
        compute, work, outputs: graph buffers, the CPU backend's work area and logits for the largest batch; resident only once
            such a batch has come.
        on_disk: of the token embedding, whose rows are read as they are used. Not in memory, and not in the total.
        kept: of a server, prompts outside the context, samplers, and other files that it loads.
    """

    python: int
    weights: int
    state: int
    compute: int
    work: int
    outputs: int
    n_ctx: int
    on_disk: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        return self.python + self.weights + self.state + self.computing + self.kept + RESERVE

    @property
    def computing(self) -> int:
        return self.compute + self.work + self.outputs


@dataclass(frozen=True)
class Pools:
    """What the arenas for high and low versions may take, in bytes. Without low versions the low side is 0.

    Attributes:
        floor, full: smallest arena for high versions, and the one that holds all.
        low_floor, low_full: the same of the low versions.
        low_share: of both together, for low versions, as far as floors and fulls allow.
    """

    floor: int
    full: int
    low_floor: int = 0
    low_full: int = 0
    low_share: float = 0.0

    def split(self, arena: int) -> tuple[int, int]:
        """Arenas for high and low versions, together at most `arena`, which is at least both floors."""
        low = max(min(int(arena * self.low_share), self.low_full), self.low_floor)
        high = max(min(arena - low, self.full), self.floor)
        return high, min(arena - high, self.low_full)


@dataclass(frozen=True)
class Plan:
    """A budget and the arena (high and low versions together) that it leaves for experts, in bytes. A budget of 0: only the arena is bounded."""

    budget: int
    needs: Needs
    arena: int
    arena_floor: int

    def items(self, embedding: int = 0) -> dict[str, int]:
        """Bytes of each thing that the process holds or plans for, by name.

        Args:
            embedding: of the weights, the token embedding.
        """
        n = self.needs
        embedding = min(embedding, n.weights)
        return {
            "python": n.python,
            "token_embedding": embedding,
            "weights": n.weights - embedding,
            "state": n.state,
            "compute_buffers": n.compute,
            "work_area": n.work,
            "outputs": n.outputs,
            **({"kept_prompts": n.kept} if n.kept else {}),
            "reserve": RESERVE,
            "experts": self.arena,
        }

    @classmethod
    def divide(cls, budget: int, needs: Needs, arena_floor: int, arena_full: int) -> Plan:
        """Gives the experts what the rest leaves, at most what holds all of them.

        Raises:
            BudgetError: less than their floor is left; its facts are what the model needs and what would fit.
        """
        arena = budget - needs.total
        if arena < arena_floor:
            raise _refusal(budget, needs, arena_floor)
        return cls(budget, needs, min(arena, arena_full), arena_floor)


def _refusal(budget: int, needs: Needs, arena_floor: int) -> BudgetError:
    needed = needs.total + arena_floor
    # the state shrinks with the context, and the compute buffers do not grow
    n_ctx = (needs.n_ctx - (needed - budget) * needs.n_ctx // max(needs.state, 1)) // _CTX_STEP * _CTX_STEP
    kept = f"{format_size(needs.kept)} for kept prompts, samplers and other files, " if needs.kept else ""
    remedy = Remedy.MORE_MEMORY_OR_SMALLER_CONTEXT if n_ctx >= _CTX_STEP else Remedy.MORE_MEMORY
    return BudgetError(
        f"a budget of {format_size(budget)} is too small: this model needs {format_size(needed)}: "
        f"{format_size(needs.weights)} for weights outside the experts, {format_size(needs.state)} for the KV cache at {needs.n_ctx} tokens, "
        f"{format_size(needs.computing)} for computing, {kept}{format_size(needs.python + RESERVE)} for Python and a reserve, "
        f"and at least {format_size(arena_floor)} for experts",
        remedy,
        needed=needed,
        n_ctx=n_ctx,
    )
