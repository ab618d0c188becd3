"""One pass over text that records each gate's input and selection, for fits.

Texts are evaluated in batches, one sequence after the other: a router selects the same experts for a token in a batch as
in decode, and a batch is many times faster. Bounded: gate inputs are kept of as many tokens as fit in LIMIT, evenly spread, and
probabilities of as many first ones; what was chosen is small.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..budget.memory_plan import MemoryPlan
from ..engine.llama import Llama
from ..errors import OptionError
from ..files import open_file
from ..gate_event import GateEvent
from ..gguf.model_index import EMBEDDING, ModelIndex
from ..memory import available, rss
from ..policies.recording import Recording
from ..policies.router import Router
from ..trace import TraceHeader
from .checkpoint import Checkpoint

__all__ = ["CalibrationEstimate", "LENGTH", "batch_size", "kept_bytes", "record", "recordable", "recording_bytes", "seconds_of", "sequences"]

Model = TypeVar("Model", bound=Llama)
LENGTH = 256  # tokens of a sequence
LIMIT = 1 << 30  # bytes of gate inputs, and of probabilities; no more than an eighth of what is available of each
_GOLDEN = (5**0.5 - 1) / 2  # the parts behind the point of its multiples fill an interval evenly
_OUTPUT_BYTES = 64 << 20  # of the logits that a batch makes, because the last layer sees only tokens whose logits are wanted


@dataclass(frozen=True)
class CalibrationEstimate:
    """Effort of a calibration, told before it starts.

    Attributes:
        n_tokens: that will be read.
        seconds: that this takes, as the first sequence took, or as the first steps of writing took.
        after: seconds that what comes after it takes: fits, as parts of them took that were tried, or what else is measured.
        nbytes: of memory, in addition to the model's, that is kept of them for the fits; 0: not known yet.
        written: the model writes them first, which is in `seconds`.
        resumed: part of it is there from before an interruption.
        n_fits: that follow.
    """

    n_tokens: int
    seconds: float
    nbytes: int
    written: bool = False
    resumed: bool = False
    n_fits: int = 0
    after: float = 0.0


def sequences(model: Llama, texts: Sequence[str | os.PathLike[str]], n_tokens: int, length: int = LENGTH) -> list[list[int]]:
    """Pieces of `length` tokens from all of each text, as many from each, about `n_tokens` in all; any first of them lie all over the texts.

    Raises:
        OptionError: a text is empty, or cannot be read.
    """
    per_text = max(round(n_tokens / length / len(texts)), 1)
    out = []
    for path in texts:
        found = []
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                for i in sorted(range(per_text), key=lambda piece: piece * _GOLDEN % 1):  # a fit may keep only the first tokens
                    piece = os.pread(file.fileno(), min(12 * length, -(-size // per_text)), size * i // per_text)
                    found.append(model.tokenize(piece.decode("utf-8", "ignore").encode(), add_bos=False)[:length])
        except OSError as error:
            raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
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
    """Computes a sequence; yields the number of tokens of each batch when its events are delivered."""
    with model.engine.cancellation.in_progress():
        model.clear_context()
        for i in range(0, len(tokens), model.n_batch):
            batch = tokens[i : i + model.n_batch]
            # all logits are requested: llama.cpp's last layers leave out the tokens whose logits are not
            model.decode_batch(batch, i)
            model.engine.buffer.drain()
            model.engine.buffer.check()
            yield len(batch)


@contextlib.contextmanager
def recordable(model_index: ModelIndex, kind: type[Model] = Llama, **options: Any) -> Iterator[tuple[Model, Router]]:  # type: ignore[assignment]
    """A model as `record` and `sequences` want it, and its routers.

    Args:
        kind: of `Llama`.
        options: of it.
    """
    embedding = model_index.dense.get(EMBEDDING)
    n_embd, n_vocab = embedding.shape[:2] if embedding else (4096, 1 << 17)
    batch = batch_size(n_vocab, n_embd)
    with contextlib.closing(kind(model_index.files[0], gate_input=True, n_ctx=LENGTH, n_batch=batch, n_ubatch=batch, **options)) as llm:
        layers, before = {t.gate: t.layer for t in llm.engine.buffer.tensors}, rss()
        router = Router.read(model_index, [layers[g] for g in sorted(layers)], llm.engine.buffer.priorities.shape[1])
        llm.engine.sizer.make_room(rss() - before)
        yield llm, router


def kept_bytes(plan: MemoryPlan | None = None) -> int:
    """The most that is kept of gate inputs, and of probabilities: an eighth of available memory each, and of what a model's budget leaves."""
    free = available() if plan is None or not plan.budget else min(plan.budget - plan.fixed - plan.arena_floor, available())
    return min(LIMIT, max(free, 0) // 8)


def seconds_of(model: Llama, tokens: list[int]) -> float:
    """Evaluates a sequence and returns how long that took."""
    started = time.monotonic()
    for _ in _evaluate(model, tokens):
        pass
    return time.monotonic() - started


def recording_bytes(model: Llama, router: Router, n_tokens: int, limit: int) -> int:
    """Bytes that `record` keeps of so many tokens, at most."""
    gates = len(model.engine.buffer.priorities)
    return n_tokens * gates * max(router.n_used) * 8 + sum(min(2 * n_tokens * gates * width, limit) for width in (model.n_embd(), router.n_experts))


def record(
    model: Llama, texts: Sequence[list[int]], router: Router, name: str, *, inputs: bool = True, limit: int | None = None,
    checkpoint: Checkpoint | None = None, progress: Callable[[int, int], None] | None = None,
) -> Recording:  # fmt: skip
    """Evaluates the sequences.

    Args:
        model: opened with `gate_input=True`; its batch size is used, its context must hold a sequence.
        inputs: keep gate inputs and probabilities.
        limit: bytes of each of these; None: `kept_bytes()`.
        checkpoint: has sequences of an interrupted recording with the same arguments, which are not evaluated again, and gets those that are.
        progress: called with tokens done and all.
    """
    buffer = model.engine.buffer
    header = TraceHeader.of(buffer, name, max(router.n_used))
    n, g, k, e = sum(map(len, texts)), header.n_gates, max(router.n_used), router.n_experts
    ids, weights = np.full((n, g, k), -1, np.int32), np.zeros((n, g, k), np.float32)
    kept: dict[str, np.ndarray] = {}
    at, limit, step = 0, kept_bytes() if limit is None else limit, 1

    def room(width: int) -> int:
        return max(limit // (2 * g * width), 1)

    def allocate(what: str, width: int) -> np.ndarray:
        nonlocal step
        if what not in kept:
            if what == "inputs":
                step = -(-n // room(width))
            kept[what] = np.zeros((min(-(-n // step) if what == "inputs" else n, room(width)), g, width), np.float16)
        return kept[what]

    def deliver(event: GateEvent) -> None:
        rows, used = event.ids.shape
        ids[at : at + rows, event.gate, :used], weights[at : at + rows, event.gate, :used] = event.ids, event.weights
        if inputs and event.gate_input is not None:
            place = allocate("inputs", event.gate_input.shape[1])
            keep(place, event.gate, -(-at // step), event.gate_input[-at % step :: step])
            if router.weights[event.gate] is not None:
                probs = router.probs(event.gate, event.gate_input)
                keep(allocate("probs", e), event.gate, at, np.pad(probs, ((0, 0), (0, e - probs.shape[1]))))

    def keep(all_rows: np.ndarray, gate: int, first: int, rows: np.ndarray) -> None:
        place = all_rows[first : first + len(rows), gate]
        place[:] = np.clip(rows[: len(place)], -65504, 65504)

    def parts(begin: int, end: int) -> dict[str, np.ndarray]:
        """Views of what belongs to these tokens."""
        found = {"ids": ids[begin:end], "weights": weights[begin:end]}
        for what, rows in kept.items():
            found[what] = rows[-(-begin // step) : -(-end // step)] if what == "inputs" else rows[begin:end]
        return found

    model.set_gate_callback(deliver)
    try:
        for i, tokens in enumerate(texts):
            done = checkpoint.load(f"sequence-{i}") if checkpoint else None
            begin, end = at, at + len(tokens)
            if done is not None:
                for what in ("inputs", "probs"):
                    if what in done:
                        allocate(what, done[what].shape[2])
                for what, place in parts(begin, end).items():
                    place[:] = done[what]
                at = end
            else:
                for n_batch in _evaluate(model, tokens):
                    at += n_batch
                    if progress:
                        progress(at, n)
                if checkpoint:
                    checkpoint.save(f"sequence-{i}", parts(begin, end))
            if progress:
                progress(at, n)
    finally:
        model.set_gate_callback(None)
        model.clear_context()
    starts = np.zeros(n, bool)
    starts[np.cumsum([0, *map(len, texts[:-1])])] = True
    return Recording(
        header, router, np.concatenate(texts).astype(np.int32), starts, ids, weights, kept.get("inputs"), kept.get("probs"),
        np.arange(0, n, step)[: len(kept.get("inputs", ()))],
    )  # fmt: skip
