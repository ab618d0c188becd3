"""How many tokens of a prompt are computed at once: llama.cpp's micro-batch.

With experts on disk each micro-batch reads every expert that it needs once, and of hundreds of tokens some need nearly each of
them: a prompt of 4,096 tokens in pieces of 512 reads the model eight times. Larger pieces read less, but their compute buffers
take memory that the experts lose. Knows rates and sizes, no running model.

The choice is made once, when a model is opened: results depend on the size of the pieces in their last bits, so it must not
change from one answer to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..memory import format_size

USUAL = 512  # llama.cpp's default, and what is taken where nothing has been measured
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
_PROMPT = 4096  # tokens of the prompt that a choice is made for, if the context holds as many
_LARGEST_SHARE = 0.125  # of what weights and state leave, that compute buffers may take
_WORTH = 0.97  # a larger piece is taken if it takes at most so much of the time


@dataclass(frozen=True)
class PromptRates:
    """What a prompt took on this machine.

    Attributes:
        token_seconds: of computing one token, without waiting for experts.
        bytes_per_second: of the I/O workers' reads.
    """

    token_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class MicroBatch:
    """A number of tokens, and why it was chosen."""

    n_tokens: int
    reason: str


def choose(n_ctx: int, room: int, expert_bytes: int, compute_bytes: Callable[[int], int], rates: PromptRates | None) -> MicroBatch:
    """The micro-batch that a memory budget allows and that takes the least time.

    Args:
        n_ctx: tokens of the context.
        room: bytes of the budget that weights and state leave for experts and compute buffers.
        expert_bytes: of all experts.
        compute_bytes: of the buffers for so many tokens.
        rates: of an earlier prompt; None: nothing has been measured.
    """
    sizes = [n for n in SIZES if n < n_ctx] + [n_ctx] if n_ctx < SIZES[-1] else list(SIZES)
    fitting = [n for n in sizes if compute_bytes(n) <= _LARGEST_SHARE * room] or sizes[:1]
    usual = max((n for n in fitting if n <= USUAL), default=fitting[0])
    if rates is None:
        if usual < min(USUAL, n_ctx):
            return MicroBatch(usual, f"the largest whose buffers ({format_size(compute_bytes(usual))}) leave the experts most of the memory")
        return MicroBatch(usual, "the usual one; nothing has been measured yet")
    n_prompt = min(_PROMPT, n_ctx)

    def seconds(n: int) -> float:
        missed = max(expert_bytes - max(room - compute_bytes(n), 0), 0)
        return max(n_prompt * rates.token_seconds, -(-n_prompt // n) * missed / rates.bytes_per_second)

    best = usual
    for n in fitting:
        if n > best and seconds(n) < _WORTH * seconds(best):
            best = n
    said = f"{n_prompt} tokens take {seconds(best):.1f} s"
    return MicroBatch(best, said if best == usual else f"{said}, in pieces of {usual} {seconds(usual):.1f} s")
