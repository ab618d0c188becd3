"""One pass over text that records each gate's input and selection, for fits.

Texts are evaluated in batches, one sequence after the other: a router selects the same experts for a token in a batch as
in decode, and a batch is many times faster. Bounded: gate inputs are kept of as many tokens as fit in LIMIT, evenly spread, and
probabilities of as many first ones; what was chosen is small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..engine.llama import Llama
from ..errors import OptionError
from ..gate_event import GateEvent
from ..memory import available
from ..predict.recording import Recording
from ..predict.router import Router
from ..simulate.trace import Model

__all__ = ["LENGTH", "batch_size", "record", "recording_bytes", "seconds_of", "sequences"]

LENGTH = 256  # tokens of a sequence
LIMIT = 1 << 30  # bytes of gate inputs, and of probabilities; no more than an eighth of what is available of each
_GOLDEN = (5**0.5 - 1) / 2  # the parts behind the point of its multiples fill an interval evenly
_OUTPUT_BYTES = 64 << 20  # of the logits that a batch makes, because the last layer sees only tokens whose logits are wanted


def sequences(model: Llama, texts: Sequence[str | os.PathLike[str]], n_tokens: int, length: int = LENGTH) -> list[list[int]]:
    """Pieces of `length` tokens from all of each text, as many from each, about `n_tokens` in all; any first of them lie all over the texts.

    Raises:
        OptionError: a text is empty, or cannot be read.
    """
    per_text = max(round(n_tokens / length / len(texts)), 1)
    out = []
    for path in texts:
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError as error:
            raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
        found = []
        for i in sorted(range(per_text), key=lambda piece: piece * _GOLDEN % 1):  # a fit may keep only the first tokens
            at = len(text) * i // per_text
            piece = text[at : at + min(12 * length, -(-len(text) // per_text))].decode("utf-8", "ignore").encode()
            found.append(model.tokenize(piece, add_bos=False)[:length])
        found = [tokens for tokens in found if len(tokens) > 1]
        if not found:
            raise OptionError(f"{os.fspath(path)}: holds no text to calibrate on")
        out.append(found)
    # the texts in turn, for the same reason
    return [found[i] for i in range(per_text) for found in out if i < len(found)]


def batch_size(n_vocab: int, n_embd: int, length: int = LENGTH) -> int:
    """Tokens of a batch: logits and one gate's event stay small."""
    return int(max(min(length, _OUTPUT_BYTES // (4 * n_vocab), (1 << 20) // (4 * max(n_embd, 1))), 16))


def _evaluate(model: Llama, tokens: list[int]) -> Iterator[int]:
    """Of a sequence, the tokens of each batch when it has been computed and its events are delivered."""
    model.clear_context()
    for i in range(0, len(tokens), model.n_batch):
        batch = tokens[i : i + model.n_batch]
        # all logits are requested: llama.cpp's last layers leave out the tokens whose logits are not
        model.decode_batch(batch, i)
        model.expert_buffer.drain()
        model.expert_buffer.check()
        yield len(batch)


def _limit() -> int:
    return min(LIMIT, available() // 8)


def seconds_of(model: Llama, tokens: list[int]) -> float:
    """What one sequence takes: evaluates it."""
    started = time.monotonic()
    for _ in _evaluate(model, tokens):
        pass
    return time.monotonic() - started


def recording_bytes(model: Llama, router: Router, n_tokens: int, n_embd: int) -> int:
    """What `record` keeps of so many tokens, at most."""
    gates = len(model.expert_buffer.priorities)
    return n_tokens * gates * max(router.n_used) * 8 + sum(min(2 * n_tokens * gates * width, _limit()) for width in (n_embd, router.n_experts))


def record(
    model: Llama, texts: Sequence[list[int]], router: Router, name: str, *, inputs: bool = True, progress: Callable[[int, int], None] | None = None
) -> Recording:
    """Evaluates the sequences.

    Args:
        model: opened with `gate_input=True`; its batch size is used, its context must hold a sequence.
        inputs: keep gate inputs and probabilities.
        progress: called with tokens done and all.
    """
    buffer = model.expert_buffer
    header = Model.of(buffer, name, max(router.n_used))
    n, g, k, e = sum(map(len, texts)), header.n_gates, max(router.n_used), router.n_experts
    ids, weights = np.full((n, g, k), -1, np.int32), np.zeros((n, g, k), np.float32)
    kept: dict[str, np.ndarray] = {}
    at, limit, step = 0, _limit(), 1

    def room(width: int) -> int:
        return max(limit // (2 * g * width), 1)

    def keep(what: str, gate: int, first: int, rows: np.ndarray) -> None:
        if what not in kept:
            kept[what] = np.zeros((min(-(-n // step) if what == "inputs" else n, room(rows.shape[1])), g, rows.shape[1]), np.float16)
        place = kept[what][first : first + len(rows), gate]
        place[:] = np.clip(rows[: len(place)], -65504, 65504)

    def deliver(event: GateEvent) -> None:
        nonlocal step
        rows, used = event.ids.shape
        ids[at : at + rows, event.gate, :used], weights[at : at + rows, event.gate, :used] = event.ids, event.weights
        if inputs and event.gate_input is not None:
            if "inputs" not in kept:
                step = -(-n // room(event.gate_input.shape[1]))
            keep("inputs", event.gate, -(-at // step), event.gate_input[-at % step :: step])
            if router.weights[event.gate] is not None:
                probs = router.probs(event.gate, event.gate_input)
                keep("probs", event.gate, at, np.pad(probs, ((0, 0), (0, e - probs.shape[1]))))

    model.set_gate_callback(deliver)
    try:
        for tokens in texts:
            for n_batch in _evaluate(model, tokens):
                at += n_batch
                if progress:
                    progress(at, n)
    finally:
        model.set_gate_callback(None)
        model.clear_context()
    starts = np.zeros(n, bool)
    starts[np.cumsum([0, *map(len, texts[:-1])])] = True
    return Recording(
        header,
        router,
        np.concatenate(texts).astype(np.int32),
        starts,
        ids,
        weights,
        kept.get("inputs"),
        kept.get("probs"),
        np.arange(0, n, step)[: len(kept.get("inputs", ()))],
    )
