"""What a server remembers of conversations outside the context: prompts that have lost their slot, and states to go back to.

Both are taken from the experts' memory, prompts when they come. A prompt that has to be computed again reads nearly every expert, and so costs more than the misses
that a few experts less cost in every answer; an eighth of the experts' memory is the bound all the same, because most servers have fewer
conversations than slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..budget.plan import MemoryPlan
from ..options import ServerOptions
from ..system.memory import MIB

_SHARE = 8  # of what experts would have, the part that is taken at most
_CHECKPOINTS = 8  # of each answer, where they fit: of the last turns, and of a long prompt's parts


@dataclass(frozen=True)
class KeptPrompts:
    """Bounds, in bytes.

    Attributes:
        cache_ram: of prompts outside the context.
        n_checkpoints: of each answer.
        checkpoint: of one.
        n_slots: answers at a time.
    """

    cache_ram: int = 0
    n_checkpoints: int = 0
    checkpoint: int = 0
    n_slots: int = 1

    @property
    def checkpoints(self) -> int:
        """Bytes that are taken from the experts before anything is computed."""
        return self.n_checkpoints * self.checkpoint * self.n_slots

    @classmethod
    def of(cls, planned: MemoryPlan, room: int, sequence: int, n_slots: int, options: ServerOptions) -> KeptPrompts:
        """What was asked for, or else what fits.

        Args:
            planned: without any of it.
            room: bytes for experts and this.
            sequence: bytes of the state that each answer has of its own, whatever it is long: recurrent, or a sliding window's.
            n_slots: answers at a time.
        """
        spare = max(room - planned.arena_full, room // _SHARE, 0)
        n_checkpoints, checkpoint = 0, sequence
        if options.ctx_checkpoints is not None:
            n_checkpoints = options.ctx_checkpoints
        elif sequence:
            n_checkpoints = min(_CHECKPOINTS, spare // (sequence * n_slots))
        # a cache that holds the whole context once more
        tokens = max(planned.state - sequence * n_slots, 0)
        cache_ram = options.cache_ram
        if cache_ram is None:
            cache_ram = min(tokens + sequence * n_slots, max(spare - n_checkpoints * sequence * n_slots, 0)) // MIB * MIB
        return cls(cache_ram, n_checkpoints, checkpoint, n_slots)
